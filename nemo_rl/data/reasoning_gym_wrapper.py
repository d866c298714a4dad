"""reasoning_gym tasks by name (extra `envs`): questions and scores. The only file that names the library.

A question is a function of task, settings, seed and index, so only those travel; the scorer makes the item again.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nemo_rl.errors import DatasetError

__all__ = ["Task", "TaskScorer", "has_reasoning_gym", "questions"]

# What the library's scorers are known to raise on texts they did not expect.
_SCORER_RAISES = (ArithmeticError, AssertionError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One procedural dataset."""

    name: str
    size: int
    seed: int
    options: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return plain values, the inverse of `Task(**values)`."""
        return asdict(self)


class TaskScorer:
    """Scores responses to the items of one task."""

    def __init__(self, task: Task, *, where: str = "data.train") -> None:
        self._items = _create(task, where=where)
        self._task = task

    def score(self, index: int, response: str, *, question: str) -> float:
        """Return partial credit in 0..1; a response that the scorer cannot read gets 0.

        Raises:
            DatasetError: the item made here asks another question than the one that was answered.
        """
        item = self._items[index]
        if item["question"] != question:
            raise DatasetError(
                f"reasoning_gym task {self._task.name!r}: item {index} is not the same each time it is made, so it "
                "cannot be scored; choose another task"
            )
        try:
            return float(self._items.score_answer(response, item))
        except _SCORER_RAISES:
            return 0.0


def has_reasoning_gym() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("reasoning_gym") is not None


def questions(task: Task, *, where: str) -> Iterator[tuple[str, object]]:
    """Yield question and gold answer of the items of `task` in order; None where many answers are right.

    Raises:
        DatasetError: the extra is missing, or the library does not know the task or its settings.
    """
    items = _create(task, where=where)
    for index in range(task.size):
        item = items[index]
        yield item["question"], item["answer"]


def _create(task: Task, *, where: str) -> Any:
    if not has_reasoning_gym():
        raise DatasetError(
            f"{where}.dataset_name: 'reasoning_gym' is not installed; run `pip install -e '.[envs]'` in the checkout"
        )
    import reasoning_gym  # noqa: PLC0415  (optional extra)
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    if task.name not in DATASETS:
        close = difflib.get_close_matches(task.name, DATASETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DatasetError(f"{where}.task: reasoning_gym has no task {task.name!r}{hint}")
    try:
        return reasoning_gym.create_dataset(task.name, size=task.size, seed=task.seed, **task.options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DatasetError(f"{where}.options: reasoning_gym task {task.name!r} refuses them: {error}") from error
