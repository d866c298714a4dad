"""`nemo-rl inspect RUN rollouts`: the rows it takes, what it says where there are none, colour, pipes and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rollout_rows import token_row, usual_rows, write_rows


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """A run with steps 2, 9 and 10; 10 is the newest, though not by its name."""
    for step in (2, 9, 10):
        write_rows(tmp_path / "run", step, [*usual_rows(), token_row(f"s{step}_g0", ["x"])])
    (tmp_path / "run" / "rollouts" / "val_step_11.jsonl").write_text("{}\n")
    return tmp_path / "run"


def test_the_newest_step_is_shown_unless_another_is_named(log_dir: Path, output_of) -> None:
    newest = output_of("inspect", log_dir, "rollouts")
    assert "step 10:" in newest and "5 of 5 rows" in newest and "group s10:" in newest
    assert "group s2:" in output_of("inspect", log_dir, "rollouts", "--step", 2)


def test_a_group_is_found_by_its_beginning(log_dir: Path, output_of) -> None:
    shown = output_of("inspect", log_dir, "rollouts", "--group", "bb")
    assert "group bb22:" in shown and "group aa11" not in shown and "groups: 1" in shown
    assert "2 of 5 rows" in output_of("inspect", log_dir, "rollouts", "--limit", 2)


def test_a_pipe_and_no_color_get_no_escape_sequence_and_a_terminal_gets_colour(log_dir, monkeypatch, output_of):
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = output_of("inspect", log_dir, "rollouts")
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    colored = output_of("inspect", log_dir, "rollouts")
    assert "\x1b[" in colored and "\x1b[2J" not in colored
    monkeypatch.setenv("NO_COLOR", "1")
    assert output_of("inspect", log_dir, "rollouts") == plain


def test_what_is_not_there_is_refused_with_what_there_is(log_dir, tmp_path, monkeypatch, refusal_of):
    monkeypatch.setenv("COLUMNS", "10000")
    assert "has readable rollouts of steps 2, 9, 10, the newest 10" in refusal_of(
        "inspect", log_dir, "rollouts", "--step", 3
    )
    unknown = refusal_of("inspect", log_dir, "rollouts", "--group", "zz")
    assert "--group 'zz' is no group" in unknown and "expected one of aa11, bb22, s10" in unknown
    write_rows(tmp_path / "two", 1, [token_row("ab_g0", ["x"]), token_row("ac_g0", ["x"])])
    assert "begins 2 groups" in refusal_of("inspect", tmp_path / "two", "rollouts", "--group", "a")
    nowhere = refusal_of("inspect", tmp_path / "rum", "rollouts")
    assert "got no folder; runs with rollouts in" in nowhere and "run, two" in nowhere
    (tmp_path / "none").mkdir()
    assert "logger.num_rollouts_to_log above 0" in refusal_of("inspect", tmp_path / "none", "rollouts")
    page = refusal_of("inspect", log_dir, "rollouts", "--html", log_dir / "rollouts" / "step_2.jsonl" / "page.html")
    assert "cannot be written" in page


def test_a_page_is_written_in_place_of_lines(log_dir: Path, tmp_path: Path, output_of) -> None:
    page = tmp_path / "page.html"
    assert output_of("inspect", log_dir, "rollouts", "--html", page) == f"5 rows of step 10 are in {page}\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
