"""Which module stands for which part of a decoder layer: Transformer Engine's where it is installed, else our own.

megatron-core's plain modules know neither packed sequences, context parallelism nor sequence parallel norms, so norms
and core attention are replaced. Invariant: both choices hold the same weights, under the names of `convert`.
"""

from __future__ import annotations

import importlib.util

import torch

from nemo_rl.models.megatron.architecture import Architecture
from nemo_rl.models.megatron.attention import SegmentAttention
from nemo_rl.models.megatron.mcore import (
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)

__all__ = ["RMSNorm", "block_spec", "has_transformer_engine"]


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be used: it needs CUDA."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


class RMSNorm(torch.nn.Module):
    """Root mean square norm in float32, as Hugging Face computes it.

    Under sequence parallelism each tensor rank sees a part of the tokens: its weight's gradient is partial, which the
    mark `sequence_parallel` says to megatron-core.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The shape and dtype of `hidden`."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(hidden.dtype)


def block_spec(config: TransformerConfig, shape: Architecture) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the final norm."""
    first, count = get_transformer_layer_offset(config), get_num_layers_to_build(config)
    kinds = {True: _layer_spec(config, has_experts=True), False: _layer_spec(config, has_experts=False)}
    layers = [kinds[has_experts] for has_experts in shape.expert_layers[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    experts = config.num_moe_experts if has_experts else None
    options = {"num_experts": experts, "moe_grouped_gemm": config.moe_grouped_gemm, "qk_layernorm": config.qk_layernorm}
    if has_transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(**options)
        spec.submodules.self_attention.submodules.core_attention = SegmentAttention
        return spec
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SegmentAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
