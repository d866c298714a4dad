"""`Policy`: the driver's view of the policy workers.

Holds a worker group and turns each request into one call per rank. Bulk never passes through here except in
`train` and `get_logprobs`, which take a batch that the caller already holds; GRPO uses `TQPolicy` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_groups import Call, WorkerGroup
from nemo_rl.errors import ConfigError
from nemo_rl.models.policy.interfaces import LossFunction, TrainResult
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = ["Policy", "TrainSummary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """`TrainResult`s of all ranks, merged."""

    loss: float
    """Mean over the optimizer steps of the call."""
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    metrics: dict[str, Reduction] = field(default_factory=dict)
    learning_rate: float
    num_tokens: int
    total_flops: float
    theoretical_tflops: float


class Policy:
    """The policy workers behind one object.

    Args:
        workers: one worker per rank.
        timeout_s: deadline of one stage.
        layout: of the workers; None means that every rank has a data-parallel shard for itself.
    """

    def __init__(self, workers: WorkerGroup, *, timeout_s: float, layout: ParallelLayout | None = None) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._layout = layout or ParallelLayout.of(workers.world_size)
        if self._layout.world_size != workers.world_size:
            raise ConfigError(f"{workers.world_size} policy workers do not fit {self._layout}")

    @property
    def layout(self) -> ParallelLayout:
        """Which rank holds which part."""
        return self._layout

    @property
    def dp_world(self) -> int:
        """Data-parallel shards: plans are made for so many ranks."""
        return self._layout.dp

    def train(
        self, batch: BatchedDataDict, loss_fn: LossFunction, *, plan: PackPlan, eval_mode: bool = False
    ) -> TrainSummary:
        """One optimizer step per global batch of `plan`."""
        results = self._run(
            "train",
            "train",
            loss_fn=loss_fn,
            eval_mode=eval_mode,
            per_rank=self._shards(batch, plan),
        )
        return summarize(cast("list[TrainResult]", results), layout=self._layout)

    def get_logprobs(self, batch: BatchedDataDict, *, plan: PackPlan) -> torch.Tensor:
        """`[N, T]` float32 in the order of `batch`."""
        return self._logprobs("get_logprobs", batch, plan)

    def get_reference_policy_logprobs(self, batch: BatchedDataDict, *, plan: PackPlan) -> torch.Tensor:
        """`[N, T]` float32 under the reference weights."""
        return self._logprobs("get_reference_policy_logprobs", batch, plan)

    def prepare_for_lp_inference(self) -> None:
        self._run("prepare_for_lp_inference", "logprob prep")

    def prepare_for_training(self) -> None:
        self._run("prepare_for_training", "train prep")

    def save_checkpoint(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """HF folder, sharded optimizer state and tokenizer; a failed write leaves only what the caller discards."""
        self._run("save_checkpoint", "checkpoint", weights=weights, optimizer=optimizer, tokenizer=tokenizer)

    def load_checkpoint(self, *, weights: Path, optimizer: Path | None) -> None:
        self._run("load_checkpoint", "resume", weights=weights, optimizer=optimizer)

    def memory_metrics(self) -> dict[str, float]:
        """`memory/<stage>_peak_bytes`, `_start_bytes` and `_end_bytes` since the last call, of the largest worker."""
        reports = cast("list[dict[str, int]]", self._run("memory_report", "memory"))
        names = sorted({name for report in reports for name in report})
        return {f"memory/{name}_bytes": float(max(report.get(name, 0) for report in reports)) for name in names}

    def is_alive(self) -> bool:
        """Whether every worker answers."""
        return all(self._run("is_alive", "health"))

    def shutdown(self) -> None:
        """Ends the workers. Idempotent."""
        self._workers.shutdown()

    def _logprobs(self, method: str, batch: BatchedDataDict, plan: PackPlan) -> torch.Tensor:
        results = self._run(method, "logprobs", per_rank=self._shards(batch, plan))
        parts = cast("list[torch.Tensor]", self._layout.of_writers(results))
        order = [row for rank in range(plan.num_ranks) for row in plan.rows_of_rank(rank)]
        merged = torch.zeros(batch.size, max(part.shape[1] for part in parts))
        merged[torch.tensor(order)] = torch.cat(parts)
        return merged

    def _shards(self, batch: BatchedDataDict, plan: PackPlan) -> list[dict[str, object]]:
        """Rows and plan of each rank; ranks of a replica group get the same."""
        rows = [batch.select_indices(plan.rows_of_rank(shard)) for shard in range(plan.num_ranks)]
        return self._layout.spread(
            [{"batch": mine, "plan": view} for mine, view in zip(rows, plan.views(), strict=True)]
        )

    def _run(
        self, method: str, stage: str, *, per_rank: Sequence[dict[str, object]] | None = None, **kwargs: object
    ) -> list[object]:
        return self._workers.run(self._call(method, stage, per_rank=per_rank, **kwargs))

    def _call(
        self, method: str, stage: str, *, per_rank: Sequence[dict[str, object]] | None = None, **kwargs: object
    ) -> Call:
        return Call(method=method, stage=stage, timeout_s=self._timeout_s, kwargs=kwargs, per_rank=per_rank)


def summarize(results: Sequence[TrainResult], *, layout: ParallelLayout | None = None) -> TrainSummary:
    """Merges the ranks.

    Global numbers come from rank 0. Metrics, tokens and FLOPs are those of whole shards, so each replica group counts
    once, by its writer; peak TFLOP/s are those of all devices.

    Args:
        results: one per rank.
        layout: of the ranks; None means that every rank has a shard for itself.
    """
    first = results[0]
    writers = (layout or ParallelLayout.of(len(results))).of_writers(results)
    return TrainSummary(
        loss=sum(first.loss) / len(first.loss) if first.loss else 0.0,
        losses=first.loss,
        grad_norms=first.grad_norm,
        metrics=merge_metrics(microbatch for result in writers for microbatch in result.metrics),
        learning_rate=first.learning_rate,
        num_tokens=sum(result.num_tokens for result in writers),
        total_flops=sum(result.total_flops for result in writers),
        theoretical_tflops=sum(result.theoretical_tflops for result in results),
    )
