"""Adapters of fused experts: the forward of a Hugging Face mixture with a pair of A and B beside each expert.

Called by `lora.attach_adapters`. Invariant: with B at 0 the numbers are those of the module's own forward to the bit,
one by one as well as with grouped kernels; no merged weight is ever made. Shapes: T tokens, K experts of each, E
experts of this rank, S = T x K rows in the order of their experts, r rank; A `[E, r, in]`, B `[E, out, r]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from transformers.integrations.moe import _grouped_linear

from nemo_rl.models.hf.loading import ADAPTER_PART, EAGER, GROUPED, GROUPED_BYTES

__all__ = ["AddsResult", "Product", "adapt_experts", "experts_problem", "run_experts"]

Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(rows `[n, in]`, matrices `[E, out, in]`, scale of the matrices) -> `[n, out]`, each row by its expert's matrix."""
AddsResult: TypeAlias = Callable[[torch.Tensor, Product], torch.Tensor]
"""(rows `[n, in]`, the product) -> `[n, out]` that is added to the result of a weight."""


def experts_problem(experts: Any, weight: str) -> str | None:
    """Return why a weight of fused experts cannot have adapters, or None where it can."""
    given = vars(experts)
    if not {"has_gate", "has_bias", "is_transposed", "num_experts"} <= given.keys():
        return "is in a mixture that computes in its own way"
    if experts.is_transposed:
        return "is stored transposed, [E, in, out], for which adapters are not written"
    if weight not in _weights(experts):
        return "is no projection of the experts"
    implementation = experts.config._experts_implementation
    if implementation not in (EAGER, GROUPED):
        return f"runs as {implementation!r}, not one by one and not with grouped kernels"
    return None


def adapt_experts(experts: Any, weight: str, adapter: torch.nn.Module) -> None:
    """Let the forward of the experts add the result of an adapter to that of one weight; once for each weight."""
    if ADAPTER_PART not in experts._modules:
        experts.add_module(ADAPTER_PART, torch.nn.ModuleDict())
        experts.forward = _added(experts, experts.forward)
    experts.get_submodule(ADAPTER_PART)[weight] = adapter


def _added(experts: Any, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def with_adapters(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        adapters = {name: each for name, each in experts.get_submodule(ADAPTER_PART).items() if each.is_on}
        if not adapters:
            return forward(hidden, index, weights)
        return run_experts(experts, adapters, hidden, index, weights)

    return with_adapters


def run_experts(
    experts: Any,
    adapters: Mapping[str, AddsResult],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the result of fused experts `[T, H]`, with adapters beside their weights.

    Args:
        adapters: by the name of the weight.
        hidden: `[T, H]`.
        index: `[T, K]`, the experts of each token.
        weights: `[T, K]`, those of the experts.
    """
    run = _one_by_one if experts.config._experts_implementation == EAGER else _grouped
    return run(experts, adapters, hidden, index, weights)


def _weights(experts: Any) -> tuple[str, str]:
    """Return the names of the first and the second projection."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _has(experts: Any, feature: str) -> bool:
    """Return a switch of the experts; older releases of transformers have neither feature nor switch."""
    return bool(vars(experts).get(feature, False))


def _between(experts: Any, value: torch.Tensor) -> torch.Tensor:
    return experts._apply_gate(value) if experts.has_gate else experts.act_fn(value)


def _weight(experts: Any, name: str) -> torch.Tensor:
    """Return the parameter, or what hides it: a rank's part of it is an attribute of the same name."""
    return getattr(experts, name)


def _bias(experts: Any, name: str, expert: torch.Tensor | int) -> torch.Tensor | None:
    return _weight(experts, f"{name}_bias")[expert] if experts.has_bias else None


def _one_by_one(
    experts: Any,
    adapters: Mapping[str, AddsResult],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    linear, final = torch.nn.functional.linear, torch.zeros_like(hidden)
    first, second = _weights(experts)
    # An index of `num_experts` stands for experts of other ranks. The first expert runs also without a token: every
    # rank has to take part in reducing gradients.
    chosen = sorted({0, *index.unique().tolist()} - {experts.num_experts})
    for expert in chosen:
        slot, token = torch.where(index.t() == expert)

        def product(value: torch.Tensor, matrix: torch.Tensor, scale: float, expert: int = expert) -> torch.Tensor:
            return linear(value, matrix[expert] if scale == 1.0 else matrix[expert] * scale)

        def project(value: torch.Tensor, name: str, expert: int = expert, product: Any = product) -> torch.Tensor:
            result = linear(value, _weight(experts, name)[expert], _bias(experts, name, expert))
            return result + adapters[name](value, product) if name in adapters else result

        value = project(_between(experts, project(hidden[token], first)), second)
        if _has(experts, "has_post_expert_norm"):
            value = experts.post_expert_norm(value)
        value = value * weights[token, slot, None]
        final.index_add_(0, token, value.to(final.dtype))
    return final


def _grouped(
    experts: Any,
    adapters: Mapping[str, AddsResult],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Compute as transformers' `grouped_mm_experts_forward`, with the products of the adapters."""
    num_top_k = index.shape[-1]
    expert_S, order_S = torch.sort(index.reshape(-1))
    count = experts.num_experts
    ends_E = torch.searchsorted(expert_S, torch.arange(count, device=index.device), right=True).to(torch.int32)
    # Rows of experts of other ranks are at the end, where the kernels neither read nor write.
    is_elsewhere_S1 = (expert_S >= count)[:, None] if _has(experts, "_is_expert_parallel") else None
    expert_S = expert_S.clamp(max=count - 1)

    def cleared(value: torch.Tensor) -> torch.Tensor:
        return value if is_elsewhere_S1 is None else value.masked_fill(is_elsewhere_S1, 0.0)

    def product(value: torch.Tensor, matrix: torch.Tensor, scale: float) -> torch.Tensor:
        return _grouped_linear(value, _aligned(matrix if scale == 1.0 else matrix * scale), ends_E)

    def project(value: torch.Tensor, name: str) -> torch.Tensor:
        bias = _bias(experts, name, expert_S)
        result = _grouped_linear(value, _weight(experts, name), ends_E, bias=bias)
        return cleared(result + adapters[name](value, product) if name in adapters else result)

    first, second = _weights(experts)
    value = cleared(hidden[order_S // num_top_k])
    value = project(_between(experts, project(value, first)), second)
    if _has(experts, "has_post_expert_norm"):
        value = experts.post_expert_norm(value)
    value = value * weights.reshape(-1)[order_S][:, None]
    value = value[torch.argsort(order_S)]
    return value.view(hidden.shape[0], num_top_k, hidden.shape[-1]).sum(dim=1).to(hidden.dtype)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrices with zeros where the rank is not a multiple of what the kernels take."""
    multiple = GROUPED_BYTES // matrix.element_size()
    rows, columns = (-size % multiple for size in matrix.shape[1:])
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows)) if rows or columns else matrix
