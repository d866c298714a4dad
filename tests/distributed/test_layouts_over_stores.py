"""Layouts of two and four ranks over two stores: the same rows, metrics, weights and responses, to the last bit."""

from __future__ import annotations

import pytest

from nemo_rl.distributed.layout import ParallelLayout
from tests.helpers.gloo import run_ranks
from tests.helpers.replica_groups import ROWS
from tests.helpers.shard_cases import LAYOUTS, NUM_STEPS, STORES, StepReport, steps_of_every_job
from tests.helpers.tables import of_this_run, params
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
DEFAULT = ("tp2 x cp2", "dp2 x tp2, sequence parallel, packed")
"""Of `make test`: each axis, and both ways to form microbatches."""
Reports = list[dict[tuple[str, str], list[StepReport]]]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    folder = str(write_tiny_folder(tmp_path_factory.mktemp("model")))
    names = of_this_run(request, LAYOUTS, DEFAULT)
    num_jobs = len(STORES) * len(names)
    return run_ranks(4, steps_of_every_job, folder, names, further_jobs=num_jobs, timeout_s=300)  # type: ignore[return-value]


@pytest.mark.parametrize("layout", params(LAYOUTS, DEFAULT))
def test_a_layout_gives_the_same_bits_over_both_stores(reports: Reports, layout: str) -> None:
    stored: list[dict[str, list[float]]] = [{}, {}]
    for report in reports[: LAYOUTS[layout].ranks]:
        for first, second in zip(*(report[layout, store] for store in STORES), strict=True):
            assert first.fetched == second.fetched
            assert first.errors == second.errors
            assert first.result == second.result, "losses, gradient norms, metrics"
            assert first.trained == second.trained
            assert first.responses == second.responses
            stored[0] |= first.logprobs
            stored[1] |= second.logprobs
    assert len(stored[0]) == ROWS * NUM_STEPS and stored[0] == stored[1]


@pytest.mark.parametrize("layout", params(LAYOUTS, DEFAULT))
def test_every_step_changes_the_weights_and_what_they_say(reports: Reports, layout: str) -> None:
    """Or the comparison would show little."""
    for store in STORES:
        one, two = reports[0][layout, store]
        assert one.trained != two.trained and one.result.grad_norm[0] > 0 and two.result.grad_norm[0] > 0
        assert one.responses != two.responses
        assert len({report[layout, store][1].trained for report in reports[: LAYOUTS[layout].ranks]}) == 1


@pytest.mark.parametrize("layout", params(LAYOUTS, DEFAULT))
def test_of_each_shard_one_rank_measures_its_rows(reports: Reports, layout: str) -> None:
    """The rank that writes; its numbers are those of the log-probabilities that the driver reads back."""
    sizes = LAYOUTS[layout]
    own = ParallelLayout.of(sizes.ranks, tp=sizes.tp, cp=sizes.cp, sequence_parallel=sizes.sp)
    for step in range(NUM_STEPS):
        for rank, report in enumerate(reports[: sizes.ranks]):
            errors = report[layout, STORES[1]][step].errors
            assert bool(errors) == own.is_writer(rank)
            assert all(1.0 <= error < 1e4 for error in errors.values())
        assert sum(len(report[layout, STORES[1]][step].errors) for report in reports[: sizes.ranks]) == ROWS
    # The second step has rows that the same weights have sampled.
    sampled = [error for report in reports[: sizes.ranks] for error in report[layout, STORES[1]][1].errors.values()]
    assert max(sampled) < 1.001 < max(reports[0][layout, STORES[1]][0].errors.values())
