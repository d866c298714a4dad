"""Rewards that are functions of a Python session: the two forms that they have, and the code that scores with them.

`nemo_rl.train` is given such functions, where a recipe names a file. They are pickled by value and unpickled only in
processes that this program has started itself.

The scoring process: loads one reward function and answers requests until it is ended.

Started by `ScorerProcess`; standard library only, so that it starts at once. It is two processes: the guard of
`isolation` and the scorer itself. One JSON object per line over an inherited socket:

    {"id", "paths", "target", "is_factory", "in_batches",
     "keeps_none"}                                          -> {"id", "ready", "wants", "columns", "source",
                                                                "checks_answers", "is_async"} or {"id", "failed"}
    the same with "pickled", "source": the function itself, which the program that started this process has pickled
    {"id", "arguments"}                                      -> {"id", "scores"} or {"id", "error"}
    {"id", "answers"}                                        -> {"id", "problems"} or {"id", "error"}

A reply repeats the id of its request, which cannot be guessed, so what a reward function writes there by accident is
told apart. `arguments` holds one list per parameter, a value per row; a score is a number or an object of numbers, with
`keeps_none` also null or an object with nulls.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import cloudpickle

from nemo_rl.config.env import RewardCode
from nemo_rl.environments.isolation import cut, digest_of, load_target, out_of_reach, serve, start_guarded
from nemo_rl.environments.wire import NUMBER_LIMIT, MalformedReply, finite, plain_parts, shown
from nemo_rl.errors import UserError

__all__ = ["Function", "SessionReward", "reward_code", "takes_lists", "with_names"]


_POSITIONAL = ("prompt", "response", "answer")
_ANSWER_CHECK = "check_answer"
"""Name of a function's attribute that is given a gold answer and returns why it cannot be read, or None."""
_BY_NAME = ("row", "prompt_tokens", "response_tokens", "truncated")
"""Arguments that a function gets besides prompt, response and answer when it has a parameter of that name, or
`**kwargs`."""


def main() -> None:
    """Serve a scorer: the arguments are SOCKET_FD PARENT_PID FOLDER."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    start_guarded(parent, folder=sys.argv[3])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    serve(out_of_reach(fd), _RewardFunction().answer, besides=__file__)


class _RewardFunction:
    """The reward function of this process, once it is loaded."""

    def answer(self, request: dict[str, Any]) -> dict[str, object]:
        if "target" in request:
            try:
                return self._load(request)
            except Exception as error:  # noqa: BLE001 - user code; the owner reports it
                return {"failed": cut(f"{type(error).__name__}: {error}")}
        if "answers" in request:
            problems = map(self._check, request["answers"])
            return {"problems": [None if problem is None else cut(str(problem)) for problem in problems]}
        try:
            values = self._score(self._function, request["arguments"])
            return {"scores": [_number_or_parts(value, keeps_none=self._keeps_none) for value in values]}
        except _BadScore as error:
            return {"error": cut(str(error)) + _place_of(self._function)}

    def _load(self, request: dict[str, Any]) -> dict[str, object]:
        sys.path[:] = list(dict.fromkeys([*request["paths"], *sys.path]))
        if "pickled" in request:
            import cloudpickle  # noqa: PLC0415 - a reward of a file needs the standard library alone

            function = cloudpickle.loads(b64decode(request["pickled"]))
        else:
            module, function = load_target(request["target"])
        if request["is_factory"]:
            function = function()
        if not callable(function):
            raise TypeError(f"expected a function, got {type(function).__name__}")
        self._keeps_none = bool(request["keeps_none"])
        self._function, self._score = function, _score_batch if request["in_batches"] else _score_one
        self._check = inspect.getattr_static(function, _ANSWER_CHECK, None) and getattr(function, _ANSWER_CHECK)
        wants, columns = wanted(function)
        source = request["source"] if "pickled" in request else digest_of(module, function)
        loaded = {"ready": True, "wants": wants, "columns": columns, "source": source}
        return {**loaded, "checks_answers": self._check is not None, "is_async": _is_async(function)}


def wanted(function: Callable[..., Any]) -> tuple[list[str], dict[str, bool]]:
    """Return the names of the further arguments that the function takes, and the columns of the row that it takes by
    name, True for those without a default; raise TypeError where it does not take prompt, response and answer."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return [], {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    further = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY or p in positional[len(_POSITIONAL) :]}
    columns = {n: p.default is p.empty for n, p in further.items() if n not in _BY_NAME}
    unnamed = [p for p in positional[len(_POSITIONAL) :] if p.kind is p.POSITIONAL_ONLY]
    takes_three = len(positional) >= len(_POSITIONAL) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if unnamed or not takes_three:
        raise TypeError(
            f"expected a function of ({', '.join(_POSITIONAL)}) that may also take {', '.join(_BY_NAME)} and columns "
            f"of the row by name, got {inspect.signature(function)}"
        )
    return [name for name in _BY_NAME if takes_any or name in further], columns


def _score_one(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> list[object]:
    first = [arguments.pop(name) for name in _POSITIONAL]
    named = [{name: values[place] for name, values in arguments.items()} for place in range(len(first[0]))]
    calls = [function(*row, **others) for row, others in zip(zip(*first, strict=True), named, strict=True)]
    return _results(function, calls)


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether calls of a function, or of an object, have to be awaited."""
    called = function if inspect.isroutine(function) else inspect.getattr_static(type(function), "__call__", None)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _results(function: Callable[..., Any], calls: list[Any]) -> list[Any]:
    """Return what calls of a function gave; those of an `async def` are awaited all at once."""
    if not _is_async(function):
        return calls
    import asyncio  # noqa: PLC0415 - of such functions alone

    async def gather() -> list[Any]:
        return await asyncio.gather(*calls)

    return asyncio.run(gather())


def _score_batch(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> list[object]:
    count = len(arguments["prompt"])
    first = [arguments.pop(name) for name in _POSITIONAL]
    given = _results(function, [function(*first, **arguments)])[0]
    try:
        values = list(islice(given, count + 1))
    except TypeError as error:
        raise _BadScore(f"returned {shown(given)}, expected one score per response: {error}") from error
    if len(values) != count:
        found = len(values) if len(values) < count else "more"
        raise _BadScore(f"returned {found} scores, expected {count}, one per response")
    return values


def _place_of(function: Callable[..., Any]) -> str:
    """Return where a function begins, in the form of `places_of`; nothing for another object that can be called."""
    if not inspect.isfunction(function):
        return ""
    code = function.__code__
    return f"\n  at: {code.co_filename}:{code.co_firstlineno} {code.co_name}"


class _BadScore(Exception):
    """The value that a function returned is no score."""


def _number_or_parts(value: object, *, keeps_none: bool) -> object:
    """Return a score as JSON has it; None stays what it is with `keeps_none`."""
    if value is None and keeps_none:
        return None
    if isinstance(value, Mapping):
        try:
            parts = plain_parts(value, keeps_none=keeps_none)
            return {name: None if math.isnan(part) else part for name, part in parts.items()}
        except MalformedReply as error:
            raise _BadScore(f"returned {error}") from error
    number = finite(value)
    if number is None:
        raise _BadScore(f"returned {shown(value)}, expected a finite number of at most {NUMBER_LIMIT:g}")
    return number


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
    keeps_none: bool = False
    """True: None stays, which says that a function does not concern the row; else it counts 0 beside other parts."""
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
            else _results(
                function,
                [
                    function(*first, **_named(function, {key: values[at] for key, values in by_name.items()}, row[at]))
                    for at, first in enumerate(zip(prompt, response, answer, strict=True))
                ],
            )
            for name, function in self.functions.items()
        }
        if not self.by_name:
            return next(iter(scores.values()))
        # None of TRL's form says that the function does not concern the row.
        none = None if self.keeps_none else 0.0
        parts = zip(*scores.values(), strict=True)
        return [dict(zip(scores, [none if part is None else part for part in each], strict=True)) for each in parts]

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
        scores = list(_results(function, [function(**columns)])[0])
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
