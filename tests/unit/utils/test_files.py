"""A file is the old one or the whole new one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_rl.utils.files import give_usual_modes, replace_file, write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = write_text(tmp_path / "new" / "a.txt", "old")

    def fill_half(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fill_half)
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_files_of_a_folder_get_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    hidden = tmp_path / "inner" / "model.safetensors"
    hidden.parent.mkdir()
    hidden.touch(mode=0o600)
    before = os.umask(0o027)
    try:
        give_usual_modes(tmp_path)
    finally:
        os.umask(before)
    assert hidden.stat().st_mode & 0o777 == 0o640
