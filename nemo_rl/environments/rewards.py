"""The built-in rewards: an exact match, equality by math-verify (extra `envs`), and the own score of reasoning_gym.

The only file that names math-verify. Rewards of the last two kinds run in scoring processes, because sympy can compute
for hours on a short text; those processes call `make_math_reward` and `make_reasoning_gym_reward`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
from typing import Any

from nemo_rl.data.reasoning_gym_wrapper import Task, TaskScorer
from nemo_rl.data.thinking import final_answer, last_boxes

__all__ = ["answer_problem", "exact_match", "has_math_verify", "make_math_reward", "make_reasoning_gym_reward"]

logger = logging.getLogger(__name__)


def exact_match(response: str, answer: object) -> float:
    """Return 1 when the response, white space at its ends aside, is the answer; else 0.

    Example:
        >>> exact_match(" 1345\\n", "1345"), exact_match("1354", "1345")
        (1.0, 0.0)
    """
    return float(response.strip() == str(answer).strip())


BOX = re.compile(r"\\boxed\{.+\}", re.DOTALL)
"""A boxed answer, as math-verify finds it."""


def has_math_verify() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("math_verify") is not None


def answer_problem(answer: object) -> str | None:
    """Return why no text can equal a gold answer; None where it is one.

    Example:
        >>> answer_problem(12), answer_problem(" "), answer_problem(None)
        (None, 'expected a text or a number, got an empty text', 'expected a text or a number, got null')
    """
    if isinstance(answer, str):
        return None if answer.strip() else "expected a text or a number, got an empty text"
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return None if math.isfinite(answer) else f"expected a text or a number, got {answer}"
    return f"expected a text or a number, got {'null' if answer is None else repr(answer)[:80]}"


def make_math_reward() -> MathReward:
    """Import the library, which takes a second, before the first response has to be scored."""
    return MathReward()


class MathReward:
    """1 when a response states a value equal to the gold answer.

    What is boxed is read as LaTeX or not at all: the library's plain reader would take the last number in it, and
    `Matrix([[1, 2], [3, 4]])` would be 4. What cannot be read equals the same text only. Read is what `stated_answer`
    reads for majority votes: what follows the thoughts, and of that the last boxes.
    """

    def __init__(self) -> None:
        import math_verify  # noqa: PLC0415  (optional extra)

        self._library = math_verify
        self._latex = [math_verify.LatexExtractionConfig()]
        self._latex_or_plain = [*self._latex, math_verify.ExprExtractionConfig()]
        self._told_of_text = False
        # It warns at every call that it runs without its own limits; see below.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, prompt: str, response: str, answer: object) -> float:
        """Args:
            answer: LaTeX or plain text, boxed or not.

        Raises:
            ValueError: the gold answer cannot be read.
        """
        del prompt
        text, gold = self._gold(answer)
        if not gold:
            raise ValueError(f"math-verify cannot read the gold answer {text!r}")
        if not self._told_of_text and all(isinstance(part, str) for part in gold):
            self._told_of_text = True
            logger.warning(
                "gold answer %r is not LaTeX that math-verify can read: only the same text counts as right", text
            )
        said = final_answer(response)
        boxed = last_boxes(said)
        if boxed is not None:
            said = " and ".join(f"\\boxed{{{each}}}" for each in boxed)
        stated = self._parse(said, self._latex if BOX.search(said) else self._latex_or_plain)
        return float(self._library.verify(gold, stated, timeout_seconds=None))

    def check_answer(self, answer: object) -> str | None:
        """Return why the gold answer cannot be read; None where it can."""
        problem = answer_problem(answer)
        if problem is not None:
            return problem
        text, gold = self._gold(answer)
        return None if gold else f"math-verify cannot read {text[:80]!r}"

    def _gold(self, answer: object) -> tuple[str, list[Any]]:
        """Return the text of the answer and its parsed form, which is empty where it cannot be read."""
        # GSM8K's solutions end with their answer behind this mark.
        text = str(answer).rpartition("####")[2].strip()
        return text, self._parse(text if "\\boxed" in text else f"\\boxed{{{text}}}", self._latex)

    def _parse(self, text: str, readers: list[Any]) -> list[Any]:
        # Its own limits use SIGALRM, which sympy can swallow; the process that runs this has a limit that it cannot.
        parsed: list[Any] = self._library.parse(text, extraction_config=readers, parsing_timeout=None)
        return parsed


def make_reasoning_gym_reward() -> ReasoningGymReward:
    """Return a reward that makes each task once and keeps it."""
    return ReasoningGymReward()


class ReasoningGymReward:
    """Partial credit in 0..1 for what a response says after its thoughts (`</think>`), or for all of it."""

    def __init__(self) -> None:
        self._scorers: dict[str, TaskScorer] = {}

    def __call__(self, prompt: str, response: str, answer: Any) -> float:
        """Args:
        answer: `{"task": Task.to_json(), "index": i}`, as the dataset put it into the prompt's metadata.
        """
        key = json.dumps(answer["task"], sort_keys=True)
        if key not in self._scorers:
            self._scorers[key] = TaskScorer(Task(**answer["task"]))
        return self._scorers[key].score(answer["index"], final_answer(response), question=prompt)
