"""The stub that Ray starts in place of a worker: asks the fork server for one, and lives and ends with it.

Run as `python fork_stub.py <what Ray passes to its own set-up script>`, with the address of the server, the path of
that script and a deadline in the environment. Without an answer it becomes what Ray would have started. Imports the
standard library only, because every worker waits for it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys

ADDRESS, SETUP_SCRIPT, DEADLINE = "NRL_FORK_SERVER", "NRL_RAY_SETUP_WORKER", "NRL_FORK_DEADLINE_S"
LENGTH, STATUS = struct.Struct("<I"), struct.Struct("<i")
"""Before a request; of an answer, which is the worker's process id first and its exit code at last."""


def main() -> int:
    """Exit code of the worker."""
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


if __name__ == "__main__":
    sys.exit(main())
