"""What every benchmark reports beside its numbers: versions, machine, load, commit; and how it writes them.

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

from nemo_rl.utils.files import write_text

__all__ = ["ROOT", "Commit", "Spread", "commit", "environment", "load_average", "versions", "write_json"]

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
