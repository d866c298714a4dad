"""Layouts of two and four ranks over two stores: the same rows, metrics, weights and responses, to the last bit.

A job takes two steps: log-probabilities, the driver's columns, training. The second step trains on responses sampled
from the weights of the first. Rank 0 plays the driver. The noop store reaches no other process, so there the first rank
of each data-parallel shard has a data plane of its own with all rows, and plays the driver of its shard.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_rl.algorithms.estimators import OptimalTokenBaseline
from nemo_rl.algorithms.token_work import LOGPROB_ERROR, TokenStatistics, TokenWork
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.batch_meta import shard_meta_for_dp
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import plan_packs, plan_padded
from nemo_rl.distributed.worker_pass import RowPass
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.policy.interfaces import SQUARED_PROBS, TOKEN_ADVANTAGES, TrainResult
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from tests.helpers.case_selection import cases_of_this_run, params
from tests.helpers.gloo import run_ranks
from tests.helpers.replica_groups import GIB, LOSS, ROWS, TRAINED, digest, rows, shared_cluster, start
from tests.helpers.tiny_model import tiny_policy, write_tiny_folder

STORES = ("noop", "transfer_queue")
NUM_STEPS = 2
PARTITION = "train"
PROMPTS = tuple(tuple(range(20 + i, 24 + i)) for i in range(ROWS // 2))
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=12, stop_token_ids=(2,))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The number of ranks, their parallel sizes, and the way their microbatches are formed."""

    ranks: int
    tp: int = 1
    cp: int = 1
    sp: bool = False
    packed: bool = False

    def policy(self, folder: str) -> PolicyConfig:
        sizes = DTensorConfig(tensor_parallel_size=self.tp, context_parallel_size=self.cp, sequence_parallel=self.sp)
        return tiny_policy(Path(folder), dtensor_cfg=sizes)


LAYOUTS = {
    "dp2 x tp2": Layout(ranks=4, tp=2),
    "tp2 x cp2": Layout(ranks=4, tp=2, cp=2),
    "tp2, sequence parallel": Layout(ranks=2, tp=2, sp=True),
    "dp2 x tp2, sequence parallel, packed": Layout(ranks=4, tp=2, sp=True, packed=True),
}
LEADERS = (0, 2)
"""First ranks of the shards; they alone have clients."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The results of one rank in one step."""

    fetched: dict[str, str]
    """Digest of each column that it trains on."""
    logprobs: dict[str, list[float]]
    """Stored log-probabilities of the rows in this rank's data plane; empty where it plays no driver."""
    errors: dict[str, float]
    """Log-probability errors of the rows that this rank has measured; empty on all but one of a shard."""
    result: TrainResult
    """Losses, gradient norms and metrics of each microbatch."""
    trained: str
    """Digest of the full weights after training."""
    responses: tuple[list[int], list[int], list[float]]
    """Lengths, tokens and log-probabilities of what these weights say to the prompts."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank with its worker, layout and store."""

    worker: TQWorker
    layout: Layout
    store: str
    client: DataPlaneClient | None
    """The driver's, on ranks that play one."""

    @property
    def shard(self) -> int:
        return self.worker.layout.coordinates(self.worker.rank).dp

    @property
    def home(self) -> int:
        """The rank that plays the driver for this one."""
        return self.home_of(self.shard)

    def home_of(self, shard: int) -> int:
        return self.worker.layout.replica(shard)[0] if self.store == "noop" else 0

    def shards(self, meta: KVBatchMeta) -> list[KVBatchMeta]:
        """Split the rows over the data-parallel shards, each with its microbatches."""
        form, own = plan_packs if self.layout.packed else plan_padded, self.worker.layout
        plan = form(meta.sequence_lengths, capacity=64, dp_world=own.dp, pad_multiple=own.length_multiple)
        return shard_meta_for_dp(meta, plan)


def everyone(value: object) -> list:
    """(collective) The values of all ranks of the job."""
    box: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


@contextmanager
def joined(worker: TQWorker, layout: Layout, store: str, client: DataPlaneClient | None) -> Iterator[Job]:
    """(collective) A job whose workers read and write through the data planes of its drivers."""
    job = Job(worker=worker, layout=layout, store=store, client=None)
    if worker.rank == job.home:
        job = replace(job, client=client)
    address = everyone(job.client.address if job.client is not None else None)[job.home]
    worker.setup_data_plane(address, cache_bytes=GIB)
    yield job
    assert job.client is None or job.client.stats()["live_rows"] == 0
    worker.close_data_plane()
    # A driver's client outlives those of its workers.
    dist.barrier()


def one_step(
    job: Job, batch: BatchedDataDict, engine: TorchEngine, *, number: int
) -> tuple[StepReport, GenerationOutput]:
    """(collective) Rows through the data plane to new weights, and what these say to the prompts."""
    worker, client = job.worker, job.client
    keys = [f"s{number}u{i}_g0" for i in range(ROWS)]
    meta = everyone(kv_first_write(client, batch, keys, partition_id=PARTITION) if client else None)[job.home]
    worker.prepare_for_lp_inference()
    written = everyone(worker.get_logprobs_presharded(job.shards(meta)[job.shard], with_squares=True))
    meta = meta.with_written(worker.layout.one_per_shard(written))
    logprobs: dict[str, list[float]] = {}
    for shard, part in enumerate(job.shards(meta)):
        if client is not None and job.home_of(shard) == worker.rank:
            column = read_columns(client, part, ("prev_logprobs",)).tensor("prev_logprobs")
            logprobs |= dict(zip(part.keys, column.tolist(), strict=True))
    columns = {"sample_mask": torch.arange(ROWS) / 8.0, "advantages": torch.arange(ROWS) - 3.5}
    meta = everyone(write_columns(client, meta, columns) if client else None)[job.home]
    mine = job.shards(meta)[job.shard]
    done = everyone(worker.map_rows(mine, token_work(len(mine.keys)), stage=RowPass.ADVANTAGES).meta)
    meta = meta.with_written(worker.layout.one_per_shard(done))
    mine = job.shards(meta)[job.shard]
    measured = worker.map_rows(mine, TokenStatistics(error_threshold=2.0), stage=RowPass.MEASURE).numbers
    fetched = worker.fetch(mine, (*TRAINED, TOKEN_ADVANTAGES))
    assert bool(fetched.tensor(TOKEN_ADVANTAGES).any())
    worker.prepare_for_training()
    result = worker.train_presharded(mine, LOSS, fields=TRAINED)
    worker.end_step()
    if client is not None:
        client.kv_clear(None, PARTITION)
    weights = [(name, weight.clone()) for name, weight in worker.export_weights()]
    engine.update_weights(weights, version=number)
    seeds = tuple(range(number * ROWS, (number + 1) * ROWS))
    sampled = engine.generate(GenerationRequest(prompt_ids=PROMPTS, seeds=seeds, sampling=SAMPLING))
    report = StepReport(
        fetched={name: digest(column) for name, column in fetched.items()},
        logprobs=logprobs,
        errors=dict(zip(mine.keys, measured[LOGPROB_ERROR].tolist(), strict=True)) if measured else {},
        result=result,
        trained=digest(torch.cat([weight.flatten() for _, weight in weights])),
        responses=(sampled.lengths.tolist(), sampled.token_ids.tolist(), sampled.logprobs.tolist()),
    )
    return report, sampled


def token_work(num_rows: int) -> TokenWork:
    """Rows of a shard as groups of two, whichever they are."""
    rewards = torch.arange(num_rows) / 4.0
    return TokenWork(
        estimator=OptimalTokenBaseline(config=GRPOConfig()),
        kl=None,
        rewards=rewards,
        scored=rewards,
        groups=torch.arange(num_rows) // 2,
        is_trained_group=torch.ones(num_rows, dtype=torch.bool),
    )


def rows_of(sampled: GenerationOutput) -> BatchedDataDict:
    """Prompts and responses as a batch."""
    prompts = torch.tensor(PROMPTS, dtype=torch.int32).repeat_interleave(ROWS // len(PROMPTS), dim=0)
    lengths, width = sampled.lengths + prompts.shape[1], int(sampled.lengths.max()) + prompts.shape[1]
    is_response = (torch.arange(width) >= prompts.shape[1]) & (torch.arange(width) < lengths[:, None])
    ids, logprobs = torch.zeros(ROWS, width, dtype=torch.int32), torch.zeros(ROWS, width)
    ids[:, : prompts.shape[1]] = prompts
    ids[is_response], logprobs[is_response] = sampled.token_ids, sampled.logprobs
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths.to(torch.int32),
            "token_mask": is_response,
            "sample_mask": torch.ones(ROWS),
            "generation_logprobs": logprobs,
        }
    )


def steps_of_every_job(
    rank: int, folder: str, names: list[str], ports: list[int]
) -> dict[tuple[str, str], list[StepReport]]:
    """Return the reports by layout of `names` and store; each has a fresh job, in the same processes.

    Ranks that a layout leaves out sit it out.
    """
    left, reports = iter(ports), {}
    with shared_cluster(rank, joins=rank in LEADERS):
        destroy_process_group()
        for store in STORES:
            with opened(rank, store) as client:
                for name in names:
                    port, layout = next(left), LAYOUTS[name]
                    if rank < layout.ranks:
                        reports[name, store] = steps_of_a_job(rank, folder, port, layout, store, client)
    return reports


@contextmanager
def opened(rank: int, store: str) -> Iterator[DataPlaneClient | None]:
    """Open the data plane of a rank that plays a driver; the others wait where the first job meets."""
    if rank not in (LEADERS if store == "noop" else LEADERS[:1]):
        yield None
        return
    client = build_data_plane_client(DataPlaneConfig(impl=store), run_id=f"shard{uuid.uuid4().hex[:8]}")
    client.register_partition(PARTITION, (*TRAINED, SQUARED_PROBS, TOKEN_ADVANTAGES), ROWS, ["train"])
    yield client
    client.close()


def steps_of_a_job(
    rank: int, folder: str, port: int, layout: Layout, store: str, client: DataPlaneClient | None
) -> list[StepReport]:
    policy = layout.policy(folder)
    worker = start(rank, folder, port, policy=policy, world_size=layout.ranks)
    engine, batch, reports = TorchEngine.from_config(policy), rows(), []
    with joined(worker, layout, store, client) as job:
        for number in range(NUM_STEPS):
            report, sampled = one_step(job, batch, engine, number=number)
            reports.append(report)
            batch = rows_of(sampled)
    worker.shutdown()
    return reports


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
DEFAULT = ("tp2 x cp2", "dp2 x tp2, sequence parallel, packed")
"""The layouts of `make test`: each axis, and both ways to form microbatches."""
Reports = list[dict[tuple[str, str], list[StepReport]]]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    folder = str(write_tiny_folder(tmp_path_factory.mktemp("model")))
    names = cases_of_this_run(request, LAYOUTS, DEFAULT)
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
    """Check that the comparison of the stores shows something."""
    for store in STORES:
        one, two = reports[0][layout, store]
        assert one.trained != two.trained and one.result.grad_norm[0] > 0 and two.result.grad_norm[0] > 0
        assert one.responses != two.responses
        assert len({report[layout, store][1].trained for report in reports[: LAYOUTS[layout].ranks]}) == 1


@pytest.mark.parametrize("layout", params(LAYOUTS, DEFAULT))
def test_of_each_shard_one_rank_measures_its_rows(reports: Reports, layout: str) -> None:
    """Only the rank that writes measures, from the log-probabilities that the driver reads back."""
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
