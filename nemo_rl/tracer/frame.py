"""Frames: how parts, results and tables of tokens travel and lie on disk.

    4 bytes  NRT1
    4 bytes  length of the header, little-endian
    header   JSON, filled up with spaces so that the payload starts at a multiple of 8
    payload  little-endian numbers as `dtype` and `shape` of the header say; the rest of the message

Ranks send a `FrameTable` per pass where tokens are shown one by one, and `FramePart`s; the hub makes `Frame`s and
`FrameTable`s of them, which viewers get and recordings hold. Invariant: decoding trusts nothing: a message that is no
frame raises `BadFrame`, and nothing larger than the message is ever allocated.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from nemo_rl.errors import UserError
from nemo_rl.records.sites import Direction, SiteKind, execution_order
from nemo_rl.tracer.reducer import Reducer, Span, parse_reducer

__all__ = [
    "MAGIC",
    "MAX_HEADER_BYTES",
    "BadFrame",
    "Frame",
    "FramePart",
    "FrameSite",
    "FrameTable",
    "Where",
    "decode",
    "header_of",
]

MAGIC = b"NRT1"
LENGTH = struct.Struct("<I")
ALIGNMENT = 8
MAX_HEADER_BYTES = 1 << 20
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<") for name in ("float32", "float64", "int32", "int64")
}


Reader = Callable[[Any], object]


class BadFrame(ValueError):
    """A message that is not a valid frame."""


@dataclass(frozen=True, slots=True)
class FrameSite:
    """A place of the model in one direction of a pass."""

    kind: SiteKind
    layer: int | None = None
    """Counted from 0 over the whole model; None outside the layers."""
    name: str | None = None
    """Name of a parameter, or None for a site of activations."""
    direction: Direction = Direction.FORWARD
    is_recomputed: bool = False

    @property
    def text(self) -> str:
        """Return a text for people, such as `mlp.out[3] backward`."""
        at = self.name if self.layer is None else self.layer
        where = self.kind.value if at is None else f"{self.kind.value}[{at}]"
        way = "" if self.direction is Direction.FORWARD else f" {self.direction.value}"
        return f"{where}{way}{' recomputed' if self.is_recomputed else ''}"

    @property
    def order(self) -> tuple[int, int, int]:
        return execution_order(self.kind, self.layer, self.direction)

    def as_record(self) -> dict[str, object]:
        record: dict[str, object] = {"kind": self.kind.value, "layer": self.layer, "direction": self.direction.value}
        record |= {"name": self.name} if self.name is not None else {}
        return record | ({"recomputed": True} if self.is_recomputed else {})

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> FrameSite:
        layer, name = record.get("layer"), record.get("name")
        if not (layer is None or (type(layer) is int and layer >= 0)) or not (name is None or isinstance(name, str)):
            raise BadFrame(f"expected a site, got {str(record)[:200]}")
        return cls(
            kind=SiteKind(record["kind"]),
            layer=layer,
            name=name,
            direction=Direction(record["direction"]),
            is_recomputed=bool(record.get("recomputed", False)),
        )


@dataclass(frozen=True, slots=True)
class Where:
    """The key of a picture: run, step, phase, site and reducer of a part or a frame."""

    run: str
    step: int
    phase: str
    site: FrameSite
    reducer: Reducer
    update: int = 0
    """Optimizer step within the phase."""

    def as_record(self) -> dict[str, object]:
        return _record(self, WHERE_FIELDS) | {"site": self.site.as_record(), "reducer": str(self.reducer)}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Where:
        reducer = parse_reducer(_text(record["reducer"]))
        return cls(site=FrameSite.of_record(record["site"]), reducer=reducer, **_fields(record, WHERE_FIELDS))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FramePart:
    """A reduced tensor of one rank in one microbatch."""

    what: ClassVar[str] = "part"
    where: Where
    payload: np.ndarray
    span: Span
    table: str | None = None
    """Name of the rank's token table that `rows` index; None for reducers of whole tensors."""
    rows: np.ndarray | None = None
    """`[r]` int32 which tokens of the table; None: all of them, in order. Sent after the payload."""
    microbatch: int = 0
    rank: int = 0
    axes: Mapping[str, int] = field(default_factory=dict)
    """Place of the rank on every axis."""
    num_not_finite: int = 0
    """Values that are NaN or infinite among those reduced."""
    dropped_before: int = 0
    """Frames that this rank has dropped so far, since the run began."""

    def encode(self) -> bytes:
        header = self.where.as_record() | _record(self, PART_FIELDS)
        header["span"] = [self.span.start, self.span.stop, self.span.whole]
        header["num_rows"] = None if self.rows is None else len(self.rows)
        tail = b"" if self.rows is None else self.rows.astype("<i4").tobytes()
        return _encode(self.what, header, self.payload) + tail

    @classmethod
    def of(cls, header: Mapping[str, Any], payload: np.ndarray, tail: bytes) -> FramePart:
        """Raises:
        BadFrame, KeyError, TypeError, ValueError: no such part.
        """
        num_rows = header.get("num_rows")
        if len(tail) != 4 * (num_rows or 0):
            raise BadFrame(f"expected {4 * (num_rows or 0)} bytes of row numbers, got {len(tail)}")
        start, stop, whole = (_whole(number) for number in header["span"])
        if not 0 <= start <= stop <= whole:
            raise BadFrame(f"expected features within the whole, got {header['span']}")
        return cls(
            where=Where.of_record(header),
            payload=payload,
            span=Span(start, stop, whole),
            rows=None if num_rows is None else np.frombuffer(tail, dtype="<i4"),
            **_fields(header, PART_FIELDS),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frame:
    """One picture: what all ranks and microbatches give together."""

    what: ClassVar[str] = "frame"
    where: Where
    payload: np.ndarray
    """Per token: rows in the order of the table."""
    table: str | None = None
    num_features: int = 0
    num_parts: int = 1
    num_not_finite: int = 0
    missing: tuple[int, ...] = ()
    """Ranks that have not said that they are done: the picture may lack parts."""
    dropped: int = 0
    """Frames dropped by ranks within this phase of this step: the picture may lack parts."""
    wall_s: float = 0.0
    """Unix time at which it was put together."""

    def encode(self) -> bytes:
        return _encode(self.what, self.where.as_record() | _record(self, FRAME_FIELDS), self.payload)

    @classmethod
    def of(cls, header: Mapping[str, Any], payload: np.ndarray, tail: bytes) -> Frame:
        """Raises:
        BadFrame, KeyError, TypeError, ValueError: no such frame.
        """
        _no_tail(tail)
        return cls(
            where=Where.of_record(header),
            payload=payload,
            **_fields(header, FRAME_FIELDS),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrameTable:
    """Tokens, in the order of the rows of what refers to them.

    From a rank: those of one pass; from the hub: those of all ranks, sorted by row and position, with their texts.
    """

    what: ClassVar[str] = "table"
    run: str
    name: str
    """Unique within a rank, or within a run."""
    step: int
    keys: tuple[str, ...]
    tokens: np.ndarray
    """`[3, R]` int32: index into `keys`, position in the row, token id."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Token id -> text, as far as known."""

    def encode(self) -> bytes:
        return _encode(self.what, _record(self, TABLE_FIELDS), self.tokens)

    @classmethod
    def of(cls, header: Mapping[str, Any], payload: np.ndarray, tail: bytes) -> FrameTable:
        """Raises:
        BadFrame, KeyError, TypeError, ValueError: no such table.
        """
        _no_tail(tail)
        fields = _fields(header, TABLE_FIELDS)
        num_keys = len(fields["keys"])
        is_table = payload.ndim == 2 and len(payload) == 3 and payload.dtype == np.int32
        if not is_table or (payload.size and not (payload[0].min() >= 0 and payload[0].max() < num_keys)):
            raise BadFrame(f"expected [3, R] int32 row numbers below {num_keys}, positions and ids")
        return cls(tokens=payload, **fields)


KINDS: Mapping[str, type[FramePart | Frame | FrameTable]] = {kind.what: kind for kind in (FramePart, Frame, FrameTable)}


def decode(message: bytes) -> FramePart | Frame | FrameTable:
    """Read one message.

    Raises:
        BadFrame: it is none.
    """
    header, payload = _open(message)
    try:
        kind = KINDS[header["what"]]
        dtype, shape = DTYPES[header["dtype"]], [_whole(size) for size in header["shape"]]
        num_bytes = dtype.itemsize * math.prod(shape)
        if any(size < 0 for size in shape) or len(shape) > ALIGNMENT or num_bytes > len(payload):
            raise BadFrame(f"expected a shape of at most {len(payload)} bytes, got {shape} of {dtype}")
        values = np.frombuffer(payload, dtype=dtype, count=math.prod(shape)).reshape(shape)
        return kind.of(header, values, bytes(payload[num_bytes:]))
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        raise BadFrame(f"invalid frame: {type(error).__name__}: {str(error)[:300]}") from error


def header_of(message: bytes) -> Mapping[str, Any]:
    """Return the header of a message: its kind under `what`, then the fields of that kind, all unchecked.

    Raises:
        BadFrame: it is none.
    """
    return _open(message)[0]


def _open(message: bytes) -> tuple[Mapping[str, Any], memoryview]:
    start = len(MAGIC) + LENGTH.size
    if len(message) < start or message[: len(MAGIC)] != MAGIC:
        raise BadFrame(f"expected a message that begins with {MAGIC!r}, got {bytes(message[:16])!r}")
    length = LENGTH.unpack_from(message, len(MAGIC))[0]
    if length > min(MAX_HEADER_BYTES, len(message) - start):
        raise BadFrame(f"expected a header of at most {MAX_HEADER_BYTES} bytes within the message, got {length}")
    try:
        header = json.loads(bytes(message[start : start + length]))
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"expected a JSON header: {error}") from error
    if not isinstance(header, dict):
        raise BadFrame("expected a JSON object as header")
    return header, memoryview(message)[start + length :]


def _encode(what: str, header: Mapping[str, object], payload: np.ndarray) -> bytes:
    dtype = payload.dtype.name
    text = json.dumps({"what": what, **header, "dtype": dtype, "shape": payload.shape}, allow_nan=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    values = np.ascontiguousarray(payload, dtype=DTYPES[dtype])
    return b"".join((MAGIC, LENGTH.pack(len(text)), text, values.tobytes()))


def _record(of: object, fields: Mapping[str, Reader]) -> dict[str, object]:
    values = {name: getattr(of, name) for name in fields}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _fields(record: Mapping[str, Any], fields: Mapping[str, Reader]) -> dict[str, Any]:
    """Raises:
    BadFrame, KeyError, TypeError, ValueError: a field is missing, or is none of its kind.
    """
    found: dict[str, Any] = {}
    for name, read in fields.items():
        try:
            found[name] = read(record[name])
        except BadFrame as error:
            raise BadFrame(f"{name}: {error}") from error
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadFrame(f"expected a text, got {str(value)[:100]}")
    return value


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise BadFrame(f"expected a whole number, got {str(value)[:100]}")
    return value


def _count(value: object) -> int:
    if (number := _whole(value)) < 0:
        raise BadFrame(f"expected a number that is not negative, got {number}")
    return number


def _no_tail(tail: bytes) -> None:
    if tail:
        raise BadFrame(f"expected nothing after the payload, got {len(tail)} bytes")


WHERE_FIELDS: Mapping[str, Reader] = {"run": _text, "step": _count, "phase": _text, "update": _count}
PART_FIELDS: Mapping[str, Reader] = {
    "table": _optional_text,
    "microbatch": _count,
    "rank": _count,
    "axes": lambda axes: {str(axis): _whole(place) for axis, place in axes.items()},
    "num_not_finite": _count,
    "dropped_before": _count,
}
FRAME_FIELDS: Mapping[str, Reader] = {
    "table": _optional_text,
    "num_features": _count,
    "num_parts": _count,
    "num_not_finite": _count,
    "missing": lambda ranks: tuple(_whole(rank) for rank in ranks),
    "dropped": _count,
    "wall_s": float,
}
TABLE_FIELDS: Mapping[str, Reader] = {
    "run": _text,
    "name": _text,
    "step": _count,
    "keys": lambda keys: tuple(str(key) for key in keys),
    "texts": lambda texts: {str(token): str(text) for token, text in texts.items()},
}
