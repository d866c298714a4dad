"""`HubTokens`: who may speak to the hub: one random text each for the job, for viewers and for the controller.

They lie in files that only their owner can read, never on a command line and never in a log.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.errors import RunFolderError, UserError
from nemo_rl.tracer.protocol import Role

__all__ = ["HubTokens", "read_token", "token_path", "write_private"]

NUM_BYTES = 32
"""Random bytes in a token."""
MAX_BYTES = 4096
"""Largest file that is read as a token."""
OWNER_ONLY = 0o600
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HubTokens:
    """The three tokens of a hub; their text is in no `repr`."""

    job: str
    """Token of ranks and the driver."""
    viewer: str
    controller: str
    """Good for viewing, too."""

    def __repr__(self) -> str:
        return "Tokens(...)"

    @classmethod
    def draw(cls) -> HubTokens:
        """Return new tokens."""
        job, viewer, controller = (secrets.token_urlsafe(NUM_BYTES) for _ in range(3))
        return cls(job=job, viewer=viewer, controller=controller)

    def write(self, folder: Path) -> None:
        """Write `job.token`, `viewer.token` and `controller.token`, in place of those of an earlier run.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        for name, token in (("job", self.job), ("viewer", self.viewer), ("controller", self.controller)):
            write_private(token_path(folder, name), f"{token}\n")

    def allow(self, role: Role, token: str) -> bool:
        """Return whether this token is good for this role, in the same time whatever is wrong with it."""
        good: Mapping[Role, tuple[str, ...]] = {
            Role.RANK: (self.job,),
            Role.DRIVER: (self.job,),
            Role.VIEWER: (self.viewer, self.controller),
            Role.CONTROLLER: (self.controller,),
        }
        given = token.encode(errors="surrogatepass")
        # A list: all are compared, so that time does not say which one was right.
        return any([hmac.compare_digest(known.encode(), given) for known in good[role]])


def token_path(folder: Path, name: str) -> Path:
    """Return the path of the token `job`, `viewer` or `controller`."""
    return folder / f"{name}.token"


def write_private(path: Path, text: str) -> None:
    """Make a file that nobody but its owner can read at any moment, in place of one that is there.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The mode counts from creation, and O_EXCL follows no link that somebody has laid.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"tracer: {path} cannot be written: {error}; check the folder and its space") from error


def read_token(path: Path) -> str:
    """Return the token that `HubTokens.write` has written.

    Raises:
        UserError: no such file, or others can read it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"token {path}: cannot be read ({error.strerror}); pass the folder 'tracer' of a running job, as its owner"
        ) from error
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_mode & OTHERS:
            raise UserError(
                f"token {path}: expected a file of mode 0600, got {stat.filemode(state.st_mode)}: others can read it; "
                "start the run again, which makes a new token"
            )
        text = file.read(MAX_BYTES).decode("ascii", errors="replace").strip()
    if not text:
        raise UserError(f"token {path}: the file is empty; start the run again, which makes a new token")
    return text
