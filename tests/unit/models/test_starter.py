"""The warm start, cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.data.sort_digits import problems
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.models.loading import load_causal_lm
from nemo_rl.models.starter import (
    CALIBRATION_SEED,
    CALIBRATION_SIZE,
    VALIDATION_SEED,
    VALIDATION_SIZE,
    StarterConfig,
    make_starter,
    sampled_accuracy,
)


def test_a_short_warm_start_writes_a_loadable_folder_and_replaces_an_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "starter"
    folder.mkdir()
    (folder / "stale.txt").write_text("old")
    report = make_starter(folder, StarterConfig(max_steps=2, first_evaluation=2, evaluate_every=1, num_problems=200))
    assert report.steps == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["starter"]
    assert not (folder / "stale.txt").exists()
    model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    split = problems(8, seed=1)
    assert sampled_accuracy(model, tokenizer, split, seed=0) == 0.0


@pytest.mark.slow
def test_the_starter_sorts_about_three_in_ten_held_out_numbers(tmp_path: Path) -> None:
    report = make_starter(tmp_path / "starter", StarterConfig(seed=0))
    assert 0.25 <= report.accuracy <= 0.40
    model, tokenizer = load_causal_lm(tmp_path / "starter"), load_tokenizer(tmp_path / "starter")
    held_out = problems(VALIDATION_SIZE, seed=VALIDATION_SEED)
    accuracy = sum(sampled_accuracy(model, tokenizer, held_out, seed=s) for s in range(4)) / 4
    # Four samples of 256 prompts: standard error below 0.015.
    assert 0.18 <= accuracy < 0.40


def test_calibration_and_validation_prompts_are_different_splits() -> None:
    validation = {p.prompt for p in problems(VALIDATION_SIZE, seed=VALIDATION_SEED)}
    calibration = {p.prompt for p in problems(CALIBRATION_SIZE, seed=CALIBRATION_SEED)}
    assert not validation & calibration
