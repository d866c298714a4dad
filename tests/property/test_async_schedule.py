"""Whole asynchronous runs in virtual time under random faults: no row too old, none lost, none trained twice."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.async_account import Pipeline
from nemo_rl.algorithms.async_selection import AsyncLimits, InOrder, OldestFirst, Overdue, ReadyFirst, SelectionOrder
from tests.helpers.async_faults import Faults, FaultySimulation, log_normal_rows
from tests.helpers.case_selection import num_examples

ORDERS: dict[str, Callable[[], SelectionOrder]] = {
    "oldest_first": OldestFirst,
    "in_order": InOrder,
    "ready_first": ReadyFirst,
}
NUM_GROUPS = 10_000


@st.composite
def simulations(draw: st.DrawFn) -> FaultySimulation:
    """Small runs of any settings; shrinks to few steps, one engine and no faults."""
    staleness = draw(st.integers(0, 4))
    lookahead = draw(st.integers(0, staleness))
    order = draw(st.sampled_from(list(ORDERS)))
    can_drop = lookahead > 0 and order != "in_order"
    modes: list[Overdue] = ["wait", "drop"] if can_drop else ["wait"]
    overdue = draw(st.sampled_from(modes))
    limits = AsyncLimits(
        num_groups=draw(st.integers(1, 4)),
        max_staleness=staleness,
        lookahead=lookahead,
        overdue=overdue,
        max_num_steps=draw(st.integers(1, 12)),
    )
    size = draw(st.integers(1, 3))
    pipeline = Pipeline(
        limits=limits,
        row_seconds=log_normal_rows(seed=draw(st.integers(0, 99)), group_size=size),
        train_s=draw(st.sampled_from([0.0, 0.5, 3.0])),
        refit_s=draw(st.sampled_from([0.0, 0.3])),
        num_engines=draw(st.integers(1, 3)),
        places=size * draw(st.integers(1, 4)),
        is_rolling=draw(st.booleans()),
    )
    endless = draw(st.sampled_from([0.0, 0.2]))
    faults = Faults(
        seed=draw(st.integers(0, 99)),
        filtered_share=draw(st.sampled_from([0.0, 0.5])),
        failed_share=draw(st.sampled_from([0.0, 0.3])),
        endless_share=endless,
        group_limit_s=30.0 if endless else inf,
        worker_kill_s=draw(st.sampled_from([inf, 8.0])),
        engine_kill_s=draw(st.sampled_from([inf, 8.0])),
        trainer_kill_s=draw(st.sampled_from([inf, 40.0])),
        num_workers=draw(st.integers(1, 2)),
        save_period=draw(st.integers(1, 2)),
    )
    return FaultySimulation(pipeline, faults, order=ORDERS[order]())


@settings(max_examples=num_examples(600), deadline=None)
@given(simulations())
def test_runs_of_any_settings_train_every_prompt_once_within_the_bound(simulation: FaultySimulation) -> None:
    simulation.check(simulation.run())


@pytest.mark.parametrize(
    ("order", "overdue"),
    [
        ("oldest_first", "drop"),
        pytest.param("ready_first", "drop", marks=pytest.mark.full),
        pytest.param("in_order", "wait", marks=pytest.mark.full),
    ],
)
def test_ten_thousand_groups_with_every_fault_are_trained_once_within_the_bound(order: str, overdue: Overdue) -> None:
    limits = AsyncLimits(num_groups=16, max_staleness=3, lookahead=2, overdue=overdue, max_num_steps=NUM_GROUPS // 16)
    pipeline = Pipeline(
        limits=limits,
        row_seconds=log_normal_rows(seed=1, group_size=4),
        train_s=3.0,
        refit_s=0.2,
        num_engines=4,
        places=48,
        is_rolling=True,
    )
    faults = Faults(
        seed=5,
        filtered_share=0.2,
        failed_share=0.05,
        endless_share=0.005,
        group_limit_s=60.0,
        worker_kill_s=50.0,
        engine_kill_s=50.0,
        trainer_kill_s=150.0,
        max_kills=50,
        num_workers=4,
        save_period=5,
    )
    simulation = FaultySimulation(pipeline, faults, order=ORDERS[order]())
    run = simulation.run()
    simulation.check(run)
    assert len(simulation.trained_in) == NUM_GROUPS
    assert min(simulation.kills.values()) > 5, simulation.kills
