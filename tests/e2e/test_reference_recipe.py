"""The shipped recipe with both log-probability stages, in one process: they run, write, and feed the loss."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.utils.trackers import read_metrics
from tests.helpers.runs import LOCAL, ROOT, SMALL, load_recipe

pytestmark = pytest.mark.slow

STAGES = {"timing/prev_logprobs_s", "timing/reference_logprobs_s"}


def train(name: str, folder: Path, model: Path, **changes: str) -> list[dict[str, float]]:
    own = {"policy.model_name": str(model), "logger.log_dir": str(folder / "logs")}
    config = load_recipe(ROOT / "configs" / name, SMALL | LOCAL | own | changes)
    run(config, console=Console(file=io.StringIO(), width=200))
    return [row for row in read_metrics(config.logger.log_dir / "metrics.jsonl") if "train/reward" in row]


def test_the_recipe_runs_both_log_probability_stages_and_the_policy_leaves_its_reference(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One update per step: the first step then trains the reference policy itself.
    one_update = {"policy.train_global_batch_size": "32"}
    first, second = train("recipes/grpo_sort_reference_cpu.yaml", tmp_path, model, **one_update)
    for row in (first, second):
        assert all(row[stage] > 0 for stage in STAGES)
        assert row["data_plane/bytes/prev_logprobs"] > 0 and row["data_plane/bytes/reference_policy_logprobs"] > 0
        assert row["train/loss"] == pytest.approx(row["train/actor_loss"] + row["train/kl_penalty"], rel=1e-4, abs=1e-7)
        # pi_old is the policy itself, to the rounding of another batch.
        assert row["train/probs_ratio"] == pytest.approx(1, abs=1e-5)
        assert row["data_plane/live_rows"] == 0
    assert abs(first["train/reference_kl"]) < 1e-10
    assert 1e-7 < second["train/reference_kl"] < 10, "after an update the policy is no longer its reference"


def test_the_demo_runs_neither(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = train("grpo_sort_cpu.yaml", tmp_path, model, **{"grpo.max_num_steps": "1"})
    assert not STAGES & row.keys() and "train/reference_kl" not in row
