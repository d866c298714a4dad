"""`WorkerLog`: what a worker process logs, in its own file, and its warnings for the driver.

The actor behind `RayWorkerGroup` opens one; without it a worker's records reach nobody. Warnings of this package travel
back with the reply of the call that caused them, so the driver shows them with rank and stage.
"""

from __future__ import annotations

import logging
from pathlib import Path

from nemo_rl.utils.console import LOGGERS, printable

__all__ = ["WORKER_LOGS", "WorkerLog"]

WORKER_LOGS = "workers"
"""Folder in `logger.log_dir`."""
KEPT_WARNINGS = 20
"""Warnings of one call that are kept; more of them say nothing new."""
WARNING_LENGTH = 500


class WorkerLog(logging.Handler):
    """Records of this process: those of this package from a level on, of others from WARNING on.

    Args:
        path: the file, appended to; its folder is made. None writes none.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(logging.NOTSET)
        self.stage = ""
        self._warnings: list[str] = []
        self._file: logging.FileHandler | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
            self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(stage)s: %(message)s"))

    @classmethod
    def open(cls, path: Path | None, *, level: str = "INFO") -> WorkerLog:
        """Return the handler of everything that this process logs.

        Args:
            level: of this package's records.
        """
        handler = cls(path)
        logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
        for name in LOGGERS:
            logging.getLogger(name).setLevel(level)
        logging.captureWarnings(True)
        return handler

    def emit(self, record: logging.LogRecord) -> None:
        record.stage = self.stage or "-"
        if self._file is not None:
            self._file.handle(record)
        is_ours = record.name.partition(".")[0] in LOGGERS
        if is_ours and record.levelno >= logging.WARNING and len(self._warnings) < KEPT_WARNINGS:
            self._warnings.append(printable(record.getMessage(), limit=WARNING_LENGTH))

    def take_warnings(self) -> list[str]:
        """Since the last call."""
        taken, self._warnings = self._warnings, []
        return taken

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()
