"""`Stage`: one part of a step as an object, its columns and its body.

The trainer hands a `StepState` from stage to stage. `submit` starts the work and gives a `Pending`, so that a stage of
another step can go on meanwhile. Invariant: data plane calls of a stage are booked under its name,
whichever loop runs it, and whenever.

`StepState`: everything that is known of one step, handed from stage to stage.

Invariant: a stage changes nothing in the state that it gets; it returns the state after it. So steps that overlap do
not see one another, and the keys of all rows that a step may put are known before its first stage.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch

from nemo_rl.algorithms.grpo import ScoredRows
from nemo_rl.algorithms.stages.columns import PARTITION, StageColumns
from nemo_rl.algorithms.token_work import MeasuredStatistics, TokenEstimator, TokenStatistics, token_estimator
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.run import LoggerConfig
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.data_plane.client.link import stage_context
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.keys import keys_of_groups, new_group_ids
from nemo_rl.distributed.packing import DEFAULT_COST, PackPlan
from nemo_rl.distributed.worker_groups import Pending
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollout_records import RolloutResult
from nemo_rl.models.hf.loading import decoder_sizes, load_model_config
from nemo_rl.models.policy.interfaces import LossFunction
from nemo_rl.models.policy.tq_policy import TQPolicy, TrainSummary
from nemo_rl.utils.flops import TransformerShape, sequence_cost

__all__ = [
    "ChosenRows",
    "SourceRows",
    "Stage",
    "StageTools",
    "StepState",
    "Teacher",
    "UpdateStage",
    "begin_step",
    "join_steps",
    "sources_of_rows",
    "trained_of_sources",
    "weights_of_rows",
]


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
    """Prompts of the groups; their ordinals decide the seeds of the rows. Those of several sources all have a name."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRows:
    """Rows of a step whose prompts come from one source."""

    rows: tuple[int, ...]
    """Indices into the rows of the step."""
    trained_rows: int
    trained_tokens: int
    """Tokens of the responses of the trained rows."""


def sources_of_rows(step: StepState) -> dict[str, SourceRows]:
    """Return the rows of each source by its name; of a step that has several sources."""
    names = sorted({draw.source for draw in step.drawn})
    sources = {uid: draw.source for uid, draw in zip(step.uids, step.drawn, strict=True)}
    lengths = step.rows.sample_stats.response_lengths
    of_rows, trained = np.array([sources[uid] for uid in step.rows.group_uids]), np.zeros(len(lengths), dtype=bool)
    trained[list(() if step.chosen is None else step.chosen.rows)] = True
    return {
        name: SourceRows(
            rows=tuple(np.flatnonzero(of_rows == name).tolist()),
            trained_rows=int((trained & (of_rows == name)).sum()),
            trained_tokens=int(lengths[trained & (of_rows == name)].sum()),
        )
        for name in names
    }


def weights_of_rows(step: StepState, weights: Mapping[str, float]) -> torch.Tensor:
    """Return `[N]` float32, the weight of the source of each row."""
    sources = {uid: draw.source for uid, draw in zip(step.uids, step.drawn, strict=True)}
    return torch.tensor([weights[sources[uid]] for uid in step.rows.group_uids], dtype=torch.float32)


def trained_of_sources(step: StepState) -> tuple[dict[str, int], dict[str, int]]:
    """Return the response tokens that a step of several sources has trained of each, and the prompts of each."""
    tokens = {name: own.trained_tokens for name, own in sources_of_rows(step).items()}
    return tokens, dict(Counter(draw.source for draw in step.drawn))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """The model whose distributions the policy learns."""

    policy: TQPolicy
    settings: PolicyConfig
    """Its model and layout, as `teacher_policy` makes them."""
    top_k: int
    vocab_size: int
    """Tokens that the policy has logits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTools:
    """The tools of the stages' bodies, shared by all steps."""

    grpo: GRPOConfig
    settings: PolicyConfig
    logger: LoggerConfig
    client: DataPlaneClient
    policy: TQPolicy
    rollout: RolloutHandle
    loss_fn: LossFunction
    measures: TokenStatistics | None = None
    """Measurements of the rows' tokens that the driver needs, or None."""
    token_estimator: TokenEstimator | None = None
    """Estimator of advantages per token, or None when the driver computes one per row."""
    teacher: Teacher | None = None
    """The teacher, or None without distillation."""
    cost: tuple[float, float] = DEFAULT_COST
    """(a, b) of the cost a s + b s^2 of a row of s tokens, by which rows are shared among the ranks."""

    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of the rows of each source of prompts; empty where all have the same."""
    weighs_by_row: bool = False
    """True where the loss is a mean over rows, so that the rows of a conversation share its weight."""

    @classmethod
    def of(
        cls,
        grpo: GRPOConfig,
        loss: LossConfig,
        *,
        settings: PolicyConfig,
        logger: LoggerConfig,
        loss_weights: Mapping[str, float],
        client: DataPlaneClient,
        policy: TQPolicy,
        rollout: RolloutHandle,
        loss_fn: LossFunction,
        teacher: Teacher | None,
    ) -> StageTools:
        """Return the tools of a recipe.

        Args:
            grpo: with `drop_zero_advantage_groups` decided.
        """
        return cls(
            grpo=grpo,
            settings=settings,
            logger=logger,
            client=client,
            policy=policy,
            rollout=rollout,
            loss_fn=loss_fn,
            measures=TokenStatistics.of(grpo, loss),
            token_estimator=token_estimator(grpo, loss),
            teacher=teacher,
            cost=sequence_cost(TransformerShape.from_config(decoder_sizes(load_model_config(settings.model_name)))),
            loss_weights=loss_weights,
            weighs_by_row=loss.normalization == "sequence",
        )

    @property
    def needs_whole_groups(self) -> bool:
        """True when advantages of a row need the tokens of its whole group."""
        return self.token_estimator is not None or (self.measures is not None and self.measures.kl is not None)


class Stage(ABC):
    """One stage; the same object serves every step.

    Args:
        columns: what it reads and writes, checked before.
    """

    def __init__(self, columns: StageColumns, tools: StageTools) -> None:
        self.columns = columns
        self.driver_bytes = 0
        """Bytes about rows that the body has moved itself; those of worker calls are counted by who makes them."""
        self._tools = tools

    @property
    def name(self) -> str:
        return self.columns.name

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the data plane."""
        return self.columns.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns of the data plane."""
        return self.columns.writes

    def submit(self, step: StepState) -> Pending[StepState]:
        """Start the stage and return the step after it, without waiting for workers.

        What the driver does itself is done when this returns.
        """
        if not self.applies_to(step):
            return Pending.done(step)
        started = time.perf_counter()
        with stage_context(self.name):
            pending = self._submit(step)

        def finish() -> StepState:
            with stage_context(self.name):
                done = pending.result()
            seconds = {**done.stage_seconds, self.name: time.perf_counter() - started}
            return replace(done, stage_seconds=seconds)

        return pending.after(finish)

    def applies_to(self, step: StepState) -> bool:
        """Return whether this step has work for the stage."""
        return True

    @abstractmethod
    def _submit(self, step: StepState) -> Pending[StepState]:
        """The body."""


class UpdateStage(Stage):
    """Works on the chosen rows; a step without any has nothing to do."""

    def applies_to(self, step: StepState) -> bool:
        return step.chosen is not None
