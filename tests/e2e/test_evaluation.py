"""`nemo-rl eval` and `nemo-rl export` on the checkpoints of a run in one process, and what its validations logged."""

from __future__ import annotations

import io
import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from nemo_rl.algorithms.run import run
from nemo_rl.cli.main import app, main
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, validated_rollouts_of, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = pytest.mark.slow
KS, MAJORITIES = (1, 2, 3), (3,)
EVALUATION = {
    "num_samples": 3,
    "pass_at": list(KS),
    "majority_at": list(MAJORITIES),
    "pass_reward": 0.7,
    "greedy": True,
}
DIGITS = {"dataset_name": "sort_digits", "options": {"min_digits": 3, "max_digits": 4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each, validated after each."""
    folder = tmp_path_factory.mktemp("run")
    write_tiny_folder(folder / "model")
    described = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**described, "dtype": "bfloat16"}))
    recipe = write_recipe(
        folder,
        folder / "model",
        grpo={"max_num_steps": 2, "val_period": 1, "val_at_end": True, "max_val_samples": 12},
        evaluation=EVALUATION,
        data={
            "train": {**DIGITS, "size": 64, "seed": 1},
            "validation": {**DIGITS, "size": 12, "seed": 2, "category_key": "digits"},
            "validation_sets": {"other": {**DIGITS, "size": 5, "seed": 30}},
        },
        checkpointing={"enabled": True, "save_period": 1, "keep_top_k": None},
        logger={"num_rollouts_to_log": 4},
    )
    run(load_recipe(recipe, LOCAL), console=Console(file=io.StringIO()))
    return folder


def command(*arguments: object) -> None:
    app([str(each) for each in arguments], standalone_mode=False)


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """What a command says that ends with exit code 2."""
    monkeypatch.setattr("sys.argv", ["nemo-rl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> Path:
    """The first checkpoint by itself."""
    command("eval", folder / "logs", folder / "logs" / "config.yaml", "--step", 1, "--out", folder / "eval")
    return folder / "eval"


def test_a_checkpoint_gets_the_numbers_of_the_validation_after_its_step(folder: Path, evaluated: Path) -> None:
    [logged] = [row for row in logged_steps(folder / "logs") if row["step"] == 1]
    result = json.loads((evaluated / "evaluation.json").read_text())
    assert (result["step"], result["evaluation"]["num_samples"]) == (1, 3)
    assert result["checkpoint"].endswith("step_1/policy/weights")
    names = ["reward", "majority@3", "greedy_reward", *(f"pass@{k}" for k in KS)]
    for area, found in (("val", result["sets"]["validation"]), ("val/other", result["sets"]["other"])):
        assert {name: found[name]["value"] for name in names} == {name: logged[f"{area}/{name}"] for name in names}
    categories = result["sets"]["validation"]["categories"]
    assert sum(part["num_prompts"] for part in categories.values()) == 12 and set(categories) == {"3", "4"}
    assert categories["3"]["reward"]["value"] == logged["val/category/3/reward"]


def test_pass_and_majority_are_those_of_a_count_by_hand(evaluated: Path) -> None:
    rows = [json.loads(line) for line in (evaluated / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == (12 + 5) * (3 + 1)
    groups: dict[int, list[dict]] = {}
    for row in rows:
        if row["set"] == "validation" and not row["greedy"]:
            groups.setdefault(row["number"], []).append(row)
    found = json.loads((evaluated / "evaluation.json").read_text())["sets"]["validation"]
    assert 0 < found["pass@1"]["value"] < found["pass@2"]["value"], "a count that says something"
    for k in KS:
        shares = []
        for group in groups.values():
            subsets = [any(row["reward"] >= 0.7 for row in subset) for subset in combinations(group, k)]
            shares.append(sum(subsets) / len(subsets))
        assert found[f"pass@{k}"]["value"] == pytest.approx(sum(shares) / 12, abs=1e-12)
    assert found["reward"]["value"] == pytest.approx(
        sum(row["reward"] for group in groups.values() for row in group) / 36, abs=1e-4
    )


def test_readable_samples_of_a_validation_are_the_first_of_each_set_and_way(folder: Path) -> None:
    rows = validated_rollouts_of(folder / "logs", 1)
    assert [(row["set"], row["greedy"], row["number"], row["sample"]) for row in rows] == [
        *(("validation", False, number, sample) for number, sample in ((0, 0), (0, 1), (0, 2), (1, 0))),
        *(("validation", True, number, 0) for number in range(4)),
        *(("other", False, number, sample) for number, sample in ((0, 0), (0, 1), (0, 2), (1, 0))),
        *(("other", True, number, 0) for number in range(4)),
    ]


def test_a_model_folder_is_measured_with_the_settings_of_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("evaluation.num_samples=2", "evaluation.pass_at=[2]", "evaluation.majority_at=[]")
    out = ("--limit", 3, "--json", "--out", folder / "eval_model")
    command("eval", folder / "model", folder / "logs" / "config.yaml", *settings, *out)
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 0 and {found["num_prompts"] for found in result["sets"].values()} == {3}
    assert "pass@2" in result["sets"]["other"] and "pass@1" not in result["sets"]["other"]


def test_an_exported_checkpoint_is_the_folder_that_was_saved(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command("export", folder / "logs", "--out", folder / "exported", "--dtype", "float32")
    assert "step 2 of" in capsys.readouterr().out
    saved = folder / "logs" / "checkpoints" / "step_2" / "policy" / "weights"
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == {
        path.name: path.read_bytes() for path in (folder / "exported").iterdir()
    }
    trained = load_file(folder / "exported" / "model.safetensors")
    command("export", folder / "logs", "--out", folder / "as_the_model")
    assert "(bfloat16)" in capsys.readouterr().out
    (folder / "opened").touch()
    modes = {path.stat().st_mode for name in ("exported", "as_the_model") for path in (folder / name).iterdir()}
    assert modes == {(folder / "opened").stat().st_mode}, "as the umask says"
    exported = load_file(folder / "as_the_model" / "model.safetensors")
    assert {str(weight.dtype) for weight in exported.values()} == {"torch.bfloat16"}
    assert all(torch.equal(weight, trained[name].bfloat16()) for name, weight in exported.items())
    assert "exists already" in refused(capsys, monkeypatch, "export", folder / "logs", "--out", folder / "exported")
    said = refused(capsys, monkeypatch, "export", folder / "logs", "--step", 7, "--out", folder / "seventh")
    assert "holds no step 7, only 1, 2" in said and not (folder / "seventh").exists()


def test_a_damaged_checkpoint_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = folder / "logs" / "checkpoints" / "step_2" / "policy" / "weights" / "model.safetensors"
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[:-4] + b"ruin")
        for name, rest in (("export", ()), ("eval", (folder / "logs" / "config.yaml",))):
            said = refused(capsys, monkeypatch, name, folder / "logs", *rest, "--out", folder / "damaged")
            assert "policy/weights/model.safetensors is corrupt" in " ".join(said.split())
    finally:
        weights.write_bytes(whole)


def test_what_holds_no_checkpoint_and_a_recipe_without_prompts_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / "logs" / "config.yaml"
    (folder / "empty").mkdir()
    assert "holds no checkpoint" in refused(capsys, monkeypatch, "eval", folder / "empty", config)
    assert "no such folder" in refused(capsys, monkeypatch, "eval", folder / "nowhere", config)
    said = refused(capsys, monkeypatch, "eval", folder / "model", config, "--step", 1)
    assert "--step 1" in said
    off = ("grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.enabled=false", "~evaluation")
    nothing = ("data.validation=null", "~data.validation_sets", "grpo.max_val_samples=256")
    nothing += ("~checkpointing.keep_top_k", "~checkpointing.save_period", *off)
    assert "data.validation: must be set" in refused(capsys, monkeypatch, "eval", folder / "model", config, *nothing)
