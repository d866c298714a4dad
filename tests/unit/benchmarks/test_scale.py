"""The benchmark of the driver at scale: it counts, and no count of a step grows as the number of ranks squared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import check_figures
from benchmarks.scale import HOLDS, Scale, ScaleSample, figures_of, main, measure, measure_ledger
from nemo_rl.config.generation import RefitTransport

ROWS = 512
MOST_CALLS_PER_RANK = 12
MOST_REFIT_CALLS_PER_ENGINE = 4


def step(ranks: int, *, mode: str = "sync", transport: RefitTransport = "broadcast") -> ScaleSample:
    """Return the second step of a run with a quarter as many engines as ranks."""
    scale = Scale(ranks=ranks, engines=ranks // 4, rows=ROWS, mode=mode, transport=transport)
    return measure(scale, repeats=1)[0]


@pytest.fixture(scope="module")
def steps() -> dict[int, ScaleSample]:
    return {ranks: step(ranks) for ranks in (8, 32)}


def test_calls_of_a_step_are_a_few_for_each_rank_and_engine(steps: dict[int, ScaleSample]) -> None:
    for ranks, found in steps.items():
        of_kind = {
            kind: sum(count for name, count in found.calls.items() if name.startswith(kind))
            for kind in ("policy", "engine", "rollout")
        }
        assert of_kind["policy"] <= MOST_CALLS_PER_RANK * ranks
        assert of_kind["engine"] <= MOST_REFIT_CALLS_PER_ENGINE * ranks // 4
        assert of_kind["rollout"] <= 3, "one call for all groups of the step"
        assert all(count % ranks == 0 for name, count in found.calls.items() if name.startswith("policy"))


def test_what_all_ranks_get_is_pickled_once(steps: dict[int, ScaleSample]) -> None:
    few, many = steps[8], steps[32]
    # Log-probabilities and training have a message for each shard; the rest is the same for all ranks and engines.
    assert many.num_messages - few.num_messages == 2 * (32 - 8)


def test_the_driver_asks_the_ledger_as_often_whatever_the_number_of_ranks(steps: dict[int, ScaleSample]) -> None:
    assert steps[8].ledger_calls == steps[32].ledger_calls <= 8


@pytest.mark.parametrize(
    ("mode", "transport"), [("sync", "broadcast"), ("sync", "payload"), ("async", "payload"), ("async", "broadcast")]
)
def test_a_refit_asks_an_engine_at_most_four_times(mode: str, transport: RefitTransport) -> None:
    found = step(16, mode=mode, transport=transport)
    assert 0 < found.refit_calls["engine"] <= MOST_REFIT_CALLS_PER_ENGINE * 4


def test_a_leader_asks_the_ledger_three_times_in_a_step_however_many_there_are() -> None:
    for leaders in (4, 16):
        found = measure_ledger(ROWS, leaders)
        assert found.calls_per_leader == 3.0, "where its rows lie, for each of two passes, and what it has written"
        assert found.calls["clear"] == 1


def test_every_bound_can_be_missed(steps: dict[int, ScaleSample]) -> None:
    figures = figures_of(list(steps.values()), submit=100.0)
    assert figures["with_calls_s_sync_32"] > figures["own_s_sync_32"] > 0
    bad = {name: 0.0 if hold.most is None else 99.0 for name, hold in HOLDS.items()}
    assert [line.split(":")[0] for line in check_figures(bad, HOLDS)] == list(HOLDS)


@pytest.mark.slow
def test_a_small_run_writes_every_part(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    main(["--quick", "--json", str(path)])
    report = json.loads(path.read_text())
    assert {"versions", "commit", "load_before", "load_after", "loop_s", "ledgers"} < report.keys()
    assert report["figures"]["submit_us"] > 0 and report["figures"]["peak_gib"] > 0
    for each in report["samples"]:
        assert {"rollout", "score", "prev_logprobs", "train", "refit", "metrics"} <= each["parts"].keys()
