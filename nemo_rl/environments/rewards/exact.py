"""The exact-match reward. Called by the sort environment."""

from __future__ import annotations

__all__ = ["exact_match"]


def exact_match(response: str, answer: object) -> float:
    """1 when the response, white space at its ends aside, is the answer; else 0.

    Example:
        >>> exact_match(" 1345\\n", "1345"), exact_match("1354", "1345")
        (1.0, 0.0)
    """
    return float(response.strip() == str(answer).strip())
