"""Tensor-parallel plans: the style of each module of a model. Called by `parallelize`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from transformers import PreTrainedModel

from nemo_rl.errors import ConfigError, shorten

__all__ = ["plan_of"]

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types with their own plan, which also serves sequence parallelism."""

# Styles of a model's own plan, and what they are called here.
HF_STYLES: Mapping[str, str] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "embedding_rowwise": "vocab_embedding",
    "replicated_with_grad_allreduce": "replicated_partial",
}
# Of the head only: log-probabilities are taken from logits that stay split.
HF_HEAD_STYLES: Mapping[str, str] = {**HF_STYLES, "colwise_gather_output": "colwise"}
HEAD = "lm_head"


def plan_of(
    model: PreTrainedModel, *, custom: Mapping[str, str] | str | None, tp: int, sequence_parallel: bool
) -> dict[str, str]:
    """Return pattern of module names -> style: the user's, the one of its type, or what the model says of itself.

    Raises:
        ConfigError: nothing is known about this model, what is known does not serve sequence parallelism, or the user's
            plan cannot be imported.
    """
    kind = str(model.config.model_type)
    if custom is not None:
        return _imported(custom) if isinstance(custom, str) else dict(custom)
    _check_heads(model, tp)
    if kind in MODEL_TYPES:
        return _plan_by_type(model)
    if sequence_parallel:
        raise ConfigError(
            f"policy.dtensor_cfg.sequence_parallel: {kind!r} has no plan for it (known: {', '.join(MODEL_TYPES)}); set "
            "it to false or give policy.dtensor_cfg.custom_parallel_plan"
        )
    return _own_plan(model, kind)


def _imported(name: str) -> dict[str, str]:
    """Return the dictionary that `module:name` or `module.name` stands for."""
    key = "policy.dtensor_cfg.custom_parallel_plan"
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        found = vars(importlib.import_module(module))[attribute]
    except KeyError:
        raise ConfigError(f"{key}: module {module!r} has no {attribute!r}; expected a dictionary of styles") from None
    except Exception as error:
        # A module of the user's may fail in any way while it is imported.
        raise ConfigError(
            f"{key}: {name!r} cannot be imported: {type(error).__name__}: {error}; is its folder on PYTHONPATH?"
        ) from error
    wanted = "expected a dictionary, pattern of module names -> name of a style such as 'colwise'"
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key}: {name!r}: {wanted}, got {shorten(repr(found))}")
    wrong = [pair for pair in found.items() if not all(isinstance(part, str) for part in pair)]
    if wrong:
        got = shorten(repr(wrong[0]))
        raise ConfigError(f"{key}: {name!r}: {wanted}, got {got}; name the style instead of its object")
    return dict(found)


def _plan_by_type(model: PreTrainedModel) -> dict[str, str]:
    attention = "model.layers.*.self_attn"
    plan = {
        "model.embed_tokens": "vocab_embedding",
        attention: "block",
        f"{attention}.q_proj": "column",
        f"{attention}.k_proj": "column",
        f"{attention}.v_proj": "column",
        f"{attention}.o_proj": "rowwise",
        "model.layers.*.input_layernorm": "norm",
        "model.layers.*.post_attention_layernorm": "norm",
        "model.norm": "final_norm",
        HEAD: "column",
    }
    names = {name for name, _ in model.named_modules()}
    # Norms of single heads see this rank's heads only.
    for optional in ("q_norm", "k_norm"):
        if f"model.layers.0.self_attn.{optional}" in names:
            plan[f"{attention}.{optional}"] = "replicated_partial"
    # A mixture of experts may have layers without one, so each layer is named.
    for layer in sorted(name for name in names if name.startswith("model.layers.") and name.endswith(".mlp")):
        if f"{layer}.experts" in names:
            plan |= {layer: "moe_block", f"{layer}.gate": "replicated_partial", f"{layer}.experts": "experts"}
        else:
            plan |= {layer: "block", f"{layer}.gate_proj": "column", f"{layer}.up_proj": "column"}
            plan[f"{layer}.down_proj"] = "rowwise"
    return plan


def _own_plan(model: PreTrainedModel, kind: str) -> dict[str, str]:
    styles: dict[str, str] = dict(model._tp_plan or {})
    if not styles:
        raise ConfigError(
            f"policy.dtensor_cfg.tensor_parallel_size: nothing is known about {kind!r} (known: "
            f"{', '.join(MODEL_TYPES)}); set it to 1 or give policy.dtensor_cfg.custom_parallel_plan"
        )
    plan = {name: (HF_HEAD_STYLES if name == HEAD else HF_STYLES).get(style) for name, style in styles.items()}
    unknown = sorted({styles[name] for name, style in plan.items() if style is None})
    if unknown:
        raise ConfigError(
            f"policy.dtensor_cfg.tensor_parallel_size: the plan of {kind!r} uses styles {unknown}, which do not "
            "compose with FSDP here; set it to 1 or give policy.dtensor_cfg.custom_parallel_plan"
        )
    return {name: style for name, style in plan.items() if style is not None}


def _check_heads(model: PreTrainedModel, tp: int) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = config.to_dict().get(name)
        if isinstance(count, int) and count % tp:
            raise ConfigError(
                f"policy.dtensor_cfg.tensor_parallel_size: {name}={count} of {model.config.model_type!r} does not "
                f"divide by {tp}; use a divisor of {count}"
            )
