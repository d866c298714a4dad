"""`TurnSampler`: turns of conversations on their way through the engines, one awaitable per turn.

    TurnSampler.sample            in any event loop, which nothing here blocks
      `- EngineFeed.sample        of the engine that has the prefix, else of the one with the least to do
           |- _send (a thread)    turns that are ready at the same moment go in one request     (add_to_feed)
           `- _serve (a thread)   completes the futures of turns that have ended                (feed)

Used by the loop of conversations. Invariant: what a turn samples depends on its prompt, its seed and the weights alone;
a turn whose engine is lost is sampled again by another one with the same seed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol

import torch

from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet, ask
from nemo_rl.errors import WorkerError, WorkerLate, WorkerLost
from nemo_rl.experience.scheduler import EngineScheduler
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GroupSamples,
    SamplingParams,
)
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.models.generation.turn_batch import DEADLINE_S
from nemo_rl.routes.shape import RecordedRoutes
from nemo_rl.utils.metrics import Reduction, Sum

__all__ = ["SamplesTurns", "TurnRequest", "TurnSample", "TurnSampler"]

logger = logging.getLogger(__name__)

STAGE = "generation"
CLOSE_S = 10.0
"""Longest time that `close` waits for the threads of the feeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """One turn to sample."""

    prompt_ids: tuple[int, ...]
    """All tokens before the turn."""
    seed: int
    sampling: SamplingParams
    name: str = ""
    """Name in the schedule of an asynchronous run, `ordinal.attempt/row.turn`; empty: the turn is in no schedule."""
    engine: int | None = None
    """Number of the engine that has the tokens before the turn in its prefix cache; None: any."""
    only_engine: int | None = None
    """Number of the only engine that may sample the turn; None: any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSample:
    """One sampled turn."""

    token_ids: tuple[int, ...]
    """The stop token included; at least one."""
    logprobs: torch.Tensor
    """`[len(token_ids)]` float32."""
    truncated: bool
    """True when a limit of tokens ended the turn."""
    version_spans: tuple[tuple[int, int], ...]
    """Spans (first token of the turn, version of the weights)."""
    engine: int
    cached_tokens: int | None = None
    """Tokens of the prompt that a prefix cache had; None: there is no such cache."""
    routes: RecordedRoutes | None = None
    """Routes of experts of prompt and turn, of one row."""
    support: torch.Tensor | None = None
    """Sampling masks of the turn's tokens, as in `GenerationOutput.support`."""
    waited_s: float = 0.0
    """Seconds until the engine began."""
    sampled_s: float = 0.0
    """Seconds from then on."""


class SamplesTurns(Protocol):
    """The side of the sampler that conversations use."""

    async def sample(self, request: TurnRequest) -> TurnSample:
        """Return the sampled turn.

        Raises:
            WorkerError: no engine is left, or an engine failed. asyncio.CancelledError: the turn is aborted.
        """
        ...


class TurnSampler:
    """Spreads turns over engines: a turn goes to the engine that has its prefix, else to the one with the fewest
    tokens in flight.

    Args:
        generation: continuous engines, or one of them.
        with_routes: samples have the routes of experts.
        with_support: samples have sampling masks.
        timeout_s: deadline of a turn, from its way into an engine on; an engine that is later is lost. None: that of
            the scheduler.

    Example:
        >>> sampler = TurnSampler(scheduler, with_routes=False, with_support=False)      # doctest: +SKIP
        >>> first = await sampler.sample(request)                                        # doctest: +SKIP
        >>> second = await sampler.sample(replace(longer, engine=first.engine))          # doctest: +SKIP
    """

    def __init__(
        self,
        generation: GenerationInterface,
        *,
        with_routes: bool,
        with_support: bool,
        timeout_s: float | None = None,
    ) -> None:
        self._engines = generation if isinstance(generation, EngineScheduler) else _alone(generation)
        self._with_routes, self._with_support = with_routes, with_support
        self._timeout_s = timeout_s or self._engines.timeout_s
        self._lock = Lock()
        self._feeds: dict[int, EngineFeed] = {}
        self._ended: list[EngineFeed] = []
        """Feeds that have failed; their threads may still run."""
        self._lost: dict[int, int] = {}
        """Incarnation of each engine that was lost, so that its successor is used."""
        self._is_closed = False
        self._schedule: list[ScheduleEntry] = []
        self._num_turns, self._num_again, self._num_lost = 0, 0, 0
        self._tokens: Counter[int] = Counter()
        """Sampled tokens by engine, as the counts of turns since the last `take_metrics`."""

    async def sample(self, request: TurnRequest) -> TurnSample:
        """Return the sampled turn; it is sampled again, with the same seed, where its engine is lost.

        Raises:
            UserError, WorkerError: an engine failed, or none is left. asyncio.CancelledError: the turn is aborted.
        """
        while True:
            feed = self._feed_for(request)
            try:
                return await feed.sample(request)
            except WorkerLost:
                if request.only_engine is not None:
                    raise
                with self._lock:
                    self._num_again += 1

    def use(self, engines: WorkerFleet) -> None:
        """Use these engines from here on: some have been replaced. Turns of those that are gone are sampled again."""
        self._engines.use(engines)
        incarnations = engines.incarnations
        with self._lock:
            gone = [feed for number, feed in self._feeds.items() if incarnations.get(number) != feed.incarnation]
        for feed in gone:
            feed.fail(WorkerLost("the engine was replaced", rank=feed.number, stage=STAGE))

    def take_schedule(self) -> tuple[ScheduleEntry, ...]:
        """Return the events of the engines' batches that have come since the last call."""
        with self._lock:
            found, self._schedule = self._schedule, []
        return tuple(found)

    def take_metrics(self) -> dict[str, Reduction]:
        """Return counts of turns and of their tokens since the last call."""
        with self._lock:
            self._drop_failed()
            found: dict[str, Reduction] = {
                "turns": Sum(float(self._num_turns)),
                "turns_sampled_again": Sum(float(self._num_again)),
                "engines_lost": Sum(float(self._num_lost)),
                **{f"engine_{number}/turn_tokens": Sum(float(count)) for number, count in sorted(self._tokens.items())},
            }
            self._num_turns, self._num_again, self._num_lost = 0, 0, 0
            self._tokens.clear()
        return found

    @property
    def num_open(self) -> int:
        with self._lock:
            return sum(feed.num_open for feed in self._feeds.values())

    def close(self) -> None:
        """End all feeds and their threads; turns on their way fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            feeds, self._feeds = [*self._feeds.values()], {}
        for feed in feeds:
            feed.close()
        deadline = time.monotonic() + CLOSE_S
        for feed in [*feeds, *self._ended]:
            feed.join(deadline)

    def _feed_for(self, request: TurnRequest) -> EngineFeed:
        with self._lock:
            if self._is_closed:
                raise WorkerError("the sampler of turns was closed; make a new one", stage=STAGE)
            self._drop_failed()
            known = self._engines.incarnations
            there = [number for number in known if self._lost.get(number) != known[number]]
            if request.only_engine is not None and request.only_engine not in there:
                raise WorkerLost("the engine has been lost", rank=request.only_engine, stage=STAGE)
            if not there:
                raise self._engines.none_left()
            number = request.engine if request.only_engine is None else request.only_engine
            if number not in there:
                number = min(there, key=lambda each: (self._load_of(each), each))
            feed = self._feeds.get(number)
            if feed is None:
                feed = self._feeds[number] = EngineFeed(
                    self._engines,
                    number,
                    incarnation=known[number],
                    with_routes=self._with_routes,
                    with_support=self._with_support,
                    timeout_s=self._timeout_s,
                    heard=self._note,
                )
            return feed

    def _load_of(self, number: int) -> int:
        feed = self._feeds.get(number)
        return 0 if feed is None else feed.tokens_in_flight

    def _drop_failed(self) -> None:
        """Use feeds no more that have failed, nor engines that are lost; the lock is held."""
        for feed in [feed for feed in self._feeds.values() if feed.failure is not None]:
            del self._feeds[feed.number]
            if isinstance(feed.failure, WorkerLost):
                self._lost[feed.number] = feed.incarnation
                self._num_lost += 1
                logger.warning("engine %d is lost, its turns are sampled by another: %s", feed.number, feed.failure)
            feed.close()
            self._ended.append(feed)

    def _note(self, number: int, samples: GroupSamples) -> None:
        with self._lock:
            self._schedule += samples.schedule
            self._num_turns += len(samples.groups)
            self._tokens[number] += len(samples.output.token_ids)


def _alone(engine: GenerationInterface) -> EngineScheduler:
    fleet = WorkerFleet([LocalWorkerGroup(lambda: engine)])
    return EngineScheduler(fleet, batch_rows=1, timeout_s=DEADLINE_S, is_continuous=True)


@dataclass(kw_only=True, slots=True, eq=False)
class _OpenTurn:
    request: TurnRequest
    ended: asyncio.Future[TurnSample]
    began: float
    """Monotonic seconds."""
    number: int = -1
    """Number in the feed, once it was sent."""

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_new_tokens


class EngineFeed:
    """The feed of one engine: a thread sends turns to it, and another one completes their futures.

    Args:
        heard: is told of the number of the engine and of what has come.
    """

    def __init__(
        self,
        engines: EngineScheduler,
        number: int,
        *,
        incarnation: int,
        with_routes: bool,
        with_support: bool,
        timeout_s: float,
        heard: Callable[[int, GroupSamples], None],
    ) -> None:
        self.number, self.incarnation = number, incarnation
        self._engines, self._heard, self._timeout_s = engines, heard, timeout_s
        self._with_routes, self._with_support = with_routes, with_support
        self._name = f"turns {uuid.uuid4().hex}"
        self._lock = Lock()
        self.failure: Exception | None = None
        """The reason why no turn is taken any more."""
        self._open: set[_OpenTurn] = set()
        self._by_number: dict[int, _OpenTurn] = {}
        self._unsent: list[_OpenTurn] = []
        """Turns of the present round of the event loop."""
        self.tokens_in_flight = 0
        self._next_number = 0
        self._outbox: SimpleQueue[Sequence[_OpenTurn] | _OpenTurn | None] = SimpleQueue()
        """Turns to add, a turn to abort, or the end."""
        self._threads = [
            Thread(target=target, name=f"turns of engine {number}", daemon=True) for target in (self._send, self._serve)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def sample(self, request: TurnRequest) -> TurnSample:
        """Return the turn as this engine samples it.

        Raises:
            WorkerLost: the engine is lost, or later than its deadline.
        """
        turn = _OpenTurn(request=request, ended=asyncio.get_running_loop().create_future(), began=time.monotonic())
        self._submit(turn)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await turn.ended
        except TimeoutError:
            late = WorkerLate(
                f"generation engine {self.number} has not sampled a turn in {self._timeout_s:.0f} s; raise "
                "policy.generation.engine_timeout_s if it is only slow",
                rank=self.number,
                stage=STAGE,
            )
            self.fail(late)
            # Ending a process takes its time.
            Thread(target=self._engines.lose, args=(self.number, late), daemon=True).start()
            raise late from None
        except asyncio.CancelledError:
            self._abort(turn)
            raise

    def fail(self, error: Exception) -> None:
        """Let every turn on its way raise the error; no other is taken."""
        with self._lock:
            self.failure = self.failure or error
            turns, self._open, self._unsent = [*self._open], set(), []
            self._by_number.clear()
            self.tokens_in_flight = 0
        _complete([(turn, error) for turn in turns])

    def close(self) -> None:
        """Begin to end the feed in the engine, and both threads."""
        self.fail(WorkerError("the sampler of turns was closed", rank=self.number, stage=STAGE))
        self._outbox.put(None)

    def join(self, deadline: float) -> None:
        """Wait for both threads until the deadline, on the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("engine %d does not end its feed in %.0f s", self.number, CLOSE_S)

    def _submit(self, turn: _OpenTurn) -> None:
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._open.add(turn)
            self.tokens_in_flight += turn.num_tokens
            self._unsent.append(turn)
            is_first = len(self._unsent) == 1
        if is_first:
            # When all coroutines that are ready now have come as far: their turns go together.
            turn.ended.get_loop().call_soon(self._flush)

    def _flush(self) -> None:
        with self._lock:
            turns, self._unsent = self._unsent, []
        self._outbox.put(turns)

    def _abort(self, turn: _OpenTurn) -> None:
        if self._take_off(turn):
            self._outbox.put(turn)

    def _take_off(self, turn: _OpenTurn) -> bool:
        """Forget a turn, and return whether it was on its way."""
        with self._lock:
            if turn not in self._open:
                return False
            self._open.remove(turn)
            self._by_number.pop(turn.number, None)
            self.tokens_in_flight -= turn.num_tokens
            return True

    def _send(self) -> None:
        is_closing = False
        while not is_closing:
            items = [self._outbox.get()]
            while not self._outbox.empty():
                items.append(self._outbox.get())
            is_closing = None in items
            added = [turn for item in items if isinstance(item, Sequence) for turn in item]
            gone = [item.number for item in items if isinstance(item, _OpenTurn) and item.number >= 0]
            try:
                if is_closing:
                    self._engines.run_on(self.number, ask(GenerationInterface.close_feed, name=self._name))
                    return
                if gone:
                    request = ask(GenerationInterface.abort_in_feed, name=self._name, numbers=tuple(gone))
                    self._engines.run_on(self.number, request)
            except Exception as error:  # noqa: BLE001 - raised by every turn
                self.fail(error)
            for turns in _alike(added):
                self._add(turns)

    def _add(self, turns: Sequence[_OpenTurn]) -> None:
        """Add turns of equal settings in one request, less those that were given up."""
        with self._lock:
            turns = [turn for turn in turns if turn in self._open]
            first, self._next_number = self._next_number, self._next_number + len(turns)
            for number, turn in enumerate(turns, start=first):
                turn.number = number
                self._by_number[number] = turn
        if not turns:
            return
        limits = tuple(turn.request.sampling.max_new_tokens for turn in turns)
        request = GenerationRequest(
            prompt_ids=tuple(turn.request.prompt_ids for turn in turns),
            seeds=tuple(turn.request.seed for turn in turns),
            sampling=replace(turns[0].request.sampling, max_new_tokens=max(limits)),
            with_routes=self._with_routes,
            with_support=self._with_support,
            limits=limits,
            names=tuple(turn.request.name for turn in turns) if turns[0].request.name else (),
        )
        try:
            self._engines.run_on(
                self.number, ask(GenerationInterface.add_to_feed, name=self._name, request=request, first=first)
            )
        except WorkerLost as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - raised by these turns: the engine refuses them
            _complete([(turn, error) for turn in turns if self._take_off(turn)])

    def _serve(self) -> None:
        try:
            for samples in self._engines.feed_of(self.number, self._name):
                self._heard(self.number, samples)
                self._take(samples)
            error: Exception = WorkerLost("the feed has ended", rank=self.number, stage=STAGE)
        except Exception as raised:  # noqa: BLE001 - raised by every turn
            error = raised
        self.fail(error)
        self._outbox.put(None)

    def _take(self, samples: GroupSamples) -> None:
        now, found = time.monotonic(), list[tuple[_OpenTurn, TurnSample | Exception]]()
        for number, seconds, sample in zip(samples.groups, samples.seconds, self._samples_of(samples), strict=True):
            turn = self._by_number.get(number)
            if turn is not None and self._take_off(turn):
                found.append((turn, replace(sample, waited_s=max(0.0, now - turn.began - seconds), sampled_s=seconds)))
        _complete(found)

    def _samples_of(self, samples: GroupSamples) -> Iterator[TurnSample]:
        """Yield each turn, without its times."""
        output = samples.output
        lengths, spans = output.lengths.tolist(), output.row_spans
        cached = None if output.cached_tokens is None else output.cached_tokens.tolist()
        tokens, values = output.token_ids.split(lengths), output.logprobs.split(lengths)
        for row, is_truncated in enumerate(output.truncated.tolist()):
            yield TurnSample(
                token_ids=tuple(tokens[row].tolist()),
                # A copy, which does not keep the values of all turns alive.
                logprobs=values[row].clone(),
                truncated=is_truncated,
                version_spans=spans[row],
                engine=self.number,
                cached_tokens=None if cached is None else cached[row],
                routes=None if output.routes is None else output.select([row]).routes,
                support=None if output.support is None else output.support[row],
            )


def _alike(turns: Sequence[_OpenTurn]) -> Iterable[list[_OpenTurn]]:
    """Return turns that one request can have: of the same sampling but for the limit, with names or without."""
    found: dict[object, list[_OpenTurn]] = {}
    for turn in turns:
        key = replace(turn.request.sampling, max_new_tokens=1), bool(turn.request.name)
        found.setdefault(key, []).append(turn)
    return found.values()


def _complete(ended: Sequence[tuple[_OpenTurn, TurnSample | Exception]]) -> None:
    """Complete futures in their event loops, each of which is woken once."""
    of_loop: dict[asyncio.AbstractEventLoop, list[tuple[_OpenTurn, TurnSample | Exception]]] = {}
    for turn, result in ended:
        of_loop.setdefault(turn.ended.get_loop(), []).append((turn, result))
    for loop, results in of_loop.items():
        try:
            loop.call_soon_threadsafe(_set_results, results)
        except RuntimeError:
            # The loop was closed, and nobody waits there any more.
            logger.debug("%d turns ended after their event loop", len(results))


def _set_results(results: Sequence[tuple[_OpenTurn, TurnSample | Exception]]) -> None:
    for turn, result in results:
        if turn.ended.done():
            continue
        if isinstance(result, TurnSample):
            turn.ended.set_result(result)
        else:
            turn.ended.set_exception(result)
