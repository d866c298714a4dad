"""`AsyncSchedule`: which groups of an asynchronous run are started, and which of them each step trains.

Driven by `AsyncBatches`, which starts rollouts and tells what became of them. It knows neither clocks nor threads, so
that the same object runs in virtual time. The states of a group:

    admit --> running --ended--> ready --select--> taken --trained--> (trained)
                 |                 |                 |
                 |                 |                 `--released--> ready
                 |-- lost ---------'
                 |-- failed --> running, the next attempt of the same prompt; beyond the budget --> (replaced)
                 |-- filtered ----------------------------------------------------------------> (filtered)
                 `-- select, when it is overdue (`overdue: drop`) ------------------------------> (dropped)

A state in brackets is final: the ordinal is settled, and the next `admit` draws another prompt where one is missing.

The bound. B groups form a step; v updates are done; S is `max_staleness`, L `lookahead`, 0 <= L <= S. A group that is
admitted while every engine holds version w or newer has no token older than w. In step n it is n - 1 - w updates old,
so it may be trained up to step w + S + 1, its deadline. Let U(k) be the number of groups with deadlines up to k that
are neither trained nor taken, after the steps up to m have taken theirs. The invariant is

    U(k) <= B * (k - m)    for every k.                                                                       (*)

- Admission keeps it: groups are admitted while w = v, when a new group has the latest deadline of all, v + S + 1. So it
  is enough that B * (S + 1) groups are alive, the taken ones too: the m - v steps that were cut hold B * (m - v) of
  them. The bound is B * (1 + L), which is not more, and what `max_num_steps` can still train (`num_to_admit`).
- Selection keeps it: step n = m + 1 takes, for each k, at least U(k) - B * (k - n) of the groups up to k (see
  `demands_of`), and waits if it cannot. At most B are demanded, because of (*), so a choice exists as soon as the
  groups have ended: the earliest deadlines first is one (EDF).
- What ends otherwise (filtered, replaced, dropped) leaves U smaller; a new attempt has a newer version and so a later
  deadline.

For k = m, (*) says that no group is left whose deadline has passed: no row is trained that is older than S.

No deadlock. Suppose that every row ends or fails in the end, and nothing runs any more. If groups may be admitted, the
run goes on. If not, then after the refit that follows each update B * (1 + L) groups are alive, or as many as the last
steps or prompts need. All are ready, and (*) says that a choice exists. With `in_order` the choice is the first B
ordinals: prompts are admitted in order, so the deadlines of first attempts never fall along the ordinals, and this is
the earliest deadlines first; later attempts only have more time. Rows that never end stop a step that must have them
(`wait`), are reported (`error`), or are dropped once B others are ready (`drop`): with at most B * L of them at a time
there always will be. Beyond that, and in the last steps of a run, the driver's own deadline of a group turns them into
failures.

With S = 0 it is the synchronous trainer: B groups are admitted after each refit, and all of them form the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from nemo_rl.algorithms.async_selection import (
    RETRIES,
    AsyncLimits,
    FailureKind,
    Frontier,
    InOrder,
    ReadyGroup,
    ScheduleCounts,
    SelectionOrder,
    StepSelection,
    Ticket,
    demands_of,
    ordered_groups,
    pick_groups,
    unmet_demands,
)
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.errors import UserError, name_some

__all__ = ["AsyncSchedule"]


class _GroupState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    TAKEN = "taken"


@dataclass(slots=True, eq=False)
class _LiveGroup:
    """A group that is not settled."""

    ticket: Ticket
    version: int
    """Smallest version that can have drawn its oldest token, as far as it is known."""
    deadline: int
    state: _GroupState = _GroupState.RUNNING
    place: int = 0
    step: int = 0
    failures: Counter[FailureKind] = field(default_factory=Counter)

    @property
    def ready(self) -> ReadyGroup:
        ordinal, name = self.ticket.draw.ordinal, self.ticket.name
        return ReadyGroup(name=name, ordinal=ordinal, version=self.version, deadline=self.deadline, place=self.place)


class AsyncSchedule:
    """The schedule of one run; it is called by one thread at a time.

    Args:
        order: preference among finished groups, see `async_selection`; `InOrder` waits for the smallest ordinals.
        validate: check the invariants after every transition (tests).

    Example:
        Steps of one group, at most one update old:

        >>> from nemo_rl.algorithms.async_selection import OldestFirst
        >>> schedule = AsyncSchedule(AsyncLimits(num_groups=1, max_staleness=1, lookahead=1), OldestFirst())
        >>> schedule.updated(0)
        >>> first, second = schedule.admit([SampledPrompt(0, 8), SampledPrompt(1, 5)])
        >>> first.name, first.deadline, schedule.num_to_admit
        ('0.0', 2, 0)
        >>> schedule.ended(second.name, oldest_version=0)
        True
        >>> schedule.select(1).names
        ('1.0',)
        >>> schedule.trained(1)
        >>> schedule.updated(1)
        >>> schedule.num_to_admit, schedule.frontier()
        (1, Frontier(next_ordinal=0, done=(1,)))
        >>> schedule.select(2), schedule.waits_for(2)
        (None, ('0.0',))
    """

    def __init__(self, limits: AsyncLimits, order: SelectionOrder, *, validate: bool = False) -> None:
        if isinstance(order, InOrder) and limits.overdue != "wait":
            raise ValueError(
                f"grpo.async.overdue: {limits.overdue} has no effect with selection=in_order, which waits for the "
                "earliest prompts whatever else is ready; set overdue=wait or another selection"
            )
        self._limits = limits
        self._order = order
        self._validate = validate
        self._groups: dict[int, _LiveGroup] = {}
        """Live groups by ordinal, ascending."""
        self._deadlines: dict[_GroupState, Counter[int]] = {state: Counter() for state in _GroupState}
        """Numbers of live groups by state and deadline: asking for a step that is not ready is cheap."""
        self._next_ordinal, self._done = 0, set[int]()
        self._last_ordinal = -1
        """Largest ordinal that was admitted."""
        self._num_updates = 0
        self._version: int | None = None
        """Smallest version that an engine holds; None before the first refit."""
        self._step = 0
        """The last step that has taken its groups."""
        self._is_exhausted = False
        self._num_ended = 0
        self._counts: Counter[str] = Counter()
        self._retried: Counter[FailureKind] = Counter()
        self._replaced: Counter[FailureKind] = Counter()
        self._staleness: Counter[int] = Counter()

    @property
    def is_over(self) -> bool:
        """True when no further step can be trained."""
        ended = self._limits.max_num_steps is not None and self._step >= self._limits.max_num_steps
        return ended or (self._is_exhausted and self._num_waiting() == 0)

    @property
    def num_updates(self) -> int:
        return self._num_updates

    @property
    def ready_names(self) -> tuple[str, ...]:
        """Names of the groups that have ended and that no step has taken, in order of ordinals."""
        return tuple(group.name for group in self._ready())

    def updated(self, version: int) -> None:
        """Every engine holds `version` or newer from now on."""
        held = -1 if self._version is None else self._version
        if not held <= version <= self._num_updates:
            raise ValueError(f"version of the engines: expected {held} .. {self._num_updates}, got {version}")
        self._version = version
        self._check()

    def exhausted(self) -> None:
        """The prompts have ended: nothing is admitted any more, and the last step may have fewer groups."""
        self._is_exhausted = True

    @property
    def num_to_admit(self) -> int:
        """Groups that may be started now; 0 from an update to the end of its refit.

        A group that is started during a refit may still be sampled from the older weights, and would pay for these
        moments with a whole step of its time: at max_staleness 2 and lookahead 1 a simulated run takes a third longer.
        """
        if self._version != self._num_updates or self._is_exhausted:
            return 0
        limits = self._limits
        steps = 1 + limits.lookahead
        if limits.max_num_steps is not None:
            steps = min(steps, limits.max_num_steps - self._num_updates)
        return max(0, limits.num_groups * steps - len(self._groups))

    def admit(self, draws: Sequence[SampledPrompt]) -> tuple[Ticket, ...]:
        """Start the groups of these prompts; their rollouts are to be started in this order.

        Args:
            draws: at most `num_to_admit`, ordinals ascending and above those of earlier calls, without settled ones.
        """
        if len(draws) > self.num_to_admit:
            raise ValueError(
                f"groups to admit: expected at most {self.num_to_admit}, got {len(draws)}; ask num_to_admit first"
            )
        last, tickets = self._last_ordinal, list[Ticket]()
        for ordinal in (draw.ordinal for draw in draws):
            if ordinal <= last or self.is_settled(ordinal) or ordinal in self._groups:
                raise ValueError(f"ordinal: expected one above {last} that is neither settled nor alive, got {ordinal}")
            last = ordinal
        self._last_ordinal = last
        for draw in draws:
            ticket = self._ticket(draw, attempt=0)
            group = _LiveGroup(ticket=ticket, version=ticket.version, deadline=ticket.deadline)
            self._groups[draw.ordinal] = group
            self._deadlines[group.state][group.deadline] += 1
            tickets.append(ticket)
        # Groups of a checkpoint may lie between them.
        self._groups = dict(sorted(self._groups.items()))
        self._check()
        return tuple(tickets)

    def ended(self, name: str, *, oldest_version: int) -> bool:
        """All rows of a group have ended and are scored and written.

        Args:
            oldest_version: of the weights that drew its oldest token, as the engines stamped it. Rows that waited for
                a place in an engine may be newer than their ticket, which gives them more time.

        Returns:
            False when the attempt has been given up before; its rows are to be cleared.
        """
        group = self._running(name)
        if group is None:
            return False
        if not group.version <= oldest_version <= self._num_updates:
            raise ValueError(
                f"oldest version of group {name}: expected {group.version} .. {self._num_updates}, got "
                f"{oldest_version}; an engine sampled from weights that it should have replaced"
            )
        self._move(group, _GroupState.READY, version=oldest_version)
        group.place = self._num_ended
        self._num_ended += 1
        self._check()
        return True

    def filtered(self, name: str) -> bool:
        """All rows of a group have ended, and their equal rewards teach nothing. Returns as `ended` does."""
        group = self._running(name)
        if group is None:
            return False
        self._counts["filtered"] += 1
        self._settle(group)
        return True

    def failed(self, name: str, kind: FailureKind) -> Ticket | None:
        """A group could not be sampled, scored or written.

        Args:
            kind: see `RETRIES`.

        Returns:
            The next attempt, to be started like an admitted group. None: the attempt had been given up before, or the
            budget of the prompt is spent and the group is replaced by a new prompt.
        """
        group = self._running(name)
        return None if group is None else self._again(group, kind)

    def lost(self, names: Sequence[str]) -> tuple[Ticket, ...]:
        """The rows of groups are gone with the process that had them; those of taken groups are the trainer's.

        Returns:
            Their next attempts, as `failed` of kind `infra` gives them.
        """
        found = [self._find(name) for name in names]
        groups = [group for group in found if group is not None and group.state is not _GroupState.TAKEN]
        tickets = [self._again(group, "infra") for group in groups]
        return tuple(ticket for ticket in tickets if ticket is not None)

    def select(self, step: int) -> StepSelection | None:
        """Take the groups of a step, or return None when it has to wait, see `waits_for`.

        Args:
            step: the one after the last that has taken its groups.

        Raises:
            UserError: `overdue: error`, and a group that this step must train has not ended although others have.
        """
        self._expect_step(step, self._step + 1)
        dropped = self._overdue(step) if self._is_short(step) else []
        self.give_up([group.ticket.name for group in dropped])
        if self._is_short(step):
            return None
        ready, count = self._ready(), self._size()
        if count == 0:
            return None
        picked = pick_groups(ordered_groups(self._order, ready), self._demands(step), count=count)
        groups = [self._groups[ordinal] for ordinal in sorted(group.ordinal for group in picked)]
        for group in groups:
            self._move(group, _GroupState.TAKEN)
            group.step = step
        self._step = step
        staleness = tuple(step - 1 - group.version for group in groups)
        self._staleness.update(staleness)
        self._counts["over_age"] += sum(age > self._limits.max_staleness for age in staleness)
        self._check()
        tickets = tuple(group.ticket for group in groups)
        return StepSelection(
            step=step, tickets=tickets, staleness=staleness, dropped=tuple(group.ticket for group in dropped)
        )

    def give_up(self, names: Sequence[str]) -> tuple[Ticket, ...]:
        """Drop running groups that the driver has waited for too long; others are drawn in their place."""
        groups = [group for group in map(self._running, names) if group is not None]
        for group in groups:
            self._counts["overdue"] += 1
            self._settle(group)
        self._check()
        return tuple(group.ticket for group in groups)

    def waits_for(self, step: int) -> tuple[str, ...]:
        """Return the names of running groups some of which must end before `step` can take its groups."""
        if not self._is_short(step):
            return ()
        waiting = self._waiting()
        running = [group for group in waiting if group.state is _GroupState.RUNNING]
        if isinstance(self._order, InOrder):
            running = [group for group in running if group in waiting[: self._size()]]
        elif len(waiting) - len(running) >= self._size():
            unmet = self._unmet(step)
            running = [group for group in running if group.deadline <= min(unmet)]
        return tuple(group.ticket.name for group in running)

    def trained(self, step: int) -> None:
        """The update of a step is done; the engines hold older weights until `updated`."""
        self._expect_step(step, self._num_updates + 1)
        self._num_updates = step
        for group in [group for group in self._groups.values() if group.step == step]:
            self._counts["trained"] += 1
            self._settle(group)
        self._check()

    def released(self, step: int) -> None:
        """The last step that has taken its groups will not be trained: they are ready again."""
        self._expect_step(step, self._step)
        for group in self._groups.values():
            if group.state is _GroupState.TAKEN and group.step == step:
                self._move(group, _GroupState.READY)
                group.step = 0
                self._staleness[step - 1 - group.version] -= 1
        self._step = step - 1
        self._check()

    def frontier(self) -> Frontier:
        """Return what a checkpoint saves: everything that is not settled is sampled again after it."""
        return Frontier(next_ordinal=self._next_ordinal, done=tuple(sorted(self._done)))

    def is_settled(self, ordinal: int) -> bool:
        """Return whether a prompt is done with: trained, filtered, dropped or replaced."""
        return ordinal < self._next_ordinal or ordinal in self._done

    def resume(self, frontier: Frontier, *, step: int) -> None:
        """Go on after the checkpoint of `step`; called once, before anything else."""
        if self._groups or self._version is not None:
            raise ValueError("resume: expected a schedule that has not begun; make a new one")
        self._next_ordinal, self._done = frontier.next_ordinal, set(frontier.done)
        self._last_ordinal = frontier.next_ordinal - 1
        self._num_updates = self._step = step
        self._check()

    def restore(self, draw: SampledPrompt, *, oldest_version: int) -> Ticket:
        """Take a group of the checkpoint whose rows had ended; called after `resume`, before anything else.

        Args:
            oldest_version: as in `ended`.
        """
        if self._version is not None or self.is_settled(draw.ordinal) or draw.ordinal in self._groups:
            raise ValueError(f"restore: expected a group that waits, right after resume, got ordinal {draw.ordinal}")
        deadline = self._deadline(oldest_version)
        ticket = Ticket(draw=draw, attempt=0, version=oldest_version, deadline=deadline)
        group = _LiveGroup(ticket=ticket, version=oldest_version, deadline=deadline, state=_GroupState.READY)
        self._deadlines[group.state][deadline] += 1
        group.place, self._num_ended = self._num_ended, self._num_ended + 1
        self._groups = dict(sorted({**self._groups, draw.ordinal: group}.items()))
        self._check()
        return ticket

    def counts(self) -> ScheduleCounts:
        states, counts = {state: deadlines.total() for state, deadlines in self._deadlines.items()}, self._counts
        return ScheduleCounts(
            running=states[_GroupState.RUNNING],
            ready=states[_GroupState.READY],
            taken=states[_GroupState.TAKEN],
            trained=counts["trained"],
            filtered=counts["filtered"],
            overdue=counts["overdue"],
            late=counts["late"],
            over_age=counts["over_age"],
            retried=dict(self._retried),
            replaced=dict(self._replaced),
            staleness=dict(sorted((+self._staleness).items())),
        )

    def _waiting(self) -> list[_LiveGroup]:
        """Groups that no step has taken, in order of ordinals."""
        return [group for group in self._groups.values() if group.state is not _GroupState.TAKEN]

    def _ready(self) -> list[ReadyGroup]:
        return [group.ready for group in self._groups.values() if group.state is _GroupState.READY]

    def _num_waiting(self) -> int:
        return self._deadlines[_GroupState.RUNNING].total() + self._deadlines[_GroupState.READY].total()

    def _demands(self, step: int) -> dict[int, int]:
        deadlines = self._deadlines[_GroupState.RUNNING] + self._deadlines[_GroupState.READY]
        return demands_of(deadlines, step=step, num_groups=self._limits.num_groups)

    def _size(self) -> int:
        full = self._limits.num_groups
        return min(full, self._num_waiting()) if self._is_exhausted else full

    def _unmet(self, step: int) -> dict[int, int]:
        return unmet_demands(self._deadlines[_GroupState.READY], self._demands(step))

    def _is_short(self, step: int) -> bool:
        """Return whether the step has to wait for a group to end, or to be admitted first."""
        size = self._size()
        if self._deadlines[_GroupState.READY].total() < size:
            return True
        if isinstance(self._order, InOrder):
            return any(group.state is _GroupState.RUNNING for group in self._waiting()[:size])
        return bool(self._unmet(step))

    def _overdue(self, step: int) -> list[_LiveGroup]:
        """Return the groups to drop so that the step can be cut, those with the earliest deadlines first.

        It is empty when the step has to wait, because of the settings or since too few groups are ready.
        """
        num_ready = self._deadlines[_GroupState.READY].total()
        if self._limits.overdue == "wait" or num_ready < self._size():
            return []
        running = [group for group in self._waiting() if group.state is _GroupState.RUNNING]
        running.sort(key=lambda group: group.deadline)
        count = max(self._unmet(step).values())
        if self._limits.overdue == "error":
            group = running[0]
            raise UserError(
                f"step {step}: group {group.ticket.name} (prompt {group.ticket.draw.prompt}), which may be sampled "
                f"from weights of version {group.version}, has not ended although {num_ready} others have, and would "
                f"be older than grpo.async.max_staleness={self._limits.max_staleness} in a later step; lower "
                "policy.generation.max_new_tokens, raise max_staleness, or set grpo.async.overdue to wait or drop"
            )
        return running[:count]

    def _deadline(self, version: int) -> int:
        return version + self._limits.max_staleness + 1

    def _ticket(self, draw: SampledPrompt, *, attempt: int) -> Ticket:
        assert self._version is not None, "attempts start after the first refit"
        return Ticket(draw=draw, attempt=attempt, version=self._version, deadline=self._deadline(self._version))

    def _find(self, name: str) -> _LiveGroup | None:
        """Return the group whose current attempt has this name; None: the attempt has been given up."""
        ordinal, attempt = map(int, name.split("."))
        group = self._groups.get(ordinal)
        if group is not None and group.ticket.attempt == attempt:
            return group
        is_past = self.is_settled(ordinal) if group is None else attempt < group.ticket.attempt
        if not is_past:
            raise ValueError(f"group {name}: expected an attempt that was admitted, got {name_some(self._names())}")
        self._counts["late"] += 1
        return None

    def _running(self, name: str) -> _LiveGroup | None:
        group = self._find(name)
        if group is not None and group.state is not _GroupState.RUNNING:
            raise ValueError(f"group {name}: expected a running group, got one that is {group.state}")
        return group

    def _again(self, group: _LiveGroup, kind: FailureKind) -> Ticket | None:
        """Start the next attempt of a group, or replace it."""
        group.failures[kind] += 1
        if group.failures[kind] > RETRIES[kind]:
            self._replaced[kind] += 1
            self._settle(group)
            return None
        self._retried[kind] += 1
        ticket = self._ticket(group.ticket.draw, attempt=group.ticket.attempt + 1)
        self._move(group, _GroupState.RUNNING, version=ticket.version)
        group.ticket = ticket
        self._check()
        return ticket

    def _move(self, group: _LiveGroup, state: _GroupState, *, version: int | None = None) -> None:
        """Change the state of a group, and the version of its oldest token where it is given."""
        self._deadlines[group.state][group.deadline] -= 1
        group.state = state
        if version is not None:
            group.version, group.deadline = version, self._deadline(version)
        self._deadlines[state][group.deadline] += 1

    def _settle(self, group: _LiveGroup) -> None:
        """The group is done with; the frontier moves up over all that are."""
        ordinal = group.ticket.draw.ordinal
        del self._groups[ordinal]
        self._deadlines[group.state][group.deadline] -= 1
        self._done.add(ordinal)
        while self._next_ordinal in self._done:
            self._done.remove(self._next_ordinal)
            self._next_ordinal += 1
        self._check()

    def _expect_step(self, step: int, expected: int) -> None:
        if step != expected:
            raise ValueError(f"step: expected {expected}, got {step}")

    def _names(self) -> list[str]:
        return [group.ticket.name for group in self._groups.values()]

    def _check(self) -> None:
        """Check the invariants of the module's docstring."""
        if not self._validate:
            return
        deadlines, size = [group.deadline for group in self._waiting()], self._limits.num_groups
        for deadline in set(deadlines):
            held = sum(other <= deadline for other in deadlines)
            assert held <= size * (deadline - self._step), f"{held} groups by step {deadline} after step {self._step}"
        assert len(self._groups) <= size * (1 + self._limits.lookahead), f"{len(self._groups)} groups alive"
        counted = Counter((group.state, group.deadline) for group in self._groups.values())
        kept = {(state, at): num for state, found in self._deadlines.items() for at, num in found.items() if num}
        assert counted == kept, f"expected {counted} groups by state and deadline, got {kept}"
        assert list(self._groups) == sorted(self._groups), f"order of ordinals: {list(self._groups)}"
        assert not any(map(self.is_settled, self._groups)), f"settled groups alive: {self._names()}"
        assert self._next_ordinal not in self._done and all(done > self._next_ordinal for done in self._done)
        assert self._counts["over_age"] == 0, f"staleness of groups: {self._staleness}"
