"""Records of an asynchronous run's schedule: its limits, an attempt of a group, a step, and what a checkpoint saves.

Made by `AsyncSchedule` and read by its driver. Steps count from 1; version n of the weights has n updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nemo_rl.data.sampler import SampledPrompt

__all__ = [
    "RETRIES",
    "AsyncLimits",
    "FailureKind",
    "Frontier",
    "Overdue",
    "ScheduleCounts",
    "StepSelection",
    "Ticket",
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
