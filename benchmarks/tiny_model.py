"""A small random model for benchmarks without a starter checkpoint.

Called by `grpo_step`. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl.data.generated import problems
from nemo_rl.data.tokenizer import build_tokenizer

__all__ = ["write_random_model"]

VOCAB = 320


def write_random_model(folder: Path, *, seed: int = 0) -> Path:
    """Model and tokenizer as a Hugging Face folder."""
    tokenizer = build_tokenizer(f"user\n{p.prompt}\nassistant\n{p.answer}" for p in problems(200, seed=1))
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder
