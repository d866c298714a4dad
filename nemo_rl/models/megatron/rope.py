"""Rotary frequencies as Hugging Face computes them, and which kinds of positions the Megatron worker has.

Asked by the driver before anything starts and by each worker; imports no megatron-core.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["rotary_frequencies", "rotary_problems"]

KINDS = ("default", "linear", "llama3", "yarn")
"""`rope_type`s whose frequencies do not depend on the length of a sequence."""
PARTIAL = ("glm4_moe",)
"""Families that rotate a part of each head."""


def rotary_problems(config: PretrainedConfig) -> list[str]:
    """What has no counterpart here, one line each; empty where `rotary_frequencies` is right."""
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
    """Inverse frequencies `[D / 2]` float32, and the factor of both cosine and sine (yarn)."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        return frequencies, float(factor)
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (rope["rope_theta"] ** powers), 1.0
