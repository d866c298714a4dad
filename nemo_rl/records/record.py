"""The record of one tensor with the tokens that its rows belong to, and `RecordWriter`, which writes those of one rank.

Read by `reader`. Invariants: a record names the row and position of every token that it holds, so that records of any
layout can be put together without knowing how it laid tokens out; a folder without an `end` of every rank says that it
is incomplete; nothing is ever pickled.

    FOLDER/manifest.json       what this is about; written by rank 0
    FOLDER/rank_00000.jsonl    a line per record: place, dtype, shape, digest, where its bytes are
    FOLDER/rank_00000.bin      the bytes, little-endian, one record after the other
    FOLDER/rank_00000.end      written last: how many records there are
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path

import torch

from nemo_rl.errors import UserError
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.utils.files import FileFormat, write_text

__all__ = [
    "FORMAT",
    "MANIFEST",
    "DimSplit",
    "RecordManifest",
    "RecordPlace",
    "RecordWriter",
    "TokenTable",
    "bytes_of",
    "digest_of",
    "end_path",
    "lines_path",
    "new_folder",
    "payload_path",
]


FORMAT = "nemo_rl.record"


@dataclass(frozen=True, kw_only=True, slots=True)
class DimSplit:
    """The equal part of the last dimension that a rank holds."""

    index: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPlace:
    """The site, the pass and the step in which a tensor was seen."""

    kind: SiteKind
    layer: int | None = None
    """Counted from 0 over the whole model; None outside the layers."""
    name: str | None = None
    """Name of the parameter, for its gradient."""
    direction: Direction = Direction.FORWARD
    phase: str = "forward"
    """Pass of the worker: `forward`, `prev_logprobs`, `reference_logprobs` or `train`."""
    update: int = 0
    """Optimizer step within the call."""
    microbatch: int = 0
    """Number of the microbatch on this rank within the optimizer step."""
    is_recomputed: bool = False
    """Seen again when a backward pass ran a layer once more."""

    def as_record(self) -> dict[str, object]:
        """Return the JSON form; what is at its default is left out."""
        return {part.name: value for part in fields(self) if (value := getattr(self, part.name)) != part.default}

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> RecordPlace:
        """Raises:
        ValueError, TypeError, KeyError: no such record.
        """
        known = {part.name: record[part.name] for part in fields(cls) if part.name in record}
        known["kind"] = SiteKind(str(record["kind"]))
        if "direction" in known:
            known["direction"] = Direction(str(known["direction"]))
        return cls(**known)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """The tokens of a pass on one rank, in the order of a record's rows.

    Example:
        The first two tokens of row "a", and the first one of row "b".
        >>> table = TokenTable(keys=("a", "b"), row_R=torch.tensor([0, 0, 1]), position_R=torch.tensor([0, 1, 0]),
        ...                    token_R=torch.tensor([5, 6, 5]))
        >>> len(table)
        3
    """

    keys: tuple[str, ...]
    """Keys of the rows of the pass."""
    row_R: torch.Tensor
    """`[R]` int64 index into `keys`."""
    position_R: torch.Tensor
    """`[R]` int64 position in the row."""
    token_R: torch.Tensor
    """`[R]` int64 token ids."""

    def __len__(self) -> int:
        return len(self.row_R)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordManifest:
    """The description of a folder of records: `manifest.json`."""

    run_id: str
    model: Mapping[str, object]
    """Values that must agree between two sides: type, layers, hidden size, vocabulary, experts."""
    layout: Mapping[str, int]
    """Sizes of the parallel axes; `world` is the number of ranks, each of which writes a file."""
    engine: str
    """`dtensor` or `megatron`."""
    precision: str
    selector: str
    phases: tuple[str, ...]
    sites: tuple[Mapping[str, object], ...] = ()
    """Sites that a complete folder holds: `kind`, `layer`, `direction` of each site, over all ranks."""
    unobserved: Mapping[str, str] = field(default_factory=dict)
    """Sites that were asked for and that this model cannot give -> why."""
    tokenizer: str = ""
    """Folder, for texts of tokens."""
    weights: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    """Anything else that a reader may want to see."""
    format: str = FORMAT
    version: int = FileFormat.TENSORS.version

    def as_record(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> RecordManifest:
        """Raises:
        TypeError: fields are missing.
        """
        known = {part.name: record[part.name] for part in fields(cls) if part.name in record}
        for name in ("phases", "sites"):
            value = known.get(name, ())
            known[name] = tuple(value) if isinstance(value, list | tuple) else ()
        for name in ("model", "layout", "unobserved"):
            if not isinstance(known.get(name, {}), Mapping):
                raise TypeError(f"{name}: expected an object, got {known[name]!r}")
        sizes = known.get("layout", {})
        if not all(type(size) is int for size in sizes.values()):  # type: ignore[attr-defined]
            raise TypeError(f"layout: expected whole numbers, got {sizes!r}")
        if not all(isinstance(phase, str) for phase in known["phases"]):  # type: ignore[attr-defined]
            raise TypeError(f"phases: expected names, got {known['phases']!r}")
        return cls(**known)  # type: ignore[arg-type]


MANIFEST = "manifest.json"
DIGEST_BYTES = 8
PAYLOAD_MODE = "xb"
"""A file that is there belongs to another recording."""


def lines_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.jsonl"


def payload_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.bin"


def end_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.end"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, contiguous and in its own dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest_of(payload: bytes) -> str:
    return blake2b(payload, digest_size=DIGEST_BYTES).hexdigest()


def new_folder(folder: Path, manifest: RecordManifest) -> Path:
    """Make the folder and write its manifest; called by rank 0 before any rank writes.

    Raises:
        UserError: the folder holds records already, or cannot be written.
    """
    if (folder / MANIFEST).exists():
        raise UserError(f"{folder}: holds records already; give another folder, or remove this one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / MANIFEST, json.dumps(manifest.as_record(), indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return folder


class RecordWriter:
    """The records of one rank.

    Raises:
        UserError: from every method, where the disk does not take it.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder, self._rank = folder, rank
        self._count, self._offset, self._tables = 0, 0, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = lines_path(folder, rank).open("x", encoding="utf-8")
            self._payload = payload_path(folder, rank).open(PAYLOAD_MODE)
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def tokens(self, table: TokenTable) -> str:
        """Write a table of tokens; return the name by which records refer to it."""
        name = f"t{self._tables}"
        self._tables += 1
        packed_3R = torch.stack((table.row_R, table.position_R, table.token_R)).to(torch.int64)
        self._put({"tokens": name, "keys": list(table.keys)}, packed_3R)
        return name

    def tensor(
        self, place: RecordPlace, value: torch.Tensor, *, tokens: str | None, split: DimSplit | None = None
    ) -> None:
        """Write a tensor.

        Args:
            value: `[R, ...]` in the order of the table `tokens`; anything where that is None.
            split: this rank's part of the last dimension; None has all of it.
        """
        head: dict[str, object] = {"place": place.as_record(), "table": tokens}
        if split is not None and split.count > 1:
            head["split"] = [split.index, split.count]
        self._put(head, value)

    def close(self) -> None:
        """End the files: they are complete. Idempotent."""
        if self._lines.closed:
            return
        try:
            self._payload.close()
            self._lines.close()
            write_text(end_path(self.folder, self._rank), json.dumps({"records": self._count}) + "\n")
        except OSError as error:
            self.abandon()
            raise _cannot_write(self.folder, error) from error

    def abandon(self) -> None:
        """End without a word: what is there stays, and lacks its end. Idempotent."""
        for file in (self._payload, self._lines):
            with suppress(OSError):
                file.close()

    def _put(self, head: dict[str, object], value: torch.Tensor) -> None:
        payload = bytes_of(value)
        head |= {
            "seq": self._count,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "offset": self._offset,
            "bytes": len(payload),
            "digest": digest_of(payload),
        }
        try:
            self._payload.write(payload)
            # The line comes after its bytes have left this process: a line that is there can be read.
            self._payload.flush()
            self._lines.write(json.dumps(head) + "\n")
            self._lines.flush()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        self._count += 1
        self._offset += len(payload)


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder}: records cannot be written: {error.strerror or error}; free space or choose another folder"
    )
