"""Orders of the finished groups of an asynchronous run, and the rule that binds them all when a step is cut.

Called by `AsyncSchedule.select`. Invariant: whatever the order, the groups that a step leaves behind can all still be
trained by their deadlines, so no order can make a row too old; the order decides only among what is left to choose.

Records of an asynchronous run's schedule: its limits, an attempt of a group, a step, and what a checkpoint saves.

Made by `AsyncSchedule` and read by its driver. Steps count from 1; version n of the weights has n updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nemo_rl.data.sampler import SampledPrompt

__all__ = [
    "RETRIES",
    "AsyncLimits",
    "FailureKind",
    "Frontier",
    "InOrder",
    "OldestFirst",
    "Overdue",
    "ReadyFirst",
    "ReadyGroup",
    "ScheduleCounts",
    "SelectionOrder",
    "StepSelection",
    "Ticket",
    "demands_of",
    "ordered_groups",
    "pick_groups",
    "unmet_demands",
]


FailureKind = Literal["infra", "data", "model"]
Overdue = Literal["wait", "drop", "error"]
RETRIES: Mapping[FailureKind, int] = {"infra": 5, "data": 2, "model": 2}
"""New attempts of one prompt by the kind of its failures: a dead worker (infra) says little about the prompt; a row
that cannot be encoded or scored (data), or that the model makes unusable (model), will most likely fail again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncLimits:
    """The numbers that bound an asynchronous run."""

    num_groups: int
    """B, groups of a step (`grpo.num_prompts_per_step`)."""
    max_staleness: int
    """S, updates between the weights of a row's oldest token and the weights that it updates."""
    lookahead: int
    """L, steps that sampling may run ahead of the step that is being trained."""
    overdue: Overdue = "wait"
    """The fate of a group that a step must train and that has not ended, although enough others have."""
    max_num_steps: int | None = None
    """Last step of the run; None: the prompts decide."""

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ValueError(f"grpo.num_prompts_per_step: expected at least 1, got {self.num_groups}")
        if not 0 <= self.lookahead <= self.max_staleness:
            raise ValueError(
                f"grpo.async.lookahead: expected 0 .. max_staleness={self.max_staleness}, got {self.lookahead}; "
                "groups sampled further ahead would be too old when they are trained"
            )
        if self.overdue != "wait" and self.lookahead == 0:
            raise ValueError(
                f"grpo.async.overdue: {self.overdue} acts when enough other groups are ready, which lookahead=0 never "
                "allows; set grpo.async.lookahead to 1 or more, or overdue=wait"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """One attempt to sample the group of one prompt.

    Example:
        >>> Ticket(draw=SampledPrompt(17, 3), attempt=1, version=4, deadline=7).name
        '17.1'
    """

    draw: SampledPrompt
    attempt: int
    """Failures of this prompt before."""
    version: int
    """Smallest version of the weights that may sample its rows."""
    deadline: int
    """Last step that may train it, going by `version`."""

    @property
    def name(self) -> str:
        return f"{self.draw.ordinal}.{self.attempt}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSelection:
    """The groups of one step."""

    step: int
    tickets: tuple[Ticket, ...]
    """`num_groups` of them, fewer only at the end of the prompts, in order of ordinals."""
    staleness: tuple[int, ...]
    """Staleness of each group: updates between the weights of its oldest token and the weights that it updates."""
    dropped: tuple[Ticket, ...] = ()
    """Groups that still run and are given up; their rows are to be stopped and cleared."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(ticket.name for ticket in self.tickets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """The place that a run has come to in the stream of prompts.

    Example:
        Ordinals 0, 1, 2 and 5 are settled: `Frontier(next_ordinal=3, done=(5,))`.
    """

    next_ordinal: int = 0
    """The smallest ordinal that is not settled."""
    done: tuple[int, ...] = ()
    """Settled ordinals above it, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleCounts:
    """Numbers of live groups by state, and of the others by their end, since the schedule was made."""

    running: int
    ready: int
    taken: int
    trained: int
    filtered: int
    overdue: int
    """Dropped since they were overdue."""
    late: int
    """Ends and failures of attempts that had been given up before."""
    over_age: int
    """Groups trained although they were older than the bound: 0, or the schedule is wrong."""
    retried: Mapping[FailureKind, int]
    replaced: Mapping[FailureKind, int]
    staleness: Mapping[int, int]
    """Staleness -> groups that were taken with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGroup:
    """A group whose rows have all ended and that waits to be trained."""

    name: str
    """`ordinal.attempt`, for example `17.0`."""
    ordinal: int
    """Place of its prompt in the stream of prompts."""
    version: int
    """Version of the weights that drew its oldest token."""
    deadline: int
    """Last step that may train it."""
    place: int
    """Number of groups that ended before it in this run."""


class SelectionOrder(Protocol):
    """The order in which finished groups are preferred; a class of the user's own has this method.

    Example:
        >>> class NewestFirst:
        ...     def order(self, ready):
        ...         return [group.name for group in sorted(ready, key=lambda group: -group.version)]
    """

    def order(self, ready: Sequence[ReadyGroup]) -> Sequence[str]:
        """Return the name of every group in `ready` once, the preferred ones first."""


class OldestFirst:
    """Prefers groups of the oldest weights, then those of the earliest prompts."""

    def order(self, ready: Sequence[ReadyGroup]) -> Sequence[str]:
        return [group.name for group in sorted(ready, key=lambda group: (group.version, group.ordinal))]


class InOrder:
    """Trains prompts strictly in the order of the stream: a step waits for the earliest ones that are not trained."""

    def order(self, ready: Sequence[ReadyGroup]) -> Sequence[str]:
        return [group.name for group in sorted(ready, key=lambda group: group.ordinal)]


class ReadyFirst:
    """Prefers groups in the order in which they ended: short rows are trained before long ones."""

    def order(self, ready: Sequence[ReadyGroup]) -> Sequence[str]:
        return [group.name for group in sorted(ready, key=lambda group: group.place)]


def demands_of(deadlines: Mapping[int, int], *, step: int, num_groups: int) -> dict[int, int]:
    """Return how many groups with deadlines up to k the step must take, for each k where it is not zero.

    The steps after this one, up to k, train at most `num_groups * (k - step)` of them; the rest cannot be left behind.

    Args:
        deadlines: deadline -> groups that are not trained and not taken by an earlier step, finished or not.

    Example:
        Step 3 takes two groups. Of four groups with deadlines 3, 4, 4, 5 the one with deadline 3 must be taken. Of
        deadlines 4, 4, 4 one must be taken, since step 4 has room for two:

        >>> demands_of({3: 1, 4: 2, 5: 1}, step=3, num_groups=2)
        {3: 1, 4: 1}
        >>> demands_of({4: 3}, step=3, num_groups=2)
        {4: 1}
    """
    demands, total = {}, 0
    for deadline in sorted(deadlines):
        total += deadlines[deadline]
        demand = total - num_groups * max(0, deadline - step)
        if demand > 0:
            demands[deadline] = demand
    return demands


def unmet_demands(ready: Mapping[int, int], demands: Mapping[int, int]) -> dict[int, int]:
    """Return by how many finished groups each demand is short; empty when the step can be cut.

    Args:
        ready: deadline -> finished groups.

    Example:
        >>> unmet_demands({4: 1}, {3: 1, 4: 2})
        {3: 1, 4: 1}
    """
    found = {deadline: sum(num for at, num in ready.items() if at <= deadline) for deadline in demands}
    return {deadline: demand - found[deadline] for deadline, demand in demands.items() if demand > found[deadline]}


def ordered_groups(order: SelectionOrder, ready: Sequence[ReadyGroup]) -> list[ReadyGroup]:
    """Return the groups as `order` prefers them.

    Raises:
        ValueError: the order leaves a group out, or names one twice or one that is not there.
    """
    by_name = {group.name: group for group in ready}
    names = list(order.order(ready))
    if sorted(names) != sorted(by_name):
        raise ValueError(
            f"grpo.async.selection: {type(order).__name__}.order must return the name of each of the {len(by_name)} "
            f"groups once, expected {sorted(by_name)}, got {sorted(names)}"
        )
    return [by_name[name] for name in names]


def pick_groups(ordered: Sequence[ReadyGroup], demands: Mapping[int, int], *, count: int) -> list[ReadyGroup]:
    """Return `count` groups that meet the demands; of all such choices the first one in the given order.

    A group is skipped only when the places left are just as many as the demands that it would not meet. Demands are
    nested (a group with deadline k counts for every later one too), so one that is skipped would not fit later
    either, and one pass finds the choice.

    Args:
        ordered: at least `count` groups for which `unmet_demands` is empty.

    Example:
        Two places, and the group with deadline 3 must be taken:

        >>> made = [ReadyGroup(name=f"{n}.0", ordinal=n, version=2, deadline=d, place=n)
        ...         for n, d in enumerate([5, 5, 3])]
        >>> [group.name for group in pick_groups(made, {3: 1}, count=2)]
        ['0.0', '2.0']
    """
    left = dict(demands)
    picked: list[ReadyGroup] = []
    for group in ordered:
        places = count - len(picked)
        if any(demand >= places and group.deadline > deadline for deadline, demand in left.items()):
            continue
        if places == 0:
            break
        picked.append(group)
        for deadline in left:
            left[deadline] -= group.deadline <= deadline
    assert len(picked) == count, f"a step of {count} groups: got {len(picked)} of {len(ordered)}, demands {demands}"
    return picked
