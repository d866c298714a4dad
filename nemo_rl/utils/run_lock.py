"""One run per folder: a lock that the kernel releases when the process dies, and a file that says how the run ended.

`lock_folder` is entered before a run writes or removes anything. The file says who holds it, for a process that is
refused. `filelock` takes the lock, again where the file was removed meanwhile, and closes it in forked children, which
would keep it after their parent's death. `outcome_of` reads file and lock: a run that was killed is not called running.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from nemo_rl.errors import RunFolderError, shorten
from nemo_rl.utils import interrupt
from nemo_rl.utils.exits import CRASH_FILE, text_of
from nemo_rl.utils.files import read_tail, write_text

__all__ = [
    "LOCK_FILE",
    "OUTCOME_FILE",
    "RunOutcome",
    "is_done",
    "lock_folder",
    "lock_problem",
    "outcome_of",
    "recorded_outcome",
    "stopped_early",
]

logger = logging.getLogger(__name__)

LOCK_FILE = ".run.lock"
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of `flock` on a file system without locks."""
WAIT_S, POLL_S = 0.2, 0.01
"""A run that ends removes its file, so that an attempt in that moment is made again."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder`, made where it is missing, until the block ends. The file is gone afterwards.

    Raises:
        RunFolderError: another run holds it, or the folder cannot be written.
    """
    path = folder / LOCK_FILE
    lock = FileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=_sign)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=WAIT_S, poll_interval=POLL_S)
    except Timeout:
        raise RunFolderError(_in_use(folder)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise RunFolderError(
                f"{folder}: a run cannot write here: {error.strerror or error}; choose another logger.log_dir or "
                "checkpointing.checkpoint_dir, or correct the folder"
            ) from error
        path.unlink(missing_ok=True)
        logger.warning("%s: this file system has no locks; make sure that no other run uses the folder", folder)
    try:
        yield
    finally:
        # A forked child that comes here holds nothing.
        if lock.is_locked:
            # Removed while it is held: a process that opened it meanwhile finds that it is no longer the folder's.
            path.unlink(missing_ok=True)
            lock.release()


def lock_problem(folder: Path) -> str | None:
    """Return who else holds `folder`, or None where nobody does; the lock is not taken."""
    return _in_use(folder) if _is_held(folder) else None


def _is_held(folder: Path) -> bool | None:
    """Return whether a run holds `folder`; None where no lock is there, or none that this process may try."""
    try:
        with (folder / LOCK_FILE).open("r+b") as file:
            return not lock_descriptor(file.fileno(), blocking=False)
    except OSError:
        return None


def _in_use(folder: Path) -> str:
    try:
        holder = json.loads((folder / LOCK_FILE).read_bytes())
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "a process that is still starting"
    return (
        f"{folder} is in use by another run: {who}; wait for it, end it, or choose another logger.log_dir (and "
        "checkpointing.checkpoint_dir)"
    )


def _sign(descriptor: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


OUTCOME_FILE = "outcome.json"
RUNNING, ENDED, FAILED, STOPPED = "running", "ended", "failed", "stopped"
MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """The state of a run, as `outcome.json` has it."""

    state: str
    """`running`, `ended` (all its steps are done), `failed`, or `stopped` before its last step."""
    cause: str = ""
    """The reason in one line, where it failed or stopped."""
    started: float
    """Unix seconds of its first start."""
    since: float
    """Unix seconds of its last start."""
    seconds: float = 0.0
    """Seconds of all starts that have ended, start-up included."""

    def at(self, now: float, state: str, cause: str = "") -> RunOutcome:
        """Return the outcome of a run whose last start ends at `now`."""
        return replace(self, state=state, cause=cause, seconds=self.seconds + max(0.0, now - self.since))


@contextmanager
def recorded_outcome(folder: Path, *, resumes: bool) -> Iterator[None]:
    """Within it `outcome.json` says that the run goes on, behind it how it ended. The folder is locked.

    Args:
        resumes: the run goes on from an earlier start, whose date and seconds are kept.
    """
    now, process = time.time(), os.getpid()
    before = (_read_outcome(folder) if resumes else None) or RunOutcome(state=ENDED, started=now, since=now)
    if before.state == RUNNING:  # it was killed
        before = before.at(_changed(folder, before.since), STOPPED)
    first = replace(before, state=RUNNING, cause="", since=now)
    _write_outcome(folder, first)
    state, cause = ENDED, ""
    try:
        yield
        if (found := _read_outcome(folder)) and found.state == STOPPED:
            state, cause = STOPPED, found.cause
    except BaseException as error:
        is_stop = isinstance(error, KeyboardInterrupt) or interrupt.received()
        said = "interrupted" if is_stop else f"{type(error).__name__}: {' '.join(text_of(error).split())}"
        state, cause = STOPPED if is_stop else FAILED, shorten(said)
        raise
    finally:
        if os.getpid() == process:  # a forked child that comes here is not the run
            _write_outcome(folder, first.at(time.time(), state, cause))


def stopped_early(folder: Path, cause: str) -> None:
    """Write that the run saves and ends before its last step; `recorded_outcome` keeps it."""
    found = _read_outcome(folder)
    if found is not None:
        _write_outcome(folder, found.at(time.time(), STOPPED, cause))


def is_done(folder: Path) -> bool:
    """Return whether a run in the folder has done all its steps; False where there is none."""
    found = _read_outcome(folder)
    return found is not None and found.state == ENDED


def outcome_of(folder: Path, *, step: int, num_steps: int | None) -> RunOutcome:
    """Return the state of the run in a folder; of a run of an earlier version what its files prove.

    Args:
        step: the last one in its metrics.
        num_steps: `grpo.max_num_steps`; None where it is not known.
    """
    now, held, found = time.time(), _is_held(folder), _read_outcome(folder)
    if found is None:
        begin = _changed(folder, now, "config.yaml")
        found = RunOutcome(state=RUNNING, started=begin, since=begin)
        if not held:
            return found.at(_changed(folder, begin), *_proved(folder, step, num_steps))
    if found.state != RUNNING:
        return found
    if held is False:
        cause = "its process was killed, or its machine ended: no cause was written"
        return found.at(_changed(folder, found.since), STOPPED, cause)
    return found.at(now, RUNNING, "" if held else f"not proved: no {LOCK_FILE}, or one of another user")


def _proved(folder: Path, step: int, num_steps: int | None) -> tuple[str, str]:
    """Return state and cause of a run without an outcome that nobody holds."""
    if num_steps is not None and step >= num_steps:
        return ENDED, ""
    if _changed(folder, -1.0, CRASH_FILE) >= _changed(folder, 0.0):
        text = read_tail(folder / CRASH_FILE, MOST_BYTES).decode(errors="replace")
        return FAILED, shorten(text.strip().rpartition("\n")[2])
    return STOPPED, f"at step {step} of {num_steps or '?'}; its folder does not say why"


def _changed(folder: Path, default: float, name: str = "metrics.jsonl") -> float:
    try:
        return (folder / name).stat().st_mtime
    except OSError:
        return default


def _read_outcome(folder: Path) -> RunOutcome | None:
    try:
        found = RunOutcome(**json.loads(read_tail(folder / OUTCOME_FILE, MOST_BYTES)))
        is_whole = found.state in (RUNNING, ENDED, FAILED, STOPPED) and isinstance(found.cause, str)
        return found if is_whole and math.isfinite(found.started + found.since + found.seconds) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _write_outcome(folder: Path, outcome: RunOutcome) -> None:
    try:
        write_text(folder / OUTCOME_FILE, json.dumps(asdict(outcome)) + "\n")
    except OSError as error:  # a full disk must not hide what ended the run
        logger.warning("%s cannot be written: %s", folder / OUTCOME_FILE, error)
