"""What every benchmark reports with its numbers: versions, machine, load, commit; bounds; and how it writes them.

Called by the scripts of this folder. Invariant: a JSON file is the whole new one or the old one.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.table import Table

from nemo_rl.utils.files import write_text

__all__ = [
    "ROOT",
    "Commit",
    "Hold",
    "Spread",
    "check_figures",
    "commit",
    "environment",
    "figures_table",
    "load_average",
    "paired_ratio",
    "versions",
    "write_json",
]

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "ray", "tensordict", "TransferQueue", "transformers")
GIT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median and range of raw samples.

    Example:
        >>> str(Spread.of([0.2, 0.1, 0.4]))
        '0.200 (0.100..0.400)'
    """

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if not samples:
            raise ValueError("expected at least one sample, got none; run at least one step")
        return cls(median=statistics.median(samples), minimum=min(samples), maximum=max(samples))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.minimum:.3f}..{self.maximum:.3f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What was measured."""

    revision: str | None
    """Full commit id; None outside a git checkout."""
    dirty: bool
    """Whether tracked files differ from the commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """A bound on one figure."""

    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


def paired_ratio(samples: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median of the ratios of samples that were taken turn by turn: what slows both cancels."""
    return statistics.median(one / other for one, other in zip(samples, baseline, strict=True))


def check_figures(figures: Mapping[str, float], holds: Mapping[str, Hold]) -> list[str]:
    """One line per bound that does not hold, and per figure that was not measured."""
    lines = []
    for name, hold in holds.items():
        if name not in figures:
            lines.append(f"{name}: not measured")
        elif not hold.is_met(figures[name]):
            lines.append(f"{name}: expected {hold}, got {figures[name]:.3g}")
    return lines


def figures_table(figures: Mapping[str, float], holds: Mapping[str, Hold]) -> Table:
    """Every figure besides its bound."""
    table = Table(title="figures")
    for name in ("figure", "value", "bound", ""):
        table.add_column(name)
    for name, value in figures.items():
        hold = holds.get(name)
        verdict = "" if hold is None else ("holds" if hold.is_met(value) else "MISSED")
        table.add_row(name, f"{value:.3g}", "" if hold is None else str(hold), verdict)
    return table


def commit(folder: Path = ROOT) -> Commit:
    """The checked-out commit of `folder`."""
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return Commit(revision=None, dirty=False)
    return Commit(revision=revision, dirty=bool(changes))


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Python and the packages whose speed is measured along."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def load_average() -> list[float]:
    """Processes that ran or waited for a core, averaged over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def environment() -> dict[str, object]:
    """Versions, commit and machine, as plain values."""
    found = commit()
    return {
        "versions": versions(),
        "commit": found.revision,
        "dirty": found.dirty,
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
    }


def write_json(path: Path, report: Mapping[str, object]) -> Path:
    """Writes the report; NaN and infinity are refused, so that every reader can parse it."""
    return write_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
