"""A run's temporary folder: gone with its processes however the driver ends, and never another run's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl.distributed.run_folder import OWNER_FILE, RunFolder
from nemo_rl.errors import ResourceError

DRIVER = """
import subprocess, sys, time
from nemo_rl.distributed.run_folder import RunFolder
folder = RunFolder()
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
quiet = {"start_new_session": True, "stdout": subprocess.DEVNULL}
with folder.marking():
    marked = subprocess.Popen(sleep, **quiet)
other = subprocess.Popen(sleep, **quiet)
print(folder.path, marked.pid, other.pid, folder.reaper.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, as a Unix socket wants it."""
    folder = Path(f"/tmp/t{os.getpid()}")
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder / f"nemo_rl-{os.getuid()}"
    subprocess.run(["rm", "-r", str(folder)], check=True)


class Driver:
    """A process with a run folder, a marked child and one without a mark."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        path, *pids = self.process.stdout.readline().split()
        self.folder = Path(path)
        self.marked, self.other, self.reaper = (psutil.Process(int(pid)) for pid in pids)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.kill()
    made.other.kill()


def wait_until_gone(driver: Driver) -> None:
    give_up = time.monotonic() + 60
    while driver.folder.exists() or driver.marked.is_running():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_a_killed_driver_leaves_no_marked_process_and_no_folder(driver: Driver) -> None:
    assert driver.folder.stat().st_mode & 0o077 == driver.folder.parent.stat().st_mode & 0o077 == 0
    driver.kill()
    wait_until_gone(driver)
    assert driver.other.is_running(), "only what carries the mark is the run's"


def test_what_a_dead_run_and_its_sweeper_have_left_goes_with_the_next_start(driver: Driver, root: Path) -> None:
    driver.reaper.kill()
    living = Driver()
    driver.kill()
    driver.reaper.wait(60)
    stranger = root / "rstranger"
    stranger.mkdir()
    other_machine = json.loads((driver.folder / OWNER_FILE).read_text()) | {"namespace": "another"}
    (stranger / OWNER_FILE).write_text(json.dumps(other_machine))
    assert driver.marked.is_running() and driver.folder.is_dir()
    own = RunFolder()
    try:
        wait_until_gone(driver)
        assert living.folder.is_dir() and living.marked.is_running(), "its driver lives"
        assert stranger.is_dir(), "nobody here can tell whether its driver lives"
    finally:
        own.close()
        living.kill()
        living.other.kill()
    assert not own.path.exists()


def test_the_end_of_a_run_takes_what_is_left_of_its_processes_and_its_sweeper() -> None:
    folder = RunFolder()
    with folder.marking():
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    folder.close()
    folder.close()
    assert child.wait(60) == -signal.SIGKILL
    assert not folder.path.exists() and not psutil.pid_exists(folder.reaper.pid)


def test_a_folder_that_others_can_open_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(ResourceError, match="only this user can open"):
        RunFolder()
