"""A small random model of a family, with a tokenizer: what `shrink` trains and preflight checks in place of another.

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
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from nemo_rl.config.policy import ParallelSizes
from nemo_rl.data.generated import problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.errors import ModelFolderError, UserError, boundary
from nemo_rl.models.hf.loading import model_class
from nemo_rl.models.vision import family_of
from nemo_rl.utils.files import give_usual_modes

__all__ = ["HIDDEN", "WIDE", "language_config", "small_model_config", "write_small_model"]

HEADS, HEAD_DIM, HIDDEN, WINDOW, POSITIONS, WIDTH = 4, 32, 64, 16, 2048, 128
WIDE = HEADS * HEAD_DIM
"""Residual stream of a model whose heads make it up and are as large as vLLM's attention on CPUs wants them."""
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
LAYERS_PER_STAGE = 2
INIT = 0.1
"""Standard deviation of the weights: with the usual 0.02 so small a model gives every token the same probability."""
MAX_PARAMETERS = 20_000_000
"""More means that a size was not found."""
SEED = 0
RESIDUAL = (
    *("hidden_size", "n_embd", "d_model", "embedding_dim", "emb_dim", "embedding_size"),
    *("input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "lru_width"),
    *("attention_hidden_size", "hidden_size_per_layer_input"),
)
"""The residual stream, and what it is called in older families."""
CAPS: Mapping[str, int] = {
    **dict.fromkeys(RESIDUAL, HIDDEN),
    # Feed-forward layers.
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dense_intermediate_size"), WIDTH),
    **dict.fromkeys(("intermediate_size_mlp", "dff", "dim_ff", "d_inner", "feed_forward_size", "d_ff"), WIDTH),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "mamba_d_ssm"), WIDTH),
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "expert_ffn_hidden_size": 32},
    **{"shared_intermediate_size": 64, "shared_experts_intermediate_size": 64, "n_shared_experts": 2},
    **{"moe_shared_expert_intermediate_size": 32, "num_shared_experts": 2, "moe_num_shared_experts": 2},
    # Attention.
    **{"head_dim": HEAD_DIM, "dim_head": HEAD_DIM, "kv_channels": HEAD_DIM, "attention_head_dim": HEAD_DIM},
    **{"swa_head_dim": HEAD_DIM, "attention_head_size": HEAD_DIM, "rotary_dim": HEAD_DIM // 2, "d_head": HEAD_DIM},
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"qk_head_dim": 24, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "o_lora_rank": 16},
    "query_pre_attn_scalar": HEAD_DIM,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "local_attention", "keep_window_size"), WINDOW),
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k"), EXPERTS_PER_TOKEN),
    **{"moe_topk": EXPERTS_PER_TOKEN, "n_group": 2, "topk_group": 1, "num_expert_group": 2, "zero_expert_num": 4},
    **{"first_k_dense_replace": 1, "decoder_sparse_step": 2, "max_window_layers": 1, "num_dense_layers": 1},
    **{"interleave_moe_layer_step": 2, "moe_layer_start_index": 1, "router_hidden_size": 32},
    # Layers that carry a state along a row.
    **{"mamba_d_state": 16, "state_size": 16, "ssm_state_size": 16, "mamba_dt_rank": 8, "time_step_rank": 8},
    **{"mamba_d_head": HEAD_DIM, "mamba_head_dim": HEAD_DIM, "mamba_headdim": HEAD_DIM, "mamba_n_heads": HEADS},
    **{"mamba_num_heads": HEADS, "n_mamba_heads": 2, "mamba_chunk_size": 16, "chunk_size": 16, "block_size": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": HEADS, "linear_num_heads": HEADS},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16, "n_groups": 2},
    # Smaller tables beside the embedding.
    **{"vocab_size_per_layer_input": 1024, "altup_num_inputs": 2, "laurel_rank": 16, "adapter_rank": 8},
}
"""Sizes of decoders and the largest here; one that a config has not, or null, stays away."""
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
"""Numbers of query heads, by every name."""
KEY_VALUE_COUNTS = ("num_key_value_heads", "kv_n_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
POSITION_COUNTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length")
BLOCK_TYPES = "layers_block_type"
"""Key of a list that says how many layers there are, in the families that have it."""
KINDS_OF_LAYERS = ("layer_types", BLOCK_TYPES, "block_types", "attention_layers", "mlp_layer_types")
NUMBERED_LAYERS = ("full_attn_idxs", "moe_layers", "hybrid_layer_ids")
"""Lists of the numbers of layers of one kind."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SMALL_TOKENS: Mapping[str, int] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION_TOKENS = (3, 4, 5, 6)
"""Ids of the small tokenizer that stand for an image, and for its neighbours."""
LEFT_OUT = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map", *TOKENS)
"""Keys that are not taken from the real config; tokens are those of the small tokenizer."""
MODEL_SIZES = frozenset({"hidden_size", "num_hidden_layers", "d_model", "num_layers"})
"""Sizes that a section of a config has if it describes a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallModel:
    """The model that was written."""

    folder: Path
    num_parameters: int
    num_layers: int


def small_model_config(
    real: PretrainedConfig, sizes: ParallelSizes, *, real_sizes: ParallelSizes, vocab_size: int, hidden: int = HIDDEN
) -> PretrainedConfig:
    """Return the family's config with small sizes that the parallel axes divide.

    Args:
        hidden: size of the residual stream.

    Raises:
        UserError: it describes no plain decoder.
    """
    vision = family_of(real)
    if vision is not None:
        text = small_model_config(
            real.get_text_config(), sizes, real_sizes=real_sizes, vocab_size=vocab_size, hidden=hidden
        )
        return vision.small(text, tokens=VISION_TOKENS, deviation=INIT)
    given = {name: value for name, value in real.to_dict().items() if name not in LEFT_OUT}
    given_tokens = {name: real.to_dict().get(name) for name in TOKENS}
    layers_name, heads_name = (_own_name(real, name) for name in ("num_hidden_layers", "num_attention_heads"))
    count = given.get(layers_name, len(given.get(BLOCK_TYPES) or ()))
    towers = _other_models(real)
    if towers or not count:
        parts = f"parts besides the language model ({', '.join(towers)})" if towers else "no layers"
        raise UserError(
            f"policy.model_name: a {real.model_type!r} has {parts}, and cannot be made small here, so nothing tells "
            "whether its numbers would be right; take a model type of docs/model_support.md"
        )
    layers = _layers(given, count, sizes.pipeline)
    # Classes have their own tokens, which a small vocabulary lacks.
    small = {
        **given,
        **{name: token for name, token in SMALL_TOKENS.items() if given_tokens[name] is not None},
        _own_name(real, "vocab_size"): vocab_size,
        **({layers_name: layers} if layers_name in given else {}),
        "initializer_range": INIT,
    }
    for name, cap in CAPS.items():
        if isinstance(given.get(name), int) and not isinstance(given[name], bool):
            small[name] = min(given[name], hidden if name in RESIDUAL else cap)
    for name in HEAD_COUNTS:
        if isinstance(given.get(name), int):
            small[name] = HEADS
    for name in KEY_VALUE_COUNTS:
        if isinstance(given.get(name), int) and not isinstance(given[name], bool):
            small[name] = _key_value_heads(given[heads_name], given[name], real_sizes.tensor)
    _keep_products(given, small, heads=given.get(heads_name), hidden=hidden)
    _shrink_lists(given, small, count, layers)
    _shrink_rope(given, small, hidden=hidden)
    return type(real)(**{name: value for name, value in small.items() if name != "model_type"})


def write_small_model(
    folder: Path,
    real: PretrainedConfig,
    sizes: ParallelSizes,
    *,
    real_sizes: ParallelSizes,
    seed: int = SEED,
    hidden: int = HIDDEN,
) -> SmallModel:
    """Return random weights and a tokenizer as a Hugging Face folder.

    Args:
        seed: of the weights; the tokenizer is always the same.
        hidden: size of the residual stream.

    Raises:
        ModelFolderError: transformers cannot build it.
        UserError: as `small_model_config`; or sizes stayed large.
    """
    tokenizer = build_tokenizer(f"user\n{p.prompt}\nassistant\n{p.answer}" for p in problems(200, seed=SEED))
    vocab_size = -(-len(tokenizer) // 64) * 64
    with boundary(ModelFolderError, f"a small {real.model_type!r} cannot be built"):
        config = small_model_config(real, sizes, real_sizes=real_sizes, vocab_size=vocab_size, hidden=hidden)
        _set_tokens(config, real, tokenizer)
        num_parameters = _write_weights(folder, config, seed=seed)
    tokenizer.save_pretrained(str(folder))
    give_usual_modes(folder)
    layers = config.get_text_config().num_hidden_layers
    return SmallModel(folder=folder, num_parameters=num_parameters, num_layers=layers)


def _write_weights(folder: Path, config: PretrainedConfig, *, seed: int) -> int:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in model_class(config).from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise UserError(f"a small {config.model_type!r} still has {count} parameters: its sizes have their own names")
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).from_config(config, trust_remote_code=False)
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
    config, real = config.get_text_config(), real.get_text_config()
    config.eos_token_id = tokenizer.eos_token_id
    # A padding token's embedding gets no gradient; without one in the family there is none here.
    config.pad_token_id = None if real.to_dict().get("pad_token_id") is None else tokenizer.pad_token_id


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a config that `AutoModelForCausalLM` builds its model from: all of it, or its text part."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_part = model_class is not None and model_class.config_class is (config.sub_configs or {}).get("text_config")
    return config.get_text_config() if is_part else config


def _other_models(config: PretrainedConfig) -> list[str]:
    """Return the names of the sections that describe a model of their own, not switches of this one as MPT's do."""
    given = config.to_dict()
    return [name for name in config.sub_configs or () if not MODEL_SIZES.isdisjoint(given.get(name) or ())]


def _own_name(config: PretrainedConfig, name: str) -> str:
    """Return what a family calls a size that has a common name, such as `n_layer` for `num_hidden_layers`."""
    return str((config.attribute_map or {}).get(name, name))


def _layers(given: Mapping[str, Any], count: int, stages: int) -> int:
    """Return enough layers for every kind in every pipeline stage, where that is not more than twice the usual."""
    period = max((len(set(map(str, given[name]))) for name in KINDS_OF_LAYERS if given.get(name)), default=1)
    if given.get("decoder_sparse_step", 1) > 1 or given.get("first_k_dense_replace") or given.get("mlp_only_layers"):
        period = max(period, 2)
    if given.get("num_dense_layers") or given.get("interleave_moe_layer_step", 1) > 1:
        period = max(period, 2)
    if given.get("num_kv_shared_layers"):
        period *= 2
    per_stage = -(-LAYERS_PER_STAGE // period) * period
    return min(count, stages * per_stage)


def _key_value_heads(heads: int, groups: int, real_tensor: int) -> int:
    """Return as many groups as heads, one for all, or between; one that tensor ranks must share stays shared."""
    if groups == heads:
        return HEADS
    return 1 if groups == 1 or real_tensor > groups else HEADS // 2


def _keep_products(given: Mapping[str, Any], small: dict[str, Any], *, heads: int | None, hidden: int) -> None:
    """Keep what some families compute from one another: heads that make up the residual stream, parts of a head."""
    if heads and given.get("head_dim") and given["head_dim"] * heads == given.get("hidden_size"):
        small["head_dim"] = hidden // HEADS
    if "qk_rope_head_dim" in given and given.get("head_dim") == given["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    if given.get("qk_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if given.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = LAYERS_PER_STAGE


def _shrink_lists(given: Mapping[str, Any], small: dict[str, Any], count: int, layers: int) -> None:
    """Keep one entry for each layer, every kind in turn, and the lists of layers by number."""
    for name, value in given.items():
        if isinstance(value, (list, tuple)) and len(value) == count and name not in NUMBERED_LAYERS:
            kinds = [value[place] for place in dict.fromkeys(map(list(map(str, value)).index, map(str, value)))]
            small[name] = [kinds[layer % len(kinds)] for layer in range(layers)]
        elif name in NUMBERED_LAYERS and value:
            small[name] = sorted({number % layers for number in value if isinstance(number, int)})
    if isinstance(given.get("per_layer_config"), Mapping):
        small["per_layer_config"] = {
            number: part for number, part in given["per_layer_config"].items() if int(number) < layers
        }
    if given.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    if isinstance(given.get("layer_types"), (list, tuple)) and "sliding_attention" in given["layer_types"]:
        small["sliding_window"] = WINDOW


def _shrink_rope(given: Mapping[str, Any], small: dict[str, Any], *, hidden: int) -> None:
    """Shrink the positions: the kind and its numbers stay; factors by frequency are cut to those of a small head."""
    if not any(_is_scaled(given.get(name)) for name in ("rope_scaling", "rope_parameters")):
        for name in POSITION_COUNTS:
            if isinstance(given.get(name), int):
                small[name] = min(given[name], POSITIONS)
    width = (small.get("head_dim") or hidden // HEADS) // 2
    for name in ("rope_scaling", "rope_parameters"):
        rope = given.get(name)
        if isinstance(rope, Mapping):
            small[name] = {key: _cut(value, width) for key, value in rope.items()}


def _is_scaled(rope: object) -> bool:
    return isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) != "default"


def _cut(value: object, width: int) -> object:
    is_factors = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > width
    return list(value)[:width] if is_factors and isinstance(value, Sequence) else value
