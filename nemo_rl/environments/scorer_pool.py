"""Processes that score responses under a wall-clock limit and can be killed: `ScorerPool`.

Called by `ProcessEnvironment`. One process per thread of the pool; a process that takes too long or dies is ended and
the next response gets a new one. Processes die with the pool's threads, so none is left when this process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from nemo_rl.errors import RewardError

__all__ = ["Outcome", "ScorerItem", "ScorerPool", "ScorerSpec"]

_CHILD = Path(__file__).with_name("scorer_child.py")
# Imports of a reward module: sympy takes about a second, a module that loads a model may take much longer.
START_TIMEOUT_S = 120.0
# A killed process is reaped by then; only a machine out of order takes longer.
REAP_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSpec:
    """Which function scores."""

    target: str
    """`module:function`, looked up in the working directory too."""
    is_factory: bool = False
    """True: the function takes nothing and returns the one that scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerItem:
    """One call of the reward function."""

    prompt: str
    response: str
    answer: object
    """JSON-like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one call."""

    reward: float = 0.0
    timed_out: bool = False
    error: str | None = None
    """Why there is no reward; None when there is one, or the time ran out."""


class ScorerPool:
    """Scores items in parallel processes.

    Args:
        spec: the function.
        num_workers: processes.
        timeout_s: wall-clock limit of one item.

    Raises:
        RewardError: the function cannot be loaded.
    """

    def __init__(self, spec: ScorerSpec, *, num_workers: int, timeout_s: float) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="scorer")
        try:
            # The first process starts now, so that a function that cannot be loaded is reported before any rollout.
            self._threads.submit(self._child).result()
        except RewardError:
            self.shutdown()
            raise

    def score(self, items: Sequence[ScorerItem]) -> list[Outcome]:
        """One outcome per item, in order; bounded by the items' limits."""
        return list(self._threads.map(self._score_one, items))

    def shutdown(self) -> None:
        """Ends every process and thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            children = list(self._children)
        for child in children:
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _score_one(self, item: ScorerItem) -> Outcome:
        child = self._child()
        try:
            reply = child.ask({"prompt": item.prompt, "response": item.response, "answer": item.answer})
        except TimeoutError:
            self._drop(child)
            return Outcome(timed_out=True)
        except TypeError as error:
            return Outcome(error=f"cannot be given the answer {item.answer!r}, which is no JSON value: {error}")
        except (OSError, EOFError) as error:
            self._drop(child)
            return Outcome(error=f"ended its process: {error}")
        if "error" in reply:
            return Outcome(error=str(reply["error"]))
        return Outcome(reward=float(cast("float", reply["reward"])))

    def _child(self) -> _Child:
        """This thread's process; made by this thread, because it dies with the thread that made it."""
        present: _Child | None = vars(self._mine).get("child")
        if present is not None:
            return present
        child = _Child(timeout_s=self._timeout_s)
        with self._lock:
            if self._is_closed:
                child.kill()
                raise RewardError("scoring: the environment has been shut down")
            self._children.add(child)
        try:
            child.load(self._spec)
        except RewardError:
            self._drop(child)
            raise
        self._mine.child = child
        return child

    def _drop(self, child: _Child) -> None:
        child.kill()
        self._mine.child = None
        with self._lock:
            self._children.discard(child)


class _Child:
    """One scoring process and its socket."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._channel, theirs = socket.socketpair()
        with theirs:
            # -P: the folder of the script holds modules of ours that must not hide the standard library's.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._stream = self._channel.makefile("rwb")
        self._kill_lock = threading.Lock()

    def load(self, spec: ScorerSpec) -> None:
        """Waits until the function is loaded."""
        paths = [path for path in sys.path if path] + [os.getcwd()]
        try:
            reply = self.ask({"paths": paths, "target": spec.target, "is_factory": spec.is_factory}, START_TIMEOUT_S)
        except TimeoutError:
            reply = {"failed": f"not loaded within {START_TIMEOUT_S:.0f} s"}
        except (OSError, EOFError) as error:
            reply = {"failed": f"its process ended while loading it: {error}"}
        if "failed" in reply:
            raise RewardError(f"reward function {spec.target!r}: cannot be loaded: {reply['failed']}")

    def ask(self, message: dict[str, object], timeout_s: float | None = None) -> dict[str, object]:
        """Sends one message and waits for its reply.

        Raises:
            TimeoutError: no reply in time.
            EOFError: the process ended.
        """
        self._channel.settimeout(self._timeout_s if timeout_s is None else timeout_s)
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise EOFError(f"exit code {self._process.wait(REAP_TIMEOUT_S)}")
        reply: dict[str, object] = json.loads(line)
        return reply

    def kill(self) -> None:
        """Ends the process and what it started. Idempotent."""
        with self._kill_lock:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(REAP_TIMEOUT_S)
            self._channel.close()
