"""A simulated asynchronous run with failures, kills, filtered groups and rows without an end, and its bookkeeping.

The bookkeeping is apart from the schedule's own: what was trained in which step, from which version, and what was
settled otherwise, as far as the history that the checkpoints kept goes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from nemo_rl.algorithms.async_account import AsyncSimulation, Pipeline, SimulatedRun
from nemo_rl.algorithms.async_selection import FailureKind, Frontier, SelectionOrder, Ticket

__all__ = ["Faults", "FaultySimulation", "log_normal_rows"]

KINDS: tuple[FailureKind, ...] = ("infra", "data", "model")


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """What goes wrong in a run; shares are of groups or attempts, periods are means in seconds."""

    seed: int = 0
    filtered_share: float = 0.0
    failed_share: float = 0.0
    endless_share: float = 0.0
    group_limit_s: float = inf
    """Seconds after which a driver calls an attempt failed."""
    worker_kill_s: float = inf
    engine_kill_s: float = inf
    trainer_kill_s: float = inf
    max_kills: int = 10
    """Kills of each kind, so that a run ends however short the periods are."""
    num_workers: int = 1
    restart_s: float = 1.0
    save_period: int = 1
    """Steps from one checkpoint to the next."""

    def draw(self, *what: object) -> random.Random:
        """Return random numbers that depend on the seed and `what` alone, as a row's do."""
        return random.Random(f"{self.seed}:{what}")


class FaultySimulation(AsyncSimulation):
    """A run that a fault may strike anywhere; the trainer goes on from its last checkpoint."""

    def __init__(self, pipeline: Pipeline, faults: Faults, *, order: SelectionOrder | None = None) -> None:
        self._faults = faults
        self.saved, self.saved_step = Frontier(), 0
        self.trained_in: dict[int, int] = {}
        """Ordinal -> the step that trained it."""
        self.settled: dict[int, int] = {}
        """Ordinal that was filtered, replaced or dropped -> the step before which it was."""
        self.kills = {"worker": 0, "engine": 0, "trainer": 0}
        super().__init__(with_endless_rows(pipeline, faults), order=order, validate=True)

    def begin(self, frontier: Frontier, *, step: int) -> None:
        super().begin(frontier, step=step)
        self.trained_in = {ordinal: at for ordinal, at in self.trained_in.items() if at <= step}
        self.settled = {ordinal: at for ordinal, at in self.settled.items() if at <= step}
        for what, period, kill in (
            ("worker", self._faults.worker_kill_s, self._kill_worker),
            ("engine", self._faults.engine_kill_s, self._kill_engine),
            ("trainer", self._faults.trainer_kill_s, self._kill_trainer),
        ):
            self._plan_kill(what, period, kill)

    def started(self, ticket: Ticket) -> None:
        super().started(ticket)
        if self._faults.group_limit_s != inf:
            self.after(self._faults.group_limit_s, partial(self._too_late, ticket.name))

    def finished(self, name: str) -> None:
        ordinal = int(name.split(".")[0])
        draw = self._faults.draw("end", name)
        if draw.random() < self._faults.failed_share:
            self.joined.pop(name)
            self._retry([self.schedule.failed(name, draw.choice(KINDS))], [ordinal])
        elif self._faults.draw("reward", ordinal).random() < self._faults.filtered_share:
            self.joined.pop(name)
            assert self.schedule.filtered(name)
            self._settle(ordinal)
        else:
            super().finished(name)

    def trained(self, step: int) -> None:
        selection = self._training
        assert selection is not None and selection.step == step
        for ordinal in (ticket.draw.ordinal for ticket in selection.tickets):
            assert ordinal not in self.trained_in | self.settled, f"ordinal {ordinal} is trained twice"
            self.trained_in[ordinal] = step
        for ticket in selection.dropped:
            self._settle(ticket.draw.ordinal, before=step)
        ages = selection.staleness
        assert max(ages) <= self.pipeline.limits.max_staleness, f"step {step}: staleness {ages}"
        if step % self._faults.save_period == 0:
            self.saved, self.saved_step = self.schedule.frontier(), step

    def check(self, run: SimulatedRun) -> None:
        """Raise AssertionError unless every prompt up to the last one was trained once, or settled once otherwise."""
        limits = self.pipeline.limits
        assert limits.max_num_steps is not None
        assert sorted(self.trained_in.values()) == sorted(
            step for step in range(1, limits.max_num_steps + 1) for _ in range(limits.num_groups)
        ), "every step trains as many groups"
        known = sorted([*self.trained_in, *self.settled])
        assert known == list(range(len(known))), f"trained {self.trained_in}, settled otherwise {self.settled}"
        assert run.frontier == Frontier(next_ordinal=len(known)), f"{run.frontier}, but {len(known)} are settled"
        assert run.counts.over_age == 0 and run.counts.running == run.counts.ready == run.counts.taken == 0

    def _settle(self, ordinal: int, *, before: int | None = None) -> None:
        assert ordinal not in self.settled | self.trained_in, f"ordinal {ordinal} is settled twice"
        self.settled[ordinal] = self.schedule.num_updates + 1 if before is None else before

    def _retry(self, tickets: Sequence[Ticket | None], ordinals: Sequence[int]) -> None:
        """Start the next attempts; an ordinal without one is replaced."""
        for ticket in tickets:
            if ticket is not None:
                self.started(ticket)
        again = {ticket.draw.ordinal for ticket in tickets if ticket is not None}
        for ordinal in ordinals:
            if ordinal not in again:
                self._settle(ordinal)

    def _lose(self, names: Sequence[str]) -> None:
        for name in names:
            self.stop(name)
        self._retry(self.schedule.lost(names), [int(name.split(".")[0]) for name in names])

    def _too_late(self, name: str) -> None:
        if name in self.live or any(ticket.name == name for ticket in self.queue):
            self.stop(name)
            self._retry([self.schedule.failed(name, "infra")], [int(name.split(".")[0])])

    def _plan_kill(self, what: str, period: float, kill: Callable[[random.Random], None]) -> None:
        if period == inf or self.kills[what] >= self._faults.max_kills:
            return
        draw = self._faults.draw(what, self.kills[what], self.kills["trainer"])

        def strike() -> None:
            self.kills[what] += 1
            kill(draw)
            if what != "trainer":
                self._plan_kill(what, period, kill)

        self.after(draw.expovariate(1.0 / period), strike)

    def _kill_worker(self, draw: random.Random) -> None:
        """The worker's groups are lost, those too that are ready and live in its memory."""
        victim = draw.randrange(self._faults.num_workers)
        names = [*self.live, *(ticket.name for ticket in self.queue), *self.schedule.ready_names]
        self._lose([name for name in names if int(name.split(".")[0]) % self._faults.num_workers == victim])

    def _kill_engine(self, draw: random.Random) -> None:
        victim = draw.choice(self.engines)
        if victim.is_frozen:
            return
        names = [name for name, (engine, _) in self.live.items() if engine is victim]
        self.freeze(victim)
        self._lose(names)
        engines = self.engines
        self.after(self._faults.restart_s, lambda: self._restart_engine(engines, victim.number))

    def _restart_engine(self, engines: Sequence[object], number: int) -> None:
        if engines is self.engines:
            self.thaw(self.engines[number], version=self.published)

    def _kill_trainer(self, draw: random.Random) -> None:
        del draw
        self.begin(self.saved, step=self.saved_step)


def with_endless_rows(pipeline: Pipeline, faults: Faults) -> Pipeline:
    """Return the pipeline with a row without an end in some of its groups."""

    def row_seconds(ordinal: int) -> Sequence[float]:
        found = list(pipeline.row_seconds(ordinal))
        if faults.draw("endless", ordinal).random() < faults.endless_share:
            found[-1] = inf
        return found

    return replace(pipeline, row_seconds=row_seconds)


def log_normal_rows(*, seed: int, group_size: int, sigma: float = 1.0) -> Callable[[int], Sequence[float]]:
    """Return seconds of the rows of each group: a median of one second, log-normal."""

    def row_seconds(ordinal: int) -> Sequence[float]:
        draw = random.Random(f"{seed}:{ordinal}")
        return [draw.lognormvariate(0.0, sigma) for _ in range(group_size)]

    return row_seconds
