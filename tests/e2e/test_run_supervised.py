"""Supervised runs: the loss of a plain loop, exact resume, the same with several workers, and GRPO that goes on."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.config.load import load_config
from nemo_rl.data.conversation import Message
from nemo_rl.data.messages import PromptEncoder
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import CheckpointError, ConfigError, UserError
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.training import train
from nemo_rl.utils.rollout_file import rollout_path
from nemo_rl.utils.trackers import read_metrics
from tests.helpers.rewards import odd_share
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

DIGITS = {"dataset_name": "sort_digits", "options": {"min_digits": 3, "max_digits": 5}}
SUPERVISED: dict[str, Mapping[str, object]] = {
    "sft": {"enabled": True},
    "grpo": {"val_period": 2},
    "data": {"train": {**DIGITS, "size": 40, "seed": 1}, "validation": {**DIGITS, "size": 12, "seed": 2}},
    "checkpointing": {"enabled": True, "save_period": 2, "keep_top_k": None},
}
PER_TOKEN = 1e-5
"""Bound of a loss in float32 against one in float64."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "model")


def recipe_of(folder: Path, model: Path, **changes: Mapping[str, object]) -> Path:
    """Write the recipe of the other runs without what supervised training refuses."""
    path = write_recipe(folder, model, **{**SUPERVISED, **changes})
    recipe = yaml.safe_load(path.read_text())
    for section in ("env", "loss_fn"):
        recipe.pop(section)
    for section, key in (
        ("grpo", "num_prompts_per_step"),
        ("grpo", "num_generations_per_prompt"),
        ("policy", "generation"),
        ("data", "max_input_seq_length"),
    ):
        recipe[section].pop(key, None)
    path.write_text(yaml.safe_dump(recipe))
    return path


def trained(folder: Path, model: Path, overrides: Mapping[str, str] | None = None, **changes: object) -> Path:
    config = load_recipe(recipe_of(folder, model, **changes), {**LOCAL, **(overrides or {})})
    run(config, console=Console(file=io.StringIO()))
    return config.logger.log_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The log folder of a run of four steps."""
    return trained(tmp_path_factory.mktemp("whole"), model, {"grpo.max_num_steps": "4"})


def test_the_loss_is_that_of_a_plain_loop(whole: Path, model: Path) -> None:
    """The rows of the first step, as the run has written them down, through transformers in float64."""
    reference, total, count = load_causal_lm(model, dtype=torch.float64), 0.0, 0
    rows = [json.loads(line) for line in rollout_path(whole, 1).read_text().splitlines()]
    assert len(rows) == 8, "one row for each prompt, a global batch of them"
    for row in rows:
        ids, mask = torch.tensor(row["token_ids"]), torch.tensor(row["token_mask"]).bool()
        with torch.no_grad():
            logits = reference(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1)
        total -= float(logprobs.gather(-1, ids[1:, None])[:, 0][mask[1:]].sum())
        count += int(mask.sum())
    first = next(row for row in logged_steps(whole) if row.get("step") == 1)
    assert first["train/loss"] == pytest.approx(total / count, rel=PER_TOKEN)
    assert first["train/valid_tokens"] == count
    assert not [name for name in first if name.startswith(("rollout/", "train/reward"))]


def test_training_and_held_out_loss_fall(whole: Path) -> None:
    losses = [row["val/loss"] for row in logged_steps(whole) if "val/loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_a_resumed_run_is_the_run_that_was_left_alone(whole: Path, model: Path, tmp_path: Path) -> None:
    lasting = {"grpo.max_num_steps": "4"}
    log_dir = trained(tmp_path, model, lasting)
    shutil.rmtree(log_dir / "checkpoints" / "step_4")
    again = load_recipe(tmp_path / "recipe.yaml", {**LOCAL, **lasting, "checkpointing.resume": "true"})
    run(again, console=Console(file=io.StringIO()))
    for mine, theirs in zip(logged_steps(log_dir), logged_steps(whole), strict=True):
        # A process that starts anew registers its partitions anew.
        others = {name: value for name, value in mine.items() if theirs.get(name) != value}
        assert not [name for name in others if not name.startswith("data_plane/")]
    weights = "checkpoints/step_4/policy/weights/model.safetensors"
    assert (log_dir / weights).read_bytes() == (whole / weights).read_bytes()


def test_other_rows_are_refused_on_resume(model: Path, tmp_path: Path) -> None:
    trained(tmp_path, model, {"grpo.max_num_steps": "2"})
    other = {"grpo.max_num_steps": "4", "data.train.seed": "9", "checkpointing.resume": "true"}
    config = load_recipe(tmp_path / "recipe.yaml", {**LOCAL, **other})
    with pytest.raises(CheckpointError, match=r"data\.train"):
        run(config, console=Console(file=io.StringIO()))


@pytest.mark.slow
def test_two_workers_train_the_same(whole: Path, model: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe_of(tmp_path, model), {"grpo.max_num_steps": "4"})
    assert config.cluster.num_workers == 2
    run(config, console=Console(file=io.StringIO()))
    expected = [row["train/loss"] for row in logged_steps(whole) if "train/loss" in row]
    found = [row["train/loss"] for row in logged_steps(config.logger.log_dir) if "train/loss" in row]
    assert found == pytest.approx(expected, rel=1e-4)


def test_grpo_goes_on_with_the_template_that_was_trained(model: Path, tmp_path: Path) -> None:
    """Rollouts of the warm start begin with the very tokens that were trained as context."""
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    section = {"model_name": str(model), "tokenizer": {"chat_template": template}}
    base = {"precision": "float32", "train_global_batch_size": 8, "max_total_sequence_length": 48}
    log_dir = trained(tmp_path / "sft", model, {"grpo.max_num_steps": "2"}, policy={**base, **section})
    weights = log_dir / "checkpoints" / "step_2" / "policy" / "weights"
    assert load_tokenizer(weights).chat_template == template
    warm = load_recipe(write_recipe(tmp_path / "grpo", weights), {**LOCAL, "grpo.max_num_steps": "1"})
    run(warm, console=Console(file=io.StringIO()))
    encoder, seen = PromptEncoder(load_tokenizer(weights)), {}
    for place in (log_dir, warm.logger.log_dir):
        for row in map(json.loads, rollout_path(place, 1).read_text().splitlines()):
            start = row["token_mask"].index(1)
            seen.setdefault(row["messages"][-1]["content"], []).append(row["token_ids"][:start])
    for text, prompts in seen.items():
        assert all(tuple(ids) == encoder.encode([Message(role="user", content=text)]) for ids in prompts)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("loss_fn.ratio_clip_max=0.3", "loss_fn.ratio_clip_max"),
        ("env.num_workers=3", "env.num_workers"),
        ("grpo.use_dynamic_sampling=true", "grpo.use_dynamic_sampling"),
        ("policy.generation.temperature=0.7", "policy.generation.temperature"),
        ("diagnostics.tracer.enabled=true", "diagnostics.tracer.enabled"),
        ("data.train.apply_chat_template=false", "data.train.apply_chat_template"),
    ],
)
def test_what_it_does_not_read_is_refused(override: str, problem: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(recipe_of(tmp_path, model), [override])


def test_train_goes_on_from_finished_conversations(model: Path, tmp_path: Path) -> None:
    """The second run starts with the weights that the first one has left."""
    said = [{"prompt": f"sort {n}", "completion": "".join(sorted(str(n)))} for n in range(100, 132)]
    small = {"cluster.launcher": "local", "policy.max_total_sequence_length": 48, "data.max_input_seq_length": 32}
    given: dict[str, object] = {
        "prompts": [{"prompt": f"sort {n}", "answer": str(n)} for n in range(200, 216)],
        "reward": odd_share,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 2,
        "max_num_steps": 1,
        "settings": {**small, "policy.generation.max_new_tokens": 6},
    }
    first_stage = {"data": said, "grpo.max_num_epochs": 2, "policy.optimizer.kwargs.lr": 1e-2}
    warm = train(model, folder=tmp_path / "run", warm_start=first_stage, **given)
    first = [row for row in read_metrics(warm.folder / "warm_start" / "metrics.jsonl") if "train/loss" in row]
    assert len(first) == 4 and first[-1]["train/loss"] < first[0]["train/loss"]
    recipe = yaml.safe_load((warm.folder / "config.yaml").read_text())
    started_from = Path(recipe["policy"]["model_name"])
    assert started_from.is_relative_to(warm.folder / "warm_start") and (started_from / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="warm start with policy.lora"):
        train(model, folder=tmp_path / "lora", warm_start=said, lora=True, **given)


def test_min_reward_needs_its_switch(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.min_reward"):
        load_config(write_recipe(tmp_path, model), ["sft.min_reward=0.5"])


def test_too_few_rows_are_refused_before_the_start(model: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe_of(tmp_path, model), {**LOCAL, "data.train.size": "5", "data.validation": "null"})
    with pytest.raises(UserError, match="train_global_batch_size"):
        run(config, console=Console(file=io.StringIO()))
