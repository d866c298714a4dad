"""Mathematical equality by math-verify (extra `envs`). The only file that names the library.

Runs in a scoring process, because sympy can compute for hours on a short text; that process calls `make_math_reward`.
"""

from __future__ import annotations

import importlib.util
import logging

__all__ = ["has_math_verify", "make_math_reward"]


def has_math_verify() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("math_verify") is not None


def make_math_reward() -> MathReward:
    """Imports the library, which takes a second, before the first response has to be scored."""
    return MathReward()


class MathReward:
    """1 when a response states a value equal to the gold answer."""

    def __init__(self) -> None:
        import math_verify  # noqa: PLC0415  (optional extra)

        self._library = math_verify
        # It warns at every call that it runs without its own limits; see below.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, prompt: str, response: str, answer: object) -> float:
        """Args:
            answer: LaTeX or plain text, boxed or not.

        Raises:
            ValueError: the gold answer cannot be read.
        """
        del prompt
        # Its own limits use SIGALRM, which sympy can swallow; the process that runs this has a limit that it cannot.
        text = str(answer)
        gold = self._library.parse(text if "\\boxed" in text else f"\\boxed{{{text}}}", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the gold answer {text!r}")
        stated = self._library.parse(response, parsing_timeout=None)
        return float(self._library.verify(gold, stated, timeout_seconds=None))
