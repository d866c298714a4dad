"""`Policy`: the driver's view of the policy workers.

Holds a worker group and turns each request into one call per rank. Bulk never passes through here except in
`train` and `get_logprobs`, which take a batch that the caller already holds; GRPO uses `TQPolicy` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_groups import Call, Request, WorkerGroup, ask
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ConfigError
from nemo_rl.models.head.top_k import TopTokens
from nemo_rl.models.policy.interfaces import LossFunction, TrainResult
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.weights_digest import WeightsDigest
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = ["Policy", "TrainSummary"]

_T = TypeVar("_T")


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

    def save_checkpoint(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """Write the HF folder, sharded optimizer state and tokenizer; a failed write leaves only what the caller
        discards."""
        request = ask(PolicyWorker.save_checkpoint, weights=weights, optimizer=optimizer, tokenizer=tokenizer)
        self.run(request, "checkpoint")

    def begin_save(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """Begin a `save_checkpoint` of this moment; the workers write beside what they do next, until `finish_save`."""
        self.run(ask(PolicyWorker.begin_save, weights=weights, optimizer=optimizer, tokenizer=tokenizer), "checkpoint")

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
