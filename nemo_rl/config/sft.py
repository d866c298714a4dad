"""Settings of supervised training on finished conversations (`sft` section)."""

from __future__ import annotations

from pydantic import FiniteFloat

from nemo_rl.config.base import Section

__all__ = ["LOOP_KEYS", "SUPERVISED_LOSS", "SFTConfig"]

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


class SFTConfig(Section):
    """Supervised training on the finished conversations of `data`, in place of rollouts; docs/sft.md is its page."""

    enabled: bool = False
    """Train on what assistants have said in `data.train`; `nemo-rl sft` sets it. A step trains
    `policy.train_global_batch_size` rows, and no engine is started."""
    min_reward: FiniteFloat | None = None
    """Least reward of rows of `data` that are readable rollouts of an earlier run: their sampled tokens are trained.
    Null refuses such rows."""
