"""Tiny random models of every family that the Megatron worker trains, their forward pass, and optimizer steps.

Steps have known gradients, and their state is given by the names of the Hugging Face module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, init_process_group
from nemo_rl.models.attention.varlen import Segments
from nemo_rl.models.hf.folder import ModelWeights
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.megatron.attention import PackedSegments
from nemo_rl.models.megatron.convert import export_weights, load_weights
from nemo_rl.models.megatron.mcore import parallel_state
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.setup import MegatronModel, build_model, destroy_parallel, initialize_parallel
from nemo_rl.routes.shape import RouteShape
from tests.helpers.model_families import FAMILY_SIZES, write_with_tokenizer

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe")
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that wave lengths of both kinds are among those of a small head.
    "original_max_position_embeddings": 64,
}


def config_of(family: str, **changes: object) -> PretrainedConfig:
    """Return the config of a family with some values changed; each has what is special to the family."""
    given = COMMON | changes
    if family == "llama":
        return LlamaConfig(**{"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE} | given)
    if family == "mistral":
        # A window that most rows outgrow.
        return MistralConfig(**{"head_dim": 8, "sliding_window": 10} | given)
    if family == "mixtral":
        return MixtralConfig(**{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None} | given)
    if family == "qwen2":
        return Qwen2Config(**{"tie_word_embeddings": False} | given)
    if family == "qwen3":
        # Heads that are wider than the hidden size divided by their number.
        return Qwen3Config(**{"head_dim": 12, "tie_word_embeddings": True} | given)
    if family == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        return Qwen3MoeConfig(**{"head_dim": 8, "mlp_only_layers": [1], "tie_word_embeddings": False} | experts | given)
    if family == "glm4_moe":
        experts = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        }
        attention = {"head_dim": 8, "attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": False}
        return Glm4MoeConfig(**attention | experts | given)
    raise ValueError(f"no such family: {family!r}")


def hf_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Return a random model in evaluation mode; biases, norms and the router's bias are random as well."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                weight.normal_(0, 0.3)
            elif weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif name.endswith("mlp.gate.weight"):
                weight.normal_(0, 0.3)
            elif ".mlp.experts." in name:
                weight.normal_(0, 0.1)
    biases = {name: bias.clone() for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}
    if model.config.tie_word_embeddings:
        # Of the other models it is zero, as a new one's.
        with torch.no_grad():
            model.get_input_embeddings().weight[model.config.pad_token_id].normal_(0, 0.1)
    model.to(dtype)
    for name, bias in biases.items():
        # As `from_pretrained` does, whatever the precision.
        model.get_buffer(name).data = bias
    return model


def policy_config(*, precision: str = "float32", **megatron: object) -> PolicyConfig:
    """Return settings of a Megatron worker; the folder is a name only, models are made in memory."""
    return PolicyConfig.model_validate(
        {
            "model_name": "unused",
            "precision": precision,
            "dtensor_cfg": {"enabled": False},
            "megatron_cfg": {"enabled": True, **megatron},
        }
    )


def forward(model: MegatronModel, token_NS: torch.Tensor) -> torch.Tensor:
    """Return `[N, S, V]` logits of one process that has the whole model; each row is a sequence."""
    rows, length = token_NS.shape
    packed = PackedSegments(segments=Segments(lengths=(length,)), position_s=torch.arange(length))
    logits: torch.Tensor = model.ddp(
        input_ids=token_NS,
        position_ids=packed.position_s.expand(rows, length),
        attention_mask=None,
        packed_seq_params=packed,
    )
    return logits


@functools.cache
def tokens(rows: int = 3, length: int = 24, *, vocab_size: int = 96) -> torch.Tensor:
    """Return `[rows, length]` int64 tokens, always the same."""
    return torch.randint(3, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


NUM_STEPS = 10
TIMEOUT_S = 60.0


@contextmanager
def alone() -> Iterator[None]:
    """Open a job of one rank in this process."""
    init_process_group(RankSpec(rank=0, world_size=1), device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    try:
        yield
    finally:
        destroy_parallel()
        destroy_process_group()


def build(family: str, policy: PolicyConfig, **changes: object) -> tuple[MegatronModel, PolicyOptimizer]:
    """(collective) This rank's part of a model with the weights of `hf_model`, and its optimizer."""
    # On one rank all layouts are the same, and groups are slow to end.
    if dist.get_world_size() > 1 or not parallel_state.is_initialized():
        destroy_parallel()
        initialize_parallel(policy, timeout_s=TIMEOUT_S, seed=1)
    hf = hf_model(family, **changes)
    model = build_model(hf.config, policy, device=torch.device("cpu"))
    load_weights(model, ModelWeights(hf, where="memory"))
    return model, PolicyOptimizer(model, policy, num_steps=NUM_STEPS)


def gradients(family: str, step: int, **changes: object) -> dict[str, torch.Tensor]:
    """Return the gradients of a step by parameter of the Hugging Face module."""
    return {name: weight.detach() for name, weight in _gradient_model(family, step, **changes).named_parameters()}


def step(model: MegatronModel, optimizer: PolicyOptimizer, number: int, *, scale: float = 1.0) -> float | None:
    """(collective) A training call with the gradients of that number; the norm before clipping."""
    optimizer.apply()
    give_gradients(model, number, scale=scale)
    norm = optimizer.finish()
    optimizer.advance()
    return norm


@torch.no_grad()
def give_gradients(model: MegatronModel, number: int, *, scale: float = 1.0) -> None:
    """(collective) Puts the gradients of a step where `finalize_model_grads` leaves them."""
    given = _gradient_model(model.shape.model_type, number, num_hidden_layers=model.shape.num_layers)
    with _kept(model):
        load_weights(model, ModelWeights(given, where="gradients"))
        for weight in model.module.parameters():
            if weight.requires_grad:
                weight.main_grad.copy_(weight).mul_(scale)


@torch.no_grad()
def in_hf_names(model: MegatronModel, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """(collective) Whole tensors, put together from this rank's parts by megatron-core's names of the weights."""
    with _kept(model):
        for name, weight in model.module.named_parameters():
            weight.copy_(values[name])
        return {name: weight.clone() for name, weight in export_weights(model)}


@torch.no_grad()
def state_of(model: MegatronModel, optimizer: PolicyOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """(collective) Weights and moments in Hugging Face names; of half precision also what main weights have beyond."""
    weights = {name: weight.clone() for name, weight in export_weights(model)}
    state = {kind: in_hf_names(model, optimizer.moments(kind)) for kind in ("exp_avg", "exp_avg_sq")}
    main = optimizer.moments("master")
    if main:
        rests = {name: main[name] - weight.float() for name, weight in model.module.named_parameters()}
        state["rest"] = in_hf_names(model, rests)
    return {"weights": weights, **state}


def _gradient_model(family: str, step: int, **changes: object) -> torch.nn.Module:
    return hf_model(family, seed=100 + step, **changes)


@contextmanager
def _kept(model: MegatronModel) -> Iterator[None]:
    """Parameters and buffers are afterwards what they were."""
    tensors = [*model.module.parameters(), *model.module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)


SIZES = {"vocab_size": FAMILY_SIZES["vocab_size"], "num_hidden_layers": 4, "initializer_range": 0.08, "num_experts": 8}


def write_experts(folder: Path) -> Path:
    return write_with_tokenizer(folder, hf_model("qwen3_moe", **SIZES))


def shape_of(folder: str) -> RouteShape:
    config = load_model_config(folder)
    layers = tuple(i for i in range(config.num_hidden_layers) if i not in config.mlp_only_layers)
    return RouteShape(layers=layers, top_k=config.num_experts_per_tok, num_experts=config.num_experts)
