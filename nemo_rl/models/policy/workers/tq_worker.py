"""`TQWorker`: the data plane half of every policy worker, in front of the one that holds the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.ragged import lengths_of, to_nested_by_length, values_of
from nemo_rl.data_plane.routed_experts import decode_routes, encode_routes
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS, ROUTE_FIELDS
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import destroy_process_group, scatter_from_leader
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.mismatch import logprob_mismatch
from nemo_rl.models.policy.routes import RouteSlices, ShardRoutes
from nemo_rl.models.policy.worker_replay import WorkerReplay
from nemo_rl.models.policy.workers.training_worker import RecordedRoutes, TrainingWorker
from nemo_rl.utils.metrics import Reduction, merge_metrics
from nemo_rl.utils.r3_trace import r3_trace_verify_forward_enabled, trace_rollout_payload, trace_tq_fetch_payload

__all__ = ["TQWorker"]

GENERATION_LOGPROBS = "generation_logprobs"


class TQWorker(TQWorkerMixin, TrainingWorker):
    """A policy worker on the data plane; combined with an engine's worker behind it."""

    pad_values: Mapping[str, float]
    _mismatch: tuple[dict[str, Reduction], ...] = ()
    """Since the last look at the metrics."""

    def train_presharded(
        self, meta: KVBatchMeta, loss_fn: object, *, fields: Sequence[str] = DP_TRAIN_FIELDS, eval_mode: bool = False
    ) -> TrainResult:
        """(collective) As in the mixin. The metrics of all microbatches go to the driver as one."""
        result = super().train_presharded(meta, loss_fn, fields=fields, eval_mode=eval_mode)
        assert isinstance(result, TrainResult)
        return replace(result, metrics=(merge_metrics(result.metrics),))

    def router_replay_metrics(self) -> dict[str, Reduction]:
        """Of this rank since the last call; empty without router replay."""
        if self._replay is None:
            return {}
        kept, self._mismatch = self._mismatch, ()
        return merge_metrics([self._replay.metrics(), *kept])

    def shutdown(self) -> None:
        """Ends the client and leaves the process group. Idempotent."""
        self.close_data_plane()
        if self.watch is not None:
            self.watch.close()
        super().shutdown()
        destroy_process_group()

    # Router replay.

    @property
    def prev_logprobs_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """With router replay the rollout's log-probabilities as well: what replay is measured by."""
        return LP_SEED_FIELDS if self._replay is None else (*LP_SEED_FIELDS, GENERATION_LOGPROBS)

    def _beside(self, stage: str, meta: KVBatchMeta, batch: BatchedDataDict) -> Mapping[str, object]:
        return {} if self._replay is None else {"routes": self._fetch_routes(self._replay, stage, meta, batch)}

    def _prev_logprobs(self, meta: KVBatchMeta, batch: BatchedDataDict) -> Mapping[str, torch.Tensor]:
        if self._replay is None:
            return super()._prev_logprobs(meta, batch)
        columns: dict[str, torch.Tensor] = {}
        if self.config.router_replay.records_at_rollout:
            columns |= super()._prev_logprobs(meta, batch)
        else:
            recorded = self.record_routes(batch, plan=meta.pack)
            columns["prev_logprobs"] = recorded.logprobs_NT
            columns |= self._encoded(self._replay, recorded, meta, batch)
        self._compare(batch, columns["prev_logprobs"], meta.pack)
        return columns

    def _fetch_routes(self, replay: WorkerReplay, stage: str, meta: KVBatchMeta, batch: BatchedDataDict) -> RouteSlices:
        """(collective over the replica group) The leader reads whole rows; every rank gets what its passes need."""
        plan = _plan_of(meta)
        shape = self._batch_layout(plan).shape
        if self._fetch_group is None:
            return replay.cut(self._shard_routes(replay, stage, meta, batch), plan, shape, rank=self.rank)

        def cut() -> dict[int, dict[str, torch.Tensor | list[object]]]:
            whole = self._shard_routes(replay, stage, meta, batch)
            return {rank: dict(replay.cut(whole, plan, shape, rank=rank).fields) for rank in self.replica.ranks}

        own = scatter_from_leader(cut, group=self._fetch_group, leader=self.replica.leader, ranks=self.replica.ranks)
        tensors = {name: column for name, column in own.items() if isinstance(column, torch.Tensor)}
        ranges = replay.view.tokens(plan, meta.sequence_lengths or (), shape).ranges
        return RouteSlices(**tensors, ranges=ranges)

    def _shard_routes(self, replay: WorkerReplay, stage: str, meta: KVBatchMeta, batch: BatchedDataDict) -> ShardRoutes:
        """Whole rows from the store, on the rank that reads.

        Raises:
            FieldNotProduced: there are none; names stage and samples.
        """
        declared = {spec.name for spec in self.client.partition_fields(meta.partition_id)}
        names = [name for name in ROUTE_FIELDS if name in declared]
        if not names:
            raise replay.missing(stage, batch)
        columns = {name: c for name, c in self.reads.ragged(meta, names).items() if isinstance(c, torch.Tensor)}
        routes = decode_routes(columns, replay.shape)
        if "input_ids" in batch:
            trace_tq_fetch_payload(
                stage=stage, keys=meta.keys, data=batch, layers=replay.shape.layers, routes=list(routes.unbind())
            )
        digests = columns.get("routed_experts_digests")
        return ShardRoutes.of_rows(
            values_of(routes),
            lengths_of(routes).tolist(),
            replay.shape,
            digests=None if digests is None else values_of(digests),
        )

    def _encoded(
        self, replay: WorkerReplay, recorded: RecordedRoutes, meta: KVBatchMeta, batch: BatchedDataDict
    ) -> dict[str, torch.Tensor]:
        """(collective over the replica group) Columns of the routes that its ranks have recorded."""
        routes_NTLK = recorded.routes_NTLK
        if self.replica.group is not None:
            # Where a rank has no route it has -1.
            wide = routes_NTLK.to(self.device, torch.int32)
            dist.all_reduce(wide, op=dist.ReduceOp.MAX, group=self.replica.group)
            routes_NTLK = wide.cpu().to(torch.int16)
        lengths = torch.tensor(meta.sequence_lengths, dtype=torch.int64)
        rows = to_nested_by_length(routes_NTLK, lengths)
        if self.replica.is_write_back_leader:
            trace_rollout_payload(keys=meta.keys, data=batch, layers=replay.shape.layers, routes=list(rows.unbind()))
        return encode_routes(
            rows,
            replay.shape,
            bit_packed=self.config.router_replay.bit_packed,
            with_digests=r3_trace_verify_forward_enabled(),
        )

    def _compare(self, batch: BatchedDataDict, logprobs_NT: torch.Tensor, plan: PackPlan | None) -> None:
        """(collective) How far the rollout's log-probabilities are; for some microbatches also without replay."""
        found = [logprob_mismatch(batch, logprobs_NT, "r3")] if self._sees_results(batch) else []
        count = self.config.router_replay.compare_microbatches
        if count and plan is not None:
            sample = plan.microbatches[0][:count]
            part = batch.select_indices([row for rows in sample for row in rows])
            starts = [sum(len(rows) for rows in sample[:i]) for i in range(len(sample))]
            renumbered = tuple(
                tuple(range(start, start + len(rows))) for start, rows in zip(starts, sample, strict=True)
            )
            smaller = replace(plan, microbatches=(renumbered,), steps=(len(sample),))
            free = self.get_logprobs(part, plan=smaller, replay=False)
            if self._sees_results(batch):
                found.append(logprob_mismatch(part, free, "free"))
        self._mismatch = (*self._mismatch, *found)

    def _sees_results(self, batch: BatchedDataDict) -> bool:
        return self.layout.is_writer(self.rank) and GENERATION_LOGPROBS in batch


def _plan_of(meta: KVBatchMeta) -> PackPlan:
    assert meta.pack is not None, "router replay needs the plan of the stage in its meta"
    return meta.pack
