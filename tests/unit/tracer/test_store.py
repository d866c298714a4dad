"""Recordings: what is written is read; damage costs what it hits; old files fall out; disks fill up."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from nemo_rl.errors import RecordingError, UserError
from nemo_rl.tracer.frame import BadFrame, Frame, FramePart, FrameTable
from nemo_rl.tracer.reducer import Span
from nemo_rl_tools.tracer.entry import HEAD, EntryKind
from nemo_rl_tools.tracer.store import StreamWriter, stream_files
from nemo_rl_tools.tracer.stream_reader import Follow, StreamReader, find_recording
from tests.helpers.tracer_recordings import (
    PLAN_MESSAGE,
    RUN_MESSAGE,
    small_recording,
    stats_frame,
    token_frame,
    token_table,
    where_of,
)

BIG = 1 << 20


def bodies(folder, follow=None):
    reader = StreamReader(folder)
    return [entry.body for entry in reader.entries(follow)], reader


def whole(folder):
    """Path of the only file."""
    (path,) = stream_files(folder).values()
    return path


def test_what_is_written_is_read_in_order(tmp_path):
    table, frame = token_table(1).encode(), token_frame(1).encode()
    with StreamWriter(tmp_path / "r", BIG) as writer:
        writer.message(RUN_MESSAGE)
        writer.frame(table)
        writer.frame(frame)
        writer.message({"type": "mark", "label": "x", "step": 1})
    read = list(StreamReader(tmp_path / "r").entries())
    assert [entry.kind for entry in read] == [EntryKind.MESSAGE, EntryKind.TABLE, EntryKind.FRAME, EntryKind.MESSAGE]
    assert [entry.body for entry in read[1:3]] == [table, frame]
    assert read[0].message() == RUN_MESSAGE and read[3].message()["label"] == "x"
    assert isinstance(read[1].frame(), FrameTable) and isinstance(read[2].frame(), Frame)
    assert [entry.step for entry in read] == [1, 1, 1, 1]


def test_folder_is_its_owners_alone(tmp_path):
    StreamWriter(tmp_path / "logs" / "tracer", BIG).close()
    assert (tmp_path / "logs" / "tracer").stat().st_mode & 0o777 == 0o700


def test_messages_hold_null_for_numbers_that_json_lacks(tmp_path):
    with StreamWriter(tmp_path, BIG) as writer:
        writer.message({"type": "metrics", "step": 1, "metrics": {"kl": float("nan"), "loss": float("inf"), "a": 1.5}})
    (entry,) = StreamReader(tmp_path).entries()
    assert json.loads(entry.body, parse_constant=pytest.fail)["metrics"] == {"kl": None, "loss": None, "a": 1.5}


def test_parts_and_other_bytes_are_no_entries(tmp_path):
    frame = stats_frame(1)
    part = FramePart(where=frame.where, payload=frame.payload, span=Span(0, 3, 3))
    with StreamWriter(tmp_path, BIG) as writer:
        with pytest.raises(BadFrame, match="part"):
            writer.frame(part.encode())
        with pytest.raises(BadFrame):
            writer.frame(b"abc")
    assert bodies(tmp_path)[0] == []


def test_a_tail_torn_at_any_byte_costs_the_last_entry_alone(tmp_path):
    folder = small_recording(tmp_path / "r", num_steps=1)
    entries = list(StreamReader(folder).entries())
    content, last = whole(folder).read_bytes(), entries[-1]
    for cut in range(last.at + 1, len(content)):
        whole(folder).write_bytes(content[:cut])
        read, reader = bodies(folder)
        assert read == [entry.body for entry in entries[:-1]]
        assert (reader.num_torn, reader.num_damaged) == (1, 0)
    whole(folder).write_bytes(content[: last.at])
    read, reader = bodies(folder)
    assert (len(read), reader.num_torn) == (len(entries) - 1, 0)


def test_one_changed_byte_costs_one_entry_wherever_it_is(tmp_path):
    folder = small_recording(tmp_path / "r", num_steps=1, num_layers=1)
    entries = list(StreamReader(folder).entries())
    content, victim = bytearray(whole(folder).read_bytes()), entries[3]
    for place in [*range(victim.at, victim.at + HEAD.size), *range(victim.at + HEAD.size, victim.end, 17)]:
        changed = content.copy()
        changed[place] ^= 0x5A
        whole(folder).write_bytes(changed)
        read, reader = bodies(folder)
        assert read == [entry.body for entry in entries if entry is not victim], place
        assert (reader.num_damaged, reader.num_torn) == (1, 0)


def test_a_writer_after_a_crash_begins_a_new_file(tmp_path):
    folder = small_recording(tmp_path / "r", num_steps=1)
    before, _ = bodies(folder)
    whole(folder).write_bytes(whole(folder).read_bytes()[:-3])
    with StreamWriter(folder, BIG) as writer:
        writer.frame(stats_frame(2).encode())
    read, reader = bodies(folder)
    assert read == [*before[:-1], stats_frame(2).encode()]
    assert reader.num_torn == 1 and list(stream_files(folder)) == [1, 2]


def fill(folder, max_bytes, *, num_steps=200):
    with StreamWriter(folder, max_bytes) as writer:
        writer.message(RUN_MESSAGE)
        writer.message({**PLAN_MESSAGE, "digest": "old"})
        writer.message(PLAN_MESSAGE)
        writer.frame(token_table(1, name="shared").encode())
        for step in range(1, num_steps + 1):
            writer.frame(token_table(step, name=f"t{step}").encode())
            writer.frame(token_frame(step, table=f"t{step}", num_tokens=100).encode())
            writer.frame(token_frame(step, table="shared", layer=1).encode())
            assert writer.num_bytes == sum(path.stat().st_size for path in stream_files(folder).values()) <= max_bytes
        assert writer.num_lost == 0


def steps_of(folder):
    return sorted({entry.step for entry in StreamReader(folder).entries() if entry.kind is EntryKind.FRAME})


def test_old_files_fall_out_and_the_rest_can_be_read_without_them(tmp_path):
    fill(tmp_path, 128 << 10)
    files = stream_files(tmp_path)
    assert min(files) > 1 and 6 <= len(files) <= 9
    read = list(StreamReader(tmp_path).entries())
    assert [read[0].message(), read[1].message()] == [RUN_MESSAGE, PLAN_MESSAGE]
    tables = set()
    for entry in read[2:]:
        found = entry.frame()
        if isinstance(found, FrameTable):
            tables.add(found.name)
        else:
            assert found.table in tables, found.where
    steps = steps_of(tmp_path)
    assert steps == list(range(steps[0], 201)) and steps[0] > 1


def test_each_file_can_be_read_alone(tmp_path):
    fill(tmp_path / "r", 128 << 10)
    for number, path in stream_files(tmp_path / "r").items():
        alone = tmp_path / f"only-{number}"
        alone.mkdir()
        (alone / path.name).write_bytes(path.read_bytes())
        read = list(StreamReader(alone).entries())
        assert read[0].message() == RUN_MESSAGE
        frames = [entry.frame() for entry in read[2:]]
        names = {found.name for found in frames if isinstance(found, FrameTable)}
        assert names >= {found.table for found in frames if isinstance(found, Frame)}


def test_what_files_repeat_is_read_once(tmp_path):
    fill(tmp_path, 4 << 20, num_steps=400)
    read = list(StreamReader(tmp_path).entries())
    assert len(stream_files(tmp_path)) > 2
    assert len(read) == 3 + 1 + 3 * 400


def test_a_table_that_comes_again_unchanged_is_written_once(tmp_path):
    with StreamWriter(tmp_path, BIG) as writer:
        for table in (token_table(1), token_table(1), token_table(2), token_table(1, num_tokens=4)):
            writer.frame(table.encode())
    found = [(entry.frame().step, entry.frame().tokens.shape[1]) for entry in StreamReader(tmp_path).entries()]
    assert found == [(1, 3), (2, 3), (1, 4)]


def test_an_entry_that_cannot_fit_is_left_out_and_the_next_is_written(tmp_path):
    with StreamWriter(tmp_path, 64 << 10) as writer:
        for _ in range(2):
            writer.frame(token_frame(1, num_tokens=10_000).encode())
        writer.frame(stats_frame(2).encode())
        assert writer.num_lost == 2
    problem, frame = StreamReader(tmp_path).entries()
    assert problem.message()["type"] == "problem" and "does not fit into 65536 bytes" in problem.message()["text"]
    assert frame.body == stats_frame(2).encode()


def test_steps_are_found_beyond_damage(tmp_path):
    folder = small_recording(tmp_path / "r", num_steps=3)
    victim = next(
        entry for entry in StreamReader(folder).entries() if entry.kind is EntryKind.FRAME and entry.step == 2
    )
    content = bytearray(whole(folder).read_bytes())
    content[victim.at + 9] ^= 0xFF  # length
    whole(folder).write_bytes(content)
    assert steps_of(folder) == [1, 2, 3]


def test_a_file_of_other_bytes_is_damage(tmp_path):
    (tmp_path / "stream_00001.nrt").write_bytes(os.urandom(5000) + b"NRTE" * 100)
    read, reader = bodies(tmp_path)
    assert read == [] and reader.num_damaged + reader.num_torn == 1
    assert steps_of(tmp_path) == []


def test_files_of_a_newer_version_are_refused(tmp_path):
    from nemo_rl_tools.tracer.entry import pack_entry, pack_message

    (tmp_path / "stream_00001.nrt").write_bytes(pack_entry(EntryKind.BEGIN, pack_message({"version": 9})))
    with pytest.raises(UserError, match="expected version 1 of the format of recordings of the tracer, got 9"):
        list(StreamReader(tmp_path).entries())


def test_a_recording_is_found_in_the_log_folder_of_its_run(tmp_path):
    small_recording(tmp_path / "logs" / "tracer")
    assert find_recording(tmp_path / "logs") == find_recording(tmp_path / "logs" / "tracer") == tmp_path / "logs/tracer"
    for path in (tmp_path, tmp_path / "nowhere", whole(tmp_path / "logs/tracer")):
        with pytest.raises(UserError, match="expected a recording"):
            find_recording(path)


def test_a_live_recording_is_followed_to_its_end_across_files(tmp_path):
    frames = [token_frame(step, num_tokens=200).encode() for step in range(1, 40)]
    follow = Follow(idle_s=5.0, poll_s=0.01)
    read = []

    def write():
        time.sleep(0.05)
        with StreamWriter(tmp_path / "r", 1 << 20) as writer:
            for frame in frames:
                writer.frame(frame)
                time.sleep(0.005)

    begun = time.monotonic()
    thread = threading.Thread(target=write)
    thread.start()
    for entry in StreamReader(tmp_path / "r").entries(follow):
        read.append(entry.body)
        if len(read) == len(frames):
            follow.stop.set()
    thread.join(timeout=5)
    assert read == frames and len(stream_files(tmp_path / "r")) > 1
    assert time.monotonic() - begun < follow.idle_s


def test_following_goes_on_behind_a_torn_end(tmp_path):
    folder = small_recording(tmp_path / "r", num_steps=1)
    whole(folder).write_bytes(whole(folder).read_bytes()[:-5])
    with StreamWriter(folder, BIG) as writer:
        writer.frame(stats_frame(2).encode())
    begun, follow, reader = time.monotonic(), Follow(idle_s=5.0, poll_s=0.01), StreamReader(folder)
    for entry in reader.entries(follow):
        if entry.body == stats_frame(2).encode():
            follow.stop.set()
    assert reader.num_torn == 1 and time.monotonic() - begun < follow.idle_s


def test_following_waits_for_the_rest_of_an_entry(tmp_path):
    folder = small_recording(tmp_path / "r", num_steps=1)
    expected, _ = bodies(folder)
    content = whole(folder).read_bytes()
    whole(folder).write_bytes(content[:-5])
    timer = threading.Timer(0.2, lambda: whole(folder).write_bytes(content))
    timer.start()
    read, reader = bodies(folder, Follow(idle_s=0.6, poll_s=0.01))
    timer.join(timeout=5)
    assert read == expected and (reader.num_torn, reader.num_damaged) == (0, 0)


def test_following_ends_when_nothing_comes(tmp_path):
    begun = time.monotonic()
    assert bodies(tmp_path, Follow(idle_s=0.2, poll_s=0.01))[0] == []
    assert 0.2 <= time.monotonic() - begun < 2


FULL_DISK = """
import resource, sys
from pathlib import Path
from nemo_rl.errors import RecordingError
from nemo_rl_tools.tracer.store import StreamWriter
from tests.helpers.tracer_recordings import stats_frame
writer = StreamWriter(Path(sys.argv[1]), 1 << 20)
writer.frame(stats_frame(1).encode())
size = (Path(sys.argv[1]) / "stream_00001.nrt").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
for step in (2, 3):
    try:
        writer.frame(stats_frame(step).encode())
    except RecordingError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.frame(stats_frame(4).encode())
print(writer.num_lost)
"""


def test_a_full_disk_leaves_whole_entries_and_writing_goes_on_later(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    first, second, lost = done.stdout.splitlines()
    assert first == second and "the limit on the size of a file is reached" in first and str(tmp_path) in first
    assert lost == "2"
    read, reader = bodies(tmp_path)
    assert read == [stats_frame(1).encode(), stats_frame(4).encode()]
    assert (reader.num_torn, reader.num_damaged) == (0, 0)


def test_what_cannot_be_a_folder_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "tracer"):
        with pytest.raises(RecordingError, match="recording"):
            StreamWriter(folder, BIG)
    with pytest.raises(UserError, match="at least 65536 bytes, got 10"):
        StreamWriter(tmp_path, 10)


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    with StreamWriter(tmp_path, BIG), pytest.raises(RecordingError, match="another process writes it"):
        StreamWriter(tmp_path, BIG)
    StreamWriter(tmp_path, BIG).close()


def test_frames_of_unknown_tables_are_kept(tmp_path):
    with StreamWriter(tmp_path, BIG) as writer:
        writer.frame(token_frame(1, table="never seen").encode())
    assert where_of(1, reducer="tiles(8, mean)") == next(StreamReader(tmp_path).entries()).frame().where
