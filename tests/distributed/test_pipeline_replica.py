"""Two ranks on one shard in several layouts, a pipeline among them: the same bits from every store, one fate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from tests.helpers.gloo import run_ranks
from tests.helpers.replica_groups import (
    ROWS,
    Plane,
    StepReport,
    in_the_fetch,
    in_the_loss,
    one_step,
    planted,
    rows,
    shared_cluster,
    start,
)
from tests.helpers.tiny_model import tiny_policy, tiny_worker, write_tiny_folder

PIPELINE = "megatron pp2"


def megatron(folder: str, **sizes: int) -> PolicyConfig:
    return tiny_policy(
        folder, dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=MegatronConfig(enabled=True, **sizes)
    )


LAYOUTS: dict[str, Callable[[str], PolicyConfig]] = {
    "megatron tp2": lambda folder: megatron(folder, tensor_model_parallel_size=2),
    PIPELINE: lambda folder: megatron(folder, pipeline_model_parallel_size=2),
    "dtensor cp2": lambda folder: tiny_policy(folder, dtensor_cfg=DTensorConfig(context_parallel_size=2)),
}
STORES = {"megatron tp2": ("noop", "shm"), PIPELINE: ("shm", "transfer_queue"), "dtensor cp2": ("noop", "shm")}
"""Rank 1 writes the pipeline's results, and noop lives in the process of rank 0; `test_replica_group` has DTensor over
TransferQueue."""


def in_the_first_stage(worker: TQWorker, meta: KVBatchMeta) -> None:
    """Rank 0 raises in its layer; rank 1 waits for its activations."""
    fail_in_a_layer(worker, rank=0)
    worker.get_logprobs_presharded(meta)


def in_the_last_stage(worker: TQWorker, meta: KVBatchMeta) -> None:
    """Rank 1 raises in its layer; rank 0 is through with the pass and waits for the sums."""
    fail_in_a_layer(worker, rank=1)
    worker.get_logprobs_presharded(meta)


def fail_in_a_layer(worker: TQWorker, *, rank: int) -> None:
    def fail(*_: object) -> None:
        raise ValueError(f"planted in a layer of rank {rank}")

    if worker.rank == rank:
        worker.engine.model.module.decoder.layers[0].mlp.register_forward_pre_hook(fail)


PLANTS: dict[str, Callable[[TQWorker, KVBatchMeta], None]] = {
    plant.__name__: plant for plant in (in_the_fetch, in_the_first_stage, in_the_last_stage, in_the_loss)
}
NUM_JOBS = sum(len(stores) for stores in STORES.values()) + len(PLANTS)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The reports of one rank."""

    steps: dict[str, dict[str, StepReport]]
    """Step reports by layout and store."""
    failures: dict[str, tuple[str, str, float]]
    """Kind, text and seconds of what this rank raised, in the pipeline."""


def run_all_jobs(rank: int, folder: str, ports: list[int]) -> RankReport:
    """Run a fresh job for each step and each failure, in the same two processes."""
    left = iter(ports)
    steps: dict[str, dict[str, StepReport]] = {}
    with shared_cluster(rank):
        destroy_process_group()
        for name, policy in LAYOUTS.items():
            for store in STORES[name]:
                worker = start(rank, folder, next(left), policy=policy(folder))
                steps.setdefault(name, {})[store] = one_step(worker, Plane(store))
                worker.shutdown()
    policy = LAYOUTS[PIPELINE](folder)
    failures = {
        name: planted(rank, folder, next(left), plant, policy=policy, plane=Plane("shm"))
        for name, plant in PLANTS.items()
    }
    return RankReport(steps=steps, failures=failures)


LIMIT_S, SLACK = 5.0, 6
"""The contract of the abort, and the time that a busy machine may take."""
LAST_STAGE = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reports(folder) -> list[RankReport]:
    return run_ranks(2, run_all_jobs, folder, further_jobs=NUM_JOBS, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_and_trained_weights_are_the_same_bits_over_both_stores(reports, layout):
    for report in reports:
        first, second = (report.steps[layout][store] for store in STORES[layout])
        assert first.logprobs == second.logprobs
        assert first.trained == second.trained
    assert len(reports[0].steps[layout][STORES[layout][1]].logprobs) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_writes_what_one_process_computes(reports, folder, layout):
    writer = LAST_STAGE if layout == PIPELINE else 0
    for store in STORES[layout]:
        puts = [report.steps[layout][store].puts for report in reports]
        assert [count or 0 for count in puts] == [int(rank == writer) for rank in (0, 1)]
    worker = tiny_worker(tiny_policy(folder))
    expected = worker.get_logprobs(rows(), mbs=ROWS)
    worker.shutdown()
    found = reports[0].steps[layout][STORES[layout][1]].logprobs
    for i, row in enumerate(expected):
        got = torch.tensor(found[f"u{i}_g0"])
        torch.testing.assert_close(got[: len(row)], row[: len(got)], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rank_that_writes_looks_at_tokens_without_the_others(reports, layout):
    writer = LAST_STAGE if layout == PIPELINE else 0
    for store in STORES[layout]:
        errors = [report.steps[layout][store].errors for report in reports]
        assert [len(part) for part in errors] == [ROWS if rank == writer else 0 for rank in (0, 1)]
        assert errors[writer] == reports[writer].steps[layout][STORES[layout][0]].errors, "the same bits"
        assert min(errors[writer]) >= 1.0 < max(errors[writer])


TEXTS = {
    "in_the_fetch": (0, "KeysNotFound", "nobody_g0"),
    "in_the_first_stage": (0, "ValueError", "planted in a layer of rank 0"),
    "in_the_last_stage": (1, "ValueError", "planted in a layer of rank 1"),
    "in_the_loss": (1, "ValueError", "planted in the loss"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_an_error_in_one_pipeline_stage_ends_the_step_on_both_with_its_text(reports, plant):
    origin, kind, text = TEXTS[plant]
    for rank, report in enumerate(reports):
        got_kind, got_text, seconds = report.failures[plant]
        assert text in got_text
        assert seconds < LIMIT_S * SLACK
        if rank == origin:
            assert got_kind == kind
        else:
            assert got_kind == "WorkerError" and got_text.startswith(f"rank {origin}, stage ")
            assert f": {kind}: " in got_text
