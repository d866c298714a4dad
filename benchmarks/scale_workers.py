"""Rows per second of one and of several rollout workers of a synchronous run whose reward is what takes the time.

Called by `scale`. A real run over Ray: the sort demo with a reward that waits, two engines, and one scoring process for
each rollout worker. Invariant: the rewards of all runs are equal.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.common import ROOT
from benchmarks.driver_step import GROUP, step_config
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.stages.columns import declare_partition, stage_columns
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.load import load_config
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.keys import new_group_ids
from nemo_rl.experience.rollout_records import GroupRequest
from nemo_rl.experience.rollout_worker import RolloutSpec, RolloutWorker
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationOutput, GenerationRequest
from nemo_rl.utils.trackers import METRICS_FILE, read_metrics

__all__ = ["WorkersSample", "measure_workers", "worker_rows_per_s"]

PROMPTS, SAMPLES, STEPS = 16, 8, 4
OVERRIDES = (
    f"grpo.num_prompts_per_step={PROMPTS}",
    f"grpo.num_generations_per_prompt={SAMPLES}",
    f"grpo.max_num_steps={STEPS}",
    f"policy.train_global_batch_size={PROMPTS * SAMPLES}",
    "policy.generation.max_batch_size=16",
    "env={name: custom, reward_function: benchmarks.rewards:slow_share, preflight_reward: false}",
    "data.validation=null",
    "data_plane={impl: ray}",
    "cluster.cpu_workers_per_node=1",
    "checkpointing.enabled=false",
    "logger.overwrite=true",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersSample:
    """The rollouts of one run."""

    workers: int
    seconds: tuple[float, ...]
    """Of the rollout of each step, without the first one."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""

    @property
    def rows_per_s(self) -> float:
        return PROMPTS * SAMPLES / statistics.median(self.seconds)

    def as_record(self) -> dict[str, object]:
        return {**asdict(self), "rows_per_s": self.rows_per_s}


def measure_workers(count: int, folder: Path, model: Path) -> WorkersSample:
    """Run the demo with so many rollout workers; logs go below `folder`."""
    more = (
        f"policy.model_name={model}",
        f"experience.num_workers={count}",
        f"logger.log_dir={folder / str(count)}",
    )
    config = load_config(ROOT / "configs" / "grpo_sort_cpu.yaml", [*OVERRIDES, *more])
    run(config, console=Console(file=StringIO()))
    rows = [row for row in read_metrics(config.logger.log_dir / METRICS_FILE) if "timing/rollout_s" in row]
    return WorkersSample(
        workers=count,
        seconds=tuple(row["timing/rollout_s"] for row in rows[1:]),
        rewards=tuple(row["train/reward"] for row in rows),
    )


class _InstantEngine(GenerationInterface):
    """Answers every request at once with ten tokens for each row."""

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        count, tokens = len(request.seeds), request.sampling.max_new_tokens
        return GenerationOutput(
            token_ids=torch.full((count * tokens,), 5, dtype=torch.int32),
            logprobs=torch.full((count * tokens,), -1.0),
            lengths=torch.full((count,), tokens),
            truncated=torch.ones(count, dtype=torch.bool),
            weight_version=0,
        )

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        return version

    def prepare_for_generation(self) -> None:
        """Do nothing."""

    def finish_generation(self) -> None:
        """Do nothing."""

    @property
    def weight_version(self) -> int:
        return 0

    def shutdown(self) -> None:
        """Do nothing."""


def worker_rows_per_s(rows: int, model: Path) -> float:
    """Return the rows per processor second that one rollout worker decodes, scores, packs and writes, of rows that an
    engine gives at once; `model` gives the tokenizer."""
    config = step_config(rows, f"policy.model_name={model}")
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id=f"bench-{uuid.uuid4().hex[:8]}")
    worker = RolloutWorker(RolloutSpec.of(config, now=datetime.now(UTC)), generation=_InstantEngine())
    try:
        declare_partition(client, stage_columns(config, build_loss(config.loss_fn, config.grpo)), config.grpo)
        worker.setup_data_plane(client.address)
        groups = [
            GroupRequest(uid=uid, prompt=prompt, seed=prompt * GROUP)
            for prompt, uid in enumerate(new_group_ids(rows // GROUP))
        ]
        began = time.process_time()
        for _ in worker.rollout(groups, version=0, partition_id="train"):
            """Each group is written when it comes."""
        seconds = time.process_time() - began
    finally:
        worker.shutdown()
        client.close()
    return rows / seconds
