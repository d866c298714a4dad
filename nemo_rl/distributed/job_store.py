"""The store where the ranks of a job meet: rank 0's, on a socket that is bound before its port is announced.

`reserve_port` runs in the process of rank 0, `open_server` takes its socket over there, `open_client` is what the other
ranks do. Invariant: a reserved port is never given back in between, so no other program can take it, and the store
listens on the address that the ranks use, not on every interface.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address

import psutil
import torch.distributed as dist

__all__ = [
    "adopt_listener",
    "choose_interface",
    "few_connections",
    "open_client",
    "open_server",
    "own_address",
    "reserve_port",
]

LOOPBACK_INTERFACE = "lo"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_listeners: dict[int, socket.socket] = {}
"""Sockets of this process that no store has taken over yet, by port."""


def reserve_port(address: str) -> int:
    """Bind a port of this machine for a store of this process."""
    return adopt_listener(_listen(address, 0))


def adopt_listener(listener: socket.socket) -> int:
    """Reserve a port as `reserve_port` does, for a listening socket that another process has bound."""
    port: int = listener.getsockname()[1]
    _listeners[port] = listener
    return port


def open_server(address: str, port: int, *, world_size: int, timeout: timedelta, waits: bool) -> dist.TCPStore:
    """Return the store on a reserved port, or on any other that is free now; 0 lets the system choose.

    Args:
        waits: until every rank has connected.
    """
    listener = _listeners.pop(port, None) or _listen(address, port)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=waits,
        master_listen_fd=listener.detach(),
    )


def open_client(address: str, port: int, *, world_size: int, timeout: timedelta, waits: bool) -> dist.TCPStore:
    return dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=waits)


def choose_interface(address: str) -> None:
    """Keep gloo on the interface by which this process reaches the job's store, unless one is named already.

    By itself gloo takes whatever this machine's own name resolves to, which other machines often cannot reach. NCCL
    looks for itself, but for a job that meets on loopback.
    """
    if address.startswith("127."):
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, LOOPBACK_INTERFACE)
    elif (found := _interface_towards(address)) is not None:
        os.environ.setdefault(INTERFACE_VARIABLES[0], found)


def own_address(towards: str) -> str:
    """Return the address of this machine on the network by which it reaches another one.

    Raises:
        OSError: it does not reach it.
    """
    ((family, _, _, _, place), *_) = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # nothing is sent
        return str(probe.getsockname()[0])


def _interface_towards(address: str) -> str | None:
    """Return the interface that reaches the address, or None where it cannot be found out; then gloo chooses."""
    try:
        own = own_address(address)
    except OSError:
        return None
    for name, given in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in given):
            return name
    return None


def _listen(address: str, port: int) -> socket.socket:
    """Names are not resolved: what a machine calls itself may be an address that only it can reach."""
    try:
        number = ip_address(address)
    except ValueError:
        return socket.create_server(("127.0.0.1" if address == "localhost" else "", port))
    family = socket.AF_INET6 if number.version == 6 else socket.AF_INET
    return socket.create_server((address, port), family=family)


FULLY_CONNECTED = 4
"""Most ranks of a gloo group in which each is connected with each."""


@contextmanager
def few_connections(num_ranks: int) -> Iterator[bool]:
    """Let gloo groups that are made inside, of more than a few ranks, connect two ranks when they first talk; yield
    whether they do.

    A rank that waits for a connection which a failed one never makes cannot be woken by an abort, as one can that waits
    for bytes. So ranks that need each other in a step talk once, at the start.
    """
    name, is_large = "TORCH_GLOO_LAZY_INIT", num_ranks > FULLY_CONNECTED
    before = os.environ.get(name)
    os.environ[name] = "1" if is_large else "0"
    try:
        yield is_large
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
