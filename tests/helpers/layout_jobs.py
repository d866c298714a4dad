"""One rank of a policy in a layout: what it computes on its shard of a fixed batch, as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from nemo_rl.algorithms.loss_functions import ClippedPGLoss
from nemo_rl.config.policy import DTensorConfig, OptimizerConfig, PolicyConfig
from nemo_rl.config.schema import LossConfig
from nemo_rl.distributed import differentiable
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan, plan_fixed, plan_packs, plan_padded
from nemo_rl.models.dtensor.parallelize import full_weight
from nemo_rl.models.loading import load_causal_lm, named_weights
from nemo_rl.models.policy.workers.dtensor_policy_worker import DTensorPolicyWorker
from tests.helpers.hf_reference import global_scale, hf_logprobs
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker

LOSS = ClippedPGLoss(config=LossConfig())
ROWS = 8
STEPS = 3
# Epsilon above the rounding of a gradient: with a smaller one AdamW takes a whole step for a zero that was rounded.
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "eps": 1e-6}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layout and a way to form microbatches."""

    family: str
    tp: int = 1
    cp: int = 1
    sp: bool = False
    batching: str = "packed"
    """`packed`, `padded` (dynamic batching) or `fixed`."""
    capacity: int = 64
    """Tokens, or rows for `fixed`, in a microbatch."""
    recompute: bool = False
    precision: str = "float32"
    fault: str | None = None

    def __str__(self) -> str:
        axes = f"tp{self.tp}cp{self.cp}{'sp' if self.sp else ''}"
        extra = f"{'-recompute' if self.recompute else ''}{'-' + self.fault if self.fault else ''}"
        extra += "" if self.precision == "float32" else f"-{self.precision}"
        return f"{self.family}-{axes}-{self.batching}{self.capacity}{extra}"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one rank saw."""

    rows: tuple[int, ...]
    num_microbatches: int
    logprobs: np.ndarray
    """`[n, T]` of this rank's rows, before training."""
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: Arrays | None
    """Whole weights after `STEPS` steps; rank 0 only."""


def layout_batch() -> BatchedDataDict:
    """Unequal lengths; a row of weight 0 and a row without a trained token."""
    batch = tiny_batch(ROWS)
    batch.tensor("token_mask")[1] = False
    return batch


def policy_of(case: Case, folder: Path) -> PolicyConfig:
    sizes = DTensorConfig(
        tensor_parallel_size=case.tp,
        context_parallel_size=case.cp,
        sequence_parallel=case.sp,
        activation_checkpointing=case.recompute,
    )
    optimizer = OptimizerConfig(kwargs=dict(ADAM))
    return tiny_policy(folder, dtensor_cfg=sizes, optimizer=optimizer, precision=case.precision)


def plan_of(case: Case, layout: ParallelLayout) -> PackPlan:
    lengths = layout_batch().tensor("input_lengths").tolist()
    common = {"dp_world": layout.dp, "pad_multiple": layout.length_multiple}
    if case.batching == "fixed":
        return plan_fixed(lengths, rows_per_microbatch=case.capacity, **common)
    plan = plan_packs if case.batching == "packed" else plan_padded
    return plan(lengths, capacity=case.capacity, **common)


def run_case(rank: int, world_size: int, case: Case, folder: Path) -> Outcome:
    """Log-probabilities and three optimizer steps of one rank."""
    layout = ParallelLayout.of(world_size, tp=case.tp, cp=case.cp, sequence_parallel=case.sp)
    worker = tiny_worker(policy_of(case, folder), rank=rank, world_size=world_size)
    plan, dp = plan_of(case, layout), layout.coordinates(rank).dp
    rows = plan.rows_of_rank(dp)
    batch = layout_batch()
    if case.fault == "swap":
        batch["advantages"] = batch.tensor("advantages")[[2, 1, 0, *range(3, ROWS)]]
    shard, part = batch.select_indices(rows), plan.for_rank(dp)
    everything = BatchedDataDict({name: column for name, column in shard.items() if name != "token_mask"})
    with planted(case.fault):
        logprobs = worker.get_logprobs(everything, plan=part)
        results = [worker.train(shard, LOSS, plan=part) for _ in range(STEPS)]
    weights = exported(worker)
    worker.shutdown()
    return Outcome(
        rows=rows,
        num_microbatches=len(part.microbatches[0]),
        logprobs=logprobs.numpy(),
        losses=tuple(result.loss[0] for result in results),
        norms=tuple(result.grad_norm[0] for result in results),
        weights=weights if rank == 0 else None,
    )


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """A gradient of the context axis that is counted twice."""
    if fault != "doubled":
        yield
        return
    honest = differentiable._GatherAlong.backward

    def doubled(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return honest(ctx, 2 * grad)

    with patch.object(differentiable._GatherAlong, "backward", staticmethod(doubled)):
        yield


def reference(folder: Path) -> Outcome:
    """The single-process Hugging Face model, one row at a time."""
    batch = layout_batch()
    model = load_causal_lm(folder)
    adam = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms, first = [], [], None
    for _ in range(STEPS):
        logprobs = hf_logprobs(model, batch)
        first = logprobs.detach().numpy() if first is None else first
        loss = LOSS(logprobs, batch, scale=global_scale(batch)).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    assert first is not None
    return Outcome(
        rows=tuple(range(ROWS)),
        num_microbatches=ROWS,
        logprobs=first,
        losses=tuple(losses),
        norms=tuple(norms),
        weights={name: weight.detach().numpy() for name, weight in named_weights(model)},
    )


def exported(worker: DTensorPolicyWorker) -> Arrays:
    """Weights as arrays: tensors would travel as file descriptors of a process that has ended by then."""
    return {name: weight.numpy().copy() for name, weight in worker.export_weights()}


def moments(worker: DTensorPolicyWorker) -> Arrays:
    """(collective) AdamW's whole moments by parameter name."""
    found: Arrays = {}
    for name, parameter in worker._model.hf.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{kind}"] = full_weight(worker._optimizer.state[parameter][kind]).numpy().copy()
    return found


def one_step(worker: DTensorPolicyWorker, case: Case, layout: ParallelLayout, rank: int) -> float:
    """Loss of one optimizer step."""
    plan, dp = plan_of(case, layout), layout.coordinates(rank).dp
    shard = layout_batch().select_indices(plan.rows_of_rank(dp))
    return worker.train(shard, LOSS, plan=plan.for_rank(dp)).loss[0]


def save_after_a_step(rank: int, world_size: int, case: Case, folder: Path, target: Path) -> dict[str, object]:
    """A checkpoint after one step, and the loss of the next."""
    layout = ParallelLayout.of(world_size, tp=case.tp, cp=case.cp, sequence_parallel=case.sp)
    worker = tiny_worker(policy_of(case, folder), rank=rank, world_size=world_size)
    one_step(worker, case, layout, rank)
    worker.save_checkpoint(weights=target / "weights", optimizer=target / "optimizer", tokenizer=target / "weights")
    saved = {"weights": exported(worker), "moments": moments(worker)}
    next_loss = one_step(worker, case, layout, rank)
    saved |= {"loss": next_loss, "after": exported(worker)}
    worker.shutdown()
    return saved


def load_and_step(rank: int, world_size: int, case: Case, folder: Path, target: Path) -> dict[str, object]:
    """What a checkpoint of any layout gives in this one, and the loss of the next step."""
    layout = ParallelLayout.of(world_size, tp=case.tp, cp=case.cp, sequence_parallel=case.sp)
    worker = tiny_worker(policy_of(case, folder), rank=rank, world_size=world_size)
    worker.load_checkpoint(weights=target / "weights", optimizer=target / "optimizer")
    loaded = {"weights": exported(worker), "moments": moments(worker)}
    next_loss = one_step(worker, case, layout, rank)
    loaded |= {"loss": next_loss, "after": exported(worker)}
    worker.shutdown()
    return loaded
