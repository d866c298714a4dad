"""Recipes of two stages: supervised training, then GRPO from its weights, also after a kill in each of them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.two_stages import stage_configs
from nemo_rl.cli.run_recipe import Extent, resume_hint, run_recipe
from nemo_rl.config.load import first_stage, load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.sft import SFTConfig
from nemo_rl.errors import ConfigError, RunFolderError, UserError
from nemo_rl.utils.run_lock import OUTCOME_FILE
from nemo_rl_tools.view.runs import find_runs
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

STAGES = {**LOCAL, "stages": "[sft, grpo]"}
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[assistant] {% endif %}"
FIRST = {
    "data.train": {"dataset_name": "sort_digits", "size": 32, "seed": 3, "options": {"min_digits": 3, "max_digits": 5}},
    "policy": {"train_global_batch_size": 8, "optimizer": {"kwargs": {"lr": 1.0e-2, "weight_decay": 0}}},
    "grpo.max_num_steps": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "model")


def recipe_of(folder: Path, model: Path, **settings: object) -> Path:
    return write_recipe(
        folder,
        model,
        sft={"settings": {**FIRST, **settings}},
        policy={
            "model_name": str(model),
            "precision": "float32",
            "train_global_batch_size": 8,
            "max_total_sequence_length": 48,
            "tokenizer": {"chat_template": TEMPLATE},
            "generation": {"max_new_tokens": 6},
        },
        grpo={"max_num_steps": 2, "num_generations_per_prompt": 2},
        checkpointing={"enabled": True, "save_period": 2, "keep_top_k": None},
    )


def ran(config: MasterConfig) -> str:
    console = Console(file=io.StringIO(), width=200)
    run(config, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, str]:
    """The log folder of a run of both stages, and what it printed."""
    config = load_recipe(recipe_of(tmp_path_factory.mktemp("whole"), model), STAGES)
    said = ran(config)
    return config.logger.log_dir, said


def learned(folder: Path) -> list[dict[str, float]]:
    names = ("step", "train/loss", "train/grad_norm", "train/reward")
    rows = [{name: row[name] for name in names if name in row} for row in logged_steps(folder)]
    return [row for row in rows if "train/loss" in row]


def test_grpo_goes_on_from_the_weights_of_the_first_stage(whole: tuple[Path, str], model: Path, tmp_path: Path) -> None:
    """Both stages have the numbers of runs that are started one by one, and the template object is the same."""
    folder, said = whole
    first = load_recipe(recipe_of(tmp_path, model), STAGES)
    alone = first_stage(first)
    assert alone is not None and alone.policy.tokenizer == first.policy.tokenizer
    ran(alone)
    assert learned(folder / "warm_start") == learned(alone.logger.log_dir) and len(learned(alone.logger.log_dir)) == 4
    weights = alone.logger.log_dir / "checkpoints" / "step_4" / "policy" / "weights"
    policy = first.policy.model_copy(update={"model_name": str(weights)})
    second = first.model_copy(update={"stages": ("grpo",), "sft": SFTConfig(), "policy": policy})
    ran(second)
    assert learned(folder) == learned(second.logger.log_dir) and len(learned(folder)) == 2
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["policy"]["model_name"] == str(folder / "warm_start/checkpoints/step_4/policy/weights")
    assert written["stages"] == ["grpo"]
    again = [load_config(place / "config.yaml") for place in (folder, folder / "warm_start")]
    assert [config.sft.enabled for config in again] == [False, True], "both can be gone on with by themselves"
    assert said.index("stage 1 of 2: sft") < said.index("stage 2 of 2: grpo")
    assert [found.name for found in find_runs(folder)] == ["logs", "warm_start"]
    assert [found.name for found in find_runs(folder.parent)] == ["logs", "logs/warm_start"]


def test_a_run_that_was_killed_goes_on_in_the_stage_that_it_was_in(
    whole: tuple[Path, str], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    recipe = recipe_of(tmp_path, model)
    ran(load_recipe(recipe, STAGES))
    resumed = load_recipe(recipe, {**STAGES, "checkpointing.resume": "true"})

    # In the second stage: the first one is left alone.
    shutil.rmtree(folder / "checkpoints" / "step_2")
    (folder / "metrics.jsonl").unlink()
    before = (folder / "warm_start" / "metrics.jsonl").stat().st_mtime_ns
    [second] = stage_configs(resumed)
    assert not second.sft.enabled and second.policy.model_name.startswith(str(folder / "warm_start"))
    ran(resumed)
    assert (folder / "warm_start" / "metrics.jsonl").stat().st_mtime_ns == before
    assert [row["train/reward"] for row in learned(folder)] == [row["train/reward"] for row in learned(whole[0])]

    # In the first one, between its checkpoints: it resumes, and the second one starts.
    for path in ("checkpoints", "metrics.jsonl", "rollouts"):
        shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink()
    warm = folder / "warm_start"
    shutil.rmtree(warm / "checkpoints" / "step_4")
    outcome = json.loads((warm / OUTCOME_FILE).read_text())
    (warm / OUTCOME_FILE).write_text(json.dumps({**outcome, "state": "running"}))
    assert "warm_start/checkpoints/step_2" in resume_hint(resumed, ["nemo-rl", "train", "recipe.yaml"])
    assert [stage.sft.enabled for stage in stage_configs(resumed)] == [True, False]
    ran(resumed)
    assert learned(warm)[-1] == learned(whole[0] / "warm_start")[-1]
    assert [row["train/reward"] for row in learned(folder)] == [row["train/reward"] for row in learned(whole[0])]

    # Another recipe of a first stage that has ended is no run to go on with.
    other = load_recipe(recipe_of(tmp_path, model, **{"grpo.seed": 9}), {**STAGES, "checkpointing.resume": "auto"})
    with pytest.raises(RunFolderError, match=r"grpo\.seed"):
        run(other, console=Console(file=io.StringIO()))


def test_the_second_stage_is_checked_before_the_first_one_starts(model: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe_of(tmp_path, model), {**STAGES, "env.reward_function": "tests.helpers.rewards:missing"})
    with pytest.raises(UserError, match="missing"):
        run(config, console=Console(file=io.StringIO()))
    assert not (tmp_path / "logs" / "warm_start").exists()


def test_preflight_and_validate_look_at_both_stages(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, given = recipe_of(tmp_path, model), [f"{key}={value}" for key, value in STAGES.items()]
    assert run_recipe(recipe, given, extent=Extent.PREFLIGHT) == 0
    said = capsys.readouterr().out
    assert "stage sft, ok" in said and "conversations" in said and "reward" in said.rpartition("stage sft")[2]
    assert run_recipe(recipe, [*given, "+sft.settings.data.train.sise=3"], extent=Extent.VALIDATE) == 2
    assert run_recipe(recipe, [*given, "+sft.settings.data.train.size=3"], extent=Extent.PREFLIGHT) == 2
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"data.train.sise": 3}, r"stages: sft: data\.train\.sise: unknown key"),
        ({"grpo.num_generations_per_prompt": 3}, r"stages: sft: grpo\.num_generations_per_prompt"),
        ({"policy.tokenizer.chat_template": "x"}, r"sft\.settings\.policy\.tokenizer\.chat_template: is the same"),
        ({"logger.log_dir": "x"}, r"sft\.settings\.logger\.log_dir: is the same"),
    ],
)
def test_what_a_first_stage_cannot_have_is_refused(
    settings: dict[str, object], problem: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_recipe(recipe_of(tmp_path, model, **settings), STAGES)


def test_rows_of_a_first_stage_are_found_beside_the_recipe(model: Path, tmp_path: Path) -> None:
    (tmp_path / "said.jsonl").write_text("{}\n")
    given = {"data.train": {"dataset_name": "jsonl", "data_path": "said.jsonl"}}
    config = load_recipe(recipe_of(tmp_path, model, **given), STAGES)
    found = first_stage(config)
    assert found is not None and str(found.data.train.data_path) == str(tmp_path / "said.jsonl")
