"""`nemo-rl inspect RUN rollouts`: the rows it takes, what it says where there are none, colour, pipes and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.cli.main import app, main
from tests.helpers.rollout_rows import token_row, usual_rows, write_rows


def run(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Standard output of a command that ends well."""
    app(["inspect", str(args[0]), "rollouts", *map(str, args[1:])], standalone_mode=False)
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object) -> str:
    """What a command says that ends with exit code 2."""
    monkeypatch.setattr("sys.argv", ["nemo-rl", "inspect", str(args[0]), "rollouts", *map(str, args[1:])])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """A run with steps 2, 9 and 10; 10 is the newest, though not by its name."""
    for step in (2, 9, 10):
        write_rows(tmp_path / "run", step, [*usual_rows(), token_row(f"s{step}_g0", ["x"])])
    (tmp_path / "run" / "rollouts" / "val_step_11.jsonl").write_text("{}\n")
    return tmp_path / "run"


def test_the_newest_step_is_shown_unless_another_is_named(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run(capsys, log_dir)
    assert "step 10:" in newest and "5 of 5 rows" in newest and "group s10:" in newest
    assert "group s2:" in run(capsys, log_dir, "--step", 2)


def test_a_group_is_found_by_its_beginning(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, log_dir, "--group", "bb")
    assert "group bb22:" in shown and "group aa11" not in shown and "groups: 1" in shown
    assert "2 of 5 rows" in run(capsys, log_dir, "--limit", 2)


def test_a_pipe_and_no_color_get_no_escape_sequence_and_a_terminal_gets_colour(log_dir, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = run(capsys, log_dir)
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    colored = run(capsys, log_dir)
    assert "\x1b[" in colored and "\x1b[2J" not in colored
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(capsys, log_dir) == plain


def test_what_is_not_there_is_refused_with_what_there_is(log_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")
    assert "has readable rollouts of steps 2, 9, 10, the newest 10" in refused(
        capsys, monkeypatch, log_dir, "--step", 3
    )
    unknown = refused(capsys, monkeypatch, log_dir, "--group", "zz")
    assert "--group 'zz' is no group" in unknown and "expected one of aa11, bb22, s10" in unknown
    write_rows(tmp_path / "two", 1, [token_row("ab_g0", ["x"]), token_row("ac_g0", ["x"])])
    assert "begins 2 groups" in refused(capsys, monkeypatch, tmp_path / "two", "--group", "a")
    nowhere = refused(capsys, monkeypatch, tmp_path / "rum")
    assert "got no folder; runs with rollouts in" in nowhere and "run, two" in nowhere
    (tmp_path / "none").mkdir()
    assert "logger.num_rollouts_to_log above 0" in refused(capsys, monkeypatch, tmp_path / "none")
    page = refused(capsys, monkeypatch, log_dir, "--html", log_dir / "rollouts" / "step_2.jsonl" / "page.html")
    assert "cannot be written" in page


def test_a_page_is_written_in_place_of_lines(log_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert run(capsys, log_dir, "--html", page) == f"5 rows of step 10 are in {page}\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
