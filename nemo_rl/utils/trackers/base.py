"""The tracker interface; each built-in tracker has one file, and `nemo_rl.utils.logger.Logger` calls all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

__all__ = ["Tracker"]


class Tracker(ABC):
    """A place where metrics go. It may raise: the logger warns once and switches it off.

    One of your own (`logger.trackers`) is made with `log_dir=`, the run's folder, and `run_config=`, its resolved
    config as plain values.
    """

    name: str
    """Word for warnings, for example `wandb`."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Records one step; the values are on disk, or handed to the service, when it returns."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and processes of the tracker. Idempotent."""
