"""`nemo-rl shrink`: a recipe of a cluster, run for a few steps on this machine; `run` says how.

Here is the reward of the small run alone, so that a scoring process imports no torch with it.
"""

from __future__ import annotations

__all__ = ["odd_share"]


def odd_share(prompt: str, response: str, answer: object) -> float:
    """Return the share of characters with an odd code, as a reward that a model without knowledge can earn: it differs
    from sample to sample, so that every group has advantages."""
    return sum(ord(character) % 2 for character in response) / max(len(response), 1)
