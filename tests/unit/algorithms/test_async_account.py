"""The account of an asynchronous run: idle shares, the side that binds, and what more staleness would bring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_rl.algorithms.async_account import (
    AsyncTimes,
    Pipeline,
    SimulatedRun,
    account_of,
    ideal_run,
    pipeline_bound_s,
    simulated_step_s,
)
from nemo_rl.algorithms.async_selection import AsyncLimits
from tests.helpers.async_faults import log_normal_rows

ONE = AsyncLimits(num_groups=8, max_staleness=1, lookahead=1)


def times_of(
    *, waited: float = 0.0, idle: float = 0.0, refit: float = 0.0, groups: tuple[float, ...] = (), places: int = 16
) -> AsyncTimes:
    """Times of a step of 10 s, of two engines."""
    return AsyncTimes(
        seconds=10.0,
        waited_s=waited,
        refit_s=refit,
        engine_idle_s=idle,
        num_engines=2,
        group_places=places,
        group_seconds=groups,
    )


def test_shares_are_those_of_all_engines() -> None:
    account = account_of(times_of(waited=4.0, idle=5.0), ONE)
    assert account.trainer_idle_share == 0.4 and account.engine_idle_share == 0.25 and account.gain_s is None


def test_the_pipeline_bound_is_the_slower_side_and_the_refit() -> None:
    times = times_of(waited=4.0, refit=1.0, groups=(10.0,) * 8, places=10)
    assert times.train_s == 5.0 and times.generation_s == 8.0 and pipeline_bound_s(times) == 9.0
    several = replace(times, seconds=40.0, num_steps=4, waited_s=16.0, refit_s=4.0, group_seconds=(10.0,) * 32)
    assert (several.train_s, several.generation_s, pipeline_bound_s(several)) == (5.0, 8.0, 9.0)


def test_the_trainer_binds_where_it_is_never_idle_and_staleness_brings_nothing() -> None:
    account = account_of(times_of(idle=10.0, groups=(1.0, 40.0)), ONE)
    assert account.gain_s == 0.0 and account.text() == "trainer idle 0 %, engines idle 50 %: the trainer binds"


def test_the_engines_bind_where_all_places_are_taken_and_staleness_brings_nothing() -> None:
    account = account_of(times_of(waited=7.0, groups=(10.0,) * 8, places=8), ONE)
    assert account.binds == "engines" and account.gain_s == 0.0


def test_the_gain_is_that_of_a_run_with_one_more_unit() -> None:
    rows = log_normal_rows(seed=2, group_size=1, sigma=1.2)

    def run_of(staleness: int) -> SimulatedRun:
        limits = AsyncLimits(num_groups=8, max_staleness=staleness, lookahead=staleness, max_num_steps=60)
        return ideal_run(Pipeline(limits=limits, row_seconds=rows, train_s=1.0, refit_s=0.1, places=64))

    now, then = run_of(1), run_of(2)
    times = AsyncTimes(
        seconds=now.seconds,
        num_steps=60,
        waited_s=now.trainer_idle_s,
        refit_s=60 * 0.1,
        engine_idle_s=now.engine_idle_s,
        group_places=64,
        group_seconds=[rows(ordinal)[0] for ordinal in range(480)],
    )
    assert times.train_s == pytest.approx(1.0)
    account, gain_s = account_of(times, ONE), (now.seconds - then.seconds) / 60
    assert account.binds == "staleness" and gain_s > 0.5
    assert account.gain_s == pytest.approx(gain_s, rel=0.5), "the first steps stand for all"
    assert "one more unit of staleness would save up to" in account.text()


def test_a_simulated_step_has_the_time_of_its_parts() -> None:
    times = times_of(waited=7.0, refit=1.0, groups=(4.0,))
    zero = AsyncLimits(num_groups=8, max_staleness=0, lookahead=0)
    assert simulated_step_s(times, zero) == pytest.approx(4.0 + 2.0 + 1.0)
