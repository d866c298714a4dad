"""`StepState`: everything that is known of one step, handed from stage to stage.

Invariant: a stage changes nothing in the state that it gets; it returns the state after it. So steps that overlap do
not see one another, and the keys of all rows that a step may put are known before its first stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from nemo_rl.algorithms.scored_rows import ScoredRows
from nemo_rl.algorithms.stages.columns import PARTITION
from nemo_rl.algorithms.token_statistics import MeasuredStatistics
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.keys import keys_of_groups, new_group_ids
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.experience.rollout_records import RolloutResult
from nemo_rl.models.policy.lm_policy import TrainSummary

__all__ = ["ChosenRows", "StepState", "begin_step", "join_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenRows:
    """The rows of a step that are trained."""

    rows: tuple[int, ...]
    """Indices into the rows of the step."""
    meta: KVBatchMeta
    plan: PackPlan
    logprob_plan: PackPlan | None = None
    """Microbatches of the log-probability stages, over the same assignment of rows; None before such a stage."""
    advantages: torch.Tensor
    """`[N]` float32."""
    sample_mask: torch.Tensor
    """`[N]` float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState:
    """One step, as far as its stages have brought it. Made by `begin_step`, filled by a `BatchSource`."""

    number: int
    """Counted from 1."""
    partition: str
    drawn: tuple[SampledPrompt, ...]
    """Prompts of the groups; their ordinals decide the seeds of the rows."""
    uids: tuple[str, ...]
    """Names of the groups, one per prompt."""
    keys: tuple[str, ...]
    """Keys of all rows that the step may put: these are cleared at its end."""
    weight_version: int | None
    """Version of the weights that every row must be sampled from; None takes any, and each row says which."""
    policy_version: int
    """Version of the weights that the step's update starts from: the lag of a row is this less its own version."""
    rolled: RolloutResult | None = None
    """Meta and scalars of all rows; None before the rollout."""
    scored: ScoredRows | None = None
    chosen: ChosenRows | None = None
    """The rows that are trained; None before the rows are scored, and when no row carries a gradient: then nothing
    is trained."""
    measured: MeasuredStatistics | None = None
    """Measurements of the chosen rows; None before workers have measured them, and where the recipe needs nothing of
    the kind."""
    train: TrainSummary | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the stages that have run, by name, from their start to their result."""
    seconds: float = 0.0
    """Rollout to cleared rows; 0 before that."""

    @property
    def rows(self) -> RolloutResult:
        assert self.rolled is not None, f"step {self.number}: no rows yet; run the rollout first"
        return self.rolled

    @property
    def scores(self) -> ScoredRows:
        assert self.scored is not None, f"step {self.number}: no scores yet; run the stage that scores first"
        return self.scored

    @property
    def update(self) -> ChosenRows:
        assert self.chosen is not None, f"step {self.number}: no row was chosen for training"
        return self.chosen

    @property
    def num_tokens(self) -> int:
        return sum(self.rows.meta.sequence_lengths or ())

    @property
    def untrained_keys(self) -> tuple[str, ...]:
        """Rows that are left out of the update."""
        kept = set(self.chosen.meta.keys) if self.chosen is not None else set()
        return tuple(key for key in self.rows.meta.keys if key not in kept)

    def with_chosen_meta(self, meta: KVBatchMeta) -> StepState:
        """The state after a stage has written columns of the chosen rows."""
        return replace(self, chosen=replace(self.update, meta=meta))


def begin_step(number: int, drawn: Sequence[SampledPrompt], *, group_size: int, version: int) -> StepState:
    """A step that is sampled from, and trained on, the weights of one version, as a synchronous trainer does it."""
    uids = new_group_ids(len(drawn))
    return StepState(
        number=number,
        partition=PARTITION,
        drawn=tuple(drawn),
        uids=uids,
        keys=keys_of_groups(uids, group_size),
        weight_version=version,
        policy_version=version,
    )


def join_steps(number: int, parts: Sequence[StepState], *, policy_version: int) -> StepState:
    """One step of the rows of several rollouts, to be scored and trained together; it owns the rows of all."""
    first, *others = [part.rows for part in parts]
    return StepState(
        number=number,
        partition=parts[0].partition,
        drawn=tuple(chain.from_iterable(part.drawn for part in parts)),
        uids=tuple(chain.from_iterable(part.uids for part in parts)),
        keys=tuple(chain.from_iterable(part.keys for part in parts)),
        weight_version=None,
        policy_version=policy_version,
        rolled=first.concat(*others),
    )
