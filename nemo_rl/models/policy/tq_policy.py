"""`TQPolicy`: a `Policy` whose workers take their rows from the data plane.

The driver sends each rank a meta (keys, lengths, plan) and gets small results back; tensors go from the store to
the workers and from the workers to the store. Each pass has two forms: `submit_...` gives a `Pending`, the other one
waits for it. The workers do passes in the order in which they were submitted, whatever step they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.batch_meta import shard_meta_for_dp
from nemo_rl.data_plane.chunks.wire import message_bytes
from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.row_map import RowFunction, RowMapResult, RowResults
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.calls import Pending, Request, ask
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_groups import WorkerGroup
from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.models.policy.interfaces import LossFunction, TrainResult
from nemo_rl.models.policy.lm_policy import Policy, TrainSummary, summarize
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = ["TQPolicy"]


class TQPolicy(Policy):
    """Policy over the data plane.

    Args:
        workers: one worker with `TQWorkerMixin` per rank.
        address: of the owner's data plane client.
        timeout_s: deadline of one stage.
        layout: of the workers; None means that every rank has a data-parallel shard for itself.
        extras: columns of the rows besides the table of fields.

    Raises:
        ConfigError: `data_plane.fetch_policy` does not fit the layout.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        *,
        address: DataPlaneAddress,
        timeout_s: float,
        layout: ParallelLayout | None = None,
        extras: tuple[FieldSpec, ...] = (),
    ) -> None:
        super().__init__(workers, timeout_s=timeout_s, layout=layout)
        self.driver_bytes = 0
        """Bytes of metas, plans and results that this driver has sent or received so far."""
        plane = address.config
        request = ask(
            TQWorker.setup_data_plane,
            address=address,
            fetch_policy=plane.fetch_policy,
            cache_bytes=plane.worker_cache_bytes,
            extras=extras,
        )
        self.run(request, "data plane setup")

    def get_logprobs_from_meta(self, meta: KVBatchMeta, plan: PackPlan, *, with_squares: bool = False) -> KVBatchMeta:
        """Let the workers write `prev_logprobs` of every row, with `with_squares` `squared_probs`, and return the
        meta that knows them."""
        return self.submit_logprobs_from_meta(meta, plan, with_squares=with_squares).result()

    def submit_logprobs_from_meta(
        self, meta: KVBatchMeta, plan: PackPlan, *, with_squares: bool = False
    ) -> Pending[KVBatchMeta]:
        """Submit `get_logprobs_from_meta` without waiting."""
        metas = self._metas(meta, plan)
        requests = [ask(TQWorker.get_logprobs_presharded, meta=part, with_squares=with_squares) for part in metas]
        return self._written(requests, WorkerPass.PREV_LOGPROBS, meta, metas)

    def get_reference_policy_logprobs_from_meta(self, meta: KVBatchMeta, plan: PackPlan) -> KVBatchMeta:
        """Let the workers write `reference_policy_logprobs` of every row."""
        return self.submit_reference_policy_logprobs_from_meta(meta, plan).result()

    def submit_reference_policy_logprobs_from_meta(self, meta: KVBatchMeta, plan: PackPlan) -> Pending[KVBatchMeta]:
        """Submit `get_reference_policy_logprobs_from_meta` without waiting."""
        metas = self._metas(meta, plan)
        requests = [ask(TQWorker.get_reference_policy_logprobs_presharded, meta=part) for part in metas]
        return self._written(requests, WorkerPass.REFERENCE_LOGPROBS, meta, metas)

    def get_topk_logits_from_meta(
        self, meta: KVBatchMeta, plan: PackPlan, *, k: int, vocab_size: int | None = None
    ) -> KVBatchMeta:
        """Let the workers write `topk_ids` and `topk_logprobs` of every row: the k most likely tokens of the
        distribution that each token was drawn from; with router replay on the routes of the rows.

        Args:
            vocab_size: tokens from this id on have no probability; None: all count.
        """
        return self.submit_topk_logits_from_meta(meta, plan, k=k, vocab_size=vocab_size).result()

    def submit_topk_logits_from_meta(
        self, meta: KVBatchMeta, plan: PackPlan, *, k: int, vocab_size: int | None = None
    ) -> Pending[KVBatchMeta]:
        """Submit `get_topk_logits_from_meta` without waiting."""
        metas, passes = self._metas(meta, plan), TQWorker.get_topk_logits_presharded
        requests = [ask(passes, meta=part, k=k, vocab_size=vocab_size) for part in metas]
        return self._written(requests, WorkerPass.TOPK_LOGITS, meta, metas)

    def train_from_meta(
        self, meta: KVBatchMeta, plan: PackPlan, loss_fn: LossFunction, *, fields: Sequence[str]
    ) -> TrainSummary:
        """Let the workers fetch `fields` of their rows and train, one optimizer step per global batch of `plan`."""
        return self.submit_train_from_meta(meta, plan, loss_fn, fields=fields).result()

    def submit_train_from_meta(
        self, meta: KVBatchMeta, plan: PackPlan, loss_fn: LossFunction, *, fields: Sequence[str]
    ) -> Pending[TrainSummary]:
        """Submit `train_from_meta` without waiting."""
        metas = self._metas(meta, plan)
        requests = [ask(TQWorker.train_presharded, meta=part, loss_fn=loss_fn, fields=tuple(fields)) for part in metas]

        def merge(results: Sequence[TrainResult]) -> TrainSummary:
            self.driver_bytes += message_bytes((metas, results))
            return summarize(results, layout=self._layout)

        return self._workers.submit(self._call(requests, WorkerPass.TRAIN.value)).then(merge)

    def submit_map_rows(
        self, meta: KVBatchMeta, plan: PackPlan, work: RowFunction | Sequence[RowFunction], *, stage: RowPass
    ) -> Pending[RowResults]:
        """Let the workers do the work on their rows of `plan`, without the model.

        Args:
            work: the same for all data-parallel shards, or one for each.
        """
        metas = self._metas(meta, plan)
        works = self._layout.per_rank(list(work) if isinstance(work, Sequence) else [work] * self._layout.dp)
        requests = [
            ask(TQWorker.map_rows, meta=part, work=of_rank, stage=stage)
            for part, of_rank in zip(metas, works, strict=True)
        ]

        def merge(results: Sequence[RowMapResult]) -> RowResults:
            self.driver_bytes += message_bytes((metas, works, results))
            done = self._layout.one_per_shard(results)
            return RowResults(
                meta=meta.with_written([result.meta for result in done]),
                shards=tuple(result.numbers for result in done),
                plan=plan,
            )

        return self._workers.submit(self._call(requests, stage.value)).then(merge)

    def router_replay_metrics(self) -> dict[str, Reduction]:
        """Return the metrics of all workers since the last call; empty without router replay."""
        return merge_metrics(self.run(ask(TQWorker.router_replay_metrics), "metrics"))

    def data_plane_snapshots(self) -> list[Totals]:
        """Return counters of every worker that has a client, since the last call."""
        snapshots = self.run(ask(TQWorker.data_plane_snapshot), "metrics")
        return [snapshot for snapshot in snapshots if snapshot is not None]

    def _metas(self, meta: KVBatchMeta, plan: PackPlan) -> list[KVBatchMeta]:
        """Return the meta of each rank; ranks of a replica group get the same."""
        return self._layout.per_rank(shard_meta_for_dp(meta, plan))

    def _written(
        self,
        requests: Sequence[Request[KVBatchMeta]],
        stage: WorkerPass,
        meta: KVBatchMeta,
        metas: Sequence[KVBatchMeta],
    ) -> Pending[KVBatchMeta]:
        def merge(results: Sequence[KVBatchMeta]) -> KVBatchMeta:
            self.driver_bytes += message_bytes((metas, results))
            return meta.with_written(self._layout.one_per_shard(results))

        return self._workers.submit(self._call(requests, stage.value)).then(merge)
