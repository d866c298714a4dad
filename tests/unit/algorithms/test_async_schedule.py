"""The schedule of asynchronous runs: one small case of each rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nemo_rl.algorithms.async_schedule import AsyncSchedule
from nemo_rl.algorithms.async_selection import (
    RETRIES,
    AsyncLimits,
    FailureKind,
    Frontier,
    InOrder,
    OldestFirst,
    Overdue,
    ReadyFirst,
    ReadyGroup,
    SelectionOrder,
)
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.errors import UserError


def schedule_of(
    *,
    groups: int = 2,
    staleness: int = 1,
    lookahead: int | None = None,
    overdue: Overdue = "wait",
    last: int | None = None,
    order: SelectionOrder | None = None,
) -> AsyncSchedule:
    """A schedule whose engines hold version 0."""
    limits = AsyncLimits(
        num_groups=groups,
        max_staleness=staleness,
        lookahead=staleness if lookahead is None else lookahead,
        overdue=overdue,
        max_num_steps=last,
    )
    schedule = AsyncSchedule(limits, order or OldestFirst(), validate=True)
    schedule.updated(0)
    return schedule


def admit(schedule: AsyncSchedule, *ordinals: int) -> tuple[str, ...]:
    return tuple(ticket.name for ticket in schedule.admit([SampledPrompt(ordinal, ordinal) for ordinal in ordinals]))


def end(schedule: AsyncSchedule, *ordinals: int, version: int = 0) -> None:
    for ordinal in ordinals:
        assert schedule.ended(f"{ordinal}.0", oldest_version=version)


def selected(schedule: AsyncSchedule, step: int) -> list[int] | None:
    found = schedule.select(step)
    return None if found is None else [ticket.draw.ordinal for ticket in found.tickets]


def step(schedule: AsyncSchedule, number: int) -> list[int]:
    """Select, train and refit."""
    ordinals = selected(schedule, number)
    assert ordinals is not None, schedule.waits_for(number)
    schedule.trained(number)
    schedule.updated(number)
    return ordinals


def test_nothing_is_admitted_before_the_engines_hold_weights() -> None:
    limits = AsyncLimits(num_groups=2, max_staleness=0, lookahead=0)
    schedule = AsyncSchedule(limits, OldestFirst(), validate=True)
    assert schedule.num_to_admit == 0
    schedule.updated(0)
    assert schedule.num_to_admit == 2


def test_staleness_zero_admits_a_step_after_each_refit_and_trains_it_whole() -> None:
    schedule = schedule_of(staleness=0)
    for number in (1, 2, 3):
        first = 2 * number - 2
        assert schedule.num_to_admit == 2
        admit(schedule, first, first + 1)
        end(schedule, first + 1, version=number - 1)
        assert schedule.num_to_admit == 0 and selected(schedule, number) is None
        assert schedule.waits_for(number) == (f"{first}.0",)
        end(schedule, first, version=number - 1)
        assert selected(schedule, number) == [first, first + 1]
        assert schedule.num_to_admit == 0, "the step is being trained"
        schedule.trained(number)
        assert schedule.num_to_admit == 0, "the engines hold older weights"
        schedule.updated(number)
    assert schedule.counts().staleness == {0: 6}


def test_lookahead_bounds_the_groups_that_are_alive() -> None:
    schedule = schedule_of(staleness=3, lookahead=1)
    assert schedule.num_to_admit == 4
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 0, 1)
    assert selected(schedule, 1) == [0, 1] and schedule.num_to_admit == 0, "taken groups are alive"
    schedule.trained(1)
    schedule.updated(1)
    assert schedule.num_to_admit == 2


def test_admission_refuses_too_many_groups_and_ordinals_that_go_back() -> None:
    schedule = schedule_of(staleness=0)
    with pytest.raises(ValueError, match="at most 2, got 3"):
        admit(schedule, 0, 1, 2)
    admit(schedule, 4)
    with pytest.raises(ValueError, match="above 4 .* got 3"):
        admit(schedule, 3)


def test_the_last_step_gets_no_group_more_than_it_trains() -> None:
    schedule = schedule_of(staleness=2, last=2)
    assert schedule.num_to_admit == 4, "two steps of two, though three steps of lookahead are allowed"
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 0, 1, 2, 3)
    assert step(schedule, 1) == [0, 1] and schedule.num_to_admit == 0 and not schedule.is_over
    assert step(schedule, 2) == [2, 3] and schedule.is_over and schedule.num_to_admit == 0
    assert schedule.frontier() == Frontier(next_ordinal=4)


def test_the_last_step_of_the_prompts_has_what_is_left() -> None:
    schedule = schedule_of(staleness=1)
    admit(schedule, 0, 1, 2)
    schedule.exhausted()
    assert schedule.num_to_admit == 0
    end(schedule, 0, 1, 2)
    assert step(schedule, 1) == [0, 1] and not schedule.is_over
    assert step(schedule, 2) == [2] and schedule.is_over


def test_oldest_first_prefers_old_weights_then_early_prompts() -> None:
    schedule = schedule_of(staleness=2, lookahead=1)
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 3, 2)
    assert step(schedule, 1) == [2, 3]
    admit(schedule, 4, 5)
    end(schedule, 5, 4, version=1)
    end(schedule, 1)
    assert step(schedule, 2) == [1, 4]


def test_ready_first_takes_groups_as_they_ended_but_first_those_whose_time_is_up() -> None:
    schedule = schedule_of(staleness=2, lookahead=1, order=ReadyFirst())
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 3, 1)
    assert step(schedule, 1) == [1, 3]
    admit(schedule, 4, 5)
    end(schedule, 5, 4, version=1)
    assert step(schedule, 2) == [4, 5]
    admit(schedule, 6, 7)
    end(schedule, 7, 6, version=2)
    assert selected(schedule, 3) is None, "0 and 2 may be trained in step 3 at the latest"
    assert schedule.waits_for(3) == ("0.0", "2.0")
    end(schedule, 0, 2)
    assert step(schedule, 3) == [0, 2]
    assert step(schedule, 4) == [6, 7]
    assert schedule.counts().staleness == {0: 4, 1: 2, 2: 2}


def test_in_order_waits_for_the_earliest_prompts() -> None:
    schedule = schedule_of(staleness=1, order=InOrder())
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 1, 2, 3)
    assert selected(schedule, 1) is None and schedule.waits_for(1) == ("0.0",)
    again = schedule.failed("0.0", "infra")
    assert again is not None and schedule.ended(again.name, oldest_version=0)
    assert step(schedule, 1) == [0, 1] and step(schedule, 2) == [2, 3]


class LatestPrompts:
    def order(self, ready: Sequence[ReadyGroup]) -> Sequence[str]:
        return [group.name for group in sorted(ready, key=lambda group: -group.ordinal)]


class NoPrompts:
    def order(self, ready: Sequence[ReadyGroup]) -> Sequence[str]:
        return []


def test_an_order_of_the_users_own_decides_within_the_bound() -> None:
    schedule = schedule_of(staleness=1, order=LatestPrompts())
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 0, 1, 2, 3)
    assert step(schedule, 1) == [2, 3]
    admit(schedule, 4, 5)
    end(schedule, 4, 5, version=1)
    assert step(schedule, 2) == [0, 1], "whatever is preferred"


def test_an_order_that_leaves_groups_out_is_refused_by_name() -> None:
    schedule = schedule_of(order=NoPrompts())
    admit(schedule, 0, 1)
    end(schedule, 0, 1)
    with pytest.raises(ValueError, match=r"NoPrompts.order must return the name of each of the 2 groups"):
        schedule.select(1)


def overdue_schedule(overdue: Overdue) -> AsyncSchedule:
    """Group 0 runs on while step 2, the last that may train it, has others."""
    schedule = schedule_of(staleness=1, overdue=overdue)
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 1, 2)
    assert step(schedule, 1) == [1, 2]
    admit(schedule, 4, 5)
    end(schedule, 3)
    assert schedule.select(2) is None, "one other is ready, which is too few"
    end(schedule, 4, version=1)
    return schedule


def test_an_overdue_group_is_waited_for() -> None:
    schedule = overdue_schedule("wait")
    end(schedule, 5, version=1)
    assert schedule.select(2) is None and schedule.waits_for(2) == ("0.0",)
    end(schedule, 0)
    assert step(schedule, 2) == [0, 3]


def test_an_overdue_group_is_dropped_once_enough_others_are_ready() -> None:
    schedule = overdue_schedule("drop")
    found = schedule.select(2)
    assert found is not None and found.names == ("3.0", "4.0")
    assert [ticket.name for ticket in found.dropped] == ["0.0"] and schedule.counts().overdue == 1
    assert schedule.num_to_admit == 1, "its replacement"
    assert not schedule.ended("0.0", oldest_version=0) and schedule.counts().late == 1
    schedule.trained(2)
    assert schedule.frontier() == Frontier(next_ordinal=5), "dropped groups are settled"


def test_an_overdue_group_is_an_error_when_asked_for() -> None:
    schedule = overdue_schedule("error")
    with pytest.raises(UserError, match=r"step 2: group 0.0 \(prompt 0\).* version 0, has not ended although 2 others"):
        schedule.select(2)


def test_only_as_many_running_groups_are_dropped_as_the_bound_demands() -> None:
    schedule = schedule_of(staleness=2, overdue="drop")
    admit(schedule, 0, 1, 2, 3, 4, 5)
    end(schedule, 4, 5)
    assert step(schedule, 1) == [4, 5]
    admit(schedule, 6, 7)
    end(schedule, 6, 7, version=1)
    # Four groups have the deadline 3, of which step 3 can train two.
    found = schedule.select(2)
    assert found is not None and [ticket.name for ticket in found.dropped] == ["0.0", "1.0"]


def test_a_filtered_group_gives_its_place_to_a_new_prompt() -> None:
    schedule = schedule_of(staleness=0)
    admit(schedule, 0, 1)
    assert schedule.filtered("0.0") and schedule.num_to_admit == 1
    admit(schedule, 2)
    end(schedule, 1, 2)
    assert step(schedule, 1) == [1, 2]
    assert schedule.counts().filtered == 1 and schedule.frontier() == Frontier(next_ordinal=3)


@pytest.mark.parametrize("kind", list(RETRIES))
def test_a_failed_group_is_sampled_again_within_its_budget_and_then_replaced(kind: FailureKind) -> None:
    schedule = schedule_of(staleness=0)
    (name,) = admit(schedule, 0)
    for attempt in range(1, RETRIES[kind] + 1):
        again = schedule.failed(name, kind)
        assert again is not None and again.name == f"0.{attempt}" and again.draw == SampledPrompt(0, 0)
        name = again.name
    assert schedule.num_to_admit == 1
    assert schedule.failed(name, kind) is None
    assert schedule.num_to_admit == 2, "the next admission replaces it"
    counts = schedule.counts()
    assert counts.retried == {kind: RETRIES[kind]} and counts.replaced == {kind: 1}
    assert schedule.frontier() == Frontier(next_ordinal=1)


def test_a_new_attempt_has_the_time_of_the_weights_that_sample_it() -> None:
    schedule = schedule_of(staleness=1)
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 1, 2)
    step(schedule, 1)
    again = schedule.failed("0.0", "data")
    assert again is not None and (again.version, again.deadline) == (1, 3)


def test_lost_groups_are_sampled_again_whether_they_ran_or_were_ready() -> None:
    schedule = schedule_of(staleness=1)
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 0, 1, 2)
    assert selected(schedule, 1) == [0, 1]
    tickets = schedule.lost(["0.0", "2.0", "3.0"])
    assert [ticket.name for ticket in tickets] == ["2.1", "3.1"], "taken rows are the trainer's"
    assert not schedule.ended("3.0", oldest_version=0), "the old attempt ends late"
    assert schedule.ready_names == () and schedule.counts().running == 2


def test_a_released_step_is_ready_again() -> None:
    schedule = schedule_of(staleness=1)
    admit(schedule, 0, 1)
    end(schedule, 0, 1)
    assert selected(schedule, 1) == [0, 1]
    schedule.released(1)
    assert schedule.counts().staleness == {} and schedule.ready_names == ("0.0", "1.0")
    assert selected(schedule, 1) == [0, 1]


def test_rows_that_waited_in_an_engine_have_the_time_of_their_oldest_token() -> None:
    schedule = schedule_of(staleness=1, order=ReadyFirst())
    admit(schedule, 0, 1, 2, 3)
    end(schedule, 1, 2)
    step(schedule, 1)
    admit(schedule, 4, 5)
    end(schedule, 5, 4, 3, 0, version=1)
    assert step(schedule, 2) == [4, 5], "0 and 3 joined under version 1, so step 3 may train them"
    assert step(schedule, 3) == [0, 3]


def test_an_engine_with_weights_older_than_it_said_is_refused() -> None:
    schedule = schedule_of(staleness=1)
    admit(schedule, 0, 1)
    end(schedule, 0, 1)
    step(schedule, 1)
    admit(schedule, 2)
    with pytest.raises(ValueError, match=r"group 2.0: expected 1 .. 1, got 0; an engine sampled from weights"):
        schedule.ended("2.0", oldest_version=0)


def test_names_and_steps_out_of_turn_are_refused() -> None:
    schedule = schedule_of()
    admit(schedule, 0, 1)
    end(schedule, 0)
    with pytest.raises(ValueError, match="group 0.0: expected a running group, got one that is ready"):
        schedule.ended("0.0", oldest_version=0)
    with pytest.raises(ValueError, match="group 9.0: expected an attempt that was admitted"):
        schedule.filtered("9.0")
    with pytest.raises(ValueError, match="step: expected 1, got 2"):
        schedule.select(2)
    with pytest.raises(ValueError, match="version of the engines: expected 0 .. 0, got 1"):
        schedule.updated(1)


def test_the_frontier_names_what_is_settled_above_the_first_open_prompt() -> None:
    schedule = schedule_of(staleness=2)
    admit(schedule, 0, 1, 2, 3, 4, 5)
    schedule.filtered("4.0")
    end(schedule, 1, 2)
    step(schedule, 1)
    assert schedule.frontier() == Frontier(next_ordinal=0, done=(1, 2, 4))
    end(schedule, 0)
    assert schedule.select(2) is None


def test_a_resumed_run_samples_exactly_the_rest() -> None:
    schedule = AsyncSchedule(AsyncLimits(num_groups=2, max_staleness=1, lookahead=1), OldestFirst(), validate=True)
    schedule.resume(Frontier(next_ordinal=2, done=(3, 5)), step=7)
    assert schedule.num_to_admit == 0 and schedule.num_updates == 7
    schedule.updated(7)
    assert [ordinal for ordinal in range(8) if not schedule.is_settled(ordinal)] == [2, 4, 6, 7]
    with pytest.raises(ValueError, match="neither settled nor alive, got 3"):
        admit(schedule, 3)
    admit(schedule, 2, 4, 6, 7)
    end(schedule, 2, 4, version=7)
    assert step(schedule, 8) == [2, 4]
    assert schedule.frontier() == Frontier(next_ordinal=6)
    with pytest.raises(ValueError, match="has not begun"):
        schedule.resume(Frontier(), step=0)


def test_groups_of_a_checkpoint_are_trained_by_the_deadline_of_their_weights() -> None:
    schedule = AsyncSchedule(AsyncLimits(num_groups=2, max_staleness=1, lookahead=1), ReadyFirst(), validate=True)
    schedule.resume(Frontier(next_ordinal=2), step=7)
    assert schedule.restore(SampledPrompt(3, 3), oldest_version=6).name == "3.0"
    schedule.updated(7)
    assert schedule.num_to_admit == 3 and schedule.counts().ready == 1
    with pytest.raises(ValueError, match="right after resume, got ordinal 4"):
        schedule.restore(SampledPrompt(4, 4), oldest_version=7)
    with pytest.raises(ValueError, match="neither settled nor alive, got 3"):
        admit(schedule, 2, 3)
    admit(schedule, 2, 4, 5)
    end(schedule, 2, 4, version=7)
    assert step(schedule, 8) == [2, 3] and schedule.counts().staleness == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_groups": 0}, "num_prompts_per_step: expected at least 1"),
        ({"lookahead": 2}, r"lookahead: expected 0 .. max_staleness=1, got 2"),
        ({"lookahead": 0, "overdue": "drop"}, "overdue: drop acts when enough other groups are ready"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncLimits(**{"num_groups": 1, "max_staleness": 1, "lookahead": 1, **settings})  # type: ignore[arg-type]


def test_in_order_refuses_to_drop() -> None:
    with pytest.raises(ValueError, match="drop has no effect with selection=in_order"):
        schedule_of(overdue="drop", order=InOrder())
