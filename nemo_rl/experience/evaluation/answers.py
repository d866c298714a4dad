"""What a response gives as its answer, so that responses can vote. Pure functions of texts."""

from __future__ import annotations

from nemo_rl.data.thinking import final_answer, last_boxes

__all__ = ["stated_answer"]


def stated_answer(response: str) -> str | None:
    """What is in the last boxes, or else what follows the thoughts, runs of white space taken as one; None for nothing.

    The mathematical reward reads the same. Two ways to write one number are two answers here; only the reward knows
    better, and it has said which responses are right.

    Example:
        >>> stated_answer("<think>4+3=7</think> \\\\boxed{7}."), stated_answer("7 ")
        ('7', '7')
    """
    answer = final_answer(response)
    boxed = last_boxes(answer)
    return " ".join((answer if boxed is None else ", ".join(boxed)).split()) or None
