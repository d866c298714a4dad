"""Exit codes of a run and of a job on several nodes. `ray.sub` knows the two that may start the job again."""

from __future__ import annotations

__all__ = ["CHILD_FAILED", "FAILURE", "INTERRUPTED", "NODE_LOST", "TIME_LIMIT", "USER_ERROR"]

FAILURE = 1
"""A worker, the data plane or Ray failed."""
USER_ERROR = 2
"""Something the user can fix."""
CHILD_FAILED = 8
"""A process that a command started for its work ended with an error."""
TIME_LIMIT = 75
"""Saved and ended before `checkpointing.must_save_by`; to be continued."""
NODE_LOST = 76
"""A node of the job has ended in the middle of it."""
INTERRUPTED = 130
"""By a signal."""
