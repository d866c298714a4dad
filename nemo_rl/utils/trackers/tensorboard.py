"""The TensorBoard tracker. The only file that names TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from nemo_rl.utils.trackers.base import Tracker

__all__ = ["TensorboardTracker"]


class TensorboardTracker(Tracker):
    """Scalars under their metric names in `log_dir`.

    Args:
        resume_step: TensorBoard hides what an earlier start recorded of later steps; None for a new run.
    """

    name = "tensorboard"

    def __init__(self, log_dir: Path, *, resume_step: int | None = None) -> None:
        self.log_dir = log_dir
        purge_step = None if resume_step is None else resume_step + 1
        self._writer: SummaryWriter | None = SummaryWriter(  # type: ignore[no-untyped-call]
            str(log_dir), purge_step=purge_step
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._writer is None:
            raise ValueError(f"{self.log_dir}: the tracker is closed")
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()  # type: ignore[no-untyped-call]
            self._writer = None
