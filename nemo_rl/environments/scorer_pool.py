"""`ScorerPool`: scores responses in several processes at once; used by `ProcessEnvironment`.

One process per thread of the pool; a process that takes too long or dies is ended, and the next call gets a new one.
Processes die with the threads of the pool, so none is left when this process is killed. Every wait has a deadline; what
a process prints is read while its reply is waited for, so that it never blocks on a full pipe.
"""

from __future__ import annotations

import math
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from nemo_rl.config.env import RewardCode
from nemo_rl.environments.user_process import (
    LEFTOVER_TIMEOUT_S,
    PART_BYTES,
    Exchange,
    Form,
    PrintedLines,
    UserProcess,
    import_paths,
)
from nemo_rl.environments.wire import MalformedReply, finite, plain_parts, shown
from nemo_rl.errors import RewardError
from nemo_rl.utils.console import printable
from nemo_rl.utils.files import time_left, wait_readable

__all__ = ["Score", "ScoreOutcome", "ScorerItem", "ScorerPool", "ScorerSpec"]

ANSWERS_AT_ONCE = 32
"""Gold answers of one call: each takes milliseconds, and a response that is to be scored waits for a call at most."""
AWAITED_AT_ONCE = 64
"""Responses of one call of an `async def`, which waits for all of them at the same time."""
_REPLY_LIMIT_BYTES = 64 * 1024 * 1024
"""A reply is a few numbers; more comes from something else that writes to the channel."""
_ERROR_LIMIT = 4000
"""Characters of an error's text."""
_PIPE_BYTES = 1 << 16
"""Bytes that a pipe holds: no more can wait there of what was printed before a reply."""
Score = float | dict[str, float]
"""A number, or parts by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSpec:
    """The function that scores, and the form of its calls."""

    target: str
    """`module:function`, looked up in the working directory too, or `FILE.py:function`."""
    is_factory: bool = False
    """True: the function takes nothing and returns the one that scores."""
    in_batches: bool = False
    """True: the function gets lists, and returns one score for each of their items."""
    keeps_none: bool = False
    """True: a score, or a part of one, may be None, and is NaN then."""
    code: RewardCode | None = None
    """The function itself, where it is one of a Python session; `target` only names it then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerItem:
    """One response to score. A function gets the first three, and of the others those that it has parameters for."""

    prompt: str
    response: str
    answer: object
    """JSON-like."""
    row: object = None
    """JSON-like: the other columns of the prompt's row."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    truncated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOutcome:
    """The outcome for one response."""

    score: Score = 0.0
    timed_out: bool = False
    error: str | None = None
    """The reason why there is no score; None when there is one, or the time ran out."""


class ScorerPool:
    """Scores items in parallel processes.

    Args:
        spec: the function.
        num_workers: processes.
        timeout_s: wall-clock limit of one call.
        start_timeout_s: wall-clock limit of loading the function.
        batch_size: items of one call; above 1 only for a function that takes batches.
        hear: gets what the processes print, line by line, from several threads.

    Raises:
        RewardError: the function cannot be loaded.
    """

    def __init__(
        self,
        spec: ScorerSpec,
        *,
        num_workers: int,
        timeout_s: float,
        start_timeout_s: float,
        batch_size: int = 1,
        hear: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._batch_size = batch_size
        self._hear = hear
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._processes: set[ScorerProcess] = set()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="scorer")
        try:
            # The first process starts now, so that a function that cannot be loaded is reported before any rollout.
            first = self._threads.submit(self._process).result()
        except RewardError:
            self.shutdown()
            raise
        self.source, self.checks_answers, self.columns = first.source, first.checks_answers, first.columns
        self.is_async = first.is_async
        if self.is_async and not spec.in_batches:
            # Its responses wait at the same time.
            self._batch_size = AWAITED_AT_ONCE

    def score(self, items: Sequence[ScorerItem]) -> list[ScoreOutcome]:
        """Return one outcome per item, in order; bounded by the calls' limits. A late batch is scored again item by
        item."""
        calls = [items[start : start + self._batch_size] for start in range(0, len(items), self._batch_size)]
        return list(chain.from_iterable(self._threads.map(self._score_call, calls)))

    def answer_problems(self, answers: Sequence[object]) -> list[str | None]:
        """Return why the function cannot read each of the gold answers; None where it can."""
        if not self.checks_answers:
            return [None] * len(answers)
        batches = [answers[start : start + ANSWERS_AT_ONCE] for start in range(0, len(answers), ANSWERS_AT_ONCE)]
        return list(chain.from_iterable(self._threads.map(self._check_answers, batches)))

    def shutdown(self) -> None:
        """End every process and thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            process.close()

    def _score_call(self, items: Sequence[ScorerItem]) -> list[ScoreOutcome]:
        process = self._process()
        names = ("prompt", "response", "answer", *sorted(process.wants))
        arguments = {name: [getattr(item, name) for item in items] for name in names}
        rows = [item.row if isinstance(item.row, dict) else {} for item in items]
        for name, is_needed in process.columns.items():
            if is_needed or any(name in row for row in rows):
                arguments[name] = [row.get(name) for row in rows]
        try:
            reply = process.ask({"arguments": arguments}, form={"scores": list}, timeout_s=self._timeout_s)
        except TimeoutError:
            self._drop(process)
            if len(items) == 1:
                return [ScoreOutcome(timed_out=True)]
            # One of them may be to blame alone.
            self._hear(
                f"a batch of {len(items)} responses took longer than env.timeout_s {self._timeout_s:g} s: they are "
                "scored one by one, each with this limit"
            )
            return [outcome for item in items for outcome in self._score_call([item])]
        except (TypeError, ValueError, RecursionError) as error:
            given = ", ".join(name for name in names if name in ("answer", "row"))
            return [ScoreOutcome(error=f"cannot be given {given}, which holds no JSON values: {error}")] * len(items)
        except (OSError, EOFError) as error:
            self._drop(process)
            return [ScoreOutcome(error=f"ended its process: {error}")] * len(items)
        if "error" in reply:
            return [ScoreOutcome(error=_cause(reply))] * len(items)
        outcomes = (_partial_outcomes if self._spec.keeps_none else _outcomes)(reply["scores"], len(items))
        if outcomes is None:
            self._drop(process)
            cause = f"sent {shown(reply['scores'])}, expected {len(items)} finite scores"
            return [ScoreOutcome(error=cause)] * len(items)
        return outcomes

    def _check_answers(self, answers: Sequence[object]) -> list[str | None]:
        process = self._process()
        try:
            reply = process.ask({"answers": list(answers)}, form={"problems": list}, timeout_s=self._timeout_s)
        except (TimeoutError, OSError, EOFError) as error:
            self._drop(process)
            if len(answers) > 1:
                # One of them is to blame.
                return [problem for answer in answers for problem in self._check_answers([answer])]
            is_late = isinstance(error, TimeoutError) and not isinstance(error, ConnectionError)
            return [
                f"takes longer than env.timeout_s {self._timeout_s:g} s" if is_late else f"ends its reader: {error}"
            ]
        if "error" in reply:
            return [_cause(reply)] * len(answers)
        problems = [None if problem is None else str(problem) for problem in reply["problems"]]
        return problems if len(problems) == len(answers) else [f"its reader sent {shown(problems)}"] * len(answers)

    def _process(self) -> ScorerProcess:
        """Return this thread's process; made by this thread, because it dies with the thread that made it."""
        present: ScorerProcess | None = vars(self._mine).get("process")
        if present is not None:
            return present
        process = ScorerProcess(self._hear)
        with self._lock:
            if self._is_closed:
                process.close()
                raise RewardError("scoring: the environment has been shut down")
            self._processes.add(process)
        try:
            process.load(self._spec, timeout_s=self._start_timeout_s)
        except RewardError:
            self._drop(process)
            raise
        self._mine.process = process
        return process

    def _drop(self, process: ScorerProcess) -> None:
        process.close()
        self._mine.process = None
        with self._lock:
            self._processes.discard(process)


def _cause(reply: Mapping[str, object]) -> str:
    """Return why there is no score: what user code raised, or what else is wrong with its reply."""
    return f"raised {reply['error']}{reply.get('places') or ''}" if "kind" in reply else str(reply["error"])


def _outcomes(scores: Sequence[object], count: int) -> list[ScoreOutcome] | None:
    """Return the outcomes of a call; None where user code has changed what its process says."""
    try:
        found = [plain_parts(score) if isinstance(score, dict) else finite(score) for score in scores]
    except MalformedReply:
        return None
    outcomes = [ScoreOutcome(score=score) for score in found if score is not None]
    return outcomes if len(outcomes) == len(found) == count else None


def _partial_outcomes(scores: Sequence[object], count: int) -> list[ScoreOutcome] | None:
    """Return what `_outcomes` does; scores that are None, and parts that are, are NaN."""
    numbers = _outcomes([0.0 if score is None or isinstance(score, dict) else score for score in scores], count)
    try:
        parts = [plain_parts(score, keeps_none=True) if isinstance(score, dict) else math.nan for score in scores]
    except MalformedReply:
        return None
    return numbers and [
        ScoreOutcome(score=part) if score is None or isinstance(score, dict) else outcome
        for score, part, outcome in zip(scores, parts, numbers, strict=True)
    ]


class ScorerProcess(UserProcess):
    """A process that scores, and everything that it starts.

    Args:
        hear: gets what the process prints, line by line.
    """

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__("nemo_rl.environments.session_rewards", name="the scoring process")
        self._printed = self.output.fileno()
        os.set_blocking(self._printed, False)
        self._prints = PrintedLines(hear)
        self._exchange = Exchange(_REPLY_LIMIT_BYTES)
        self.wants: frozenset[str] = frozenset()
        """Further arguments that the function takes."""
        self.columns: Mapping[str, bool] = {}
        """Columns of the row that it takes by name, True for those without a default."""
        self.source = ""
        """Digest of the function's source."""
        self.checks_answers = False
        """True where the function can say which gold answers it cannot read."""
        self.is_async = False
        """True for an `async def`."""

    def load(self, spec: ScorerSpec, *, timeout_s: float) -> None:
        """Wait until the function is loaded; apart from the start, so that a wait can be ended by `kill`.

        Raises:
            RewardError: the function cannot be loaded, or takes other arguments.
        """
        request: dict[str, object] = {
            "paths": import_paths(),
            "target": spec.target,
            "is_factory": spec.is_factory,
            "in_batches": spec.in_batches,
            "keeps_none": spec.keeps_none,
        }
        if spec.code is not None:
            request["paths"] = [*import_paths(), *spec.code.paths]
            request |= {"pickled": b64encode(spec.code.pickled).decode(), "source": spec.code.digest}
        try:
            form = {"wants": list, "columns": dict, "source": str, "checks_answers": bool, "is_async": bool}
            reply = self.ask(request, form=form, timeout_s=timeout_s)
        except TimeoutError:
            reply = {"failed": f"not loaded within {timeout_s:.0f} s"}
        except (OSError, EOFError) as error:
            reply = {"failed": f"its process ended while loading it: {error}"}
        if "error" in reply:
            reply = {"failed": _cause(reply)}
        if "failed" in reply:
            cause = printable(str(reply["failed"]), limit=_ERROR_LIMIT, keep_lines=True)
            raise RewardError(f"reward function {spec.target!r}: cannot be loaded: {cause}")
        self.wants = frozenset(map(str, reply["wants"]))
        self.columns = {str(name): bool(is_needed) for name, is_needed in reply["columns"].items()}
        self.source, self.checks_answers = reply["source"], reply["checks_answers"]
        self.is_async = reply["is_async"]

    def ask(self, request: Mapping[str, object], *, form: Form | None = None, timeout_s: float) -> Mapping[str, Any]:
        """Send a request and wait for its reply, which has the fields of `form`.

        Raises:
            TimeoutError: no reply in time.
            EOFError: the process ended, or was killed. OSError: it sent something else.
            TypeError: the request is no JSON.
        """
        deadline = time.monotonic() + timeout_s
        request_line = self._exchange.request(request, form=form)
        self.channel.settimeout(timeout_s)
        self.channel.sendall(request_line)
        while True:
            reply = self._exchange.reply_in(self._next_part(deadline))
            if reply is not None:
                self._hear_rest()
                return reply

    def close(self) -> None:
        """End the process and close its channels; no thread may wait for it any more. Idempotent."""
        self.kill()
        if self.channel.fileno() != -1:
            self._hear_rest()
            self._prints.end()
            self.channel.close()
            self.output.close()

    def _next_part(self, deadline: float) -> bytes:
        """Return what comes over the channel; what is printed meanwhile is handed on, so that it blocks nobody."""
        while True:
            channel = self.channel.fileno()
            readable = wait_readable(channel, self._printed, timeout_s=time_left(deadline))
            if self._printed in readable and self._hear_part() == 0:
                # Nobody prints any more: the process is gone, or has closed its outputs.
                readable = wait_readable(channel, timeout_s=time_left(deadline))
            if channel not in readable:
                continue
            if part := self.channel.recv(PART_BYTES):
                return part
            # Its guard exits with the code of the scorer, once it has ended what that has left.
            self.wait(LEFTOVER_TIMEOUT_S)
            self.kill()
            raise EOFError(f"exit code {self.exit_code}")

    def _hear_rest(self) -> None:
        count = 0
        while count < _PIPE_BYTES and (heard := self._hear_part()):
            count += heard

    def _hear_part(self) -> int | None:
        """Hand on what was printed, as far as it is read at once; its bytes, 0 at the end, None: nothing waits."""
        try:
            part = os.read(self._printed, PART_BYTES)
        except BlockingIOError:
            return None
        self._prints.add(part)
        return len(part)
