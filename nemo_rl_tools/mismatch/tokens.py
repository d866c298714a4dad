"""`StepTokens`: the response tokens of a kept step with the log-probabilities of both sides.

Invariant: the sampled tokens M are in the order of rows and positions, and every `[M]` of this package is of them.
Shapes: N rows, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.kept_steps.folder import SnapshotFolder, SnapshotRows, StepSnapshot
from nemo_rl.data_plane.chunks.ragged import materialize
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import name_some
from nemo_rl.experience.rollout_records import WEIGHT_VERSION
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl_tools.step_replay.chain import ReplayProblem, SnapshotColumns, rows_named
from nemo_rl_tools.verdict import Verdict

__all__ = ["StepTokens", "read_tokens"]

NEEDED = ("input_ids", "token_mask", "generation_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """The rows of a step that both sides have scored."""

    rows: tuple[int, ...]
    """Counted in the rollout's order."""
    keys: tuple[str, ...]
    versions: tuple[int, ...]
    """Versions of the weights, by each row's tag."""
    lengths: tuple[int, ...]
    ids_NT: torch.Tensor
    """int64, 0 in the padding."""
    is_sampled_NT: torch.Tensor
    rollout_M: torch.Tensor
    """Float32 log-probabilities that the rollout gave."""
    trainer_M: torch.Tensor | None
    """The kept ones of the trainer; None where the run had no such stage."""
    support_NS: torch.Tensor | None
    """Recorded sets, uint8, as `nemo_rl.models.head.logits` lays them out; None where there are none."""

    @property
    def row_M(self) -> torch.Tensor:
        return self.is_sampled_NT.nonzero(as_tuple=True)[0]

    @property
    def column_M(self) -> torch.Tensor:
        return self.is_sampled_NT.nonzero(as_tuple=True)[1]


def read_tokens(folder: SnapshotFolder, step: StepSnapshot, *, only: Sequence[str] = ()) -> StepTokens:
    """
    Args:
        only: keys of rows; empty takes all that the trainer has scored.

    Raises:
        ReplayProblem: what is needed was not kept.
        CheckpointError: a file is torn.
    """
    if step.rows is None:
        raise ReplayProblem(f"step {step.number} ended before its rows were written", verdict=Verdict.INCOMPLETE)
    columns = SnapshotColumns.read(folder, step)
    rows = rows_named(step, only) if only else sorted(step.trained or range(len(columns.keys)))
    missing = [name for name in NEEDED if not columns.has(name, rows)]
    if missing:
        raise ReplayProblem(
            f"step {step.number}: column {name_some(missing)} was not kept: there is nothing to explain",
            verdict=Verdict.INCOMPLETE,
        )
    prev = WorkerPass.PREV_LOGPROBS.column
    has_prev = columns.has(prev, rows)
    if not has_prev and WorkerPass.PREV_LOGPROBS.value in step.run.stages:
        raise ReplayProblem(f"step {step.number} ended before its {prev} were kept", verdict=Verdict.INCOMPLETE)
    has_sets = columns.has(SUPPORT, rows)
    names = [*NEEDED, *([prev] if has_prev else []), *([SUPPORT] if has_sets else [])]
    dense = materialize({name: columns.rows(name, rows) for name in names}, pad_values={})
    is_sampled = dense.tensor("token_mask").bool()
    # Nothing predicts the first token of a row.
    is_sampled[:, 0] = False
    return StepTokens(
        rows=tuple(rows),
        keys=tuple(columns.keys[row] for row in rows),
        versions=_versions(step, step.rows, rows),
        lengths=tuple(columns.lengths[row] for row in rows),
        ids_NT=dense.tensor("input_ids").long(),
        is_sampled_NT=is_sampled,
        rollout_M=dense.tensor("generation_logprobs")[is_sampled],
        trainer_M=dense.tensor(prev)[is_sampled] if has_prev else None,
        support_NS=dense.tensor(SUPPORT) if has_sets else None,
    )


def _versions(step: StepSnapshot, kept: SnapshotRows, rows: Sequence[int]) -> tuple[int, ...]:
    tags = kept.tags.get(WEIGHT_VERSION)
    found = [step.policy_version if tags is None else tags[row] for row in rows]
    return tuple(version for version in found if isinstance(version, int))
