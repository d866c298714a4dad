"""`OwnRay`: a Ray on this machine that belongs to this process, reachable from this machine alone.

`RayVirtualCluster` opens it for a run without `cluster.address`. Invariant: every socket of it is on loopback and asks
for a token that only this user can read, and neither its processes nor its files outlive this process.

Ray's own clients wait a minute for a metadata server that is gone, in calls that no signal and no exception reaches,
and end the process then with their own text. So `watch_ray_start` ends this process when the metadata server dies
while `ray.init` waits for it. A raylet that dies (it does where its agents take longer than half a minute to import)
makes `ray.init` raise, and is started again.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from nemo_rl.distributed import fork_stub
from nemo_rl.distributed.environment import ray_environment
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.liveness import STOPPED_S, ProcessIdentity
from nemo_rl.distributed.ray_private import apart_from_signals, on_loopback, started_by, without_what_nobody_asks
from nemo_rl.distributed.run_folder import RunFolder
from nemo_rl.errors import ResourceError, WorkerError
from nemo_rl.utils.deadlines import StartUp

__all__ = ["LOOPBACK", "OwnRay", "check_own_ray", "keep_sigterm_handler", "leave", "shut_down_ray", "watch_ray_start"]

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
SLOW_START = ("timed out during startup", "Timed out waiting for", "Failed to connect to GCS")
"""Texts with which Ray reports that its own processes did not come up in half a minute, a limit without an option."""
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
LOOK_S = 1.0
UNHEARD_S = 40.0
"""Seconds from the metadata server's death until this process exits, if Ray was not closed by then: after 60 s Ray
itself ends it with its own text, and calls that wait for the server cannot be interrupted."""
HANDLER_S = 0.005
"""Seconds until a signal handler that Ray has reset is installed again."""
_ended: set[str] = set()
"""Servers that were ended because somebody had stopped them."""
_servers: dict[str, ProcessIdentity] = {}
"""The servers of the Ray that this process has started, by name; empty without one."""


class OwnRay:
    """Ray for one process and what it starts. A context manager.

    Args:
        num_cpus: logical CPUs that Ray may hand out.
        num_gpus: the same of GPUs; None lets Ray look for them.
        environment: variables of every process of this Ray.
        start: how long it may take.
        object_store_bytes: size of Ray's object store; None leaves it to Ray.
        forks: where its workers begin; stays open and keeps the folder. None: every worker starts by itself.
    """

    def __init__(
        self,
        *,
        num_cpus: int,
        num_gpus: int | None = 0,
        environment: Mapping[str, str] | None = None,
        start: StartUp | None = None,
        object_store_bytes: int | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self._start = start or StartUp()
        self._num_cpus, self._num_gpus = num_cpus, num_gpus
        self._object_store_bytes = object_store_bytes
        self._forks = forks
        self._environment = {**ray_environment(self._start.timeout_s), **(environment or {})}
        self._folder: RunFolder | None = None
        self._is_closed = threading.Event()

    def __enter__(self) -> OwnRay:
        try:
            self._folder = RunFolder() if self._forks is None else self._forks.folder
            with self._start.waiting_for("Ray"):
                self._open(self._folder)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def logs(self) -> Path | None:
        """Ray's own logs, while it is open."""
        if self._folder is None:
            return None
        found = self._folder.path / "session_latest" / "logs"
        return found if found.is_dir() else None

    def keep_logs(self, target: Path) -> Path | None:
        """Copy Ray's logs, which are removed at the end; None when there are none."""
        if self.logs is None:
            return None
        shutil.copytree(self.logs, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        return target

    def close(self) -> None:
        """End Ray and remove its files. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        try:
            shut_down_ray()
        finally:
            self._is_closed.set()
            _servers.clear()
            _ended.clear()
            if self._forks is None:
                folder.close()
            if os.environ.get(TOKEN_PATH, "").startswith(f"{folder.path}/"):
                del os.environ[TOKEN_PATH]
                AuthenticationTokenLoader.instance().reset_cache()

    def _open(self, folder: RunFolder) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        _bring_token(folder.path)
        give_up = time.monotonic() + self._start.timeout_s
        while True:
            try:
                self._init(folder)
                return
            except Exception as error:  # Ray raises all kinds
                shut_down_ray()
                first = (str(error).splitlines() or [type(error).__name__])[0]
                if not any(text in str(error) for text in SLOW_START):
                    raise ResourceError(f"cluster: Ray could not be started: {first}") from error
                if time.monotonic() > give_up:
                    raise ResourceError(self._start.too_late(f"cluster: Ray did not start ({first})")) from error
                logger.info("Ray did not start, trying again: %s", first)
                _forget(error)
                end_servers()

    def _init(self, folder: RunFolder) -> None:
        with (
            ExitStack() as forked,
            folder.marking(),
            _variables(self._environment),
            on_loopback(),
            apart_from_signals(),
            without_what_nobody_asks(),
            keep_sigterm_handler(),
            watch_ray_start(),
        ):
            if self._forks is not None:
                forked.enter_context(_variables(self._forks.environment))
                forked.enter_context(started_by(Path(fork_stub.__file__)))
            ray.init(
                # Without it Ray joins whatever cluster somebody else has started on this machine.
                address="local",
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                object_store_memory=self._object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder.path),
            )
        _servers.update(_ray_servers())
        watch = threading.Thread(target=_watch_servers, args=(self._is_closed,), name="ray-servers", daemon=True)
        watch.start()


def _forget(error: Exception) -> None:
    """Free what a failed start of Ray still refers to: servers that it has ended and not waited for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        traceback.clear_frames(error.__traceback__)
        gc.collect()


def check_own_ray(*, stage: str) -> None:
    """Raise WorkerError when a process of this process's own Ray has ended; all that ran there is lost then.

    Ray itself waits a minute for its metadata server and ends this process afterwards.
    """
    for name, identity in _servers.items():
        if not identity.is_alive():
            why = f"it was stopped for {STOPPED_S:.0f} s" if name in _ended else "look for a kill or an out-of-memory"
            raise WorkerError(f"Ray has lost its {name} (process {identity.pid}); {why}", stage=stage)


def _watch_servers(is_closed: threading.Event) -> None:
    """A stopped server blocks calls that have no deadline; a dead one ends them, all but those to the dead itself."""
    since: dict[str, float] = {}
    while not is_closed.wait(LOOK_S):
        for name, identity in tuple(_servers.items()):
            is_dead = not identity.is_alive()
            if not is_dead and not identity.is_stopped():
                since.pop(name, None)
                continue
            is_late = time.monotonic() - since.setdefault(name, time.monotonic()) > (
                UNHEARD_S if is_dead else STOPPED_S
            )
            if is_late and is_dead and name == ray_constants.PROCESS_TYPE_GCS_SERVER:
                leave(f"Ray has lost its {name} (process {identity.pid})")
            elif is_late and not is_dead:
                _ended.add(name)
                os.kill(identity.pid, signal.SIGKILL)


def _ray_servers() -> dict[str, ProcessIdentity]:
    """Return the servers that Ray has started for this process, by the names that its logs use."""
    return {
        name: ProcessIdentity.of(process.pid)
        for name, process in _ray_processes().items()
        if name in (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
    }


def _ray_processes() -> dict[str, subprocess.Popen[bytes]]:
    """Return all that Ray has started for this process, by the names that its logs use; empty where it joined."""
    node = ray._private.worker._global_node
    running = {} if node is None else node.all_processes
    return {name: infos[0].process for name, infos in running.items() if infos}


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler after `ray.init`, which sets one that leaves without our teardown."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def shut_down_ray() -> None:
    """Leave Ray, and wait for the end of its processes: Ray itself waits for a second, which a busy machine exceeds."""
    processes = _ray_processes()
    _shut_down_with_handler()
    for process in processes.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _shut_down_with_handler() -> None:
    """Shut Ray down with the SIGTERM handler that is there.

    Ray's shutdown resets it at its beginning, and then takes a second or more, in which a second signal would end the
    process before its teardown. Only the main thread can set a handler, so another one shuts Ray down.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is None or threading.current_thread() is not threading.main_thread():
        ray.shutdown()
        return
    with ThreadPoolExecutor(1, thread_name_prefix="ray-shutdown") as pool:
        ended = pool.submit(ray.shutdown)
        while not wait([ended], HANDLER_S).done:
            signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGTERM, handler)
    ended.result()


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Ray's processes inherit this process's variables while they start."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _bring_token(folder: Path) -> None:
    """Ray would keep its token in the home folder, where others may read it, or fail without a writable one."""
    is_ours = os.environ.get(TOKEN_PATH, str(folder)).startswith(str(folder.parent))
    if "RAY_AUTH_TOKEN" in os.environ or not is_ours or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    path = folder / "auth_token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ[TOKEN_PATH] = str(path)
    AuthenticationTokenLoader.instance().reset_cache()


SERVER = "gcs_server"
GRACE_S = 12.0
"""Seconds from the server's end to ours: a start that fails by itself within this time raises what it knows."""
SERVER_POLL_S = 0.5


@contextmanager
def watch_ray_start() -> Iterator[None]:
    """Exit this process, with a message, when a metadata server that it started inside the block ends.

    The files and processes of the run are then left to its reaper, as after a kill.
    """
    is_over = threading.Event()
    watch = threading.Thread(target=_watch, args=(is_over, _started_servers()), name="ray-start", daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join()


def end_servers() -> None:
    """Kill metadata servers that this process has started: a start that fails leaves its own behind."""
    for server in _started_servers():
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(server.pid)
            child.kill()
            child.wait(GRACE_S)


def _watch(is_over: threading.Event, earlier: set[ProcessIdentity]) -> None:
    seen: set[ProcessIdentity] = set()
    ended: dict[ProcessIdentity, float] = {}
    while not is_over.wait(SERVER_POLL_S):
        seen |= _started_servers() - earlier
        for server in seen:
            if not server.is_alive() and time.monotonic() - ended.setdefault(server, time.monotonic()) > GRACE_S:
                leave(f"Ray has lost its {SERVER} (process {server.pid}) while it started")


def _started_servers() -> set[ProcessIdentity]:
    """Metadata servers among this process's children."""
    found = set()
    for child in psutil.Process().children():
        try:
            if child.name() == SERVER:
                found.add(ProcessIdentity.of(child.pid))
        except psutil.NoSuchProcess:
            continue
    return found


def leave(what: str) -> None:
    """End this process where no exception is heard; its reaper ends and removes the rest."""
    sys.stderr.write(f"error: cluster: {what}; look for a kill or an out-of-memory\n")
    sys.stderr.flush()
    os._exit(1)
