"""`TQPolicy`: a `Policy` whose workers take their rows from the data plane.

The driver sends each rank a meta (keys, lengths, plan) and gets small results back; tensors go from the store to
the workers and from the workers to the store. A pass is a method of `TQWorker`; here it is named once, as a `MetaPass`,
and called in two forms: `policy.train_from_meta(...)` waits for the result, `policy.train_from_meta.submit(...)` gives
a `Pending`. The workers do passes in the order in which they were submitted, whatever step they belong to.

`Policy`: the driver's view of the policy workers.

Holds a worker group and turns each request into one call per rank. Bulk never passes through here except in
`train` and `get_logprobs`, which take a batch that the caller already holds; GRPO uses `TQPolicy` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.batch_meta import RowFunction, RowMapResult, RowResults, shard_meta_for_dp
from nemo_rl.data_plane.chunks.wire import message_bytes
from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_groups import Call, Pending, Request, WorkerGroup, ask
from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.errors import ConfigError
from nemo_rl.models.head.logprobs import TopTokens
from nemo_rl.models.policy.interfaces import LossFunction, TrainResult
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.models.weight_sync.weights_digest import WeightsDigest
from nemo_rl.utils.checkpoint import Upload
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = ["Policy", "TQPolicy", "TrainSummary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """`TrainResult`s of all ranks, merged."""

    loss: float
    """Mean over the optimizer steps of the call."""
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    microbatch_losses: tuple[tuple[float, ...], ...] = ()
    """Losses of each data-parallel shard, in the order of its microbatches; their sum is the sum of `losses`. Empty
    for a loss that does not report itself as the metric `loss`."""
    metrics: dict[str, Reduction] = field(default_factory=dict)
    learning_rate: float
    num_tokens: int
    total_flops: float
    theoretical_tflops: float
    """Peak of all ranks together; 0 where the devices are not known."""
    num_ranks: int
    """Policy workers that took part in the update."""


class Policy:
    """The policy workers behind one object.

    Args:
        workers: one worker per rank.
        timeout_s: deadline of one stage.
        layout: of the workers; None means that every rank has a data-parallel shard for itself.
    """

    def __init__(self, workers: WorkerGroup, *, timeout_s: float, layout: ParallelLayout | None = None) -> None:
        self.workers = workers
        self._timeout_s = timeout_s
        self._layout = layout or ParallelLayout.of(workers.world_size)
        if self._layout.world_size != workers.world_size:
            raise ConfigError(f"{workers.world_size} policy workers do not fit {self._layout}")

    @property
    def layout(self) -> ParallelLayout:
        return self._layout

    @property
    def dp_world(self) -> int:
        """Return data-parallel shards: plans are made for so many ranks."""
        return self._layout.dp

    def run(self, request: Request[_T] | Sequence[Request[_T]], stage: str) -> list[_T]:
        """Have every worker do a request, and return the results in the order of the ranks.

        Args:
            request: made by `ask`, as in `policy.run(ask(PolicyWorker.end_tracing), "tracing")`; a list has one for
                each rank.
            stage: name of the call in errors.
        """
        return self.workers.submit(self.call(request, stage)).result()

    def train(
        self, batch: BatchedDataDict, loss_fn: LossFunction, *, plan: PackPlan, eval_mode: bool = False
    ) -> TrainSummary:
        """Train one optimizer step per global batch of `plan`."""
        results = self._run_on(batch, plan, "train", PolicyWorker.train, loss_fn=loss_fn, eval_mode=eval_mode)
        return summarize(results, layout=self._layout)

    def get_logprobs(self, batch: BatchedDataDict, *, plan: PackPlan) -> torch.Tensor:
        """Return `[N, T]` float32 in the order of `batch`."""
        found = self._run_on(batch, plan, "logprobs", PolicyWorker.get_logprobs)
        return _in_order_of_batch(self._layout.one_per_shard(found), plan)

    def get_reference_policy_logprobs(self, batch: BatchedDataDict, *, plan: PackPlan) -> torch.Tensor:
        """Return `[N, T]` float32 under the reference weights."""
        found = self._run_on(batch, plan, "logprobs", PolicyWorker.get_reference_policy_logprobs)
        return _in_order_of_batch(self._layout.one_per_shard(found), plan)

    def get_topk_logits(self, batch: BatchedDataDict, *, plan: PackPlan, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids `[N, T, k]` int32 and log-probabilities `[N, T, k]` float32 of the k most likely tokens in the
        place of each token of `get_logprobs`, in the order of `batch`."""
        stage = WorkerPass.TOPK_LOGITS.value
        found = self._run_on(batch, plan, stage, PolicyWorker.get_topk_logprobs, wanted=TopTokens(k=k))
        ids, logprobs = zip(*self._layout.one_per_shard(found), strict=True)
        return _in_order_of_batch(ids, plan), _in_order_of_batch(logprobs, plan)

    def prepare_for_lp_inference(self) -> None:
        self.run(ask(PolicyWorker.prepare_for_lp_inference), "logprob prep")

    def prepare_for_training(self) -> None:
        self.run(ask(PolicyWorker.prepare_for_training), "train prep")

    def save_checkpoint(
        self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None, upload: Upload | None = None
    ) -> None:
        """Write the HF folder, sharded optimizer state and tokenizer, and upload them; a failed write leaves only what
        the caller discards."""
        request = ask(
            PolicyWorker.save_checkpoint, weights=weights, optimizer=optimizer, tokenizer=tokenizer, upload=upload
        )
        self.run(request, "checkpoint")

    def begin_save(
        self,
        *,
        weights: Path,
        optimizer: Path | None,
        tokenizer: Path | None,
        most_share: float | None = None,
        upload: Upload | None = None,
    ) -> None:
        """Begin a `save_checkpoint` of this moment; the workers write beside what they do next, until `finish_save`.

        Args:
            most_share: of a node's free memory that the copies may take; where they take more, all is written here.
        """
        request = ask(
            PolicyWorker.begin_save,
            weights=weights,
            optimizer=optimizer,
            tokenizer=tokenizer,
            most_share=most_share,
            upload=upload,
        )
        self.run(request, "checkpoint")

    def is_saving(self) -> bool:
        """Return whether a worker still writes what `begin_save` began."""
        return any(self.run(ask(PolicyWorker.is_saving), "checkpoint"))

    def finish_save(self) -> float:
        """Wait until the workers have written, as long as a stage may take; the seconds that the slowest wrote."""
        return max(self.run(ask(PolicyWorker.finish_save, timeout_s=self._timeout_s), "checkpoint"))

    def weights_digest(self) -> WeightsDigest:
        found = self.run(ask(PolicyWorker.weights_digest), "weights digest")[0]
        assert found is not None, "rank 0 makes the digest"
        return found

    def memory_metrics(self) -> dict[str, float]:
        """Return `memory/<stage>_peak_bytes`, `_start_bytes` and `_end_bytes` since the last call, of the largest
        worker."""
        reports = self.run(ask(PolicyWorker.memory_report), "memory")
        names = sorted({name for report in reports for name in report})
        return {f"memory/{name}_bytes": float(max(report.get(name, 0) for report in reports)) for name in names}

    def is_alive(self) -> bool:
        """Return whether every worker answers."""
        return all(self.run(ask(PolicyWorker.is_alive), "health"))

    def shutdown(self) -> None:
        """End the workers. Idempotent."""
        self.workers.shutdown()

    def _run_on(
        self, batch: BatchedDataDict, plan: PackPlan, stage: str, method: Callable[..., _T], **arguments: object
    ) -> list[_T]:
        """Run a pass over the rows of each rank; ranks of a replica group get the same."""
        requests = [
            ask(method, batch=batch.select_indices(plan.rows_of_rank(shard)), plan=view, **arguments)
            for shard, view in enumerate(plan.rank_plans())
        ]
        return self.run(self._layout.per_rank(requests), stage)

    def call(self, request: Request[_T] | Sequence[Request[_T]], stage: str) -> Call[_T]:
        """Return the call of a stage, with its deadline, for `workers`."""
        return Call(request=request, stage=stage, timeout_s=self._timeout_s)


def _in_order_of_batch(parts: Sequence[torch.Tensor], plan: PackPlan) -> torch.Tensor:
    """Return the rows of all shards, `[n, t, ...]` each, in the order of the batch."""
    order = [row for rank in range(plan.num_ranks) for row in plan.rows_of_rank(rank)]
    merged = parts[0].new_zeros(len(order), *parts[0].shape[1:])
    merged[torch.tensor(order)] = torch.cat(list(parts))
    return merged


def summarize(results: Sequence[TrainResult], *, layout: ParallelLayout | None = None) -> TrainSummary:
    """Merge the ranks.

    Global numbers come from rank 0. Metrics, tokens and FLOPs are those of whole shards, so each replica group counts
    once, by its writer; peak TFLOP/s are those of all devices.

    Args:
        results: one per rank.
        layout: of the ranks; None means that every rank has a shard for itself.
    """
    first = results[0]
    writers = (layout or ParallelLayout.of(len(results))).one_per_shard(results)
    return TrainSummary(
        loss=sum(first.loss) / len(first.loss) if first.loss else 0.0,
        losses=first.loss,
        grad_norms=first.grad_norm,
        microbatch_losses=tuple(result.microbatch_losses for result in writers),
        metrics=merge_metrics(microbatch for result in writers for microbatch in result.metrics),
        learning_rate=first.learning_rate,
        num_tokens=sum(result.num_tokens for result in writers),
        total_flops=sum(result.total_flops for result in writers),
        theoretical_tflops=sum(result.theoretical_tflops for result in results),
        num_ranks=len(results),
    )


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
        parts = shard_meta_for_dp(meta, plan)
        requests: list[Request[Any]] = [Request(declared.method, {"meta": part, **given}) for part in parts]
        merge = policy.counting(
            policy.layout.per_rank(parts), lambda results: declared.merge(meta, results, policy.layout)
        )
        call = policy.call(policy.layout.per_rank(requests), declared.stage)
        return policy.workers.submit(call).then(merge)


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
        parts = shard_meta_for_dp(meta, plan)
        of_shards = list(work) if isinstance(work, Sequence) else [work] * self.layout.dp
        requests = [
            ask(TQWorker.map_rows, meta=part, work=of_shard, stage=stage)
            for part, of_shard in zip(parts, of_shards, strict=True)
        ]
        sent = self.layout.per_rank(parts), self.layout.per_rank(of_shards)

        def merge(results: Sequence[RowMapResult]) -> RowResults:
            done = self.layout.one_per_shard(results)
            return RowResults(
                meta=meta.with_written([result.meta for result in done]),
                shards=tuple(result.numbers for result in done),
                plan=plan,
            )

        call = self.call(self.layout.per_rank(requests), stage.value)
        return self.workers.submit(call).then(self.counting(sent, merge))

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
