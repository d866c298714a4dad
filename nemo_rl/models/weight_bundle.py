"""`WeightBundle`: a full set of weights as raw bytes, for Ray's object store (zero-copy reads) or this process.

Made by rank 0 of the policy, read by generation engines. Tensors of any dtype travel as uint8 arrays, because numpy
arrays are mapped by readers while torch tensors would be copied through pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["WeightBundle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBundle:
    """Weights in export order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    payloads: tuple[np.ndarray, ...]
    """uint8, one per name."""

    @classmethod
    def collect(cls, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightBundle:
        """Copies CPU tensors out of an export, one at a time."""
        names, dtypes, shapes, payloads = [], [], [], []
        for name, tensor in weights:
            names.append(name)
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(tuple(tensor.shape))
            payloads.append(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().copy())
        return cls(names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(shapes), payloads=tuple(payloads))

    @property
    def num_bytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor; tensors are copies that may be written."""
        for name, dtype, shape, payload in zip(self.names, self.dtypes, self.shapes, self.payloads, strict=True):
            raw = torch.from_numpy(payload.copy())
            yield name, raw.view(getattr(torch, dtype)).view(shape)
