"""Runs that save beside their training leave what runs that wait for their saves leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import logged_steps, run_cli, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.full]

OWN = (".metadata", "manifest.json", "training_info.json")
"""Files with ids and durations."""


def _saved(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in OWN)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_every_step_is_saved_with_the_values_of_that_step(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "model")
    for name in ("waits", "beside"):
        saving = {"enabled": True, "save_period": 1, "keep_top_k": None, "async_save": name == "beside"}
        code, output = run_cli(write_recipe(tmp_path / name, model, checkpointing=saving))
        assert code == 0, output[-3000:]
    waits, beside = (tmp_path / name / "logs" for name in ("waits", "beside"))
    assert logged_steps(waits) == logged_steps(beside)
    assert _saved(waits / "checkpoints") == _saved(beside / "checkpoints")
    assert {path.name for path in (beside / "checkpoints").iterdir()} == {"latest", "step_1", "step_2", "step_3"}
