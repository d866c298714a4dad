"""A process whose head cannot be reached ends by itself; one that can reach it goes on."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from nemo_rl.distributed.liveness import LOST_EXIT_CODE

pytestmark = pytest.mark.slow
DEADLINE_S = 60.0
SCRIPT = """
import sys, time
from nemo_rl.distributed.liveness import DriverWatchdog
DriverWatchdog(sys.argv[1], lost_s=0.3, look_s=0.05)
print("begun", flush=True)
time.sleep(600)
"""


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
