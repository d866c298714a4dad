"""Settings of the receipt of a refit (`policy.generation.receipt` section)."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from nemo_rl.config.base import Section

__all__ = ["ReceiptConfig"]


class ReceiptConfig(Section):
    """Every engine proves after a refit that it samples from the weights it was sent; else the run stops."""

    enabled: bool = True
    """Compare fingerprints of all weights, and log-probabilities of fixed rows, before anything is sampled."""
    every: PositiveInt | None = None
    """Refits from one whose rows are scored to the next; an engine that was replaced is scored at once, and
    fingerprints are compared after each refit. null: after each, or as often as 2 % of the time allow."""
    num_tokens: PositiveInt = 18
    """Tokens that each engine decodes, and the policy scores, for one receipt: 6 rows of at least one."""
    tolerance: PositiveFloat | None = None
    """Largest mean difference of log-probabilities between policy and engine, and between engines; null measures it at
    the first refit, with the same weights on both sides."""
