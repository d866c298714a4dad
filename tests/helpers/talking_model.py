"""A tiny model that gives one of a few known answers, whatever it is asked: rewards then vary within every group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from nemo_rl.data.messages import encode_prompt, prompt_messages
from nemo_rl.data.tokenizer import build_tokenizer
from tests.helpers.tiny_model import tiny_model

STEPS, BATCH_SIZE, LEARNING_RATE = 60, 16, 1e-2
IGNORED = -100
"""Label of a position that the loss of transformers leaves out."""


def write_talking_folder(folder: Path, *, prompts: Sequence[str], responses: Sequence[str]) -> Path:
    """Model and tokenizer, taught to answer each of `prompts` with each of `responses` equally often."""
    tokenizer = build_tokenizer(f"user\n{prompt}\nassistant\n{' '.join(responses)}" for prompt in prompts)
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id = tokenizer.eos_token_id
    ids, labels = [], []
    for prompt, response in itertools.product(prompts, responses):
        start = encode_prompt(tokenizer, prompt_messages(prompt))
        answer = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        ids.append(torch.tensor([*start, *answer]))
        labels.append(torch.tensor([IGNORED] * len(start) + answer))
    ids_NT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels_NT = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(len(ids_NT), (BATCH_SIZE,), generator=generator)
        loss = model(input_ids=ids_NT[chosen], labels=labels_NT[chosen], use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder
