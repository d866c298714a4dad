"""Framed logs: what must survive a kill, appended to one file. The ledger's journal and finished groups are such files.

    8 bytes magic and format | head frame {"kind", ...} | frame | frame | ...
    a frame: u32 bytes of its text | u64 bytes of its body | u32 check of both | u64 check of the content | text | body

The text is msgpack, the body is any bytes. Checks are xxh3_64 seeded with the place of the frame, so none can be lost,
repeated or moved unseen; numbers are little-endian. Invariant: a frame is read as it was written or not at all. A frame
that ends with the file and is not whole was cut off by a kill (`TornFrame`); any other wrong byte is damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any, BinaryIO

import msgpack
import xxhash

__all__ = [
    "EARLIER_GROUPS",
    "GROUPS",
    "JOURNAL",
    "DamagedLog",
    "ForeignLog",
    "LogFrame",
    "TornFrame",
    "begin",
    "frame",
    "read_frame",
    "read_frames",
    "read_head",
    "write_all",
]

FORMAT = 1
"""Raised when a file can no longer be read by the version before."""
MAGIC = b"NRFL"
JOURNAL, GROUPS = "journal of a ledger", "finished groups"
"""Kinds of files."""
EARLIER_GROUPS = b"NRDG"
"""Start of the files of finished groups that releases before 0.2 have written, in another form."""
_START = Struct("<4sI")
_SIZES, _HEAD = Struct("<IQ"), Struct("<IQIQ")
HEAD_BYTES = _HEAD.size
"""Bytes of a frame besides its text and body."""


class TornFrame(Exception):
    """The file ends inside a frame: nothing was written here, or a kill has cut it."""


class DamagedLog(Exception):
    """A byte is not what was written."""


class ForeignLog(Exception):
    """The file is no log, or of a newer format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFrame:
    """One frame of a file."""

    at: int
    """Its first byte in the file."""
    end: int
    """The byte at which the next frame begins."""
    text: Any
    body: bytes


def begin(kind: str, about: Mapping[str, object]) -> bytes:
    """Return what a file begins with: its start and a head frame that names its kind and says more about it."""
    return _START.pack(MAGIC, FORMAT) + frame(msgpack.packb({"kind": kind, **about}), at=_START.size)


def frame(text: bytes, body: bytes = b"", *, at: int) -> bytes:
    """Return a frame.

    Args:
        text: packed by msgpack.
        at: the byte of the file at which it will lie.
    """
    head = _HEAD.pack(len(text), len(body), _check_of_sizes(len(text), len(body), at), _check(text, body, at))
    return b"".join((head, text, body))


def write_all(file: int, content: bytes) -> None:
    """Write everything to a descriptor: the system takes as much as there is space for, and says so."""
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def read_head(file: BinaryIO, kind: str) -> LogFrame:
    """Return the head frame of a file.

    Raises:
        TornFrame, DamagedLog: there is no whole one.
        ForeignLog: the file is no log, of another kind, or of a newer format.
    """
    file.seek(0)
    start = file.read(_START.size)
    if len(start) < _START.size and MAGIC.startswith(start[: len(MAGIC)]):
        raise TornFrame(f"it has {len(start)} bytes")
    magic, version = _START.unpack(start.ljust(_START.size, b"\0"))
    if magic != MAGIC:
        raise ForeignLog(f"it starts with {magic!r}")
    if version > FORMAT:
        raise ForeignLog(f"it has format {version}, this version reads up to {FORMAT}; use the version that wrote it")
    found = read_frame(file, _START.size)
    if not isinstance(found.text, dict) or found.text.get("kind") != kind:
        raise ForeignLog(f"it is no {kind}")
    return found


def read_frame(file: BinaryIO, at: int) -> LogFrame:
    """Return the frame at a byte of a file.

    Raises:
        TornFrame, DamagedLog: there is no whole one.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(at)
    head = file.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        raise TornFrame(f"{len(head)} bytes are no frame")
    text_bytes, body_bytes, sizes_check, check = _HEAD.unpack(head)
    if sizes_check != _check_of_sizes(text_bytes, body_bytes, at):
        if not any(head) and not any(file.read()):
            raise TornFrame("zeros: the machine stopped before the pages were written")
        raise DamagedLog(f"the head of the frame at byte {at} of {size} is not what was written")
    end = at + HEAD_BYTES + text_bytes + body_bytes
    if end > size:
        raise TornFrame("the frame is cut")
    text, body = file.read(text_bytes), file.read(body_bytes)
    if _check(text, body, at) != check:
        problem = f"the checksum of the frame at byte {at} of {size} differs"
        raise TornFrame(problem) if end == size else DamagedLog(problem)
    return LogFrame(at=at, end=end, text=msgpack.unpackb(text, strict_map_key=False), body=body)


def read_frames(file: BinaryIO, at: int) -> Iterator[LogFrame]:
    """Yield the frames from a byte of a file on; one that a kill has cut ends them.

    Raises:
        DamagedLog: a byte before the end is wrong.
    """
    while True:
        try:
            found = read_frame(file, at)
        except TornFrame:
            return
        yield found
        at = found.end


def _check_of_sizes(text_bytes: int, body_bytes: int, at: int) -> int:
    """Return its own check: a frame whose length is wrong must not pass for one that was cut off."""
    return xxhash.xxh3_64_intdigest(_SIZES.pack(text_bytes, body_bytes), seed=at) & 0xFFFFFFFF


def _check(text: bytes, body: bytes, at: int) -> int:
    if not body:
        return xxhash.xxh3_64_intdigest(text, seed=at)
    digest = xxhash.xxh3_64(text, seed=at)
    digest.update(body)
    return digest.intdigest()
