"""`RunFolder`: a run's temporary folder on this machine, removed when the run ends, also after a kill.

Ray keeps its session there: sockets, ports and logs. A reaper process alongside the driver removes the folder and the
processes that carry its mark when the driver dies; what a machine has lost together with its reaper is removed when
the next run of the same user starts. Invariant: a folder whose owner lives, or cannot be looked at, is never touched.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.distributed.liveness import ProcessIdentity
from nemo_rl.errors import ResourceError
from nemo_rl.utils.child_process import Guard
from nemo_rl.utils.process_guard import MARK, sweep

__all__ = ["RunFolder", "make_owned_folder"]

logger = logging.getLogger(__name__)

OWNER_FILE = "owner.json"
LONGEST_ROOT = 30
"""Characters: a Unix socket's path has 107 at most, and Ray's own part of it takes 62."""


class RunFolder:
    """One run's folder and its reaper. The process that makes it is the owner."""

    def __init__(self) -> None:
        self.path = make_owned_folder()
        self.reaper = Guard(self.path, start_timeout_s=START_TIMEOUT_S)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Mark the processes that are started inside the block: they and their descendants end with the run."""
        os.environ[MARK] = str(self.path)
        try:
            yield
        finally:
            del os.environ[MARK]

    def close(self) -> None:
        """End what is left of the run's marked processes, and remove the folder. Idempotent."""
        self.reaper.close()


def make_owned_folder() -> Path:
    """Return a fresh temporary folder of this process; if it is left behind, the user's next run removes it."""
    root = _root()
    _remove_dead(root)
    path = Path(tempfile.mkdtemp(prefix="r", dir=root))
    (path / OWNER_FILE).write_text(json.dumps(asdict(ProcessIdentity.of_this_process())))
    return path


def _root() -> Path:
    """Return the folder of all runs of this user on this machine; nobody else can look into it."""
    name = f"nemo_rl-{os.getuid()}"
    wanted = Path(tempfile.gettempdir()) / name
    root = wanted if len(str(wanted)) <= LONGEST_ROOT else Path("/tmp") / name
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise ResourceError(f"cannot make {root} for a run's temporary files: {error}; set TMPDIR") from error
    if root.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ResourceError(f"{root} must be a folder that only this user can open; remove it, or set TMPDIR")
    return root


def _remove_dead(root: Path) -> None:
    """Take over what runs have left whose driver and reaper are gone."""
    me = ProcessIdentity.of_this_process()
    for folder in root.iterdir():
        try:
            owner = ProcessIdentity(**json.loads((folder / OWNER_FILE).read_text()))
            is_dead = owner.is_visible_from(me) and not owner.is_alive()
        except (OSError, ValueError, TypeError) as error:
            logger.debug("cannot find out whose folder %s is: %s", folder, error)
            continue
        if is_dead:
            logger.info("removing %s, left by a run that was killed", folder)
            sweep(str(folder))
