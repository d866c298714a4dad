"""Sockets that each rank of the DTensor worker holds, after a step and after a save, and how they grow with the ranks.

`socket_counts` returns them; tests and `benchmarks/scale.py` call it. The ranks are gloo processes of this machine in
the environment of a run.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch

from benchmarks.tiny_model import write_random_model
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.environment import worker_environment
from nemo_rl.distributed.local_job import run_job
from nemo_rl.models.policy.microbatch import fixed_plan
from nemo_rl.models.policy.workers.compose import worker_of_job

__all__ = ["SocketCounts", "socket_counts"]

ROWS, WIDTH = 2, 16
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketCounts:
    """Sockets of a rank, on average without rank 0, which serves the store of the job."""

    step: float
    """After an optimizer step."""
    save: float
    """After that and a checkpoint with the optimizer, beside the training and at once."""


def socket_counts(folder: Path, world_size: int) -> SocketCounts:
    """Run a step and two saves on so many ranks. A random model is written into the folder unless one is there."""
    if not (folder / "config.json").exists():
        write_random_model(folder)
    policy = PolicyConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=WIDTH,
        train_global_batch_size=world_size * ROWS,
        train_micro_batch_size=ROWS,
    )
    with patch.dict(os.environ, worker_environment(1, uses_gpu=False)):
        found = run_job(world_size, _rank, policy, folder / f"saved_{world_size}", timeout_s=TIMEOUT_S)
    steps, saves = zip(*found[1:], strict=True)  # type: ignore[call-overload]
    return SocketCounts(step=mean(steps), save=mean(saves))


def _rank(spec: RankSpec, policy: PolicyConfig, out: Path) -> tuple[int, int]:
    with worker_of_job(spec, policy, uses_gpu=False, num_threads=1, timeout_s=TIMEOUT_S, num_steps=1, seed=0) as worker:
        batch = BatchedDataDict(
            {
                "input_ids": torch.randint(7, 300, (ROWS, WIDTH), dtype=torch.int32),
                "input_lengths": torch.full((ROWS,), WIDTH),
                "token_mask": torch.ones(ROWS, WIDTH, dtype=torch.bool),
                "sample_mask": torch.ones(ROWS),
            }
        )
        plan = fixed_plan(ROWS, rows_per_step=ROWS, rows_per_microbatch=ROWS, pad_to=WIDTH)
        worker.get_logprobs(batch, plan=plan)
        worker.train(batch, NLLLoss(), plan=plan)
        step = _sockets()
        worker.begin_save(weights=out / "weights", optimizer=out / "optimizer", tokenizer=None, most_share=1.0)
        worker.finish_save(timeout_s=TIMEOUT_S)
        worker.save_checkpoint(weights=out / "weights", optimizer=out / "optimizer", tokenizer=None)
        return step, _sockets()


def _sockets() -> int:
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count
