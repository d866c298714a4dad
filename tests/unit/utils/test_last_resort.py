"""Errors that nothing else has named: one line for people, the rest in a file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from nemo_rl.utils.last_resort import crash_line, file_problem


def test_a_full_disk_is_named_with_its_file_and_what_to_do() -> None:
    with pytest.raises(OSError) as caught, open("/dev/full", "w") as full:
        full.write("x" * 100_000)
    assert file_problem(caught.value) == "No space left on device; free disk space"
    named = PermissionError(errno.EACCES, "Permission denied", "/logs/a.jsonl")
    assert file_problem(named) == "/logs/a.jsonl: Permission denied; change its permissions, or choose another path"


def test_errors_of_other_kinds_are_no_file_problems() -> None:
    assert file_problem(KeyError("x")) is None
    assert file_problem(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")) is None
    assert file_problem(TimeoutError("late")) is None


def test_an_error_that_nobody_foresaw_is_a_line_and_a_file(tmp_path: Path) -> None:
    try:
        {}["lost"]
    except KeyError as error:
        line = crash_line(error, folder=tmp_path)
    assert line.startswith("KeyError: 'lost'\n") and "Traceback" not in line and str(tmp_path / "error.txt") in line
    text = (tmp_path / "error.txt").read_text()
    assert "Traceback" in text and '{}["lost"]' in text
