"""`Verdict`: how every check of this package ends; its value is the exit code of the command that made it."""

from __future__ import annotations

from enum import Enum

from nemo_rl.utils.exits import CHILD_FAILED

__all__ = ["Verdict"]


class Verdict(Enum):
    """The outcome of a check. Exit code 1 is left to failures that nobody foresaw."""

    PASS = 0
    USAGE = 2
    """The command itself was wrong: an unknown site, a folder that is none."""
    MISMATCH = 3
    INCOMPLETE = 4
    """Something that should have been compared is not there."""
    VACUOUS = 5
    """The check compared nothing."""
    CORRUPT = 6
    """Bytes are not those that were written."""
    UNSUPPORTED = 7
    """The input is of another model, format or version."""
    CHILD_FAILED = CHILD_FAILED
    """A process that was started for this ended with an error."""

    @property
    def label(self) -> str:
        """The name shown to people and in JSON."""
        return self.name.lower()
