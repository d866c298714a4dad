"""Finished groups in segment files: what is read back, what is refused, what is cut, and when a file goes."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
import xxhash

from nemo_rl.cli import main
from nemo_rl.config.data_plane import DurableConfig
from nemo_rl.errors import ResourceError, RunFolderError
from nemo_rl.experience.durable_groups import DurableGroups, FinishedGroup, check_segments, rollout_identity
from nemo_rl.experience.payload import SampleStats
from nemo_rl.jagged import nest
from nemo_rl.utils import framed_log
from nemo_rl.utils.metrics import Max, Mean, Sum

WEIGHTS = {0: "zero", 1: "one", 2: "two"}
BIG_SEED = 2**70 + 3
"""Seeds of rows may need more than 64 bits."""


def group(ordinal: int, *, first: int, versions: tuple[int, ...] = (1,)) -> FinishedGroup:
    rewards = np.array([ordinal, 0.5], dtype=np.float32)
    return FinishedGroup(
        ordinal=ordinal,
        seed=BIG_SEED + ordinal,
        keys=(f"u{ordinal}_g0", f"u{ordinal}_g1"),
        rows=(first, 2),
        weights={version: WEIGHTS[version] for version in versions},
        tags=[{"reward": float(reward), "weight_version": min(versions)} for reward in rewards],
        stats=SampleStats(
            rewards=rewards, truncated=np.array([False, True]), response_lengths=np.array([2, 3], dtype=np.int32)
        ),
        metrics={"a": Mean(3.0, 2.0), "b": Sum(4.0), "c": Max(5.0)},
    )


COLUMNS = {
    "input_ids": nest(torch.arange(10, dtype=torch.int32), torch.tensor([1, 2, 3, 4])),
    "sample_mask": torch.tensor([1.0, 0.5, 1.0, 0.0]),
    "texts": ["a", None, {"b": [1]}, "d"],
}
"""Of two groups, two rows each."""


def opened(folder: Path, identity: str = "mine") -> DurableGroups:
    return DurableGroups(DurableConfig(path=folder), identity=identity)


def written(folder: Path) -> Path:
    """Write two groups and end; return the segment."""
    groups = opened(folder)
    groups.add([group(4, first=0), group(7, first=2, versions=(1, 2))], COLUMNS)
    groups.close()
    (segment,) = folder.glob("*.seg")
    return segment


def test_another_process_reads_back_what_was_written(tmp_path: Path) -> None:
    written(tmp_path)
    groups = opened(tmp_path)
    assert groups.ordinals == {4: 1, 7: 1}
    found = [groups.find(each, BIG_SEED + each, weights=WEIGHTS, oldest=1) for each in (7, 4)]
    assert [stored.group.stats.rewards.tolist() for stored in found] == [[7.0, 0.5], [4.0, 0.5]]
    assert found[0].group.metrics == {"a": Mean(3.0, 2.0), "b": Sum(4.0), "c": Max(5.0)}
    assert found[0].group.keys == ("0", "1"), "a restored group has another uid"
    columns = groups.columns(found)
    assert [row.tolist() for row in columns["input_ids"].unbind()] == [[3, 4, 5], [6, 7, 8, 9], [0], [1, 2]]
    assert columns["sample_mask"].tolist() == [1.0, 0.0, 1.0, 0.5] and columns["texts"] == [{"b": [1]}, "d", "a", None]
    groups.close()


def test_a_group_is_used_only_where_this_run_has_had_its_weights(tmp_path: Path) -> None:
    written(tmp_path)
    groups = opened(tmp_path)
    find = groups.find
    assert find(7, BIG_SEED + 7, weights=WEIGHTS, oldest=1) is not None
    assert find(7, BIG_SEED + 7, weights=WEIGHTS, oldest=2) is None, "older than the bound"
    assert find(7, BIG_SEED + 7, weights={1: "one"}, oldest=0) is None, "version 2 is not reached yet"
    assert find(7, BIG_SEED + 7, weights={**WEIGHTS, 2: "another"}, oldest=0) is None, "other weights"
    assert find(7, BIG_SEED, weights=WEIGHTS, oldest=0) is None and find(5, 0, weights=WEIGHTS, oldest=0) is None
    groups.close()


@pytest.mark.parametrize("at", [-1, 50, 3])
def test_a_torn_tail_is_cut_and_what_comes_before_is_used(tmp_path: Path, at: int) -> None:
    segment = written(tmp_path)
    content = segment.read_bytes()
    frame = len(HEAD)
    segment.write_bytes(content[: frame + at] if at > 0 else content[:at])
    groups = opened(tmp_path)
    assert groups.ordinals == {}
    groups.add([group(9, first=0)], COLUMNS)
    groups.flush()
    assert groups.ordinals == {9: 1}
    groups.close()
    segment.write_bytes(content + framed_log.frame(b"\xc0", bytes(9), at=len(content))[:-1])
    assert set(opened(tmp_path).ordinals) == {4, 7, 9}


def test_a_flipped_byte_in_a_segment_is_not_used(tmp_path: Path) -> None:
    segment = written(tmp_path)
    content = bytearray(segment.read_bytes())
    content[-5] ^= 1
    segment.write_bytes(bytes(content))
    assert opened(tmp_path).ordinals == {}


def test_segments_of_another_run_or_a_newer_format_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    check_segments(tmp_path, "mine")
    with pytest.raises(RunFolderError, match="of a run with other data, tokenizer, reward, seed or sampling"):
        check_segments(tmp_path, "other")
    with pytest.raises(RunFolderError, match="of a run with other data"):
        opened(tmp_path, "other")
    monkeypatch.setattr(framed_log, "FORMAT", 0)
    with pytest.raises(RunFolderError, match="it has format 1, this version reads up to 0; use the version that wrote"):
        check_segments(tmp_path, "mine")


def test_a_segment_goes_with_its_last_group_that_may_be_asked_for(tmp_path: Path) -> None:
    segment = written(tmp_path)
    groups = opened(tmp_path)
    groups.settle(5, [])
    assert segment.exists() and groups.ordinals == {7: 1}
    groups.settle(5, [7])
    assert not segment.exists() and groups.ordinals == {}
    groups.add([group(6, first=0), group(7, first=2)], COLUMNS)
    groups.flush()
    assert groups.ordinals == {6: 1}, "a settled group is not kept again"
    groups.settle(7, [7])
    groups.close()
    assert not list(tmp_path.glob("*.seg"))


HEAD = framed_log.begin(framed_log.GROUPS, {"identity": "mine"})


def described(text: object) -> bytes:
    return framed_log.frame(msgpack.packb(text), at=len(HEAD))


ODD_FILES = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a text": lambda path: path.write_bytes(b"my notes"),
    "another log": lambda path: path.write_bytes(framed_log.begin(framed_log.JOURNAL, {})),
    "a frame without groups": lambda path: path.write_bytes(HEAD + described({})),
    "groups that are numbers": lambda path: path.write_bytes(HEAD + described({"groups": [1]})),
    "no seed": lambda path: path.write_bytes(HEAD + described({"groups": [{"rows": [0, 1]}]})),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD_FILES)
def test_files_that_are_no_segments_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    ODD_FILES[kind](tmp_path / "a.seg")
    with pytest.raises(
        RunFolderError, match=r"data_plane.durable.path: .*a.seg: expected .* got: .*; remove it, or use"
    ):
        check_segments(tmp_path, "mine")
        opened(tmp_path)


def test_segments_of_an_earlier_release_are_refused_until_they_are_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = written(tmp_path / "new")
    with segment.open("rb") as file:
        frames = list(framed_log.read_frames(file, len(HEAD)))
    parts = [(msgpack.packb({"format": 1, "identity": "mine"}), b"")]
    parts += [(msgpack.packb(found.text), found.body) for found in frames]
    content = b"".join(
        struct.pack("<4sIQQ", b"NRDG", len(text), len(body), xxhash.xxh3_64_intdigest(text + body)) + text + body
        for text, body in parts
    )
    (tmp_path / "a.seg").write_bytes(content + b"NRDG")
    with pytest.raises(RunFolderError, match=rf"with: nemo-rl checkpoints convert {tmp_path}$"):
        check_segments(tmp_path, "mine")
    for said in ("converted, frames of groups: 1", "as it was"):
        monkeypatch.setattr("sys.argv", ["nemo-rl", "checkpoints", "convert", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert not ended.value.code and said in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "a.seg").read_bytes() == segment.read_bytes()


@pytest.mark.parametrize("content", [b"", HEAD[:3], HEAD[:8], HEAD[:-1], bytes(40)])
def test_a_head_that_a_kill_has_cut_is_left_out(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.seg").write_bytes(HEAD[:8] + content if content == bytes(40) else content)
    check_segments(tmp_path, "mine")
    found = opened(tmp_path)
    assert found.ordinals == {}
    found.close()


def test_a_segment_belongs_to_its_writer_until_that_is_gone(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.add([group(1, first=0)], {"x": torch.arange(8).reshape(4, 2)})
    writer.flush()
    other = opened(tmp_path)  # it starts again while the first one lives
    writer.add([group(2, first=0)], {"x": torch.arange(8).reshape(4, 2)})
    writer.flush()
    for each in (other, writer):
        each.settle(2, [])
    assert len(list(tmp_path.glob("*.seg"))) == 1
    writer.close()
    later = opened(tmp_path)
    assert 2 in later.ordinals
    later.settle(3, [])
    assert list(tmp_path.glob("*.seg")) == []
    for each in (other, later):
        each.close()


def test_a_full_disk_is_told_at_the_next_group(tmp_path: Path) -> None:
    groups = opened(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    groups.add([group(1, first=0)], COLUMNS)
    groups.flush()
    with pytest.raises(ResourceError, match="data_plane.durable.path: finished groups cannot be written"):
        groups.add([group(2, first=0)], COLUMNS)
    groups.close()


def test_a_disk_that_fills_within_a_group_is_told_and_the_groups_before_are_used(tmp_path: Path) -> None:
    groups = opened(tmp_path)
    groups.add([group(1, first=0)], COLUMNS)
    groups.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        groups.add([group(2, first=0)], {"sample_mask": torch.ones(4, 1 << 18)})
        groups.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert groups.ordinals == {1: 1}, "a group of which a part is in the file is no stored one"
    with pytest.raises(ResourceError, match="data_plane.durable.path: finished groups cannot be written"):
        groups.add([group(3, first=0)], COLUMNS)
    groups.close()
    again = opened(tmp_path)
    assert again.ordinals == {1: 1}
    again.close()


def test_an_identity_has_every_setting_that_decides_a_group() -> None:
    one = rollout_identity({"seed": 1, "sampling": {"top_p": 1.0}})
    assert one == rollout_identity({"sampling": {"top_p": 1.0}, "seed": 1})
    assert one != rollout_identity({"seed": 1, "sampling": {"top_p": 0.9}})
