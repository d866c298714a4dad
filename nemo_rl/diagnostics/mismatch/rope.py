"""Rotary embeddings of a Hugging Face model with another base, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["has_rope", "scaled_rope"]

FREQUENCIES = "inv_freq"
"""End of the name of the buffers: frequency i of n is base ** (-i / n), some scaled for long rows."""


def has_rope(model: torch.nn.Module) -> bool:
    """Whether the model has frequencies whose base can be changed."""
    return bool(_frequencies(model))


@contextmanager
def scaled_rope(model: torch.nn.Module, factor: float) -> Iterator[None]:
    """The base of all layers is `factor` times what it is."""
    before = [(buffer, buffer.clone()) for buffer in _frequencies(model)]
    try:
        for buffer, _ in before:
            part = torch.arange(len(buffer), device=buffer.device) / len(buffer)
            buffer.mul_(factor**-part)
        yield
    finally:
        for buffer, kept in before:
            buffer.copy_(kept)


def _frequencies(model: torch.nn.Module) -> list[torch.Tensor]:
    found = {id(buffer): buffer for name, buffer in model.named_buffers() if name.endswith(FREQUENCIES)}
    return list(found.values())
