"""Bad input ends with one clear message, exit code 2, no traceback, and nothing lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config

from tests.helpers.runs import LOCAL, logged_steps, run_cli, write_recipe

ROOT = Path(__file__).parents[2]
DATA = {"dataset_name": "jsonl", "size": None}

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(command_line) -> Run:
    """The command line in this process, for a recipe in one process."""
    settings = [f"{name}={value}" for name, value in LOCAL.items()]
    return lambda recipe, *overrides: command_line(recipe, *settings, *overrides)


@pytest.fixture
def without_forks(monkeypatch) -> None:
    """For runs over Ray that are refused: what their workers would import takes seconds."""
    for place in ("algorithms.run", "cli.run_recipe"):
        monkeypatch.setattr(f"nemo_rl.{place}.worker_forks", lambda _: nullcontext())


def jsonl(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"input": text, "output": "x"}) + "\n" for text in prompts))
    return path


def recipe_on_file(folder: Path, model: Path, path: Path, **data: object) -> Path:
    section = {"train": {"dataset_name": "jsonl", "data_path": str(path)}, "max_input_seq_length": 24, **data}
    return write_recipe(folder, model, data=section)


def test_unknown_keys_and_wrong_types_are_all_reported_with_a_suggestion(run, tmp_path, model):
    recipe = write_recipe(tmp_path, model, grpo={"num_generation_per_prompt": 4, "max_num_steps": "many"})
    code, text = run(recipe)
    assert code == 2
    assert "grpo.num_generation_per_prompt" in text and "did you mean 'num_generations_per_prompt'" in text
    assert "grpo.max_num_steps" in text and "'many'" in text


def test_fixed_microbatches_that_do_not_divide_are_refused_and_capped_ones_are_not(run, tmp_path, model):
    recipe = write_recipe(tmp_path, model)
    fixed = ("policy.dynamic_batching.enabled=false", "policy.train_micro_batch_size=3")
    fixed += ("~policy.dynamic_batching.train_mb_tokens", "~policy.dynamic_batching.logprob_mb_tokens")
    code, text = run(recipe, *fixed)
    assert code == 2 and "train_micro_batch_size" in text and "8" in text and "3" in text
    assert run(recipe, "--validate-only")[0] == 0


def test_a_missing_model_folder_is_named(run, tmp_path, model):
    code, text = run(write_recipe(tmp_path, model), f"policy.model_name={tmp_path / 'nowhere'}")
    assert code == 2 and "nowhere" in text and "policy.model_name" in text


def test_preflight_tells_all_problems_at_once_and_a_run_does_the_same_first(run, tmp_path, model):
    recipe = recipe_on_file(tmp_path, model, tmp_path / "nowhere.jsonl")
    bad = ("policy.router_replay.enabled=true", "env.reward_function=nowhere:f")
    for arguments in (("--preflight", *bad), bad):
        code, text = run(recipe, *arguments)
        assert code == 2 and "starting" not in text
        for line in ("'qwen3' has no routed experts", "nowhere.jsonl cannot be read", "reward function 'nowhere:f'"):
            assert line in text
    assert not (tmp_path / "logs").exists()
    code, text = run(write_recipe(tmp_path, model), "--preflight")
    assert code == 0 and "ok: storage, run folder" in text and "tokenizer, teacher, prompts, reward" in text


def test_a_disk_that_is_full_from_the_start_is_named(run, tmp_path, model):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The lock of the folder fits, the resolved config does not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        code, text = run(write_recipe(tmp_path, model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "File too large" in text and "ulimit -f" in text


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["policy.generation.stop_strings=['']"], "stop_strings.0: expected a text that is not empty"),
        (["grpo=[1,2]", "grpo.seed=3"], "grpo is no section that has keys"),
        (["grpo.seed=" + "9" * 5000], "got 5000 digits"),
        ([b"logger.log_dir=\xff"], "the value cannot be read"),
        (["data.train.options=&a [*a]"], "contains itself through an alias"),
        pytest.param(
            ["policy.model_name=nowhere/at-all", "--preflight"], "HF_HUB_OFFLINE is set", marks=pytest.mark.slow
        ),
    ],
)
def test_the_command_itself_ends_without_a_traceback(arguments, shown):
    done = subprocess.run(
        [sys.executable, "examples/run_grpo.py", "--config", "configs/grpo_sort_cpu.yaml", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert shown in done.stderr


def test_parallel_sizes_that_the_model_cannot_run_in_are_refused_before_anything_starts(
    run, tmp_path, model, without_forks
):
    settings = ("cluster.launcher=ray", "data_plane.impl=ray", "cluster.cpu_workers_per_node=3")
    code, text = run(write_recipe(tmp_path, model), *settings, "policy.dtensor_cfg.tensor_parallel_size=3")
    assert code == 2 and "num_attention_heads=4 of 'qwen3' does not divide by 3" in text
    assert "starting Ray" not in text


MEGATRON = (
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.optimizer=null",
    "policy.megatron_cfg.optimizer.lr=1.0e-3",
)


def test_a_model_that_the_megatron_worker_does_not_know_is_refused_with_those_it_knows(run, tmp_path, model):
    folder = Path(shutil.copytree(model, tmp_path / "other"))
    Gemma2Config(vocab_size=320).save_pretrained(str(folder))
    code, text = run(write_recipe(tmp_path, model), *MEGATRON, f"policy.model_name={folder}")
    assert code == 2 and "trains glm4_moe, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe; got 'gemma2'" in text
    assert "policy.dtensor_cfg.enabled=true" in text


def test_positions_that_the_megatron_worker_does_not_know_are_refused(run, tmp_path, model):
    folder = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1.0e4, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    code, text = run(write_recipe(tmp_path, model), *MEGATRON, f"policy.model_name={folder}")
    assert code == 2 and "rope_type 'dynamic' (expected default, linear, llama3, yarn)" in text


def test_sizes_that_do_not_divide_in_megatron_are_all_refused_before_anything_starts(
    run, tmp_path, model, without_forks
):
    settings = ("cluster.launcher=ray", "data_plane.impl=ray", "cluster.cpu_workers_per_node=9")
    sizes = ("tensor_model_parallel_size=3", "pipeline_model_parallel_size=3", "freeze_moe_router=true")
    keys = [f"policy.megatron_cfg.{size}" for size in sizes]
    code, text = run(write_recipe(tmp_path, model), *MEGATRON, *settings, *keys, "policy.train_global_batch_size=16")
    assert code == 2 and "starting Ray" not in text
    for line in (
        "policy.megatron_cfg.tensor_model_parallel_size: 4 attention heads do not divide by 3",
        "policy.megatron_cfg.tensor_model_parallel_size: 320 tokens in the vocabulary do not divide by 3",
        "policy.megatron_cfg.pipeline_model_parallel_size: 2 layers do not divide over 3 stages",
        "policy.megatron_cfg.freeze_moe_router: 'qwen3' has no experts",
    ):
        assert line in text


def test_damaged_weights_are_named_in_a_run_on_megatron(run, tmp_path, model):
    folder = Path(shutil.copytree(model, tmp_path / "damaged"))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    code, text = run(write_recipe(tmp_path, model), *MEGATRON, f"policy.model_name={folder}")
    assert code == 2 and str(folder) in text and "model.safetensors cannot be read" in text


def with_a_stranger(model: Path, folder: Path) -> Path:
    """A copy with one weight too many, which Hugging Face leaves aside and the Megatron worker refuses."""
    copy = Path(shutil.copytree(model, folder / "stranger"))
    weights = load_file(copy / "model.safetensors")
    save_file({**weights, "model.layers.1.adapter.weight": torch.zeros(2)}, copy / "model.safetensors")
    return copy


def test_weights_of_another_model_are_named_by_the_megatron_worker(run, tmp_path, model):
    folder = with_a_stranger(model, tmp_path)
    code, text = run(write_recipe(tmp_path, model), *MEGATRON, f"policy.model_name={folder}")
    assert code == 2 and str(folder) in text and "model.layers.1.adapter.weight" in text


@pytest.mark.slow
@pytest.mark.full
def test_weights_of_another_model_are_named_by_the_ranks_of_a_pipeline(tmp_path, model):
    folder = with_a_stranger(model, tmp_path)
    settings = ("cluster.launcher=ray", "data_plane.impl=ray", "policy.megatron_cfg.pipeline_model_parallel_size=2")
    code, text = run_cli(write_recipe(tmp_path, model), *MEGATRON, *settings, f"policy.model_name={folder}")
    [line] = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code == 2 and str(folder) in line and "model.layers.1.adapter.weight" in line
    assert "Traceback" not in text


def test_an_empty_dataset_is_named(run, tmp_path, model):
    code, text = run(recipe_on_file(tmp_path, model, jsonl(tmp_path / "empty.jsonl", [])))
    assert code == 2 and "data.train" in text and "no prompt" in text


def test_too_few_prompts_for_a_step_are_refused(run, tmp_path, model):
    code, text = run(recipe_on_file(tmp_path, model, jsonl(tmp_path / "two.jsonl", ["a", "b"])))
    assert code == 2 and "num_prompts_per_step=4" in text and "got 2" in text


@pytest.mark.slow
def test_overlong_prompts_are_counted_and_skipped_or_refused(run, tmp_path, model):
    path = jsonl(tmp_path / "p.jsonl", ["1", "2", "3", "4", "5" * 60])
    recipe = recipe_on_file(tmp_path, model, path)
    code, text = run(recipe, "grpo.max_num_steps=1")
    assert code == 0 and "1 prompts are longer than data.max_input_seq_length=24" in text
    code, text = run(recipe, "data.overlong_prompts=error", "logger.overwrite=true")
    assert code == 2 and "prompt 4" in text and "data.overlong_prompts=skip" in text


@pytest.mark.full
@pytest.mark.slow
def test_too_few_cpus_for_the_actors_are_counted(tmp_path, model):
    code, text = run_cli(write_recipe(tmp_path, model), "cluster.num_cpus=2", "data_plane.impl=transfer_queue")
    assert code == 2 and "6 logical CPUs are needed" in text and "cluster.num_cpus" in text
    assert "Traceback" not in text


def test_a_reward_that_raises_names_prompt_response_and_cause(run, tmp_path, model):
    code, text = run(write_recipe(tmp_path, model), "env.reward_function=tests.helpers.rewards:explode")
    assert code == 2 and "this reward always fails" in text and "prompt:" in text and "response: ''" in text
    assert "rewards.py:" in text and "expected: (prompt, response, answer) -> a finite number" in text
    assert not (tmp_path / "logs").exists(), "nothing was started"


@pytest.mark.slow
def test_a_reward_that_hangs_is_cut_off_and_counted_or_stops_the_run(run, tmp_path, model):
    hanging = ("env.reward_function=tests.helpers.rewards:hang", "env.timeout_s=0.3", "grpo.max_num_steps=1")
    code, text = run(write_recipe(tmp_path, model), *hanging)
    assert code == 2 and "took longer than env.timeout_s 0.3 s" in text and "env.preflight_reward=false" in text
    hanging += ("env.preflight_reward=false",)
    small = ("grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=2")
    code, text = run(write_recipe(tmp_path, model), *hanging, *small)
    assert code == 0, text
    assert logged_steps(tmp_path / "logs")[-1]["rollout/reward_timeouts"] == 2
    code, text = run(write_recipe(tmp_path / "b", model), *hanging, *small, "env.on_timeout=error")
    assert code == 2 and "env.timeout_s 0.3" in text and "env.on_timeout=zero" in text


def test_numbers_that_are_not_finite_stop_the_run_and_name_the_samples(run, tmp_path, model):
    code, text = run(write_recipe(tmp_path, model), "policy.optimizer.kwargs.lr=1e30")
    assert code == 2 and "_g" in text and ("nan" in text.lower() or "inf" in text.lower() or "finite" in text)


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint_valid(run, tmp_path, model):
    saving = {"enabled": True, "save_period": 1, "keep_top_k": None, "checkpoint_dir": str(tmp_path / "ck")}
    recipe = write_recipe(tmp_path, model, checkpointing=saving)
    assert run(recipe, "grpo.max_num_steps=1")[0] == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file of 64 KiB is the largest that fits: logs do, weights do not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        code, text = run(recipe, "checkpointing.resume=true")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "checkpoint of step 2" in text and "step_1" in text
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == ["latest", "step_1"]
    steps = [row["step"] for row in logged_steps(tmp_path / "logs")]
    assert steps in ([1, 2], [1, 2, 3]), "a step is logged before it is saved, and one may be trained meanwhile"
    code, text = run(recipe, "checkpointing.resume=true")
    assert code == 0, text
    assert (tmp_path / "ck" / "latest").read_text() == "step_3"
