"""One run per folder: a lock that the kernel releases when the process dies.

`lock_folder` is entered before a run writes or removes anything. The file says who holds it, for a process that is
refused. `filelock` takes the lock, again where the file was removed meanwhile, and closes it in forked children, which
would keep it after their parent's death.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from nemo_rl.errors import RunFolderError

__all__ = ["LOCK_FILE", "lock_folder", "lock_problem"]

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
    try:
        with (folder / LOCK_FILE).open("r+b") as file:
            return None if lock_descriptor(file.fileno(), blocking=False) else _in_use(folder)
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
