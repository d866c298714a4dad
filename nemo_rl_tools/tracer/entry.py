"""Entries: how frames, tables and messages lie in the files of a recording.

    4 bytes  NRTE
    1 byte   kind: 0 the beginning of a file, 1 a frame, 2 a table of tokens, 3 a message (JSON)
    1 byte   1 if an earlier file holds the same entry, too
    2 bytes  zero
    4 bytes  length of the body
    4 bytes  step, or 2^32 - 1
    4 bytes  CRC-32 of the sixteen bytes above and of the body
    body

All numbers are little-endian. Invariant: an entry that was cut off or changed is never taken for a whole one; the next
whole one is found again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from struct import Struct
from typing import Any, BinaryIO

from nemo_rl.tracer.frame import BadFrame, Frame, FrameTable, decode
from nemo_rl.tracer.protocol import dump

__all__ = [
    "HEAD",
    "EntryKind",
    "EntryProblem",
    "StreamEntry",
    "entry_at",
    "find_entry",
    "pack_entry",
    "pack_message",
    "size_of",
]

MAGIC = b"NRTE"
HEAD = Struct("<4sBB2xIII")
FIELDS = Struct("<4sBB2xII")
"""The head without its checksum."""
NO_STEP = 0xFFFF_FFFF
CHUNK_BYTES = 1 << 20
"""Searched at a time."""


class EntryKind(IntEnum):
    """The kind of an entry's body."""

    BEGIN = 0
    FRAME = 1
    TABLE = 2
    MESSAGE = 3


class EntryProblem(Enum):
    """The reason why there is no entry at a place."""

    INCOMPLETE = "the file ends in the middle of it"
    DAMAGED = "its checksum is wrong"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamEntry:
    """One entry of a file."""

    kind: EntryKind
    step: int | None
    is_repeat: bool
    """An earlier file holds it, too, unless that file has fallen out."""
    at: int
    """First byte of the entry in its file."""
    body: bytes

    @property
    def end(self) -> int:
        return self.at + HEAD.size + len(self.body)

    def frame(self) -> Frame | FrameTable:
        """
        Raises:
            BadFrame: the body is neither.
        """
        found = decode(self.body)
        if not isinstance(found, Frame | FrameTable):
            raise BadFrame("expected a frame or a table of tokens, got a part")
        return found

    def message(self) -> dict[str, Any]:
        """
        Raises:
            BadFrame: the body is no JSON object.
        """
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"expected a message: {error}") from error
        if not isinstance(found, dict):
            raise BadFrame("expected a JSON object")
        return found


def pack_entry(kind: EntryKind, body: bytes, *, step: object = None, is_repeat: bool = False) -> bytes:
    """Return head and body; a step that is no number below 2^32 - 1 is left out."""
    number = step if type(step) is int and 0 <= step < NO_STEP else NO_STEP
    fields = FIELDS.pack(MAGIC, kind, is_repeat, len(body), number)
    return b"".join((fields, zlib.crc32(body, zlib.crc32(fields)).to_bytes(4, "little"), body))


def pack_message(record: Mapping[str, object]) -> bytes:
    """Return the body of a message: strict JSON, with null for numbers that are not finite."""
    return dump(record).encode()


def entry_at(file: BinaryIO, at: int, *, size: int) -> StreamEntry | EntryProblem:
    """Return the entry that begins at byte `at` of a file of `size` bytes, or the reason why there is none."""
    if at + HEAD.size > size:
        return EntryProblem.INCOMPLETE
    file.seek(at)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return EntryProblem.INCOMPLETE
    magic, kind, is_repeat, length, step, crc = HEAD.unpack(head)
    if magic != MAGIC or kind > max(EntryKind) or is_repeat > 1:
        return EntryProblem.DAMAGED
    if at + HEAD.size + length > size:
        return EntryProblem.INCOMPLETE
    body = file.read(length)
    if len(body) != length or zlib.crc32(body, zlib.crc32(head[: FIELDS.size])) != crc:
        return EntryProblem.DAMAGED
    return StreamEntry(
        kind=EntryKind(kind),
        step=None if step == NO_STEP else step,
        is_repeat=bool(is_repeat),
        at=at,
        body=body,
    )


def find_entry(file: BinaryIO, start: int, *, size: int) -> int | None:
    """Return the first byte, at or after `start`, of a whole entry, or None where no further entry is whole."""
    at = start
    while at < size:
        file.seek(at)
        chunk = file.read(CHUNK_BYTES + len(MAGIC) - 1)
        place = chunk.find(MAGIC)
        while place >= 0:
            if isinstance(entry_at(file, at + place, size=size), StreamEntry):
                return at + place
            place = chunk.find(MAGIC, place + 1)
        at += CHUNK_BYTES
    return None


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file, in bytes."""
    return os.fstat(file.fileno()).st_size
