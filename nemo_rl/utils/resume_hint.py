"""The command that resumes an interrupted run. Called by the command line; imports neither torch nor Ray."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nemo_rl.config.schema import MasterConfig
from nemo_rl.utils.checkpoint import CheckpointManager

__all__ = ["resume_hint"]

RESUME = "checkpointing.resume=true"


def resume_hint(config: MasterConfig, command: Sequence[str]) -> str:
    """The last checkpoint and the command that continues from it, or why there is none.

    Args:
        command: the words that started the run.
    """
    section = config.checkpointing
    if not section.enabled:
        return "nothing was saved: checkpointing.enabled is false"
    manager = CheckpointManager(config.checkpoint_dir, keep_top_k=None, metric_name=section.metric_name)
    last = manager.latest()
    if last is None:
        return f"no checkpoint was saved yet: checkpointing.save_period is {section.save_period}"
    words = [
        word for word in command if not word.lstrip("+").startswith(("logger.overwrite=", "checkpointing.resume="))
    ]
    return f"the last checkpoint is {last.path}; to continue:\n  {shlex.join([*words, RESUME])}"
