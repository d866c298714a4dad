"""`StoredRoutes`: router replay of a policy worker whose routes are in the data plane.

A part of `TQWorker`. Invariant: the leader of a replica group reads whole rows, and each of its ranks gets only what
its own passes need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nemo_rl.config.policy import RouterReplayConfig
from nemo_rl.data_plane.chunks.ragged import to_nested_by_length
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import LP_SEED_FIELDS, ROUTE_FIELDS
from nemo_rl.data_plane.worker_mixin import ReplicaMember, TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import scatter_from_leader
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.jagged import lengths_of, values_of
from nemo_rl.models.head.logprobs import k3
from nemo_rl.models.policy.interfaces import SQUARED_PROBS
from nemo_rl.models.policy.routes.slices import RouteSlices, ShardRoutes
from nemo_rl.models.policy.routes.worker_replay import WorkerReplay
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.workers.passes import Passes
from nemo_rl.routes.columns import decode_routes, encode_routes
from nemo_rl.utils.metrics import Max, Mean, Reduction, merge_metrics
from nemo_rl.utils.r3_trace import trace_rollout_payload, trace_tq_fetch_payload

__all__ = ["StoredRoutes", "logprob_columns", "logprob_mismatch"]

GENERATION_LOGPROBS = "generation_logprobs"
RATIOS = {"f128": 1.28, "f2": 2.0}
"""Metric -> bound: beyond the first clipping sets in, beyond the second a token has another weight altogether."""


def logprob_mismatch(batch: BatchedDataDict, logprobs_NT: torch.Tensor, name: str) -> dict[str, Reduction]:
    """Return metrics over the tokens of `token_mask` with their rows' weights (`sample_mask`), as `k3_<name>` and so
    on.

    Args:
        batch: with `generation_logprobs` `[N, T]`.
        logprobs_NT: of the trainer.
    """
    row_weight_N = batch.tensor("sample_mask").double().cpu()
    is_used_NT = batch.tensor("token_mask").bool().cpu() & (row_weight_N > 0)[:, None]
    weight_M = row_weight_N[:, None].expand_as(is_used_NT)[is_used_NT]
    log_ratio_M = (logprobs_NT.cpu() - batch.tensor("generation_logprobs").cpu())[is_used_NT].double()
    count = float(weight_M.sum())
    if not count:
        return {}
    kl = float((k3(log_ratio_M) * weight_M).sum())
    extreme_M = log_ratio_M.abs().exp()
    found: dict[str, Reduction] = {
        f"{metric}_{name}": Mean(float(weight_M[extreme_M > bound].sum()), count) for metric, bound in RATIOS.items()
    }
    return {f"k3_{name}": Mean(kl, count), **found, f"max_ratio_{name}": Max(float(extreme_M.max()))}


@dataclass(kw_only=True, slots=True)
class StoredRoutes:
    """Router replay over the data plane."""

    config: RouterReplayConfig
    here: RankInfo
    replica: ReplicaMember
    replay: WorkerReplay
    plane: TQWorkerMixin
    """The worker's data plane half."""
    passes: Passes
    """The worker's passes."""
    _mismatch: tuple[dict[str, Reduction], ...] = ()
    """Since the last look at the metrics."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the columns, with the rollout's log-probabilities, by which replay is measured."""
        return (*LP_SEED_FIELDS, GENERATION_LOGPROBS)

    def fetch(self, stage: WorkerPass, meta: KVBatchMeta, batch: BatchedDataDict) -> RouteSlices:
        """(collective over the replica group) Read whole rows at the leader; every rank gets what its passes need."""
        replay, plan = self.replay, _plan_of(meta)
        shape = self.passes.batch_layout(plan).shape
        if self.plane.fetch_group is None:
            return replay.cut(self._whole(stage, meta, batch), plan, shape, rank=self.here.rank)

        def cut() -> dict[int, dict[str, torch.Tensor | list[object]]]:
            whole = self._whole(stage, meta, batch)
            return {rank: dict(replay.cut(whole, plan, shape, rank=rank).fields) for rank in self.replica.ranks}

        own = scatter_from_leader(
            cut, group=self.plane.fetch_group, leader=self.replica.leader, ranks=self.replica.ranks
        )
        tensors = {name: column for name, column in own.items() if isinstance(column, torch.Tensor)}
        ranges = replay.shard.tokens(plan, meta.sequence_lengths or (), shape).ranges
        return RouteSlices(**tensors, ranges=ranges)

    def prev_logprobs(
        self, meta: KVBatchMeta, batch: BatchedDataDict, *, with_squares: bool
    ) -> dict[str, torch.Tensor]:
        """(collective) Return `prev_logprobs` `[N, T]` float32, `squared_probs` where they are asked for, and the
        routes where this pass records them."""
        if self.config.records_at_rollout:
            routes = self.fetch(WorkerPass.PREV_LOGPROBS, meta, batch)
            columns = logprob_columns(self.passes, batch, meta.pack, routes, with_squares=with_squares)
        else:
            found_cNT, routes_NTLK = self.passes.record_routes(batch, plan=meta.pack, with_squares=with_squares)
            columns = _named(found_cNT) | self._encoded(routes_NTLK, meta, batch)
        self._compare(batch, columns[WorkerPass.PREV_LOGPROBS.column], meta.pack)
        return columns

    def metrics(self) -> dict[str, Reduction]:
        """Return counts of routes and distances of log-probabilities, of this rank since the last call."""
        kept, self._mismatch = self._mismatch, ()
        return merge_metrics([self.replay.metrics(), *kept])

    # Private parts.

    def _whole(self, stage: WorkerPass, meta: KVBatchMeta, batch: BatchedDataDict) -> ShardRoutes:
        """Return whole rows from the store, on the rank that reads; raise FieldNotProduced where there are none."""
        shape = self.replay.shape
        declared = {spec.name for spec in self.plane.client.partition_fields(meta.partition_id)}
        names = [name for name in ROUTE_FIELDS if name in declared]
        if not names:
            raise self.replay.missing(stage, batch)
        columns = {name: c for name, c in self.plane.reads.ragged(meta, names).items() if isinstance(c, torch.Tensor)}
        routes = decode_routes(columns, shape)
        if "input_ids" in batch:
            trace_tq_fetch_payload(
                stage=stage.value, keys=meta.keys, data=batch, layers=shape.layers, routes=list(routes.unbind())
            )
        digests = columns.get("routed_experts_digests")
        return ShardRoutes.of_rows(
            values_of(routes),
            lengths_of(routes).tolist(),
            shape,
            digests=None if digests is None else values_of(digests),
        )

    def _encoded(self, routes_NTLK: torch.Tensor, meta: KVBatchMeta, batch: BatchedDataDict) -> dict[str, torch.Tensor]:
        """(collective over the replica group) Return columns of the routes that its ranks have recorded."""
        shape = self.replay.shape
        if self.replica.group is not None:
            # Tokens without a route on a rank are -1.
            wide = routes_NTLK.to(self.here.device, torch.int32)
            dist.all_reduce(wide, op=dist.ReduceOp.MAX, group=self.replica.group)
            routes_NTLK = wide.cpu().to(torch.int16)
        lengths = torch.tensor(meta.sequence_lengths, dtype=torch.int64)
        rows = to_nested_by_length(routes_NTLK, lengths)
        if self.replica.is_write_back_leader:
            trace_rollout_payload(keys=meta.keys, data=batch, layers=shape.layers, routes=list(rows.unbind()))
        return encode_routes(rows, shape, bit_packed=self.config.bit_packed, with_digests=self.config.with_digests)

    def _compare(self, batch: BatchedDataDict, logprobs_NT: torch.Tensor, plan: PackPlan | None) -> None:
        """(collective) Measure how far the rollout's log-probabilities are; for some microbatches also without
        replay."""
        found = [logprob_mismatch(batch, logprobs_NT, "r3")] if self._sees_results(batch) else []
        count = self.config.compare_microbatches
        if count and plan is not None:
            sample = plan.microbatches[0][:count]
            part = batch.select_indices([row for rows in sample for row in rows])
            starts = [sum(len(rows) for rows in sample[:i]) for i in range(len(sample))]
            renumbered = tuple(
                tuple(range(start, start + len(rows))) for start, rows in zip(starts, sample, strict=True)
            )
            smaller = replace(plan, microbatches=(renumbered,), steps=(len(sample),))
            # Without observers, which would take it for the pass of the stage.
            free = self.passes.get_logprobs(part, plan=smaller, replay=False, phase=None)
            if self._sees_results(batch):
                found.append(logprob_mismatch(part, free, "free"))
        self._mismatch = (*self._mismatch, *found)

    def _sees_results(self, batch: BatchedDataDict) -> bool:
        return self.here.is_writer and GENERATION_LOGPROBS in batch


def logprob_columns(
    passes: Passes, batch: BatchedDataDict, plan: PackPlan | None, routes: RouteSlices | None, *, with_squares: bool
) -> dict[str, torch.Tensor]:
    """(collective) Return `prev_logprobs` and, with `with_squares`, `squared_probs`, `[N, T]` float32 each."""
    if with_squares:
        return _named(passes.get_logprobs_with_squares(batch, plan=plan, routes=routes))
    return _named(passes.get_logprobs(batch, plan=plan, routes=routes)[None])


def _named(found_cNT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the columns of log-probabilities and, if they are there, of squared probabilities."""
    return dict(zip((WorkerPass.PREV_LOGPROBS.column, SQUARED_PROBS), found_cNT, strict=False))


def _plan_of(meta: KVBatchMeta) -> PackPlan:
    assert meta.pack is not None, "router replay needs the plan of the stage in its meta"
    return meta.pack
