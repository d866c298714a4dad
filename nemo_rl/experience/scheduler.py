"""`EngineScheduler`: spreads groups over the generation engines and hands them on as they end.

    EngineScheduler.stream
      |- split_request    consecutive blocks of groups, by expected work                     (split_request)
      `- _Stream          one thread for each engine takes block after block                 (WorkerFleet.stream_one)
           `- an engine that dies or hangs: its block is sampled again by another one

Used by the rollout worker, for training and for validation, whose blocks take turns in the engines; new weights come
through `WeightSync`, past this class. Invariant: blocks depend on the request, the number of engines and their batch
size alone, never on time, so a row is sampled in the same batch, to the last bit, whichever engine takes its block. A
group is never split.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise, repeat
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import TypeVar

import torch

from nemo_rl.distributed.worker_groups import Call, Request, WorkerFleet, ask
from nemo_rl.errors import WorkerError, WorkerLate, WorkerLost
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
)
from nemo_rl.utils.deadlines import awake_s
from nemo_rl.utils.metrics import Mean, Min, Reduction, Sum

__all__ = ["EngineScheduler", "at_once", "expected_work", "split_request"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STAGE = "generation"
ENGINE_KEY = "policy.generation.engine_timeout_s"
GRACE_S = 5.0
"""After the deadline of a block, until the thread that waits for its engine must have reported it."""


class EngineScheduler(GenerationInterface):
    """Engines of a fleet behind one interface.

    Args:
        engines: each worker is a `GenerationInterface`.
        batch_rows: rows that an engine decodes at once.
        timeout_s: deadline of one block; an engine that is later is lost.
        is_continuous: each engine takes several requests at a time.
    """

    def __init__(self, engines: WorkerFleet, *, batch_rows: int, timeout_s: float, is_continuous: bool = False) -> None:
        self._engines, self._batch_rows, self._timeout_s = engines, batch_rows, timeout_s
        self._is_continuous = is_continuous
        self._version = -1
        self._busy = self._locks()
        """Locks by the number of an engine: held while one that is not continuous samples a block, since requests of
        several callers may wait."""

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample all rows, in the order of the request.

        Raises:
            UserError, WorkerError: an engine failed, or all are lost: the root cause.
        """
        found = list(self.stream(request))
        if not found:
            return self._run_on_first(request)
        groups = [group for samples in found for group in samples.groups]
        size = request.group_size
        order = sorted(range(len(groups)), key=groups.__getitem__)
        rows = [place * size + row for place in order for row in range(size)]
        return GenerationOutput.joined([samples.output for samples in found]).select(rows)

    def stream(self, request: GenerationRequest, *, share: tuple[int, int] = (0, 1)) -> Iterator[GroupSamples]:
        """Yield whole groups as they end; the metrics of the last ones tell what became of the engines.

        Args:
            share: (i, n): the caller is number i of n that have the same request sampled, each its own blocks. Which
                rows share a batch does not depend on n.

        Raises:
            UserError, WorkerError: as `generate`.
        """
        if request.prompt_ids:
            yield from _Stream(self, self._engines, request, share).run()

    def split(self, request: GenerationRequest) -> list[GenerationRequest]:
        return split_request(request, num_engines=self._engines.size, batch_rows=self._batch_rows)

    def samples_of(self, number: int, block: GenerationRequest) -> Iterator[GroupSamples]:
        """Yield the groups of one block from one engine, when its turn has come.

        Raises:
            WorkerLost: the engine is lost.
        """
        request = ask(GenerationInterface.stream, request=block)
        with nullcontext() if self._is_continuous else self._busy[number]:
            yield from self._engines.stream_one(
                number, Call(request=request, stage=STAGE, timeout_s=self._timeout_s, deadline_key=ENGINE_KEY)
            )

    def feed_of(self, number: int, name: str) -> Iterator[GroupSamples]:
        """Yield the rows of a feed from one engine, until it is closed; it has no deadline as a whole.

        Raises:
            WorkerLost: the engine is lost.
        """
        request = ask(GenerationInterface.feed, name=name)
        yield from self._engines.stream_one(number, Call(request=request, stage=STAGE, timeout_s=math.inf))

    def run_on(self, number: int, request: Request[_T]) -> _T:
        """Ask one engine.

        Raises:
            WorkerLost: the engine is lost.
        """
        call = Call(request=request, stage=STAGE, timeout_s=self._timeout_s, deadline_key=ENGINE_KEY)
        return self._engines.run_one(number, call)

    def lose(self, number: int, cause: WorkerLost) -> None:
        """End an engine that does not answer. Idempotent."""
        self._engines.lose(number, cause)

    @property
    def incarnations(self) -> Mapping[int, int]:
        return self._engines.incarnations

    def none_left(self) -> WorkerError:
        return self._engines.none_left(STAGE)

    def abort(self, names: Sequence[str]) -> None:
        self._run(ask(GenerationInterface.abort, names=tuple(names)))

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def use(self, engines: WorkerFleet) -> None:
        self._engines = engines

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        held = self._run(ask(GenerationInterface.update_weights, weights=list(weights), version=version))
        self._version = next(iter(held.values()))
        return self._version

    def prepare_for_generation(self) -> None:
        self._run(ask(GenerationInterface.prepare_for_generation))

    def finish_generation(self) -> None:
        self._run(ask(GenerationInterface.finish_generation))

    @property
    def weight_version(self) -> int:
        return self._version

    def shutdown(self) -> None:
        self._engines.shutdown()

    def __getstate__(self) -> dict[str, object]:
        """Leave the locks behind, which belong to a process."""
        return {name: value for name, value in self.__dict__.items() if name != "_busy"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._busy = self._locks()

    def _locks(self) -> dict[int, Lock]:
        return {number: Lock() for number in range(self._engines.size)}

    def _run_on_first(self, request: GenerationRequest) -> GenerationOutput:
        numbers = self._engines.numbers
        if not numbers:
            raise self._engines.none_left(STAGE)
        call = Call(request=ask(GenerationInterface.generate, request=request), stage=STAGE, timeout_s=self._timeout_s)
        return self._engines.run_one(numbers[0], call)

    def _run(self, request: Request[_T]) -> dict[int, _T]:
        return self._engines.run(request, stage=STAGE, timeout_s=self._timeout_s)


class _Stream:
    """The blocks of one request on their way through the engines."""

    def __init__(
        self, scheduler: EngineScheduler, engines: WorkerFleet, request: GenerationRequest, share: tuple[int, int]
    ) -> None:
        self._scheduler, self._engines = scheduler, engines
        self._blocks, (first, step) = scheduler.split(request), share
        sizes = [len(block.prompt_ids) for block in self._blocks]
        self._first_group = list(accumulate(sizes, initial=0))
        self._waiting = deque(range(first, len(self._blocks), step))
        self._num_groups, self._num_given = sum(sizes[block] for block in self._waiting), 0
        self._num_open = len(self._waiting)
        """Blocks that no engine has finished."""
        self._ended: set[int] = set()
        """Groups that an engine has given."""
        self._found: SimpleQueue[GroupSamples | None] = SimpleQueue()
        """Filled by the threads of the engines; each puts None when it ends."""
        self._changed = Condition()
        self._failure: Exception | None = None
        self._num_lost = self._num_again = 0
        self._speeds: dict[int, Mean] = {}

    def run(self) -> Iterator[GroupSamples]:
        numbers = self._engines.numbers
        if not numbers:
            raise self._engines.none_left(STAGE)
        if not self._num_open:
            return
        try:
            if len(numbers) == 1:
                yield from self._counted(self._serve(numbers[0]))
            else:
                yield from self._counted(self._from_threads(numbers))
        finally:
            with self._changed:
                is_whole = not self._num_open
                # Also when nobody wants the rest: the threads end after the block that they are at.
                self._num_open = 0
                self._changed.notify_all()
        if self._failure is not None:
            raise self._failure
        # Groups that are missing although all blocks have ended were aborted.
        if self._num_given < self._num_groups and not is_whole:
            raise self._engines.none_left(STAGE)

    def _counted(self, found: Iterator[GroupSamples]) -> Iterator[GroupSamples]:
        """Count the groups; the last ones carry the metrics of the engines."""
        for samples in found:
            self._num_given += len(samples.groups)
            if self._num_given < self._num_groups:
                yield samples
            else:
                metrics = {**samples.output.metrics, **self._metrics()}
                yield replace(samples, output=replace(samples.output, metrics=metrics))

    def _from_threads(self, numbers: Sequence[int]) -> Iterator[GroupSamples]:
        for number in numbers:
            Thread(target=self._pump, args=(number,), name=f"engine {number}", daemon=True).start()
        num_serving = len(numbers)
        while num_serving and self._num_given < self._num_groups and self._failure is None:
            samples = self._found.get()
            if samples is None:
                num_serving -= 1
            else:
                yield samples

    def _pump(self, number: int) -> None:
        try:
            for samples in self._serve(number):
                self._found.put(samples)
        finally:
            self._found.put(None)

    def _metrics(self) -> dict[str, Reduction]:
        speeds = {f"engine_{number}/tokens_per_s": speed for number, speed in sorted(self._speeds.items())}
        return {
            **speeds,
            "engines": Min(float(len(self._engines))),
            "engines_lost": Sum(float(self._num_lost)),
            "rows_sampled_again": Sum(float(self._num_again)),
        }

    def _serve(self, number: int) -> Iterator[GroupSamples]:
        try:
            while (block := self._take()) is not None:
                try:
                    yield from self._sample(number, block)
                except WorkerLost as error:
                    self._put_back(number, block, error)
                    return
        except Exception as error:  # noqa: BLE001 - raised by `run`
            with self._changed:
                self._failure = self._failure or error
                self._num_open = 0
                self._changed.notify_all()

    def _take(self) -> int | None:
        """The next block; waits while other engines may still put theirs back. None: all have been sampled."""
        give_up = awake_s() + self._scheduler.timeout_s + GRACE_S
        with self._changed:
            while not self._waiting and self._num_open:
                if not self._changed.wait(max(0.0, give_up - awake_s())):
                    return None
            return self._waiting.popleft() if self._num_open else None

    def _sample(self, number: int, block: int) -> Iterator[GroupSamples]:
        """Yield the groups of a block that no engine has given yet, numbered as in the whole request."""
        first, before, num_tokens = self._first_group[block], self._speeds.get(number, Mean(0.0, 0.0)), 0
        is_local, began = self._engines.is_local(number), time.monotonic()
        for samples in self._scheduler.samples_of(number, self._blocks[block]):
            num_tokens += len(samples.output.token_ids)
            numbered = replace(samples, groups=tuple(first + group for group in samples.groups))
            with self._changed:
                new = numbered.without(self._ended)
                self._ended.update(numbered.groups)
                self._speeds[number] = before.merge(Mean(float(num_tokens), time.monotonic() - began))
            handed_on = time.monotonic()
            if new is not None:
                yield new
            if is_local:
                # It stood still meanwhile.
                began += time.monotonic() - handed_on
        with self._changed:
            self._num_open -= 1
            if not self._num_open:
                # Nobody else waits for it: engines that found no block wait for one that is put back, or for the end.
                self._changed.notify_all()

    def _put_back(self, number: int, block: int, error: WorkerLost) -> None:
        rows = len(self._blocks[block].seeds)
        with self._changed:
            self._waiting.appendleft(block)
            self._num_lost += 1
            self._num_again += rows
            self._changed.notify_all()
        what = "hangs" if isinstance(error, WorkerLate) else "is gone"
        logger.warning("engine %d %s; its %d rows are sampled again by another one", number, what, rows)


def split_request(request: GenerationRequest, *, num_engines: int, batch_rows: int) -> list[GenerationRequest]:
    """Consecutive blocks of prompts with their seeds, in the order in which they are to be taken; at least one.

    Every engine first gets half of its share of the expected work, then half of what is left, and so on, so that
    engines end together however unequal rows turn out; but no block is smaller than a batch that an engine decodes at
    once, which smaller ones would not make any faster. One engine gets all prompts at once.

    Args:
        batch_rows: rows that an engine decodes at once.
    """
    group = request.group_size
    limits = request.limits or repeat(None)
    ends = list(accumulate(map(expected_work, request.prompt_ids, repeat(request), limits), initial=0.0))
    least = max(1, batch_rows // max(1, group)) * ends[-1] / max(1, len(request.prompt_ids))
    cuts = _cuts(ends, _shares(ends[-1], num_engines=num_engines, least=least))
    return [request.of_groups(range(start, stop)) for start, stop in pairwise(cuts)] or [request]


def expected_work(prompt: Sequence[int], request: GenerationRequest, limit: int | None = None) -> float:
    """Tokens of the forward passes of a prompt's group, if its responses get half as long as they may (`limit`; None:
    as the request says). A prompt is read once for its group; every token of a response is a pass of its own.
    """
    return len(prompt) + request.group_size * (limit or request.sampling.max_new_tokens) / 2


def _shares(total: float, *, num_engines: int, least: float) -> list[float]:
    """Work of each block: rounds of one block per engine, of half of what is left."""
    shares: list[float] = []
    left = total
    while left > total * 1e-9:
        share = left / num_engines
        is_last = num_engines == 1 or share < 2 * least
        shares += [share if is_last else share / 2] * num_engines
        left = 0.0 if is_last else left / 2
    return shares


def _cuts(ends: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Return first prompts of the blocks and the number of prompts: each cut where the work up to a prompt (`ends`)
    comes next to its share."""
    cuts = [0]
    for target in accumulate(shares):
        place = bisect_left(ends, target, cuts[-1])
        near = range(max(cuts[-1], place - 1), min(place + 1, len(ends)))
        cut = min(near, key=lambda prompt: abs(ends[prompt] - target))
        if cut > cuts[-1]:
            cuts.append(cut)
    return cuts


def at_once(streams: Sequence[Iterator[_T]]) -> Iterator[_T]:
    """Yield what the streams yield, as it comes; each has a thread. Raises the first error once all have ended, so that
    nothing goes on unseen."""
    found: SimpleQueue[tuple[_T] | None] = SimpleQueue()
    failures: list[Exception] = []

    def serve(stream: Iterator[_T]) -> None:
        try:
            for item in stream:
                found.put((item,))
        except Exception as error:  # noqa: BLE001 - raised by the caller's thread
            failures.append(error)
        finally:
            found.put(None)

    for stream in streams:
        Thread(target=serve, args=(stream,), name="rollout of a kind", daemon=True).start()
    left = len(streams)
    while left:
        item = found.get()
        if item is None:
            left -= 1
        else:
            yield item[0]
    if failures:
        raise failures[0]
