"""`TQWorker`: a policy worker whose rows come from the data plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nemo_rl.config.router_replay import RouterReplayConfig
from nemo_rl.data_plane.chunks.ragged import to_nested_by_length
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import LP_SEED_FIELDS, ROUTE_FIELDS
from nemo_rl.data_plane.worker_mixin import ReplicaMember, TQWorkerMixin
from nemo_rl.distributed.abort import StepWatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import scatter_from_leader
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.jagged import lengths_of, values_of
from nemo_rl.models.head.logprobs import k3
from nemo_rl.models.head.support import SUPPORT
from nemo_rl.models.head.top_k import TopTokens
from nemo_rl.models.policy.interfaces import SQUARED_PROBS, TOPK_IDS, TOPK_LOGPROBS, LossFunction, TrainResult
from nemo_rl.models.policy.routes.slices import RouteSlices, ShardRoutes
from nemo_rl.models.policy.routes.worker_replay import WorkerReplay
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.workers.base import WorkerState
from nemo_rl.models.policy.workers.passes import RankRoutes
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker, WorkerSpec
from nemo_rl.routes.columns import decode_routes, encode_routes
from nemo_rl.utils.metrics import Max, Mean, Reduction, merge_metrics
from nemo_rl.utils.r3_trace import trace_rollout_payload, trace_tq_fetch_payload

__all__ = ["StoredRoutes", "TQWorker", "logprob_mismatch"]

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


GENERATION_LOGPROBS = "generation_logprobs"


@dataclass(kw_only=True, slots=True)
class StoredRoutes:
    """Router replay over the data plane."""

    config: RouterReplayConfig
    here: RankInfo
    replica: ReplicaMember
    replay: WorkerReplay
    _mismatch: tuple[dict[str, Reduction], ...] = ()
    """Since the last look at the metrics."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the columns, with the rollout's log-probabilities, by which replay is measured."""
        return (*LP_SEED_FIELDS, GENERATION_LOGPROBS)

    def fetch(self, worker: TQWorker, stage: WorkerPass, meta: KVBatchMeta, batch: BatchedDataDict) -> RouteSlices:
        """(collective over the replica group) Read whole rows at the leader; every rank gets what its passes need."""
        replay, plan = self.replay, _plan_of(meta)
        shape = worker.batch_layout(plan).shape
        if worker.fetch_group is None:
            return replay.cut(self._whole(worker, stage, meta, batch), plan, shape, rank=self.here.rank)

        def cut() -> dict[int, dict[str, torch.Tensor | list[object]]]:
            whole = self._whole(worker, stage, meta, batch)
            return {rank: dict(replay.cut(whole, plan, shape, rank=rank).fields) for rank in self.replica.ranks}

        own = scatter_from_leader(cut, group=worker.fetch_group, leader=self.replica.leader, ranks=self.replica.ranks)
        tensors = {name: column for name, column in own.items() if isinstance(column, torch.Tensor)}
        ranges = replay.shard.tokens(plan, meta.sequence_lengths or (), shape).ranges
        return RouteSlices(**tensors, ranges=ranges)

    def prev_logprobs(
        self, worker: TQWorker, meta: KVBatchMeta, batch: BatchedDataDict, *, with_squares: bool
    ) -> Mapping[str, torch.Tensor]:
        """(collective) Return `prev_logprobs` `[N, T]` float32, `squared_probs` where they are asked for, and the
        routes where this pass records them."""
        if self.config.records_at_rollout:
            routes = self.fetch(worker, WorkerPass.PREV_LOGPROBS, meta, batch)
            columns = _logprob_columns(worker, batch, meta.pack, routes, with_squares=with_squares)
        else:
            recorded = worker.record_routes(batch, plan=meta.pack, with_squares=with_squares)
            columns = {WorkerPass.PREV_LOGPROBS.column: recorded.logprobs_NT, **self._encoded(recorded, meta, batch)}
            if recorded.squares_NT is not None:
                columns[SQUARED_PROBS] = recorded.squares_NT
        self._compare(worker, batch, columns[WorkerPass.PREV_LOGPROBS.column], meta.pack)
        return columns

    def metrics(self) -> dict[str, Reduction]:
        """Return counts of routes and distances of log-probabilities, of this rank since the last call."""
        kept, self._mismatch = self._mismatch, ()
        return merge_metrics([self.replay.metrics(), *kept])

    # Private parts.

    def _whole(self, worker: TQWorker, stage: WorkerPass, meta: KVBatchMeta, batch: BatchedDataDict) -> ShardRoutes:
        """Return whole rows from the store, on the rank that reads; raise FieldNotProduced where there are none."""
        shape = self.replay.shape
        declared = {spec.name for spec in worker.client.partition_fields(meta.partition_id)}
        names = [name for name in ROUTE_FIELDS if name in declared]
        if not names:
            raise self.replay.missing(stage, batch)
        columns = {name: c for name, c in worker.reads.ragged(meta, names).items() if isinstance(c, torch.Tensor)}
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

    def _encoded(self, recorded: RankRoutes, meta: KVBatchMeta, batch: BatchedDataDict) -> dict[str, torch.Tensor]:
        """(collective over the replica group) Return columns of the routes that its ranks have recorded."""
        routes_NTLK, shape = recorded.routes_NTLK, self.replay.shape
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

    def _compare(
        self, worker: TQWorker, batch: BatchedDataDict, logprobs_NT: torch.Tensor, plan: PackPlan | None
    ) -> None:
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
            free = worker.get_logprobs(part, plan=smaller, replay=False, phase=None)
            if self._sees_results(batch):
                found.append(logprob_mismatch(part, free, "free"))
        self._mismatch = (*self._mismatch, *found)

    def _sees_results(self, batch: BatchedDataDict) -> bool:
        return self.here.is_writer and GENERATION_LOGPROBS in batch


def _logprob_columns(
    worker: TQWorker, batch: BatchedDataDict, plan: PackPlan | None, routes: RouteSlices | None, *, with_squares: bool
) -> dict[str, torch.Tensor]:
    if not with_squares:
        return {WorkerPass.PREV_LOGPROBS.column: worker.get_logprobs(batch, plan=plan, routes=routes)}
    logprobs_NT, squares_NT = worker.get_logprobs_with_squares(batch, plan=plan, routes=routes)
    return {WorkerPass.PREV_LOGPROBS.column: logprobs_NT, SQUARED_PROBS: squares_NT}


def _plan_of(meta: KVBatchMeta) -> PackPlan:
    assert meta.pack is not None, "router replay needs the plan of the stage in its meta"
    return meta.pack


class TQWorker(TQWorkerMixin[LossFunction, TrainResult], PolicyWorker):
    """A `PolicyWorker` with its data plane half.

    A pass over the data plane brings the worker into the state that it needs, so that passes of different steps may
    follow one another in any order.

    Args:
        replica: this rank as a member of its replica group; None makes the group that the layout has.
        watch: ends a step on all ranks when it fails on one; closed with the worker.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        here: RankInfo,
        *,
        owns_group: bool,
        watch: StepWatch,
        replica: ReplicaMember | None = None,
    ) -> None:
        PolicyWorker.__init__(self, spec, here, owns_group=owns_group)
        # Behind the groups of the model: torch keeps meshes of a process's earlier workers, and finds groups by number.
        replica = replica or ReplicaMember.build(here.layout, rank=here.rank)
        pad_values = {"input_ids": float(self.tokenizer.pad_token_id)}
        TQWorkerMixin.__init__(self, rank=here.rank, replica=replica, watch=watch, pad_values=pad_values)
        self._routes: StoredRoutes | None = None
        if isinstance(self.replay, WorkerReplay):
            self._routes = StoredRoutes(
                config=self.config.router_replay, here=here, replica=replica, replay=self.replay
            )
        self._support = (SUPPORT,) if self.config.generation.record_support else ()

    def router_replay_metrics(self) -> dict[str, Reduction]:
        """Return the metrics of this rank since the last call; empty without router replay."""
        return self._routes.metrics() if self._routes is not None else {}

    def rest(self) -> None:
        """Free the device and forget fetched rows, until a pass of a later step; on a CPU everything stays where it
        is."""
        self.end_step()
        self.device_states.enter(WorkerState.OFFLOADED)

    def shutdown(self) -> None:
        """End the client and leave the process group. Idempotent."""
        self.close_data_plane()
        self._watch.close()
        PolicyWorker.shutdown(self)

    # Callbacks of the data plane half.

    @property
    def _prev_logprobs_fields(self) -> tuple[str, ...]:
        return (*(LP_SEED_FIELDS if self._routes is None else self._routes.fields), *self._support)

    def _train(
        self, meta: KVBatchMeta, batch: BatchedDataDict, loss_fn: LossFunction, *, eval_mode: bool
    ) -> TrainResult:
        if not eval_mode:
            self.prepare_for_training()
        routes = self._extra_inputs(WorkerPass.TRAIN, meta, batch)
        result = self.train(batch, loss_fn, eval_mode=eval_mode, plan=meta.pack, routes=routes)
        # The metrics of all microbatches go to the driver as one.
        return replace(result, metrics=(merge_metrics(result.metrics),))

    def _prev_logprobs(
        self, meta: KVBatchMeta, batch: BatchedDataDict, *, with_squares: bool
    ) -> Mapping[str, torch.Tensor]:
        self.device_states.enter(WorkerState.LOGPROBS)
        if self._routes is None:
            return _logprob_columns(self, batch, meta.pack, None, with_squares=with_squares)
        return self._routes.prev_logprobs(self, meta, batch, with_squares=with_squares)

    def _reference_logprobs(self, meta: KVBatchMeta, batch: BatchedDataDict) -> torch.Tensor:
        self.device_states.enter(WorkerState.LOGPROBS)
        return self.get_reference_policy_logprobs(batch, plan=meta.pack)

    def _topk_logprobs(
        self, meta: KVBatchMeta, batch: BatchedDataDict, *, k: int, vocab_size: int | None
    ) -> Mapping[str, torch.Tensor]:
        self.device_states.enter(WorkerState.LOGPROBS)
        routes, wanted = self._extra_inputs(WorkerPass.TOPK_LOGITS, meta, batch), TopTokens(k=k, vocab_size=vocab_size)
        ids_NTk, logprobs_NTk = self.get_topk_logprobs(batch, wanted, plan=meta.pack, routes=routes)
        return {TOPK_IDS: ids_NTk, TOPK_LOGPROBS: logprobs_NTk}

    def _extra_inputs(self, stage: WorkerPass, meta: KVBatchMeta, batch: BatchedDataDict) -> RouteSlices | None:
        """(collective over the replica group) Return what a pass takes besides the columns of its batch."""
        return self._routes.fetch(self, stage, meta, batch) if self._routes is not None else None
