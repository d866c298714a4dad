"""What a rollout worker is made from, and what it says of what it has loaded: `RolloutSpec` and `RolloutInfo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from nemo_rl.config.evaluation import EvaluationConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import DataConfig, EnvConfig, GRPOConfig, LoggerConfig

__all__ = ["RolloutInfo", "RolloutSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """What a rollout worker is made from."""

    grpo: GRPOConfig
    policy: PolicyConfig
    data: DataConfig
    evaluation: EvaluationConfig
    env: EnvConfig
    logger: LoggerConfig
    start_timeout_s: float
    """For the processes that score."""
    now: datetime | None = None
    """The time that the chat template sees: that of the run's first start. None: the clock's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutInfo:
    """What the rollout worker loaded."""

    num_train_prompts: int
    num_val_prompts: int
    num_skipped_prompts: int
    """Prompts longer than `data.max_input_seq_length`, left out."""
    skipped: tuple[str, ...] = ()
    """The first of them, for people."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """Digests of the data, by the dotted paths of their sections, of tokenizer, chat template and reward."""
    prints_the_date: bool = False
    """Whether the chat template says when the run was started."""
