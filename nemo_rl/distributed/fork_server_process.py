"""The fork server's process: imports what workers need once, and forks a worker for every stub that asks.

Started by `fork_server.ForkServer` as `python -m nemo_rl.distributed.fork_server_process LISTENER MODULE...`. Has one
thread, since only the forking one goes on in a child. Ends when its standard input does, which is when the process
that has started it ends; its workers end with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from nemo_rl.distributed.fork_stub import LENGTH, STATUS
from nemo_rl.utils.files import receive_exactly
from nemo_rl.utils.process_guard import die_with_parent, leave_notices_to_driver

REQUEST_S = 10.0
"""A stub sends its request in one go."""
REQUEST_BYTES = 16 << 20
"""Arguments and environment; Linux lets a process start with 6 MiB of them at the most."""


@dataclass(eq=False, slots=True)
class _ForkedWorker:
    """A child of the server."""

    process_id: int
    watched: int
    """pidfd, readable when it has ended."""
    stub: socket.socket
    has_ended: bool = False


@dataclass(slots=True)
class Server:
    """The files and workers that are open in this process; a child closes all of them."""

    listener: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    workers: set[_ForkedWorker] = field(default_factory=set)

    def serve(self) -> None:
        """Fork until the standard input ends; never return in a child."""
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(0, selectors.EVENT_READ, None)
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    return
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        stub, _ = listener.accept()
        files: list[int] = []
        try:
            request = _receive(stub, files)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            sys.stderr.write(f"a request that cannot be read: {error}\n")
            for file in files:
                os.close(file)
            stub.close()
            return
        server, process_id = os.getpid(), os.fork()
        if process_id == 0:
            self._become_worker(server, stub, files, request)
        for file in files:
            os.close(file)
        worker = _ForkedWorker(process_id, os.pidfd_open(process_id), stub)
        self.workers.add(worker)
        self.selector.register(worker.watched, selectors.EVENT_READ, lambda _: self._report_end(worker))
        self.selector.register(stub, selectors.EVENT_READ, lambda _: self._end_worker(worker))
        with suppress(OSError):
            stub.sendall(STATUS.pack(process_id))

    def _report_end(self, worker: _ForkedWorker) -> None:
        worker.has_ended = True
        self.workers.discard(worker)
        _, status = os.waitpid(worker.process_id, 0)
        self.selector.unregister(worker.watched)
        os.close(worker.watched)
        with suppress(KeyError):
            self.selector.unregister(worker.stub)
        with suppress(OSError):
            worker.stub.sendall(STATUS.pack(max(os.waitstatus_to_exitcode(status), -1) % 256))
        worker.stub.close()

    def _end_worker(self, worker: _ForkedWorker) -> None:
        """Its stub was ended, which is how Ray ends a worker that has not come up yet."""
        # Both ends may be in one answer of the selector.
        if not worker.has_ended:
            self.selector.unregister(worker.stub)
            os.kill(worker.process_id, signal.SIGKILL)

    def _become_worker(
        self, server: int, stub: socket.socket, files: Sequence[int], request: dict[str, object]
    ) -> None:
        """Run the worker in the child; does not return."""
        code = 1
        try:
            die_with_parent(server)
            # Ray ends the process group of a worker that has died.
            os.setsid()
            self.selector.close()
            self.listener.close()
            stub.close()
            for other in self.workers:
                os.close(other.watched)
                other.stub.close()
            for target, file in enumerate(files):
                os.dup2(file, target)
                os.close(file)
            code = _run_worker(**request)  # type: ignore[arg-type]
        except BaseException:  # noqa: BLE001 - the last line of a process
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _receive(stub: socket.socket, files: list[int]) -> dict[str, object]:
    """Return a stub's request; descriptors that come with it are added to `files`, also when it cannot be read.

    Raises:
        OSError, EOFError, ValueError, RecursionError: it cannot, or has not come within `REQUEST_S`.
    """
    stub.settimeout(REQUEST_S)
    header, found, _, _ = socket.recv_fds(stub, LENGTH.size, 3)
    files += found
    if len(header) != LENGTH.size or LENGTH.unpack(header)[0] > REQUEST_BYTES:
        raise ValueError(f"expected a length of at most {REQUEST_BYTES} bytes, got {header!r}")
    request = json.loads(receive_exactly(stub, LENGTH.unpack(header)[0], deadline=time.monotonic() + REQUEST_S))
    stub.settimeout(None)
    if not isinstance(request, dict) or len(files) != 3:
        raise ValueError(f"expected an object and 3 descriptors, got {type(request).__name__} and {len(files)}")
    return request


def _run_worker(*, arguments: Sequence[str], environment: dict[str, str], folder: str) -> int:
    """Ray's worker script with its arguments, in the environment that Ray meant for it."""
    os.chdir(folder)
    script, rest, variables = _split(arguments)
    os.environ.clear()
    os.environ.update({**environment, **variables})
    _forget_randomness()
    sys.argv = [script, *rest]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _split(arguments: Sequence[str]) -> tuple[str, list[str], dict[str, str]]:
    """Script, its arguments, and the variables of its runtime environment; Ray's set-up script takes out the rest."""
    own = ("--serialized-runtime-env-context=", "--language=")
    context = next((text.partition("=")[2] for text in arguments if text.startswith(own[0])), "") or "{}"
    script, *rest = (text for text in arguments if not text.startswith(own) and text not in ("-s", "-S"))
    variables: dict[str, str] = json.loads(context).get("env_vars", {})
    return script, rest, variables


def _forget_randomness() -> None:
    """Children of one process have the same state; Python's own generator is seeded anew by itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def main(arguments: Sequence[str]) -> None:
    """`arguments`: descriptor of the listener, then the modules to import."""
    leave_notices_to_driver()
    for name in arguments[1:]:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - the worker that needs it reports it
            traceback.print_exc()
    if "ray" in sys.modules:
        raise SystemExit("a module has imported ray, whose library works in the process that has imported it only")
    # The collector writes into every object that it looks at, which would copy all pages in every child.
    gc.collect()
    gc.freeze()
    Server(socket.socket(fileno=int(arguments[0]))).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
