"""Replica groups of two ranks whose routes come from, or go to, the data plane; planted failures of the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.dtensor import DTensorConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.router_replay import RouterReplayConfig
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
from nemo_rl.models.loading import load_model_config
from nemo_rl.models.policy.routes.slices import RouteShard, RouteSlices, ShardRoutes
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.routes.columns import decode_routes, encode_routes
from tests.helpers.experts import shape_of
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
    """What one rank saw in one layout."""

    received: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of what this rank got for the log-probability pass."""
    layers: tuple[int, ...]
    logprobs: Mapping[str, str]
    """Digest of this rank's log-probabilities: handed whole rows, from the store, without replay."""
    losses: Mapping[str, float]
    """Likewise."""
    written: list[list[list[list[int]]]] | None
    """Routes that the workers recorded, `[N][tokens][L][K]`; read by rank 0 only."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """All that one rank saw."""

    layouts: dict[str, RouteReport]
    failures: dict[str, tuple[str, str, float]]
    """Kind, text and seconds of what this rank raised, in the pipeline."""


def policy_of(folder: str, layout: str, **replay: object) -> PolicyConfig:
    policy = LAYOUTS[layout](folder)
    return policy.model_copy(update={"router_replay": RouterReplayConfig(enabled=True, **replay)})


def encoded(folder: str, *, bit_packed: bool, with_digests: bool = False) -> dict[str, torch.Tensor]:
    """The forced routes as a rollout writes them."""
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
    """The shard has its rows in the order of its microbatches."""
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
        slices = worker._extra_inputs(WorkerPass.PREV_LOGPROBS, meta, worker._fetch(meta, LP_SEED_FIELDS))
        honest, worker._write_back = (
            worker._write_back,
            lambda _, found: kept.update(store=of_tokens(*found.values(), lengths)),
        )
        worker.router_replay_metrics()
        worker.get_logprobs_presharded(meta)
        metrics = {name: value.value for name, value in worker.router_replay_metrics().items()}
        worker._write_back = honest
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
        worker._extra_inputs(WorkerPass.TRAIN, done, worker._fetch(done, LP_SEED_FIELDS))
        if client is None:
            return None
        stored = client.get_data(done, IDS)
        routes = decode_routes({name: stored[name] for name in IDS}, shape_of(folder)).unbind()
        of_key = dict(zip(done.keys, routes, strict=True))
        return [of_key[key].tolist() for key in KEYS]


# Planted failures, each in a job of its own.


def no_routes(worker: TQWorker, meta: KVBatchMeta) -> None:
    """The rollout has written none."""
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


def everything(rank: int, folder: str, ports: list[int]) -> RankReport:
    """A fresh job for each part, in the same two processes."""
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
