"""Settings of supervised training on finished conversations (`sft` section)."""

from __future__ import annotations

from pydantic import Field, FiniteFloat, JsonValue

from nemo_rl.config.base import Section

__all__ = ["LOOP_KEYS", "SUPERVISED_LOSS", "WARM_FOLDER", "WARM_RATE", "WARM_ROWS", "SFTConfig"]

SUPERVISED_LOSS = "nemo_rl.algorithms.losses.nll:supervised_loss"
"""The loss of supervised training, which no recipe names."""
LOOP_KEYS = (
    "max_num_steps",
    "max_num_epochs",
    "val_period",
    "val_at_start",
    "val_at_end",
    "max_val_samples",
    "seed",
)
"""Keys of `grpo` that supervised training reads."""
WARM_FOLDER = "warm_start"
"""The folder of the first of two stages, in `logger.log_dir`."""
WARM_ROWS, WARM_RATE = 16, 1e-5
"""Rows of an optimizer step of a first stage, and its learning rate, where neither is given."""


class SFTConfig(Section):
    """Supervised training on the finished conversations of `data`, in place of rollouts; docs/sft.md is its page."""

    enabled: bool = False
    """Train on what assistants have said in `data.train`; `nemo-rl sft` sets it. A step trains
    `policy.train_global_batch_size` rows, and no engine is started."""
    min_reward: FiniteFloat | None = None
    """Least reward of rows of `data` that are readable rollouts of an earlier run: their sampled tokens are trained.
    Null refuses such rows."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Keys of the recipe of the first stage, where `stages` is `[sft, grpo]`: nested, or dotted as on the command line,
    such as `data.train.data_path`. Model, layout, cluster and times of checkpoints are those of the second stage. All
    else has its default, but for one epoch of `data.train`, no validation, 16 rows of a step and a rate of 1e-5."""
