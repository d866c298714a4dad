"""A guarded process ends with its owner and with its guard, gently first, and leaves no folder."""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from nemo_rl.data_plane.adapters.mooncake_master import GuardedProcess, answers, free_port
from nemo_rl.errors import ResourceError
from tests.helpers.data_planes import wait_until
from tests.helpers.mooncake import is_alive, kill

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
LISTEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"


def test_stop_ends_the_command_and_its_guard_and_removes_the_folder() -> None:
    process = GuardedProcess("sleep", ["sleep", "60"])
    guard, folder = process._guard.pid, process._folder
    assert process.is_alive() and is_alive(process.pid) and folder.exists()
    process.stop()
    process.stop()
    assert not process.is_alive() and not is_alive(process.pid) and not is_alive(guard) and not folder.exists()


def test_a_command_that_ignores_the_request_is_killed_after_the_grace() -> None:
    process = GuardedProcess("stubborn", [sys.executable, "-c", STUBBORN])
    wait_until(lambda: "up" in process.log_tail())
    started = time.monotonic()
    process.stop()
    assert not is_alive(process.pid) and 2.5 < time.monotonic() - started < 12


def test_a_killed_guard_takes_the_command_along() -> None:
    process = GuardedProcess("sleep", ["sleep", "60"])
    kill(process._guard.pid)
    wait_until(lambda: not is_alive(process.pid))
    process.stop()


def test_a_command_that_ends_by_itself_is_seen_and_its_log_is_in_the_error() -> None:
    process = GuardedProcess("short", [sys.executable, "-c", "raise SystemExit('out of cheese')"])
    with pytest.raises(ResourceError, match="short ended while it started: out of cheese"):
        process.wait_for_port("127.0.0.1", free_port("127.0.0.1"), timeout_s=20)
    assert process._guard.wait(10) == 1
    process.stop()


def test_a_command_that_cannot_be_run_is_an_error() -> None:
    with pytest.raises(ResourceError, match="cannot run '/no/such/program'"):
        GuardedProcess("none", ["/no/such/program"])


def test_a_command_that_does_not_listen_is_given_up_after_the_deadline() -> None:
    process = GuardedProcess("sleep", ["sleep", "60"])
    with pytest.raises(ResourceError, match="does not listen on 127.0.0.1:.* after 0.3 s"):
        process.wait_for_port("127.0.0.1", free_port("127.0.0.1"), timeout_s=0.3)
    process.stop()


def test_a_port_is_waited_for() -> None:
    port = free_port("127.0.0.1")
    process = GuardedProcess("listen", [sys.executable, "-c", LISTEN, str(port)])
    process.wait_for_port("127.0.0.1", port, timeout_s=20)
    assert answers("127.0.0.1", port)
    process.stop()
    assert not answers("127.0.0.1", port)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_stopped_guard_does_not_keep_the_command_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl.data_plane.adapters.mooncake_master.STOP_S", 0.5)
    process = GuardedProcess("sleep", ["sleep", "60"])
    process._guard.send_signal(signal.SIGSTOP)
    process.stop()
    wait_until(lambda: not is_alive(process.pid))
    assert not Path(process._folder).exists()
