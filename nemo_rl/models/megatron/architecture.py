"""`Architecture`: what a Hugging Face config says of a decoder, in the terms that megatron-core builds it from.

Called by the driver before anything starts and by each worker; imports neither megatron-core nor weights. Invariant:
what is accepted here runs with the numbers of the Hugging Face model; the rest is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl.config.backends import MegatronConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError

__all__ = [
    "SUPPORTED",
    "Architecture",
    "Mixture",
    "check_fits",
    "layers_of_stages",
    "rotary_frequencies",
    "rotary_problems",
]

KINDS = ("default", "linear", "llama3", "yarn")
"""`rope_type`s whose frequencies do not depend on the length of a sequence."""
PARTIAL = ("glm4_moe",)
"""Families that rotate a part of each head."""


def rotary_problems(config: PretrainedConfig) -> list[str]:
    """Return the settings that have no counterpart here, one line each; empty where `rotary_frequencies` is right."""
    rope: Mapping[str, Any] = config.rope_parameters or {}
    kind = rope.get("rope_type")
    if kind not in KINDS:
        return [f"positions of rope_type {kind!r} (expected {', '.join(KINDS)})"]
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0 and config.model_type not in PARTIAL:
        # Hugging Face ignores it for the default kind, and fails for the others.
        return [f"positions in a part of each head (partial_rotary_factor {part})"]
    try:
        _, factor = rotary_frequencies(config)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return [f"unreadable rope_parameters ({type(error).__name__}: {error})"]
    if part != 1.0 and factor != 1.0:
        return [f"scaled positions (attention_factor {factor:.3f}) in a part of each head"]
    return []


def rotary_frequencies(config: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies `[D / 2]` float32, and the factor of both cosine and sine (yarn)."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        return frequencies, float(factor)
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (rope["rope_theta"] ** powers), 1.0


SUPPORTED = ("glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type`s that the Megatron worker trains."""
OUTPUT_BIAS = ("llama", "qwen3", "qwen3_moe")
"""Model types whose `attention_bias` is a bias of the output projection too."""
MIXTURES = ("glm4_moe", "mixtral", "qwen3_moe")
HEAD_NORMS = ("qwen3", "qwen3_moe")
QKV_BIAS = ("qwen2",)
BY_CONFIG = ("glm4_moe",)
"""Model types whose config says if there are head norms and biases of query, key and value; others ignore its keys."""
LAYER_KINDS = ("qwen2", "qwen3")
"""Model types whose `layer_types` names the layers that have a window."""
WINDOWED = ("mistral", "mixtral", "qwen3_moe")
"""Model types whose `sliding_window` holds for every layer."""
EXPERT_KEYS = (
    "freeze_moe_router",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_token_dispatcher_type",
    "moe_permute_fusion",
    "moe_grouped_gemm",
)
"""Keys of `policy.megatron_cfg` without effect in a model without experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Experts of the layers that have them."""

    num_experts: int
    top_k: int
    intermediate_size: int
    score: str = "softmax"
    """`softmax`, or `sigmoid` with a bias that only chooses (DeepSeek-V3)."""
    normalises: bool = True
    """True where the chosen experts' weights add up to one."""
    scaling: float = 1.0
    """Factor of the chosen weights."""
    num_groups: int = 1
    top_groups: int = 1
    """Experts are chosen within this many of the groups."""
    shared_intermediate_size: int = 0
    """Intermediate size of all experts together that every token takes; 0 without such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder of one of the `SUPPORTED` model types.

    Example:
        >>> from transformers import Qwen3Config
        >>> shape = Architecture.of(Qwen3Config(num_hidden_layers=2, vocab_size=100))
        >>> shape.num_layers, shape.has_head_norms, shape.mixture
        (2, True, None)
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    """Key and value heads."""
    head_dim: int
    intermediate_size: int
    """Intermediate size of the layers without experts."""
    vocab_size: int
    padding_token: int | None
    """Its embedding gets no gradient from where the token is read; None without."""
    norm_eps: float
    has_qkv_bias: bool
    has_head_norms: bool
    is_tied: bool
    """The head is the embedding."""
    max_positions: int
    windows: tuple[int | None, ...]
    """Per layer: tokens that a token sees, itself included; None means all."""
    attention_dropout: float
    initializer_range: float
    mixture: Mixture | None = None
    expert_layers: tuple[bool, ...] = ()
    """Per layer: whether it has experts."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Architecture:
        """Return the architecture of a Hugging Face config.

        Raises:
            ConfigError: of another model type, or with a part that has no counterpart here.
        """
        model_type, given = config.model_type, config.to_dict()
        if model_type not in SUPPORTED:
            raise ConfigError(
                f"policy.model_name: the Megatron worker trains {', '.join(SUPPORTED)}; got {model_type!r}. Set "
                "policy.megatron_cfg.enabled=false and policy.dtensor_cfg.enabled=true for it"
            )
        _refuse_unknown_parts(config, given)
        layers = int(given["num_hidden_layers"])
        expert_layers = _expert_layers(model_type, given, layers)
        mixture = _mixture(model_type, given) if any(expert_layers) else None
        heads = int(given["num_attention_heads"])
        return cls(
            model_type=model_type,
            num_layers=layers,
            hidden_size=given["hidden_size"],
            num_heads=heads,
            num_groups=given.get("num_key_value_heads") or heads,
            head_dim=given.get("head_dim") or given["hidden_size"] // heads,
            intermediate_size=given["intermediate_size"],
            vocab_size=given["vocab_size"],
            padding_token=_padding_token(given),
            norm_eps=given["rms_norm_eps"],
            has_qkv_bias=model_type in QKV_BIAS or (model_type in BY_CONFIG and bool(given.get("attention_bias"))),
            has_head_norms=model_type in HEAD_NORMS or (model_type in BY_CONFIG and bool(given.get("use_qk_norm"))),
            is_tied=bool(given["tie_word_embeddings"]),
            max_positions=given["max_position_embeddings"],
            windows=_windows(model_type, given, layers),
            attention_dropout=given.get("attention_dropout") or 0.0,
            initializer_range=given["initializer_range"],
            mixture=mixture,
            expert_layers=expert_layers,
        )


def check_fits(shape: Architecture, config: PolicyConfig) -> None:
    """Compare an architecture with `policy.megatron_cfg`.

    Raises:
        ConfigError: names the key and what to set.
    """
    problems = [
        *_division_problems(shape, config),
        *_pipeline_problems(shape, config),
        *_recompute_problems(shape, config),
        *_expert_problems(shape, config),
    ]
    if problems:
        raise ConfigError("; ".join(f"policy.megatron_cfg.{problem}" for problem in problems))


def _division_problems(shape: Architecture, config: PolicyConfig) -> list[str]:
    sizes = config.parallel_sizes
    tensor, groups, vocabulary = sizes.tensor, shape.num_groups, shape.vocab_size
    key = "tensor_model_parallel_size"
    divided = [(key, tensor, "attention heads", shape.num_heads)]
    if groups % tensor and tensor % groups:
        divided.append((key, tensor, "key-value heads", groups))
    if not all(shape.expert_layers):
        divided.append((key, tensor, "rows of the feed-forward layers", shape.intermediate_size))
    if shape.mixture is not None:
        experts = shape.mixture
        divided += [
            (key, tensor, "rows of the shared experts", experts.shared_intermediate_size),
            ("expert_model_parallel_size", sizes.expert, "experts", experts.num_experts),
            ("expert_tensor_parallel_size", sizes.expert_tensor, "rows of an expert", experts.intermediate_size),
        ]
    problems = [f"{key}: {count} {what} do not divide by {size}" for key, size, what, count in divided if count % size]
    if vocabulary % tensor:
        # The vocabulary is not padded: the vocabularies of released models divide by 8 and more.
        problems.append(
            f"{key}: {vocabulary} tokens in the vocabulary do not divide by {tensor}; set a divisor of {vocabulary}, "
            f"or resize the embeddings in the model folder to {vocabulary + tensor - vocabulary % tensor}"
        )
    return problems


def _pipeline_problems(shape: Architecture, config: PolicyConfig) -> list[str]:
    section, stages = config.megatron_cfg, config.parallel_sizes.pipeline
    if layers_of_stages(shape, config):
        return []
    if (section.num_layers_in_first_pipeline_stage, section.num_layers_in_last_pipeline_stage) == (None, None):
        return [
            f"pipeline_model_parallel_size: {shape.num_layers} layers do not divide over {stages} stages; set "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        ]
    return [
        f"num_layers_in_{end}_pipeline_stage: {given} of {shape.num_layers} layers leave no equal numbers of them for "
        f"the others of {stages} stages"
        for end, given in (
            ("first", section.num_layers_in_first_pipeline_stage),
            ("last", section.num_layers_in_last_pipeline_stage),
        )
        if given is not None
    ]


def layers_of_stages(shape: Architecture, config: PolicyConfig) -> tuple[int, ...]:
    """Return layers of each pipeline stage; empty where they cannot be shared."""
    section, stages = config.megatron_cfg, config.parallel_sizes.pipeline
    first, last = section.num_layers_in_first_pipeline_stage, section.num_layers_in_last_pipeline_stage
    given = [number for number in (first, last) if number is not None]
    rest, between = shape.num_layers - sum(given), stages - len(given)
    if between < 0 or rest < between or (rest % between if between else rest):
        return ()
    middle = (rest // between,) * between if between else ()
    return (*([first] if first else []), *middle, *([last] if last else []))


def _recompute_problems(shape: Architecture, config: PolicyConfig) -> list[str]:
    section, stages = config.megatron_cfg, layers_of_stages(shape, config)
    if not section.activation_checkpointing or not stages:
        return []
    count, has_experts = section.recompute_num_layers, shape.mixture is not None
    if section.recompute_granularity == "full":
        layers = " or ".join(str(number) for number in sorted(set(stages)))
        if section.recompute_method == "uniform" and any(number % count for number in stages):
            return [f"recompute_num_layers: runs of {count} layers do not divide a pipeline stage of {layers}"]
        if count > max(stages):
            return [f"recompute_num_layers: {count} is more than the {layers} layers of a pipeline stage"]
        return []
    has_shared = shape.mixture is not None and shape.mixture.shared_intermediate_size > 0
    exists = {
        "mlp": not all(shape.expert_layers),
        "moe": has_experts,
        "moe_act": has_experts,
        "shared_experts": has_shared,
    }
    return [
        f"recompute_modules: {shape.model_type!r} has no part {name!r} to recompute"
        for name in section.recompute_modules
        if not exists.get(name, True)
    ]


def _expert_problems(shape: Architecture, config: PolicyConfig) -> list[str]:
    section, sizes = config.megatron_cfg, config.parallel_sizes
    problems = []
    if shape.mixture is None:
        nothing = f"{shape.model_type!r} has no experts"
        problems += [
            f"{name}: {nothing}; expected 1, got {size}"
            for name, size in (
                ("expert_model_parallel_size", sizes.expert),
                ("expert_tensor_parallel_size", section.expert_tensor_parallel_size or 1),
            )
            if size > 1
        ]
        fields, values = MegatronConfig.model_fields, section.model_dump(include=set(EXPERT_KEYS))
        problems += [f"{name}: {nothing}; leave it out" for name in EXPERT_KEYS if values[name] != fields[name].default]
    elif sizes.tensor > 1 and not sizes.sequence_parallel:
        problems.append("sequence_parallel: experts under tensor parallelism need it; expected true, got false")
    if section.moe_router_bias_update_rate and (shape.mixture is None or shape.mixture.score != "sigmoid"):
        problems.append(f"moe_router_bias_update_rate: the router of {shape.model_type!r} has no bias to update")
    return problems


def _refuse_unknown_parts(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    model_type, problems = config.model_type, []
    if given.get("hidden_act") not in ("silu", "swish"):
        problems.append(f"hidden_act {given.get('hidden_act')!r} (expected silu)")
    if given.get("mlp_bias"):
        problems.append("biases in the feed-forward layers (mlp_bias)")
    if given.get("attention_bias") and model_type in OUTPUT_BIAS:
        problems.append("a bias of the attention's output projection (attention_bias)")
    problems += [*_routing_problems(model_type, given), *rotary_problems(config)]
    if problems:
        raise ConfigError(
            f"policy.model_name: this {model_type!r} has {' and '.join(problems)}, which the Megatron worker cannot "
            "train; set policy.megatron_cfg.enabled=false and policy.dtensor_cfg.enabled=true for it"
        )


def _routing_problems(model_type: str, given: Mapping[str, Any]) -> list[str]:
    if model_type not in MIXTURES:
        return []
    problems = []
    if given.get("n_group", 1) > 1 and given["num_experts_per_tok"] != 2 * given["topk_group"]:
        problems.append("groups of experts that are not scored by two experts each (num_experts_per_tok, topk_group)")
    groups = given.get("n_group", 1)
    if groups > 1 and (_number_of_experts(given) % groups or given["topk_group"] > groups):
        problems.append(f"experts that do not divide into {groups} groups, or fewer groups than are chosen (n_group)")
    if model_type == "glm4_moe" and not given["norm_topk_prob"]:
        problems.append("sigmoid scores that are not normalised (norm_topk_prob)")
    # megatron-core leaves a single weight as it is; normalised, it would be 1.
    if given["num_experts_per_tok"] == 1 and (model_type == "mixtral" or given["norm_topk_prob"]):
        problems.append("one expert per token with a normalised weight (num_experts_per_tok)")
    if given.get("router_jitter_noise"):
        problems.append("noise before the routers (router_jitter_noise)")
    return problems


def _mixture(model_type: str, given: Mapping[str, Any]) -> Mixture | None:
    if model_type == "mixtral":
        return Mixture(
            num_experts=given["num_local_experts"],
            top_k=given["num_experts_per_tok"],
            intermediate_size=given["intermediate_size"],
        )
    if model_type == "qwen3_moe":
        return Mixture(
            num_experts=_number_of_experts(given),
            top_k=given["num_experts_per_tok"],
            intermediate_size=given["moe_intermediate_size"],
            normalises=given["norm_topk_prob"],
        )
    if model_type == "glm4_moe":
        return Mixture(
            num_experts=_number_of_experts(given),
            top_k=given["num_experts_per_tok"],
            intermediate_size=given["moe_intermediate_size"],
            score="sigmoid",
            scaling=given["routed_scaling_factor"],
            num_groups=given["n_group"],
            top_groups=given["topk_group"],
            shared_intermediate_size=given["n_shared_experts"] * given["moe_intermediate_size"],
        )
    return None


def _padding_token(given: Mapping[str, Any]) -> int | None:
    """Return the padding token as `torch.nn.Embedding` reads it: a negative one counts from the end of the
    vocabulary."""
    token = given.get("pad_token_id")
    return None if token is None else int(token) % int(given["vocab_size"])


def _number_of_experts(given: Mapping[str, Any]) -> int:
    """Return a setting of one of several names: releases of transformers differ in the name."""
    return next(int(given[name]) for name in ("num_experts", "n_routed_experts", "num_local_experts") if name in given)


def _expert_layers(model_type: str, given: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if model_type not in MIXTURES or not _number_of_experts(given):
        return (False,) * layers
    if model_type == "qwen3_moe":
        without, step = given["mlp_only_layers"] or (), given["decoder_sparse_step"]
        return tuple(layer not in without and (layer + 1) % step == 0 for layer in range(layers))
    first = given["first_k_dense_replace"] if model_type == "glm4_moe" else 0
    return tuple(layer >= first for layer in range(layers))


def _windows(model_type: str, given: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = given.get("sliding_window")
    if model_type in LAYER_KINDS:
        return tuple(window if kind == "sliding_attention" else None for kind in given["layer_types"])
    return (window if model_type in WINDOWED else None,) * layers
