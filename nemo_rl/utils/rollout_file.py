"""The files of the readable rollouts of a run, and the form of their numbers.

The trainer and the rollout worker write them; `nemo_rl.diagnostics.rollouts` reads them without torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl.errors import ResourceError
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import write_text

__all__ = ["ROLLOUTS", "rollout_path", "rounded", "steps_with_rollouts", "write_rollouts"]

ROLLOUTS = "rollouts"
"""Folder of the readable rollouts in the folder of a run."""
DIGITS = 5
"""Significant ones of a number: float32 has two more, and a person reads none of them."""
_NAME = re.compile(r"step_([0-9]{1,18})\.jsonl", re.ASCII)


def rollout_path(log_dir: Path, step: int) -> Path:
    """Return the file of a training step."""
    return log_dir / ROLLOUTS / f"step_{step}.jsonl"


def steps_with_rollouts(log_dir: Path) -> tuple[int, ...]:
    """Return the training steps whose rollouts are there, in order; empty without the folder."""
    names = (_NAME.fullmatch(path.name) for path in (log_dir / ROLLOUTS).glob("step_*.jsonl"))
    return tuple(sorted(int(name[1]) for name in names if name is not None))


def write_rollouts(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Write one JSON object per line.

    Raises:
        ResourceError: the file cannot be written. (An actor's OSError would be a failure of the actor.)
    """
    try:
        write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    except OSError as error:
        raise ResourceError(f"rollouts cannot be written to {path}: {machine_problem(error) or error}") from error


def rounded(value: float) -> float | str:
    """Return a number for JSON, which has no numbers that are not finite: `float` reads both forms.

    Example:
        >>> rounded(-0.123456789), rounded(12345678.0), rounded(float("-inf"))
        (-0.12346, 12346000.0, '-inf')
    """
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(float(value))
