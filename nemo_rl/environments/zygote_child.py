"""The process that has loaded user code and forks a process for each conversation or tool (a zygote).

Started by `Zygote`; standard library and user code only, so that a fork takes a millisecond. Two kinds of sockets, one
JSON object per line:

    control    first {"paths", "service", ..}            -> {"ready": {..}} or {"failed": text}
               {"fork": number}, with a socket           -> {"forked": number, "pid"}
               {"end": number}                           -> {"ended": number, "code"}, also when it ended by itself
    a fork     {"id", ..}                                -> {"id", ..} or {"id", "error"}

    guard                         ends everything when the owner asks for it or dies
     `- zygote                    child subreaper
         |- fork 1                child subreaper, session of its own, folder of its own
         |   `- what it started   orphans become children of fork 1; when that dies, of the zygote, which kills them
         `- fork 2

Invariant: a child of the zygote that is no fork, and was not there before the first one, is an orphan of a fork that
has ended.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import inspect
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nemo_rl.environments.isolation import (
    Lines,
    become_subreaper,
    children_of,
    cut,
    digest_of,
    limit_memory,
    load_target,
    out_of_reach,
    places_of,
    serve,
    start_guarded,
    turn_network_off,
)
from nemo_rl.environments.tool_schema import options_problem, schema_of
from nemo_rl.environments.wire import MalformedReply, plain_reply, plain_text, read_row, read_turn
from nemo_rl.utils.process_guard import die_with_parent, remove_folder

__all__ = ["EnvironmentService", "Service", "ToolService", "main"]

_SWEEP_S = 5.0
"""Longest time in which orphans of one fork are killed; SIGKILL takes microseconds."""
_PART_BYTES = 1 << 16
_REMOVED_AT_ONCE = 200
"""Most files of a fork that are removed before the next request is heard: milliseconds."""


class EnvironmentService:
    """One conversation: `open`, `reply`, `close`."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        module, found = load_target(given["target"])
        if not callable(found):
            raise TypeError(f"expected a class, got {type(found).__name__}")
        self._environment = found(**given["options"])
        if not callable(self._environment.open):
            raise TypeError(f"expected a class with a method open(row), got {type(self._environment).__name__}")
        self.ready: dict[str, object] = {"source": digest_of(module, found)}
        """Facts about the loaded code that its owner must know."""
        self._conversation: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Return the reply to one request; runs in a fork."""
        if "open" in request:
            row = read_row(request["open"])
            random.seed(row.seed)
            self._conversation = self._environment.open(row)
            return {"has_close": hasattr(self._conversation, "close")}
        if "reply" in request:
            reply = self._conversation.reply(read_turn(request["reply"]))
            try:
                return {"reply": plain_reply(reply)}
            except MalformedReply as error:
                return {"reply": str(error)}
        self._conversation.close()
        return {}


class ToolService:
    """The calls of some tools."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._tools: dict[str, Any] = {}
        self._state: tuple[object, ...] | None = None
        schemas, runs_code, sources = [], [], []
        for tool in given["tools"]:
            module, found = load_target(tool["target"])
            if not callable(found):
                raise TypeError(f"{tool['target']}: expected a function, got {type(found).__name__}")
            if problem := options_problem(found, tool["options"]):
                raise TypeError(f"{tool['target']}: {problem}")
            if check := vars(found).get("check_options"):
                check(**tool["options"])
            schema = schema_of(found)
            name = str(schema["function"]["name"])
            if name in self._tools:
                raise ValueError(f"{tool['target']}: there is another tool {name!r}; give every tool its own name")
            self._tools[name] = (found, dict(tool["options"]))
            schemas.append(schema)
            if vars(found).get("runs_code"):
                runs_code.append(name)
            sources.append(digest_of(module, found))
        self.ready: dict[str, object] = {"schemas": schemas, "runs_code": runs_code, "source": "+".join(sources)}

    def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Return the reply to one request; `changed` says that an earlier call has left the process unfit for it."""
        try:
            state = _process_state()
            self._state = self._state or state
        except Exception:  # noqa: BLE001 - an earlier call has changed what is asked here
            state = ()
        if state != self._state:
            return {"text": "", "changed": True}
        found, options = self._tools[request["tool"]]
        random.seed(request["seed"])
        if "seed" in (found.__kwdefaults__ or {}) and "seed" not in options:
            options = {**options, "seed": request["seed"]}
        result = found(**request["arguments"], **options)
        return {"text": plain_text(asyncio.run(result) if inspect.iscoroutine(result) else result)}


def _process_state() -> tuple[object, ...]:
    """Return what a call may change that makes later calls of other conversations go wrong."""
    umask = os.umask(0o77)
    os.umask(umask)
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)]
    names = [(name, id(value)) for module in (builtins, os, json) for name, value in vars(module).items()]
    streams = (id(sys.stdout), id(sys.stderr), sys.gettrace(), sys.modules.get("os") is os)
    blocked, timer = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getitimer(signal.ITIMER_REAL)
    return os.getcwd(), umask, sys.getrecursionlimit(), limits, names, streams, blocked, timer


Service = EnvironmentService | ToolService
"""The work of forks."""

_SERVICES: Mapping[str, type[Service]] = {
    "environment": EnvironmentService,
    "tools": ToolService,
}


def main() -> None:
    """Serve a zygote: the arguments are SOCKET_FD PARENT_PID FOLDER."""
    fd, parent, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    start_guarded(parent, folder=folder)
    become_subreaper()
    # Prints must have left before the reply; what is no Unicode must not end the process.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    with socket.socket(fileno=out_of_reach(fd)) as control:
        lines = _ControlLines(control)
        first = lines.wait()
        sys.path[:] = list(dict.fromkeys([*first["paths"], *sys.path]))
        guard = os.getppid()
        network = "on" if first["network"] else turn_network_off()
        die_with_parent(guard)  # a change of user namespace may have cleared it
        try:
            service = _SERVICES[first["service"]](first)
        except Exception as error:  # noqa: BLE001 - user code; the owner reports it
            _send(control, {"failed": cut(f"{type(error).__name__}: {error}") + places_of(error, besides=__file__)})
            return
        _send(control, {"ready": {**service.ready, "network": network}})
        # What is loaded is never garbage: forks need not copy the pages that a collection would write to.
        gc.collect()
        gc.freeze()
        _Forks(control, lines, service, folder=folder, memory_mib=first["memory_mib"]).run()


class _ControlLines:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lines = Lines()
        self.sockets: deque[int] = deque()

    def wait(self) -> dict[str, Any]:
        while not (lines := self.receive()):
            pass
        return lines[0]

    def receive(self) -> list[dict[str, Any]]:
        """Return the objects that are whole; exit when the owner has closed the socket."""
        part, descriptors, _, _ = socket.recv_fds(self._control, _PART_BYTES, 64)
        self.sockets += descriptors
        if not part:
            os._exit(0)
        return [json.loads(line) for line in self._lines.add(part) if line]


class _Forks:
    """Starts forks, ends them, and kills what they leave."""

    def __init__(
        self, control: socket.socket, lines: _ControlLines, service: Service, *, folder: str, memory_mib: int | None
    ) -> None:
        self._control, self._lines, self._service = control, lines, service
        self._folder, self._memory_mib = folder, memory_mib
        self._numbers: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._others = set(children_of(os.getpid()))
        """Processes that user code has started while it was loaded, which serve all forks, and those that remove."""
        self._wakeup, self._wakeup_write = os.pipe()
        for end in (self._wakeup, self._wakeup_write):
            os.set_blocking(end, False)

    def run(self) -> None:
        """Serve until the owner closes the control socket."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            readable = {fd for fd, _ in poll.poll()}
            if self._wakeup in readable:
                with suppress(BlockingIOError):
                    os.read(self._wakeup, _PART_BYTES)
                self._reap()
            if self._control.fileno() in readable:
                for message in self._lines.receive():
                    self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        if "fork" in message:
            self._fork(message["fork"], self._lines.sockets.popleft())
        elif (pid := self._pids.get(message["end"])) is not None:
            # Not reaped yet, so the number still belongs to it.
            os.kill(pid, signal.SIGKILL)

    def _fork(self, number: int, fd: int) -> None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(fd)
            _send(self._control, {"ended": number, "code": None, "why": f"cannot be forked: {error}"})
            return
        if pid == 0:
            try:
                self._become_fork(zygote, number, fd)
            finally:
                os._exit(70)
        os.close(fd)
        self._numbers[pid], self._pids[number] = number, pid
        _send(self._control, {"forked": number, "pid": pid})

    def _become_fork(self, zygote: int, number: int, fd: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        die_with_parent(zygote)
        become_subreaper()
        for other in (self._wakeup, self._wakeup_write, self._control.detach()):
            os.close(other)
        folder = _folder_of(self._folder, number)
        # Other forks have the rights of this one: whatever they did to the folder above, this one has its own.
        os.makedirs(self._folder, 0o700, exist_ok=True)
        os.chmod(self._folder, 0o700)
        remove_folder(folder)
        os.mkdir(folder, 0o700)
        os.chdir(folder)
        os.environ["TMPDIR"], tempfile.tempdir = folder, None
        limit_memory(self._memory_mib)
        serve(out_of_reach(fd), self._service.answer, besides=__file__)

    def _reap(self) -> None:
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._numbers:
                number = self._numbers.pop(pid)
                del self._pids[number]
                ended.append((number, os.waitstatus_to_exitcode(status)))
            self._others.discard(pid)
        if not ended:
            return
        self._kill_orphans()
        for number, code in ended:
            folder = _folder_of(self._folder, number)
            if not remove_folder(folder, most=_REMOVED_AT_ONCE):
                self._remove_apart(folder)
            _send(self._control, {"ended": number, "code": code})

    def _remove_apart(self, folder: str) -> None:
        """Remove a folder in its own process: other forks wait for nothing that one has made."""
        try:
            pid = os.fork()
        except OSError:
            return  # it is removed with all folders, at the end
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                remove_folder(folder)
            finally:
                os._exit(0)
        self._others.add(pid)

    def _kill_orphans(self) -> None:
        deadline = time.monotonic() + _SWEEP_S
        while orphans := set(children_of(os.getpid())) - self._numbers.keys() - self._others:
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
            if time.monotonic() > deadline:
                os._exit(71)  # they come faster than they are killed; the guard goes on


def _folder_of(folder: str, number: int) -> str:
    return os.path.join(folder, str(number))


def _send(control: socket.socket, message: dict[str, object]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")
