"""This rank's part of a weight, whether an engine split it or not."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["local_shard"]


def local_shard(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
