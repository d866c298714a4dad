"""Whole runs in one process with what needs the tokens of a row: weights by their log-probabilities."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.stages.state import TOO_FAR
from nemo_rl.diagnostics.rollouts.row import RolloutRow, read_rows
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

ROWS = 16
Logged = dict[str, float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def steps_of(folder: Path, model: Path, overrides: dict[str, object] | None = None, **sections: object) -> list[Logged]:
    grpo = {"max_num_steps": 2, **sections.pop("grpo", {})}  # type: ignore[dict-item]
    loss = {"reference_policy_kl_penalty": 0.0, **sections.pop("loss_fn", {})}  # type: ignore[dict-item]
    recipe = write_recipe(folder, model, grpo=grpo, loss_fn=loss, policy={"train_global_batch_size": ROWS}, **sections)
    given = {key: str(value) for key, value in (overrides or {}).items()}
    config = load_recipe(recipe, {**LOCAL, "grpo.drop_zero_advantage_groups": "false", **given})
    run(config, console=Console(file=io.StringIO()))
    return logged_steps(config.logger.log_dir)


def rollouts(folder: Path, step: int) -> list[RolloutRow]:
    return read_rows(folder / "logs" / "rollouts" / f"step_{step}.jsonl")


def test_rows_above_the_log_probability_error_have_no_weight_and_say_so(tmp_path: Path, model: Path) -> None:
    key = "grpo.seq_logprob_error_threshold"
    free = steps_of(tmp_path / "free", model, {key: 1e6})[0]
    assert free["train/seq_logprob_error_masked_rows"] == 0 and free["train/valid_sequences"] == ROWS
    low, high = free["train/seq_logprob_error_mean"], free["train/seq_logprob_error_max"]
    assert 1 < low < high < 1.001
    first, _ = steps_of(tmp_path / "some", model, {key: repr((low + high) / 2)})
    masked = first["train/seq_logprob_error_masked_rows"]
    assert 0 < masked < ROWS and first["train/valid_sequences"] == ROWS - masked
    assert first["train/seq_logprob_error_masked_share"] == masked / ROWS
    assert first["train/loss"] != free["train/loss"] and first["train/reward"] == free["train/reward"]
    pairs = list(zip(rollouts(tmp_path / "free", 1), rollouts(tmp_path / "some", 1), strict=True))
    assert len(pairs) == ROWS and sum(after.no_weight == TOO_FAR for _, after in pairs) == masked
    for before, after in pairs:
        assert before.sample_mask == 1 and before.no_weight is None
        assert after.advantage == before.advantage, "it counts for the baseline"
        assert after.sample_mask == (0 if after.no_weight == TOO_FAR else 1)


def test_a_step_of_which_every_row_is_masked_updates_nothing(tmp_path: Path, model: Path) -> None:
    steps = steps_of(tmp_path, model, {"grpo.seq_logprob_error_threshold": "1.0000000001"})
    for step in steps:
        assert step["train/seq_logprob_error_masked_share"] == 1 and step["train/rows"] == 0
        assert "train/loss" not in step and step["data_plane/live_rows"] == 0
    assert {row.no_weight for row in rollouts(tmp_path, 2)} == {TOO_FAR}
    assert json.loads((tmp_path / "logs" / "rollouts" / "step_2.jsonl").read_text().splitlines()[0])["sample_mask"] == 0
