"""The numbers of one step, as they are logged.

Names are `area/name`; every value comes with its reduction from whoever made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from nemo_rl.algorithms.grpo import ScoredRows
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.observability import merge_snapshots
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.experience.payload import DriverCarry
from nemo_rl.models.policy.lm_policy import TrainSummary
from nemo_rl.utils.logger import REWARD_METRIC
from nemo_rl.utils.metrics import Reduction, values

__all__ = ["StepRecord", "Traffic", "data_plane_metrics", "step_metrics"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What a step produced."""

    step: int
    carry: DriverCarry
    scored: ScoredRows
    rollout_metrics: Mapping[str, Reduction]
    num_tokens: int
    """Prompt and response tokens of the step."""
    train: TrainSummary | None
    """None when no row carried a gradient."""
    plan: PackPlan | None
    driver_bytes: int
    """Keys, lengths, tags and row scalars that the driver received or sent."""
    seconds: float
    """Rollout to optimizer update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Data plane traffic of one step over all processes."""

    metrics: dict[str, float]
    stage_bytes: dict[str, int] = field(default_factory=dict)
    """Payload bytes put and fetched, per stage."""


def step_metrics(record: StepRecord, config: MasterConfig) -> dict[str, float]:
    """Rollout, group and training metrics."""
    rewards, stats = record.carry.rewards, record.scored.stats
    metrics = {
        REWARD_METRIC: float(np.mean(rewards)),
        "train/reward_std": float(np.std(rewards)),
        "rollout/trivial_group_share": float(stats.is_trivial.float().mean()),
        "rollout/truncated_share": float(np.mean(record.carry.truncated)),
        "rollout/mean_response_tokens": float(np.mean(record.carry.response_lengths)),
        "train/rows": _trained_rows(record.plan),
        "timing/step_s": record.seconds,
        "rollout/tokens_per_s": record.num_tokens / record.seconds,
    }
    metrics.update({f"rollout/{name}": value for name, value in values(record.rollout_metrics).items()})
    if record.train is not None:
        metrics.update({f"train/{name}": value for name, value in values(record.train.metrics).items()})
        metrics.update(
            {
                "train/loss": record.train.loss,
                "train/grad_norm": float(np.mean(record.train.grad_norms)),
                "train/learning_rate": record.train.learning_rate,
                "train/tokens": float(record.train.num_tokens),
                "train/total_flops": record.train.total_flops,
            }
        )
    return metrics


def _trained_rows(plan: PackPlan | None) -> float:
    return float(sum(len(plan.rows_of_rank(rank)) for rank in range(plan.num_ranks))) if plan is not None else 0.0


def data_plane_metrics(
    snapshots: Iterable[Mapping[str, object]],
    stats: Mapping[str, int | float],
    *,
    driver_bytes: int,
    step_seconds: float,
) -> Traffic:
    """Calls, milliseconds and bytes of a step, and the share of it that passed the driver.

    Args:
        snapshots: one per process, as given by `MetricsDataPlaneClient.snapshot`.
        stats: cluster-wide live rows and marks after the step.
        driver_bytes: keys, lengths, tags and row scalars that the driver received or sent.
    """
    merged = merge_snapshots(snapshots)
    operations = cast("Mapping[str, Mapping[str, float]]", merged["operations"])
    stages = cast("Mapping[str, Mapping[str, Mapping[str, float]]]", merged["stages"])
    payload = float(cast("int", merged["payload_bytes"]))
    milliseconds = sum(counts["ms"] for counts in operations.values())
    metrics = {
        "data_plane/payload_bytes": payload,
        "data_plane/driver_bytes": float(driver_bytes),
        "data_plane/driver_share": driver_bytes / payload if payload else 0.0,
        "data_plane/seconds": milliseconds / 1e3,
        "data_plane/share_of_step": milliseconds / 1e3 / step_seconds,
    }
    metrics.update({f"data_plane/{name}": float(value) for name, value in stats.items()})
    for name, counts in operations.items():
        metrics[f"data_plane/{name}_calls"] = float(counts["count"])
        metrics[f"data_plane/{name}_ms"] = counts["ms"]
    stage_bytes = {
        stage: int(sum(counts["payload_bytes"] for counts in by_operation.values()))
        for stage, by_operation in stages.items()
        if stage
    }
    return Traffic(metrics=metrics, stage_bytes=stage_bytes)
