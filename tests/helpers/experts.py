"""A tiny random mixture of experts with a dense layer, and the shape of its routes."""

from __future__ import annotations

from pathlib import Path

from nemo_rl.models.loading import load_model_config
from nemo_rl.routes.shape import RouteShape
from tests.helpers.families import COMMON, write_with_tokenizer
from tests.helpers.megatron_models import hf_model

SIZES = {"vocab_size": COMMON["vocab_size"], "num_hidden_layers": 4, "initializer_range": 0.08, "num_experts": 8}


def write_experts(folder: Path) -> Path:
    return write_with_tokenizer(folder, hf_model("qwen3_moe", **SIZES))


def shape_of(folder: str) -> RouteShape:
    config = load_model_config(folder)
    layers = tuple(i for i in range(config.num_hidden_layers) if i not in config.mlp_only_layers)
    return RouteShape(layers=layers, top_k=config.num_experts_per_tok, num_experts=config.num_experts)
