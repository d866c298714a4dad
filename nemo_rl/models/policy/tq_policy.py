"""`TQPolicy`: a `Policy` whose workers take their rows from the data plane.

The driver sends each rank a meta (keys, lengths, plan) and gets small results back; tensors go from the store to
the workers and from the workers to the store. A pass is a method of `TQWorker`; here it is named once, as a `MetaPass`,
and called in two forms: `policy.train_from_meta(...)` waits for the result, `policy.train_from_meta.submit(...)` gives
a `Pending`. The workers do passes in the order in which they were submitted, whatever step they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.batch_meta import RowFunction, RowMapResult, RowResults, shard_meta_for_dp
from nemo_rl.data_plane.chunks.wire import message_bytes
from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_groups import Pending, Request, WorkerGroup, ask
from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.lm_policy import Policy, TrainSummary, summarize
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = ["TQPolicy"]

_P = ParamSpec("_P")
_Found = TypeVar("_Found")
_T = TypeVar("_T")


class BoundPass(Generic[_P, _T]):
    """A pass of one policy over rows in the data plane."""

    def __init__(self, policy: TQPolicy, declared: MetaPass[_P, Any, _T]) -> None:
        self._policy, self._declared = policy, declared

    def __call__(self, meta: KVBatchMeta, plan: PackPlan, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Have the workers do the pass over the rows of `meta`, and wait for the result."""
        return self.submit(meta, plan, *args, **kwargs).result()

    def submit(self, meta: KVBatchMeta, plan: PackPlan, *args: _P.args, **kwargs: _P.kwargs) -> Pending[_T]:
        """Have the workers do the pass without waiting."""
        policy, declared = self._policy, self._declared
        given = {**dict(zip(declared.parameters, args, strict=False)), **kwargs}
        metas = policy.layout.per_rank(shard_meta_for_dp(meta, plan))
        requests: list[Request[Any]] = [Request(declared.method, {"meta": part, **given}) for part in metas]
        merge = policy.counting(metas, lambda results: declared.merge(meta, results, policy.layout))
        return policy.workers.submit(policy.call(requests, declared.stage)).then(merge)


class MetaPass(Generic[_P, _Found, _T]):
    """A pass as a method of `TQPolicy`: its arguments behind meta and plan are those of the workers' method.

    Args:
        method: of the workers; takes this rank's meta.
        merge: makes the result from the meta, the results of all ranks and the layout.
    """

    def __init__(
        self,
        stage: WorkerPass,
        method: Callable[Concatenate[TQWorker, KVBatchMeta, _P], _Found],
        merge: Callable[[KVBatchMeta, Sequence[_Found], ParallelLayout], _T],
    ) -> None:
        self.stage, self.merge, self.method = stage.value, merge, method.__name__
        self.parameters = tuple(signature(method).parameters)[2:]
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, policy: None, owner: type[TQPolicy]) -> MetaPass[_P, _Found, _T]: ...

    @overload
    def __get__(self, policy: TQPolicy, owner: type[TQPolicy]) -> BoundPass[_P, _T]: ...

    def __get__(self, policy: TQPolicy | None, owner: type[TQPolicy]) -> MetaPass[_P, _Found, _T] | BoundPass[_P, _T]:
        return self if policy is None else BoundPass(policy, self)


def _written(meta: KVBatchMeta, results: Sequence[KVBatchMeta], layout: ParallelLayout) -> KVBatchMeta:
    """Return the meta that knows the columns that the workers wrote."""
    return meta.with_written(layout.one_per_shard(results))


def _trained(meta: KVBatchMeta, results: Sequence[TrainResult], layout: ParallelLayout) -> TrainSummary:
    return summarize(results, layout=layout)


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

    Example:
        >>> meta = policy.get_logprobs_from_meta(meta, plan)                                  # doctest: +SKIP
        >>> policy.train_from_meta.submit(meta, plan, loss_fn, fields=fields).result().loss   # doctest: +SKIP
        0.0123
    """

    get_logprobs_from_meta = MetaPass(WorkerPass.PREV_LOGPROBS, TQWorker.get_logprobs_presharded, _written)
    get_reference_policy_logprobs_from_meta = MetaPass(
        WorkerPass.REFERENCE_LOGPROBS, TQWorker.get_reference_policy_logprobs_presharded, _written
    )
    get_topk_logits_from_meta = MetaPass(WorkerPass.TOPK_LOGITS, TQWorker.get_topk_logits_presharded, _written)
    train_from_meta = MetaPass(WorkerPass.TRAIN, TQWorker.train_presharded, _trained)

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

    def submit_map_rows(
        self, meta: KVBatchMeta, plan: PackPlan, work: RowFunction | Sequence[RowFunction], *, stage: RowPass
    ) -> Pending[RowResults]:
        """Let the workers do the work on their rows of `plan`, without the model.

        Args:
            work: the same for all data-parallel shards, or one for each.
        """
        metas = self.layout.per_rank(shard_meta_for_dp(meta, plan))
        works = self.layout.per_rank(list(work) if isinstance(work, Sequence) else [work] * self.layout.dp)
        requests = [
            ask(TQWorker.map_rows, meta=part, work=of_rank, stage=stage)
            for part, of_rank in zip(metas, works, strict=True)
        ]

        def merge(results: Sequence[RowMapResult]) -> RowResults:
            done = self.layout.one_per_shard(results)
            return RowResults(
                meta=meta.with_written([result.meta for result in done]),
                shards=tuple(result.numbers for result in done),
                plan=plan,
            )

        return self.workers.submit(self.call(requests, stage.value)).then(self.counting((metas, works), merge))

    def counting(self, sent: object, merge: Callable[[Sequence[_Found]], _T]) -> Callable[[Sequence[_Found]], _T]:
        """Return `merge`, which counts in `driver_bytes` what was sent and what comes back."""

        def received(results: Sequence[_Found]) -> _T:
            self.driver_bytes += message_bytes((sent, results))
            return merge(results)

        return received

    def router_replay_metrics(self) -> dict[str, Reduction]:
        """Return the metrics of all workers since the last call; empty without router replay."""
        return merge_metrics(self.run(ask(TQWorker.router_replay_metrics), "metrics"))

    def data_plane_snapshots(self) -> list[Totals]:
        """Return counters of every worker that has a client, since the last call."""
        snapshots = self.run(ask(TQWorker.data_plane_snapshot), "metrics")
        return [snapshot for snapshot in snapshots if snapshot is not None]
