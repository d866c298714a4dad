"""One run per folder; a lock ends with its process, and no child keeps it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from nemo_rl.errors import RunFolderError
from nemo_rl.utils.run_lock import (
    LOCK_FILE,
    OUTCOME_FILE,
    lock_folder,
    lock_problem,
    outcome_of,
    recorded_outcome,
    stopped_early,
)

HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from nemo_rl.utils.run_lock import lock_folder, recorded_outcome

folder = Path(sys.argv[1])
with lock_folder(folder), recorded_outcome(folder, resumes=False):
    reader, writer = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(writer, b"!")
        time.sleep(600)
    os.read(reader, 1)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(forked, started.pid, flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that holds the folder, and its forked and its started child."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    return holder, [int(word) for word in holder.stdout.readline().split()]


def test_the_second_is_refused_by_name_and_the_killed_ones_lock_is_taken_over(tmp_path):
    holder, children = hold(tmp_path / "run")
    try:
        told = rf"in use by another run: process {holder.pid} on .*, since 20"
        with pytest.raises(RunFolderError, match=told), lock_folder(tmp_path / "run"):
            pass
        assert outcome_of(tmp_path / "run", step=1, num_steps=9).state == "running"
        holder.kill()
        holder.wait()
        killed = outcome_of(tmp_path / "run", step=1, num_steps=9)
        assert killed.state == "stopped" and "was killed" in killed.cause
        # Both children live on and hold nothing.
        with lock_folder(tmp_path / "run"):
            assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == os.getpid()
        assert [path.name for path in (tmp_path / "run").iterdir()] == [OUTCOME_FILE]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for pipe in (holder.stdin, holder.stdout):
            assert pipe is not None
            pipe.close()


def test_a_process_cannot_hold_a_folder_twice_but_again_afterwards(tmp_path):
    with lock_folder(tmp_path):
        with pytest.raises(RunFolderError, match=f"process {os.getpid()}"), lock_folder(tmp_path):
            pass
        assert (tmp_path / LOCK_FILE).is_file()
    with lock_folder(tmp_path):
        pass


def test_of_many_that_come_at_once_one_holds_at_a_time(tmp_path):
    inside, most, refused = [], [], []

    def work() -> None:
        for _ in range(200):
            try:
                with lock_folder(tmp_path):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except RunFolderError:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) + len(refused) == 800


def test_a_forked_child_that_leaves_the_block_ends_nothing(tmp_path):
    script = """
import os, sys
from pathlib import Path
from nemo_rl.errors import RunFolderError
from nemo_rl.utils import run_lock
from nemo_rl.utils.run_lock import lock_folder

folder = Path(sys.argv[1])
with lock_folder(folder):
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        try:
            lock_folder(folder).__enter__()
        except RunFolderError as error:
            print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "in use by another run" in done.stdout


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]"])
def test_what_a_stale_file_says_does_not_matter(tmp_path, content):
    (tmp_path / LOCK_FILE).write_bytes(content)
    with lock_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    told = r"file/logs: a run cannot write here"
    with pytest.raises(RunFolderError, match=told), lock_folder(tmp_path / "file" / "logs"):
        pass


def test_a_file_that_its_holder_removed_before_it_was_locked_is_not_the_lock(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def lock_late(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(tmp_path / LOCK_FILE)
            removed[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", lock_late)
    with lock_folder(tmp_path):
        assert removed and (tmp_path / LOCK_FILE).is_file()
        assert "in use by another run" in str(lock_problem(tmp_path))
    assert lock_problem(tmp_path) is None


def test_a_file_system_without_locks_is_told_and_keeps_no_file(tmp_path, monkeypatch, caplog):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with lock_folder(tmp_path):
        assert "this file system has no locks" in caplog.text
    assert list(tmp_path.iterdir()) == []


class Broken(RuntimeError):
    """An error of two lines."""


@pytest.mark.parametrize(
    ("error", "state", "cause"),
    [
        (None, "ended", ""),
        ("early", "stopped", "by a signal, after step 3"),
        (Broken("engine 0\n  is gone"), "failed", "Broken: engine 0 is gone"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
    ],
)
def test_how_a_run_ended_is_written_and_a_resumed_run_keeps_its_date(tmp_path, error, state, cause):
    def run(*, resumes: bool) -> None:
        with lock_folder(tmp_path), recorded_outcome(tmp_path, resumes=resumes):
            assert outcome_of(tmp_path, step=9, num_steps=9).state == "running"
            if isinstance(error, BaseException):
                raise error
            if error is not None:
                stopped_early(tmp_path, "by a signal, after step 3")

    def ran(*, resumes: bool):
        with nullcontext() if not isinstance(error, BaseException) else pytest.raises(type(error)):
            run(resumes=resumes)
        return outcome_of(tmp_path, step=3, num_steps=9)

    first = ran(resumes=False)
    assert (first.state, first.cause) == (state, cause) and first.seconds > 0
    again = ran(resumes=True)
    assert again.started == first.started and again.since > first.since and again.seconds > first.seconds
    assert ran(resumes=False).started > first.started


@pytest.mark.parametrize(
    ("files", "step", "state", "cause"),
    [
        ({}, 9, "ended", ""),
        ({}, 3, "stopped", "at step 3 of 9; its folder does not say why"),
        ({"error.txt": "Traceback\n  ...\nKeyError: 'lost'\n"}, 3, "failed", "KeyError: 'lost'"),
        ({OUTCOME_FILE: "{"}, 9, "ended", ""),
        ({OUTCOME_FILE: '{"state": "ended", "started": NaN, "since": 0, "seconds": 0}'}, 3, "stopped", "at step 3"),
    ],
)
def test_of_an_earlier_run_only_what_its_files_prove_is_said(tmp_path, files, step, state, cause):
    (tmp_path / "metrics.jsonl").write_text("")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = outcome_of(tmp_path, step=step, num_steps=9)
    assert found.state == state and found.cause.startswith(cause)
