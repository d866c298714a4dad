"""`ReplayRequest`: the step to replay, and the error that says why it cannot be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import UserError

__all__ = ["ReplayProblem", "ReplayRequest", "Worker"]

Worker = Literal["dtensor", "megatron"]


class ReplayProblem(UserError):
    """A step cannot be replayed; `verdict` says for which kind of reason."""

    def __init__(self, text: str, *, verdict: Verdict) -> None:
        super().__init__(text)
        self.verdict = verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """The step of a run to replay, and the options of the replay."""

    run: Path
    """`logger.log_dir` of the run."""
    step: int
    in_one_process: bool = False
    """False: as many ranks as the run had, in its layout."""
    worker: Worker | None = None
    """The worker, or None for that of the run."""
    overrides: tuple[str, ...] = ()
    """`KEY=VALUE` of the config: what would have been."""
    rows: tuple[str, ...] = ()
    """Keys of rows of the step: only these, without an update of theirs."""
    dump: str | None = None
    """Sites to record in the passes of `step`."""
    allows_code: bool = False
    """True where modules outside the library that the kept config names may be imported."""
    out: Path | None = None
    """Folder of these records; they need one."""
