"""Reducers: what is kept of a tensor. Named and typed; parts of any split are put together to what the whole gives.

A rank makes a part of what it holds (`nemo_rl.models.policy.trace_parts`), the hub merges parts of all ranks and
finishes them. Invariant: merging is associative, and no part depends on how tokens or features were split. Shapes: R
tokens, F features, r of a part. Parts and results are numpy arrays, little-endian.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import ClassVar, Literal

import numpy as np

from nemo_rl.errors import UserError

__all__ = [
    "REDUCERS",
    "STATS",
    "VECTOR_FILES",
    "Counts",
    "Digest",
    "Full",
    "Histogram",
    "Norm",
    "PerToken",
    "Project",
    "Reducer",
    "Sample",
    "Span",
    "Stats",
    "Tiles",
    "TopK",
    "WholeTensor",
    "mix",
    "parse_reducer",
    "token_hashes",
]

GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Constants of splitmix64 (Steele, Lea, Flood 2014)."""


def mix(values: np.ndarray) -> np.ndarray:
    """Return splitmix64 of uint64 values, element by element."""
    with np.errstate(over="ignore"):
        mixed = values + GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
        return mixed ^ (mixed >> np.uint64(31))


def token_hashes(keys: Sequence[str], row_R: np.ndarray, position_R: np.ndarray) -> np.ndarray:
    """Return `[R]` uint64.

    Args:
        keys: of the rows.
        row_R: `[R]` index into `keys`.
        position_R: `[R]` position in the row.
    """
    of_key = np.array([int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") for key in keys], "u8")
    if not len(row_R):
        return np.zeros(0, "u8")
    return mix(of_key[row_R] ^ mix(position_R.astype("u8")))


CALL = re.compile(r"\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*")
VECTOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Name of an artifact in the folder of artifacts, never a path."""
VECTOR_FILES = (".safetensors", ".pt")
"""Endings of the file that an artifact is."""
MAX_COUNT = 65_536
MAX_TEXT = 200

STATS = ("count", "sum", "sumsq", "min", "max", "absmax", "zeros", "nan", "posinf", "neginf")
"""Numbers of `stats`, in this order; sums and extremes are those of the finite values."""
EXPONENTS = range(-32, 32)
"""Exponents of the histogram by powers of two; smaller values count as 0, larger ones in the last bin."""


@dataclass(frozen=True, slots=True)
class Span:
    """Features `[start, stop)` of `whole` that a part has."""

    start: int
    stop: int
    whole: int


class Reducer(ABC):
    """One way of reducing a tensor; its fields are its parameters, in the order in which they are written."""

    name: ClassVar[str]
    text: ClassVar[str]
    """Description for people."""

    def __str__(self) -> str:
        values = [f"{getattr(self, part.name)}" for part in fields(self)]  # type: ignore[arg-type]
        return f"{self.name}({', '.join(values)})" if values else self.name


class WholeTensor(Reducer):
    """Keeps something of all values of all tokens."""

    @abstractmethod
    def merge(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the part of two parts together."""

    def finish(self, part: np.ndarray) -> np.ndarray:
        """Return the shown numbers of a merged part."""
        return part


class PerToken(Reducer):
    """Keeps something of each token: `[R, ...]`."""

    @abstractmethod
    def empty(self, num_tokens: int, num_features: int) -> np.ndarray:
        """Return the array that merging starts with."""

    @abstractmethod
    def merge(self, so_far: np.ndarray, part: np.ndarray, span: Span) -> np.ndarray:
        """Return the merged array of some tokens with a further part of their features."""

    def finish(self, merged: np.ndarray, num_features: int) -> np.ndarray:
        """Return the shown numbers of the merged array."""
        return merged


@dataclass(frozen=True)
class Stats(WholeTensor):
    """Ten numbers; `[10]` float64 as `STATS` says."""

    name: ClassVar[str] = "stats"
    text: ClassVar[str] = "count, sum, sum of squares, smallest, largest, zeros, NaN, infinities"

    def merge(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        merged = left + right
        merged[3] = min(left[3], right[3])
        merged[4:6] = np.maximum(left[4:6], right[4:6])
        return merged


@dataclass(frozen=True)
class Histogram(WholeTensor):
    """Counts of values.

    With bins: `[bins + 2]` int64, first those below `low` and last those at or above `high`. Without: by powers of two,
    `[2 * 64 + 1]` int64: negative values from large to small, those smaller than 2^-32, positive ones from small to
    large. NaN counts nowhere; infinities at the ends.
    """

    name: ClassVar[str] = "histogram"
    text: ClassVar[str] = "counts of values by powers of two, or histogram(LOW, HIGH, BINS)"
    low: float = 0.0
    high: float = 0.0
    bins: int = 0

    def __post_init__(self) -> None:
        if self.bins and not (np.isfinite([self.low, self.high]).all() and self.low < self.high):
            raise UserError(f"reducer {self}: expected finite LOW < HIGH")
        if bool(self.bins) == (self.low == self.high) or not 0 <= self.bins <= MAX_COUNT:
            raise UserError(f"reducer {self.name}: expected histogram, or histogram(LOW, HIGH, BINS) with BINS >= 1")

    def __str__(self) -> str:
        return super().__str__() if self.bins else self.name

    @property
    def size(self) -> int:
        return self.bins + 2 if self.bins else 2 * len(EXPONENTS) + 1

    def merge(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left + right


@dataclass(frozen=True)
class Counts(WholeTensor):
    """Counts of each whole number, such as tokens per expert: int64, as long as the largest number asks."""

    name: ClassVar[str] = "counts"
    text: ClassVar[str] = "how often each whole number occurs: the load of experts"

    def merge(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
        merged = longer.copy()
        merged[: len(shorter)] += shorter
        return merged


@dataclass(frozen=True)
class Norm(WholeTensor):
    """The Euclidean norm: parts are `[1]` float64 sums of squares."""

    name: ClassVar[str] = "norm"
    text: ClassVar[str] = "Euclidean norm over all values"

    def merge(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left + right

    def finish(self, part: np.ndarray) -> np.ndarray:
        return np.sqrt(part)


@dataclass(frozen=True)
class Digest(WholeTensor):
    """`[1]` int64: equal for equal values at equal places, whatever the layout; sums of hashes, modulo 2^64."""

    name: ClassVar[str] = "digest"
    text: ClassVar[str] = "64 bits of all values, equal in every layout that gives the same bits"

    def merge(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return left + right


@dataclass(frozen=True)
class Tiles(PerToken):
    """`[R, n]` float32: features in n equal stretches, each reduced; stretch t has features floor(t F / n) up to
    floor((t + 1) F / n), at least one where n <= F. Nothing is padded. More stretches than features: NaN where empty.
    """

    name: ClassVar[str] = "tiles"
    text: ClassVar[str] = "each token's features in n stretches: tiles(N, mean|max|absmax|rms)"
    n: int
    how: Literal["mean", "max", "absmax", "rms"]

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_COUNT or self.how not in ("mean", "max", "absmax", "rms"):
            raise UserError(f"reducer {self.name}: expected tiles(N, mean|max|absmax|rms) with N >= 1, got {self}")

    def bounds(self, num_features: int) -> np.ndarray:
        """Return `[n + 1]` int64: where stretches begin and end."""
        return np.arange(self.n + 1, dtype=np.int64) * num_features // self.n

    @property
    def takes_maximum(self) -> bool:
        """Return whether a stretch is its maximum rather than a sum, of values or of squares."""
        return self.how in ("max", "absmax")

    def empty(self, num_tokens: int, num_features: int) -> np.ndarray:
        start = -np.inf if self.takes_maximum else 0.0
        return np.full((num_tokens, self.n), start, dtype=np.float64)

    def merge(self, so_far: np.ndarray, part: np.ndarray, span: Span) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.maximum(so_far, part) if self.takes_maximum else so_far + part

    def finish(self, merged: np.ndarray, num_features: int) -> np.ndarray:
        widths = np.diff(self.bounds(num_features))
        if self.takes_maximum:
            found = np.where(widths > 0, merged, np.nan)
        else:
            with np.errstate(invalid="ignore", divide="ignore"):
                found = merged / widths
                found = np.sqrt(found) if self.how == "rms" else found
        return found.astype(np.float32)


@dataclass(frozen=True)
class TopK(PerToken):
    """`[R, k, 2]` float64: the k largest values of each token and the features they are at; -inf and -1 beyond F.
    Of equal values any.
    """

    name: ClassVar[str] = "topk"
    text: ClassVar[str] = "the k largest values of each token and where they are: topk(K)"
    k: int

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_COUNT:
            raise UserError(f"reducer {self.name}: expected topk(K) with K >= 1, got {self}")

    def empty(self, num_tokens: int, num_features: int) -> np.ndarray:
        return np.tile(np.array([-np.inf, -1.0]), (num_tokens, self.k, 1))

    def merge(self, so_far: np.ndarray, part: np.ndarray, span: Span) -> np.ndarray:
        both = np.concatenate((so_far, part), axis=1)
        # Largest value first, NaN as larger than all; then the smallest feature; missing ones last.
        values = np.where(np.isnan(both[..., 0]), np.inf, both[..., 0])
        features = np.where(both[..., 1] < 0, np.inf, both[..., 1])
        order = np.lexsort((features, -values), axis=1)[:, : self.k]
        return np.take_along_axis(both, order[..., None], axis=1)


class _Values(PerToken):
    def empty(self, num_tokens: int, num_features: int) -> np.ndarray:
        return np.zeros((num_tokens, num_features), dtype=np.float32)

    def merge(self, so_far: np.ndarray, part: np.ndarray, span: Span) -> np.ndarray:
        merged = so_far.copy()
        merged[:, span.start : span.stop] = part
        return merged


@dataclass(frozen=True)
class Full(_Values):
    """All values: `[R, F]` float32."""

    name: ClassVar[str] = "full"
    text: ClassVar[str] = "all values of each token"


@dataclass(frozen=True)
class Sample(_Values):
    """`[R, F]` float32 of the n tokens whose row and position have the smallest hash: the same ones in every layout."""

    name: ClassVar[str] = "sample"
    text: ClassVar[str] = "all values of n tokens, drawn by their identity: sample(N)"
    n: int

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_COUNT:
            raise UserError(f"reducer {self.name}: expected sample(N) with N >= 1, got {self}")


@dataclass(frozen=True)
class Project(PerToken):
    """`[R, 1]` float32: the product of each token's features with a vector, summed in float32 or better."""

    name: ClassVar[str] = "project"
    text: ClassVar[str] = "each token's component along a vector: project(NAME), of NAME.safetensors or NAME.pt"
    vector: str

    def __post_init__(self) -> None:
        if VECTOR.fullmatch(self.vector) is None:
            raise UserError(
                f"reducer {self.name}: expected the name of a vector of letters, digits, '_' and '-', "
                f"got {self.vector[:MAX_TEXT]!r}"
            )

    def empty(self, num_tokens: int, num_features: int) -> np.ndarray:
        return np.zeros((num_tokens, 1), dtype=np.float64)

    def merge(self, so_far: np.ndarray, part: np.ndarray, span: Span) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return so_far + part

    def finish(self, merged: np.ndarray, num_features: int) -> np.ndarray:
        return merged.astype(np.float32)


_KINDS: Sequence[type[Reducer]] = (Stats, Histogram, Counts, Norm, Digest, Tiles, TopK, Full, Sample, Project)
REDUCERS: Mapping[str, type[Reducer]] = {kind.name: kind for kind in _KINDS}


def parse_reducer(text: str) -> Reducer:
    """Return a reducer as it is written, such as `tiles(8, rms)`.

    Raises:
        UserError: no such reducer, or not with these parameters.

    Example:
        >>> parse_reducer("tiles(8,rms)")
        Tiles(n=8, how='rms')
        >>> str(parse_reducer("tiles(8,rms)"))
        'tiles(8, rms)'
    """
    match = CALL.fullmatch(text[:MAX_TEXT])
    kind = REDUCERS.get(match[1]) if match is not None else None
    if match is None or kind is None:
        known = "; ".join(f"{name}: {reducer.text}" for name, reducer in REDUCERS.items())
        raise UserError(f"reducer: expected one of those below, got {text[:MAX_TEXT]!r}. {known}")
    given = [part.strip() for part in (match[2] or "").split(",")] if (match[2] or "").strip() else []
    wanted = fields(kind)  # type: ignore[arg-type]
    if len(given) > len(wanted):
        raise UserError(f"reducer {text[:MAX_TEXT]!r}: expected at most {len(wanted)} parameters; {kind.text}")
    values = [_value(part.type, word, text, kind) for part, word in zip(wanted, given, strict=False)]
    try:
        return kind(*values)
    except TypeError as error:
        raise UserError(f"reducer {text[:MAX_TEXT]!r}: parameters are missing; {kind.text}") from error


def _value(type_name: object, word: str, text: str, kind: type[Reducer]) -> object:
    reads = {"int": int, "float": float}.get(str(type_name), str)
    try:
        return reads(word)
    except ValueError as error:
        raise UserError(f"reducer {text[:MAX_TEXT]!r}: expected a number, got {word!r}; {kind.text}") from error
