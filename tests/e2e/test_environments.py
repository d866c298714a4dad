"""Whole runs on every kind of prompts and rewards, in one process: what the model says is scored as it should be."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.messages import encode_prompt, prompt_messages
from nemo_rl.data.reasoning_gym_wrapper import Task, questions
from nemo_rl.data.tokenizer import build_tokenizer
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, rollouts_of, write_recipe
from tests.helpers.tiny_model import tiny_model

STEPS, BATCH_SIZE, LEARNING_RATE = 60, 16, 1e-2
IGNORED = -100
"""Label of a position that the loss of transformers leaves out."""


def write_scripted_folder(folder: Path, *, prompts: Sequence[str], responses: Sequence[str]) -> Path:
    """Write a tiny model and tokenizer that answer each of `prompts` with each of `responses` equally often.

    Rewards then vary within every group.
    """
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


pytestmark = pytest.mark.slow

NUM_STEPS = 2


def train(folder: Path, model: Path, *, data: Mapping[str, object], env: Mapping[str, object]) -> list[dict]:
    """Runs the steps, checks what every run must show, and returns the rollouts of all steps."""
    recipe = write_recipe(
        folder,
        model,
        grpo={"max_num_steps": NUM_STEPS, "val_at_end": "validation" in data},
        policy={
            "max_total_sequence_length": 384,
            "dynamic_batching": {"enabled": True, "train_mb_tokens": 2048, "logprob_mb_tokens": 4096},
            "generation": {"max_new_tokens": 16},
        },
        data={"max_input_seq_length": 256, **data},
        env={"reward_function": None, **env},
        checkpointing={"enabled": False},
    )
    config = load_recipe(recipe, LOCAL)
    run(config, console=Console(file=io.StringIO()))
    steps = logged_steps(config.logger.log_dir)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert 0.0 < row["train/reward"] < 1.0
        assert row["train/grad_norm"] > 0
        assert row["data_plane/live_rows"] == 0
    return [rollout for step in (1, 2) for rollout in rollouts_of(config.logger.log_dir, step)]


def said(rollout: Mapping[str, object]) -> str:
    """Return the response without its end-of-turn token."""
    return str(rollout["response"]).removesuffix("<|im_end|>")


def asked(rollout: Mapping[str, object], texts: Mapping[str, str]) -> str:
    """Return the answer to the one text that occurs in the prompt."""
    (answer,) = {answer for text, answer in texts.items() if f"\n{text}<|im_end|>" in str(rollout["prompt"])}
    return answer


def test_math_on_a_hugging_face_dataset_compares_values(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    gold = {f"half of {n} apples": ("1/2", "4/2")[n % 2] for n in range(8)}
    saved = datasets.Dataset.from_dict({"problem": list(gold), "solution": list(gold.values())})
    datasets.DatasetDict(train=saved, test=saved.select([0])).save_to_disk(str(tmp_path / "halves"))
    model = write_scripted_folder(tmp_path / "model", prompts=list(gold), responses=["\\boxed{0.5}", "\\boxed{2}"])
    source = {"dataset_name": "huggingface", "data_path": str(tmp_path / "halves"), "split": "train"}
    keys = {"input_key": "problem", "output_key": "solution"}
    rollouts = train(tmp_path, model, data={"train": {**source, **keys}}, env={"name": "math"})
    right = {("1/2", "\\boxed{0.5}"), ("4/2", "\\boxed{2}")}
    assert len(rollouts) == 32
    assert [r["reward"] for r in rollouts] == [float((asked(r, gold), said(r)) in right) for r in rollouts]


def test_reasoning_gym_scores_its_own_items(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    source = DatasetConfig(dataset_name="reasoning_gym", task="syllogism", size=24, seed=3)
    held_out = source.model_copy(update={"size": 8, "seed": 1000})
    gold = {
        question: str(answer) for question, answer in questions(Task(name="syllogism", size=24, seed=3), where="test")
    }
    model = write_scripted_folder(tmp_path / "model", prompts=list(gold), responses=["Yes", "No"])
    data = {"train": source.model_dump(mode="json"), "validation": held_out.model_dump(mode="json")}
    rollouts = train(
        tmp_path, model, data=data, env={"name": "reasoning_gym", "score_threshold": 1.0, "timeout_s": 300}
    )
    assert {said(r) for r in rollouts} >= {"Yes", "No"}
    assert [r["reward"] for r in rollouts] == [float(asked(r, gold) == said(r)) for r in rollouts]


def test_a_jsonl_file_with_its_own_keys_template_and_answers(tmp_path: Path) -> None:
    gold = {f"colour {n}?": ("red", "blue")[n % 2] for n in range(12)}
    rows = [json.dumps({"question": text, "gold": answer}) + "\n" for text, answer in gold.items()]
    (tmp_path / "colours.jsonl").write_text("".join(rows))
    model = write_scripted_folder(
        tmp_path / "model", prompts=[f"Say a colour.\n{text}" for text in gold], responses=["red", "blue"]
    )
    source = {
        "dataset_name": "jsonl",
        "data_path": str(tmp_path / "colours.jsonl"),
        "input_key": "question",
        "output_key": "gold",
        "prompt_template": "Say a colour.\n{input}",
        "size": 10,
    }
    rollouts = train(tmp_path, model, data={"train": source}, env={"name": "sort"})
    assert [r["reward"] for r in rollouts] == [float(asked(r, gold) == said(r)) for r in rollouts]
    assert not any("colour 10?" in str(r["prompt"]) or "colour 11?" in str(r["prompt"]) for r in rollouts)
