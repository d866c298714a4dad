"""A reward that any text can earn. Its processes import this module alone, and need no torch."""

from __future__ import annotations

__all__ = ["odd_share"]


def odd_share(prompt: str, response: str, answer: object) -> float:
    """Share of characters with an odd code: differs from sample to sample, also for a model that knows nothing."""
    return sum(ord(character) % 2 for character in response) / max(len(response), 1)
