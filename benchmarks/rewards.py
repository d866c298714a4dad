"""A reward that any text can earn, and a tool that sleeps. Their processes import this module alone, without torch."""

from __future__ import annotations

import time

__all__ = ["odd_share", "slow_share", "wait"]


def odd_share(prompt: str, response: str, answer: object) -> float:
    """Share of characters with an odd code: differs from sample to sample, also for a model that knows nothing."""
    return sum(ord(character) % 2 for character in response) / max(len(response), 1)


def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: the time
    """
    time.sleep(seconds)
    return "done"


def slow_share(prompt: str, response: str, answer: object) -> float:
    """`odd_share`, after a wait of 50 ms, as of a reward that asks a server."""
    time.sleep(0.05)
    return odd_share(prompt, response, answer)
