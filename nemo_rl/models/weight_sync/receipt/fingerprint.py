"""Fingerprints of weights: dtype, shape and a hash of the bytes, computed where a weight lies.

Taken by the policy of what it sends, and by engines of what they hold. Invariant: two weights of different bytes, the
same bytes in another order among them, have different fingerprints, but for a chance of at most 2**-32 and mostly of
about 2**-60; on any device the numbers are the same. It is no protection against somebody who chooses the bytes by the
factors. `WeightsDigest` is for weights that may differ a little.

The hash is a sum over the bytes, so that those of parts add up to that of the whole (`hash_part`, `summed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import add

import torch

from nemo_rl.models.hf.files import Box

__all__ = ["Fingerprints", "PartFingerprints", "fingerprints", "hash_part", "summed"]

BLOCK = 4096
"""Words of 64 bits in a row of the table that the bytes of a weight are."""
ROWS_AT_ONCE = 16
"""512 KiB of products at a time: they stay in a cache of the processor."""
ROWS_ON_DEVICE = 2048
PART_ROWS_ON_DEVICE = 256
"""8 MiB at a time, of which a part of a weight needs several: little beside the buffers of a refit by shards."""
NUM_FACTORS = 65_537
"""Number of row factors: a prime, so that no size of a weight divides it."""
WORD_BYTES = 8
TOGETHER_BYTES = 1 << 20
"""Bytes of weights that are hashed together: they and their products stay in a cache of the processor."""
HALF = 32
SEED = 20_251_124
"""Seed of the tables of factors: they must be the same wherever a fingerprint is taken."""

# The hash is sum(row factor * sum(factor of words * word + factor of halves * upper half)) modulo 2**64, with odd
# random factors. The shift to the upper half repeats the sign, which loses nothing: upper halves stay as different as
# they are. Two words differ in the upper half, or by less than 2**32: the difference that a factor meets has at
# most 31 trailing zeros, so its product has at least 32 random bits. Of words alone two wrong highest bits cancel.


class Fingerprints:
    """Fingerprints of weights that come one by one; a GPU is waited for once, at the end.

    Args:
        defers: weights are kept, and must not change, until `result`, which hashes those of one shape together: for the
            many small tensors of an adapter the number of calls counts and not the bytes.
    """

    def __init__(self, *, defers: bool = False) -> None:
        self._heads: dict[str, str] = {}
        self._hashes: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] | None = {} if defers else None

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Add a weight, which may change or go from here on unless `defers` is set."""
        self._heads[name] = _head(str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
        if self._kept is None:
            self._hashes[name] = _hash(weight)
        else:
            self._kept[name] = weight

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            self.add(name, weight)
            yield name, weight

    def result(self) -> dict[str, str]:
        """Name -> fingerprint, in the order in which they came."""
        if self._kept:
            self._hashes |= _hashes(self._kept)
            self._kept = {}
        if not self._hashes:
            return {}
        numbers = dict(zip(self._hashes, torch.stack(list(self._hashes.values())).tolist(), strict=True))
        return {name: f"{head} {numbers[name] % 2**64:016x}" for name, head in self._heads.items()}


def fingerprints(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> fingerprint of each weight; a weight under several names is read once.

    Example:
        >>> fingerprints([("a", torch.zeros(2, 3, dtype=torch.bfloat16))])
        {'a': 'bfloat16 2x3 0000000000000000'}
    """
    found, first, same = Fingerprints(defers=True), dict[int, str](), dict[str, str]()
    kept = list(weights)
    for name, weight in kept:
        same[name] = first.setdefault(id(weight), name)
        if same[name] == name:
            found.add(name, weight)
    result = found.result()
    return {name: result[same[name]] for name, _ in kept}


class PartFingerprints:
    """Hashes of parts of weights, which may come several times; a GPU is waited for once, at the end."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str, Box], torch.Tensor] = {}

    def add(self, name: str, box: Box, part: torch.Tensor, *, shape: tuple[int, ...]) -> None:
        """Add a box of a weight of this shape; `part` may change from here on."""
        self._hashes[name, box] = hash_part(part, box, shape)

    def sums(self) -> dict[str, int]:
        """Name -> hash of all boxes of a weight together."""
        return {name: sum(hashes.values()) for name, hashes in self.result().items()}

    def result(self) -> dict[str, dict[Box, int]]:
        """Name -> hash of each box."""
        found: dict[str, dict[Box, int]] = {}
        if self._hashes:
            numbers = torch.stack(list(self._hashes.values())).tolist()
            for (name, box), number in zip(self._hashes, numbers, strict=True):
                found.setdefault(name, {})[box] = number
        return found


def hash_part(part: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Return scalar int64, on the device of the part: what the box `part` adds to the hash of a weight of this shape.

    Args:
        part: the box of the weight; it may change from here on.
    """
    # Dims that follow the last one that is cut lie end to end.
    cut = max((dim for dim, size in enumerate(box.size) if size != shape[dim]), default=0)
    rows = part.detach().contiguous().view(-1, *box.size[cut:]).flatten(1) if shape else part.detach().view(1, 1)
    starts = torch.zeros(1, dtype=torch.int64)
    for dim in range(cut):
        starts = (starts[:, None] * shape[dim] + torch.arange(box.start[dim], box.start[dim] + box.size[dim])).flatten()
    if shape:
        inner = math.prod(shape[cut + 1 :])
        starts = (starts * shape[cut] + box.start[cut]) * inner
    starts = starts * part.element_size()
    raw = rows.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for lead in (starts % WORD_BYTES).unique().tolist():
        chosen = (starts % WORD_BYTES == lead).nonzero()[:, 0]
        own = raw if len(chosen) == len(raw) else raw[chosen.to(raw.device)]
        size = own.shape[1] + lead
        padded = torch.nn.functional.pad(own, (lead, -size % WORD_BYTES)) if lead or size % WORD_BYTES else own
        total += _hash_runs(padded.contiguous().view(-1).view(torch.int64).view(len(own), -1), starts[chosen] // 8)
    return total


def _hash_runs(words: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the sum over runs of words `[runs, words]` that begin at these words `[runs]` of a weight."""
    factors, count = _factors(words.device), words.shape[1]
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    steps = BLOCK * (ROWS_AT_ONCE if words.device.type == "cpu" else PART_ROWS_ON_DEVICE)
    at_once = max(1, steps // count)
    for first in range(0, len(words), at_once):
        for begin in range(0, count, steps):
            part = words[first : first + at_once, begin : begin + steps]
            columns = torch.arange(begin, begin + part.shape[1], device=words.device)
            places = starts[first : first + at_once].to(words.device)[:, None] + columns
            column = places % BLOCK
            sums = factors.words[column] * part + factors.halves[column] * (part >> HALF)
            total += (sums * factors.rows[places // BLOCK % NUM_FACTORS]).sum()
    return total


def summed(hashes: Iterable[int], *, dtype: str, shape: tuple[int, ...]) -> str:
    """Return the fingerprint of a weight from the hashes of parts that cover it once."""
    return f"{_head(dtype, shape)} {sum(hashes) % 2**64:016x}"


def _head(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {'x'.join(map(str, shape)) or 'scalar'}"


def _hash(weight: torch.Tensor) -> torch.Tensor:
    """Return scalar int64, on the device of the weight."""
    words = _words(weight)
    factors = _factors(words.device)
    at_once = ROWS_AT_ONCE if words.device.type == "cpu" else ROWS_ON_DEVICE
    whole = words.numel() // BLOCK
    totals = list[torch.Tensor]()
    table = words[: whole * BLOCK].view(whole, BLOCK)
    products = torch.empty(min(whole, at_once), BLOCK, dtype=torch.int64, device=words.device)
    for start in range(0, whole, at_once):
        part = table[start : start + at_once]
        first = start % NUM_FACTORS
        sums = _sums(part, factors.words, factors.halves, products[: len(part)])
        totals.append((sums * factors.rows[first : first + len(part)]).sum())
    rest = words[whole * BLOCK :]
    if rest.numel():
        of_words, of_halves = factors.words[: rest.numel()], factors.halves[: rest.numel()]
        sums = _sums(rest, of_words, of_halves, torch.empty_like(rest))
        totals.append(sums * factors.rows[whole % NUM_FACTORS])
    return reduce(add, totals) if totals else torch.zeros((), dtype=torch.int64, device=words.device)


def _hashes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the hash of each weight; small ones of one dtype, shape and device are hashed together."""
    groups, found = dict[tuple[object, ...], list[str]](), dict[str, torch.Tensor]()
    for name, weight in weights.items():
        groups.setdefault((weight.dtype, weight.shape, weight.device), []).append(name)
    for names in groups.values():
        size = weights[names[0]].nbytes
        if len(names) == 1 or not 0 < size <= TOGETHER_BYTES or size % WORD_BYTES:
            found |= {name: _hash(weights[name]) for name in names}
            continue
        at_once = max(1, TOGETHER_BYTES // size)
        for start in range(0, len(names), at_once):
            some = names[start : start + at_once]
            stacked = torch.stack([weights[name].detach() for name in some]).view(len(some), -1)
            found |= dict(zip(some, _hash_rows(stacked.view(torch.uint8).view(torch.int64)).unbind(), strict=True))
    return found


def _hash_rows(words: torch.Tensor) -> torch.Tensor:
    """Return the hash of each row `[weights, words]`, as `_hash` has it."""
    factors, count = _factors(words.device), words.shape[1]
    whole = count // BLOCK
    total = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    if whole:
        table = words[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        sums = _sums(table, factors.words, factors.halves, torch.empty_like(table))
        total += (sums * factors.rows[:whole]).sum(-1)
    rest = words[:, whole * BLOCK :]
    if rest.shape[1]:
        of_words, of_halves = factors.words[: rest.shape[1]], factors.halves[: rest.shape[1]]
        total += _sums(rest, of_words, of_halves, torch.empty_like(rest)) * factors.rows[whole]
    return total


def _sums(words: torch.Tensor, of_words: torch.Tensor, of_halves: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `[...]` of `[..., columns]`, with `out` as room for the products."""
    if words.device.type == "cpu":
        torch.mul(words, of_words, out=out)
        sums = out.sum(-1)
        torch.bitwise_right_shift(words, HALF, out=out)
        out *= of_halves
        return sums.add_(out.sum(-1))
    # As many bytes in fewer kernels.
    torch.bitwise_right_shift(words, HALF, out=out)
    out *= of_halves
    return out.addcmul_(words, of_words).sum(-1)


def _words(weight: torch.Tensor) -> torch.Tensor:
    """Return `[words]` int64: the bytes of a weight, filled up with zeros."""
    raw = weight.detach().contiguous().view(-1).view(torch.uint8)
    rest = raw.numel() % WORD_BYTES
    if rest or raw.storage_offset() % WORD_BYTES:
        raw = torch.nn.functional.pad(raw, (0, -rest % WORD_BYTES))
    return raw.view(torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Factors:
    words: torch.Tensor
    """`[BLOCK]` odd int64."""
    halves: torch.Tensor
    """`[BLOCK]` odd int64."""
    rows: torch.Tensor
    """`[NUM_FACTORS + rows at once]` odd int64."""


@cache
def _factors(device: torch.device) -> _Factors:
    """They are apart from the process's random numbers."""
    generator = torch.Generator().manual_seed(SEED)
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    words, halves, rows = (
        torch.randint(least, most, (size,), generator=generator) | 1 for size in (BLOCK, BLOCK, NUM_FACTORS)
    )
    # Rows at once may cross the end of the table, which begins again there.
    return _Factors(
        words=words.to(device), halves=halves.to(device), rows=torch.cat([rows, rows[:ROWS_ON_DEVICE]]).to(device)
    )
