"""A manifest knows every file of its folder."""

from __future__ import annotations

import zlib

import pytest

from nemo_rl.utils.files import BLOCK_BYTES, FileManifest


def test_every_file_is_listed_with_size_and_checksum(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    contents = {"a/b/large.bin": b"z" * (BLOCK_BYTES + 5), "a/empty": b"", "top.json": b"{}"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    FileManifest.write(tmp_path)
    read = FileManifest.read(tmp_path)
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
        FileManifest.parse(text)
