"""A run with top-p whose engine records the sampling masks: through the data plane, kept, and replayed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl_tools.mismatch.explain import explain_mismatch
from nemo_rl_tools.step_replay.chain import ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

FILTERED = {**LOCAL, "policy.generation.top_p": "0.8"}
RECORDED = {**FILTERED, "policy.generation.record_support": "true"}


def test_rollout_and_trainer_agree_and_a_kept_step_is_replayed_to_the_last_bit(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, write_tiny_folder(tmp_path / "model"))
    config = load_recipe(recipe, {**RECORDED, "diagnostics.keep_steps.enabled": "true"})
    run(config, console=Console(file=io.StringIO()))
    steps = logged_steps(config.logger.log_dir)
    assert [step["train/token_mult_prob_error"] for step in steps] == pytest.approx([1.0] * 3, abs=1e-5)
    report = replay_step(ReplayRequest(run=config.logger.log_dir, step=1))
    assert report.verdict is Verdict.PASS, "\n".join(report.lines())
    explained = explain_mismatch(ReplayRequest(run=config.logger.log_dir, step=1))
    assert explained.verdict is Verdict.PASS and "recorded sets" in explained.trainer, list(explained.lines())


def test_a_run_without_the_sets_says_what_they_would_mend(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, write_tiny_folder(tmp_path / "model"))
    said = io.StringIO()
    changes = {**FILTERED, "grpo.max_num_steps": "2", "logger.console": "full"}
    run(load_recipe(recipe, changes), console=Console(file=said, width=1000))
    assert said.getvalue().count("without policy.generation.record_support") == 1
    assert "sampling_support" not in said.getvalue()
    assert said.getvalue().count("  mismatch 1.") == 2, "the line of each step is the long one"
