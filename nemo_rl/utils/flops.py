"""Floating-point operations of a transformer, and what a device could do at most.

Called by the policy workers. Invariant: counts are of the model's own work (2 per multiply-add); recomputation in the
backward pass is not counted, so a utilisation figure does not rise with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["TransformerShape", "theoretical_tflops", "transformer_flops"]

# Dense matrix TFLOP/s from the vendors' data sheets: part of the device name -> dtype -> peak. First match wins.
PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "B200": {"bfloat16": 2250.0, "float16": 2250.0, "float32": 75.0},
    "H200": {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0},
    "H100 PCIe": {"bfloat16": 756.0, "float16": 756.0, "float32": 51.0},
    "H100": {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0},
    "H800": {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0},
    "A100": {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
    "A800": {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
    "L40S": {"bfloat16": 362.0, "float16": 362.0, "float32": 91.6},
    "L4": {"bfloat16": 121.0, "float16": 121.0, "float32": 30.3},
    "A10": {"bfloat16": 125.0, "float16": 125.0, "float32": 31.2},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerShape:
    """The numbers of a decoder that decide its FLOPs."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    """Width of the MLP of one token: of all active experts together for a mixture of experts."""
    vocab_size: int
    num_experts: int = 0
    """Experts the router scores; 0 for a dense model."""

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> TransformerShape:
        """From the dictionary of a Hugging Face decoder config (`config.to_dict()`)."""

        def number(name: str, default: int) -> int:
            value = config.get(name)
            return value if isinstance(value, int) else default

        hidden, heads = number("hidden_size", 0), number("num_attention_heads", 1)
        experts = number("num_experts", number("num_local_experts", 0))
        expert_mlp = number("moe_intermediate_size", number("intermediate_size", 4 * hidden))
        return cls(
            hidden_size=hidden,
            num_layers=number("num_hidden_layers", 0),
            num_heads=heads,
            num_kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // heads),
            mlp_size=number("num_experts_per_tok", 1) * expert_mlp
            if experts
            else number("intermediate_size", 4 * hidden),
            vocab_size=number("vocab_size", 0),
            num_experts=experts,
        )

    @property
    def matmul_flops_per_token(self) -> float:
        """Forward pass of one token without attention scores: projections, gated MLP, router and head."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        mlp = 3 * self.hidden_size * self.mlp_size
        router = self.hidden_size * self.num_experts
        return 2.0 * (self.num_layers * (attention + mlp + router) + self.hidden_size * self.vocab_size)


def transformer_flops(shape: TransformerShape, sequence_lengths: Iterable[int], *, with_backward: bool) -> float:
    """FLOPs of one pass over whole sequences; a backward pass costs twice the forward pass.

    Causal attention: token t meets t keys, 2 multiply-adds per key and head dimension (scores and values).
    """
    forward = 0.0
    for length in sequence_lengths:
        pairs = length * (length + 1) / 2
        forward += length * shape.matmul_flops_per_token
        forward += 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    return 3.0 * forward if with_backward else forward


def theoretical_tflops(device_name: str, *, dtype: str) -> float:
    """Peak of a known GPU; 0 for CPUs and unknown devices."""
    for part, peaks in PEAK_TFLOPS.items():
        if part in device_name:
            return peaks[dtype]
    return 0.0
