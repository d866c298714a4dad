"""Two ranks on one shard: each gets the routes of its layers and tokens, and what ranks record is one column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.policy import PolicyConfig, RouterReplayConfig
from nemo_rl.data_plane.batch_meta import shard_meta_for_dp
from nemo_rl.data_plane.chunks.ragged import to_nested_by_length
from nemo_rl.data_plane.column_io import kv_first_write, write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.schema import LP_SEED_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.distributed.packing import plan_packs
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.hf.loading import load_causal_lm, load_model_config
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.models.policy.routes.slices import RouteShard, RouteSlices, ShardRoutes
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.routes.columns import decode_routes, encode_routes
from tests.helpers.gloo import run_ranks
from tests.helpers.megatron_models import shape_of, write_experts
from tests.helpers.parallel_layouts import forced_routes
from tests.helpers.replica_groups import LOSS, ROWS, TRAINED, Plane, digest, planted, rows, share, start
from tests.helpers.tiny_model import tiny_policy

KEYS = [f"u{i}_g0" for i in range(ROWS)]
IDS = ("routed_experts", "routed_experts_missing")


def megatron(folder: str, **sizes: object) -> PolicyConfig:
    section = MegatronConfig(enabled=True, **sizes)
    return tiny_policy(folder, dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=section)


LAYOUTS: dict[str, Callable[[str], PolicyConfig]] = {
    "megatron tp2 sp": lambda folder: megatron(folder, tensor_model_parallel_size=2, sequence_parallel=True),
    "megatron pp2": lambda folder: megatron(folder, pipeline_model_parallel_size=2),
    "megatron cp2": lambda folder: megatron(folder, context_parallel_size=2),
    "dtensor cp2": lambda folder: tiny_policy(folder, dtensor_cfg=DTensorConfig(context_parallel_size=2)),
}


@dataclass(frozen=True, kw_only=True)
class RouteReport:
    """The results of one rank in one layout."""

    received: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of what this rank got for the log-probability pass."""
    layers: tuple[int, ...]
    logprobs: Mapping[str, str]
    """Digest of this rank's log-probabilities: handed whole rows, from the store, without replay."""
    losses: Mapping[str, float]
    """Losses of this rank: handed whole rows, and from the store."""
    written: list[list[list[list[int]]]] | None
    """Routes that the workers recorded, `[N][tokens][L][K]`; read by rank 0 only."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The reports of one rank."""

    layouts: dict[str, RouteReport]
    failures: dict[str, tuple[str, str, float]]
    """Kind, text and seconds of what this rank raised, in the pipeline."""


def policy_of(folder: str, layout: str, **replay: object) -> PolicyConfig:
    policy = LAYOUTS[layout](folder)
    return policy.model_copy(update={"router_replay": RouterReplayConfig(enabled=True, **replay)})


def encoded(folder: str, *, bit_packed: bool, with_digests: bool = False) -> dict[str, torch.Tensor]:
    """Return the forced routes as a rollout writes them."""
    routes = to_nested_by_length(forced_routes(load_model_config(folder)), rows().tensor("input_lengths"))
    return encode_routes(routes, shape_of(folder), bit_packed=bit_packed, with_digests=with_digests)


@contextmanager
def opened(
    worker: TQWorker, routes: Mapping[str, torch.Tensor], *, more: Sequence[str] = ()
) -> Iterator[tuple[DataPlaneClient | None, KVBatchMeta]]:
    """Rank 0 plays the driver: it owns the store, writes the rows and plans."""
    with ExitStack() as stack:
        client, made = None, None
        if worker.rank == 0:
            config = DataPlaneConfig(impl="shm", ledger_host="socket")
            client = build_data_plane_client(config, run_id="routes", role="owner")
            stack.callback(client.close)
            client.register_partition("train", [*TRAINED, *routes, *more], ROWS, ["train"])
            batch = rows()
            batch.update(routes)
            meta = kv_first_write(client, batch, KEYS, partition_id="train")
            made = client.address, planned(meta, worker)
        address, meta = share(made)
        worker.setup_data_plane(address, cache_bytes=1 << 30)
        stack.callback(worker.close_data_plane)
        yield client, meta
        # Rank 0 ends the store only when the other is through with it.
        share(None)


def planned(meta: KVBatchMeta, worker: TQWorker) -> KVBatchMeta:
    multiple = worker.layout.length_multiple
    plan = plan_packs(meta.sequence_lengths, capacity=40, dp_world=1, pad_multiple=multiple)
    return shard_meta_for_dp(meta, plan)[0]


def in_order_of(meta: KVBatchMeta, batch: Mapping[str, object]) -> BatchedDataDict:
    """Return the rows in the order of the shard, which is that of its microbatches."""
    return BatchedDataDict(batch).select_indices([KEYS.index(key) for key in meta.keys])


def of_tokens(values_NT: torch.Tensor, lengths: Sequence[int]) -> str:
    """Digest without the padding, whose width differs."""
    return digest(torch.cat([row[:length] for row, length in zip(values_NT, lengths, strict=True)]))


def replayed(worker: TQWorker, folder: str, *, bit_packed: bool) -> RouteReport:
    """(collective) Routes from the store, and the same handed over as whole rows."""
    batch = rows()
    columns = {"prev_logprobs": torch.full((ROWS, 24), -3.0), "advantages": torch.arange(ROWS) - 3.5}
    batch.update(columns | {"routed_experts": forced_routes(load_model_config(folder))})
    kept: dict[str, str] = {}
    with opened(worker, encoded(folder, bit_packed=bit_packed, with_digests=True)) as (client, first):
        meta = share(write_columns(client, first, in_order_of(first, columns)) if client else None)
        batch = in_order_of(meta, batch)
        lengths = batch.tensor("input_lengths").tolist()
        kept["whole"] = of_tokens(worker.get_logprobs(batch, plan=meta.pack), lengths)
        kept["free"] = of_tokens(worker.get_logprobs(batch, plan=meta.pack, replay=False), lengths)
        losses = {"whole": worker.train(batch, LOSS, plan=meta.pack, eval_mode=True).loss[0]}
        slices = worker._routes_of(WorkerPass.PREV_LOGPROBS, meta, worker.fetch(meta, LP_SEED_FIELDS))
        honest, worker.write_back = (
            worker.write_back,
            lambda _, found: kept.update(store=of_tokens(*found.values(), lengths)),
        )
        worker.router_replay_metrics()
        worker.get_logprobs_presharded(meta)
        metrics = {name: value.value for name, value in worker.router_replay_metrics().items()}
        worker.write_back = honest
        losses["store"] = worker.train_presharded(meta, LOSS, fields=TRAINED, eval_mode=True).loss[0]
    return RouteReport(
        received={name: (tuple(part.shape), str(part.dtype)) for name, part in slices.fields.items()},
        layers=worker.replay.routers.replayer.layers,
        logprobs=kept,
        losses=losses,
        written=None,
        metrics=metrics,
    )


def recorded(worker: TQWorker, folder: str) -> list[list[list[list[int]]]] | None:
    """(collective) What the workers write back as the column; read by rank 0."""
    with opened(worker, {}, more=IDS) as (client, meta):
        done = share(worker.get_logprobs_presharded(meta), source=worker.layout.writer(0))
        # What was written is replayed.
        worker._routes_of(WorkerPass.TRAIN, done, worker.fetch(done, LP_SEED_FIELDS))
        if client is None:
            return None
        stored = client.get_data(done, IDS)
        routes = decode_routes({name: stored[name] for name in IDS}, shape_of(folder)).unbind()
        of_key = dict(zip(done.keys, routes, strict=True))
        return [of_key[key].tolist() for key in KEYS]


# Planted failures, each in its own job.


def no_routes(worker: TQWorker, meta: KVBatchMeta) -> None:
    """Read routes that the rollout has not written."""
    worker.get_logprobs_presharded(meta)


def other_routes(worker: TQWorker, meta: KVBatchMeta) -> None:
    """Rank 1 gets the routes of one token for another; digests tell."""
    honest = ShardRoutes.cut

    def swapped(whole: ShardRoutes, shard: RouteShard, *args: object) -> RouteSlices:
        found = honest(whole, shard, *args)
        if shard.layer_index[0] > 0:
            found.ids[[3, 4]] = found.ids[[4, 3]]
        return found

    folder = worker.config.model_name
    with (
        patch.object(ShardRoutes, "cut", swapped),
        opened(worker, encoded(folder, bit_packed=False, with_digests=True)) as (_, own),
    ):
        worker.get_logprobs_presharded(own)


PLANTS: dict[str, Callable[[TQWorker, KVBatchMeta], None]] = {
    plant.__name__: plant for plant in (no_routes, other_routes)
}
NUM_JOBS = 2 * len(LAYOUTS) + len(PLANTS)


def run_all_jobs(rank: int, folder: str, ports: list[int]) -> RankReport:
    """Run a fresh job for each part, in the same two processes."""
    left = iter(ports)
    destroy_process_group()
    layouts: dict[str, RouteReport] = {}
    for name in LAYOUTS:
        worker = start(rank, folder, next(left), policy=policy_of(folder, name))
        report = replayed(worker, folder, bit_packed=name == "megatron cp2")
        worker.shutdown()
        worker = start(rank, folder, next(left), policy=policy_of(folder, name, source="prev_logprobs"))
        layouts[name] = replace(report, written=recorded(worker, folder))
        worker.shutdown()
    policy = policy_of(folder, "megatron pp2")
    failures = {
        name: planted(rank, folder, next(left), plant, policy=policy, plane=Plane("shm"))
        for name, plant in PLANTS.items()
    }
    return RankReport(layouts=layouts, failures=failures)


pytestmark = pytest.mark.slow

LIMIT_S, SLACK = 5.0, 6
"""The contract of the abort, and the time that a busy machine may take."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[RankReport]:
    return run_ranks(2, run_all_jobs, str(folder), further_jobs=NUM_JOBS, timeout_s=280)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_routes_from_the_store_give_the_bits_of_whole_rows(reports: list[RankReport], layout: str) -> None:
    for report in (rank.layouts[layout] for rank in reports):
        assert report.logprobs["store"] == report.logprobs["whole"]
        assert report.losses["store"] == report.losses["whole"]
    last = reports[1].layouts[layout]
    assert last.logprobs["free"] != last.logprobs["store"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_gets_its_layers_and_tokens_alone(reports: list[RankReport], folder: Path, layout: str) -> None:
    num_tokens, shape = int(rows().tensor("input_lengths").sum()), shape_of(str(folder))
    parts = [rank.layouts[layout] for rank in reports]
    for part in parts:
        count, layers, top_k = part.received["ids"][0]
        assert (layers, top_k) == (len(part.layers), shape.top_k)
        assert part.received == {
            "ids": ((count, layers, top_k), "torch.uint8"),
            "is_missing": ((count,), "torch.bool"),
            "digests": ((count, layers), "torch.int64"),
        }
    entries = [part.received["ids"][0][0] * len(part.layers) for part in parts]
    assert sum(entries) == num_tokens * len(shape.layers), "every token and layer is on one rank"
    assert min(entries) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_tell_of_missing_routes_and_of_the_models_own(reports: list[RankReport], layout: str) -> None:
    metrics = [rank.layouts[layout].metrics for rank in reports]
    assert 0 < max(found["prev_logprobs_missing_share"] for found in metrics) < 0.1
    for found in metrics:
        # Two random experts of eight: almost never the two that the router wants.
        assert 0.7 < found["prev_logprobs_live_routes_differ"] <= 1
    assert sum("k3_r3" in found for found in metrics) == 1, "one rank has all log-probabilities"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_ranks_record_is_what_the_model_chooses(reports, own_routes, layout):
    written = reports[0].layouts[layout].written
    assert written is not None
    for row, expected in zip(written, own_routes, strict=True):
        assert torch.equal(torch.tensor(row).sort(-1).values, expected.sort(-1).values)


@pytest.fixture(scope="module")
def own_routes(folder: Path) -> list[torch.Tensor]:
    """Return the routes of a plain Hugging Face model, row by row: `[tokens, L, K]`."""
    model, batch = load_causal_lm(str(folder)), rows()
    routers, found = HFRouters(model), []
    for ids, length in zip(batch.tensor("input_ids").long(), batch.tensor("input_lengths").tolist(), strict=True):
        seen: dict[int, torch.Tensor] = {}
        with routers.choosing(lambda layer, own: seen.update({layer: own})), torch.no_grad():  # noqa: B023
            model(input_ids=ids[None, :length], use_cache=False)
        found.append(torch.stack([seen[layer] for layer in routers.layers], dim=1))
    return found


TEXTS = {
    "no_routes": (0, "FieldNotProduced", ("stage 'prev_logprobs'", "u0_g0", "policy.router_replay.enabled=false")),
    "other_routes": (1, "WorkerError", ("replay_forward of microbatch 0", "layer 2", "prev_logprobs")),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_wrong_routes_end_the_step_on_both_ranks(reports: list[RankReport], plant: str) -> None:
    origin, kind, texts = TEXTS[plant]
    for rank, report in enumerate(reports):
        got_kind, got_text, seconds = report.failures[plant]
        assert all(text in got_text for text in texts), got_text
        assert seconds < LIMIT_S * SLACK
        if rank == origin:
            assert got_kind == kind
