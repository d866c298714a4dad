"""`metrics.jsonl`: one flushed JSON line per call, readable while the run goes on.

A resumed run continues the file from the step it resumed at; a new run in the same folder keeps the old file as
`metrics.1.jsonl`, `metrics.2.jsonl`, ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from nemo_rl.utils.files import write_text
from nemo_rl.utils.trackers.base import Tracker

__all__ = ["JsonlTracker", "read_metrics"]


class JsonlTracker(Tracker):
    """Appends `{"step": 3, "train/reward": 0.5, ...}`; NaN and infinity are written as null."""

    name = "jsonl"

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Args:
        resume_step: keep the lines up to this step, which a resumed run continues; None starts a new file.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            _set_aside(path)
        elif path.exists():
            kept = [json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] <= resume_step]
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
    """The rows of a metrics file; a last line that was cut off by a kill is left out, as are null values."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield {name: value for name, value in json.loads(line).items() if value is not None}


def _set_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while path.with_name(f"{path.stem}.{number}{path.suffix}").exists():
        number += 1
    path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))
