"""Tiny random models of several families: for parallel layouts, and with sizes that vLLM's kernels for CPUs take.

Those kernels take heads of 32, and experts whose size is a multiple of 32.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl.data.generated import problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.models.hf.loading import named_weights
from nemo_rl.models.hf.modules import HFRouters

PADDING_TOKEN = 125
"""Padding token of these models; it lies inside rows of `layout_batch`, as an end of sequence that also pads does."""
FAMILY_SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": PADDING_TOKEN,
}


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    # Between the lengths of the rows of `layout_batch`.
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
"""Other frequencies for rows of more than 16 tokens; of heads of 8."""


def config_of(family: str) -> PretrainedConfig:
    """Families differ in what a layout must get right: tied weights, biases, head norms, experts and layers without."""
    if family == "llama":
        return LlamaConfig(**FAMILY_SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    if family == "mistral":
        # A window that most rows outgrow.
        return MistralConfig(**FAMILY_SIZES, head_dim=8, sliding_window=10)
    if family == "longrope":
        return MistralConfig(**FAMILY_SIZES, head_dim=8, sliding_window=10, rope_parameters=dict(LONG_ROPE))
    if family == "qwen2":
        return Qwen2Config(**FAMILY_SIZES, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**FAMILY_SIZES, head_dim=8, tie_word_embeddings=True)
    return Qwen3MoeConfig(
        **FAMILY_SIZES,
        head_dim=8,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        # Of half precision not a multiple of 16 bytes.
        moe_intermediate_size=20,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    )


def write_family(folder: Path, family: str) -> Path:
    """Write model and tokenizer as a Hugging Face folder; biases and norms are random as well."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif "experts" in name or "gate.weight" in name:
                weight.normal_(0, 0.2)
    return write_with_tokenizer(folder, model)


def write_with_tokenizer(folder: Path, model: PreTrainedModel) -> Path:
    """Write model and tokenizer, whose vocabulary is that of `FAMILY_SIZES`, as a Hugging Face folder."""
    model.save_pretrained(str(folder))
    corpus = [f"user\n{p.prompt}\nassistant\n{p.answer}" for p in problems(200, seed=1)]
    build_tokenizer(corpus).save_pretrained(str(folder))
    return folder


VLLM_SIZES = {
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
    """Return a model of two layers and a tied head."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**VLLM_SIZES, num_hidden_layers=2, tie_word_embeddings=True)).eval()


def moe_model(*, seed: int = 0) -> PreTrainedModel:
    """Layer 0 is dense, layers 1 and 2 choose 2 of 8 experts."""
    torch.manual_seed(seed)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**VLLM_SIZES, num_hidden_layers=3, tie_word_embeddings=False, norm_topk_prob=True, **experts)
    ).eval()


def biased_model(*, seed: int = 0) -> PreTrainedModel:
    """Return a Qwen2, whose projections of queries, keys and values have biases."""
    torch.manual_seed(seed)
    sizes = {name: value for name, value in VLLM_SIZES.items() if name != "head_dim"}
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
    """Return the `[tokens, L, K]` experts that the model itself chooses."""
    routers, own = HFRouters(model), dict[int, torch.Tensor]()
    with routers.choosing(own.__setitem__):
        model(torch.tensor([ids]), use_cache=False)
    return torch.stack([own[layer] for layer in routers.layers], dim=1)


def detached_weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return weights as an engine takes them."""
    return [(name, weight.detach()) for name, weight in named_weights(model)]
