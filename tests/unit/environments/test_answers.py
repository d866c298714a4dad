"""Gold answers are looked at before their prompts are drawn, those of large sets beside the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.datasets import Prompt, PromptSet
from nemo_rl.environments.answers import AnswerCheck, drop_unreadable
from nemo_rl.environments.process_environment import SortEnvironment
from nemo_rl.errors import DatasetError


class Counting(SortEnvironment):
    """Counts what it is asked, and waits until it may answer."""

    def __init__(self) -> None:
        self.num_asked, self.may_answer = 0, threading.Event()
        self.may_answer.set()

    def answer_problems(self, prompts: Sequence[Prompt]) -> list[str | None]:
        assert self.may_answer.wait(30)
        self.num_asked += len(prompts)
        return super().answer_problems(prompts)


def prompt_set(answers: Sequence[object]) -> PromptSet:
    return PromptSet(
        prompts=tuple(
            Prompt(index=number, text="p", answer=answer, ids=(1,), place=f"prompt {number} (f:{number + 1})")
            for number, answer in enumerate(answers)
        )
    )


@pytest.mark.parametrize("bad", [None, "", " ", float("inf"), ["4"]])
def test_answers_that_cannot_be_read_are_counted_with_their_rows(bad: object) -> None:
    answers: list[object] = [*"abcd", bad, "e", *[bad] * 9]
    check = AnswerCheck(SortEnvironment(), {"data.train": prompt_set("ab"), "data.validation": prompt_set(answers)})
    with pytest.raises(DatasetError) as raised:
        check.look()
    *lines, summary = str(raised.value).splitlines()
    assert lines[0].startswith("data.validation: prompt 4 (f:5): gold answer ") and len(lines) == 5
    assert lines[0].endswith("; correct it, or set data.validation.unreadable=drop")
    assert "of 15 rows read these cannot be used: 10 with a gold answer that the reward cannot read" in summary


def test_rows_whose_answers_cannot_be_read_are_dropped_where_that_is_asked_for() -> None:
    data = DataConfig(train=DatasetConfig(unreadable="drop"))
    sets = {"data.train": prompt_set(["a", None, "b", *[" "] * 9])}
    found = drop_unreadable(data, SortEnvironment(), sets)["data.train"]
    assert [(prompt.index, prompt.answer) for prompt in found.prompts] == [(0, "a"), (1, "b")]
    (line,) = found.remarks
    assert line.startswith("data.train: of 12 rows 10 dropped") and line.count("prompt ") == 5
    assert drop_unreadable(DataConfig(), SortEnvironment(), sets) == sets
    with pytest.raises(DatasetError, match="no gold answer can be read"):
        drop_unreadable(data, SortEnvironment(), {"data.train": prompt_set([None, ""])})


def test_what_is_not_looked_at_in_time_is_looked_at_when_it_is_drawn() -> None:
    environment = Counting()
    check = AnswerCheck(environment, {"data.train": prompt_set(["1"] * 10_000 + [None])})
    assert not check.look(seconds=0.0)
    seen = environment.num_asked
    assert seen < 10_000
    check.require("data.train", [9_990, 9_991])
    assert environment.num_asked == seen + 2
    with pytest.raises(DatasetError, match="prompt 10000 "):
        check.require("data.train", [3, 10_000])


def test_the_rest_is_looked_at_beside_the_run_and_ends_it_before_the_row_is_drawn() -> None:
    environment = Counting()
    check = AnswerCheck(environment, {"data.train": prompt_set(["1"] * 2_000 + [None])})
    assert not check.look(seconds=0.0)
    environment.may_answer.clear()
    check.go_on()
    environment.may_answer.set()
    assert check._thread is not None
    check._thread.join(30)
    with pytest.raises(DatasetError, match="prompt 2000 "):
        check.require("data.train", [5])
    check.close()
