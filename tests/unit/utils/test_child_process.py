"""A child ends with its owner however that ends, gently first, and leaves neither a process nor a folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from nemo_rl.data_plane.adapters.mooncake_master import answers, free_port, wait_for_port
from nemo_rl.errors import ResourceError
from nemo_rl.utils import child_process
from nemo_rl.utils.child_process import ChildProcess, Guard
from nemo_rl.utils.process_guard import MARK
from tests.helpers.data_planes import wait_until
from tests.helpers.mooncake import is_alive, kill

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
LISTEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"


ECHO = "import sys; print('up', flush=True); sys.stderr.write(sys.stdin.read()); sys.exit(3)"
OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from nemo_rl.utils.child_process import ChildProcess, Guard
from nemo_rl.utils.process_guard import MARK
folders = [Path(name) for name in sys.argv[1:]]
sleep, forms = ["sleep", "600"], [{"command": ["sleep", "600"]}, {}, {"is_apart": True}]
guards = [Guard(folder, start_timeout_s=60, **form) for folder, form in zip(folders, forms)]
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "start_new_session": True}
marked = subprocess.Popen(sleep, env={**os.environ, MARK: str(folders[1])}, **quiet)
child = ChildProcess([sys.executable, "-c", "import sys; sys.stdin.read()"], name="the child")
print(child.pid, marked.pid, guards[0]._child.pid, *(guard.pid for guard in guards), flush=True)
time.sleep(600)
"""


def guarded(*command: str) -> Guard:
    return Guard(Path(tempfile.mkdtemp()), command, start_timeout_s=60)


def test_stop_ends_the_command_and_its_guard_and_removes_the_folder() -> None:
    process = guarded("sleep", "600")
    guard, folder = process._child.pid, process.folder
    assert process.is_alive() and is_alive(process.pid) and folder.exists()
    process.close()
    process.close()
    assert not process.is_alive() and not is_alive(process.pid) and not is_alive(guard) and not folder.exists()


def test_a_command_that_ignores_the_request_is_killed_after_the_grace() -> None:
    process = guarded(sys.executable, "-c", STUBBORN)
    wait_until(lambda: "up" in process.log_tail())
    started = time.monotonic()
    process.close()
    assert not is_alive(process.pid) and 2.5 < time.monotonic() - started < 12


def test_a_killed_guard_takes_the_command_along() -> None:
    process = guarded("sleep", "600")
    kill(process._child.pid)
    wait_until(lambda: not is_alive(process.pid))
    process.close()


def test_a_command_that_ends_by_itself_is_seen_and_its_log_is_in_the_error() -> None:
    process = guarded(sys.executable, "-c", "raise SystemExit('out of cheese')")
    with pytest.raises(ResourceError, match="python.* ended while it started: out of cheese"):
        wait_for_port(process, "127.0.0.1", free_port("127.0.0.1"), timeout_s=20)
    assert process._child.wait(10) == 1
    process.close()


def test_a_command_that_cannot_be_run_is_an_error() -> None:
    with pytest.raises(ResourceError, match="cannot run '/no/such/program'(.|\n)*No such file or directory"):
        guarded("/no/such/program")


def test_a_command_that_does_not_listen_is_given_up_after_the_deadline() -> None:
    process = guarded("sleep", "600")
    with pytest.raises(ResourceError, match="does not listen on 127.0.0.1:.* after 0.3 s"):
        wait_for_port(process, "127.0.0.1", free_port("127.0.0.1"), timeout_s=0.3)
    process.close()


def test_a_port_is_waited_for() -> None:
    port = free_port("127.0.0.1")
    process = guarded(sys.executable, "-c", LISTEN, str(port))
    wait_for_port(process, "127.0.0.1", port, timeout_s=20)
    assert answers("127.0.0.1", port)
    process.close()
    assert not answers("127.0.0.1", port)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_stopped_guard_does_not_keep_the_command_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "CLOSE_S", 0.5)
    process = guarded("sleep", "600")
    os.kill(process._child.pid, signal.SIGSTOP)
    process.close()
    wait_until(lambda: not is_alive(process.pid))
    assert not process.folder.exists()


def test_nothing_is_left_of_an_owner_that_was_killed(tmp_path: Path) -> None:
    folders = [tmp_path / "of a command", tmp_path / "alone", tmp_path / "apart"]
    for folder in folders:
        (folder / "inside").mkdir(parents=True)
    command = [sys.executable, "-c", OWNER, *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        numbers = owner.stdout.readline().split()
        assert len(numbers) == 6 and all(is_alive(int(number)) for number in numbers)
        owner.kill()
    for number in numbers:
        wait_until(lambda number=number: not is_alive(int(number)))
    assert not any(folder.exists() for folder in folders)


def test_a_child_hears_a_last_word_and_its_code_and_errors_are_kept(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-c", ECHO], name="the child", log=tmp_path / "log", is_read=True)
    assert child.read_line(timeout_s=60) == b"up\n" and child.exit_code is None
    child.tell(b"first and ")
    assert child.stop(b"last", timeout_s=60) == child.stop(b"more", timeout_s=60) == 3
    assert (tmp_path / "log").read_text() == "first and last"


def test_a_child_that_does_not_end_is_killed_after_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    child = ChildProcess(["sleep", "600"], name="the sleeper")
    started = time.monotonic()
    assert child.stop(timeout_s=0.2) == -signal.SIGKILL and time.monotonic() - started < 10
    assert f"the sleeper (process {child.pid}) did not end within 0.2 s and is killed" in caplog.text


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_folder_is_swept_at_the_end_also_when_its_guard_hangs(is_apart, tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "CLOSE_S", 0.5)
    (tmp_path / "folder").mkdir()
    guard = Guard(tmp_path / "folder", start_timeout_s=60, is_apart=is_apart)
    with subprocess.Popen(["sleep", "600"], env={MARK: str(tmp_path / "folder")}) as marked:
        os.kill(guard.pid, signal.SIGSTOP)
        guard.close()
    guard.close()
    assert marked.returncode == -signal.SIGKILL and not (tmp_path / "folder").exists()
    wait_until(lambda: not is_alive(guard.pid))
