"""Where the readable rollouts of a run lie, and how their numbers are written.

The trainer and the rollout worker write them; `nemo_rl.diagnostics.rollouts` reads them without torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

__all__ = ["ROLLOUTS", "rollout_path", "rounded", "steps_with_rollouts"]

ROLLOUTS = "rollouts"
"""Folder of the readable rollouts in the folder of a run."""
DIGITS = 5
"""Significant ones of a number: float32 has two more, and a person reads none of them."""
_NAME = re.compile(r"step_([0-9]{1,18})\.jsonl", re.ASCII)


def rollout_path(log_dir: Path, step: int) -> Path:
    """The file of a training step."""
    return log_dir / ROLLOUTS / f"step_{step}.jsonl"


def steps_with_rollouts(log_dir: Path) -> tuple[int, ...]:
    """Training steps whose rollouts are there, in order; empty without the folder."""
    names = (_NAME.fullmatch(path.name) for path in (log_dir / ROLLOUTS).glob("step_*.jsonl"))
    return tuple(sorted(int(name[1]) for name in names if name is not None))


def rounded(value: float) -> float | str:
    """For JSON, which has no words for what is not finite: `float` reads both.

    Example:
        >>> rounded(-0.123456789), rounded(12345678.0), rounded(float("-inf"))
        (-0.12346, 12346000.0, '-inf')
    """
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(float(value))
