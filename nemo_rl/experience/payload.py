"""Converts rollouts to columns of the data plane, and makes the small per-row record that the driver carries.

Called by the rollout worker. Invariant: nothing per token is in `SampleStats`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import DataConfig, ExtraColumn
from nemo_rl.config.env import Ending
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.data_plane.column_io import extra_names, extra_specs, extra_values, read_columns, rows_as_list
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.keys import group_uid
from nemo_rl.data_plane.schema import FieldSpec, extra_field
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.environments.interfaces import ending_of
from nemo_rl.errors import ConfigError, WorkerError
from nemo_rl.experience.conversation_attempt import ConversationRecord
from nemo_rl.experience.conversation_log import CONVERSATION, ConversationLog, logs_of_column, turn_lines
from nemo_rl.experience.token_row import TokenRow
from nemo_rl.jagged import nest
from nemo_rl.models.generation.interfaces import GenerationOutput
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.vision import PromptImages, vision_columns
from nemo_rl.utils.metrics import Max, Mean, Reduction, Sum
from nemo_rl.utils.rollout_file import (
    PROMPT_NUMBER,
    TokenTexts,
    asked_texts,
    rounded,
    row_texts,
    token_record,
    write_rollouts,
)

__all__ = [
    "TURNS",
    "VERSION_SPANS",
    "ConversationStats",
    "LineWriter",
    "SampleStats",
    "add_extras",
    "add_images",
    "build_columns",
    "columns_of_conversations",
    "columns_of_rows",
    "component_columns",
    "group_metrics",
    "image_specs",
    "left_out_metrics",
    "logged_extras",
    "logs_of_rows",
    "mean_of_scored",
    "row_record",
    "run_extras",
    "single_turns",
    "version_span_column",
]

VERSION_SPANS = "version_spans"
"""Column of asynchronous runs: which version of the weights drew which tokens of a row."""
TURNS, TURN_REWARDS = "turns", "turn_rewards"
"""Columns of conversations: the spans of the sampled turns, and the reward of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationStats:
    """Per-row scalars of conversations; a conversation may have several rows.

    Example:
        Two conversations of a group, the second in two rows, the first left out: `sample=[0, 1, 1]`,
        `is_scored=[False, True, True]`.
    """

    sample: np.ndarray
    """`[N]` int32, number of the row's conversation in its group."""
    is_scored: np.ndarray
    """`[N]` bool; False: the row is in no statistic and not trained."""
    endings: np.ndarray
    """`[N]` uint8, place of the conversation's `Ending` in the enum."""
    num_turns: np.ndarray
    """`[N]` int32, turns of the conversation."""
    is_void: np.ndarray
    """`[N]` bool: the row has no weight, though it counts for the baseline, for a turn without text and without a call
    (`experience.conversation.drop_void_turns`)."""

    def select(self, rows: np.ndarray) -> ConversationStats:
        """Return the same columns at `rows`."""
        return ConversationStats(**{each.name: self._column(each.name)[rows] for each in fields(self)})

    def concat(self, *others: ConversationStats) -> ConversationStats:
        parts = (self, *others)
        return ConversationStats(
            **{each.name: np.concatenate([part._column(each.name) for part in parts]) for each in fields(self)}
        )

    def to_json(self) -> dict[str, list[Any]]:
        """Return the columns as lists by their names, endings as their words."""
        found = {each.name: self._column(each.name).tolist() for each in fields(self)}
        return found | {"endings": [self.ending_of(row).value for row in range(len(self.endings))]}

    @classmethod
    def from_json(cls, record: Mapping[str, Sequence[Any]]) -> ConversationStats:
        """Return the columns of `to_json`.

        Raises:
            KeyError, ValueError: a column is missing, or a value is none of it.
        """
        endings = list(Ending)
        return cls(
            sample=np.asarray(record["sample"], dtype=np.int32),
            is_scored=np.asarray(record["is_scored"], dtype=np.bool_),
            endings=np.asarray([endings.index(Ending(word)) for word in record["endings"]], dtype=np.uint8),
            num_turns=np.asarray(record["num_turns"], dtype=np.int32),
            is_void=np.asarray(record["is_void"], dtype=np.bool_),
        )

    def _column(self, name: str) -> np.ndarray:
        return getattr(self, name)

    def ending_of(self, row: int) -> Ending:
        return list(Ending)[int(self.endings[row])]


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
    conversations: ConversationStats | None = None
    """Facts about conversations; None where every row is one response to one prompt."""
    leaves_none: bool = False
    """True: a component that is NaN beside others was None (`env.on_none`), and has no part in its statistics."""

    def __len__(self) -> int:
        return len(self.rewards)

    def select(self, rows: Sequence[int]) -> SampleStats:
        """The same columns at `rows`, in that order."""
        index = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            rewards=self.rewards[index],
            truncated=self.truncated[index],
            response_lengths=self.response_lengths[index],
            components={name: part[index] for name, part in self.components.items()},
            conversations=None if self.conversations is None else self.conversations.select(index),
        )

    def concat(self, *others: SampleStats) -> SampleStats:
        """Rows of this one, then those of the others, also of other steps; a component that some lack is NaN there."""
        parts, about = (self, *others), [other.conversations for other in others]
        names = dict.fromkeys(name for part in parts for name in part.components)
        return replace(
            self,
            rewards=np.concatenate([part.rewards for part in parts]),
            truncated=np.concatenate([part.truncated for part in parts]),
            response_lengths=np.concatenate([part.response_lengths for part in parts]),
            components={name: np.concatenate([part._component(name) for part in parts]) for name in names},
            conversations=self.conversations and self.conversations.concat(*filter(None, about)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the columns as lists by their names; floats keep every bit."""
        return {
            "rewards": self.rewards.tolist(),
            "truncated": self.truncated.tolist(),
            "response_lengths": self.response_lengths.tolist(),
            "components": {name: part.tolist() for name, part in self.components.items()},
            "conversations": None if self.conversations is None else self.conversations.to_json(),
            **({"leaves_none": True} if self.leaves_none else {}),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SampleStats:
        """Return the columns of `to_json`; a record without `conversations` is one of single turns.

        Raises:
            KeyError, TypeError, ValueError: a column is missing, or a value is none of it.
        """
        conversations = record.get("conversations")
        return cls(
            rewards=np.asarray(record["rewards"], dtype=np.float32),
            truncated=np.asarray(record["truncated"], dtype=np.bool_),
            response_lengths=np.asarray(record["response_lengths"], dtype=np.int32),
            components={name: np.asarray(part, dtype=np.float32) for name, part in record["components"].items()},
            conversations=None if conversations is None else ConversationStats.from_json(conversations),
            leaves_none=bool(record.get("leaves_none")),
        )

    @property
    def is_scored(self) -> np.ndarray:
        """Return `[N]` bool: the row has a reward that counts."""
        return np.ones(len(self), dtype=np.bool_) if self.conversations is None else self.conversations.is_scored

    def _component(self, name: str) -> np.ndarray:
        found = self.components.get(name)
        return np.full(len(self), math.nan, dtype=np.float32) if found is None else found


def single_turns(unscored: Sequence[str], truncated: np.ndarray, *, group_size: int) -> ConversationStats:
    """Return the columns of responses to one prompt each, some of which have no reward. Rows of a group with fewer than
    two rewards are not scored: nothing can be compared there.

    Args:
        unscored: the reason of each row without a reward; empty texts for the others. Empty: all have one.
    """
    count, reasons = len(truncated), unscored or [""] * len(truncated)
    is_scored = np.asarray([not why for why in reasons], dtype=np.bool_)
    counts = is_scored & np.repeat(is_scored.reshape(-1, group_size).sum(1) >= min(2, group_size), group_size)
    endings = [Ending.TOKEN_LIMIT if cut else Ending.ANSWERED for cut in truncated]
    found = [ending_of(why) if why else ending for why, ending in zip(reasons, endings, strict=True)]
    return ConversationStats(
        sample=np.tile(np.arange(group_size, dtype=np.int32), count // group_size),
        is_scored=counts,
        endings=np.asarray([list(Ending).index(ending) for ending in found], dtype=np.uint8),
        num_turns=np.ones(count, dtype=np.int32),
        is_void=np.zeros(count, dtype=np.bool_),
    )


def left_out_metrics(stats: SampleStats) -> dict[str, Reduction]:
    """Return what is logged of single turns without a reward; nothing where all have one."""
    about = stats.conversations
    if about is None:
        return {}
    found: dict[str, Reduction] = {"left_out_rows": Sum(float((~about.is_scored).sum()))}
    endings = [about.ending_of(row) for row in range(len(stats))]
    unscored = [each for each in (Ending.JUDGE_ERROR, Ending.NO_REWARD) if each in endings]
    return found | {f"ending/{each.value}": Sum(float(endings.count(each))) for each in unscored}


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
    position = torch.arange(int(lengths.max()) if len(lengths) else 0)
    is_context = position < prompt_lengths[:, None]
    context = torch.tensor([token for ids in prompt_ids for _ in range(group_size) for token in ids])
    columns = _dense(
        lengths,
        is_sampled=(position < lengths[:, None]) & ~is_context,
        is_context=is_context,
        context=context,
        sampled=output.token_ids,
        logprobs=output.logprobs,
        pad_token_id=pad_token_id,
    )
    if output.support is not None:
        columns[SUPPORT] = nest(torch.cat(output.support), torch.tensor([len(row) for row in output.support]))
    return columns


def columns_of_rows(rows: Sequence[TokenRow], *, pad_token_id: int, with_versions: bool = False) -> BatchedDataDict:
    """Return the columns of the rollout stage for rows of conversations, right-padded.

    Args:
        rows: at least one; a row may have no turn, and then no token in its mask.
        with_versions: add the column `version_spans`.

    Returns:
        As `build_columns`, with holes in `token_mask`; also `turns`, jagged [N, (turns), 3] int32: the position of a
        turn's first token in the row, its sampled tokens, and its number in the conversation; `turn_rewards`, jagged
        [N, (turns)] float32; and of `version_spans` the first token, counted over the sampled tokens of the row, with
        its version.

    Raises:
        WorkerError: the engines have recorded sampling masks of some turns only.
    """
    lengths = torch.tensor([len(row) for row in rows])
    is_sampled = torch.zeros(len(rows), int(lengths.max()), dtype=torch.bool)
    for number, row in enumerate(rows):
        for turn in row.turns:
            is_sampled[number, turn.start : turn.start + turn.length] = True
    is_context = (torch.arange(is_sampled.shape[1]) < lengths[:, None]) & ~is_sampled
    columns = _dense(
        lengths,
        is_sampled=is_sampled,
        is_context=is_context,
        context=torch.tensor([token for row in rows for token in row.context_tokens]),
        sampled=torch.tensor([token for row in rows for token in row.sampled_tokens]),
        logprobs=torch.cat([row.sampled_logprobs for row in rows]),
        pad_token_id=pad_token_id,
    )
    num_turns = torch.tensor([len(row.turns) for row in rows])
    turns = [(turn.start, turn.length, turn.number) for row in rows for turn in row.turns]
    columns[TURNS] = nest(torch.tensor(turns, dtype=torch.int32).reshape(-1, 3), num_turns)
    rewards = [reward for row in rows for reward in row.rewards]
    columns[TURN_REWARDS] = nest(torch.tensor(rewards, dtype=torch.float32), num_turns)
    if with_versions:
        spans = [span for row in rows for span in row.version_spans]
        num_spans = torch.tensor([len(row.version_spans) for row in rows])
        columns[VERSION_SPANS] = nest(torch.tensor(spans, dtype=torch.int32).reshape(-1, 2), num_spans)
    support = [row.support for row in rows]
    if any(part is not None for part in support):
        parts = [torch.empty(0, dtype=torch.uint8) if part is None else part for part in support]
        if any(part is None and row.turns for part, row in zip(support, rows, strict=True)):
            raise WorkerError("expected sampling masks of all rows or of none, got some", stage="rollout")
        columns[SUPPORT] = nest(torch.cat(parts), torch.tensor([len(part) for part in parts]))
    return columns


def _dense(
    lengths: torch.Tensor,
    *,
    is_sampled: torch.Tensor,
    is_context: torch.Tensor,
    context: torch.Tensor,
    sampled: torch.Tensor,
    logprobs: torch.Tensor,
    pad_token_id: int,
) -> BatchedDataDict:
    """Return the columns of rows whose tokens are given in two runs, in the order of rows and positions.

    Args:
        lengths: `[N]`.
        is_sampled: `[N, T]` bool; so is `is_context`, the other tokens of the rows.
        context: ids where `is_context`.
        sampled: ids where `is_sampled`; so are `logprobs`.
    """
    input_ids = torch.full(is_sampled.shape, pad_token_id, dtype=torch.int32)
    input_ids[is_context] = context.to(torch.int32)
    input_ids[is_sampled] = sampled.to(torch.int32)
    dense_logprobs = torch.zeros(is_sampled.shape)
    dense_logprobs[is_sampled] = logprobs.float()
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": lengths.to(torch.int32),
            "token_mask": is_sampled,
            "generation_logprobs": dense_logprobs,
            "sample_mask": torch.ones(len(lengths)),
        }
    )


IMAGE_PASSES = tuple(each.value for each in WorkerPass)
"""Passes that read the images of rows: every one of the model."""


def run_extras(data: DataConfig, policy: PolicyConfig) -> tuple[FieldSpec, ...]:
    """Return the columns that the rollout of a run writes besides those of the table of fields.

    Raises:
        ConfigError: a column has the name of another one.
    """
    return (*extra_specs(data.extra_columns), *image_specs(data, policy))


def image_specs(data: DataConfig, policy: PolicyConfig) -> tuple[FieldSpec, ...]:
    """Return the columns with the images of prompts; empty where prompts have none."""
    if not data.has_images:
        return ()
    columns = vision_columns(load_model_config(policy.model_name))
    if taken := [column.name for column in columns if column.name in data.extra_columns]:
        raise ConfigError([f"data.extra_columns.{name}: a column of images has this name" for name in taken])
    return tuple(
        extra_field(
            column.name, dtypes=(column.dtype,), dims=(f"{column.name}_rows", *column.dims), read_by=IMAGE_PASSES
        )
        for column in columns
    )


def add_images(
    columns: BatchedDataDict, specs: Sequence[FieldSpec], images: Sequence[PromptImages | None], *, group_size: int
) -> None:
    """Add the images of prompts to the columns of a rollout.

    Args:
        specs: of `image_specs`.
        images: one per prompt, None for one without; empty where no prompt has any.
        group_size: rows of each prompt, which have the same images.
    """
    rows = len(columns.tensor("input_lengths"))
    of_row = [image for image in images for _ in range(group_size)] if images else [None] * rows
    for spec in specs:
        sizes = [size for size in spec.dims[1:] if isinstance(size, int)]
        nothing = torch.zeros(0, *sizes, dtype=vars(torch)[spec.dtypes[0]])
        parts = [nothing if image is None else image.tensors[spec.name] for image in of_row]
        columns[spec.name] = nest(torch.cat(parts), torch.tensor([len(part) for part in parts], dtype=torch.int64))


def add_extras(
    columns: BatchedDataDict,
    specs: Sequence[FieldSpec],
    prompts: Sequence[Prompt],
    *,
    declared: Mapping[str, ExtraColumn],
    given: Mapping[str, Sequence[object]],
) -> None:
    """Add the declared extra columns to those of the rollout.

    Args:
        prompts: one per row.
        given: values of the environment by the names of columns, one per row; None has a row that was left out.

    Raises:
        ConfigError: a prompt or the environment lacks a column, or a value does not fit its declaration.
    """
    lengths = columns.tensor("input_lengths").tolist()
    for spec in specs:
        key = f"data.extra_columns.{spec.name}"
        if declared[spec.name].source == "prompt":
            values = [_of_prompt(prompt, spec, key) for prompt in prompts]
        else:
            if len(given.get(spec.name, ())) != len(prompts):
                raise ConfigError(
                    f"{key}: expected {len(prompts)} values from the environment (EnvReport.columns), got "
                    f"{len(given[spec.name]) if spec.name in given else 'none'}"
                )
            values = list(given[spec.name])
        columns[spec.name] = extra_values(spec, values, lengths=lengths, where=key)


def columns_of_conversations(
    rows: Sequence[ConversationRecord], specs: Sequence[FieldSpec]
) -> dict[str, Sequence[object]]:
    """Return the values that environments gave with their replies, by the names of columns.

    Args:
        rows: the conversation of each row; one that has no outcome has zeros.
    """

    def value(record: ConversationRecord, spec: FieldSpec) -> object:
        if spec.name in record.columns or record.is_scored or spec.is_object:
            return record.columns.get(spec.name)
        sizes = [size if isinstance(size, int) else 0 for size in spec.dims]
        return torch.zeros(sizes, dtype=vars(torch)[spec.dtypes[0]])

    return {spec.name: [value(record, spec) for record in rows] for spec in specs}


def logged_extras(client: DataPlaneClient, meta: KVBatchMeta, specs: Sequence[FieldSpec]) -> list[dict[str, object]]:
    """Return the extra columns of each row that readable rollouts hold; tensors as nested lists."""
    names = extra_names(specs, "log")
    if not names:
        return [{} for _ in meta.keys]
    found = client.get_data(meta, names)
    columns = {name: rows_as_list(found.get(name)) for name in names}
    rows = [{name: column[row] for name, column in columns.items()} for row in range(len(meta.keys))]
    return [
        {"extras": {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}}
        for row in rows
    ]


def _of_prompt(prompt: Prompt, spec: FieldSpec, key: str) -> object:
    if spec.name not in prompt.metadata and not spec.is_object:
        known = ", ".join(map(str, prompt.metadata)) or "no other columns"
        raise ConfigError(f"{key}: {prompt.place or f'prompt {prompt.index}'}: no such column; the row has {known}")
    return prompt.metadata.get(spec.name)


def version_span_column(output: GenerationOutput) -> torch.Tensor:
    """Return jagged `[N, (spans), 2]` int32: the first token of the response that a version drew, and the version."""
    spans = [torch.tensor(row, dtype=torch.int32) for row in output.row_spans]
    return nest(torch.cat(spans), torch.tensor([len(row) for row in spans]))


def mean_of_scored(component: np.ndarray) -> float:
    """Mean of a component over the rows that were scored; NaN where there is none."""
    scored = component[~np.isnan(component)]
    return float(np.mean(scored)) if len(scored) else math.nan


def row_record(
    *, reward: float, components: Mapping[str, float], response_tokens: int, truncated: bool, ending: str | None = None
) -> dict[str, object]:
    """Return what readable rollouts say of a row besides its texts; a component without a score is None."""
    parts = {name: None if math.isnan(part) else rounded(part) for name, part in components.items()}
    return {
        "reward": rounded(reward),
        **({"components": parts} if parts else {}),
        "response_tokens": int(response_tokens),
        "truncated": bool(truncated),
        "finish_reason": ending or ("length" if truncated else "stop"),
    }


def group_metrics(output: GenerationOutput, size: int) -> list[dict[str, Reduction]]:
    """Return what is logged of each group; sums are exact, so they do not depend on which groups ended together."""
    lengths = output.lengths.reshape(-1, size)
    logprobs = output.logprobs.split(lengths.sum(1).tolist())
    return [
        {
            "response_tokens": Sum(float(lengths_G.sum())),
            "max_response_tokens": Max(float(lengths_G.max())),
            "mean_generation_logprob": Mean(math.fsum(part.tolist()), float(lengths_G.sum())),
        }
        for lengths_G, part in zip(lengths, logprobs, strict=True)
    ]


def component_columns(components: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Return parts of rewards as columns of `SampleStats`."""
    return {name: np.asarray(part, dtype=np.float32) for name, part in components.items()}


LOGGED_FIELDS = ("input_ids", "token_mask", "generation_logprobs")
"""Columns of readable rollouts that every row has."""


class LineWriter:
    """Writes rows as readable JSON lines.

    Args:
        prompts: of training, by their numbers.
        extras: columns of the run's own.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, prompts: Sequence[Prompt], extras: Sequence[FieldSpec]
    ) -> None:
        self._tokenizer, self._texts = tokenizer, TokenTexts(tokenizer)
        self._prompts, self._extras = prompts, extras

    def write(
        self,
        client: DataPlaneClient,
        meta: KVBatchMeta,
        *,
        scored: KVBatchMeta | None,
        path: Path,
        records: Sequence[Mapping[str, object]],
    ) -> None:
        """Write the rows as readable JSON lines: key, texts, what `records` say of each, and its tokens.

        Args:
            scored: those of the rows that have log-probabilities of the trainer, in any order; None: no row has.
        """
        prev = WorkerPass.PREV_LOGPROBS.column
        with client.stage("log"):
            batch = read_columns(client, meta, LOGGED_FIELDS, pad_values={"input_ids": 0})
            logs = logs_of_rows(client, meta)
            columns = logged_extras(client, meta, self._extras)
            prevs = None if scored is None else read_columns(client, scored, (prev,)).tensor(prev)
        ids, mask = batch.tensor("input_ids"), batch.tensor("token_mask").bool()
        row_of = {} if scored is None else {key: row for row, key in enumerate(scored.keys)}
        lines = []
        for row, (key, length, log) in enumerate(zip(meta.keys, meta.sequence_lengths or (), logs, strict=True)):
            tokens, is_response = ids[row, :length], mask[row, :length]
            line: dict[str, object] = {"key": key, "group": group_uid(key)}
            line |= row_texts(self._tokenizer, tokens, is_response)
            if isinstance(number := records[row].get(PROMPT_NUMBER), int):
                line |= asked_texts(self._prompts[number])
            shown = token_record(
                self._texts,
                tokens.tolist(),
                mask=is_response,
                generation_logprobs=batch.tensor("generation_logprobs")[row, :length],
                prev_logprobs=prevs[row_of[key], :length] if prevs is not None and key in row_of else None,
            )
            more = {} if log is None else turn_lines(log)
            lines.append({**line, **records[row], **more, **columns[row], **shown})
        write_rollouts(path, lines)


def logs_of_rows(client: DataPlaneClient, meta: KVBatchMeta) -> list[ConversationLog | None]:
    """Return the log of each row; None for a row of a single turn, and for further rows of a conversation."""
    if CONVERSATION not in meta.fields:
        return [None] * len(meta.keys)
    return logs_of_column(client.get_data(meta, [CONVERSATION]).get(CONVERSATION))
