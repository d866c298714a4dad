"""The bytes of gradients that each rank of the DTensor worker holds between two microbatches, on gloo ranks.

`gradient_shares` returns them relative to an equal share of all gradients in float32; tests and the benchmark of the
training pass call it. Invariant: every place where FSDP keeps a gradient is counted: whole ones that are summed, whole
ones of the last microbatch, and shards.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.tiny_model import write_random_model
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.local_job import run_job
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.microbatch import Microbatch, fixed_plan, steps_of
from nemo_rl.models.policy.observer import OnBackward, PassObserver
from nemo_rl.models.policy.routes.worker_replay import OWN_ROUTES
from nemo_rl.models.policy.steps import loss_scales
from nemo_rl.models.policy.workers.compose import worker_of_job
from nemo_rl.models.policy.workers.dtensor_engine import DTensorEngine
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker

__all__ = ["gradient_shares", "held_gradient_bytes", "share_of"]

MICROBATCHES, ROWS, WIDTH = 4, 2, 16
FLOAT32_BYTES = 4
TIMEOUT_S = 120.0


def gradient_shares(folder: Path, world_size: int, *, accumulation: str, precision: str = "bfloat16") -> list[float]:
    """Return for each rank the most bytes of gradients that it held between microbatches, divided by 4 bytes times
    parameters over ranks. A random model is written into the folder unless one is there."""
    if not (folder / "config.json").exists():
        write_random_model(folder)
    policy = PolicyConfig(
        model_name=str(folder),
        precision=precision,
        max_total_sequence_length=WIDTH,
        train_global_batch_size=world_size * MICROBATCHES * ROWS,
        train_micro_batch_size=ROWS,
        dtensor_cfg=DTensorConfig(gradient_accumulation=accumulation),
    )
    return run_job(world_size, _rank, policy, timeout_s=TIMEOUT_S)  # type: ignore[return-value]


def held_gradient_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all gradients that FSDP holds for this model on this rank."""
    return sum(
        grad.numel() * grad.element_size()
        for module in model.modules()
        for param in _fsdp_params(module)
        for grad in (param.unsharded_accumulated_grad, _unsharded_grad(param), _sharded_grad(param))
        if grad is not None
    )


class _Between(PassObserver):
    """Looks at the gradients before each microbatch but the first."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self.most, self._passes = model, 0, 0

    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> AbstractContextManager[OnBackward]:
        if self._passes:
            self.most = max(self.most, held_gradient_bytes(self._model))
        self._passes += 1
        return PassObserver.pass_of(self, micro, backward_follows=backward_follows)


def _rank(spec: RankSpec, policy: PolicyConfig) -> float:
    with worker_of_job(spec, policy, uses_gpu=False, num_threads=1, timeout_s=TIMEOUT_S, num_steps=1, seed=0) as worker:
        return share_of(worker)


def share_of(worker: PolicyWorker) -> float:
    """(collective) Run an optimizer step and return what `gradient_shares` says of this rank."""
    engine, num_rows = worker.engine, MICROBATCHES * ROWS
    assert isinstance(engine, DTensorEngine)
    draw = torch.Generator().manual_seed(worker.rank)
    batch = BatchedDataDict(
        {
            "input_ids": torch.randint(7, 300, (num_rows, WIDTH), generator=draw, dtype=torch.int32),
            "input_lengths": torch.full((num_rows,), WIDTH),
            "token_mask": torch.ones(num_rows, WIDTH, dtype=torch.bool),
            "sample_mask": torch.ones(num_rows),
        }
    )
    plan = fixed_plan(num_rows, rows_per_step=num_rows, rows_per_microbatch=ROWS, pad_to=WIDTH)
    [step] = steps_of(plan, num_rows=num_rows)
    [scale] = loss_scales(batch, [step], is_writer=True)
    between = _Between(engine.model)
    runner = engine.runner(worker.batch_layout(plan), OWN_ROUTES, between)
    runner.run(batch, step, NLLLoss(), scale, is_training=True)
    parameters = sum(weight.numel() for weight in engine.model.parameters())
    return between.most / (FLOAT32_BYTES * parameters / worker.world_size)


def _fsdp_params(module: torch.nn.Module) -> list[Any]:
    """Return what FSDP knows of the parameters of its unit; nothing for other modules."""
    if not isinstance(module, FSDPModule):
        return []
    found = vars(module._get_fsdp_state())
    # torch 2.11 has one group in a unit.
    groups = found.get("_fsdp_param_groups") or [found.get("_fsdp_param_group")]
    return [param for group in groups if group is not None for param in group.fsdp_params]


def _unsharded_grad(param: Any) -> torch.Tensor | None:
    unsharded = vars(param).get("_unsharded_param")
    return None if unsharded is None else unsharded.grad


def _sharded_grad(param: Any) -> torch.Tensor | None:
    grad = param.sharded_param.grad
    return None if grad is None else local_shard(grad)
