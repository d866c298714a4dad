"""Fingerprints of weights: dtype, shape and a hash of the bytes, computed where a weight lies.

Taken by the policy of what it sends, and by engines of what they hold. Invariant: two weights of different bytes, the
same bytes in another order among them, have different fingerprints, but for a chance of about 2**-64; on any device the
numbers are the same. `WeightsDigest` is for weights that may differ a little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch

__all__ = ["Fingerprints", "fingerprints"]

BLOCK = 4096
"""Words of 64 bits in a row of the table that the bytes of a weight are."""
ROWS_AT_ONCE = 16
"""512 KiB of products at a time: they stay in a cache of the processor."""
ROWS_ON_DEVICE = 2048
NUM_FACTORS = 65_537
"""Of rows: a prime, so that no size of a weight divides it."""
WORD_BYTES = 8
HALF = 33
"""Bits by which a word is folded: its highest bit must reach low ones, or signs that are wrong at two places would
cancel."""
SEED = 20_251_124
"""Of both tables of factors: they must be the same wherever a fingerprint is taken."""

# The hash is sum(row factor * sum(column factor * folded word)) modulo 2**64, with odd random factors.


class Fingerprints:
    """Those of weights that come one by one; a GPU is waited for once, at the end."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self._hashes: dict[str, torch.Tensor] = {}

    def add(self, name: str, weight: torch.Tensor) -> None:
        """The weight may change or go from here on."""
        shape = "x".join(map(str, weight.shape)) or "scalar"
        self._heads[name] = f"{str(weight.dtype).removeprefix('torch.')} {shape}"
        self._hashes[name] = _hash(weight)

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same weights, added on their way."""
        for name, weight in weights:
            self.add(name, weight)
            yield name, weight

    def result(self) -> dict[str, str]:
        """Name -> fingerprint, in the order in which they came."""
        if not self._hashes:
            return {}
        numbers = torch.stack(list(self._hashes.values())).tolist()
        return {
            name: f"{self._heads[name]} {number % 2**64:016x}"
            for name, number in zip(self._hashes, numbers, strict=True)
        }


def fingerprints(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> fingerprint of each weight; a weight under several names is read once.

    Example:
        >>> fingerprints([("a", torch.zeros(2, 3, dtype=torch.bfloat16))])
        {'a': 'bfloat16 2x3 0000000000000000'}
    """
    found, first, same = Fingerprints(), dict[int, str](), dict[str, str]()
    kept = list(weights)
    for name, weight in kept:
        same[name] = first.setdefault(id(weight), name)
        if same[name] == name:
            found.add(name, weight)
    result = found.result()
    return {name: result[same[name]] for name, _ in kept}


def _hash(weight: torch.Tensor) -> torch.Tensor:
    """Scalar int64, on the device of the weight."""
    words = _words(weight)
    columns, rows = _factors(words.device)
    at_once = ROWS_AT_ONCE if words.device.type == "cpu" else ROWS_ON_DEVICE
    whole = words.numel() // BLOCK
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    table = words[: whole * BLOCK].view(whole, BLOCK)
    products = torch.empty(min(whole, at_once), BLOCK, dtype=torch.int64, device=words.device)
    for start in range(0, whole, at_once):
        part = table[start : start + at_once]
        first = start % NUM_FACTORS
        total += (_products(part, columns, products[: len(part)]).sum(1) * rows[first : first + len(part)]).sum()
    rest = words[whole * BLOCK :]
    if rest.numel():
        sums = _products(rest, columns[: rest.numel()], torch.empty_like(rest)).sum()
        total += sums * rows[whole % NUM_FACTORS]
    return total


def _products(words: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.bitwise_right_shift(words, HALF, out=out)
    out ^= words
    out *= factors
    return out


def _words(weight: torch.Tensor) -> torch.Tensor:
    """`[words]` int64: the bytes of a weight, filled up with zeros."""
    raw = weight.detach().contiguous().view(-1).view(torch.uint8)
    rest = raw.numel() % WORD_BYTES
    if rest or raw.storage_offset() % WORD_BYTES:
        raw = torch.nn.functional.pad(raw, (0, -rest % WORD_BYTES))
    return raw.view(torch.int64)


@cache
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`[BLOCK]` and `[NUM_FACTORS + rows at once]` odd int64, apart from the process's random numbers."""
    generator = torch.Generator().manual_seed(SEED)
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    columns, rows = (torch.randint(least, most, (size,), generator=generator) | 1 for size in (BLOCK, NUM_FACTORS))
    # Rows at once may cross the end of the table, which begins again there.
    return columns.to(device), torch.cat([rows, rows[:ROWS_ON_DEVICE]]).to(device)
