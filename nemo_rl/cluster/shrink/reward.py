"""A reward that any text can earn, in place of one that a model without knowledge never does. Imports no torch."""

from __future__ import annotations

__all__ = ["odd_share"]


def odd_share(prompt: str, response: str, answer: object) -> float:
    """Return the share of characters with an odd code: differs from sample to sample, so that every group has
    advantages."""
    return sum(ord(character) % 2 for character in response) / max(len(response), 1)
