"""`AsyncBatches`: batches of groups that rollout workers sample while the trainer trains.

    trainer                                            thread `groups` (AsyncBatches._serve)
      AsyncBatches.updated     engines hold new weights        a group has ended or failed
        `- _admit              AsyncSchedule.admit,              |- AsyncSchedule.ended | filtered | failed
             `- _start         RolloutHandle.submit_groups       `- _admit, and the trainer is woken
      AsyncBatches.next        waits until AsyncSchedule.select has the groups of the step, claims their rows
      AsyncBatches.trained     the groups of the step are settled

Which groups may run, which are due and which are settled is decided by `AsyncSchedule` alone; here are threads, rollout
workers and rows. Invariant: `_changed` guards the schedule and every table of groups; no call that waits is made under
it. A group is never split, and a row is in the data plane only while its group is alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread

from nemo_rl.algorithms.async_schedule import AsyncLimits, AsyncSchedule, FailureKind, Frontier, StepSelection, Ticket
from nemo_rl.algorithms.batches import (
    BatchSource,
    NoStepLeft,
    RolloutParts,
    group_request,
    is_informative,
    note_group,
    noted,
    step_of_groups,
    too_few_groups,
)
from nemo_rl.algorithms.scheduled_batches import GROUPS, ScheduleFile, keep_groups, restore_groups
from nemo_rl.algorithms.stages.columns import PARTITION, TRAIN_TASK
from nemo_rl.algorithms.stages.stage import StepState
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.parts import SELECTIONS
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.data_plane.client.link import CLEAR, stage_context
from nemo_rl.data_plane.keys import group_uid, keys_of_groups, new_group_ids
from nemo_rl.distributed.worker_groups import Pending
from nemo_rl.errors import (
    CheckpointError,
    DataPlaneClosed,
    DataPlaneError,
    NonFiniteError,
    RewardError,
    UserError,
    WorkerError,
    WorkerLost,
    name_some,
)
from nemo_rl.experience.rollout_records import RolloutResult
from nemo_rl.utils import interrupt
from nemo_rl.utils.deadlines import awake_s
from nemo_rl.utils.metrics import Mean, Reduction, Sum
from nemo_rl.utils.r3_trace import trace_retired

__all__ = ["AsyncBatches", "build_schedule", "failure_kind", "limits_of"]

logger = logging.getLogger(__name__)

FILTERED = "not trained: equal rewards in its group (grpo.use_dynamic_sampling)"
DROPPED = "not trained: overdue (grpo.async.overdue)"
FAILED = "sampled again: its rollout failed"
UNUSED = "not trained: the run ended"
LOOK_S = 1.0
"""Seconds between two looks for an interrupt while the trainer waits for groups."""
STUCK_S = 60.0
"""A step that waits so long for groups says which, and again each time it has waited twice as long."""
DROP_SHARE = 0.5
"""Part of the longest wait of a step after which `overdue: drop` drops groups although too few others are ready."""
MOST_DROPS = 10
"""Times that a step does so."""
CLOSE_S = 10.0
"""Deadline of each call with which a source is closed."""
FRONTIER_STATE = "async"
"""Name of the frontier in a checkpoint's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RolloutGroup:
    ticket: Ticket
    uid: str
    began: float
    """Monotonic seconds."""


class AsyncBatches(BatchSource):
    """Steps of whole groups, none of them older than `grpo.async.max_staleness`.

    Args:
        schedule: of this run, at its start.
        record: gets what the engines and the steps did; None: nothing is kept.
        timeout_s: longest wait for the groups of a step.
        note: shows a line to the person at the terminal.
        restart_engines: brings the current weights to engines that are started in place of lost ones; called in the
            trainer's thread when all are lost. None: that ends the run.
    """

    def __init__(
        self,
        parts: RolloutParts,
        schedule: AsyncSchedule,
        *,
        record: ScheduleFile | None,
        timeout_s: float,
        note: Callable[[str], None],
        restart_engines: Callable[[], None] | None = None,
    ) -> None:
        self._parts, self._schedule, self._record = parts, schedule, record
        self._restart_engines = restart_engines
        self.samples_ahead = parts.config.async_.steps_ahead > 0
        self._timeout_s, self._note = timeout_s, note
        self._changed = Condition()
        self._running: dict[str, _RolloutGroup] = {}
        self._ready: dict[str, tuple[_RolloutGroup, RolloutResult]] = {}
        self._held: list[Ticket] = []
        """Next attempts of groups that failed since no engine was left."""
        self._leaving: set[str] = set()
        """Uids of groups whose rows are being cleared."""
        self._taken: dict[int, tuple[str, ...]] = {}
        """Names of the groups of the steps that are being trained."""
        self._skipped: set[int] = set()
        """Ordinals beyond the frontier of the checkpoint that were settled in it."""
        self._events: SimpleQueue[tuple[str, Pending[RolloutResult]] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._replaced_in_a_row = 0
        self._filtered = Mean(0.0, 0.0)
        """Rewards of the groups that were left out since the last step took its groups; a count of groups as weight."""
        self._is_closed = False
        self._thread = Thread(target=self._serve, name="groups", daemon=True)

    # ---- the trainer's side

    def next(self, number: int) -> StepState:
        started = time.perf_counter()
        selection = self._wait_for(number)
        self._drop(selection.dropped)
        with self._changed:
            chosen = [self._ready.pop(name) for name in selection.names]
            self._taken[number] = selection.names
            self._filtered = Mean(0.0, 0.0)
            metrics, drawn = self._metrics(), [running.ticket.draw for running, _ in chosen]
            groups = [result for _, result in chosen]
            if self._parts.sampler.notes_groups:
                groups = noted(self._parts.sampler, drawn, groups)
        self._claim([running.uid for running, _ in chosen], num_rows=sum(len(group.meta) for group in groups))
        done = step_of_groups(number, drawn, groups, started=started)
        return replace(done, rolled=replace(done.rows, metrics={**done.rows.metrics, **metrics}))

    def updated(self, version: int, *, weights: str | None) -> None:
        if not self._thread.is_alive() and not self._is_closed:
            self._thread.start()
        if self._record is not None and weights is not None:
            self._record.weights(version, weights)
        with self._changed:
            self._schedule.updated(version)
        self._start_held()
        self._admit()

    def trained(self, step: StepState) -> None:
        with self._changed:
            names = self._taken.pop(step.number)
            self._schedule.trained(step.number)
        if self._record is not None:
            self._record.step(step.number, names)

    @property
    def is_exhausted(self) -> bool:
        """True when the prompts that are left and the groups that are alive cannot fill another step."""
        with self._changed:
            return self._cannot_fill_a_step()

    def _cannot_fill_a_step(self) -> bool:
        """(under the lock) Return what `is_exhausted` says."""
        alive, size = len(self._running) + len(self._ready), self._parts.config.num_prompts_per_step
        return alive < size and not self._parts.sampler.has(size - alive)

    @property
    def num_waiting_rows(self) -> int:
        with self._changed:
            return sum(len(result.meta) for _, result in self._ready.values())

    def lost_rows(self, owners: Mapping[str, str]) -> list[str]:
        with self._changed:
            alive = {running.uid for running in self._running.values()}
            alive |= {running.uid for running, _ in self._ready.values()} | self._leaving
        return [key for key in owners if group_uid(key) not in alive]

    # ---- checkpoints

    def state_dict(self) -> dict[str, object]:
        with self._changed:
            frontier, sampler = self._schedule.frontier(), self._parts.sampler
            state = {**sampler.state_dict(), **sampler.position_of(frontier.next_ordinal)}
        return {
            "sampler": state,
            "dynamic_sampling": {},
            FRONTIER_STATE: {"next_ordinal": frontier.next_ordinal, "done": list(frontier.done)},
        }

    def save_into(self, folder: Path) -> None:
        if not self._parts.config.async_.keep_finished:
            return
        with self._changed:
            ready = [(running.ticket.draw.ordinal, result) for running, result in self._ready.values()]
        if ready:
            # Only the trainer, which saves now, takes groups that are ready.
            keep_groups(folder / GROUPS, dict(ready), self._parts.rollout)

    def load_state_dict(self, state: Mapping[str, object], *, step: int, folder: Path) -> None:
        sampler, found = state.get("sampler", {}), state.get(FRONTIER_STATE)
        again = state.get("dynamic_sampling") or {}
        if not isinstance(sampler, Mapping) or not isinstance(again, Mapping):
            raise CheckpointError(f"sampler: expected an object, got {type(sampler).__name__}")
        if again.get("redrawn_ordinals"):
            raise CheckpointError(
                "the checkpoint is of a synchronous run with dynamic sampling, whose prompts are to be drawn again; "
                "resume it with grpo.async.enabled=false, or start afresh with checkpointing.resume=false"
            )
        self._parts.sampler.load_state_dict(sampler)
        frontier = Frontier(next_ordinal=self._parts.sampler.ordinal, done=())
        if found is not None:
            done = found.get("done") if isinstance(found, Mapping) else None
            if not isinstance(done, list) or not all(isinstance(ordinal, int) for ordinal in done):
                raise CheckpointError(f"{FRONTIER_STATE}: expected ordinals that were trained, got {found!r}")
            frontier = Frontier(next_ordinal=self._parts.sampler.ordinal, done=tuple(done))
        self._skipped = set(frontier.done)
        self._schedule.resume(frontier, step=step)
        if self._parts.config.async_.keep_finished and (folder / GROUPS).is_dir():
            self._restore(folder / GROUPS)
        self._restore_durable(step)

    def _restore(self, folder: Path) -> None:
        """Take the finished groups of a checkpoint."""
        size = self._parts.config.num_generations_per_prompt
        for ordinal, result in restore_groups(folder, self._parts.rollout, group_size=size).items():
            self._take_restored(ordinal, result)

    def _restore_durable(self, step: int) -> None:
        """Take finished groups from files that are young enough for the next step and were not in the checkpoint."""
        rollout, seed = self._parts.rollout, self._parts.config.seed
        oldest_version = step - self._parts.config.async_.max_staleness
        ordinals = {
            ordinal
            for ordinal, oldest in rollout.durable_ordinals().items()
            if oldest_version <= oldest <= step
            and not self._schedule.is_settled(ordinal)
            and ordinal not in self._skipped
        }
        if not ordinals:
            return
        of_uid = dict(zip(new_group_ids(len(ordinals)), sorted(ordinals), strict=True))
        requests = [
            group_request(self._parts.sampler.draw(ordinal), uid, seed=seed, oldest_version=oldest_version)
            for uid, ordinal in of_uid.items()
        ]
        for result in rollout.restore_groups(requests, partition_id=PARTITION):
            self._take_restored(of_uid[group_uid(result.meta.keys[0])], result)

    def _take_restored(self, ordinal: int, result: RolloutResult) -> None:
        """Count a group as ready whose rows are in the data plane again."""
        oldest = int(result.weight_versions.min())
        ticket = self._schedule.restore(self._parts.sampler.draw(ordinal), oldest_version=oldest)
        uid = group_uid(result.meta.keys[0])
        self._ready[ticket.name] = _RolloutGroup(ticket=ticket, uid=uid, began=awake_s()), result
        self._skipped.add(ordinal)

    def frontier(self) -> Frontier:
        with self._changed:
            return self._schedule.frontier()

    def close(self) -> None:
        """End the thread, take running groups out of the engines, and clear all rows. Idempotent."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
            names = list(self._running)
            uids = [running.uid for running in (*self._running.values(), *(each for each, _ in self._ready.values()))]
            self._running, self._ready = {}, {}
            self._changed.notify_all()
        if not is_first:
            return
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        try:
            if names:
                self._parts.rollout.abort(names, timeout_s=CLOSE_S)
            self._clear(uids, UNUSED)
        except (WorkerError, DataPlaneError) as problem:
            # The run ends, with its own error where it has one; its processes are ended after this.
            logger.warning("groups that nobody will train could not be taken back: %s", problem)

    # ---- groups

    def _wait_for(self, number: int) -> StepSelection:
        began = awake_s()
        warn_after, deadline = STUCK_S, began + self._timeout_s
        drops_left = MOST_DROPS if self._parts.config.async_.overdue == "drop" else 0
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                selection = self._schedule.select(number)
                if selection is not None:
                    return selection
                self._check_filtered(number)
                self._changed.wait(LOOK_S)
                has_engines = not self._held
            if not has_engines and self._restart_engines is not None:
                self._note("all engines are lost: starting others with the same weights")
                self._restart_engines()
                self._start_held()
            interrupt.raise_if_received()
            if interrupt.is_noticed():
                raise NoStepLeft
            now = awake_s()
            if now >= deadline:
                raise WorkerError(f"{self._stuck(number, now - began)}; raise cluster.stage_timeout_s", stage="rollout")
            if drops_left and now >= began + self._timeout_s * DROP_SHARE:
                # Too few others are ready, and no more may be started: the end of the run, or many without an end.
                drops_left, began, deadline = drops_left - 1, now, now + self._timeout_s
                with self._changed:
                    tickets = self._schedule.give_up(self._schedule.waits_for(number))
                self._drop(tickets)
            if now - began >= warn_after:
                warn_after *= 2
                self._note(f"WARNING: {self._stuck(number, now - began)}{self._waiting(number)}")

    def _check_filtered(self, number: int) -> None:
        """(under the lock) End a step that groups of equal rewards keep from being filled."""
        config, count = self._parts.config, int(self._filtered.weight)
        is_over = self._schedule.is_over
        if is_over and number > 1:
            raise NoStepLeft
        if count >= config.dynamic_sampling_max_gen_batches * config.num_prompts_per_step or (is_over and count):
            sampled, ready = f"{count} groups of equal rewards", len(self._ready)
            raise UserError(too_few_groups(number, ready, config, sampled=sampled, reward=self._filtered.value))

    def _stuck(self, number: int, seconds: float) -> str:
        """Return what a step waits for: groups, who has them and since when."""
        with self._changed:
            now = awake_s()
            names = self._schedule.waits_for(number)
            shown = [
                f"group {name} (prompt {self._running[name].ticket.draw.prompt}, uid {self._running[name].uid}, weight "
                f"version {self._running[name].ticket.version}, running for {now - self._running[name].began:.0f} s)"
                for name in names
                if name in self._running
            ]
            counts = f"{len(self._running)} groups are running and {len(self._ready)} are ready"
        return f"step {number} has waited {seconds:.0f} s for rollout workers: {name_some(shown) or 'groups'}; {counts}"

    def _waiting(self, number: int) -> str:
        """Return what the conversations wait for that a step waits for."""
        with self._changed:
            names = self._schedule.waits_for(number)
        try:
            found = self._parts.rollout.waiting(names)
        except WorkerError as problem:
            return f"; what their conversations wait for is not known: {problem}"
        return f"; conversations: {name_some(found)}" if found else ""

    def _admit(self) -> None:
        with self._changed:
            if self._is_closed or self._failure is not None:
                return
            count, alive = self._schedule.num_to_admit, len(self._running) + len(self._ready)
            size = self._parts.config.num_prompts_per_step
            # A rest of prompts that fills no step is not sampled, as without asynchronous sampling.
            while count and not self._parts.sampler.has(count):
                count -= 1
            if self._cannot_fill_a_step():
                self._schedule.exhausted()  # a step that waits already is trained with what is left
            if not count or (alive + count < size and not self._parts.sampler.has(size - alive)):
                return
            tickets = self._schedule.admit(self._draw(count))
            self._register(tickets)
            if not self._parts.sampler.has(1):
                self._schedule.exhausted()
        self._start(tickets)

    def _draw(self, count: int) -> list[SampledPrompt]:
        drawn: list[SampledPrompt] = []
        while len(drawn) < count and self._parts.sampler.has(count - len(drawn)):
            new = self._parts.sampler.next(count - len(drawn))
            drawn += [draw for draw in new if draw.ordinal not in self._skipped]
            self._skipped.difference_update(draw.ordinal for draw in new)
        if self._record is not None and self._parts.sampler.notes_groups:
            self._record.draws(drawn)
        return drawn

    def _register(self, tickets: Sequence[Ticket]) -> None:
        uids, now = new_group_ids(len(tickets)), awake_s()
        self._running |= {
            ticket.name: _RolloutGroup(ticket=ticket, uid=uid, began=now)
            for ticket, uid in zip(tickets, uids, strict=True)
        }

    def _start(self, tickets: Sequence[Ticket]) -> None:
        """Hand groups to a rollout worker, those of one call together."""
        if not tickets:
            return
        with self._changed:
            uids = {ticket.name: self._running[ticket.name].uid for ticket in tickets if ticket.name in self._running}
        seed = self._parts.config.seed
        requests = [
            group_request(ticket.draw, uids[ticket.name], seed=seed, name=ticket.name, oldest_version=ticket.version)
            for ticket in tickets
            if ticket.name in uids
        ]
        if not requests:
            return
        try:
            pending = self._parts.rollout.submit_groups(requests, version=None, partition_id=PARTITION)
        except WorkerError as error:
            for request in requests:
                self._events.put((request.name, _failed(error)))
            return
        for request, result in zip(requests, pending, strict=True):
            result.when_ready(partial(self._put, request.name))

    def _put(self, name: str, ended: Pending[RolloutResult]) -> None:
        self._events.put((name, ended))

    def _serve(self) -> None:
        """Take groups as they end, until the source is closed."""
        while (event := self._events.get()) is not None:
            try:
                self._take(*event)
                self._admit()
            except BaseException as error:  # noqa: BLE001 - raised by `next`
                with self._changed:
                    self._failure = self._failure or error
            with self._changed:
                self._changed.notify_all()

    def _take(self, name: str, pending: Pending[RolloutResult]) -> None:
        try:
            result = pending.result()
        except Exception as error:  # noqa: BLE001 - told apart below
            self._fail(name, error)
            return
        if self._record is not None:
            self._record.engines(result.schedule)
        with self._changed:
            running = self._running.pop(name, None)
            is_kept = running is not None and (
                not self._parts.config.use_dynamic_sampling or is_informative(result, self._parts.config)
            )
            reason = FILTERED if running is not None else DROPPED
            if running is not None:
                self._replaced_in_a_row = 0
                if not is_kept:
                    self._schedule.filtered(name)
                    reward = float(result.sample_stats.rewards.mean())
                    if self._parts.sampler.notes_groups:
                        note_group(self._parts.sampler, running.ticket.draw, result)
                    self._filtered = self._filtered.merge(Mean(reward, 1.0))
                elif self._schedule.ended(name, oldest_version=int(result.weight_versions.min())):
                    self._ready[name] = running, result
                else:
                    # A step has given it up just now.
                    is_kept, reason = False, DROPPED
            if not is_kept:
                self._leaving.add(group_uid(result.meta.keys[0]))
        if not is_kept:
            self._clear([group_uid(result.meta.keys[0])], reason)

    def _fail(self, name: str, error: Exception) -> None:
        """Sample a group again whose rollout failed, or another one in its place."""
        with self._changed:
            running = self._running.pop(name, None)
            if running is None or self._is_closed:
                return
            self._leaving.add(running.uid)
        kind = failure_kind(error)
        if kind is None:
            raise error
        logger.warning("group %s failed (%s): %s", name, kind, error)
        if isinstance(error, WorkerLost):
            self._parts.rollout.replace_lost()
        self._clear([running.uid], FAILED)
        with self._changed:
            ticket = self._schedule.failed(name, kind)
            self._replaced_in_a_row += ticket is None
            if self._replaced_in_a_row > self._parts.config.num_prompts_per_step:
                raise error
            is_held = (
                ticket is not None
                and self._restart_engines is not None
                and isinstance(error, WorkerLost)
                and error.stage == "generation"
            )
            if ticket is not None:
                self._register([ticket])
                if is_held:
                    self._held.append(ticket)
        if ticket is not None and not is_held:
            self._start([ticket])

    def _start_held(self) -> None:
        with self._changed:
            held, self._held = self._held, []
        self._start(held)

    def _claim(self, uids: Sequence[str], *, num_rows: int) -> None:
        """Claim the rows of the step: no other trainer can have them, and they are given back if this one dies."""
        meta = self._parts.client.get_meta(
            PARTITION, TRAIN_TASK, ("input_ids",), num_rows, consumer_id="trainer", blocking=False, groups=uids
        )
        if len(meta) != num_rows:
            raise DataPlaneError(f"expected {num_rows} rows of {len(uids)} groups to claim, got {len(meta)}")

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        """Take groups out that have not ended, and sample others in their place."""
        if not tickets:
            return
        with self._changed:
            dropped = [self._running.pop(ticket.name) for ticket in tickets if ticket.name in self._running]
            self._leaving.update(running.uid for running in dropped)
        self._parts.rollout.abort([running.ticket.name for running in dropped])
        self._clear([running.uid for running in dropped], DROPPED)
        now = awake_s()
        shown = [f"{running.ticket.name} (after {now - running.began:.0f} s)" for running in dropped]
        self._note(f"dropped groups that were overdue and had not ended: {name_some(shown)}")
        self._admit()

    def _clear(self, uids: Sequence[str], reason: str) -> None:
        keys = keys_of_groups(uids, self._parts.rows_per_group)
        if keys:
            with stage_context(CLEAR):
                self._parts.client.kv_clear(list(keys), PARTITION, reason=reason)
            trace_retired(keys=keys, reason=reason)
        with self._changed:
            self._leaving.difference_update(uids)

    def _metrics(self) -> dict[str, Reduction]:
        counts = self._schedule.counts()
        return {
            "groups_in_flight": Sum(float(counts.running)),
            "groups_ready": Sum(float(counts.ready)),
            "groups_over_age": Sum(float(counts.over_age)),
            "groups_dropped": Sum(float(counts.overdue)),
            "groups_filtered": Sum(float(counts.filtered)),
            **{f"groups_retried/{kind}": Sum(float(count)) for kind, count in counts.retried.items()},
            **{f"groups_replaced/{kind}": Sum(float(count)) for kind, count in counts.replaced.items()},
        }


def build_schedule(config: GRPOConfig) -> AsyncSchedule:
    """Return the schedule of a run that has not begun.

    Raises:
        ConfigError: `grpo.async.selection` cannot be imported.
    """
    order = SELECTIONS.load(config.async_.selection, key="grpo.async.selection")()
    return AsyncSchedule(limits_of(config), order)


def limits_of(config: GRPOConfig) -> AsyncLimits:
    section = config.async_
    return AsyncLimits(
        num_groups=config.num_prompts_per_step,
        max_staleness=section.max_staleness,
        lookahead=section.steps_ahead,
        overdue=section.overdue,
        max_num_steps=config.max_num_steps,
    )


def failure_kind(error: Exception) -> FailureKind | None:
    """Return what failed: a process or connection, the data (its reward), the model; None: the run cannot go on."""
    if isinstance(error, DataPlaneClosed):
        return None
    if isinstance(error, WorkerError | DataPlaneError):
        return "infra"
    if isinstance(error, RewardError):
        return "data"
    return "model" if isinstance(error, NonFiniteError) else None


def _failed(error: Exception) -> Pending[RolloutResult]:
    def raise_it() -> RolloutResult:
        raise error

    return Pending(raise_it)
