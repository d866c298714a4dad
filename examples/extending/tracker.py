"""A tracker of your own: a table of one curve per row, for a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from nemo_rl.utils.trackers import Tracker

__all__ = ["CsvTracker"]


class CsvTracker(Tracker):
    """Writes `metrics.csv` with the columns step, name, value."""

    name = "csv"

    def __init__(self, *, log_dir: Path, run_config: Mapping[str, object]) -> None:
        del run_config  # a service would show it with the run
        self._file = (log_dir / "metrics.csv").open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(["step", "name", "value"])

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._writer.writerows([step, name, value] for name, value in metrics.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()
