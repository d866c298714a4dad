"""Whole runs with a teacher: in one process and with its own workers, kept and replayed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.preflight.checks import preflight
from nemo_rl.algorithms.run import run
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.errors import UserError
from nemo_rl_tools.step_replay.chain import ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import VOCAB, tiny_model, write_tiny_folder
from tests.helpers.warm_runs import WarmRuns

RAY = {"cluster.cpu_workers_per_node": "1"}
KEEP = {"diagnostics.keep_steps.enabled": "true"}
ROUNDING = 3e-4
"""AdamW takes a whole step for a gradient of rounding, so a teacher that is off by 1e-7 is seen in the next update."""
METRICS = ("loss", "distillation/kl", "distillation/teacher_top_k_mass", "grad_norm")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another depth with the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    student, teacher = write_tiny_folder(folder / "student"), write_tiny_folder(folder / "teacher")
    tiny_model(seed=7, num_layers=3).save_pretrained(teacher)
    return student, teacher


def recipe_of(folder: Path, models: tuple[Path, Path], *, top_k: int = 8, **teacher: object) -> Path:
    student, taught_by = models
    section = {"enabled": True, "top_k": top_k, "teacher": {"model_name": str(taught_by), **teacher}}
    return write_recipe(
        folder,
        student,
        grpo={"drop_zero_advantage_groups": False, "max_num_steps": 2},
        loss_fn={"reference_policy_kl_penalty": 0.0, "distillation": section},
    )


def rows_of(log_dir: Path) -> list[dict[str, float]]:
    return [row for row in logged_steps(log_dir) if "train/loss" in row]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path]) -> Path:
    """The log folder of a run in one process, whose steps are kept."""
    config = load_recipe(recipe_of(tmp_path_factory.mktemp("local"), models), {**LOCAL, **KEEP})
    run(config, console=Console(file=io.StringIO()))
    return config.logger.log_dir


def test_the_teacher_is_learned_without_a_policy_term(local: Path) -> None:
    rows = rows_of(local)
    assert len(rows) == 2
    for row in rows:
        assert "train/actor_loss" not in row
        assert row["train/loss"] == pytest.approx(row["train/distillation_loss"]) and row["train/loss"] > 0
        assert 0 < row["train/distillation/teacher_top_k_mass"] < 1
        # What a teacher writes and the policy reads counts as any other column.
        assert row["data_plane/bytes/topk_ids"] > 0


def test_a_replay_takes_the_kept_columns_of_the_teacher(local: Path) -> None:
    report = replay_step(ReplayRequest(run=local, step=2))
    assert report.verdict is Verdict.PASS, list(report.lines())
    assert not any(site.difference for site in report.sites)


@pytest.mark.slow
def test_a_teacher_with_workers_and_a_layout_of_its_own_gives_the_same_numbers(
    tmp_path: Path, models: tuple[Path, Path], local: Path, warm_runs: WarmRuns
) -> None:
    taught = {"num_workers": 2, "tensor_parallel_size": 2}
    config = load_recipe(recipe_of(tmp_path, models, **taught), RAY)
    warm_runs.run(config)
    for ours, expected in zip(rows_of(config.logger.log_dir), rows_of(local), strict=True):
        for name in METRICS:
            assert ours[f"train/{name}"] == pytest.approx(expected[f"train/{name}"], rel=ROUNDING), name


def test_a_teacher_with_another_vocabulary_is_refused_before_anything_starts(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    student, _ = models
    other = write_tiny_folder(tmp_path / "other")
    build_tokenizer(["quite another corpus"] * 9, more_special=["<|more|>"]).save_pretrained(str(other))
    config = load_recipe(recipe_of(tmp_path, (student, other), top_k=VOCAB + 1), LOCAL)
    with pytest.raises(UserError) as refused:
        preflight(config)
    assert "its tokenizer has other tokens than the policy's" in str(refused.value)
    assert f"expected at most {VOCAB}, got {VOCAB + 1}" in str(refused.value)


def test_a_teacher_that_cannot_run_in_its_layout_is_named_as_the_teacher(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    layout = {"tensor_parallel_size": 3, "num_workers": 3}
    config = load_recipe(recipe_of(tmp_path, models, **layout), {"cluster.launcher": "ray", "data_plane.impl": "ray"})
    with pytest.raises(
        UserError, match=r"^loss_fn\.distillation\.teacher\.model_name: as a policy of its own: .* by 3;"
    ):
        preflight(config)
