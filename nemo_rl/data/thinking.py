"""Responses that think before they answer: `<think>4+3=7 7-9=-2</think>-2`; and what they state as their answer.

The starter checkpoint writes them. The rewards of reasoning_gym and mathematics and the majority vote read them, by
the same functions: what stands in thoughts that have ended is no answer, boxed or not; a response without `</think>`
is read as a whole.
"""

from __future__ import annotations

import re

__all__ = ["THINK_END", "THINK_START", "final_answer", "last_boxes", "with_thinking"]

THINK_START, THINK_END = "<think>", "</think>"
BOX = "\\boxed{"
_JOINED = re.compile(r"[\s$]*(,|,?\s*and|,?\s*or)[\s$]*")
"""The text between two boxes of one answer, as in `\\boxed{1} and \\boxed{-2}`."""


def with_thinking(thoughts: str, answer: str) -> str:
    return f"{THINK_START}{thoughts}{THINK_END}{answer}"


def final_answer(response: str) -> str:
    """Return the text that follows the thoughts, without white space at its ends; all of it when the response shows
    none.

    Example:
        >>> final_answer("<think>4+3=7</think> 7"), final_answer("7")
        ('7', '7')
    """
    return response.rpartition(THINK_END)[2].strip()


def last_boxes(text: str) -> list[str] | None:
    """Return the content of the last `\\boxed{}`, after those that a comma, "and" or "or" joins to it.

    None where there is no box, or the last one is not closed.

    Example:
        >>> last_boxes("\\\\boxed{3} no, \\\\boxed{4}"), last_boxes("\\\\boxed{1} and \\\\boxed{-2}")
        (['4'], ['1', '-2'])
    """
    boxes: list[str] = []
    until, following = len(text), None
    while (start := text.rfind(BOX, 0, until)) >= 0:
        end = _end_of_box(text, start)
        if end is None or (following is not None and not _JOINED.fullmatch(text[end:following])):
            break
        boxes.insert(0, text[start + len(BOX) : end - 1])
        until = following = start
    return boxes or None


def _end_of_box(text: str, start: int) -> int | None:
    depth = 1
    for place in range(start + len(BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return None
