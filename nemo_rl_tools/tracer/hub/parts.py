"""Parts of one picture put together: rows and features of all ranks and microbatches, in the order of the keys.

Called by `nemo_rl_tools.tracer.hub.assembly`. Invariant: what comes out does not depend on how tokens and features were
split, nor on the order in which parts came; a token's features that came twice count once. R are tokens, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar

import numpy as np

from nemo_rl.tracer.frame import BadFrame, FramePart, FrameTable
from nemo_rl.tracer.reducer import (
    STATS,
    Counts,
    Digest,
    Histogram,
    PerToken,
    Span,
    Stats,
    TopK,
    WholeTensor,
    token_hashes,
)

__all__ = ["RankTokens", "StepKeys", "TokenParts", "WholeParts", "check_part"]

MAX_FEATURES = 1 << 40
POSITION_BITS = 32
"""Lower bits of a token's code, which hold the position; those above hold the number of its row."""
INTEGERS = (Histogram, Counts, Digest)
"""Their parts are whole numbers; those of other whole-tensor reducers are not."""


class StepKeys:
    """Rows of one step, numbered as they are met and sorted as the driver says."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._order: dict[str, int] = {}

    def set_order(self, keys: Sequence[str]) -> None:
        """Add keys: those that are not among these come after them, by name."""
        self._order = {key: place for place, key in enumerate(keys)}

    def codes(self, keys: Sequence[str], row_R: np.ndarray, position_R: np.ndarray) -> np.ndarray:
        """Return `[R]` int64: equal for the same token of whatever table."""
        for key in keys:
            if self._numbers.setdefault(key, len(self.names)) == len(self.names):
                self.names.append(key)
        number_of = np.array([self._numbers[key] for key in keys], dtype=np.int64)
        if not len(row_R):
            return np.zeros(0, np.int64)
        return (number_of[row_R] << POSITION_BITS) | position_R.astype(np.int64)

    def places(self) -> np.ndarray:
        """Return `[number of names]` int64: where each row comes."""
        last = len(self._order)
        order = sorted(range(len(self.names)), key=lambda at: (self._order.get(self.names[at], last), self.names[at]))
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        return places


@dataclass(frozen=True, slots=True)
class RankTokens:
    """Tokens of a rank's table."""

    codes: np.ndarray
    """`[R]` int64"""
    ids: np.ndarray
    """`[R]` int32"""

    @classmethod
    def of(cls, table: FrameTable, keys: StepKeys) -> RankTokens:
        """Raises:
        BadFrame: positions are negative.
        """
        row_R, position_R, ids_R = table.tokens
        if len(position_R) and position_R.min() < 0:
            raise BadFrame(f"table {table.name[:80]!r}: expected positions that are not negative")
        return cls(keys.codes(table.keys, row_R, position_R), ids_R)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.ids.nbytes

    def take(self, rows: np.ndarray | None) -> RankTokens:
        """Return the tokens of a part.

        Raises:
            BadFrame: the part has rows that the table lacks.
        """
        if rows is None:
            return self
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self.codes):
            raise BadFrame(f"expected rows below {len(self.codes)}, got {int(rows.min())} to {int(rows.max())}")
        return RankTokens(self.codes[rows], self.ids[rows])


def check_part(part: FramePart, num_tokens: int | None) -> None:
    """Args:
        num_tokens: that the part has; None for reducers of whole tensors.

    Raises:
        BadFrame: the payload has another shape or dtype than its reducer gives.
    """
    reducer = part.where.reducer
    shape = (*(() if num_tokens is None else (num_tokens,)), *_shape_of(part))
    if part.payload.shape != shape or part.span.whole > MAX_FEATURES:
        raise BadFrame(
            f"{reducer}: expected a payload of shape {shape}, got {part.payload.shape}, features {part.span}"
        )
    if isinstance(reducer, WholeTensor) and (part.payload.dtype.kind == "i") is not isinstance(reducer, INTEGERS):
        raise BadFrame(f"{reducer}: got a payload of {part.payload.dtype}")


def _shape_of(part: FramePart) -> tuple[int, ...]:
    """Return the shape of a part's payload, less its tokens where there are some."""
    reducer = part.where.reducer
    if isinstance(reducer, TopK):
        return (*part.payload.shape[1:2], 2)
    if isinstance(reducer, PerToken):
        return reducer.empty(0, part.span.stop - part.span.start).shape[1:]
    if isinstance(reducer, Counts):
        return (part.payload.size,)
    return (reducer.size if isinstance(reducer, Histogram) else len(STATS) if isinstance(reducer, Stats) else 1,)


@dataclass(slots=True)
class WholeParts:
    """Parts of a reducer of whole tensors, merged as they come."""

    payload: np.ndarray
    num_features: int
    num_parts: int = 0
    num_not_finite: int = 0

    def add(self, part: FramePart, reducer: WholeTensor) -> int:
        """Return the bytes that it now needs more."""
        before = self.payload.nbytes if self.num_parts else 0
        dtype = np.int64 if isinstance(reducer, INTEGERS) else np.float64
        payload = part.payload.astype(dtype)
        self.payload = reducer.merge(self.payload, payload) if self.num_parts else payload
        self.num_parts += 1
        self.num_not_finite += part.num_not_finite
        self.num_features = max(self.num_features, part.span.whole)
        return self.payload.nbytes - before


@dataclass(frozen=True, slots=True)
class _PicturePiece:
    order: tuple[int, int]
    """Microbatch and rank."""
    tokens: RankTokens
    payload: np.ndarray


@dataclass(slots=True)
class TokenParts:
    """Parts of a reducer that keeps something of each token, merged at the end, when all tokens are known."""

    num_features: int
    pieces: dict[Span, list[_PicturePiece]] = field(default_factory=dict)
    num_parts: int = 0
    num_not_finite: int = 0
    ITEM_BYTES: ClassVar[int] = 8

    def add(self, part: FramePart, tokens: RankTokens, reducer: PerToken) -> int:
        """Return the bytes that it now needs more.

        Raises:
            BadFrame: it has another number of features than the parts before.
        """
        if part.span.whole != self.num_features:
            raise BadFrame(f"expected {self.num_features} features in all, got {part.span.whole}")
        payload = part.payload
        if isinstance(reducer, TopK) and payload.shape[1] != reducer.k:
            none = reducer.empty(len(payload), part.span.whole)
            payload = reducer.merge(none, payload, part.span)
        self.pieces.setdefault(part.span, []).append(_PicturePiece((part.microbatch, part.rank), tokens, payload))
        self.num_parts += 1
        self.num_not_finite += part.num_not_finite
        # Codes and ids are those of the table, unless the part has its own rows.
        return payload.nbytes + (0 if part.rows is None else tokens.num_bytes)

    def tokens(self) -> RankTokens:
        """Return the tokens of all parts, each once, sorted by code."""
        pieces = [piece for group in self.pieces.values() for piece in group]
        if not pieces:
            return RankTokens(np.zeros(0, np.int64), np.zeros(0, np.int32))
        codes, first = np.unique(np.concatenate([piece.tokens.codes for piece in pieces]), return_index=True)
        return RankTokens(codes, np.concatenate([piece.tokens.ids for piece in pieces])[first])

    def merge(self, codes: np.ndarray, reducer: PerToken) -> np.ndarray:
        """Return `[R, ...]`, by the sorted codes of the tokens; what `PerToken.finish` takes."""
        merged = reducer.empty(len(codes), self.num_features)
        has_up_to = np.zeros(len(codes), dtype=np.int64)
        # By the first feature, the longest before others, so that no feature of a token is taken twice.
        for span in sorted(self.pieces, key=lambda span: (span.start, -span.stop)):
            group = sorted(self.pieces[span], key=lambda piece: piece.order)
            found, first = np.unique(np.concatenate([piece.tokens.codes for piece in group]), return_index=True)
            rows = np.searchsorted(codes, found)
            is_new = has_up_to[rows] <= span.start
            rows, first = rows[is_new], first[is_new]
            if span.stop > span.start and len(rows):
                payload = np.concatenate([piece.payload for piece in group])[first]
                merged[rows] = reducer.merge(merged[rows], payload, span)
                has_up_to[rows] = span.stop
        return merged

    def fits(self, num_tokens: int, reducer: PerToken, limit: int) -> bool:
        """Return whether merging needs at most `limit` bytes."""
        width = math.prod(reducer.empty(0, self.num_features).shape[1:])
        return num_tokens * width * self.ITEM_BYTES <= limit


@dataclass(frozen=True, slots=True)
class PictureRows:
    """The tokens of a picture, in its order."""

    table: FrameTable
    order: np.ndarray
    """`[R]` of the sorted codes, which come one after the other."""


def draw_sample(codes: np.ndarray, keys: StepKeys, n: int) -> np.ndarray:
    """Return the indices, ascending, of the n tokens with the smallest hashes."""
    hashes = token_hashes(keys.names, codes >> POSITION_BITS, codes & ((1 << POSITION_BITS) - 1))
    return np.sort(np.argsort(hashes, kind="stable")[:n])


def table_of(tokens: RankTokens, keys: StepKeys, *, run: str, step: int) -> PictureRows:
    """Return their table: rows in the order of the keys, then by position; named by what is in it."""
    row_R, position_R = tokens.codes >> POSITION_BITS, tokens.codes & ((1 << POSITION_BITS) - 1)
    places = keys.places()
    place_R = places[row_R] if len(row_R) else row_R
    order = np.lexsort((position_R, place_R))
    used, index_R = np.unique(place_R[order], return_inverse=True)
    by_place = {int(place): keys.names[number] for number, place in enumerate(places)}
    names = tuple(by_place[int(place)] for place in used)
    numbers = np.stack((index_R, position_R[order], tokens.ids[order])).astype("<i4")
    digest = blake2b(numbers.tobytes(), digest_size=8)
    for name in names:
        digest.update(name.encode() + b"\n")
    return PictureRows(FrameTable(run=run, name=digest.hexdigest(), step=step, keys=names, tokens=numbers), order)
