"""Floating-point operations of a transformer, and what a device could do at most.

Called by the policy workers. Invariant: counts are of the model's own work (2 per multiply-add); recomputation in the
backward pass is not counted, so a utilisation figure does not rise with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["TransformerShape", "sequence_cost", "theoretical_tflops", "transformer_flops"]

# Dense matrix TFLOP/s from the vendors' data sheets: part of the device name -> dtype -> peak. First match wins.
PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "GB200": {"bfloat16": 2450.0, "float16": 2450.0, "float32": 80.0},
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
class LatentAttention:
    """Multi-head latent attention: queries, keys and values pass through narrow projections."""

    q_rank: int
    """Width of the queries' projection; 0 projects them directly."""
    kv_rank: int
    rope_dim: int
    """Rotated part of a head, shared by the keys of all heads."""
    nope_dim: int
    """Part of a head that is not rotated."""
    value_dim: int


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
    shared_mlp_size: int = 0
    """Width of the experts that see every token, besides the routed ones."""
    has_shared_gate: bool = False
    """True where a gate of one number per token weighs the shared experts."""
    num_dense_layers: int = 0
    """Layers of a mixture of experts whose MLP is a dense one (often the first ones)."""
    dense_mlp_size: int = 0
    """Width of the MLP of those layers."""
    latent: LatentAttention | None = None
    """Sizes of latent attention, or None for ordinary and grouped-query attention."""
    sliding_window: int = 0
    """Keys that a token of a sliding layer meets at most, itself included."""
    num_sliding_layers: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> TransformerShape:
        """Read the shape from the dictionary of a Hugging Face decoder config (`config.to_dict()`)."""
        numbers = _Numbers(config)
        hidden, heads = numbers("hidden_size"), numbers("num_attention_heads", default=1)
        dense_mlp = numbers("intermediate_size", default=4 * hidden)
        experts = numbers("num_experts", "num_local_experts", "n_routed_experts")
        expert_mlp = numbers("moe_intermediate_size", default=dense_mlp)
        layer_types = config.get("layer_types")
        sliding = layer_types.count("sliding_attention") if isinstance(layer_types, list) else 0
        shared = numbers("shared_expert_intermediate_size", default=numbers("n_shared_experts") * expert_mlp)
        return cls(
            hidden_size=hidden,
            num_layers=numbers("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=numbers("num_key_value_heads", default=heads),
            head_dim=numbers("head_dim", default=hidden // heads),
            mlp_size=numbers("num_experts_per_tok", default=1) * expert_mlp if experts else dense_mlp,
            vocab_size=numbers("vocab_size"),
            num_experts=experts,
            shared_mlp_size=shared if experts else 0,
            has_shared_gate=bool(experts) and numbers("shared_expert_intermediate_size") > 0,
            num_dense_layers=_count_dense_layers(config) if experts else 0,
            dense_mlp_size=dense_mlp if experts else 0,
            latent=_latent(numbers),
            sliding_window=numbers("sliding_window"),
            num_sliding_layers=sliding,
        )

    @property
    def attention_weights(self) -> int:
        """Return the number of elements of one layer's projections of queries, keys, values and outputs."""
        if self.latent is None:
            return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        latent, heads = self.latent, self.num_heads
        queries = heads * (latent.nope_dim + latent.rope_dim)
        reduced = latent.q_rank * (self.hidden_size + queries) if latent.q_rank else self.hidden_size * queries
        keys_values = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
        into_latent = self.hidden_size * (latent.kv_rank + latent.rope_dim)
        return reduced + into_latent + keys_values + heads * latent.value_dim * self.hidden_size

    @property
    def layer_flops_per_token(self) -> float:
        """Return the FLOPs of the forward pass of one token without attention scores and head: projections, gated MLP
        and router."""
        sparse_layers = self.num_layers - self.num_dense_layers
        sparse = 3 * (self.mlp_size + self.shared_mlp_size) + self.num_experts + self.has_shared_gate
        mlp = sparse_layers * sparse + self.num_dense_layers * 3 * self.dense_mlp_size
        return 2.0 * (self.num_layers * self.attention_weights + self.hidden_size * mlp)

    @property
    def head_flops_per_token(self) -> float:
        return 2.0 * self.hidden_size * self.vocab_size

    @property
    def matmul_flops_per_token(self) -> float:
        """Return the FLOPs of the forward pass of one token whose logits are computed, without attention scores."""
        return self.layer_flops_per_token + self.head_flops_per_token

    @property
    def pair_flops(self) -> float:
        """Return the forward FLOPs of one layer for one query and one key: the score, and the value's share."""
        if self.latent is None:
            return 4.0 * self.num_heads * self.head_dim
        return 2.0 * self.num_heads * (self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim)


def transformer_flops(
    shape: TransformerShape,
    sequence_lengths: Iterable[int],
    *,
    with_backward: bool,
    trains_weights: bool = True,
    num_head_tokens: int | None = None,
) -> float:
    """Return the FLOPs of one pass over whole sequences; a backward pass costs twice the forward pass.

    Frozen weights take no gradient, which leaves the half of the backward pass that leads to the inputs; the products
    of adapters, below a hundredth of it, are left out.

    Causal attention: token t meets t keys, or as many as the window of a sliding layer holds.

    Args:
        num_head_tokens: tokens whose logits are computed; None: all.
    """
    lengths = list(sequence_lengths)
    forward = shape.head_flops_per_token * (sum(lengths) if num_head_tokens is None else num_head_tokens)
    full_layers = shape.num_layers - shape.num_sliding_layers
    for length in lengths:
        pairs = full_layers * _causal_pairs(length, length)
        pairs += shape.num_sliding_layers * _causal_pairs(length, shape.sliding_window or length)
        forward += length * shape.layer_flops_per_token + shape.pair_flops * pairs
    return (3.0 if trains_weights else 2.0) * forward if with_backward else forward


def sequence_cost(shape: TransformerShape) -> tuple[float, float]:
    """Return (a, b) of the forward FLOPs a s + b s^2 of a sequence of s tokens, by which packing levels its ranks.

    `transformer_flops` in closed form, but for sliding layers, whose tokens count as if all met a full window; which
    tokens are trained is not asked, so that the logits of all count.
    """
    full_layers = shape.num_layers - shape.num_sliding_layers
    per_token = full_layers / 2 + shape.num_sliding_layers * shape.sliding_window
    return shape.matmul_flops_per_token + shape.pair_flops * per_token, shape.pair_flops * full_layers / 2


def _causal_pairs(length: int, window: int) -> float:
    """Return the number of query-key pairs when a token meets at most `window` keys, itself included."""
    window = min(window, length)
    return window * (window + 1) / 2 + (length - window) * window


class _Numbers:
    """Integers of a config by the first of several names that has one."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def __call__(self, *names: str, default: int = 0) -> int:
        found = (self._config.get(name) for name in names)
        return next((value for value in found if isinstance(value, int)), default)


def _count_dense_layers(config: Mapping[str, object]) -> int:
    """Return the number of layers of a mixture without experts: leading ones, listed ones, and those between the sparse
    ones."""
    numbers = _Numbers(config)
    leading, every = numbers("first_k_dense_replace"), numbers("decoder_sparse_step", "moe_layer_freq", default=1)
    # decoder_sparse_step counts layers from 1 (qwen), moe_layer_freq from 0 (deepseek).
    first = 1 if "decoder_sparse_step" in config else 0
    listed = config.get("mlp_only_layers")
    is_dense = [
        layer < leading or (layer + first) % max(1, every) != 0 or (isinstance(listed, list) and layer in listed)
        for layer in range(numbers("num_hidden_layers"))
    ]
    return sum(is_dense)


def _latent(numbers: _Numbers) -> LatentAttention | None:
    if not numbers("kv_lora_rank"):
        return None
    return LatentAttention(
        q_rank=numbers("q_lora_rank"),
        kv_rank=numbers("kv_lora_rank"),
        rope_dim=numbers("qk_rope_head_dim"),
        nope_dim=numbers("qk_nope_head_dim"),
        value_dim=numbers("v_head_dim"),
    )


def theoretical_tflops(device_name: str, *, dtype: str) -> float:
    """Return the peak of a known GPU; 0 for CPUs and unknown devices."""
    for part, peaks in PEAK_TFLOPS.items():
        if part in device_name:
            return peaks[dtype]
    return 0.0
