"""The scoring process: loads one reward function and answers requests until it is ended.

Started by `scorer_pool` with this file's path; standard library only, so that it starts at once. One JSON object per
line over an inherited socket: first `{"paths", "target", "is_factory"}`, answered by `{"ready": true}` or
`{"failed": text}`; then `{"prompt", "response", "answer"}`, answered by `{"reward": number}` or `{"error": text}`.
It dies with the thread that started it, also while the reward function hangs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """`scorer_child.py SOCKET_FD PARENT_PID`"""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # Ctrl-C reaches the whole foreground group; the parent decides when scoring ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A reward function may print; nobody reads this process's standard output.
    os.dup2(2, 1)
    with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as stream:
        first = json.loads(stream.readline())
        sys.path[:] = list(dict.fromkeys([*first["paths"], *sys.path]))
        try:
            reward = _load(first["target"], is_factory=first["is_factory"])
        except Exception as error:  # noqa: BLE001  (user code; the parent reports it)
            _send(stream, {"failed": f"{type(error).__name__}: {error}"})
            return
        _send(stream, {"ready": True})
        for line in stream:
            _send(stream, _answer(reward, json.loads(line)))


def _load(target: str, *, is_factory: bool) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if is_factory:
        found = found()
    if not callable(found):
        raise TypeError(f"expected a function, got {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _answer(reward: Callable[..., Any], request: dict[str, Any]) -> dict[str, object]:
    try:
        value = reward(request["prompt"], request["response"], request["answer"])
    except Exception as error:  # noqa: BLE001  (user code; the parent reports it)
        return {"error": f"raised {type(error).__name__}: {error}"}
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        return {"error": f"returned {value!r}, expected a finite number"}
    return {"reward": number}


def _send(stream: Any, message: dict[str, object]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
