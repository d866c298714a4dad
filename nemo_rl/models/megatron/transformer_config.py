"""The `TransformerConfig` of a policy: architecture, parallel sizes and `policy.megatron_cfg` for megatron-core."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import silu

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.hf.loading import DTYPES
from nemo_rl.models.megatron.architecture import Architecture, Mixture
from nemo_rl.models.megatron.attention import SegmentAttention
from nemo_rl.models.megatron.mcore import (
    USING_PYTORCH_OPTIMIZER,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)

__all__ = [
    "DecoderConfig",
    "RMSNorm",
    "block_spec",
    "has_transformer_engine",
    "transformer_config",
    "uses_distributed_optimizer",
]


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be used: it needs CUDA."""
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
        """Return the shape and dtype of `hidden`."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(hidden.dtype)


def block_spec(
    config: TransformerConfig, shape: Architecture, *, has_adapters: bool = False
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage and the final norm."""
    first, count = get_transformer_layer_offset(config), get_num_layers_to_build(config)
    kinds = {has: _layer_spec(config, has_experts=has, has_adapters=has_adapters) for has in (True, False)}
    layers = [kinds[has_experts] for has_experts in shape.expert_layers[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, *, has_experts: bool, has_adapters: bool) -> ModuleSpec:
    experts = config.num_moe_experts if has_experts else None
    options = {"num_experts": experts, "moe_grouped_gemm": config.moe_grouped_gemm, "qk_layernorm": config.qk_layernorm}
    # An adapter needs the input of its layer, which Transformer Engine computes inside of it, out of the norm's.
    is_plain = has_adapters and not has_experts
    if has_transformer_engine() and not is_plain:
        spec = get_gpt_layer_with_transformer_engine_spec(**options)
        spec.submodules.self_attention.submodules.core_attention = SegmentAttention
        if has_adapters:
            local = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
            linear_qkv = local.submodules.self_attention.submodules.linear_qkv
            spec.submodules.self_attention.submodules.linear_qkv = linear_qkv
            spec.submodules.input_layernorm = RMSNorm
        return spec
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SegmentAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


@dataclass
class DecoderConfig(TransformerConfig):  # type: ignore[misc]
    """megatron-core's settings and what our own modules need besides them."""

    attention_windows: tuple[int | None, ...] = field(default=())
    """Per layer of the whole model: tokens that a token sees; None means all."""


def transformer_config(
    shape: Architecture, policy: PolicyConfig, *, is_cuda: bool, attention_scaling: float = 1.0
) -> DecoderConfig:
    """Return settings of the model.

    Args:
        attention_scaling: factor of rotary sine and cosine, so that scores are scaled by its square.
    """
    section, sizes = policy.megatron_cfg, policy.parallel_sizes
    dtype = DTYPES[policy.precision]
    return DecoderConfig(
        attention_windows=shape.windows,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_groups,
        kv_channels=shape.head_dim,
        softmax_scale=shape.head_dim**-0.5 * attention_scaling**2,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        qk_layernorm=shape.has_head_norms,
        init_method_std=shape.initializer_range,
        hidden_dropout=0.0,
        attention_dropout=shape.attention_dropout,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        # Weights come from a folder, but this also marks tensor parallel ones, which the gradient norm needs.
        perform_initialization=True,
        use_cpu_initialization=not is_cuda,
        # The loss is divided by the tokens of the global batch already, so gradients of all ranks are summed.
        calculate_per_token_loss=True,
        deterministic_mode=policy.deterministic,
        # Microbatches differ in width.
        variable_seq_lengths=section.moe_token_dispatcher_type == "alltoall",
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        sequence_parallel=sizes.sequence_parallel,
        num_layers_in_first_pipeline_stage=section.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=section.num_layers_in_last_pipeline_stage,
        moe_token_dispatcher_type=section.moe_token_dispatcher_type,
        # Ours are plain modules; kernels of Transformer Engine and apex are used where they are asked for.
        bias_activation_fusion=is_cuda and has_transformer_engine(),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=section.apply_rope_fusion,
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=True,
        # No graphs; megatron-core's own default warns that it is deprecated.
        cuda_graph_scope=[],
        **_recompute(policy),
        **(_experts(shape.mixture, shape, policy) if shape.mixture is not None else {}),
    )


def uses_distributed_optimizer(policy: PolicyConfig) -> bool:
    """Return whether each data-parallel rank keeps a part of the optimizer state."""
    has_fused_adam = torch.cuda.is_available() and not USING_PYTORCH_OPTIMIZER
    return policy.megatron_cfg.optimizer.is_distributed(has_fused_adam=has_fused_adam)


def _recompute(policy: PolicyConfig) -> dict[str, Any]:
    section = policy.megatron_cfg
    if not section.activation_checkpointing:
        return {}
    if section.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(section.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": section.recompute_method,
        "recompute_num_layers": section.recompute_num_layers,
    }


def _experts(mixture: Mixture, shape: Architecture, policy: PolicyConfig) -> dict[str, Any]:
    section = policy.megatron_cfg
    is_sigmoid = mixture.score == "sigmoid"
    use_groups = mixture.num_groups > 1
    grouped = section.moe_grouped_gemm
    return {
        "num_moe_experts": mixture.num_experts,
        "moe_router_topk": mixture.top_k,
        "moe_ffn_hidden_size": mixture.intermediate_size,
        "moe_layer_freq": [int(has_experts) for has_experts in shape.expert_layers],
        "moe_shared_expert_intermediate_size": mixture.shared_intermediate_size or None,
        "moe_router_score_function": mixture.score,
        "moe_router_enable_expert_bias": is_sigmoid,
        "moe_router_bias_update_rate": section.moe_router_bias_update_rate,
        # The softmax over the chosen logits is the normalised one over all.
        "moe_router_pre_softmax": not is_sigmoid and not mixture.normalises,
        "moe_router_topk_scaling_factor": mixture.scaling if mixture.scaling != 1.0 else None,
        "moe_router_num_groups": mixture.num_groups if use_groups else None,
        "moe_router_group_topk": mixture.top_groups if use_groups else None,
        "moe_router_dtype": section.moe_router_dtype,
        "moe_router_load_balancing_type": section.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": section.moe_aux_loss_coeff,
        "moe_permute_fusion": section.moe_permute_fusion,
        "moe_grouped_gemm": has_transformer_engine() if grouped is None else grouped,
    }
