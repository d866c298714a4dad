"""What a replay is asked for, and how it says that it cannot be done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import UserError

__all__ = ["Observe", "ReplayProblem", "ReplayRequest", "Worker", "no_observation"]

Worker = Literal["dtensor", "megatron"]
Observe = Callable[[int, str], AbstractContextManager[None]]
"""Given a step's number and a stage, gives what is around the worker's pass. Called on every rank, so it is pickled."""


class ReplayProblem(UserError):
    """Why a step cannot be replayed; `verdict` says which kind of why."""

    def __init__(self, text: str, *, verdict: Verdict) -> None:
        super().__init__(text)
        self.verdict = verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """Which step of which run, and how."""

    run: Path
    """`logger.log_dir` of the run."""
    step: int
    in_one_process: bool = False
    """False: as many ranks as the run had, in its layout."""
    worker: Worker | None = None
    """None: that of the run."""
    overrides: tuple[str, ...] = ()
    """`KEY=VALUE` of the config: what would have been."""
    rows: tuple[str, ...] = ()
    """Keys of rows of the step: only these, without an update of theirs."""


def no_observation(step: int, stage: str) -> AbstractContextManager[None]:
    """Looks at nothing."""
    return nullcontext()
