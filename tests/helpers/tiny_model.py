"""Small Hugging Face models and batches for tests: made in a second, never downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from nemo_rl.config.backends import OptimizerConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.generated import problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.workers.compose import compose_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker

VOCAB = 320


def tiny_model(*, seed: int = 0, num_layers: int = 2, vocab_size: int = VOCAB) -> PreTrainedModel:
    """Return a tied Qwen3 of 30k parameters with larger weights than usual, so that logits differ clearly."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def write_tiny_folder(folder: Path, *, seed: int = 0) -> Path:
    """Write model and tokenizer as a Hugging Face folder."""
    tiny_model(seed=seed).save_pretrained(str(folder))
    corpus = [f"user\n{p.prompt}\nassistant\n{p.answer}" for p in problems(200, seed=1)]
    build_tokenizer(corpus).save_pretrained(str(folder))
    return folder


def write_larger_folder(folder: Path) -> Path:
    """Write a model of 120 million parameters with the tiny tokenizer: enough work for a GPU to show its speed."""
    write_tiny_folder(folder)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(str(folder))
    return folder


def tiny_policy(folder: Path, **changes: object) -> PolicyConfig:
    """Return a float32 policy with plain AdamW on a tiny folder, whose layers are compiled only where that is asked
    for, also on CUDA."""
    values: dict[str, object] = {
        "model_name": str(folder),
        "precision": "float32",
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 64,
        "max_grad_norm": 1.0,
        "optimizer": OptimizerConfig(kwargs={"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}),
    }
    policy = PolicyConfig(**{**values, **changes})
    if policy.dtensor_cfg.compile == "auto":
        sizes = policy.dtensor_cfg.model_copy(update={"compile": "off"})
        policy = policy.model_copy(update={"dtensor_cfg": sizes})
    return policy


def tiny_worker(
    config: PolicyConfig, *, rank: int = 0, world_size: int = 1, device: str = "cpu", **kwargs: object
) -> PolicyWorker:
    """Make one rank of the worker that the config names; a single rank makes its own process group."""
    return compose_worker(
        config,
        rank=rank,
        world_size=world_size,
        num_steps=10,
        collective_timeout_s=60.0,
        seed=0,
        device=device,
        **kwargs,
    )


def tiny_batch(num_rows: int = 8, *, seed: int = 0, width: int = 24) -> BatchedDataDict:
    """Return right-padded rows of unequal lengths with all columns of GRPO; prompts have 4 tokens, one row weight 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, width + 1, (num_rows,), generator=generator)
    columns = torch.arange(width)
    is_real = columns < lengths[:, None]
    sample_mask = torch.ones(num_rows)
    sample_mask[num_rows // 2] = 0.0
    noise = torch.randn(3, num_rows, width, generator=generator) * 0.3
    base = torch.full((num_rows, width), -3.0)
    ids = torch.randint(7, 300, (num_rows, width), generator=generator, dtype=torch.int32)
    return BatchedDataDict(
        {
            "input_ids": torch.where(is_real, ids, 0),
            "input_lengths": lengths,
            "token_mask": is_real & (columns >= 4),
            "sample_mask": sample_mask,
            "generation_logprobs": base + noise[0],
            "prev_logprobs": base + noise[1],
            "reference_policy_logprobs": base + noise[2],
            "advantages": torch.randn(num_rows, 1, generator=generator).expand(num_rows, width).contiguous(),
            "keys": [f"uid{i // 2}_g{i % 2}" for i in range(num_rows)],
        }
    )


def weights_of(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return dict(worker.export_weights())


def adapter_of(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in worker.engine.full_adapter()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
