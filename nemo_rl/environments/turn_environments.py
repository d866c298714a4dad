"""Built-in environments with turns: `guess`, `sliding_puzzle`, `calculator_task`, `reasoning_gym_turns`.

They run in processes of `EnvironmentHost`. Each says its optimal score: the mean reward of a row of the best policy.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from nemo_rl.data.conversation import Message
from nemo_rl.data.generated import MOVES, moved, puzzle_text
from nemo_rl.data.reasoning_gym_wrapper import Task, TaskScorer
from nemo_rl.data.thinking import final_answer
from nemo_rl.environments.conversation import ConversationRow, Reply, Turn

__all__ = ["CalculatorTask", "Guess", "ReasoningGymTurns", "SlidingPuzzle"]

_NUMBER = re.compile(r"-?\d+")
_MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b")
_ANSWER_DIGITS = 4000
"""Digits of the longest number that is read."""


class Guess:
    """Guess a number: the replies are `higher` and `lower`. For the dataset `guess`.

    The reward is 1 when the number is found. Optimal score by bisection: 1 with enough turns, which are 4 for numbers
    up to 15; with fewer, (2 ** turns - 1) / numbers.
    """

    def open(self, row: ConversationRow) -> _GuessGame:
        """Return a new game; the answer of the row is the number."""
        return _GuessGame(int(cast("int", row.answer)))


class _GuessGame:
    def __init__(self, number: int) -> None:
        self._number = number

    def reply(self, turn: Turn) -> Reply:
        guess = _last_number(turn.text)
        if guess is None:
            return _said("say a number")
        if guess == self._number:
            return Reply(done=True, reward=1.0)
        return _said("higher" if guess < self._number else "lower")


class SlidingPuzzle:
    """Slide tiles until they are in order, one move of the gap per turn: up, down, left or right. For the dataset
    `sliding_puzzle`.

    The reward is 1 when the puzzle is solved. Optimal score: 1 with as many turns as the dataset's `moves`.
    """

    def open(self, row: ConversationRow) -> _SlidingPuzzleGame:
        """Return a new game about the board in the prompt."""
        tiles = re.findall(r"\d+|_", row.prompt)
        return _SlidingPuzzleGame([0 if tile == "_" else int(tile) for tile in tiles])


class _SlidingPuzzleGame:
    def __init__(self, board: list[int]) -> None:
        self._board = board

    def reply(self, turn: Turn) -> Reply:
        found = _MOVE.findall(final_answer(turn.text).lower())
        if not found:
            return _said("say up, down, left or right")
        board = moved(self._board, found[-1])
        if board is None:
            return _said(f"no way\n{puzzle_text(self._board)}")
        self._board = board
        if board == [*range(1, len(board)), 0]:
            return Reply(done=True, reward=1.0)
        return _said(puzzle_text(board))


class CalculatorTask:
    """Score the last number of an answer that a tool has calculated. For the dataset `calculator_sums` and the tool
    `calculator`.

    The reward is 1 for the exact number. Optimal score: 1, with two turns: a call, and the answer.
    """

    def open(self, row: ConversationRow) -> _CalculatorAnswer:
        """Return a new conversation; the answer of the row is the number."""
        return _CalculatorAnswer(int(cast("str", row.answer)))


class _CalculatorAnswer:
    def __init__(self, number: int) -> None:
        self._number = number

    def reply(self, turn: Turn) -> Reply:
        is_right = not turn.truncated and _last_number(turn.text) == self._number
        return Reply(done=True, reward=float(is_right))


class ReasoningGymTurns:
    """Answer a question of reasoning_gym in several attempts. For the dataset `reasoning_gym`.

    The reward is the task's score of the last attempt. Optimal score: 1 for every task that can be solved.

    Args:
        attempts: most answers.
        threshold: a score from here on ends the conversation.
    """

    def __init__(self, *, attempts: int = 3, threshold: float = 1.0) -> None:
        if attempts < 1:
            raise ValueError(f"env.options.attempts: expected at least 1, got {attempts}")
        self._attempts, self._threshold = attempts, threshold
        self._scorers: dict[str, TaskScorer] = {}

    def open(self, row: ConversationRow) -> _Attempts:
        """Return a new conversation; the metadata of the row names its item."""
        task = cast("dict[str, Any]", row.metadata["task"])
        key = json.dumps(task, sort_keys=True)
        if key not in self._scorers:
            self._scorers[key] = TaskScorer(Task(**task))
        return _Attempts(self._scorers[key], row=row, attempts=self._attempts, threshold=self._threshold)


class _Attempts:
    def __init__(self, scorer: TaskScorer, *, row: ConversationRow, attempts: int, threshold: float) -> None:
        self._scorer, self._row = scorer, row
        self._left, self._threshold = attempts, threshold

    def reply(self, turn: Turn) -> Reply:
        index = cast("int", self._row.metadata["index"])
        score = self._scorer.score(index, final_answer(turn.text), question=self._row.prompt)
        self._left -= 1
        if score >= self._threshold or self._left == 0:
            return Reply(done=True, reward=score, components={"first_attempt": float(turn.number == 0) * score})
        return _said(f"This is not right: its score is {score:.2g} of 1. Try again; attempts left: {self._left}.")


def _said(text: str) -> Reply:
    return Reply(messages=(Message(role="user", content=text),))


def _last_number(text: str) -> int | None:
    """Return the last number that stands after the thoughts."""
    found = _NUMBER.findall(final_answer(text))
    return int(found[-1]) if found and len(found[-1]) < _ANSWER_DIGITS else None
