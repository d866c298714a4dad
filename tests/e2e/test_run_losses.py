"""Whole runs in one process with losses that ask for more than columns: entropies, a forced ratio, weights of rows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe


def steps_of(folder: Path, model: Path, *, updates: int = 1, **loss: object) -> list[dict[str, float]]:
    policy = {"train_global_batch_size": 16 // updates}
    recipe = write_recipe(folder, model, grpo={"max_num_steps": 2}, policy=policy, loss_fn=loss)
    config = load_recipe(recipe, LOCAL)
    run(config, console=Console(file=io.StringIO()))
    return [row for row in logged_steps(config.logger.log_dir) if "train/loss" in row]


def test_a_forced_ratio_an_entropy_bonus_and_a_correction_together(tmp_path: Path, model: Path) -> None:
    rows = steps_of(
        tmp_path,
        model,
        force_on_policy_ratio=True,
        entropy_coefficient=0.01,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio_min=0.9999999,
        truncated_importance_sampling_ratio=5.0,
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type="k1",
        reference_policy_kl_gradient="straight_through",
    )
    for row in rows:
        assert row["train/probs_ratio_min"] == row["train/probs_ratio_max"] == 1.0
        parts = row["train/actor_loss"] + row["train/kl_penalty"] - row["train/entropy_bonus"]
        assert row["train/loss"] == pytest.approx(parts, rel=1e-4, abs=1e-7)
        # A random model of 320 tokens is nearly uniform.
        assert 1.0 < row["train/entropy"] < 5.8
        assert 0 <= row["train/masked_share"] < 1 and row["train/sampling_importance_ratio_max"] <= 5.0


def test_rows_that_another_policy_is_too_far_from_are_left_out(tmp_path: Path, model: Path) -> None:
    [first, second] = steps_of(
        tmp_path,
        model,
        updates=2,
        name="gspo",
        token_level_loss=False,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="geo-mask",
        # Bounds that no row is inside of.
        truncated_importance_sampling_ratio_min=1.5,
        truncated_importance_sampling_ratio=2.0,
        reference_policy_kl_penalty=0.0,
        entropy_coefficient=0.01,
    )
    for row in (first, second):
        assert row["train/masked_share"] == 1.0 and row["train/actor_loss"] == 0.0
        assert row["train/loss"] == pytest.approx(-row["train/entropy_bonus"]) and row["train/entropy_bonus"] > 0
