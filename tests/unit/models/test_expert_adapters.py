"""Adapters of fused experts against merged weights, in mixtures of several families, one by one and grouped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.config.backends import LoraConfig
from nemo_rl.models.adapters.lora import Adapter, adapted_layers, attach_adapters, named_adapters, without_adapters
from nemo_rl.models.hf.loading import EAGER, GROUPED
from tests.helpers.model_families import FAMILY_SIZES

LORA = LoraConfig(enabled=True, rank=3, alpha=6.0)
SIZES = {**FAMILY_SIZES, "num_hidden_layers": 2, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 8, "first_k_dense_replace": 1},
}
T, K = 13, 2


def model_of(family: str, *, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES, **FAMILIES[family]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name:
                weight.normal_(0, 0.3)
    return model.eval()


def experts_of(model: PreTrainedModel) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith(".experts"))


def with_adapters(model: PreTrainedModel, *, zero: bool) -> Any:
    config = LORA.model_copy(update={"targets": ["experts.gate_up_proj", "experts.down_proj"]})
    attach_adapters(model, adapted_layers(model, config), config)
    with torch.no_grad():
        for name, weight in named_adapters(model):
            weight.normal_(0, 0.3)
            if zero and ".lora_B." in name:
                weight.zero_()
    return experts_of(model)


def inputs(width: int, count: int, *, dtype: torch.dtype, elsewhere: int | None) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(T, width, generator=draw).to(dtype)
    # The last expert is chosen by no token.
    index = torch.rand(T, count - 1, generator=draw).argsort(-1)[:, :K]
    weights = torch.rand(T, K, generator=draw).to(dtype)
    if elsewhere is not None:
        is_elsewhere = index == elsewhere
        index, weights = torch.where(is_elsewhere, count, index), weights.masked_fill(is_elsewhere, 0.0)
    return hidden, index, weights


@pytest.fixture(params=[EAGER, GROUPED])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("elsewhere", [None, 1])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_adapters_of_zero_leave_every_bit_of_the_own_forward(family: str, kernels: str, elsewhere: int | None) -> None:
    model = model_of(family)
    model.set_experts_implementation(kernels)
    experts = with_adapters(model, zero=True)
    experts._is_expert_parallel = elsewhere is not None
    given = inputs(SIZES["hidden_size"], experts.num_experts, dtype=torch.float32, elsewhere=elsewhere)
    found = experts(*given)
    with without_adapters(model):
        assert torch.equal(found, experts(*given))


@pytest.mark.parametrize("elsewhere", [None, 1])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_values_and_gradients_are_those_of_merged_weights(family: str, kernels: str, elsewhere: int | None) -> None:
    # Grouped kernels do not know float64.
    dtype, bound = (torch.float64, 1e-12) if kernels == EAGER else (torch.float32, 2e-5)
    model = model_of(family).to(dtype)
    model.set_experts_implementation(kernels)
    experts = with_adapters(model.to(dtype), zero=False)
    for adapter in experts.low_rank.values():
        adapter.to(dtype)
    experts._is_expert_parallel = elsewhere is not None
    hidden, index, weights = inputs(SIZES["hidden_size"], experts.num_experts, dtype=dtype, elsewhere=elsewhere)
    names = ("gate_up_proj", "down_proj")
    own = [weight for name in names for weight in (experts.low_rank[name].A, experts.low_rank[name].B)]

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[torch.Tensor]:
        value = hidden.clone().requires_grad_()
        result = run(value)
        yield result.detach()
        yield from torch.autograd.grad(
            (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum(), [value, *own]
        )

    def merged(value: torch.Tensor) -> torch.Tensor:
        for name in names:
            adapter = experts.low_rank[name]
            experts.__dict__[name] = experts._parameters[name] + adapter.scale * adapter.B @ adapter.A
        try:
            with without_adapters(model):
                result: torch.Tensor = experts(value, index, weights)
        finally:
            for name in names:
                del experts.__dict__[name]
        return result

    found, expected = list(gradients(lambda value: experts(value, index, weights))), list(gradients(merged))
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        assert float((one - other).abs().max()) <= bound * max(1.0, float(other.abs().max()))


def test_a_rank_without_tokens_still_has_gradients(kernels: str) -> None:
    model = model_of("qwen3_moe")
    model.set_experts_implementation(kernels)
    experts = with_adapters(model, zero=False)
    experts._is_expert_parallel = True
    hidden, _, weights = inputs(SIZES["hidden_size"], experts.num_experts, dtype=torch.float32, elsewhere=None)
    everything_elsewhere = torch.full((T, K), experts.num_experts)
    experts(hidden, everything_elsewhere, weights * 0).sum().backward()
    for adapter in experts.low_rank.values():
        assert isinstance(adapter, Adapter)
        for weight in (adapter.A, adapter.B):
            assert weight.grad is not None and not weight.grad.any()
