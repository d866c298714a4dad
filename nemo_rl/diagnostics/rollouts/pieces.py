"""`Piece`: the smallest part of a row's text that can have a colour, and how far its log-probabilities are apart.

A piece is a token; tokens that make up one character are one piece, which is as far apart as the worst of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from nemo_rl.diagnostics.rollouts.row import RolloutRow, RowTokens
from nemo_rl.utils.console import printable

__all__ = ["BOUNDS", "Grade", "Piece", "difference_text", "grade_of", "legend", "pieces_of", "shared_reason", "signed"]

BOUNDS = (0.05, 0.5)
"""Of the grades: probabilities 5 % apart, which low precision explains, and 65 %, which it does not."""
WHY_SHOWN = 200
"""Characters of a reason that the file gives."""


class Grade(IntEnum):
    """How far rollout and trainer are apart on a token."""

    CLOSE = 0
    APART = 1
    FAR = 2

    @property
    def mark(self) -> str:
        """Says the grade without colour."""
        return " ~^"[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Text of one token, or of the tokens of one character."""

    text: str
    is_masked: bool
    """Not trained: what an environment said, or a token behind the end."""
    grade: Grade | None
    """None without both log-probabilities."""
    tokens: tuple[int, ...]
    """Places in the row."""


def grade_of(difference: float | None) -> Grade | None:
    """What is not finite is far."""
    if difference is None:
        return None
    if not math.isfinite(difference):
        return Grade.FAR
    return Grade(sum(abs(difference) > bound for bound in BOUNDS))


def pieces_of(tokens: RowTokens) -> Iterator[Piece]:
    """The response of a row: from the first token that is trained to its end."""
    waiting: list[int] = []
    last = len(tokens.ids) - 1
    for at in range(tokens.num_prompt, len(tokens.ids)):
        waiting.append(at)
        if tokens.texts[at] == "" and at < last:
            continue
        grades = [grade for place in waiting if (grade := grade_of(tokens.difference(place))) is not None]
        yield Piece(
            text=tokens.texts[at],
            is_masked=not any(tokens.mask[place] for place in waiting),
            grade=max(grades, default=None),
            tokens=tuple(waiting),
        )
        waiting = []


def difference_text(rows: Iterable[RolloutRow]) -> str:
    """How far apart the tokens of the rows are, or why nobody knows."""
    of_rows = list(rows)
    found = [abs(value) for row in of_rows if row.tokens is not None for value in row.tokens.differences()]
    if not found:
        reasons = dict.fromkeys(row.no_prev_logprobs for row in of_rows if row.no_prev_logprobs)
        why = printable("; ".join(reasons), limit=WHY_SHOWN) or "no token is trained"
        return f"no log-probabilities of the trainer: {why}"
    num_far = sum(grade_of(value) is Grade.FAR for value in found)
    far = f", {num_far} of {len(found)} tokens far" if num_far else f" over {len(found)} tokens"
    return f"|rollout - trainer| mean {sum(found) / len(found):.2g}, max {max(found):.2g}{far}"


def shared_reason(rows: Iterable[RolloutRow]) -> str | None:
    """Why none of the rows has a difference, where the reason is the same for all of them."""
    texts = {difference_text([row]) for row in rows if row.tokens is None or not row.tokens.differences()}
    has_difference = any(row.tokens is not None and row.tokens.differences() for row in rows)
    return texts.pop() if len(texts) == 1 and not has_difference else None


def legend() -> str:
    """What the marks mean."""
    low, high = BOUNDS
    return (
        f"marks: log-probabilities apart by more than {low} ({Grade.APART.mark}), {high} ({Grade.FAR.mark}); "
        "not trained (-)"
    )


def signed(value: float | None) -> str:
    """A number with its sign, for people."""
    return "none" if value is None else f"{value:+.4g}"
