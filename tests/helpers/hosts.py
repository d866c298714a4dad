"""Hosts for tests of several machines: each has its own network, processes, name and shared memory.

Hosts are namespaces, so they need root; cables lead from each of them to a bridge on the first. The file system is
shared, as on a cluster. A host ends with its first process, which ends with the process that made it; nothing is left.
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

from tests.helpers.runs import ROOT

__all__ = ["END_S", "Host", "HostRun", "RayHosts", "missing", "place", "ray_on_hosts"]

PREFIX, NETWORK = "10.77.0.", "/24"
BRIDGE = "bridge"
FIRST = "mount -t tmpfs tmpfs /dev/shm && hostname {name} && ip link set lo up && exec sleep infinity"
TOOLS = ("unshare", "nsenter", "setpriv", "ip")
WITH_ITS_MAKER = ("setpriv", "--pdeathsig", "KILL")
"""A command that ends when the process that started it does, also after a kill."""
RAY = Path(sys.executable).with_name("ray")
READY_S = 60.0
END_S = 800.0
"""A run of half a minute was seen to need over 300 s where four parts of the suite share two cores."""


def missing() -> str:
    """Return the reason that hosts cannot be made here, or an empty text."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which need root"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"hosts are network namespaces, made by {', '.join(lacking)}: not installed"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespaces may be made here: {tried.stderr.strip()}"


@dataclass
class Host:
    """One of the hosts."""

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
        """Return the words that run `command` on this host."""
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
        """Return the command lines of this host, by process id as the machine counts them."""
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

    def kill(self, *, but: Sequence[int] = ()) -> None:
        """Kill the processes of this host, each by its id."""
        for pid in self.processes().keys() - {*but}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        if hasattr(self, "holder"):
            self.holder.send_signal(signal.SIGKILL)
            self.holder.wait(READY_S)


@dataclass
class RayHosts:
    """A Ray cluster over the hosts; the first has its head."""

    hosts: tuple[Host, ...]
    folder: Path
    environment: Mapping[str, str]
    num_cpus: int
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def first(self) -> Host:
        return self.hosts[0]

    @property
    def second(self) -> Host:
        return self.hosts[1]

    @property
    def address(self) -> str:
        return f"{self.first.address}:6379"

    def restart_node(self, host: Host) -> None:
        """Restart Ray on a host that was cut off, whether or not Ray has noticed."""
        host.kill()
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
def connected_hosts(number: int) -> Iterator[tuple[Host, ...]]:
    """Start so many hosts: host-a, host-b and so on, each with a cable to the bridge of the first."""
    hosts = tuple(
        Host(f"host-{letter}", f"{PREFIX}{count}", f"cable-{letter}")
        for count, letter in enumerate("abcdef"[:number], start=1)
    )
    try:
        for host in hosts:
            host.start()
        first = hosts[0]
        first.run("ip", "link", "add", BRIDGE, "type", "bridge")
        first.run("ip", "link", "set", BRIDGE, "up")
        for host in hosts:
            end = f"to-{host.name}"
            link = ["ip", "link", "add", host.cable, "netns", str(host.pid), "type", "veth"]
            subprocess.run([*link, "peer", "name", end, "netns", str(first.pid)], check=True)
            first.run("ip", "link", "set", end, "master", BRIDGE, "up")
            host.run("ip", "addr", "add", f"{host.address}{NETWORK}", "dev", host.cable)
            host.plug_cable()
        yield hosts
    finally:
        for host in hosts:
            host.close()


@contextlib.contextmanager
def ray_on_hosts(folder: Path, *, number: int = 2, num_cpus: int = 5) -> Iterator[RayHosts]:
    """Start Ray on so many hosts; it ends with them."""
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    environment = {
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"},
        **{"RAY_worker_niceness": "0", "RAY_enable_worker_prestart": "false", "OMP_NUM_THREADS": "1"},
        "RAY_prestart_worker_first_driver": "false",
        # A busy machine takes longer than Ray's 30 s.
        "RAY_raylet_start_wait_time_s": "120",
    }
    with connected_hosts(number) as hosts:
        cluster = RayHosts(hosts, folder, environment, num_cpus)
        for host in hosts:
            cluster.start_node(host)
        yield cluster
    for process in cluster.nodes.values():
        process.wait(READY_S)


class HostRun:
    """`run_grpo.py` on the first host."""

    def __init__(self, cluster: RayHosts, recipe: Path, *overrides: dict[str, str]) -> None:
        given = {name: value for each in overrides for name, value in each.items()}
        words = [f"{name}={value}" for name, value in given.items()]
        command = [sys.executable, "examples/run_grpo.py", "--config", str(recipe), *words]
        command += [f"cluster.address={cluster.address}"]
        self.log = recipe.with_suffix(".log")
        self.process = cluster.first.popen(
            command, log=self.log, environment={**cluster.environment, "PYTHONPATH": str(ROOT)}
        )

    def end(self, timeout_s: float = END_S) -> tuple[int, str]:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"no end after {timeout_s:.0f} s:\n{self.log.read_text()[-4000:]}") from None
        return code, self.log.read_text()


def place(folder: Path, kind: str, rank: int) -> str:
    """Return the host that a worker was last on, by its log."""
    lines = (folder / "logs" / "workers" / f"{kind}_{rank}.log").read_text().splitlines()
    return [line for line in lines if " on host" in line][-1].rpartition(" on ")[2]
