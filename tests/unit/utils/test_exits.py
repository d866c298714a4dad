"""Errors that nothing else has named: one line for people, the rest in a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from nemo_rl.errors import NemoRLError
from nemo_rl.utils.exits import crash_line, disk_line, machine_problem, text_of


def test_a_full_disk_is_named_with_its_file_and_what_to_do() -> None:
    with pytest.raises(OSError) as caught, open("/dev/full", "w") as full:
        full.write("x" * 100_000)
    assert machine_problem(caught.value) == "No space left on device; free disk space"
    named = PermissionError(errno.EACCES, "Permission denied", "/logs/a.jsonl")
    assert machine_problem(named) == "/logs/a.jsonl: Permission denied; change its permissions, or choose another path"


FOLDERS = {
    "logger.log_dir": Path("/logs/run"),
    "checkpointing.checkpoint_dir": Path("/logs/run/saved"),
    "TMPDIR": Path("/tmp"),
}


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/logs/run/a"), "logger.log_dir"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/logs/run/saved/a"), "checkpointing.checkpoint_dir"),
        (RuntimeError("rank 1: OSError: [Errno 30] Read-only file system: '/tmp/x'"), "TMPDIR"),
    ],
)
def test_of_a_full_disk_folder_room_and_key_are_named(error: Exception, named: str) -> None:
    outer = RuntimeError("a step failed")
    outer.__cause__ = error
    for one in (error, outer):
        told = disk_line(one, FOLDERS)
        assert told is not None and told.startswith(f"{named} {FOLDERS[named]}: ") and " MiB free" in told
        assert told.endswith(f"set {named}=FOLDER to one that has room")
    assert disk_line(OSError(errno.EACCES, "Permission denied", "/tmp/x"), FOLDERS) is None


def test_memory_that_torch_does_not_get_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2**50)
    told = machine_problem(caught.value)
    assert told is not None and told.startswith("out of memory")
    assert machine_problem(MemoryError()) is not None


def test_errors_of_other_kinds_are_no_machine_problems() -> None:
    assert machine_problem(KeyError("x")) is None
    assert machine_problem(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")) is None
    assert machine_problem(TimeoutError("late")) is None


def test_an_error_that_nobody_foresaw_is_a_line_and_a_file(tmp_path: Path) -> None:
    try:
        {}["lost"]
    except KeyError as error:
        line = crash_line(error, folder=tmp_path)
    assert line.startswith("KeyError: 'lost'\n") and "Traceback" not in line and str(tmp_path / "error.txt") in line
    text = (tmp_path / "error.txt").read_text()
    assert "Traceback" in text and '{}["lost"]' in text


class _Unprintable(NemoRLError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("kind", [_Unprintable, type("Other", (OSError,), {"__str__": lambda self: 1 / 0})])
def test_an_error_whose_text_cannot_be_made_is_told_all_the_same(kind: type[BaseException], tmp_path: Path) -> None:
    assert text_of(kind()).startswith("(no text: its __str__ raises ")
    assert machine_problem(kind()) is None
    assert crash_line(kind(), folder=tmp_path).startswith(f"{kind.__name__}: (no text")
