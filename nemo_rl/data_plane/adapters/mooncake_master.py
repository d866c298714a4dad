"""Mooncake's own processes: the master, which knows where objects are, and the holder, which keeps their bytes.

Started by the owner of a run (`mooncake.MooncakeStore.start`, and `transfer_queue` with backend `mooncake_cpu`). The
programs are taken from the installed package, never from PATH; they end with their owner, also when it is killed, and
no others are touched.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.config.data_plane import MooncakeConfig
from nemo_rl.errors import DataPlaneClosed, ResourceError
from nemo_rl.utils.child_process import Guard
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

__all__ = [
    "MooncakeServers",
    "StoreAddress",
    "answers",
    "check_installed",
    "executable",
    "free_port",
    "is_listening",
    "own_address",
    "start_servers",
    "wait_for_port",
]

logger = logging.getLogger(__name__)

POLL_S = 0.02
CONNECT_S = 1.0


def wait_for_port(process: Guard, host: str, port: int, *, timeout_s: float) -> None:
    """Wait until a process listens on the port.

    Raises:
        ResourceError: the command ended, or nothing listens after `timeout_s`; the text has the end of its log.
    """
    give_up = time.monotonic() + timeout_s
    while not answers(host, port):
        if not process.is_alive():
            raise ResourceError(f"{process.name} ended while it started: {process.log_tail()}")
        if time.monotonic() > give_up:
            raise ResourceError(
                f"{process.name} (process {process.pid}) does not listen on {host}:{port} after {timeout_s:.1f} s: "
                f"{process.log_tail()}"
            )
        time.sleep(POLL_S)


def free_port(host: str) -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def answers(host: str, port: int, *, timeout_s: float = CONNECT_S) -> bool:
    """Return whether a process listens on the port; a stopped process still does."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


START_ATTEMPTS = 3
"""A port that was free may be taken by the time the program binds it."""
CLIENT_TTL_S = 10
"""A client that is silent for so long is dead to the master; its objects are gone then."""
LEASE_MS = 2**31 - 1
SOFT_PIN_MS = 24 * 3600 * 1000
"""The longest that the master accepts; nothing is evicted anyway."""
EXTRAS = "mooncake (without CUDA), mooncake-cuda12 or mooncake-cuda13"
SYSTEM_LIBRARIES: Mapping[str, str] = {
    "libibverbs": "libibverbs1 (apt-get install libibverbs1; Fedora: libibverbs)",
    "libnuma": "libnuma1 (apt-get install libnuma1; Fedora: numactl-libs)",
    "libcurl": "libcurl4 (apt-get install libcurl4; Fedora: libcurl)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """The address with which a process joins a run's Mooncake store.

    Example:
        >>> StoreAddress.parse("127.0.0.1:50051,127.0.0.1:50052").holder
        '127.0.0.1:50052'
    """

    master: str
    """`host:port` of the master."""
    holder: str
    """`host:port` of the process that holds the bytes; empty when producers hold them."""

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Parse the form that travels in a `DataPlaneAddress`."""
        master, _, holder = text.partition(",")
        return cls(master=master, holder=holder)

    def __str__(self) -> str:
        return f"{self.master},{self.holder}"


class MooncakeServers:
    """The processes that a run owns."""

    def __init__(self, *, address: StoreAddress, processes: list[Guard]) -> None:
        self.address, self._processes = address, processes

    @property
    def process_ids(self) -> dict[str, int]:
        """Name -> process id of what this run started."""
        return {process.name: process.pid for process in self._processes}

    def stop(self) -> None:
        """End what this run started. Idempotent."""
        for process in reversed(self._processes):
            process.close()


def start_servers(config: MooncakeConfig, *, has_holder: bool, start: StartUp = DEFAULT_START) -> MooncakeServers:
    """Master (unless one is named) and holder.

    Raises:
        ResourceError: Mooncake is not installed, a named master does not answer, or a program does not start.
    """
    check_installed()
    processes: list[Guard] = []
    try:
        master = config.master_address
        if master is None:
            master = _start_master(config, processes, start)
        elif not is_listening(master):
            raise ResourceError(f"data_plane.mooncake.master_address: nothing listens at {master}; start that master")
        holder = _start_holder(config, master, processes, start) if has_holder else ""
    except BaseException:
        for process in processes:
            process.close()
        raise
    address = StoreAddress(master=master, holder=holder)
    servers = MooncakeServers(address=address, processes=processes)
    logger.info("Mooncake: master %s, holder %s, processes %s", master, holder or "none", servers.process_ids)
    return servers


def check_installed() -> Path:
    """Return the package's folder.

    Raises:
        ResourceError: the extra or a system library is missing; the text says what to install.
    """
    found = importlib.util.find_spec("mooncake")
    if found is None or found.origin is None:
        raise ResourceError(
            f"Mooncake is not installed; install one of the extras {EXTRAS}: pip install -e '.[mooncake]'"
        )
    try:
        import mooncake.store  # noqa: F401, PLC0415 - the door: the only import that can fail
    except ImportError as error:
        raise ResourceError(missing_library(str(error))) from error
    return Path(found.origin).parent


def executable(program: Path) -> Path:
    """Return the program, which some installers leave without its executable bits: they are given back.

    Raises:
        ResourceError: the package lacks the program, or it cannot be made executable by this user.
    """
    if not program.is_file():
        raise ResourceError(f"{program}: Mooncake's package lacks this program; install it again ({EXTRAS})")
    if os.access(program, os.X_OK):
        return program
    mode = stat.S_IMODE(program.stat().st_mode)
    # A user who may read it may run it.
    wanted = mode | (mode & (stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)) >> 2
    try:
        program.chmod(wanted)
    except OSError as error:
        raise ResourceError(
            f"{program} is not executable and is not this user's to change ({error.strerror}); have its owner run "
            f"`chmod +x {shlex.quote(str(program))}`"
        ) from error
    logger.warning("%s was installed without its executable bits; they have been set", program)
    return program


def missing_library(problem: str) -> str:
    """Return what to install, from the text of an ImportError."""
    for name, what in SYSTEM_LIBRARIES.items():
        if name in problem:
            return f"Mooncake needs the system library {what}: {problem}"
    return f"Mooncake cannot be loaded; is it the extra that fits this machine ({EXTRAS})? {problem}"


def is_listening(address: str) -> bool:
    """Return whether a process listens at `host:port`; a stopped process still does."""
    return answers(*_split(address))


def own_address(master: str) -> str:
    """Return this node's address as the master's node sees it: what peers can reach, never a guess among many cards.

    Raises:
        DataPlaneClosed: this node has no route to the master.
    """
    host, port = _split(master)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DataPlaneClosed(f"no route from this node to the Mooncake master at {master}: {error}") from error


def _start_master(config: MooncakeConfig, processes: list[Guard], start: StartUp) -> str:
    program = executable(check_installed() / "mooncake_master")

    def command(port: int) -> list[str]:
        return [
            str(program),
            f"--rpc_address={config.host}",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port('127.0.0.1')}",
            f"--client_ttl={CLIENT_TTL_S}",
            # Rows leave the store when the ledger says so: nothing is evicted, no lease ends.
            f"--default_kv_lease_ttl={LEASE_MS}",
            f"--default_kv_soft_pin_ttl={SOFT_PIN_MS}",
            "--allow_evict_soft_pinned_objects=false",
            "--eviction_high_watermark_ratio=1.0",
            "--eviction_ratio=0.0",
        ]

    return _start("mooncake_master", command, config, processes, start)


def _start_holder(config: MooncakeConfig, master: str, processes: list[Guard], start: StartUp) -> str:
    program = executable(check_installed() / "mooncake_client")

    def command(port: int) -> list[str]:
        return [
            str(program),
            f"--host={config.host}",
            f"--port={port}",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={master}",
            f"--global_segment_size={config.segment_bytes}",
            f"--protocol={config.protocol}",
            f"--device_names={config.device_name}",
        ]

    return _start("mooncake_client", command, config, processes, start)


def _start(
    name: str,
    command: Callable[[int], list[str]],
    config: MooncakeConfig,
    processes: list[Guard],
    start: StartUp,
) -> str:
    """Start a program, which binds its port itself: on one that is free now, or is taken by then and another is tried.

    Appends it to `processes` and returns its `host:port`.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        port = _free_port(config.host)
        folder = Path(tempfile.mkdtemp(prefix=f"nemo_rl-{name}-"))
        variables = {"MC_TCP_BIND_ADDRESS": config.host}
        process = Guard(folder, command(port), start_timeout_s=start.timeout_s, environment=variables)
        try:
            with start.waiting_for(name):
                wait_for_port(process, config.host, port, timeout_s=start.timeout_s)
        except BaseException as error:
            process.close()
            if attempt == START_ATTEMPTS or not isinstance(error, ResourceError):
                raise
            logger.warning("%s; trying another port", error)
        else:
            processes.append(process)
            return f"{config.host}:{port}"
    raise AssertionError("unreachable")


def _free_port(host: str) -> int:
    try:
        return free_port(host)
    except OSError as error:
        raise ResourceError(f"data_plane.mooncake.host: {host!r} is not an address of this machine: {error}") from error


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ResourceError(f"data_plane.mooncake.master_address: expected host:port, got {address!r}")
    return host, int(port)
