"""The stub that Ray starts in place of a worker: asks the fork server for one, and lives and ends with it.

Run as `python fork_stub.py <what Ray passes to its own set-up script>`, with the address of the server, the path of
that script and a deadline in the environment. Without an answer it becomes what Ray would have started. Imports the
standard library only, because every worker waits for it.

`python fork_stub.py idle-agent <what Ray passes to its agent>` stands for the agent of Ray's dashboard instead, without
which no raylet starts. Ray's own imports 100 MiB of modules to serve metrics, jobs and logs to a dashboard, which a run
does not have.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time

ADDRESS, SETUP_SCRIPT, DEADLINE = "NRL_FORK_SERVER", "NRL_RAY_SETUP_WORKER", "NRL_FORK_DEADLINE_S"
LENGTH, STATUS = struct.Struct("<I"), struct.Struct("<i")
"""Before a request; of an answer, which is the worker's process id first and its exit code at last."""
IDLE_AGENT = "idle-agent"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Files in which the raylet waits for the ports of the dashboard's agent."""
NO_SERVICE = "-1"
LOOK_S = 1.0
"""Seconds between two looks of the idle agent at its raylet."""


def main() -> int:
    if sys.argv[1:2] == [IDLE_AGENT]:
        return be_idle_agent(sys.argv[2:])
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.settimeout(float(os.environ[DEADLINE]))
            server.connect(os.environ[ADDRESS])
            request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
            content = json.dumps(request).encode()
            socket.send_fds(server, [LENGTH.pack(len(content))], [0, 1, 2])
            server.sendall(content)
            if len(server.recv(STATUS.size, socket.MSG_WAITALL)) == STATUS.size:
                server.settimeout(None)  # as long as the worker lives: the server, or its end, says when it has ended
                code = server.recv(STATUS.size, socket.MSG_WAITALL)
                return STATUS.unpack(code)[0] if len(code) == STATUS.size else 1
    except OSError as error:
        sys.stderr.write(f"no answer from the fork server, starting the worker anew: {error}\n")
        sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, os.environ[SETUP_SCRIPT], *sys.argv[1:]])


def be_idle_agent(arguments: list[str]) -> int:
    """Report to the raylet that nothing is served, and return when it has ended."""
    parent = os.getppid()
    given = dict(text[2:].split("=", 1) for text in arguments if text.startswith("--") and "=" in text)
    for name in AGENT_PORTS:
        path = os.path.join(given["session-dir"], f"{name}_{given['node-id']}")
        with open(f"{path}.part", "w") as file:
            file.write(NO_SERVICE)
        os.rename(f"{path}.part", path)
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
