"""The scoring process: loads one reward function and answers requests until it is ended.

Started by `ScorerProcess` with this file's path; standard library only, so that it starts at once. It is two
processes: a guard, which ends everything that the reward function has started when the owner asks for it or dies, and
the scorer itself. One JSON object per line over an inherited socket:

    {"id", "paths", "target", "is_factory", "in_batches"}   -> {"id", "ready", "wants", "source", "checks_answers"}
                                                               or {"id", "failed"}
    {"id", "arguments"}                                      -> {"id", "scores"} or {"id", "error"}
    {"id", "answers"}                                        -> {"id", "problems"} or {"id", "error"}

A reply repeats the id of its request, which cannot be guessed, so what a reward function writes there by accident is
told apart. `arguments` holds one list per parameter, a value per row; a score is a number or an object of numbers.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHANNEL_FROM = 500
"""Lowest number of the channel's descriptor: beyond what a program opens or closes by the dozen."""
_TEXT_LIMIT = 2000
"""Characters of an error's text."""
_FRAMES_SHOWN = 5
_POSITIONAL = ("prompt", "response", "answer")
_ANSWER_CHECK = "check_answer"
"""Name of a function's attribute that is given a gold answer and returns why it cannot be read, or None."""
_BY_NAME = ("row", "prompt_tokens", "response_tokens", "truncated")
"""Arguments that a function gets besides prompt, response and answer when it has a parameter of that name, or
`**kwargs`."""


def main() -> None:
    """Serve a scorer: `scorer_child.py SOCKET_FD PARENT_PID`."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _end_everything)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return
    # Ctrl-C reaches the whole foreground group; the parent decides when scoring ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = os.getpid()
    scorer = os.fork()
    if scorer:
        os.close(fd)
        _guard(scorer)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == guard:
        _serve(_out_of_reach(fd))


# ---- the guard


def _guard(scorer: int) -> None:
    """Wait for the scorer, end the processes that it left, and exit with its code."""
    while True:
        ended, status = os.wait()
        if ended == scorer:
            code = os.waitstatus_to_exitcode(status)
            _kill_descendants()
            os._exit(code if code >= 0 else 128 - code)


def _end_everything(number: int, frame: object) -> None:
    del frame
    _kill_descendants()
    os._exit(128 + number)


def _kill_descendants() -> None:
    """Kill all descendants. Orphans become children of this process, so killing children until there are none reaches
    every one."""
    while children := _children_of(os.getpid()):
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _children_of(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                # pid (name) state parent ...; the name may hold anything, the last bracket ends it.
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(name))
    return found


# ---- the scorer


def _out_of_reach(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _CHANNEL_FROM)
    os.close(fd)
    return moved


def _serve(fd: int) -> None:
    # Prints must have left before the reply, so that they are reported with the right step.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as stream:
        first = json.loads(stream.readline())
        sys.path[:] = list(dict.fromkeys([*first["paths"], *sys.path]))
        try:
            module, function = _load(first["target"], is_factory=first["is_factory"])
            wants, source = _wanted(function), _digest_of(module, function)
        except Exception as error:  # noqa: BLE001  (user code; the parent reports it)
            _send(stream, first, {"failed": _cut(f"{type(error).__name__}: {error}")})
            return
        check = inspect.getattr_static(function, _ANSWER_CHECK, None) and getattr(function, _ANSWER_CHECK)
        ready = {"ready": True, "wants": wants, "source": source, "checks_answers": check is not None}
        _send(stream, first, ready)
        score = _score_batch if first["in_batches"] else _score_one
        for line in stream:
            request = json.loads(line)
            if "answers" in request:
                reply = partial(_problems, check, request["answers"])
            else:
                reply = partial(_scores, score, function, request["arguments"])
            _send(stream, request, _guarded(reply))


def _load(target: str, *, is_factory: bool) -> tuple[ModuleType, Callable[..., Any]]:
    place, _, name = target.rpartition(":")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_named(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    if is_factory:
        found = found()
    if not callable(found):
        raise TypeError(f"expected a function, got {type(found).__name__}")
    function: Callable[..., Any] = found
    return module, function


def _module_named(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        places = ", ".join(path for path in sys.path if path)
        raise ModuleNotFoundError(
            f"no module named {error.name!r}: it is neither beside the recipe that names it, nor in the working "
            f"directory {os.getcwd()}, nor in {places}; FILE.py:function names a file"
        ) from error


def _module_of_file(file: Path) -> ModuleType:
    """Return the module of a file: by its name in a package where it is a part of one, else by itself.

    Either way it can import what lies beside it.
    """
    file = file.resolve(strict=True)
    folder, names = file.parent, [file.stem] if file.stem != "__init__" else []
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    if names and names != [file.stem]:
        return importlib.import_module(".".join(names))
    # A name that hides no module that is imported already, such as that of a file json.py.
    name = file.stem if file.stem not in sys.modules else f"reward_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _digest_of(module: ModuleType, function: Callable[..., Any]) -> str:
    """Return a digest of the sources of module and function, and of imported modules that lie beside either."""
    named = [module, inspect.getmodule(inspect.unwrap(function)) or module]
    files = {Path(str(vars(one)["__file__"])) for one in named if vars(one).get("__file__")}
    folders = {file.parent for file in files}
    for other in list(sys.modules.values()):
        file = vars(other).get("__file__") if isinstance(other, ModuleType) else None
        if isinstance(file, str) and Path(file).parent in folders:
            files.add(Path(file))
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files, key=lambda file: file.name):
        if file.is_file():
            digest.update(f"{file.name}\n".encode() + hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest()


def _wanted(function: Callable[..., Any]) -> list[str]:
    """Return the names of the further arguments that the function takes.

    Raises:
        TypeError: it needs an argument that does not exist.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(_BY_NAME)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    further = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY or p in positional[len(_POSITIONAL) :]}
    needed = [n for n, p in further.items() if p.default is p.empty and n not in _BY_NAME]
    takes_three = len(positional) >= len(_POSITIONAL) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if needed or not takes_three:
        raise TypeError(
            f"expected a function of ({', '.join(_POSITIONAL)}) that may also take {', '.join(_BY_NAME)}, "
            f"got {inspect.signature(function)}"
        )
    return [name for name in _BY_NAME if name in further]


def _score_one(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> list[object]:
    row = {name: column[0] for name, column in arguments.items()}
    first = [row.pop(name) for name in _POSITIONAL]
    return [_number_or_parts(function(*first, **row))]


def _score_batch(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> list[object]:
    count = len(arguments["prompt"])
    first = [arguments.pop(name) for name in _POSITIONAL]
    given = function(*first, **arguments)
    try:
        scores = [_number_or_parts(value) for value in given]
    except TypeError as error:
        raise _BadScore(f"returned {_cut(repr(given))}, expected one score per response: {error}") from error
    if len(scores) != count:
        raise _BadScore(f"returned {len(scores)} scores, expected {count}, one per response")
    return scores


class _BadScore(Exception):
    """The value that a function returned is no score."""


def _number_or_parts(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _number(part, f"{_cut(str(name))!r}: ") for name, part in value.items()}
    return _number(value, "")


def _number(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _BadScore(f"returned {where}{_cut(repr(value))}, expected a finite number")
    return number


def _problems(check: Callable[[Any], object], answers: list[Any]) -> dict[str, object]:
    return {"problems": [None if (problem := check(answer)) is None else str(problem) for answer in answers]}


def _scores(
    score: Callable[..., list[object]], function: Callable[..., Any], arguments: dict[str, list[Any]]
) -> dict[str, object]:
    return {"scores": score(function, arguments)}


def _guarded(reply: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Return the reply of `reply`, or the reason why user code failed in it."""
    try:
        return reply()
    except _BadScore as error:
        return {"error": _cut(str(error))}
    except Exception as error:  # noqa: BLE001  (user code; the parent reports it)
        return {"error": _cut(f"raised {type(error).__name__}: {error}") + _places(error)}


def _places(error: BaseException) -> str:
    """Return the places of the function when it raised, innermost last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return "".join(f"\n  at: {frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-_FRAMES_SHOWN:])


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]} ..."


def _send(stream: Any, request: dict[str, Any], message: dict[str, object]) -> None:
    sys.stdout.flush()
    # The line feed before it ends whatever else was written there.
    stream.write(b"\n" + json.dumps({"id": request["id"], **message}).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
