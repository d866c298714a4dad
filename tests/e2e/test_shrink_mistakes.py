"""Layout mistakes show in `nemo-rl shrink`: those of recipes before anything starts, those of code in a shrunk run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_rl.cli.main import app
from nemo_rl.errors import UserError
from tests.helpers.layout_mistakes import IN_CODE, IN_RECIPES, CodeMistake, RecipeMistake, shrink_a_copy
from tests.mutants.faults import ROOT

NAMES = [mistake.name for mistake in (*IN_RECIPES, *IN_CODE)]


def test_at_least_ten_different_mistakes_are_planted() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 10


@pytest.mark.parametrize("mistake", IN_RECIPES, ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_recipe_is_refused_before_anything_starts(mistake: RecipeMistake, tmp_path: Path) -> None:
    recipe = ROOT / "configs" / "recipes" / f"{mistake.recipe}.yaml"
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["shrink", str(recipe), *mistake.overrides, "--out", str(out)])
    assert isinstance(result.exception, UserError), result.output
    assert result.exception.exit_code == 2 and mistake.message in str(result.exception)
    assert not out.exists()


@pytest.mark.full
@pytest.mark.parametrize("mistake", IN_CODE, ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_worker_shows_in_the_shrunk_run(mistake: CodeMistake, tmp_path: Path) -> None:
    done = shrink_a_copy(mistake, tmp_path)
    assert done.returncode != 0, done.stdout
    # Either the run ended with an error, or a check of its numbers fails.
    assert "FAILS" in done.stdout or "error:" in done.stderr, done.stdout + done.stderr


@pytest.mark.full
def test_without_a_mistake_nothing_shows(tmp_path: Path) -> None:
    planted = IN_CODE[0]
    sound = replace(planted, name="none", fault=replace(planted.fault, new=planted.fault.old))
    done = shrink_a_copy(sound, tmp_path)
    assert done.returncode == 0 and "FAILS" not in done.stdout, done.stdout + done.stderr
