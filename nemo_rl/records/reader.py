"""Reads folders of records, also of recordings that ended early or were damaged.

`read_folder` reads the lines of all ranks and keeps what is wrong as problems instead of raising; a tensor's bytes are
read, and compared with their digest, when it is asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nemo_rl.errors import NemoRLError, UnsupportedFormat, UserError
from nemo_rl.records.record import (
    FORMAT,
    MANIFEST,
    DimSplit,
    RecordManifest,
    RecordPlace,
    TokenTable,
    digest_of,
    end_path,
    lines_path,
    payload_path,
)
from nemo_rl.utils.files import FileFormat, check_format, open_plain, read_plain

__all__ = ["CorruptRecord", "RecordFolder", "TensorRecord", "read_folder"]

MOST_RANKS = 1 << 16
"""More have never recorded; a damaged manifest may say any number."""
MOST_BYTES = 1 << 62
"""Most bytes of a file: no position in one is beyond."""
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


class CorruptRecord(NemoRLError):
    """The bytes differ from those that were written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordProblem:
    """Something wrong with a folder."""

    is_corrupt: bool
    """Damaged, rather than only incomplete."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecordPayload:
    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str

    def load(self) -> torch.Tensor:
        try:
            with open_plain(self.path) as file:
                # Before anything is read: a damaged line may ask for more bytes than a machine has.
                if self.offset + self.num_bytes > os.fstat(file.fileno()).st_size:
                    raise CorruptRecord(
                        f"{self.path}: it ends before the {self.num_bytes} bytes at {self.offset} that a record names"
                    )
                file.seek(self.offset)
                payload = file.read(self.num_bytes)
        except OSError as error:
            raise CorruptRecord(f"{self.path}: {error.strerror or error}") from error
        if len(payload) != self.num_bytes or digest_of(payload) != self.digest:
            raise CorruptRecord(
                f"{self.path}: {self.num_bytes} bytes at {self.offset} differ from those written (digest differs)"
            )
        if not payload:
            return torch.zeros(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(payload), dtype=self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """One tensor of one rank."""

    place: RecordPlace
    rank: int
    seq: int
    """Counts the records of the rank."""
    split: DimSplit | None
    table: str | None
    payload: _RecordPayload
    tables: Mapping[str, _TableFile] = field(repr=False)
    """Token tables of the rank of this record."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.payload.shape

    def load(self) -> torch.Tensor:
        """Raises:
        CorruptRecord: the bytes are not those that were written.
        """
        return self.payload.load()

    def tokens(self) -> TokenTable | None:
        """Return the tokens of its rows; None for a tensor without.

        Raises:
            CorruptRecord: as `load`, or the table is missing.
        """
        if self.table is None:
            return None
        if self.table not in self.tables:
            raise CorruptRecord(
                f"{self.payload.path}: record {self.seq} names the tokens {self.table!r}, of which there are none"
            )
        return self.tables[self.table].load()


@dataclass(frozen=True, kw_only=True, slots=True)
class _TableFile:
    keys: tuple[str, ...]
    payload: _RecordPayload

    def load(self) -> TokenTable:
        row_R, position_R, token_R = self.payload.load()
        return TokenTable(keys=self.keys, row_R=row_R, position_R=position_R, token_R=token_R)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFolder:
    """All records of a folder."""

    path: Path
    manifest: RecordManifest
    records: Sequence[TensorRecord]
    """Rank by rank, each in the order in which it wrote them."""
    problems: Sequence[RecordProblem]


def read_folder(path: Path) -> RecordFolder:
    """Return the records of a folder, and what is wrong with it.

    Raises:
        UserError: no folder of records.
        UnsupportedFormat: of a format or version that is not known here.
        CorruptRecord: its manifest cannot be read.
    """
    manifest = _manifest(path)
    records: list[TensorRecord] = []
    problems: list[RecordProblem] = []
    for rank in range(_world(path, manifest)):
        found, wrong = _read_rank(path, rank)
        records += found
        problems += wrong
    return RecordFolder(path=path, manifest=manifest, records=records, problems=problems)


def _world(path: Path, manifest: RecordManifest) -> int:
    world = manifest.layout.get("world", 1)
    if not isinstance(world, int) or isinstance(world, bool) or not 1 <= world <= MOST_RANKS:
        raise CorruptRecord(f"{path / MANIFEST}: layout.world: expected 1 to {MOST_RANKS} ranks, got {world!r:.50}")
    return world


def _manifest(path: Path) -> RecordManifest:
    where = path / MANIFEST
    try:
        record = json.loads(read_plain(where).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path}: not a folder of records: it has no {MANIFEST}") from error
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UnsupportedFormat(f"{where}: expected a manifest of {FORMAT!r}")
    check_format(FileFormat.TENSORS, record.get("version"), where=where)
    try:
        return RecordManifest.of_record(record)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptRecord(f"{where}: its manifest is damaged: {error}") from error


def _read_rank(folder: Path, rank: int) -> tuple[list[TensorRecord], list[RecordProblem]]:
    records: list[TensorRecord] = []
    problems: list[RecordProblem] = []
    tables: dict[str, _TableFile] = {}
    where = lines_path(folder, rank)
    try:
        lines = read_plain(where).split(b"\n")
    except OSError as error:
        # One that is there and cannot be read is damaged; one that is not has recorded nothing.
        return [], [
            RecordProblem(
                is_corrupt=where.exists(), text=f"rank {rank} wrote nothing: {where.name}: {error.strerror or error}"
            )
        ]
    if lines[-1]:
        problems.append(RecordProblem(is_corrupt=False, text=f"{where.name}: its last line is cut off"))
    for number, line in enumerate(lines[:-1], start=1):
        try:
            _read_line(json.loads(line), folder, rank, records, tables)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            problems.append(RecordProblem(is_corrupt=True, text=f"{where.name}, line {number}: no record: {error}"))
    problems += _end_problems(folder, rank, num_records=len(lines) - 1)
    return records, problems


def _read_line(
    head: object, folder: Path, rank: int, records: list[TensorRecord], tables: dict[str, _TableFile]
) -> None:
    if not isinstance(head, dict):
        raise TypeError("expected an object")
    shape, dtype = tuple(int(n) for n in head["shape"]), DTYPES[head["dtype"]]
    payload = _RecordPayload(
        path=payload_path(folder, rank),
        offset=int(head["offset"]),
        num_bytes=int(head["bytes"]),
        dtype=dtype,
        shape=shape,
        digest=str(head["digest"]),
    )
    if payload.offset + payload.num_bytes > MOST_BYTES:
        raise ValueError(f"{payload.num_bytes} bytes at {payload.offset} are in no file")
    if min((0, payload.offset, *shape)) < 0 or math.prod(shape) * dtype.itemsize != payload.num_bytes:
        raise ValueError(f"{payload.num_bytes} bytes are no {head['dtype']} of shape {list(shape)}")
    if "tokens" in head:
        tables[str(head["tokens"])] = _TableFile(keys=tuple(str(key) for key in head["keys"]), payload=payload)
        return
    split = DimSplit(index=int(head["split"][0]), count=int(head["split"][1])) if "split" in head else None
    records.append(
        TensorRecord(
            place=RecordPlace.of_record(head["place"]),
            rank=rank,
            seq=int(head["seq"]),
            split=split,
            table=None if head["table"] is None else str(head["table"]),
            payload=payload,
            tables=tables,
        )
    )


def _end_problems(folder: Path, rank: int, *, num_records: int) -> list[RecordProblem]:
    where = end_path(folder, rank)
    try:
        said = int(json.loads(read_plain(where).decode("utf-8"))["records"])
    except FileNotFoundError:
        return [RecordProblem(is_corrupt=False, text=f"rank {rank} did not end: there is no {where.name}")]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return [RecordProblem(is_corrupt=True, text=f"{where.name}: {error}")]
    if said == num_records:
        return []
    return [
        RecordProblem(is_corrupt=said < num_records, text=f"rank {rank} wrote {said} records, {num_records} are there")
    ]
