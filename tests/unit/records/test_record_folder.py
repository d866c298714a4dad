"""Folders of records: what is written is read back to the bit, and what is missing or damaged is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from nemo_rl.errors import UnsupportedFormat, UserError
from nemo_rl.records.reader import CorruptRecord, RecordFolder, read_folder
from nemo_rl.records.record import (
    MANIFEST,
    DimSplit,
    RecordManifest,
    RecordPlace,
    RecordWriter,
    TokenTable,
    end_path,
    lines_path,
    new_folder,
    payload_path,
)
from nemo_rl.records.sites import Direction, SiteKind, execution_order

TABLE = TokenTable(
    keys=("a", "it's b"),
    row_R=torch.tensor([0, 0, 1]),
    position_R=torch.tensor([0, 1, 0]),
    token_R=torch.tensor([5, 6, 5]),
)
PLACE = RecordPlace(kind=SiteKind.LAYER_OUT, layer=3, phase="train", direction=Direction.BACKWARD, is_recomputed=True)
VALUES = {
    "float32": torch.tensor([[1.0, float("nan")], [2.0, -0.0], [float("inf"), 3.0]]),
    "bfloat16": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.5]], dtype=torch.bfloat16),
    "int64": torch.tensor([[1, 2], [3, 4], [5, 6]]),
    "empty": torch.zeros(0, 2),
}


def manifest(world: int = 1) -> RecordManifest:
    return RecordManifest(
        run_id="r", model={"m": 1}, layout={"world": world}, engine="e", precision="p", selector="*", phases=("train",)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = new_folder(tmp_path / "a 'folder' of mine", manifest())
    with closing(RecordWriter(path, rank=0)) as writer:
        table = writer.tokens(TABLE)
        for value in VALUES.values():
            writer.tensor(PLACE, value, tokens=table, split=DimSplit(index=1, count=2))
        writer.tensor(RecordPlace(kind=SiteKind.LOSS), torch.tensor(0.5), tokens=None)
    return path


def test_records_come_back_to_the_bit(folder: Path) -> None:
    found = read_folder(folder)
    assert not found.problems and found.manifest == manifest()
    for record, value in zip(found.records, VALUES.values(), strict=False):
        loaded = record.load()
        assert loaded.dtype == value.dtype and loaded.shape == value.shape
        assert torch.equal(loaded.view(torch.uint8), value.view(torch.uint8))
        tokens = record.tokens()
        assert tokens is not None and tokens.keys == TABLE.keys and torch.equal(tokens.token_R, TABLE.token_R)
        assert record.place == PLACE and record.split == DimSplit(index=1, count=2)
    assert found.records[-1].load().item() == 0.5 and found.records[-1].tokens() is None


def without_the_last_line(folder: Path) -> None:
    path = lines_path(folder, 0)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def with_a_torn_line(folder: Path) -> None:
    path = lines_path(folder, 0)
    path.write_bytes(path.read_bytes()[:-9])


def without_an_end(folder: Path) -> None:
    end_path(folder, 0).unlink()


def without_a_file(folder: Path) -> None:
    lines_path(folder, 0).unlink()


@pytest.mark.parametrize("damage", [without_the_last_line, with_a_torn_line, without_an_end, without_a_file])
def test_what_is_not_all_there_is_incomplete(damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder)
    problems = read_folder(folder).problems
    assert problems and not any(problem.is_corrupt for problem in problems), problems


@pytest.mark.parametrize("world", [10**9, 2**70, 0, -1, True])
def test_a_number_of_ranks_that_no_job_has_is_corrupt_at_once(world: int, folder: Path) -> None:
    record = json.loads((folder / MANIFEST).read_text())
    record["layout"]["world"] = world
    (folder / MANIFEST).write_text(json.dumps(record))
    with pytest.raises(CorruptRecord, match=MANIFEST):
        read_folder(folder)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b'{"format": 1e999}', b""])
def test_a_manifest_that_cannot_be_read_is_named(content: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises((CorruptRecord, UnsupportedFormat), match=MANIFEST):
        read_folder(folder)


@pytest.mark.parametrize("place", [payload_path, lines_path, end_path])
def test_a_pipe_in_place_of_a_file_is_corrupt_and_not_waited_for(place, folder):
    place(folder, 0).unlink()
    os.mkfifo(place(folder, 0))
    found = read_folder(folder)
    if place is payload_path:
        with pytest.raises(CorruptRecord, match="expected a plain file"):
            found.records[0].load()
    else:
        assert any(problem.is_corrupt for problem in found.problems)


def test_more_bytes_than_a_file_has_are_not_read(folder: Path) -> None:
    payload_path(folder, 0).write_bytes(b"short")
    with pytest.raises(CorruptRecord, match="it ends before"):
        read_folder(folder).records[-1].load()


def _line(**changes: object) -> bytes:
    return json.dumps({"shape": [1], "dtype": "int64", "offset": 0, "bytes": 8, "digest": "", **changes}).encode()


@pytest.mark.parametrize(
    "line",
    [
        *(b"{}", b"[]", b"no json", _line(dtype="object"), _line(offset=2**70), _line(offset=-8), b"[" * 100_000),
        *(_line(shape=[2**62, 2**62]), _line(shape=None), _line(offset=float("inf")), _line(split=[1])),
    ],
)
def test_a_line_that_is_no_record_is_corrupt(line: bytes, folder: Path) -> None:
    with lines_path(folder, 0).open("ab") as file:
        file.write(line + b"\n")
    assert any(problem.is_corrupt for problem in read_folder(folder).problems)


def test_changed_bytes_are_found_when_they_are_read(folder: Path) -> None:
    path = payload_path(folder, 0)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(CorruptRecord, match="digest"):
        read_folder(folder).records[-1].load()
    path.unlink()
    with pytest.raises(CorruptRecord, match="No such file"):
        read_folder(folder).records[0].load()


def test_every_rank_of_the_manifest_is_expected(tmp_path: Path) -> None:
    path = new_folder(tmp_path / "two", manifest(world=2))
    RecordWriter(path, rank=1).close()
    assert [problem.text for problem in read_folder(path).problems] == [
        "rank 0 wrote nothing: rank_00000.jsonl: No such file or directory"
    ]


def _changed(folder: Path, old: str, new: str) -> RecordFolder:
    path = folder / MANIFEST
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new), encoding="utf-8")
    try:
        return read_folder(folder)
    finally:
        path.write_text(text, encoding="utf-8")


def test_other_formats_are_unsupported_and_other_folders_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="version 1"):
        _changed(folder, '"version": 1', '"version": 2')
    with pytest.raises(UnsupportedFormat, match=r"nemo_rl\.record"):
        _changed(folder, "nemo_rl.record", "other")
    with pytest.raises(CorruptRecord, match="layout"):
        _changed(folder, '"world": 1', '"world": "1"')
    with pytest.raises(CorruptRecord, match="not JSON"):
        _changed(folder, "{", "")
    with pytest.raises(UserError, match="not a folder of records"):
        read_folder(tmp_path)


def test_a_folder_holds_one_recording(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds records already"):
        new_folder(folder, manifest())
    with pytest.raises(UserError, match="cannot be written: File exists"):
        RecordWriter(folder, rank=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        new_folder(tmp_path / "file" / "records", manifest())


def test_passes_meet_sites_from_the_embedding_to_the_loss_and_back() -> None:
    way = [
        (SiteKind.EMBED, None, Direction.FORWARD),
        (SiteKind.LAYER_IN, 0, Direction.FORWARD),
        (SiteKind.LAYER_OUT, 0, Direction.FORWARD),
        (SiteKind.LAYER_IN, 1, Direction.FORWARD),
        (SiteKind.LOGITS, None, Direction.FORWARD),
        (SiteKind.LOSS, None, Direction.FORWARD),
        (SiteKind.LOGPROB, None, Direction.BACKWARD),
        (SiteKind.LAYER_OUT, 1, Direction.BACKWARD),
        (SiteKind.LAYER_OUT, 0, Direction.BACKWARD),
        (SiteKind.LAYER_IN, 0, Direction.BACKWARD),
        (SiteKind.EMBED, None, Direction.BACKWARD),
        (SiteKind.GRAD, None, Direction.FORWARD),
    ]
    assert sorted(reversed(way), key=lambda site: execution_order(*site)) == way
