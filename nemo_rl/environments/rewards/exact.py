"""The exact-match reward. Called by the sort environment; the mathematical reward takes the
same kinds of answers."""

from __future__ import annotations

import math

__all__ = ["answer_problem", "exact_match"]


def exact_match(response: str, answer: object) -> float:
    """1 when the response, white space at its ends aside, is the answer; else 0.

    Example:
        >>> exact_match(" 1345\\n", "1345"), exact_match("1354", "1345")
        (1.0, 0.0)
    """
    return float(response.strip() == str(answer).strip())


def answer_problem(answer: object) -> str | None:
    """Why a gold answer is none that a text could equal; None where it is one.

    Example:
        >>> answer_problem(12), answer_problem(" "), answer_problem(None)
        (None, 'expected a text or a number, got an empty text', 'expected a text or a number, got null')
    """
    if isinstance(answer, str):
        return None if answer.strip() else "expected a text or a number, got an empty text"
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return None if math.isfinite(answer) else f"expected a text or a number, got {answer}"
    return f"expected a text or a number, got {'null' if answer is None else repr(answer)[:80]}"
