"""The seven parts of `examples/extending` train, and no file of the library knows them."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.runs import ROOT, logged_steps, rollouts_of
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = pytest.mark.slow
ONE_PROCESS = {"cluster.cpu_workers_per_node": 1, "policy.generation.num_replicas": 1}


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=pytest.mark.full)])
def test_a_run_of_seven_parts_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., tuple[int, str]], launcher: str
) -> None:
    model, logs = write_tiny_folder(tmp_path / "model"), tmp_path / "logs"
    settings = {
        "policy.model_name": model,
        "logger.log_dir": logs,
        "+data_plane.options.folder": tmp_path,
        "grpo.max_val_samples": 8,
        "cluster.launcher": launcher,
        "data.train.size": 64,
        **(ONE_PROCESS if launcher == "local" else {}),
    }
    # The recipe's parts are found from its own folder and from the variable, as its first lines say.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    code, output = command_line(
        ROOT / "examples/extending/recipe.yaml", *(f"{name}={value}" for name, value in settings.items())
    )
    assert code == 0, output
    steps = [step for step in logged_steps(logs) if "train/loss" in step]
    assert [step["step"] for step in steps] == [1, 2, 3]
    # The environment's parts, the estimator's scale over the whole step, and the dataset's prompts.
    assert all({"train/reward/right", "train/reward/cost"} <= step.keys() for step in steps)
    prompts = [sorted(re.findall(r"\d", str(row["prompt"]))) for row in rollouts_of(logs, 1)]
    assert prompts and all(len(digits) == 6 and digits[::2] == digits[1::2] for digits in prompts)
    with (logs / "metrics.csv").open() as file:
        table = [(row["step"], row["name"]) for row in csv.DictReader(file)]
    assert ("3", "train/loss") in table
    # The store has removed its folder.
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("model", "logs")] == []


def test_no_file_of_the_library_names_them() -> None:
    found = subprocess.run(["grep", "-rlE", "^(from|import) extending", "nemo_rl"], cwd=ROOT, capture_output=True)
    assert found.stdout == b""
