"""The exception tree of the whole package, drawn once.

    NemoRLError
    |-- UserError                 something the user can fix; the command line exits with code 2
    |   |-- ConfigError           one or more problems in a recipe or an override
    |   |-- PreflightError        several problems of any kind, found before anything was started
    |   |-- DatasetError          empty, missing or malformed prompts
    |   |-- ModelFolderError      a model or tokenizer folder that is missing or incomplete
    |   |-- ResourceError         too few CPUs, GPUs, ports or bytes for what was asked
    |   |-- RewardError           a reward function raised, hung or returned something that is no number
    |   |-- NonFiniteError        NaN or inf in a loss, a gradient norm or log-probabilities
    |   |-- CheckpointError       a checkpoint that cannot be written, read or resumed from
    |   |-- RunFolderError        a run folder that another run uses, or that holds one, or that cannot be written
    |   `-- RecordingError        a recording of the tracer that cannot be written (any further)
    |-- DataPlaneError
    |   |-- KeysNotFound          rows that are not in the partition
    |   |-- FieldNotProduced      a field that is declared, but not written yet for every row asked for
    |   |-- PartitionNotFound
    |   |-- SchemaMismatch        dtype, trailing shape, lengths, duplicates or an undeclared field
    |   |-- VersionMismatch       a meta that names other family versions than the ledger holds
    |   |-- LeaseExpired          a commit or a release under a claim that has ended
    |   |-- DataPlaneTimeout      a deadline passed; names partition, keys, fields, stage, owner and age
    |   |-- CapacityExceeded      the partition or the store is full
    |   |-- PayloadCorrupt        bytes of a row are not those that were put
    |   |-- PayloadLost           the process that held the bytes of these rows is gone; the data plane itself lives
    |   `-- DataPlaneClosed       the client, its ledger or its backend has ended
    |       `-- LedgerLost        a ledger that is started again after its death is not back yet
    |-- NodeLost                  machines of a run have died; names them and their ranks
    `-- WorkerError               a worker failed: rank, stage and text of the root cause
        |-- CollectiveTimeout     a collective did not finish in time
        |-- RefitMismatch         an engine does not sample from the weights that it was sent
        `-- WorkerLost            the process of a worker has died, or does not answer
            `-- WorkerLate        it does not answer in time (a CollectiveTimeout as well)

Data plane errors cross process borders as records (`to_record` / `from_record`), never as pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import ClassVar

__all__ = [
    "CapacityExceeded",
    "CheckpointError",
    "CollectiveTimeout",
    "ConfigError",
    "DataPlaneClosed",
    "DataPlaneError",
    "DataPlaneTimeout",
    "DatasetError",
    "FieldNotProduced",
    "KeysNotFound",
    "LeaseExpired",
    "LedgerLost",
    "ModelFolderError",
    "NemoRLError",
    "NodeLost",
    "NonFiniteError",
    "PartitionNotFound",
    "PayloadCorrupt",
    "PayloadLost",
    "PreflightError",
    "RecordingError",
    "RefitMismatch",
    "ResourceError",
    "RewardError",
    "RunFolderError",
    "SchemaMismatch",
    "UserError",
    "VersionMismatch",
    "WorkerError",
    "WorkerLate",
    "WorkerLost",
    "boundary",
    "from_record",
    "name_some",
    "shorten",
    "to_record",
]

# How many keys or names an error message lists before it only counts the rest.
NAMES_SHOWN = 5
# How many characters of a value or of a library's text it shows.
TEXT_SHOWN = 300


def name_some(names: Iterable[object], *, limit: int = NAMES_SHOWN) -> str:
    """List the first few names and count the rest: `a, b, c and 17 more`."""
    listed = names if isinstance(names, Sized) else list(names)
    shown = ", ".join(map(str, islice(listed, limit)))
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"


def shorten(text: str, *, limit: int = TEXT_SHOWN) -> str:
    """Return the beginning of a text that a user wrote, with its length when some is left out."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


class NemoRLError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error."""
    origin_rank: int | None = None
    """Rank that raised it first, where another rank raises it again."""


class UserError(NemoRLError):
    """Something the user can fix: shown as one message without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """All problems of a recipe at once; `problems` holds one line each."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


class PreflightError(ConfigError):
    """The problems that `preflight` has found, when there is more than one; `problems` holds one line each."""


class DatasetError(UserError):
    """Prompts that are empty, missing or malformed."""


class ModelFolderError(UserError):
    """A model or tokenizer folder that is missing or incomplete."""


class ResourceError(UserError):
    """Too few CPUs, GPUs, ports or bytes for what was asked."""


class RewardError(UserError):
    """A reward function raised, hung or returned something that is no number."""


class NonFiniteError(UserError):
    """NaN or inf in a loss, a gradient norm or log-probabilities; the text names the samples."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read or resumed from."""


class UnsupportedFormat(UserError):
    """A file of another version of its format."""


class RunFolderError(UserError):
    """A run folder that another run uses, or that holds one, or that cannot be written."""


class RecordingError(UserError):
    """A recording of the tracer that cannot be written (any further), such as on a full disk."""


@contextmanager
def boundary(kind: type[UserError], place: str) -> Iterator[None]:
    """Guard a library that reads input of a user: whatever it raises ends as `kind` with `place` in front.

    Example:
        >>> try:
        ...     with boundary(ModelFolderError, "model folder 'm': config.json"):
        ...         {}["hidden_size"]
        ... except ModelFolderError as error:
        ...     str(error)
        "model folder 'm': config.json: KeyError: 'hidden_size'"
    """
    try:
        yield
    except (NemoRLError, MemoryError):
        raise
    except Exception as error:
        said = shorten(" ".join(str(error).split()))
        raise kind(f"{place}: {type(error).__name__}{': ' if said else ''}{said}") from error


class DataPlaneError(NemoRLError):
    """Base of the errors that every adapter raises alike."""


class KeysNotFound(DataPlaneError):
    """Rows that are not in the partition."""


class FieldNotProduced(DataPlaneError):
    """A declared field that is not written yet for every row asked for."""


class PartitionNotFound(DataPlaneError):
    """A partition that was never registered."""


class SchemaMismatch(DataPlaneError):
    """Rows, fields, lengths or dtypes that do not fit the declared schema."""


class VersionMismatch(DataPlaneError):
    """A meta that names other family versions than the ledger holds."""


class LeaseExpired(DataPlaneError):
    """A commit or a release under a claim that has ended: its time is over, whether or not others took the rows."""


class DataPlaneTimeout(DataPlaneError):
    """A deadline passed; the text names partition, keys, fields, stage, owner and age."""


class CapacityExceeded(DataPlaneError):
    """The partition or the payload store has no capacity for these rows."""


class PayloadCorrupt(DataPlaneError):
    """Bytes that were read are not those that were put: flipped, cut, exchanged or of another put."""


class PayloadLost(DataPlaneError):
    """The process that held the bytes of these rows is gone; make them again."""


class DataPlaneClosed(DataPlaneError):
    """The client, its ledger or its backend has ended."""


class LedgerLost(DataPlaneClosed):
    """The process of the ledger is gone, or the connection to it; it is started again, so it can be asked later."""


class WorkerError(NemoRLError):
    """A worker failed inside a stage: the root cause, with its rank."""

    def __init__(self, text: str, *, rank: int | None = None, stage: str | None = None) -> None:
        self.text, self.rank, self.stage = text, rank, stage
        where = f"rank {rank}" if rank is not None else "a worker"
        super().__init__(f"{where}, stage {stage or 'unknown'}: {text}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_worker_error, (type(self), self.text, self.rank, self.stage)


class CollectiveTimeout(WorkerError):
    """A collective did not finish in time: a peer has died or left the order of calls."""


class RefitMismatch(WorkerError):
    """The receipt of a refit failed; the text names engine, weight or difference, and version."""


class WorkerLost(WorkerError):
    """The process of a worker has died, or does not answer. What it was asked for can be asked of another one."""


class WorkerLate(WorkerLost, CollectiveTimeout):
    """A worker did not answer in time."""


class NodeLost(NemoRLError):
    """Machines of a run have died in the middle of it; the text names them, their ranks and what failed by it."""

    def __init__(self, text: str, *, num_lost: int, num_spare: int) -> None:
        self.num_lost, self.num_spare = num_lost, num_spare
        """Machines that died, and those alive that could take their place; -1: too few for the run are left."""
        super().__init__(text)


def _rebuild_worker_error(kind: type[WorkerError], text: str, rank: int | None, stage: str | None) -> WorkerError:
    return kind(text, rank=rank, stage=stage)


_BY_NAME: Mapping[str, type[NemoRLError]] = {
    name: kind
    for name, kind in globals().items()
    if isinstance(kind, type)
    and issubclass(kind, DataPlaneError | UserError)
    and kind not in (PreflightError, UnsupportedFormat)
}
"""Errors that keep their class on the way through a socket or an actor reply."""


def to_record(error: BaseException) -> dict[str, str]:
    """Return the error as plain strings, for a socket or an actor reply."""
    return {"kind": type(error).__name__, "text": str(error)}


def from_record(record: Mapping[str, str]) -> NemoRLError:
    """Return the error that `to_record` described; an unknown kind becomes a `NemoRLError` that names it."""
    kind = _BY_NAME.get(record["kind"])
    if kind is None:
        return NemoRLError(f"{record['kind']}: {record['text']}")
    return kind(record["text"])
