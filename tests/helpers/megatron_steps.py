"""Optimizer steps of a Megatron job with known gradients, and its state by the names of the Hugging Face module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, init_process_group
from nemo_rl.models.hf_folder import ModelWeights
from nemo_rl.models.megatron.convert import export_weights, load_weights
from nemo_rl.models.megatron.mcore import parallel_state
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.setup import MegatronModel, build_model, destroy_parallel, initialize_parallel
from tests.helpers.megatron_models import hf_model

NUM_STEPS = 10
TIMEOUT_S = 60.0


@contextmanager
def alone() -> Iterator[None]:
    """A job of one rank: this process."""
    init_process_group(RankSpec(rank=0, world_size=1), device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    try:
        yield
    finally:
        destroy_parallel()
        destroy_process_group()


def build(family: str, policy: PolicyConfig, **changes: object) -> tuple[MegatronModel, PolicyOptimizer]:
    """(collective) This rank's part of a model with the weights of `hf_model`, and its optimizer."""
    # On one rank all layouts are the same, and groups are slow to end.
    if dist.get_world_size() > 1 or not parallel_state.is_initialized():
        destroy_parallel()
        initialize_parallel(policy, timeout_s=TIMEOUT_S, seed=1)
    hf = hf_model(family, **changes)
    model = build_model(hf.config, policy, device=torch.device("cpu"))
    load_weights(model, ModelWeights(hf, where="memory"))
    return model, PolicyOptimizer(model, policy, num_steps=NUM_STEPS)


def gradients(family: str, step: int, **changes: object) -> dict[str, torch.Tensor]:
    """Of a step, by parameter of the Hugging Face module."""
    return {name: weight.detach() for name, weight in _gradient_model(family, step, **changes).named_parameters()}


def step(model: MegatronModel, optimizer: PolicyOptimizer, number: int, *, scale: float = 1.0) -> float | None:
    """(collective) A training call with the gradients of that number; the norm before clipping."""
    optimizer.apply()
    give_gradients(model, number, scale=scale)
    norm = optimizer.finish()
    optimizer.advance()
    return norm


@torch.no_grad()
def give_gradients(model: MegatronModel, number: int, *, scale: float = 1.0) -> None:
    """(collective) Puts the gradients of a step where `finalize_model_grads` leaves them."""
    given = _gradient_model(model.shape.model_type, number, num_hidden_layers=model.shape.num_layers)
    with _kept(model):
        load_weights(model, ModelWeights(given, where="gradients"))
        for weight in model.module.parameters():
            if weight.requires_grad:
                weight.main_grad.copy_(weight).mul_(scale)


@torch.no_grad()
def in_hf_names(model: MegatronModel, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """(collective) Whole tensors, put together from this rank's parts by megatron-core's names of the weights."""
    with _kept(model):
        for name, weight in model.module.named_parameters():
            weight.copy_(values[name])
        return {name: weight.clone() for name, weight in export_weights(model)}


@torch.no_grad()
def state_of(model: MegatronModel, optimizer: PolicyOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """(collective) Weights and moments in Hugging Face names; of half precision also what main weights have beyond."""
    weights = {name: weight.clone() for name, weight in export_weights(model)}
    state = {kind: in_hf_names(model, optimizer.moments(kind)) for kind in ("exp_avg", "exp_avg_sq")}
    main = optimizer.moments("master")
    if main:
        rests = {name: main[name] - weight.float() for name, weight in model.module.named_parameters()}
        state["rest"] = in_hf_names(model, rests)
    return {"weights": weights, **state}


def _gradient_model(family: str, step: int, **changes: object) -> torch.nn.Module:
    return hf_model(family, seed=100 + step, **changes)


@contextmanager
def _kept(model: MegatronModel) -> Iterator[None]:
    """Parameters and buffers are afterwards what they were."""
    tensors = [*model.module.parameters(), *model.module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)
