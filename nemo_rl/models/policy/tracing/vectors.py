"""Vectors to project on: named artifacts from one folder and by name alone, in safetensors or as torch saves them.

A torch file is read with `weights_only`, so that nothing in it runs.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nemo_rl.errors import UserError
from nemo_rl.tracer.reducer import VECTOR, VECTOR_FILES

__all__ = ["TENSOR", "Vectors"]

TENSOR = "vector"
"""Name of the tensor in its file: `[h]`, or `[L, h]` with a row for each layer."""


class Vectors:
    """The artifacts of one folder; None has none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._load = lru_cache(maxsize=64)(self._read)

    def of_layer(self, name: str, layer: int | None, *, size: int) -> torch.Tensor:
        """`[size]` float32.

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
        found = _of_safetensors(path) if path.suffix == VECTOR_FILES[0] else _of_torch(path)
        if not found.is_floating_point() or found.dim() not in (1, 2):
            shape = list(found.shape)
            raise UserError(
                f"{path}: expected floating-point numbers of shape [h] or [L, h], got {found.dtype} {shape}"
            )
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
    """The tensor that the file is, or the one that it has under the name `vector`."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        said = str(error).partition("\n")[0]
        raise UserError(f"{path}: expected a tensor of torch.save, which no code is run for: {said}") from error
    if isinstance(found, dict):
        found = found.get(TENSOR, sorted(map(str, found)))
    if not isinstance(found, torch.Tensor):
        raise UserError(f"{path}: expected a tensor, or a dict with a tensor {TENSOR!r}, got {found!r}"[:300])
    return found.detach().to_dense()
