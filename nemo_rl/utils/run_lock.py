"""One run per folder: a lock that the kernel releases when the process dies.

`lock_folder` is entered before a run writes or removes anything. The file says who holds it, for a process that is
refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl.errors import RunFolderError

__all__ = ["LOCK_FILE", "lock_folder", "lock_problem"]

logger = logging.getLogger(__name__)

LOCK_FILE = ".run.lock"
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of `flock` on a file system without locks."""

_held: set[int] = set()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder`, made where it is missing, until the block ends. The file is gone afterwards.

    Raises:
        RunFolderError: another run holds it, or the folder cannot be written.
    """
    path = folder / LOCK_FILE
    descriptor = _acquire(path)
    _held.add(descriptor)
    try:
        yield
    finally:
        # A forked child that comes here has left the lock to its parent.
        if descriptor in _held:
            _held.discard(descriptor)
            # Removed while it is held: a process that opened it meanwhile finds that it is no longer the folder's.
            path.unlink(missing_ok=True)
            os.close(descriptor)


def lock_problem(folder: Path) -> str | None:
    """Return who else holds `folder`, or None where nobody does; the lock is not taken."""
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        _lock(descriptor, path)
    except RunFolderError as error:
        return str(error)
    finally:
        os.close(descriptor)
    return None


def _acquire(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(descriptor, path)
                if _is_at(descriptor, path):
                    _sign(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    except OSError as error:
        raise RunFolderError(
            f"{path.parent}: a run cannot write here: {error.strerror or error}; choose another logger.log_dir or "
            "checkpointing.checkpoint_dir, or correct the folder"
        ) from error


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunFolderError(
            f"{path.parent} is in use by another run: {_holder(descriptor)}; wait for it, end it, or choose another "
            "logger.log_dir (and checkpointing.checkpoint_dir)"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("%s: this file system has no locks; make sure that no other run uses the folder", path.parent)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the locked file is still the one that others would open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that is still starting"


def _leave_to_parent() -> None:
    """Close the locks in a forked child, which would keep them after its parent's death."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
