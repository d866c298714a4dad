"""Closes the connections of this process's groups, so that a thread that is blocked in a collective returns.

Called by the abort watch from its own thread. NCCL can abort a communicator. Gloo has no working abort (torch 2.13:
`ProcessGroup.abort` returns and the blocked call stays), but every blocked call ends with "Connection closed by peer"
when its sockets are shut down, in this process as well. Gloo's sockets are those that its own threads poll.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from nemo_rl.torch_private import abort_nccl

__all__ = ["abort_process_groups"]

TASKS = Path("/proc/self/task")
GLOO_LOOP = "gloo_tcp_loop"
"""Name of the thread in which a gloo device polls its connections."""
LOOKS = 5
"""How often a thread is looked at that was not in its poll just then."""
_one_at_a_time = threading.Lock()


def abort_process_groups() -> int:
    """Ends every connection of gloo and every communicator of NCCL in this process; how many there were.

    The groups cannot be used any more. Where `/proc` does not show gloo's sockets it ends none of them: then a blocked
    thread ends with its process.
    """
    with _one_at_a_time:
        return _abort_nccl() + sum(_shut_down(fd) for epoll in set(_gloo_polls()) for fd in _polled_by(epoll))


def _abort_nccl() -> int:
    return abort_nccl() if torch.cuda.is_available() else 0


def _gloo_polls() -> Iterator[int]:
    """The epoll descriptor of each gloo thread: the first argument of the call that the thread is in."""
    for task in TASKS.iterdir():
        for _ in range(LOOKS):
            try:
                if (task / "comm").read_text().strip() != GLOO_LOOP:
                    break
                call = (task / "syscall").read_text().split()
            except OSError:
                break
            if len(call) > 1 and _link(fd := int(call[1], 16)) == "anon_inode:[eventpoll]":
                yield fd
                break


def _polled_by(epoll: int) -> list[int]:
    try:
        text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except OSError:
        return []
    return [int(fd) for fd in re.findall(r"tfd:\s+(\d+)", text)]


def _shut_down(fd: int) -> int:
    """1 if the descriptor was a connection that was still open."""
    try:
        copy = os.dup(fd)  # gloo closes its own when it meets the error
    except OSError:
        return 0
    if not _link(copy).startswith("socket:"):
        os.close(copy)
        return 0
    with socket.socket(fileno=copy) as connection:
        try:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
                return 1
        except OSError:
            pass  # the other end was faster
    return 0


def _link(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
