"""A file is the old one or the whole new one, and a manifest knows every file of its folder."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from pathlib import Path

import pytest

from nemo_rl.environments.tools import lookup
from nemo_rl.errors import UserError
from nemo_rl.utils.checkpoint import BLOCK_BYTES, Manifest
from nemo_rl.utils.files import (
    MOST_BYTES,
    give_usual_modes,
    read_line,
    read_plain,
    read_plain_text,
    read_tail,
    replace_file,
    write_text,
)
from nemo_rl.utils.trackers import read_metrics
from nemo_rl_tools.rollouts.row import read_rows
from nemo_rl_tools.vector_file import convert_vector


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


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "nothing", "link to a pipe"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as taken:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            taken.bind(str(path))
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        elif kind == "link to a pipe":
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to(tmp_path / "pipe")
        with pytest.raises(OSError, match=r"plain file|No such|Is a directory|device"):
            read_plain(path)
    assert read_plain(write_text(tmp_path / "plain", "text")) == b"text"


def test_the_end_of_a_long_file_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"the end")
    assert read_tail(path, 3) == b"end"
    assert read_tail(write_text(path, "short"), 100) == b"short"


@pytest.mark.parametrize(
    ("pieces", "line"),
    [([b"12", b"34\n56"], b"1234\n"), ([b"no end"], b"no end"), ([b"x" * 50] * 3, b"x" * 64), ([b"\xff\n"], b"\xff\n")],
)
def test_a_line_is_read_until_its_end_its_limit_or_the_deadline(pieces: list[bytes], line: bytes) -> None:
    reading, writing = os.pipe()

    def write() -> None:
        for piece in pieces:
            os.write(writing, piece)
            time.sleep(0.05)

    thread = threading.Thread(target=write)
    thread.start()
    started = time.monotonic()
    try:
        assert read_line(reading, timeout_s=1.0, limit_bytes=64) == line
        assert time.monotonic() - started < 10
    finally:
        thread.join()
        os.close(reading)
        os.close(writing)


def test_every_file_is_listed_with_size_and_checksum(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    contents = {"a/b/large.bin": b"z" * (BLOCK_BYTES + 5), "a/empty": b"", "top.json": b"{}"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    Manifest.write(tmp_path)
    read = Manifest.read(tmp_path)
    assert {name: (entry.num_bytes, entry.crc32) for name, entry in read.entries.items()} == {
        name: (len(content), f"{zlib.crc32(content):08x}") for name, content in contents.items()
    }
    assert read.damage(tmp_path) is None
    (tmp_path / "a" / "empty").write_bytes(b"x")
    assert read.damage(tmp_path) == "a/empty has 1 bytes, expected 0"
    assert read.without("a/").damage(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": {"a": {}}}', '{"files": {"a": {"bytes": "x", "crc32": 1}}}']
)
def test_what_is_no_manifest_is_an_error(text):
    with pytest.raises(ValueError):
        Manifest.parse(text)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "large"])
def test_files_that_somebody_gives_are_plain_and_of_a_size(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "large":
            with path.open("wb") as file:
                file.truncate(MOST_BYTES + 1)
    started = time.monotonic()
    with pytest.raises(OSError, match=r"expected a plain file|directory|symbolic links|expected at most 64 MiB"):
        read_plain_text(path)
    with pytest.raises(OSError):
        lookup("a", file=str(path))
    if kind == "pipe":
        vector = path.rename(tmp_path / "v.safetensors")
        for read in (
            read_rows,
            read_metrics,
            lambda given: convert_vector(given, tmp_path / "out.safetensors", normalize=False),
        ):
            with pytest.raises((UserError, OSError), match="expected a plain file"):
                list(read(vector))
    assert time.monotonic() - started < 10
