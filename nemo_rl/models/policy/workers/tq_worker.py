"""`TQWorker`: a policy worker whose rows come from the data plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.worker_mixin import ReplicaMember, TQWorkerMixin
from nemo_rl.distributed.abort import Watch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.policy.interfaces import LossFunction, TrainResult
from nemo_rl.models.policy.routes.slices import RouteSlices
from nemo_rl.models.policy.routes.worker_replay import WorkerReplay
from nemo_rl.models.policy.workers.base import WorkerState
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker, WorkerParts
from nemo_rl.models.policy.workers.stored_routes import NoStoredRoutes, RoutesOfShards, StoredRoutes
from nemo_rl.models.support import SUPPORT
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = ["TQWorker"]


class TQWorker(TQWorkerMixin[LossFunction, TrainResult], PolicyWorker):
    """A `PolicyWorker` with its data plane half.

    A pass over the data plane brings the worker into the state that it needs, so that passes of different steps may
    follow one another in any order.

    Args:
        replica: this rank as a member of its replica group.
        watch: ends a step on all ranks when it fails on one; closed with the worker.
    """

    def __init__(self, parts: WorkerParts, *, replica: ReplicaMember, watch: Watch) -> None:
        PolicyWorker.__init__(self, parts)
        pad_values = {"input_ids": float(parts.tokenizer.pad_token_id)}
        TQWorkerMixin.__init__(self, rank=parts.here.rank, replica=replica, watch=watch, pad_values=pad_values)
        self._routes = _routes(parts, replica)
        self._support = (SUPPORT,) if parts.config.generation.record_support else ()

    def router_replay_metrics(self) -> dict[str, Reduction]:
        """Of this rank since the last call; empty without router replay."""
        return self._routes.metrics()

    def shutdown(self) -> None:
        """Ends the client and leaves the process group. Idempotent."""
        self.close_data_plane()
        self._watch.close()
        PolicyWorker.shutdown(self)

    # What the data plane half asks for.

    @property
    def _prev_logprobs_fields(self) -> tuple[str, ...]:
        return (*self._routes.fields, *self._support)

    def _train(
        self, meta: KVBatchMeta, batch: BatchedDataDict, loss_fn: LossFunction, *, eval_mode: bool
    ) -> TrainResult:
        if not eval_mode:
            self.prepare_for_training()
        routes = self._extra_inputs(WorkerPass.TRAIN, meta, batch)
        result = self.passes.train(batch, loss_fn, eval_mode=eval_mode, plan=meta.pack, routes=routes)
        # The metrics of all microbatches go to the driver as one.
        return replace(result, metrics=(merge_metrics(result.metrics),))

    def _prev_logprobs(
        self, meta: KVBatchMeta, batch: BatchedDataDict, *, with_squares: bool
    ) -> Mapping[str, torch.Tensor]:
        self.life.enter(WorkerState.LOGPROBS)
        return self._routes.prev_logprobs(meta, batch, self, with_squares=with_squares)

    def _reference_logprobs(self, meta: KVBatchMeta, batch: BatchedDataDict) -> torch.Tensor:
        self.life.enter(WorkerState.LOGPROBS)
        return self.passes.get_reference_policy_logprobs(batch, plan=meta.pack)

    def _extra_inputs(self, stage: WorkerPass, meta: KVBatchMeta, batch: BatchedDataDict) -> RouteSlices | None:
        """(collective over the replica group) What a pass takes besides the columns of its batch."""
        return self._routes.fetch(stage, meta, batch, self)


def _routes(parts: WorkerParts, replica: ReplicaMember) -> RoutesOfShards:
    if not isinstance(parts.replay, WorkerReplay):
        return NoStoredRoutes(parts.passes)
    return StoredRoutes(
        config=parts.config.router_replay,
        here=parts.here,
        replica=replica,
        replay=parts.replay,
        passes=parts.passes,
    )
