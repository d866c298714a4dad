"""`Stage`: one part of a step as an object, its columns and its body.

The trainer hands a `StepState` from stage to stage. `submit` starts the work and gives a `Pending`, so that a stage of
another step can go on meanwhile. Invariant: data plane calls of a stage are booked under its name,
whichever loop runs it, and whenever.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from nemo_rl.algorithms.stages.columns import StageColumns
from nemo_rl.algorithms.stages.state import StepState
from nemo_rl.algorithms.token_statistics import TokenStatistics
from nemo_rl.algorithms.token_work import TokenEstimator, token_estimator
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.logger import LoggerConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.client.link import stage_context
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.distributed.packing import DEFAULT_COST
from nemo_rl.distributed.worker_groups import Pending
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.models.hf.loading import decoder_sizes, load_model_config
from nemo_rl.models.policy.interfaces import LossFunction
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.flops import TransformerShape, sequence_cost

__all__ = ["Stage", "StageTools", "Teacher", "UpdateStage"]


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
