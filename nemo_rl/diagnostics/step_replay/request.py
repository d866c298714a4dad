"""What a replay is asked for, and how it says that it cannot be done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import UserError

__all__ = ["ReplayProblem", "ReplayRequest", "Worker"]

Worker = Literal["dtensor", "megatron"]


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
    dump: str | None = None
    """Sites to record in the passes of `step`."""
    allows_code: bool = False
    """Whether modules outside the library that the kept config names may be imported."""
    out: Path | None = None
    """Folder of these records; they need one."""
