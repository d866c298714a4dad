"""A process is alive until it ends, reaped or not, and ends by itself when its head cannot be reached."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from nemo_rl.distributed.liveness import LOST_EXIT_CODE, ProcessIdentity, StoppedProcesses

SHOW = (
    "import json; from dataclasses import asdict; from nemo_rl.distributed.liveness import ProcessIdentity as P; "
    "print(json.dumps(asdict(P.of_this_process())), flush=True); input()"
)


def test_a_killed_child_is_dead_before_anybody_reaps_it():
    me = ProcessIdentity.of_this_process()
    with subprocess.Popen([sys.executable, "-c", SHOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        identity = replace(me, pid=child.pid, start=_start_of(child.stdout.readline()))
        assert identity.is_visible_from(me) and identity.is_alive()
        assert not replace(identity, start=identity.start + 1).is_alive(), "another process of the same number"
        child.kill()
        deadline = time.monotonic() + 10
        while identity.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not identity.is_alive(), "a zombie counts as alive"
        child.wait(timeout=10)
    assert not identity.is_alive()


def test_processes_elsewhere_are_not_looked_at():
    me = ProcessIdentity.of_this_process()
    assert me.is_alive() and me.is_visible_from(me)
    assert not replace(me, namespace="another machine").is_visible_from(me)
    assert not replace(me, namespace="").is_visible_from(replace(me, namespace=""))


def test_a_stopped_process_is_named_with_its_state_once_and_again_after_it_went_on(caplog):
    watch = StoppedProcesses(stopped_s=0.2, look_s=0.05)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            watch.watch({"policy rank 0": ProcessIdentity.of(child.pid)})
            said = (
                f"the run waits for policy rank 0: process {child.pid} is stopped (state T in /proc/{child.pid}/stat)"
            )
            for count in (1, 2):
                child.send_signal(signal.SIGSTOP)
                deadline = time.monotonic() + 30
                while caplog.text.count(said) < count and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(0.3)
                assert caplog.text.count(said) == count, caplog.text
                child.send_signal(signal.SIGCONT)
                time.sleep(0.3)
        finally:
            child.kill()


def _start_of(line: bytes) -> int:
    return int(json.loads(line)["start"])


DEADLINE_S = 60.0
SCRIPT = """
import sys, time
from nemo_rl.distributed.liveness import DriverWatchdog
DriverWatchdog(sys.argv[1], lost_s=0.3, look_s=0.05)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_process_ends_when_its_head_is_gone_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        head.settimeout(DEADLINE_S)
        address = f"127.0.0.1:{head.getsockname()[1]}"
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, address], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            head.accept()[0].close()
        assert process.poll() is None
    try:
        assert process.wait(DEADLINE_S) == LOST_EXIT_CODE
    finally:
        process.kill()
        process.stdout.close()
