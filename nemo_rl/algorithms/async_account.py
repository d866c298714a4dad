"""`RunAccount`: who waits in an asynchronous run, and what more staleness would bring, from the measured times.

An observer of the run's steps that measures, and the pure `account_of` that it calls. Two models are used:

- Two stages that exchange a batch and weights take max(t_gen, t_train) + t_refit a step in steady state, where t_gen is
  the time of a step's groups in engines whose places are all taken: the trainer cannot train two steps at once, the
  engines cannot decode more rows, and both stand still for a refit. It is the limit for any staleness.
- Short of it, the longest rows count: a group must end before its deadline. This is what `ideal_run` adds: it runs the
  schedule itself, in virtual time, over the measured times of groups.

Both take a row for no slower beside others, which is true while decoding is bound by the memory of a GPU. Engines that
are bound by arithmetic, as on a CPU, gain less than is said here.

An asynchronous run in virtual time: the schedule of a run, driven by events instead of processes.

`ideal_run` is the bound that `benchmarks/async_vs_sync.py` compares a real run with, and the account's answer to what
more staleness would bring. Invariant: a run is a function of its arguments; it reads no clock and draws no numbers.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from nemo_rl.algorithms.async_batches import limits_of
from nemo_rl.algorithms.async_schedule import AsyncSchedule
from nemo_rl.algorithms.async_selection import (
    AsyncLimits,
    Frontier,
    OldestFirst,
    ScheduleCounts,
    SelectionOrder,
    StepSelection,
    Ticket,
)
from nemo_rl.algorithms.observers import StepObserver
from nemo_rl.algorithms.stages.columns import ROLLOUT
from nemo_rl.algorithms.stages.stage import StepState
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.models.generation.interfaces import EngineLoad
from nemo_rl.models.weight_sync.base import WeightSync

__all__ = [
    "AsyncAccount",
    "AsyncSimulation",
    "AsyncTimes",
    "Pipeline",
    "RunAccount",
    "SimulatedRun",
    "SimulatedStep",
    "account_of",
    "build_account",
    "ideal_run",
    "pipeline_bound_s",
    "simulated_step_s",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The two sides of a run and how long each of their parts takes."""

    limits: AsyncLimits
    row_seconds: Callable[[int], Sequence[float]]
    """Ordinal of a prompt -> seconds that an engine decodes each row of its group; infinite for one without an end."""
    train_s: float
    """Seconds from the choice of a step's groups to its update."""
    refit_s: float = 0.0
    """Seconds that an engine stands still for new weights; the trainer waits for all engines."""
    num_engines: int = 1
    places: int
    """Rows that an engine decodes at once; at least those of a group, since groups join whole."""
    is_rolling: bool = False
    """True where engines are refitted one after the other while the rest go on sampling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """One step of a simulated run."""

    selection: StepSelection
    waited_s: float
    """Seconds that the trainer waited for its groups."""
    ended_at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """The steps, times and counts of a simulated run."""

    seconds: float
    steps: tuple[SimulatedStep, ...]
    counts: ScheduleCounts
    frontier: Frontier
    decoded_s: float
    """Seconds of decoding, summed over rows."""
    engine_idle_s: float
    """Seconds in which an engine had no row to decode, summed over engines."""

    @property
    def trainer_idle_s(self) -> float:
        return sum(step.waited_s for step in self.steps)


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """An engine, whose own clock stands still while it is frozen."""

    number: int
    version: int
    clock_s: float = 0.0
    """Seconds that it has been able to decode."""
    moved_at_s: float = 0.0
    """Virtual time at which `clock_s` was right."""
    is_frozen: bool = False
    rows: list[tuple[float, int, str]] = field(default_factory=list)
    """Heap of end by the own clock, a number that makes entries differ, and name of the group."""
    idle_s: float = 0.0
    share: float = 1.0
    """Share of its time that it can use, where it has its processors with others."""
    turn_s: float = 1.0
    """Time for a second of the own clock, or for a turn where the clock counts turns."""
    stall_s: float = 0.0
    """Time that passes before the own clock goes on, such as for prompts that are read."""
    turn: int = 0
    """Number of changes; an event that was planned before the last one is void."""

    def move(self, now_s: float) -> None:
        """Bring the clock to `now_s`."""
        passed = now_s - self.moved_at_s
        self.moved_at_s = now_s
        if not self.rows:
            self.idle_s += passed
        if not self.is_frozen:
            used = passed * self.share
            stalled = min(self.stall_s, used)
            self.stall_s -= stalled
            self.clock_s += (used - stalled) / self.turn_s

    def seconds_until(self, clock_s: float) -> float:
        """Return the time until its clock shows so much, if nothing changes before."""
        return max(0.0, (self.stall_s + (clock_s - self.clock_s) * self.turn_s) / self.share)


class AsyncSimulation:
    """Runs a pipeline in virtual time.

    Args:
        validate: check the invariants of the schedule after every transition.

    Raises:
        RuntimeError: nothing can happen any more before the run is over: a deadlock.
    """

    def __init__(self, pipeline: Pipeline, *, order: SelectionOrder | None = None, validate: bool = False) -> None:
        self.pipeline = pipeline
        self.now_s = 0.0
        self._order = OldestFirst() if order is None else order
        self._validate = validate
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._steps: list[SimulatedStep] = []
        self._decoded_s = 0.0
        self.begin(Frontier(), step=0)

    def run(self) -> SimulatedRun:
        while not (self.schedule.is_over and self._training is None):
            if not self._events:
                step = self.schedule.num_updates + 1
                raise RuntimeError(
                    f"deadlock before step {step}, at {self.now_s:.3f} s: {self.schedule.counts()}, waits for "
                    f"{self.schedule.waits_for(step)}, queued {list(self.queue)[:5]}"
                )
            at_s, _, event = heapq.heappop(self._events)
            self.pass_time(at_s)
            self.now_s = at_s
            event()
            self._go_on()
        for engine in self.engines:
            engine.move(self.now_s)
        return SimulatedRun(
            seconds=self.now_s,
            steps=tuple(self._steps),
            counts=self.schedule.counts(),
            frontier=self.schedule.frontier(),
            decoded_s=self._decoded_s,
            engine_idle_s=sum(engine.idle_s for engine in self.engines),
        )

    def begin(self, frontier: Frontier, *, step: int) -> None:
        """Start the run, or start it again from the checkpoint of a step; nothing else is kept."""
        self.schedule = AsyncSchedule(self.pipeline.limits, self._order, validate=self._validate)
        self.schedule.resume(frontier, step=step)
        self.schedule.updated(step)
        self.engines = [
            SimulatedEngine(number=number, version=step, moved_at_s=self.now_s)
            for number in range(self.pipeline.num_engines)
        ]
        self.queue: deque[Ticket] = deque()
        self.live: dict[str, tuple[SimulatedEngine, int]] = {}
        """Group -> the engine that decodes it, and rows that have not ended."""
        self.joined: dict[str, int] = {}
        """Group -> version of the weights that it joined under, which draw its oldest tokens."""
        self.published = step
        self._cursor = frontier.next_ordinal
        self._training: StepSelection | None = None
        self._waits_since_s = self.now_s
        self._steps = [done for done in self._steps if done.selection.step <= step]
        self._events = []
        self.after(0.0, lambda: None)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), event))

    def pass_time(self, until_s: float) -> None:
        """Take note that nothing happens until then; a subclass counts who is busy."""

    def started(self, ticket: Ticket) -> None:
        """Queue an attempt for the engines; a subclass plans its faults here."""
        self.queue.append(ticket)

    def finished(self, name: str) -> None:
        """All rows of a group have ended; a subclass has it filtered or failed."""
        self.schedule.ended(name, oldest_version=self.joined.pop(name))

    def free_places(self, engine: SimulatedEngine) -> int:
        """Return the number of rows that may join; a subclass has batches that nothing joins."""
        return self.pipeline.places - len(engine.rows)

    def group_joined(self, engine: SimulatedEngine, ordinal: int) -> None:
        """Take note of rows that have just joined; a subclass lets their prompt take time."""

    def train(self, selection: StepSelection, done: Callable[[], None]) -> None:
        """Call `done` once the update of these groups is done; a subclass has other times."""
        self.after(self.pipeline.train_s, done)

    def trained(self, step: int) -> None:
        """An update is done; a subclass saves a checkpoint here."""

    def stop(self, name: str) -> None:
        """Take the rows of a group out of its engine, or out of the queue."""
        self.queue = deque(ticket for ticket in self.queue if ticket.name != name)
        self.joined.pop(name, None)
        engine, _ = self.live.pop(name, (None, 0))
        if engine is not None:
            engine.move(self.now_s)
            engine.rows = [row for row in engine.rows if row[2] != name]
            heapq.heapify(engine.rows)
            self._plan(engine)

    def freeze(self, engine: SimulatedEngine) -> None:
        engine.move(self.now_s)
        engine.is_frozen = True
        engine.turn += 1

    def thaw(self, engine: SimulatedEngine, *, version: int) -> None:
        engine.move(self.now_s)
        engine.is_frozen, engine.version = False, version
        self._plan(engine)

    def _go_on(self) -> None:
        """Do everything that can be done now."""
        schedule = self.schedule
        if self._training is None and not schedule.is_over:
            selection = schedule.select(schedule.num_updates + 1)
            if selection is not None:
                self._train(selection)
        room = schedule.num_to_admit
        if room:
            draws: list[SampledPrompt] = []
            while len(draws) < room:
                if not schedule.is_settled(self._cursor):
                    draws.append(SampledPrompt(self._cursor, self._cursor))
                self._cursor += 1
            for ticket in schedule.admit(draws):
                self.started(ticket)
        self._join()

    def _join(self) -> None:
        """Have waiting groups join, first come first served, each in the engine with most free places."""
        while self.queue:
            seconds = self.pipeline.row_seconds(self.queue[0].draw.ordinal)
            free = {engine.number: self.free_places(engine) for engine in self.engines}
            engines = [each for each in self.engines if not each.is_frozen and free[each.number] >= len(seconds)]
            if not engines:
                return
            engine, ticket = max(engines, key=lambda each: free[each.number]), self.queue.popleft()
            name = ticket.name
            engine.move(self.now_s)
            for row_s in seconds:
                heapq.heappush(engine.rows, (engine.clock_s + row_s, next(self._numbers), name))
            self.live[name], self.joined[name] = (engine, len(seconds)), engine.version
            self.group_joined(engine, ticket.draw.ordinal)
            self._plan(engine)

    def _plan(self, engine: SimulatedEngine) -> None:
        engine.turn += 1
        if engine.rows and not engine.is_frozen and engine.rows[0][0] != float("inf"):
            turn = engine.turn
            self.after(engine.seconds_until(engine.rows[0][0]), lambda: self._end_rows(engine, turn))

    def _end_rows(self, engine: SimulatedEngine, turn: int) -> None:
        if engine.turn != turn:
            return
        engine.move(self.now_s)
        # The sum of passed times may differ from the planned end by a rounding.
        end_s = engine.rows[0][0]
        engine.clock_s = max(engine.clock_s, end_s)
        while engine.rows and engine.rows[0][0] <= end_s:
            _, _, name = heapq.heappop(engine.rows)
            _, left = self.live[name]
            self.live[name] = (engine, left - 1)
            if left == 1:
                del self.live[name]
                self.finished(name)
        self._plan(engine)

    def _train(self, selection: StepSelection) -> None:
        for ticket in selection.dropped:
            self.stop(ticket.name)
        for ticket in selection.tickets:
            self._decoded_s += sum(self.pipeline.row_seconds(ticket.draw.ordinal))
        self._training, waited = selection, self.now_s - self._waits_since_s
        self.train(selection, lambda: self._update(selection, waited))

    def _update(self, selection: StepSelection, waited_s: float) -> None:
        self.schedule.trained(selection.step)
        self.published = selection.step
        self.trained(selection.step)
        self._steps.append(SimulatedStep(selection=selection, waited_s=waited_s, ended_at_s=self.now_s))
        self._refit([[each] for each in self.engines] if self.pipeline.is_rolling else [list(self.engines)])

    def _refit(self, turns: Sequence[Sequence[SimulatedEngine]]) -> None:
        if not turns:
            self.schedule.updated(self.published)
            self._training, self._waits_since_s = None, self.now_s
            return
        running = [engine for engine in turns[0] if not engine.is_frozen]
        for engine in running:
            self.freeze(engine)
        self.after(self.pipeline.refit_s, lambda: self._refitted(running, turns[1:]))

    def _refitted(self, engines: Sequence[SimulatedEngine], rest: Sequence[Sequence[SimulatedEngine]]) -> None:
        for engine in engines:
            self.thaw(engine, version=self.published)
        self._refit(rest)


def ideal_run(pipeline: Pipeline, *, order: SelectionOrder | None = None) -> SimulatedRun:
    """Return the run of a pipeline in which nothing but its own times passes.

    Example:
        Ten steps of one group, a second each to sample and to train, first one after the other and then overlapped:

        >>> def of(staleness):
        ...     limits = AsyncLimits(num_groups=1, max_staleness=staleness, lookahead=staleness, max_num_steps=10)
        ...     return Pipeline(limits=limits, row_seconds=lambda ordinal: [1.0], train_s=1.0, places=1)
        >>> ideal_run(of(0)).seconds, ideal_run(of(1)).seconds
        (20.0, 11.0)
    """
    return AsyncSimulation(pipeline, order=order).run()


Side = Literal["engines", "trainer", "staleness"]
IDLE_SHARE = 0.05
"""A side that is idle for less is busy: steps are never all of the same length."""
SIMULATED_STEPS = 10
WARM_UP_STEPS = 3
"""Steps that are left out of a mean, since the first ones start with nothing sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncTimes:
    """The measured times of one step, or summed over several; all times in seconds."""

    seconds: float
    num_steps: int = 1
    waited_s: float
    """The trainer waited for groups."""
    refit_s: float
    """The trainer sent weights and waited for engines that took them."""
    engine_idle_s: float
    """Engines had no row to decode and no weights to take; summed over engines."""
    num_engines: int = 1
    group_places: int
    """Groups that all engines together decode at once: engines x (`max_batch_size` // rows of a group)."""
    group_seconds: Sequence[float]
    """Time of each group that ended: from the join of its rows to the end of the last one."""

    @property
    def train_s(self) -> float:
        """Everything of a step but the wait for groups and the refit."""
        return max(0.0, self.seconds - self.waited_s - self.refit_s) / self.num_steps

    @property
    def generation_s(self) -> float:
        """Time that a step's groups take when all places are taken."""
        return sum(self.group_seconds) / self.group_places / self.num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncAccount:
    """The account of an asynchronous run.

    Example:
        >>> account = AsyncAccount(trainer_idle_share=0.4, engine_idle_share=0.01, binds="engines", gain_s=0.0)
        >>> account.text()
        'trainer idle 40 %, engines idle 1 %: the engines bind'
    """

    trainer_idle_share: float
    engine_idle_share: float
    binds: Side
    """The side that a faster run needs to be faster; `staleness`: none, but the engines would decode more groups beside
    the longest rows if more could be admitted."""
    gain_s: float | None
    """Seconds of a step that one more unit of `max_staleness` and `lookahead` would save at most; None: no group has
    ended."""

    def text(self) -> str:
        bound = {
            "engines": "the engines bind",
            "trainer": "the trainer binds",
            "staleness": "the staleness bound binds",
        }[self.binds]
        gain = f"; one more unit of staleness would save up to {self.gain_s:.2f} s a step" if self.gain_s else ""
        return (
            f"trainer idle {100 * self.trainer_idle_share:.0f} %, engines idle {100 * self.engine_idle_share:.0f} %: "
            f"{bound}{gain}"
        )


def account_of(times: AsyncTimes, limits: AsyncLimits) -> AsyncAccount:
    """Return the account of measured times.

    Example:
        Of four groups of a step one takes much longer than the others, and the trainer waits for it:

        >>> times = AsyncTimes(
        ...     seconds=10.0, waited_s=8.0, refit_s=0.0, engine_idle_s=1.0, group_places=8, group_seconds=[2, 2, 2, 20]
        ... )
        >>> account = account_of(times, AsyncLimits(num_groups=4, max_staleness=1, lookahead=1))
        >>> account.binds, round(account.gain_s, 2)
        ('staleness', 5.43)
    """
    trainer = min(1.0, max(0.0, times.waited_s / times.seconds))
    engines = min(1.0, max(0.0, times.engine_idle_s / (times.num_engines * times.seconds)))
    gain_s = _gain_s(times, limits, trainer)
    binds: Side = "trainer"
    if trainer > IDLE_SHARE:
        binds = "staleness" if (gain_s or 0.0) > IDLE_SHARE * times.seconds / times.num_steps else "engines"
    return AsyncAccount(trainer_idle_share=trainer, engine_idle_share=engines, binds=binds, gain_s=gain_s)


def pipeline_bound_s(times: AsyncTimes) -> float:
    """Return max(t_gen, t_train) + t_refit, the least time of a step at any staleness."""
    return max(times.generation_s, times.train_s) + times.refit_s / times.num_steps


def simulated_step_s(times: AsyncTimes, limits: AsyncLimits) -> float:
    """Return the time of a step in virtual time, where groups take the measured times in turn."""
    measured = times.group_seconds
    run = ideal_run(
        Pipeline(
            limits=replace(limits, overdue="wait", max_num_steps=SIMULATED_STEPS),
            row_seconds=lambda ordinal: [measured[ordinal % len(measured)]],
            train_s=times.train_s,
            refit_s=times.refit_s / times.num_steps,
            places=times.group_places,
        )
    )
    ends = [step.ended_at_s for step in run.steps[WARM_UP_STEPS - 1 :]]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _gain_s(times: AsyncTimes, limits: AsyncLimits, trainer_idle_share: float) -> float | None:
    if not times.group_seconds:
        return None
    if trainer_idle_share <= IDLE_SHARE:
        return 0.0
    more = replace(limits, max_staleness=limits.max_staleness + 1, lookahead=limits.lookahead + 1)
    now_s, then_s = (max(pipeline_bound_s(times), simulated_step_s(times, each)) for each in (limits, more))
    return max(0.0, now_s - then_s)


class RunAccount(StepObserver):
    """Keeps the account of a run, step by step.

    Args:
        limits: of its schedule.
        group_places: as in `AsyncTimes`.
        loads: asks each engine what it has done since the last call.
        refit_s: returns the seconds of the last refit.
    """

    def __init__(
        self,
        limits: AsyncLimits,
        *,
        group_places: int,
        loads: Callable[[], Mapping[int, EngineLoad]],
        refit_s: Callable[[], float],
    ) -> None:
        self._limits, self._group_places, self._loads, self._refit_s = limits, group_places, loads, refit_s
        self._began = self._asked = time.monotonic()
        self._waited_s = 0.0
        self._rows: Counter[int] = Counter()
        """Rows of the step by their staleness."""
        self._account: AsyncAccount | None = None

    def before_stage(self, stage: str) -> None:
        if stage == ROLLOUT:
            self._asked = time.monotonic()

    def after_stage(self, stage: str, step: StepState) -> None:
        if stage == ROLLOUT:
            self._waited_s = time.monotonic() - self._asked
            self._rows = Counter((step.policy_version - step.rows.weight_versions).tolist())

    def metrics(self) -> Mapping[str, float]:
        """Return the account of the step: shares of the time since the one before, and counts."""
        now, loads = time.monotonic(), self._loads()
        seconds, self._began = now - self._began, now
        busy_s = sum(load.busy_s for load in loads.values())
        times = AsyncTimes(
            seconds=seconds,
            waited_s=self._waited_s,
            refit_s=self._refit_s(),
            engine_idle_s=max(0.0, len(loads) * seconds - busy_s),
            num_engines=len(loads),
            group_places=self._group_places,
            group_seconds=[each for load in loads.values() for each in load.group_seconds],
        )
        account = self._account = account_of(times, self._limits)
        return {
            "async/trainer_idle_share": account.trainer_idle_share,
            "async/engine_idle_share": account.engine_idle_share,
            "async/gain_of_staleness_s": account.gain_s or 0.0,
            "async/thrown_tokens": float(sum(load.thrown_tokens for load in loads.values())),
            **{f"async/rows_of_staleness/{age}": float(count) for age, count in sorted(self._rows.items())},
        }

    def text(self) -> str:
        if self._account is None:
            return ""
        rows = " ".join(f"{age}:{count}" for age, count in sorted(self._rows.items()))
        return f"{self._account.text()}; rows by staleness {rows}"


def build_account(grpo: GRPOConfig, generation: GenerationConfig, weight_sync: WeightSync) -> list[RunAccount]:
    """Return the observer that says who waits, of an asynchronous run; none of another one."""
    if not grpo.samples_ahead:
        return []
    return [
        RunAccount(
            limits_of(grpo),
            group_places=generation.num_replicas * (generation.max_batch_size // grpo.num_generations_per_prompt),
            loads=weight_sync.take_loads,
            refit_s=lambda: 0.0 if weight_sync.report is None else weight_sync.report.ms / 1e3,
        )
    ]
