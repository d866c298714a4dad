"""Two hosts on this machine: each with its own network, processes, name and shared memory, and one cable between them.

Made of namespaces, so it needs root. The file system is shared, as on a cluster. A host ends with its first process,
which ends with the one that made it; nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PREFIX, NETWORK = "10.77.0.", "/24"
FIRST = "mount -t tmpfs tmpfs /dev/shm && hostname {name} && ip link set lo up && exec sleep infinity"
TOOLS = ("unshare", "nsenter", "setpriv", "ip")
WITH_ITS_MAKER = ("setpriv", "--pdeathsig", "KILL")
"""A command that ends when the process that started it does, also after a kill."""
RAY = Path(sys.executable).with_name("ray")
READY_S = 60.0


def missing() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which need root"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"hosts are network namespaces, made by {', '.join(lacking)}: not installed"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespaces may be made here: {tried.stderr.strip()}"


@dataclass
class Host:
    """One of the two."""

    name: str
    address: str
    cable: str
    holder: subprocess.Popen[bytes] = field(init=False)
    pid: int = field(init=False)

    def start(self) -> None:
        made = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        self.holder = subprocess.Popen(
            [*WITH_ITS_MAKER, *made, "sh", "-c", FIRST.format(name=self.name)],
            stdin=subprocess.DEVNULL,
        )
        give_up = time.monotonic() + READY_S
        while time.monotonic() < give_up:
            for child in psutil.Process(self.holder.pid).children():
                if child.name() == "sleep":
                    self.pid = child.pid
                    return
            time.sleep(0.05)
        raise AssertionError(f"{self.name} did not come up")

    def enter(self, command: Sequence[str]) -> list[str]:
        """`command` as it runs on this host."""
        return ["nsenter", "--target", str(self.pid), "--all", f"--wd={os.getcwd()}", *command]

    def run(self, *command: str) -> str:
        done = subprocess.run(self.enter(command), capture_output=True, text=True, timeout=READY_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def popen(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                self.enter(command), stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )

    def processes(self) -> dict[int, str]:
        """Process ids of this host, as the machine counts them -> command lines."""
        space, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
        return {pid: command for pid, command in found.items() if pid != self.pid and command}

    def shared_memory(self) -> list[str]:
        return sorted(os.listdir(f"/proc/{self.pid}/root/dev/shm"))

    def pull_cable(self) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "ip", "link", "set", self.cable, "down"], check=True)

    def plug_cable(self) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "ip", "link", "set", self.cable, "up"], check=True)

    def close(self) -> None:
        if hasattr(self, "holder"):
            self.holder.send_signal(signal.SIGKILL)
            self.holder.wait(READY_S)


@dataclass
class RayHosts:
    """A Ray cluster over the hosts; `first` has its head."""

    first: Host
    second: Host
    folder: Path
    environment: Mapping[str, str]
    num_cpus: int
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.first.address}:6379"

    def restart_node(self, host: Host) -> None:
        """Ray anew on a host that was cut off, whether Ray has noticed that or not."""
        for pid in host.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[host.name].wait(READY_S)
        self.start_node(host)

    def start_node(self, host: Host) -> None:
        way = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.folder / 'ray'}"]
        way = way if host is self.first else [f"--address={self.address}"]
        size = [f"--num-cpus={self.num_cpus}", "--num-gpus=0", "--object-store-memory=300000000"]
        command = [str(RAY), "start", "--block", f"--node-ip-address={host.address}", *way, *size]
        log = self.folder / f"{host.name}.log"
        self.nodes[host.name] = host.popen(command, log=log, environment=self.environment)
        give_up = time.monotonic() + 3 * READY_S
        while "will now block forever" not in log.read_text(errors="replace"):
            assert self.nodes[host.name].poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.1)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them."""
    hosts = Host("host-a", f"{PREFIX}1", "cable-a"), Host("host-b", f"{PREFIX}2", "cable-b")
    try:
        for host in hosts:
            host.start()
        first, second = hosts
        link = ["ip", "link", "add", first.cable, "netns", str(first.pid), "type", "veth"]
        subprocess.run([*link, "peer", "name", second.cable, "netns", str(second.pid)], check=True)
        for host in hosts:
            host.run("ip", "addr", "add", f"{host.address}{NETWORK}", "dev", host.cable)
            host.plug_cable()
        yield hosts
    finally:
        for host in hosts:
            host.close()


@contextlib.contextmanager
def ray_on_two_hosts(folder: Path, *, num_cpus: int = 5) -> Iterator[RayHosts]:
    """Ray on both; it ends with the hosts."""
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    environment = {
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"},
        **{"RAY_worker_niceness": "0", "RAY_enable_worker_prestart": "false", "OMP_NUM_THREADS": "1"},
        "RAY_prestart_worker_first_driver": "false",
    }
    with two_hosts() as (first, second):
        cluster = RayHosts(first, second, folder, environment, num_cpus)
        cluster.start_node(first)
        cluster.start_node(second)
        yield cluster
    for process in cluster.nodes.values():
        process.wait(READY_S)
