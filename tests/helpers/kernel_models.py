"""Tiny random models whose sizes vLLM's kernels for CPUs take: heads of 32, experts of a multiple of 32."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl.models.hf_modules import HFRouters
from tests.helpers.families import write_with_tokenizer

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def dense_model(*, seed: int = 0) -> PreTrainedModel:
    """Two layers and a tied head."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, num_hidden_layers=2, tie_word_embeddings=True)).eval()


def moe_model(*, seed: int = 0) -> PreTrainedModel:
    """Layer 0 is dense, layers 1 and 2 choose 2 of 8 experts."""
    torch.manual_seed(seed)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON, num_hidden_layers=3, tie_word_embeddings=False, norm_topk_prob=True, **experts)
    ).eval()


def biased_model(*, seed: int = 0) -> PreTrainedModel:
    """A Qwen2, whose projections of queries, keys and values have biases."""
    torch.manual_seed(seed)
    sizes = {name: value for name, value in COMMON.items() if name != "head_dim"}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=2, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.5)
    return model


def write_dense(folder: Path, *, seed: int = 0) -> Path:
    return write_with_tokenizer(folder, dense_model(seed=seed))


def write_moe(folder: Path, *, seed: int = 0) -> Path:
    return write_with_tokenizer(folder, moe_model(seed=seed))


@torch.no_grad()
def routes_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[tokens, L, K]` what the model itself chooses."""
    routers, own = HFRouters(model), dict[int, torch.Tensor]()
    with routers.choosing(own.__setitem__):
        model(torch.tensor([ids]), use_cache=False)
    return torch.stack([own[layer] for layer in routers.layers], dim=1)
