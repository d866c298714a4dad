"""Rewards that are functions of a Python session: the two forms that they have, and the code that scores with them.

`nemo_rl.train` is given such functions, where a recipe names a file. They are pickled by value and unpickled only in
processes that this program has started itself.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nemo_rl.config.env import RewardCode
from nemo_rl.environments.scorer_child import wanted
from nemo_rl.errors import UserError

__all__ = ["Function", "SessionReward", "reward_code", "takes_lists", "with_names"]

Function = Callable[..., Any]
_FORMS = """expected one of two forms:
  def reward(prompt, response, answer): return 1.0                      # one response; columns of the row by name
  def reward(completions, **columns): return [1.0] * len(completions)   # TRL's: lists"""
_GIVEN_AS_LISTS = ("prompts", "completions")
_OF_TRL = ("completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer hands over besides columns, and that there is nothing for here."""


def takes_lists(function: Function) -> bool:
    """Return whether a reward has TRL's form, by the names of its parameters.

    Raises:
        UserError: it has neither form.
    """
    name = name_of(function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {name}: {_FORMS}\ngot {type(function).__name__}: {error}") from error
    if "completions" in parameters:
        if unknown := [each for each in _OF_TRL if each in parameters and parameters[each].default is inspect._empty]:
            raise UserError(f"reward {name}: {', '.join(unknown)} is given by TRL's trainer alone; take **columns")
        return True
    try:
        wanted(function)
    except TypeError as error:
        raise UserError(f"reward {name}: {_FORMS}\ngot {name}{inspect.signature(function)}") from error
    return False


def name_of(function: Function) -> str:
    """Return the name of a function, or of the class of an object that can be called, as a metric may have it."""
    found = function.__name__ if inspect.isroutine(function) else type(function).__name__
    return re.sub(r"[^A-Za-z0-9_.-]", "", found) or "reward"


def with_names(functions: Sequence[Function]) -> dict[str, Function]:
    """Return functions by name; further ones of one name get a number."""
    named: dict[str, Function] = {}
    for function in functions:
        name, number = name_of(function), 2
        while name in named:
            name, number = f"{name_of(function)}_{number}", number + 1
        named[name] = function
    return named


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionReward:
    """Several functions, or one of TRL's form, as a reward that gets lists."""

    functions: Mapping[str, Function]
    by_name: bool
    """True: the scores of each response are parts of its reward, by the functions' names."""
    answer_key: str
    """Column of the gold answer, which functions of TRL's form take by this name."""
    is_chat: bool
    """True where prompts are lists of messages: completions are then, too, as TRL gives them."""

    def __call__(
        self,
        prompt: list[str],
        response: list[str],
        answer: list[object],
        *,
        row: list[Mapping[str, object]],
        prompt_tokens: list[int],
        response_tokens: list[int],
        truncated: list[bool],
    ) -> list[Any]:
        """Return one score for each response, or its parts."""
        by_name: dict[str, Any] = {"row": row, "prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
        by_name["truncated"] = truncated
        scores = {
            name: self._of_lists(function, prompt, response, answer, row)
            if takes_lists(function)
            else [
                function(*first, **_named(function, {key: values[at] for key, values in by_name.items()}, row[at]))
                for at, first in enumerate(zip(prompt, response, answer, strict=True))
            ]
            for name, function in self.functions.items()
        }
        if not self.by_name:
            return next(iter(scores.values()))
        # None of TRL's form says that the function does not concern the row.
        parts = zip(*scores.values(), strict=True)
        return [dict(zip(scores, [0.0 if part is None else part for part in each], strict=True)) for each in parts]

    def _of_lists(
        self,
        function: Function,
        prompt: list[str],
        response: list[str],
        answer: list[object],
        row: list[Mapping[str, object]],
    ) -> list[Any]:
        names = {name for each in row for name in each} - {*_GIVEN_AS_LISTS}
        columns: dict[str, Any] = {name: [each.get(name) for each in row] for name in sorted(names)}
        columns |= {self.answer_key: answer, "prompts": prompt, "completions": response}
        if self.is_chat:
            columns["prompts"] = [[{"role": "user", "content": text}] for text in prompt]
            columns["completions"] = [[{"role": "assistant", "content": text}] for text in response]
        parameters = inspect.signature(function).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            columns = {each.name: columns[each.name] for each in parameters if each.name in columns}
        scores = list(function(**columns))
        if len(scores) != len(response):
            raise ValueError(f"{name_of(function)} returned {len(scores)} scores, expected {len(response)}")
        return scores


def _named(function: Function, given: Mapping[str, object], row: Mapping[str, object]) -> dict[str, object]:
    """Return the further arguments of a function of our form for one response."""
    names, columns = wanted(function)
    if missing := [name for name, is_needed in columns.items() if is_needed and name not in row]:
        raise ValueError(f"{name_of(function)} takes {', '.join(missing)} by name, and the row has {', '.join(row)}")
    return {name: given[name] for name in names} | {name: row[name] for name in columns if name in row}


def reward_code(reward: Function, functions: Sequence[Function]) -> RewardCode:
    """Return a reward for the processes that score.

    Args:
        reward: what they call.
        functions: those of the user in it.

    Raises:
        UserError: something that a function uses cannot be pickled.
    """
    try:
        pickled = cloudpickle.dumps(reward)
    except Exception as error:  # objects of the user say in their own ways that they cannot be pickled
        names = ", ".join(map(name_of, functions))
        raise UserError(
            f"reward {names}: cannot be sent to the processes that score: {type(error).__name__}: {error}; make inside "
            "of the function what it uses and cannot be copied, such as locks, files and clients"
        ) from error
    digest = hashlib.blake2b(digest_size=16)
    for function in functions:
        try:
            digest.update(inspect.getsource(function).encode())
        except (OSError, TypeError):
            digest.update(pickled)
    paths = tuple(os.path.abspath(path) for path in sys.path)
    name = ",".join(one.__qualname__ if inspect.isroutine(one) else name_of(one) for one in functions)
    return RewardCode(name=name, pickled=pickled, digest=digest.hexdigest(), paths=paths)
