"""A small random model of a recipe's family, with a tokenizer: what `shrink` trains in place of the real one.

Made from the real model's config by its own class: switches (tied embeddings, norms of heads, biases, windows, kinds of
layers, shared experts, rope) stay, sizes shrink. Invariant: no weight is 0 or 1 by default, so that a layout that drops
or repeats one gives other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from nemo_rl.cluster.known_models import MLP_WIDTHS, sizes_of
from nemo_rl.config.parallel import ParallelSizes
from nemo_rl.data.sort_digits import problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.errors import ModelFolderError, UserError, boundary

__all__ = ["SmallModel", "small_model_config", "write_small_model"]

HEADS, HEAD_DIM, HIDDEN, WINDOW, POSITIONS = 4, 32, 64, 16, 2048
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
LAYERS_PER_STAGE = 2
INIT = 0.1
"""Standard deviation of the weights: with the usual 0.02 so small a model gives every token the same probability."""
MAX_PARAMETERS = 20_000_000
"""More means that a size was not found."""
SEED = 0
CAPS: Mapping[str, int] = {
    **{"hidden_size": HIDDEN, **dict.fromkeys(MLP_WIDTHS, 128), "head_dim": HEAD_DIM},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "n_shared_experts": 2},
    **{"num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS},
    **{"num_experts_per_tok": EXPERTS_PER_TOKEN, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "decoder_sparse_step": 2, "max_window_layers": 1, "sliding_window": WINDOW},
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "query_pre_attn_scalar": HEAD_DIM,
}
"""Sizes of decoders and the largest here; one that a config has not, or null, stays away."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LEFT_OUT = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map", *TOKENS)
"""Of the real config; tokens are those of the small tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallModel:
    """What was written."""

    folder: Path
    num_parameters: int
    num_layers: int


def small_model_config(
    real: PretrainedConfig, sizes: ParallelSizes, *, real_sizes: ParallelSizes, vocab_size: int
) -> PretrainedConfig:
    """The family's config with small sizes that the axes divide.

    Raises:
        ModelFolderError: it describes no plain decoder.
    """
    given = {name: value for name, value in sizes_of(real).items() if name not in LEFT_OUT}
    layers = _layers(given, sizes.pipeline)
    # Classes have tokens of their own, which a small vocabulary lacks.
    small = {
        **given,
        **dict.fromkeys(TOKENS),
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "initializer_range": INIT,
    }
    for name, cap in CAPS.items():
        if isinstance(given.get(name), int) and not isinstance(given[name], bool):
            small[name] = min(given[name], cap)
    small["num_attention_heads"] = HEADS
    if given.get("num_key_value_heads") is not None:
        small["num_key_value_heads"] = _key_value_heads(given, real_sizes.tensor)
    _shrink_lists(given, small, layers)
    _shrink_rope(given, small)
    own = {mine: small.pop(usual) for usual, mine in real.attribute_map.items() if usual in small}
    config: PretrainedConfig = AutoConfig.for_model(**{**small, **own})
    return config


def write_small_model(
    folder: Path, real: PretrainedConfig, sizes: ParallelSizes, *, real_sizes: ParallelSizes
) -> SmallModel:
    """Random weights and a tokenizer as a Hugging Face folder.

    Raises:
        ModelFolderError: transformers cannot build it.
        UserError: as `small_model_config`; or sizes stayed large.
    """
    tokenizer = build_tokenizer(f"user\n{p.prompt}\nassistant\n{p.answer}" for p in problems(200, seed=SEED))
    vocab_size = -(-len(tokenizer) // 64) * 64
    with boundary(ModelFolderError, f"a small {real.model_type!r} cannot be built"):
        config = small_model_config(real, sizes, real_sizes=real_sizes, vocab_size=vocab_size)
        _set_tokens(config, real, tokenizer)
        num_parameters = _write_weights(folder, config)
    tokenizer.save_pretrained(str(folder))
    return SmallModel(folder=folder, num_parameters=num_parameters, num_layers=config.num_hidden_layers)


def _write_weights(folder: Path, config: PretrainedConfig) -> int:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise UserError(
            f"a small {config.model_type!r} still has {count} parameters: its sizes have names of their own"
        )
    generator = torch.Generator().manual_seed(SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * INIT)
            elif ".experts." in name or name.endswith("gate.weight"):
                # Raw parameters of which some releases of transformers leave the values to chance.
                weight.copy_(torch.randn(weight.shape, generator=generator) * INIT)
    model.save_pretrained(str(folder))
    return count


def _set_tokens(config: PretrainedConfig, real: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    config.bos_token_id = None
    config.eos_token_id = tokenizer.eos_token_id
    # A padding token's embedding gets no gradient; without one in the family there is none here.
    config.pad_token_id = None if real.pad_token_id is None else tokenizer.pad_token_id


def _layers(given: Mapping[str, Any], stages: int) -> int:
    """Enough for every kind of layer in every pipeline stage, where that is not more than twice the usual."""
    kinds = given.get("layer_types")
    period = len(set(kinds)) if kinds else 1
    if given.get("decoder_sparse_step", 1) > 1 or given.get("first_k_dense_replace") or given.get("mlp_only_layers"):
        period = max(period, 2)
    per_stage = -(-LAYERS_PER_STAGE // period) * period
    return min(int(given["num_hidden_layers"]), stages * per_stage)


def _key_value_heads(given: Mapping[str, Any], real_tensor: int) -> int:
    """As many groups as heads, one for all, or between; one that tensor ranks must share stays shared."""
    heads, groups = int(given["num_attention_heads"]), int(given["num_key_value_heads"])
    if groups == heads:
        return HEADS
    return 1 if groups == 1 or real_tensor > groups else HEADS // 2


def _shrink_lists(given: Mapping[str, Any], small: dict[str, Any], layers: int) -> None:
    """One entry for each layer, every kind in turn; layers by number where there are such."""
    for name, value in given.items():
        if isinstance(value, (list, tuple)) and len(value) == given["num_hidden_layers"]:
            kinds = list(dict.fromkeys(value))
            small[name] = [kinds[layer % len(kinds)] for layer in range(layers)]
    if given.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    if isinstance(given.get("layer_types"), (list, tuple)) and "sliding_attention" in given["layer_types"]:
        small["sliding_window"] = WINDOW


def _shrink_rope(given: Mapping[str, Any], small: dict[str, Any]) -> None:
    """The kind and its numbers stay; factors by frequency are cut to those of a small head."""
    if not any(_is_scaled(given.get(name)) for name in ("rope_scaling", "rope_parameters")):
        small["max_position_embeddings"] = min(int(given.get("max_position_embeddings", POSITIONS)), POSITIONS)
    width = (small.get("head_dim") or HIDDEN // HEADS) // 2
    for name in ("rope_scaling", "rope_parameters"):
        rope = given.get(name)
        if isinstance(rope, Mapping):
            small[name] = {key: _cut(value, width) for key, value in rope.items()}


def _is_scaled(rope: object) -> bool:
    return isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) != "default"


def _cut(value: object, width: int) -> object:
    is_factors = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > width
    return list(value)[:width] if is_factors and isinstance(value, Sequence) else value
