"""`ScorerPool`: scores responses in several processes at once; used by `ProcessEnvironment`.

One process per thread of the pool; a process that takes too long or dies is ended, and the next call gets a new one.
Processes die with the threads of the pool, so none is left when this process is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import cast

from nemo_rl.environments.scorer_process import ScorerProcess, ScorerSpec
from nemo_rl.errors import RewardError

__all__ = ["Score", "ScoreOutcome", "ScorerItem", "ScorerPool"]

ANSWERS_AT_ONCE = 32
"""Gold answers of one call: each takes milliseconds, and a response that is to be scored waits for a call at most."""
Score = float | dict[str, float]
"""A number, or parts by name."""


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
        self.source, self.checks_answers = first.source, first.checks_answers

    def score(self, items: Sequence[ScorerItem]) -> list[ScoreOutcome]:
        """Return one outcome per item, in order; bounded by the calls' limits."""
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
            process.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            process.close()

    def _score_call(self, items: Sequence[ScorerItem]) -> list[ScoreOutcome]:
        process = self._process()
        names = ("prompt", "response", "answer", *sorted(process.wants))
        arguments = {name: [_field(item, name) for item in items] for name in names}
        try:
            reply = process.ask({"arguments": arguments}, timeout_s=self._timeout_s)
        except TimeoutError:
            self._drop(process)
            return [ScoreOutcome(timed_out=True)] * len(items)
        except (TypeError, ValueError, RecursionError) as error:
            given = ", ".join(name for name in names if name in ("answer", "row"))
            return [ScoreOutcome(error=f"cannot be given {given}, which holds no JSON values: {error}")] * len(items)
        except (OSError, EOFError) as error:
            self._drop(process)
            return [ScoreOutcome(error=f"ended its process: {error}")] * len(items)
        if "error" in reply:
            return [ScoreOutcome(error=str(reply["error"]))] * len(items)
        return [ScoreOutcome(score=score) for score in cast("list[Score]", reply["scores"])]

    def _check_answers(self, answers: Sequence[object]) -> list[str | None]:
        process = self._process()
        try:
            reply = process.ask({"answers": list(answers)}, timeout_s=self._timeout_s)
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
            return [str(reply["error"])] * len(answers)
        return cast("list[str | None]", reply["problems"])

    def _process(self) -> ScorerProcess:
        """Return this thread's process; made by this thread, because it dies with the thread that made it."""
        present: ScorerProcess | None = vars(self._mine).get("process")
        if present is not None:
            return present
        process = ScorerProcess(self._spec, start_timeout_s=self._start_timeout_s, hear=self._hear)
        with self._lock:
            if self._is_closed:
                process.close()
                raise RewardError("scoring: the environment has been shut down")
            self._processes.add(process)
        try:
            process.load()
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


def _field(item: ScorerItem, name: str) -> object:
    value: object = getattr(item, name)
    return value
