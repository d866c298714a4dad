"""What a response gives as its answer, so that responses can vote. Pure functions of texts."""

from __future__ import annotations

from nemo_rl.data.thinking import final_answer

__all__ = ["stated_answer"]

BOX = "\\boxed{"


def stated_answer(response: str) -> str | None:
    """What is in the last box, or else what follows the thoughts, runs of white space taken as one; None for nothing.

    Two ways to write one number are two answers here; only the reward knows better, and it has said which responses
    are right.

    Example:
        >>> stated_answer("<think>4+3=7</think> \\\\boxed{7}."), stated_answer("7 ")
        ('7', '7')
    """
    answer = final_answer(response)
    boxed = _in_last_box(answer)
    return " ".join((answer if boxed is None else boxed).split()) or None


def _in_last_box(text: str) -> str | None:
    """None where there is no box, or one that is not closed."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth, begin = 1, start + len(BOX)
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None
