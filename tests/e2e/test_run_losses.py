"""Whole runs in one process with losses that ask for more than columns: entropies, a forced ratio, weights of rows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.setup import open_trainer
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


def test_rows_of_a_source_count_as_its_weight_says(tmp_path: Path, model: Path) -> None:
    source = {"dataset_name": "sort_digits", "size": 40, "options": {"min_digits": 3, "max_digits": 5}}
    losses = {}
    for weight in (1.0, 3.0):
        train = {"a": {**source, "seed": 1, "loss_weight": weight}, "b": {**source, "seed": 2}}
        settings = {
            "grpo": {"max_num_steps": 1},
            "policy": {"train_global_batch_size": 16, "generation": {"max_new_tokens": 8}},
            "data": {"train": train},
        }
        loss = {"reference_policy_kl_penalty": 0.0}
        config = load_recipe(write_recipe(tmp_path / str(weight), model, **settings, loss_fn=loss), LOCAL)
        with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
            trainer.open_run()
            step = trainer.step()
        sources = {uid: draw.source for uid, draw in zip(step.uids, step.drawn, strict=True)}
        of_rows = [sources[uid] for uid in step.rows.group_uids]
        weights = torch.tensor([weight if name == "a" else 1.0 for name in of_rows])
        is_trained = step.scores.is_trained_group
        assert torch.equal(step.scores.sample_mask, weights * is_trained)
        assert {of_rows[row] for row in torch.nonzero(is_trained).flatten().tolist()} == {"a", "b"}
        # Of a first update the ratio is 1, so the loss is the mean advantage of the tokens, each with its row's weight.
        tokens = weights * is_trained * torch.from_numpy(step.rows.sample_stats.response_lengths)
        expected = -float((step.scores.advantages * tokens).sum() / tokens.sum())
        losses[weight] = step.train.metrics["loss"].value
        assert losses[weight] == pytest.approx(expected, abs=1e-6)
    assert abs(losses[1.0] - losses[3.0]) > 1e-4
