"""Models with experts and the workers that train them, for `router_replay.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.starter import STARTER_TASKS, make_starter
from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.policy import PolicyConfig, RouterReplayConfig, SequencePackingConfig
from nemo_rl.data.generated import problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.models.policy.workers.compose import compose_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker

__all__ = ["ENGINES", "NUM_EXPERTS", "TASK", "Engine", "open_worker", "policy_of", "trained_model", "write_wide_model"]

Engine: TypeAlias = Literal["dtensor", "megatron"]
ENGINES: tuple[Engine, ...] = ("dtensor", "megatron")

TASK = STARTER_TASKS["sort"]
NUM_EXPERTS = 8
TIMEOUT_S = 120.0


def trained_model(folder: Path, *, seed: int, max_steps: int | None = None) -> Path:
    """The starter with experts of this seed: right about three times in ten, so its routers have learned to choose.

    Args:
        max_steps: ends the warm start early.
    """
    config = replace(TASK.config.with_experts(NUM_EXPERTS), seed=seed)
    if max_steps is not None:
        config = replace(config, max_steps=max_steps)
    make_starter(folder, TASK, config=config)
    return folder


def write_wide_model(folder: Path, *, hidden: int, num_layers: int = 2) -> Path:
    """A random model that is wide enough for matrix products to take most of the time."""
    tokenizer = build_tokenizer(f"user\n{p.prompt}\nassistant\n{p.answer}" for p in problems(200, seed=1))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=hidden,
        moe_intermediate_size=hidden,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def policy_of(folder: Path, engine: Engine, *, is_replayed: bool, max_length: int) -> PolicyConfig:
    """A float32 trainer whose rollouts are in bfloat16."""
    return PolicyConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=max_length,
        sequence_packing=SequencePackingConfig(enabled=True),
        dtensor_cfg=DTensorConfig(enabled=engine == "dtensor"),
        megatron_cfg=MegatronConfig(enabled=engine == "megatron"),
        generation=GenerationConfig(precision="bfloat16", max_new_tokens=TASK.max_new_tokens),
        router_replay=RouterReplayConfig(enabled=is_replayed),
    )


@contextmanager
def open_worker(config: PolicyConfig) -> Iterator[PolicyWorker]:
    """The one rank of this policy's worker, ready for training."""
    worker = compose_worker(
        config, rank=0, world_size=1, num_steps=1, collective_timeout_s=TIMEOUT_S, seed=0, device="cpu"
    )
    try:
        yield worker
    finally:
        worker.shutdown()
