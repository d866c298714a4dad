"""Parts: what one rank makes of a tensor for each reducer of `nemo_rl.tracer.reducer`.

Called by `TraceSink`. Invariant: parts of any split of tokens and features merge to what the whole gives. On the CPU
numpy does what it does faster than torch; of a tensor on a GPU the part alone comes to the CPU, except for `histogram`,
`digest` and `full`. Shapes: R tokens, F features of this rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nemo_rl.errors import UserError, boundary
from nemo_rl.tracer.reducer import (
    EXPONENTS,
    VECTOR,
    VECTOR_FILES,
    Counts,
    Digest,
    Full,
    Histogram,
    Norm,
    Project,
    Reducer,
    Sample,
    Span,
    Stats,
    Tiles,
    TopK,
    mix,
)
from nemo_rl.utils.files import open_plain

__all__ = ["TENSOR", "ReducedValues", "Vectors", "part_of", "read_vector"]

NOTHING = np.array([0, 0, 0, np.inf, -np.inf, -np.inf, 0, 0, 0, 0], dtype=np.float64)
"""`stats` of no value."""
BLOCK = 1 << 18
"""Values that fit into the cache of a core together."""
MANTISSA_BITS, EXPONENT_BIAS = 23, 127
"""Bits of a float32."""
MAX_COUNTED = 1 << 20
"""Largest number that `counts` counts: a vocabulary, not a pointer."""


@dataclass(eq=False)
class ReducedValues:
    """A tensor as reducers see it."""

    given: torch.Tensor
    """`[R, F]`, of any dtype and device."""
    span: Span
    vectors: Mapping[str, torch.Tensor]
    """Name -> `[h]` float32 of the layer at hand, for `project`."""
    hashes: Callable[[], np.ndarray]
    """`[R]` uint64 of the tokens."""

    @cached_property
    def floats(self) -> torch.Tensor:
        """Return `[R, F]` float32, where the tensor is."""
        return self.given.detach().float()

    @cached_property
    def array(self) -> np.ndarray:
        return self.floats.cpu().numpy()

    @cached_property
    def squares_R(self) -> torch.Tensor:
        """Return `[R]` float64: sum of squares of each token."""
        squares_R = torch.linalg.vector_norm(self.floats, dim=-1).double().square()
        # The squares of large values are beyond float32.
        return squares_R if bool(squares_R.sum().isfinite()) else self.floats.double().square().sum(-1)

    @cached_property
    def num_not_finite(self) -> int:
        """Return the number of values that are NaN or infinite."""
        if bool(self.squares_R.sum().isfinite()):
            return 0
        return int((~self.floats.isfinite()).sum())


def part_of(reducer: Reducer, values: ReducedValues) -> np.ndarray:
    return _PARTS[type(reducer)](reducer, values)


def _stats(_: Reducer, values: ReducedValues) -> np.ndarray:
    if values.floats.device.type != "cpu":
        return _stats_on_device(values.floats)
    found = NOTHING
    rows = max(1, BLOCK // max(1, values.floats.shape[1]))
    # Block by block, so that all but the first pass over a block find it in the cache.
    for block in values.floats.split(rows):
        found = Stats().merge(found, _stats_of(block))
    return found


def _stats_of(floats: torch.Tensor) -> np.ndarray:
    array = floats.numpy()
    if not array.size:
        return NOTHING
    low, high = (float(extreme) for extreme in torch.aminmax(floats))
    zeros = np.count_nonzero(np.equal(array, 0))
    if np.isfinite(low) and np.isfinite(high):
        total = float(floats.sum(-1).double().sum())
        squares = float(torch.linalg.vector_norm(floats, dim=-1).double().square().sum())
        if not np.isfinite(squares):
            # The squares of large values are beyond float32.
            squares = float(floats.double().square().sum())
        return np.array([array.size, total, squares, low, high, max(-low, high), zeros, 0, 0, 0], dtype=np.float64)
    finite = array[np.isfinite(array)].astype(np.float64)
    extremes = (finite.min(), finite.max(), np.abs(finite).max()) if finite.size else (np.inf, -np.inf, -np.inf)
    bad = np.isnan(array).sum(), np.isposinf(array).sum(), np.isneginf(array).sum()
    return np.array([array.size, finite.sum(), np.square(finite).sum(), *extremes, zeros, *bad], dtype=np.float64)


def _stats_on_device(floats: torch.Tensor) -> np.ndarray:
    """Return `stats` without waiting for the device before the end: ten numbers come to the CPU at once."""
    if not floats.numel():
        return NOTHING
    is_finite = floats.isfinite()
    finite = torch.where(is_finite, floats, 0.0)
    parts = (
        torch.full((), floats.numel(), device=floats.device),
        finite.sum(dtype=torch.float64),
        torch.linalg.vector_norm(finite, dtype=torch.float64).square(),
        torch.where(is_finite, floats, torch.inf).amin(),
        torch.where(is_finite, floats, -torch.inf).amax(),
        torch.where(is_finite, floats.abs(), -torch.inf).amax(),
        (floats == 0).sum(),
        floats.isnan().sum(),
        floats.isposinf().sum(),
        floats.isneginf().sum(),
    )
    return torch.stack([part.double() for part in parts]).cpu().numpy()


def _histogram(reducer: Reducer, values: ReducedValues) -> np.ndarray:
    assert isinstance(reducer, Histogram)
    array = values.array.reshape(-1)
    if bool(values.floats.sum().isnan()):
        array = array[~np.isnan(array)]
    if reducer.bins:
        scale = reducer.bins / (reducer.high - reducer.low)
        at = np.floor((array.astype(np.float64) - reducer.low) * scale).clip(-1, reducer.bins).astype(np.int64) + 1
    else:
        bits = np.ascontiguousarray(array).view(np.int32)
        exponent = ((bits >> MANTISSA_BITS) & 0xFF) - EXPONENT_BIAS
        first, last = EXPONENTS.start, EXPONENTS.stop - 1
        # Negative values from large to small, then those that count as zero, then positive values.
        step = exponent.clip(first - 1, last) - first + 1
        at = len(EXPONENTS) + np.where(bits < 0, -step, step)
    return np.bincount(at, minlength=reducer.size).astype(np.int64)


def _counts(_: Reducer, values: ReducedValues) -> np.ndarray:
    numbers = values.given.detach().reshape(-1).to(device="cpu", dtype=torch.int64)
    return np.bincount(numbers.clamp(0, MAX_COUNTED).numpy(), minlength=1).astype(np.int64)


def _norm(_: Reducer, values: ReducedValues) -> np.ndarray:
    return np.array([float(values.squares_R.sum())])


def _digest(_: Reducer, values: ReducedValues) -> np.ndarray:
    bits = np.ascontiguousarray(values.array).view(np.uint32).astype(np.uint64)
    features = mix(np.arange(values.span.start, values.span.stop, dtype=np.uint64))
    with np.errstate(over="ignore"):
        hashed = mix(bits ^ mix(values.hashes()[:, None] + features[None]))
        return hashed.sum(dtype=np.uint64, keepdims=True).reshape(1).view(np.int64)


def _tiles(reducer: Reducer, values: ReducedValues) -> np.ndarray:
    assert isinstance(reducer, Tiles)
    span, floats = values.span, values.floats
    start = -np.inf if reducer.takes_maximum else 0.0
    dtype = torch.float64 if reducer.how == "rms" else torch.float32
    tiles = torch.full((len(floats), reducer.n), start, dtype=dtype, device=floats.device)
    bounds = reducer.bounds(span.whole).clip(span.start, span.stop) - span.start
    for number in np.flatnonzero(np.diff(bounds)):
        stretch = floats[:, bounds[number] : bounds[number + 1]]
        tiles[:, number] = _REDUCE[reducer.how](stretch)
    return tiles.cpu().numpy()


_REDUCE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda part: part.sum(-1),
    "max": lambda part: part.amax(-1),
    "absmax": lambda part: part.abs().amax(-1),
    "rms": lambda part: part.double().square().sum(-1),
}


def _top_k(reducer: Reducer, values: ReducedValues) -> np.ndarray:
    assert isinstance(reducer, TopK)
    k = min(reducer.k, values.floats.shape[1])
    found = values.floats.topk(k, dim=-1)
    part = np.tile(np.array([-np.inf, -1.0]), (len(values.floats), reducer.k, 1))
    part[:, :k, 0] = found.values.cpu().numpy()
    part[:, :k, 1] = found.indices.cpu().numpy() + values.span.start
    return part


def _full(_: Reducer, values: ReducedValues) -> np.ndarray:
    return values.array


def _project(reducer: Reducer, values: ReducedValues) -> np.ndarray:
    assert isinstance(reducer, Project)
    vector = values.vectors[reducer.vector][values.span.start : values.span.stop]
    return (values.floats @ vector.to(values.floats.device))[:, None].cpu().numpy()


_PARTS: Mapping[type[Reducer], Callable[[Reducer, ReducedValues], np.ndarray]] = {
    Stats: _stats,
    Histogram: _histogram,
    Counts: _counts,
    Norm: _norm,
    Digest: _digest,
    Tiles: _tiles,
    TopK: _top_k,
    Full: _full,
    Sample: _full,
    Project: _project,
}


TENSOR = "vector"
"""Name of the tensor in its file: `[h]`, or `[L, h]` with a row for each layer."""


class Vectors:
    """The vectors of one folder; none where the folder is None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._load = lru_cache(maxsize=64)(self._read)

    def of_layer(self, name: str, layer: int | None, *, size: int) -> torch.Tensor:
        """Return `[size]` float32.

        Raises:
            UserError: no such artifact, or not of this size, or it has no row for this layer.
        """
        vector = self._load(name)
        if vector.dim() == 2:
            if layer is None or layer >= len(vector):
                raise UserError(f"vector {name!r}: has rows for layers 0 to {len(vector) - 1}, got layer {layer}")
            vector = vector[layer]
        if vector.shape != (size,):
            raise UserError(f"vector {name!r}: expected {size} numbers for this site, got {tuple(vector.shape)}")
        return vector

    def _read(self, name: str) -> torch.Tensor:
        if self._folder is None:
            raise UserError(f"vector {name!r}: no folder of vectors is configured; set diagnostics.tracer.artifacts")
        if VECTOR.fullmatch(name) is None:
            raise UserError(f"vector {name[:100]!r}: expected a name, not a path")
        paths = [path for end in VECTOR_FILES if (path := self._folder / f"{name}{end}").exists()]
        if len(paths) > 1:
            raise UserError(f"vector {name!r}: expected one file, got {' and '.join(map(str, paths))}; remove one")
        path = paths[0] if paths else self._folder / f"{name}{VECTOR_FILES[0]}"
        return read_vector(path)


def read_vector(path: Path) -> torch.Tensor:
    """Return a vector that was saved with torch, or as safetensors, in float32."""
    with boundary(UserError, f"{path}: cannot be read"):
        open_plain(path).close()
    found = _of_safetensors(path) if path.suffix == VECTOR_FILES[0] else _of_torch(path)
    if not found.is_floating_point() or found.dim() not in (1, 2):
        shape = list(found.shape)
        raise UserError(f"{path}: expected floating-point numbers of shape [h] or [L, h], got {found.dtype} {shape}")
    return found.float()


def _of_safetensors(path: Path) -> torch.Tensor:
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from error
    if TENSOR not in found:
        raise UserError(f"{path}: expected a tensor {TENSOR!r} of shape [h] or [L, h], got {sorted(found)}")
    return found[TENSOR]


def _of_torch(path: Path) -> torch.Tensor:
    """Return the tensor that the file is, or the one that it has under the name `vector`."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        said = str(error).partition("\n")[0]
        raise UserError(f"{path}: expected a tensor of torch.save, loadable without running code: {said}") from error
    if isinstance(found, dict):
        found = found.get(TENSOR, sorted(map(str, found)))
    if not isinstance(found, torch.Tensor):
        raise UserError(f"{path}: expected a tensor, or a dict with a tensor {TENSOR!r}, got {found!r}"[:300])
    return found.detach().to_dense()
