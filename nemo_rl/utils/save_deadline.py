"""When a run must have saved: `checkpointing.must_save_by`, and whether one more step still fits before it.

`run` makes one from the config; the trainer tells it how long steps and saves take. Invariant: a run that makes steps
and saves no longer than those it has seen, ends before the limit with a checkpoint of its last step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from nemo_rl.config.base import AUTO, seconds_of
from nemo_rl.errors import UserError

__all__ = ["SaveDeadline", "seconds_left"]

JOB_END = "SLURM_JOB_END_TIME"
"""Seconds since 1970; `ray.sub` sets it where Slurm does not."""
END_S = 30.0
"""For the end of the run itself: workers, Ray, files."""
MARGIN = 0.1
"""A step may take this part longer than the longest before it."""


def seconds_left(must_save_by: str, *, variables: Mapping[str, str] | None = None) -> float:
    """From now, where the run starts now.

    Raises:
        UserError: `auto` outside of a Slurm job.
    """
    if must_save_by != AUTO:
        return seconds_of(must_save_by)
    text = (os.environ if variables is None else variables).get(JOB_END, "")
    if not text.isdecimal():
        raise UserError(
            f"checkpointing.must_save_by: auto needs {JOB_END}, which is {text!r} here; run it as a Slurm job with a "
            "time limit, or give HH:MM:SS"
        )
    return int(text) - time.time()


class SaveDeadline:
    """Of one run.

    Args:
        limit: on `clock`; None: there is none.
    """

    def __init__(self, limit: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._step_s = self._save_s = 0.0
        self._is_saving = False

    @classmethod
    def starting_at(cls, started: float, must_save_by: str | None) -> SaveDeadline:
        """
        Args:
            started: of the run, on the monotonic clock.
        """
        if must_save_by is None:
            return cls()
        now = time.monotonic() if must_save_by == AUTO else started
        return cls(now + seconds_left(must_save_by))

    def step_took(self, seconds: float) -> None:
        self._step_s = max(self._step_s, seconds)

    def save_began(self) -> None:
        """One runs beside the training from here on, and the next has to wait for it."""
        self._is_saving = True

    def save_took(self, seconds: float) -> None:
        self._save_s = max(self._save_s, seconds)
        self._is_saving = False

    @property
    def reserve_s(self) -> float:
        """What one more step needs, with its save and one that runs; as long as a step each where none was seen."""
        saves = 2 if self._is_saving else 1
        return (1 + MARGIN) * (self._step_s + saves * (self._save_s or self._step_s)) + END_S

    def left_s(self) -> float:
        """Until the limit."""
        return float("inf") if self._limit is None else self._limit - self._clock()

    def is_reached(self) -> bool:
        """Whether one more step no longer fits."""
        return self.left_s() < self.reserve_s
