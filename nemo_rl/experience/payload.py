"""Converts rollouts to columns of the data plane, and makes the small per-row record that the driver carries.

Called by the rollout worker. Invariant: nothing per token is in `SampleStats`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.jagged import nest
from nemo_rl.models.generation.interfaces import GenerationOutput
from nemo_rl.models.support import SUPPORT
from nemo_rl.utils.rollout_file import rounded

__all__ = ["VERSION_SPANS", "SampleStats", "build_columns", "mean_of_scored", "row_record", "version_span_column"]

VERSION_SPANS = "version_spans"
"""Column of asynchronous runs: which version of the weights drew which tokens of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStats:
    """Per-row scalars that the driver needs for advantages, filters and metrics.

    Rows are those of their meta, whose keys name their groups and whose tags their weight versions.
    """

    rewards: np.ndarray
    """`[N]` float32."""
    truncated: np.ndarray
    """`[N]` bool."""
    response_lengths: np.ndarray
    """`[N]` int32, tokens."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """`[N]` float32 each: parts of the reward by name, before their weights; NaN for a row that was not scored."""

    def __len__(self) -> int:
        return len(self.rewards)

    def select(self, rows: Sequence[int]) -> SampleStats:
        """The same columns at `rows`, in that order."""
        index = np.asarray(rows, dtype=np.int64)
        return SampleStats(
            rewards=self.rewards[index],
            truncated=self.truncated[index],
            response_lengths=self.response_lengths[index],
            components={name: part[index] for name, part in self.components.items()},
        )

    def concat(self, *others: SampleStats) -> SampleStats:
        """Rows of this one, then those of the others, also of other steps; a component that some lack is NaN there."""
        parts = (self, *others)
        names = dict.fromkeys(name for part in parts for name in part.components)
        return SampleStats(
            rewards=np.concatenate([part.rewards for part in parts]),
            truncated=np.concatenate([part.truncated for part in parts]),
            response_lengths=np.concatenate([part.response_lengths for part in parts]),
            components={name: np.concatenate([part._component(name) for part in parts]) for name in names},
        )

    def _component(self, name: str) -> np.ndarray:
        found = self.components.get(name)
        return np.full(len(self), math.nan, dtype=np.float32) if found is None else found


def build_columns(
    prompt_ids: Sequence[Sequence[int]], output: GenerationOutput, *, group_size: int, pad_token_id: int
) -> BatchedDataDict:
    """The columns of the rollout stage, right-padded.

    Args:
        prompt_ids: P prompts.
        output: P * group_size responses, prompt by prompt.

    Returns:
        `input_ids` [N, T] int32, `token_mask` [N, T] bool (response tokens), `generation_logprobs` [N, T] float32
        (0 on the prompt), `input_lengths` [N] int32, `sample_mask` [N] float32 ones; where the engine has recorded it
        `sampling_support` [N, (bytes)] uint8.
    """
    prompt_lengths = torch.tensor([len(ids) for ids in prompt_ids]).repeat_interleave(group_size)
    lengths = prompt_lengths + output.lengths
    num_rows, width = len(lengths), int(lengths.max()) if len(lengths) else 0
    position = torch.arange(width)
    is_prompt = position < prompt_lengths[:, None]
    is_response = (position < lengths[:, None]) & ~is_prompt
    input_ids = torch.full((num_rows, width), pad_token_id, dtype=torch.int32)
    flat_prompts = torch.tensor([token for ids in prompt_ids for _ in range(group_size) for token in ids])
    input_ids[is_prompt] = flat_prompts.to(torch.int32)
    input_ids[is_response] = output.token_ids.to(torch.int32)
    logprobs = torch.zeros(num_rows, width)
    logprobs[is_response] = output.logprobs.float()
    columns = BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": lengths.to(torch.int32),
            "token_mask": is_response,
            "generation_logprobs": logprobs,
            "sample_mask": torch.ones(num_rows),
        }
    )
    if output.support is not None:
        columns[SUPPORT] = nest(torch.cat(output.support), torch.tensor([len(row) for row in output.support]))
    return columns


def version_span_column(output: GenerationOutput) -> torch.Tensor:
    """Return jagged `[N, (spans), 2]` int32: the first token of the response that a version drew, and the version."""
    spans = [torch.tensor(row, dtype=torch.int32) for row in output.row_spans]
    return nest(torch.cat(spans), torch.tensor([len(row) for row in spans]))


def mean_of_scored(component: np.ndarray) -> float:
    """Mean of a component over the rows that were scored; NaN where there is none."""
    scored = component[~np.isnan(component)]
    return float(np.mean(scored)) if len(scored) else math.nan


def row_record(
    *, reward: float, components: Mapping[str, float], response_tokens: int, truncated: bool
) -> dict[str, object]:
    """Return what readable rollouts say of a row besides its texts; a component without a score is None."""
    parts = {name: None if math.isnan(part) else rounded(part) for name, part in components.items()}
    return {
        "reward": rounded(reward),
        **({"components": parts} if parts else {}),
        "response_tokens": int(response_tokens),
        "truncated": bool(truncated),
        "finish_reason": "length" if truncated else "stop",
    }
