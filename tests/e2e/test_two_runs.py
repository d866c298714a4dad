"""Two runs over Ray at the same time on one machine: neither sees the other, and both give the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import OWN_TIME, logged_steps, start_cli, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.full]

END_S = 300.0


def test_two_runs_at_once_give_the_same_numbers(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "model")
    folders = [tmp_path / name for name in ("one", "other")]
    settings = ("data_plane.impl=transfer_queue", "cluster.cpu_workers_per_node=1")
    runs = [start_cli(write_recipe(folder, model), *settings) for folder in folders]
    try:
        said = [run.communicate(timeout=END_S)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], said
    one, other = (
        [
            {k: v for k, v in row.items() if not any(own in k for own in OWN_TIME)}
            for row in logged_steps(folder / "logs")
        ]
        for folder in folders
    )
    assert len(one) == 3 and one == other
