"""FLOP counts against those of real tiny models, counted operation by operation, and numbers done by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_rl.utils.flops import TransformerShape, sequence_cost, theoretical_tflops, transformer_flops
from tests.helpers.tiny_model import tiny_model


def test_matmul_flops_are_twice_the_weights_that_a_token_meets() -> None:
    model = tiny_model()
    shape = TransformerShape.from_config(model.config.to_dict())
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2)
    # The tied embedding is a matrix product once, as the head.
    assert shape.matmul_flops_per_token == 2 * matrices


def test_attention_counts_causal_pairs_and_backward_triples() -> None:
    shape = TransformerShape(
        hidden_size=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, mlp_size=16, vocab_size=10
    )
    forward = transformer_flops(shape, [5, 2], with_backward=False)
    pairs = 15 + 3
    assert forward == 7 * shape.matmul_flops_per_token + 4 * 3 * 2 * 4 * pairs
    assert transformer_flops(shape, [5, 2], with_backward=True) == 3 * forward
    # Logits are computed for trained tokens alone.
    trained = transformer_flops(shape, [5, 2], with_backward=False, num_head_tokens=3)
    assert forward - trained == 4 * 2 * 8 * 10


def test_only_active_experts_and_the_router_count() -> None:
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 999,
        "moe_intermediate_size": 6,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "vocab_size": 10,
    }
    attention, experts, router, head = 8 * 4 * 8, 3 * 8 * 12, 8 * 16, 8 * 10
    shape = TransformerShape.from_config(config)
    assert shape.matmul_flops_per_token == 2 * (attention + experts + router + head)


SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    "qwen3_moe with a dense layer": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, mlp_only_layers=[1]),
    "qwen3_moe, every second layer": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, decoder_sparse_step=2),
    "qwen2_moe, shared expert": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=40),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe, leading dense layer, two shared experts": Glm4MoeConfig(
        **SIZES, **ROUTED, head_dim=8, n_shared_experts=2
    ),
    "deepseek_v3, latent attention": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, **ROUTED, **LATENT, n_shared_experts=1
    ),
}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_the_count_is_that_of_the_model_itself_but_for_the_causal_half(config: PretrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    length = 12
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.randint(0, 96, (1, length)), use_cache=False).logits.sum().backward()
    shape = TransformerShape.from_config(config.to_dict())
    # Eager attention computes the masked half as well; a causal kernel and our figure do not.
    masked_pairs = length**2 - length * (length + 1) / 2
    masked = 3 * shape.num_layers * shape.pair_flops * masked_pairs
    assert counted.get_total_flops() - masked == transformer_flops(shape, [length], with_backward=True)


def test_a_sliding_window_bounds_the_keys_of_its_layers() -> None:
    config = {**SIZES, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    shape, full = TransformerShape.from_config(config), TransformerShape.from_config(SIZES)
    assert (shape.num_sliding_layers, shape.sliding_window) == (1, 3)
    saved = transformer_flops(full, [5], with_backward=False) - transformer_flops(shape, [5], with_backward=False)
    # 1 + 2 + 3 + 3 + 3 keys in place of 1 + 2 + 3 + 4 + 5.
    assert saved == 3 * shape.pair_flops
    assert transformer_flops(full, [2], with_backward=False) == transformer_flops(shape, [2], with_backward=False)


def test_the_cost_of_a_sequence_is_its_flops_in_closed_form() -> None:
    linear, square = sequence_cost(TransformerShape.from_config(SIZES))
    for length in (1, 7, 4096):
        flops = transformer_flops(TransformerShape.from_config(SIZES), [length], with_backward=False)
        assert linear * length + square * length**2 == pytest.approx(flops, rel=1e-12)
    sliding = {**SIZES, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    shape = TransformerShape.from_config(sliding)
    linear, square = sequence_cost(shape)
    flops = transformer_flops(shape, [4096], with_backward=False)
    assert linear * 4096 + square * 4096**2 == pytest.approx(flops, rel=1e-4), "the window is full for most tokens"


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA GB200", 2450.0), ("cpu", 0.0)],
)
def test_peaks_of_known_devices(name: str, peak: float) -> None:
    assert theoretical_tflops(name, dtype="bfloat16") == peak
