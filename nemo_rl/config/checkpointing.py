"""Settings of checkpoints (`checkpointing` section)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from nemo_rl.config.base import FilePath, Section, Text, TimeLimit

__all__ = ["CheckpointingConfig"]

IdentityPart = Literal["data", "model", "tokenizer", "template", "reward"]
"""Parts of a run that a resumed run and a replay compare."""


class CheckpointingConfig(Section):
    """The times and the folder of checkpoints, and the ones that are kept."""

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: FilePath | None = None
    """Folder of the `step_N` folders and `latest`; null: `checkpoints` in `logger.log_dir`."""
    save_period: PositiveInt = 10
    """Steps between checkpoints; the last step is saved as well."""
    keep_top_k: PositiveInt | None = 3
    """Best checkpoints to keep by `metric_name`, in addition to the latest; null keeps all."""
    metric_name: Text = "val:reward"
    """`val:NAME` or `train:NAME` as logged; `val:accuracy` where rewards are right or wrong. Where nothing is
    validated, checkpoints are ranked by `train:reward` in place of `val:reward` or `val:accuracy`."""
    higher_is_better: bool = True
    """True where larger values of `metric_name` are better."""
    save_optimizer: bool = True
    """Save what exact resuming needs besides the weights; false halves the size and cannot be resumed from."""
    async_save: bool = False
    """Copy what is saved (weights, and optimizer with `save_optimizer`) into the nodes' memory, and write it while the
    training goes on; the last save of a run is waited for. A checkpoint appears when all of it is written."""
    resume: bool | Literal["auto"] = False
    """Continue from the latest intact checkpoint in `checkpoint_dir`; an error if there is none. `auto`: continue where
    there is one of this recipe's runs, start otherwise."""
    must_save_by: TimeLimit | None = None
    """Save and end before this: `HH:MM:SS` or `DD:HH:MM:SS` after the run's start, or `auto`, the end of the Slurm job.
    Leaves room for the longest step and save so far; the exit code is 75 then. Null: no limit."""
    load_optimizer: bool = True
    """Resume with the checkpoint's optimizer state; false starts a fresh optimizer from its weights."""
    allow_changed: tuple[IdentityPart, ...] = ()
    """Parts that may differ from the run that is resumed or replayed: `data` (rows of the datasets), `model` (weights
    at step 0), `tokenizer`, `template` (the chat template), `reward` (its source). Any other difference is refused."""

    def folder(self, log_dir: Path) -> Path:
        """Return `checkpoint_dir`, with null decided."""
        return self.checkpoint_dir or log_dir / "checkpoints"
