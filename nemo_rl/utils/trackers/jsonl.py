"""`metrics.jsonl`: one flushed JSON line per call, readable while the run goes on.

A resumed run keeps the lines up to the step it resumes from, as they are, and goes on behind them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from nemo_rl.utils.files import write_text
from nemo_rl.utils.trackers.base import Tracker

__all__ = ["METRICS_FILE", "JsonlTracker", "read_metrics"]

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends `{"step": 3, "train/reward": 0.5, ...}`; NaN and infinity are written as null."""

    name = "jsonl"

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Args:
        resume_step: keep the lines up to this step, which a resumed run continues; None starts a new file.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_up_to(path, resume_step) if resume_step is not None and path.exists() else []
        write_text(path, "".join(kept))
        self._file: TextIO | None = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._file is None:
            raise ValueError(f"{self.path}: the tracker is closed")
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """The rows of a metrics file without null values; lines that are none (cut off by a kill, damaged) are left out."""
    for _, row in _rows(path):
        yield {name: value for name, value in row.items() if value is not None}


def _rows(path: Path) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Line and row of every line that is whole."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
                yield line, row


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The lines of these steps, as they are."""
    kept = [(row["step"], line) for line, row in _rows(path) if (row["step"] or 0) <= step]
    missing = sorted(set(range(1, step + 1)) - {number for number, _ in kept})
    if missing:
        logger.warning("%s lacks %d steps up to the resumed one, the first is %d", path, len(missing), missing[0])
    return [line for _, line in kept]
