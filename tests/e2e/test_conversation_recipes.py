"""Two steps of the recipes with conversations, shortened, with models of a warm start of a few steps."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from examples.starter import STARTER_TASKS, make_starter
from nemo_rl.algorithms.run import run
from tests.helpers.runs import LOCAL, ROOT, load_recipe, logged_steps

SHORT = {
    **LOCAL,
    "grpo.num_prompts_per_step": "4",
    "grpo.num_generations_per_prompt": "4",
    "grpo.max_num_steps": "2",
    "grpo.val_at_start": "false",
    "grpo.max_val_samples": "8",
    "grpo.drop_zero_advantage_groups": "false",
    "data.train.size": "64",
    "policy.train_global_batch_size": "16",
    "policy.generation.num_replicas": "1",
    "checkpointing.enabled": "false",
    "logger.tensorboard_enabled": "false",
    "logger.reward_curve": "false",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guess", "guess_async", "calculator"])
def test_two_steps_train_conversations_that_the_starter_knows_the_form_of(tmp_path: Path, name: str) -> None:
    task = STARTER_TASKS[name.removesuffix("_async")]
    warm = replace(task.config, max_steps=60, batch_size=16, num_problems=500)
    make_starter(tmp_path / "starter", task, config=warm)
    config = load_recipe(
        ROOT / "configs" / "recipes" / f"grpo_{name}_cpu.yaml",
        {
            **SHORT,
            "policy.model_name": str(tmp_path / "starter"),
            "logger.log_dir": str(tmp_path / "logs"),
        },
    )
    run(config, console=Console(file=io.StringIO()))
    steps = [step for step in logged_steps(config.logger.log_dir) if "train/loss" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["train/rows"] == 16 and step["train/grad_norm"] >= 0.0
        assert step["rollout/left_out_rows"] == 0.0
        if not config.grpo.async_.enabled:
            # With sampling ahead, conversations of later steps are open, and other weights have sampled.
            assert step["rollout/open_conversations"] == 0.0
            assert step["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
        assert (step["rollout/turns"] > 1.0) or name == "calculator"
    assert "val/reward" in steps[-1]
