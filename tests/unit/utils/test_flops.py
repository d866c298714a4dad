"""FLOP counts against numbers done by hand."""

from __future__ import annotations

import pytest

from nemo_rl.utils.flops import TransformerShape, theoretical_tflops, transformer_flops
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


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("cpu", 0.0)]
)
def test_peaks_of_known_devices(name: str, peak: float) -> None:
    assert theoretical_tflops(name, dtype="bfloat16") == peak
