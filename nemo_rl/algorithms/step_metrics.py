"""The numbers of one step, as they are logged.

Names are `area/name`; every value comes with its reduction from its producer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_rl.algorithms.grpo import counted_rows
from nemo_rl.algorithms.stages.stage import StepState, sources_of_rows
from nemo_rl.config.env import Ending
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals, sum_totals
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.experience.payload import SampleStats, mean_of_scored
from nemo_rl.models.policy.tq_policy import TrainSummary
from nemo_rl.utils.logger import REWARD_METRIC
from nemo_rl.utils.metrics import values

__all__ = [
    "data_plane_metrics",
    "ending_texts",
    "engine_speeds",
    "informative_kl",
    "pack_metrics",
    "staleness_metrics",
    "step_metrics",
    "training_speed",
]

ENGINE_SPEED = re.compile(r"rollout/engine_(\d+)/tokens_per_s")
"""A metric that `GenerationReplicas` reports for each of its engines."""

SOURCE_METRICS = "train/source"
"""Beginning of the names of metrics about sources of prompts."""

ENDINGS = "rollout/ending"
"""Beginning of the names of metrics about endings of conversations."""

LOGPROB_PASSES = {WorkerPass.PREV_LOGPROBS, WorkerPass.REFERENCE_LOGPROBS}
LOSS_PARTS = {"actor_loss", "kl_penalty", "entropy_bonus", "distillation_loss"}
"""Summed within an optimizer step; reported, like the loss, as the mean over the optimizer steps of a GRPO step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Data plane traffic of one step over all processes."""

    metrics: dict[str, float]
    stage_bytes: dict[str, int] = field(default_factory=dict)
    """Payload bytes put and fetched, per stage."""


def engine_speeds(metrics: Mapping[str, float]) -> dict[int, float]:
    """Tokens per second of each engine that has sampled in the step, by its number."""
    found = ((ENGINE_SPEED.fullmatch(name), value) for name, value in metrics.items())
    return {int(match[1]): value for match, value in found if match is not None}


def ending_texts(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return `12 (reward 0.5, 31 tokens)` of each ending of conversations, the most frequent first."""
    counts = {ending.value: metrics.get(f"{ENDINGS}/{ending.value}", 0.0) for ending in Ending}
    found = {}
    for name in sorted((name for name, count in counts.items() if count), key=lambda name: -counts[name]):
        reward, tokens = metrics.get(f"{ENDINGS}/{name}/reward"), metrics.get(f"{ENDINGS}/{name}/tokens", 0.0)
        scored = "left out" if reward is None else f"reward {reward:.3g}"
        found[name] = f"{counts[name]:.0f} ({scored}, {tokens:.3g} tokens)"
    return found


def step_metrics(step: StepState) -> dict[str, float]:
    """Rollout, group and training metrics of a step that has ended."""
    sample_stats, stats, chosen = step.rows.sample_stats, step.scores.stats, step.chosen
    counted = counted_rows(sample_stats, step.rows.group_uids)
    plan, logprob_plan = (None, None) if chosen is None else (chosen.plan, chosen.logprob_plan)
    metrics = {
        **_reward_metrics(counted),
        "rollout/trivial_group_share": float(stats.is_zero_variance.float().mean()),
        "rollout/truncated_share": _mean(counted.truncated),
        "rollout/mean_response_tokens": _mean(counted.response_lengths),
        "train/rows": _trained_rows(plan),
        "timing/step_s": step.seconds,
        "rollout/tokens_per_s": step.num_tokens / step.seconds,
    }
    metrics |= {f"{REWARD_METRIC}/{name}": mean_of_scored(part) for name, part in counted.components.items()}
    metrics.update({f"rollout/{name}": value for name, value in values(step.rows.metrics).items()})
    metrics |= _source_metrics(step) if step.drawn[0].source else {}
    metrics |= staleness_metrics(step.rows.weight_versions, policy_version=step.policy_version)
    metrics |= pack_metrics("train", plan) | pack_metrics("logprob", logprob_plan)
    if step.measured is not None:
        metrics |= {f"train/{name}": value for name, value in step.measured.metrics().items()}
    if step.train is not None:
        metrics |= _training_metrics(step.train)
        metrics |= training_speed(step.train, step.stage_seconds, step_s=step.seconds)
    return metrics


def _reward_metrics(counted: SampleStats) -> dict[str, float]:
    """Return mean and standard deviation of the rewards; none where no row was scored."""
    if not len(counted):
        return {}
    return {REWARD_METRIC: float(np.mean(counted.rewards)), "train/reward_std": float(np.std(counted.rewards))}


def _source_metrics(step: StepState) -> dict[str, float]:
    """Return the mean reward, the rows, and the trained rows and response tokens of each source of prompts."""
    stats, uids = step.rows.sample_stats, step.rows.group_uids
    metrics: dict[str, float] = {}
    for name, own in sources_of_rows(step).items():
        prefix = f"{SOURCE_METRICS}/{name}"
        counted = counted_rows(stats.select(own.rows), [uids[row] for row in own.rows])
        metrics |= {f"{prefix}/{key.removeprefix('train/')}": value for key, value in _reward_metrics(counted).items()}
        metrics[f"{prefix}/rows"] = float(len(own.rows))
        metrics[f"{prefix}/trained_rows"] = float(own.trained_rows)
        metrics[f"{prefix}/trained_tokens"] = float(own.trained_tokens)
    return metrics


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _training_metrics(train: TrainSummary) -> dict[str, float]:
    metrics = {f"train/{name}": value for name, value in values(train.metrics).items()}
    for name in LOSS_PARTS & train.metrics.keys():
        metrics[f"train/{name}"] /= len(train.losses)
    for name in [name for name in metrics if name.endswith("/importance_ratio_squared")]:
        # Kish's effective sample size as a fraction of the tokens: mean(w)^2 / mean(w^2).
        stem, square = name.removesuffix("/importance_ratio_squared"), metrics.pop(name)
        if square > 0:
            metrics[f"{stem}/effective_sample_share"] = metrics[f"{stem}/importance_ratio"] ** 2 / square
    return metrics | {
        "train/loss": train.loss,
        "train/grad_norm": float(np.mean(train.grad_norms)),
        "train/learning_rate": train.learning_rate,
        "train/tokens": float(train.num_tokens),
        "train/total_flops": train.total_flops,
        "train/num_ranks": float(train.num_ranks),
    }


def informative_kl(train: TrainSummary | None, metrics: Mapping[str, float], config: GRPOConfig) -> float | None:
    """The KL to the reference where it is computed, else that to the old policy.

    None where that one is 0 by construction: the trainer's own pass gives pi_old, and the step has a single update.
    """
    if "train/reference_kl" in metrics:
        return metrics["train/reference_kl"]
    is_same_policy = not config.use_generation_logprobs_as_prev and train is not None and len(train.losses) == 1
    return None if is_same_policy else metrics.get("train/policy_kl")


def staleness_metrics(weight_versions: np.ndarray, *, policy_version: int) -> dict[str, float]:
    """Return how many updates the policy is ahead of the weights that sampled each row; nothing where it is ahead of
    none."""
    lags = policy_version - weight_versions
    if not lags.any():
        return {}
    return {
        "rollout/staleness_min": float(lags.min()),
        "rollout/staleness_max": float(lags.max()),
        "rollout/staleness_mean": float(lags.mean()),
    }


def training_speed(train: TrainSummary, stage_seconds: Mapping[str, float], *, step_s: float) -> dict[str, float]:
    """Return model TFLOP/s of all devices together, and where these are known their share of the peak: `mfu` in the
    train stage, `step_mfu` in the whole step, log-probability passes with a third of a train pass each."""
    seconds = stage_seconds.get(WorkerPass.TRAIN, 0.0)
    if seconds <= 0:
        return {}
    tera = train.total_flops / 1e12
    speed = {"train/tflops_per_s": tera / seconds, "train/tokens_per_s": train.num_tokens / seconds}
    if train.theoretical_tflops <= 0:
        return speed
    peak, num_passes = train.theoretical_tflops, len(LOGPROB_PASSES & stage_seconds.keys())
    of_step = tera * (1 + num_passes / 3) / step_s
    return {**speed, "train/mfu": tera / seconds / peak, "train/step_mfu": of_step / peak}


def pack_metrics(stage: str, plan: PackPlan | None) -> dict[str, float]:
    """Return the quality of a pack plan; nothing where no planner made one.

    `pack_imbalance`: busiest rank over what no plan could be below; `pack_synchronised`: the same if ranks wait for
    one another in every microbatch; `pack_pad_share`: share of the computed tokens that are padding.
    """
    if plan is None or plan.load is None:
        return {}
    load = plan.load
    return {
        f"{stage}/pack_imbalance": load.imbalance,
        f"{stage}/pack_synchronised": load.synchronised_ratio,
        f"{stage}/pack_pad_share": load.pad_share,
        f"{stage}/pack_bins": float(load.num_bins),
        f"{stage}/pack_bins_bound": float(load.bins_bound),
    }


def _trained_rows(plan: PackPlan | None) -> float:
    return float(sum(len(plan.rows_of_rank(rank)) for rank in range(plan.num_ranks))) if plan is not None else 0.0


def data_plane_metrics(
    snapshots: Sequence[Totals],
    stats: Mapping[str, object],
    *,
    driver_bytes: int,
    step_seconds: float,
) -> Traffic:
    """Calls, seconds and bytes of a step, and the share of the bytes that passed the driver.

    Stages follow each other and the processes of a stage work side by side, so `data_plane/seconds` and its share of
    the step take from each stage the process that spent most in the data plane; `data_plane/process_seconds` adds all
    processes up. Calls outside every stage (registration, statistics) are counted, but are no part of the step.

    Args:
        snapshots: one per process, as given by `DataPlaneClient.snapshot`. When nothing was counted, only
            `stats` is reported.
        stats: cluster-wide live rows and marks after the step.
        driver_bytes: metas, plans, row scalars and results that the driver received or sent.
    """
    metrics = {f"data_plane/{name}": float(value) for name, value in stats.items() if isinstance(value, int | float)}
    merged = sum_totals(snapshots)
    operations, stages, payload = merged.operations, merged.stages, float(merged.payload_bytes)
    if not payload:
        return Traffic(metrics=metrics)
    seconds = sum(max(_stage_ms(snapshot, stage) for snapshot in snapshots) for stage in stages if stage) / 1e3
    metrics |= {
        "data_plane/payload_bytes": payload,
        "data_plane/driver_bytes": float(driver_bytes),
        "data_plane/driver_share": driver_bytes / payload,
        "data_plane/seconds": seconds,
        "data_plane/share_of_step": seconds / step_seconds,
        "data_plane/process_seconds": sum(counts.ms for counts in operations.values()) / 1e3,
    }
    metrics |= _operation_metrics(operations)
    metrics |= {f"data_plane/bytes/{name}": float(n) for name, n in merged.field_bytes.items()}
    metrics["data_plane/over_read_bytes"] = float(merged.over_read_bytes)
    stage_bytes = {
        stage: sum(counts.payload_bytes for counts in by_operation.values())
        for stage, by_operation in stages.items()
        if stage
    }
    return Traffic(metrics=metrics, stage_bytes={stage: moved for stage, moved in stage_bytes.items() if moved})


def _operation_metrics(operations: Mapping[str, OperationCount]) -> dict[str, float]:
    """Calls, bytes and durations per operation, over all processes."""
    metrics: dict[str, float] = {}
    for name, counts in operations.items():
        metrics |= {
            f"data_plane/{name}/count": float(counts.count),
            f"data_plane/{name}/errors": float(counts.errors),
            f"data_plane/{name}/bytes": float(counts.payload_bytes),
            f"data_plane/{name}/ms_total": counts.ms,
            f"data_plane/{name}/ms_p50": counts.percentile_ms(0.5),
            f"data_plane/{name}/ms_p99": counts.percentile_ms(0.99),
        }
    return metrics


def _stage_ms(snapshot: Totals, stage: str) -> float:
    """Milliseconds that one process spent in the data plane during a stage."""
    return sum(counts.ms for counts in snapshot.stages.get(stage, {}).values())
