"""The scoring process: loads one reward function and answers requests until it is ended.

Started by `ScorerProcess`; standard library only, so that it starts at once. It is two processes: the guard of
`isolation` and the scorer itself. One JSON object per line over an inherited socket:

    {"id", "paths", "target", "is_factory", "in_batches"}   -> {"id", "ready", "wants", "columns", "source",
                                                                "checks_answers"} or {"id", "failed"}
    the same with "pickled", "source": the function itself, which the program that started this process has pickled
    {"id", "arguments"}                                      -> {"id", "scores"} or {"id", "error"}
    {"id", "answers"}                                        -> {"id", "problems"} or {"id", "error"}

A reply repeats the id of its request, which cannot be guessed, so what a reward function writes there by accident is
told apart. `arguments` holds one list per parameter, a value per row; a score is a number or an object of numbers.
"""

from __future__ import annotations

import inspect
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from nemo_rl.environments.isolation import cut, digest_of, load_target, out_of_reach, serve, start_guarded
from nemo_rl.environments.wire import NUMBER_LIMIT, MalformedReply, finite, plain_parts, shown

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
            return {"scores": self._score(self._function, request["arguments"])}
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
        self._function, self._score = function, _score_batch if request["in_batches"] else _score_one
        self._check = inspect.getattr_static(function, _ANSWER_CHECK, None) and getattr(function, _ANSWER_CHECK)
        wants, columns = wanted(function)
        source = request["source"] if "pickled" in request else digest_of(module, function)
        loaded = {"ready": True, "wants": wants, "columns": columns, "source": source}
        return {**loaded, "checks_answers": self._check is not None}


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
    row = {name: column[0] for name, column in arguments.items()}
    first = [row.pop(name) for name in _POSITIONAL]
    return [_number_or_parts(function(*first, **row))]


def _score_batch(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> list[object]:
    count = len(arguments["prompt"])
    first = [arguments.pop(name) for name in _POSITIONAL]
    given = function(*first, **arguments)
    try:
        values = list(islice(given, count + 1))
    except TypeError as error:
        raise _BadScore(f"returned {shown(given)}, expected one score per response: {error}") from error
    scores = [_number_or_parts(value) for value in values]
    if len(scores) != count:
        found = len(scores) if len(scores) < count else "more"
        raise _BadScore(f"returned {found} scores, expected {count}, one per response")
    return scores


def _place_of(function: Callable[..., Any]) -> str:
    """Return where a function begins, in the form of `places_of`; nothing for another object that can be called."""
    if not inspect.isfunction(function):
        return ""
    code = function.__code__
    return f"\n  at: {code.co_filename}:{code.co_firstlineno} {code.co_name}"


class _BadScore(Exception):
    """The value that a function returned is no score."""


def _number_or_parts(value: object) -> object:
    if isinstance(value, Mapping):
        try:
            return plain_parts(value)
        except MalformedReply as error:
            raise _BadScore(f"returned {error}") from error
    number = finite(value)
    if number is None:
        raise _BadScore(f"returned {shown(value)}, expected a finite number of at most {NUMBER_LIMIT:g}")
    return number
