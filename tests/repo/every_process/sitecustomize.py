"""Python imports this when a process starts: it notes the functions of `nemo_rl` that the process enters.

`tests.repo.step_trace --processes` puts the folder on PYTHONPATH and NRL_STEP_TRACE into the environment. Functions are
noted while `on` is in that folder, and written when it has gone. Imports nothing that a process may lack.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import CodeType, FrameType

FOLDER = os.environ.get("NRL_STEP_TRACE", "")
PACKAGES = tuple(os.environ.get("NRL_STEP_TRACE_ROOTS", "").split(os.pathsep))
noted: dict[CodeType, list[str]] = {}
is_on = False


def note(frame: FrameType, event: str, argument: object) -> None:
    """Note a function at its first call, with the frames above it."""
    if is_on and event == "call" and frame.f_code not in noted and frame.f_code.co_filename.startswith(PACKAGES):
        noted[frame.f_code] = stack = []
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_filename.startswith(PACKAGES) and not at.f_code.co_name.startswith("<"):
                stack.append(at.f_code.co_qualname)
            at = at.f_back


def hook_calls() -> None:
    """Have each call of a Ray actor hook its thread, which Ray has made without Python."""
    module = sys.modules.get("nemo_rl.distributed.ray_worker_groups")
    host = None if module is None else vars(module).get("_Host")
    if host is not None and not hasattr(host, "is_hooked"):
        host.is_hooked, guard = True, host._guard

        def hooked(self: object, *args: object) -> object:
            sys.setprofile(note)
            return guard(self, *args)

        host._guard = hooked


def watch() -> None:
    """Begin and end with the file `on`; a process that notes nothing writes nothing."""
    global is_on
    while os.path.isdir(FOLDER):
        time.sleep(0.02)
        hook_calls()
        was_on, is_on = is_on, os.path.exists(f"{FOLDER}/on")
        if was_on and not is_on and noted:
            rows = []
            for code, stack in list(noted.items()):
                last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
                rows.append((code.co_filename, code.co_qualname, last - code.co_firstlineno + 1, stack[::-1]))
            with open(f"{FOLDER}/tmp{os.getpid()}", "w", encoding="utf-8") as file:
                json.dump(rows, file)
            os.replace(file.name, f"{FOLDER}/{os.getpid()}.json")


def start() -> None:
    """Hook this thread and the next ones, here and in every fork."""
    noted.clear()
    threading.setprofile(note)
    threading.Thread(target=watch, daemon=True).start()
    sys.setprofile(note)


if FOLDER:
    os.register_at_fork(after_in_child=start)
    start()
