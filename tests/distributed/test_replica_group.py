"""Two tensor-parallel ranks on one shard: the same rows from every store, one write, one fate."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.gloo import run_ranks
from tests.helpers.replica_groups import PLANES, PLANTS, ROWS, RankReport, StepReport, rows, run_all_jobs
from tests.helpers.tiny_model import tiny_policy, tiny_worker, write_tiny_folder

LIMIT_S, SLACK = 5.0, 6
"""The contract of the abort, and the time that a busy machine may take."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reports(folder) -> list[RankReport]:
    return run_ranks(2, run_all_jobs, folder, further_jobs=len(PLANTS) + 1, timeout_s=240)


@pytest.fixture(scope="module")
def steps(reports) -> list[dict[str, StepReport]]:
    return [report.steps for report in reports]


@pytest.mark.slow
def test_every_store_and_fetch_policy_gives_both_ranks_the_same_bits(steps):
    expected = steps[0]["noop"].fetched
    assert "input_ids" in expected
    for report in steps:
        assert {name: step.fetched for name, step in report.items()} == dict.fromkeys(PLANES, expected)


@pytest.mark.slow
def test_results_are_written_once_and_are_those_of_one_process(steps, folder):
    leader, follower = steps
    assert {name: step.puts for name, step in leader.items()} == dict.fromkeys(PLANES, 1)
    # A follower has a client only where every rank reads for itself.
    assert {step.puts for name, step in follower.items() if name != "shm, each for itself"} == {None}
    assert follower["shm, each for itself"].puts == 0
    first = leader["noop"].logprobs
    assert all(step.logprobs == first for step in leader.values()), "one bit differs between two stores"
    worker = tiny_worker(tiny_policy(folder))
    expected = worker.get_logprobs(rows(), mbs=ROWS)
    worker.shutdown()
    for i, row in enumerate(expected):
        got = torch.tensor(first[f"u{i}_g0"])
        torch.testing.assert_close(got[: len(row)], row[: len(got)], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_rewritten_sample_mask_is_used_as_rewritten_and_only_it_moves_again(steps):
    for rank, report in enumerate(steps):
        for name, step in report.items():
            assert sorted(step.sample_mask) == [i / 8 for i in range(ROWS)], name
            assert step.sample_mask == report["noop"].sample_mask
            if step.puts is not None:
                keeps = PLANES[name].cache_bytes > 0
                assert ("input_ids" in step.refetched) == (not keeps), (rank, name)
                assert "sample_mask" in step.refetched


TEXTS = {
    "in_the_fetch": (0, "KeysNotFound", "nobody_g0"),
    "between_collectives": (1, "ValueError", "planted in the forward pass"),
    "in_the_loss": (1, "ValueError", "planted in the loss"),
    "in_the_write_back": (0, "SchemaMismatch", "prev_logprobs"),
    "in_the_plan": (None, "SchemaMismatch", "pack plan of rank 1: its part changed since the driver sealed it"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", TEXTS)
def test_an_error_anywhere_in_a_step_ends_it_on_both_ranks_with_its_text(reports, plant):
    origin, kind, text = TEXTS[plant]
    for rank, report in enumerate(reports):
        got_kind, got_text, seconds = report.failures[plant]
        assert text in got_text
        assert seconds < LIMIT_S * SLACK
        if rank == origin:
            assert got_kind == kind
        elif origin is not None:
            assert got_kind == "WorkerError" and got_text.startswith(f"rank {origin}, stage ")
            assert f": {kind}: " in got_text
