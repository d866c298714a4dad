"""Shapes of public models, so that a recipe can be planned and shrunk before its weights are on this machine.

Used by `plan` and `shrink`. Invariant: a model folder that is there decides; this table stands in for a missing one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from nemo_rl.errors import ModelFolderError
from nemo_rl.models.hf.loading import CONFIG_FILE, decoder_sizes, load_model_config

__all__ = ["KNOWN_MODELS", "planned_model_config", "sizes_of"]

_QWEN2 = {
    **{"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1e6},
    **{"bos_token_id": 151643, "eos_token_id": 151643, "tie_word_embeddings": False},
}
_QWEN2_LONG = {**_QWEN2, "max_position_embeddings": 131072}
_QWEN2_WIDE = {**_QWEN2_LONG, "vocab_size": 152064}
_QWEN3 = {
    **{"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6},
    **{"head_dim": 128, "num_key_value_heads": 8, "bos_token_id": 151643, "eos_token_id": 151645},
}
_QWEN3_MOE = {
    **{**_QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
    **{"decoder_sparse_step": 1, "norm_topk_prob": True, "tie_word_embeddings": False},
}


def _llama3(factor: float) -> dict[str, object]:
    """Return the stretch of Llama 3.1 and later of the positions of the 8192 tokens that Llama 3 was trained with."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        **{"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        **{"num_key_value_heads": 8, "bos_token_id": 128000, "eos_token_id": 128001},
        "rope_parameters": {**rope, "original_max_position_embeddings": 8192},
    }


_LLAMA31, _LLAMA32 = _llama3(8.0), _llama3(32.0)
_STARTER = {
    **{"vocab_size": 320, "head_dim": 32, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    "tie_word_embeddings": True,
}


def _shape(
    base: Mapping[str, object], layers: int, hidden: int, mlp: int, heads: int, **more: object
) -> dict[str, object]:
    return {
        **base,
        **{"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads},
        **more,
    }


KNOWN_MODELS: Mapping[str, Mapping[str, object]] = {
    "Qwen2.5-0.5B": _shape(_QWEN2, 24, 896, 4864, 14, num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen2.5-1.5B": _shape(_QWEN2_LONG, 28, 1536, 8960, 12, num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen2.5-3B": _shape(_QWEN2, 36, 2048, 11008, 16, num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen2.5-7B": _shape(_QWEN2_WIDE, 28, 3584, 18944, 28, num_key_value_heads=4),
    "Qwen2.5-32B": _shape({**_QWEN2_WIDE, "rms_norm_eps": 1e-5}, 64, 5120, 27648, 40, num_key_value_heads=8),
    "Qwen3-0.6B": _shape(_QWEN3, 28, 1024, 3072, 16, tie_word_embeddings=True),
    "Qwen3-1.7B": _shape(_QWEN3, 28, 2048, 6144, 16, tie_word_embeddings=True),
    "Qwen3-4B": _shape(_QWEN3, 36, 2560, 9728, 32, tie_word_embeddings=True),
    "Qwen3-8B": _shape(_QWEN3, 36, 4096, 12288, 32, tie_word_embeddings=False),
    "Qwen3-14B": _shape(_QWEN3, 40, 5120, 17408, 40, tie_word_embeddings=False),
    "Qwen3-32B": _shape(_QWEN3, 64, 5120, 25600, 64, tie_word_embeddings=False),
    "Qwen3-30B-A3B": _shape(_QWEN3_MOE, 48, 2048, 6144, 32, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _shape(_QWEN3_MOE, 94, 4096, 12288, 64, moe_intermediate_size=1536),
    "Llama-3.1-8B": _shape(_LLAMA31, 32, 4096, 14336, 32, head_dim=128, tie_word_embeddings=False),
    "Llama-3.1-70B": _shape(_LLAMA31, 80, 8192, 28672, 64, head_dim=128, tie_word_embeddings=False),
    "Llama-3.2-1B": _shape(_LLAMA32, 16, 2048, 8192, 32, head_dim=64, tie_word_embeddings=True),
    "Llama-3.2-3B": _shape(_LLAMA32, 28, 3072, 8192, 24, head_dim=128, tie_word_embeddings=True),
    "Llama-3.3-70B": _shape(_LLAMA31, 80, 8192, 28672, 64, head_dim=128, tie_word_embeddings=False),
    # The demo's starter checkpoints, as `examples/starter.py` makes them, and a starter that has learned.
    **dict.fromkeys(("starter_sort", "teacher_sort"), _shape({**_STARTER, "model_type": "qwen3"}, 2, 128, 384, 4)),
    "starter_sort_moe": _shape(
        {**_STARTER, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
        *(4, 64, 64, 4),
        moe_intermediate_size=64,
    ),
}
"""Configs of known models by the name of their folder; values as in the `config.json` that the makers publish."""
_QWEN2_CHAT = {"eos_token_id": 151645, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_QWEN3_BASE = {"eos_token_id": 151643, "max_position_embeddings": 32768}
_LLAMA3_CHAT = {"eos_token_id": [128001, 128008, 128009]}
VARIANTS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "-Instruct": {"qwen2": _QWEN2_CHAT, "llama": _LLAMA3_CHAT},
    "-Base": {"qwen3": _QWEN3_BASE, "qwen3_moe": _QWEN3_BASE},
    "-Chat": {},
}
"""Values in which models with such a suffix differ from those without, by `model_type`; their sizes are the same."""


def planned_model_config(model_name: str, *, given: Path | None = None) -> PretrainedConfig:
    """Return the architecture of a recipe's model: of its folder, of a known model with that name, or of `given`.

    Args:
        model_name: `policy.model_name`.
        given: a `config.json`, or a folder with one, that decides whatever the name is.

    Raises:
        ModelFolderError: the folder cannot be read, or is not there and the name is not known.
    """
    if given is not None:
        return _config_of_file(given)
    if Path(model_name).is_dir():
        return load_model_config(model_name)
    name, suffix = Path(model_name).name, ""
    for known in VARIANTS:
        if name.endswith(known):
            name, suffix = name.removesuffix(known), known
    if name not in KNOWN_MODELS:
        raise ModelFolderError(
            f"policy.model_name: {model_name!r} is neither a folder here nor a model whose shape is known "
            f"({', '.join(KNOWN_MODELS)}); give its config.json with --model-config FILE"
        )
    shape = KNOWN_MODELS[name]
    variant = VARIANTS[suffix].get(str(shape["model_type"]), {}) if suffix else {}
    return AutoConfig.for_model(**{**shape, **variant})


NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Sizes that every decoder has."""


def sizes_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the values of a decoder's config, with sizes that have other names there (`n_embd`) by the usual ones.

    Raises:
        ModelFolderError: it describes no plain decoder.
    """
    found = decoder_sizes(config)
    missing = [name for name in NEEDED if not isinstance(found.get(name), int) or found[name] < 1]
    if missing:
        raise ModelFolderError(
            f"policy.model_name: a model of type {config.model_type!r} is no plain decoder: its config has no "
            f"{', '.join(missing)}; it cannot be planned or made small here"
        )
    return found


def _config_of_file(given: Path) -> PretrainedConfig:
    path = given / CONFIG_FILE if given.is_dir() else given
    if not path.is_file():
        raise ModelFolderError(f"--model-config: expected a config.json or a folder with one, got {str(given)!r}")
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelFolderError(f"--model-config: {path} cannot be read: {first}") from error
