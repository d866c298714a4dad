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
from nemo_rl.environments.math_answers import Stated, plain_numbers, read_answer

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
        stated, gold = self._gold(answer)
        text = stated.latex
        if not gold:
            raise ValueError(f"math-verify cannot read the gold answer {text!r}")
        if not self._told_of_text and stated.word is None and all(isinstance(part, str) for part in gold):
            self._told_of_text = True
            logger.warning(
                "gold answer %r is not LaTeX that math-verify can read: only the same text counts as right", text
            )
        said = final_answer(response)
        boxed = last_boxes(said)
        answers = [read_answer(each) for each in boxed if each.strip()] if boxed is not None else [_whole_answer(said)]
        is_equal = stated.equals(answers[0]) if len(answers) == 1 else None
        is_certain = boxed is not None or stated.word is not None or answers[0].number is not None
        if is_equal is not None and (is_certain or is_equal):
            return float(is_equal)
        if any(each.word is not None or each.problem for each in answers) and boxed is not None:
            return 0.0
        said = (
            " and ".join(f"\\boxed{{{each.latex}}}" for each in answers) if boxed is not None else plain_numbers(said)
        )
        found = self._parse(said, self._latex if BOX.search(said) else self._latex_or_plain)
        return float(self._library.verify(gold, found, timeout_seconds=None))

    def check_answer(self, answer: object) -> str | None:
        """Return why the gold answer cannot be read; None where it can."""
        problem = answer_problem(answer)
        if problem is not None:
            return problem
        stated, gold = self._gold(answer)
        if stated.problem is not None:
            return stated.problem
        return None if gold else f"math-verify cannot read {stated.latex[:80]!r}"

    def _gold(self, answer: object) -> tuple[Stated, list[Any]]:
        """Return what the answer states and its parsed form, which is empty where it cannot be read."""
        # GSM8K's solutions end with their answer behind this mark.
        text = str(answer).rpartition("####")[2].strip()
        boxed = last_boxes(text)
        if boxed is not None and len(boxed) > 1:
            return Stated(latex=text), self._parse(text, self._latex)
        stated = read_answer(text if boxed is None else boxed[0])
        if stated.word is not None:
            return stated, [stated.word]
        return stated, self._parse(f"\\boxed{{{stated.latex}}}", self._latex)

    def _parse(self, text: str, readers: list[Any]) -> list[Any]:
        # Its own limits use SIGALRM, which sympy can swallow; the process that runs this has a limit that it cannot.
        parsed: list[Any] = self._library.parse(text, extraction_config=readers, parsing_timeout=None)
        return parsed


def _whole_answer(said: str) -> Stated:
    """Return what a response without a box states where it is nothing else: all of it, or what follows "answer is"."""
    return read_answer(re.split(r"answer is:?", said, flags=re.IGNORECASE)[-1].strip().strip("*"))


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
