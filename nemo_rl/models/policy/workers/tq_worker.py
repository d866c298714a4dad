"""`TQWorker`: a policy worker whose rows come from the data plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS
from nemo_rl.data_plane.worker_mixin import ReplicaMember, TQWorkerMixin
from nemo_rl.distributed.abort import StepWatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl.models.head.logprobs import TopTokens
from nemo_rl.models.policy.interfaces import TOPK_IDS, TOPK_LOGPROBS, LossFunction, TrainResult
from nemo_rl.models.policy.routes.slices import RouteSlices
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.workers.base import WorkerState
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker, WorkerSpec
from nemo_rl.models.policy.workers.stored_routes import StoredRoutes, logprob_columns
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = ["TQWorker"]


class TQWorker(TQWorkerMixin, PolicyWorker):
    """A `PolicyWorker` with its data plane half: each pass over stored rows is declared here, once.

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
        if self.replay is not None:
            self._routes = StoredRoutes(
                config=self.config.router_replay,
                here=here,
                replica=replica,
                replay=self.replay,
                plane=self,
                passes=self,
            )
        self._support = (SUPPORT,) if self.config.generation.record_support else ()

    def router_replay_metrics(self) -> dict[str, Reduction]:
        """Return the metrics of this rank since the last call; empty without router replay."""
        return self._routes.metrics() if self._routes is not None else {}

    def rest(self) -> None:
        """Free the device and forget fetched rows, until a pass of a later step; on a CPU everything stays where it
        is."""
        self.end_step()
        self.enter(WorkerState.OFFLOADED)

    def shutdown(self) -> None:
        """End the client and leave the process group. Idempotent."""
        self.close_data_plane()
        self._watch.close()
        PolicyWorker.shutdown(self)

    # Passes over the data plane, which `TQPolicy` calls.

    def train_presharded(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction,
        *,
        fields: Sequence[str] = DP_TRAIN_FIELDS,
        eval_mode: bool = False,
    ) -> TrainResult:
        """(collective) Fetch `fields` of this rank's shard and train on it by the plan in `meta.pack`."""
        with self.stage(WorkerPass.TRAIN):
            batch = self.fetch(meta, fields)
            if not eval_mode:
                self.prepare_for_training()
            routes = self._routes_of(WorkerPass.TRAIN, meta, batch)
            result = self.train(batch, loss_fn, eval_mode=eval_mode, plan=meta.pack, routes=routes)
            # The metrics of all microbatches go to the driver as one.
            return replace(result, metrics=(merge_metrics(result.metrics),))

    def get_logprobs_presharded(self, meta: KVBatchMeta, *, with_squares: bool = False) -> KVBatchMeta:
        """(collective) Write `prev_logprobs` of this rank's shard, with `with_squares` `squared_probs` as well, and
        return the meta that knows them; where the pass records routes, these too."""
        seeds = LP_SEED_FIELDS if self._routes is None else self._routes.fields
        with self.stage(WorkerPass.PREV_LOGPROBS):
            batch = self.fetch(meta, (*seeds, *self._support, *self.extra_names(WorkerPass.PREV_LOGPROBS)))
            self.enter(WorkerState.LOGPROBS)
            if self._routes is None:
                columns = logprob_columns(self, batch, meta.pack, None, with_squares=with_squares)
            else:
                columns = self._routes.prev_logprobs(meta, batch, with_squares=with_squares)
            return self.write_back(meta, columns)

    def get_reference_policy_logprobs_presharded(self, meta: KVBatchMeta) -> KVBatchMeta:
        """(collective) Write `reference_policy_logprobs` of this rank's shard."""
        stage = WorkerPass.REFERENCE_LOGPROBS
        with self.stage(stage):
            batch = self.fetch(meta, (*LP_SEED_FIELDS, *self.extra_names(stage)))
            self.enter(WorkerState.LOGPROBS)
            return self.write_back(meta, {stage.column: self.get_reference_policy_logprobs(batch, plan=meta.pack)})

    def get_topk_logits_presharded(self, meta: KVBatchMeta, *, k: int, vocab_size: int | None = None) -> KVBatchMeta:
        """(collective) Write `topk_ids` and `topk_logprobs` of this rank's shard: the k most likely tokens of the
        distribution that each token was drawn from.

        Args:
            vocab_size: tokens from this id on have no probability; None: all count.
        """
        stage, wanted = WorkerPass.TOPK_LOGITS, TopTokens(k=k, vocab_size=vocab_size)
        with self.stage(stage):
            batch = self.fetch(meta, (*LP_SEED_FIELDS, *self.extra_names(stage)))
            self.enter(WorkerState.LOGPROBS)
            routes = self._routes_of(stage, meta, batch)
            ids_NTk, logprobs_NTk = self.get_topk_logprobs(batch, wanted, plan=meta.pack, routes=routes)
            return self.write_back(meta, {TOPK_IDS: ids_NTk, TOPK_LOGPROBS: logprobs_NTk})

    def _routes_of(self, stage: WorkerPass, meta: KVBatchMeta, batch: BatchedDataDict) -> RouteSlices | None:
        """(collective over the replica group) Return the routes that a pass replays; None without router replay."""
        return None if self._routes is None else self._routes.fetch(stage, meta, batch)
