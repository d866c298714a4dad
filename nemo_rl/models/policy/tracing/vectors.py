"""Vectors to project on: named artifacts in safetensors, from one folder and by name alone."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nemo_rl.errors import UserError
from nemo_rl.tracer.reducer import VECTOR

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
        path = self._folder / f"{name}.safetensors"
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read as safetensors: {error}") from error
        if TENSOR not in found or found[TENSOR].dim() not in (1, 2):
            raise UserError(f"{path}: expected a tensor {TENSOR!r} of shape [h] or [L, h], got {sorted(found)}")
        return found[TENSOR].float()
