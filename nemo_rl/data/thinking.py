"""Responses that think before they answer: `<think>4+3=7 7-9=-2</think>-2`.

The starter checkpoint writes them, the reasoning_gym reward reads them.
"""

from __future__ import annotations

__all__ = ["THINK_END", "THINK_START", "final_answer", "with_thinking"]

THINK_START, THINK_END = "<think>", "</think>"


def with_thinking(thoughts: str, answer: str) -> str:
    """A response that shows its thoughts."""
    return f"{THINK_START}{thoughts}{THINK_END}{answer}"


def final_answer(response: str) -> str:
    """What follows the thoughts, without white space at its ends; all of it when the response shows none.

    Example:
        >>> final_answer("<think>4+3=7</think> 7"), final_answer("7")
        ('7', '7')
    """
    return response.rpartition(THINK_END)[2].strip()
