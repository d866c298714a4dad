"""`FirstCause`: the record of what ended a step, and the error that every rank and the driver raise from it.

Written by `abort` on the ranks, read by `worker_groups` on the driver.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

from nemo_rl.errors import (
    CollectiveTimeout,
    NemoRLError,
    UserError,
    WorkerError,
    WorkerLate,
    WorkerLost,
    from_record,
    to_record,
)

__all__ = ["FirstCause", "GuardedWorker", "is_symptom"]

SYMPTOMS = ("connection closed", "connection reset", "timed out waiting", "gloo", "nccl", "broken pipe", "communicator")
"""Texts of errors that a peer's failure causes: something else is the first cause."""
WORKER_ERRORS = {kind.__name__: kind for kind in (WorkerError, CollectiveTimeout, WorkerLost, WorkerLate)}


def is_symptom(error: BaseException) -> bool:
    """Return whether the error looks like what a peer's failure does to this rank."""
    if isinstance(error, UserError):
        return False
    text = str(error).lower()
    return isinstance(error, RuntimeError | WorkerError) and any(word in text for word in SYMPTOMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstCause:
    """The error that ended a step, with its rank and stage."""

    rank: int
    stage: str
    kind: str
    """Name of the exception's class."""
    text: str

    @classmethod
    def of(cls, error: BaseException, *, rank: int, stage: str) -> FirstCause:
        """Return the record of an error that left `stage` on `rank`; one that came from another rank keeps its own."""
        if isinstance(error, WorkerError):
            rank = rank if error.rank is None else error.rank
            return cls(rank=rank, stage=error.stage or stage, kind=type(error).__name__, text=error.text)
        if isinstance(error, NemoRLError) and error.origin_rank is not None:
            rank = error.origin_rank
        return cls(rank=rank, stage=stage, **to_record(error))

    def to_error(self) -> NemoRLError:
        """Return the error that every rank and the driver raise.

        It is of the same kind if the user can fix it, else a `WorkerError`.
        """
        error = from_record({"kind": self.kind, "text": self.text})
        if isinstance(error, UserError):
            error.origin_rank = self.rank
            error.add_note(f"rank {self.rank}, stage {self.stage}")
            return error
        kind = WORKER_ERRORS.get(self.kind)
        if kind is not None:
            return kind(self.text, rank=self.rank, stage=self.stage)
        return WorkerError(f"{self.kind}: {self.text}", rank=self.rank, stage=self.stage)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> FirstCause:
        return cls(**json.loads(text))


@runtime_checkable
class GuardedWorker(Protocol):
    """A worker whose calls can be aborted."""

    def guarded(self, stage: str) -> AbstractContextManager[None]:
        """Guard a stage: an error inside ends it on every rank."""
        ...

    @property
    def first_cause(self) -> FirstCause | None:
        """The cause that ended the step, or None while nothing has."""
        ...
