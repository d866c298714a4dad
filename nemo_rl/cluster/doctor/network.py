"""Network and schedulers: interfaces, this machine's name, ports, a Ray cluster or Slurm that is there."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from nemo_rl.cluster.doctor.finding import Finding, green, red, yellow

__all__ = ["look_at_network", "look_at_schedulers"]

RAY_PORT = 6379
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEW_PORTS = 1000
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def look_at_network(*, ray_port: int = RAY_PORT) -> Iterator[Finding]:
    """What processes of several machines, and of one, meet over."""
    given = psutil.net_if_addrs()
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    addresses = {
        name: [each.address for each in given.get(name, ()) if each.family == socket.AF_INET] for name in sorted(up)
    }
    yield _loopback(addresses)
    shown = "; ".join(f"{name} {', '.join(found)}" for name, found in addresses.items() if found)
    yield green("interfaces", shown or "none with an IPv4 address")
    yield from _named_interfaces(addresses)
    yield _own_name(addresses)
    yield _port(ray_port)
    yield _free_ports()


def look_at_schedulers() -> Iterator[Finding]:
    """Ray and Slurm, where they are."""
    address = os.environ.get("RAY_ADDRESS", "")
    yield green("Ray", f"RAY_ADDRESS is {address}" if address else "each run starts its own")
    have = [tool for tool in ("sbatch", "srun", "scontrol") if shutil.which(tool) is not None]
    if not have:
        yield green("Slurm", "not here: nemo-rl launch slurm --render still writes the job")
    elif len(have) < 3:
        yield yellow("Slurm", f"only {', '.join(have)}", "install Slurm's client tools")
    else:
        job = os.environ.get("SLURM_JOB_ID", "")
        yield green("Slurm", f"inside job {job}" if job else "its commands are here")


def _loopback(addresses: dict[str, list[str]]) -> Finding:
    if not any(each.startswith("127.") for found in addresses.values() for each in found):
        advice = "ip link set lo up: processes of one machine meet there"
        return red("loopback", "no interface with 127.0.0.1", advice)
    return green("loopback", "127.0.0.1")


def _named_interfaces(addresses: dict[str, list[str]]) -> Iterator[Finding]:
    for name in VARIABLES:
        value = os.environ.get(name)
        wanted = [each.lstrip("=^") for each in value.split(",")] if value else []
        if wanted and not any(have.startswith(each) for each in wanted for have in addresses):
            yield red(
                name, f"names {value}, which is no interface that is up", f"unset it, or name one of {[*addresses]}"
            )


def _own_name(addresses: dict[str, list[str]]) -> Finding:
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        return yellow(
            "host name",
            f"{name} resolves to nothing",
            "add it to /etc/hosts; gloo and Ray look it up where no address is given",
        )
    own = {each for given in addresses.values() for each in given}
    if found not in own and not found.startswith("127."):
        return yellow(
            "host name", f"{name} is {found}, which is not an address of this machine", "correct /etc/hosts or DNS"
        )
    return green("host name", f"{name} is {found}")


def _port(port: int) -> Finding:
    name = f"port {port}"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        advice = "a Ray head is running, or another program; ray.sub takes another with RAY_PORT"
        return yellow(name, f"taken: {error.strerror}", advice)
    return green(name, "free")


def _free_ports() -> Finding:
    try:
        first, last = map(int, PORT_RANGE.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return green("ports", "range unknown")
    if last - first < FEW_PORTS:
        return yellow("ports", f"{first} to {last}", "widen net.ipv4.ip_local_port_range: each process takes a dozen")
    return green("ports", f"{first} to {last}")
