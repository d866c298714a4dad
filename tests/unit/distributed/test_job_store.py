"""A job's store: on a port that nobody can take meanwhile, reachable where the ranks are."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import pytest

from nemo_rl.distributed.job_store import choose_interface, open_client, open_server, reserve_port

TIMEOUT = timedelta(seconds=60)


def test_a_reserved_port_cannot_be_taken_before_its_store_opens() -> None:
    port = reserve_port("127.0.0.1")
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port)).close()
    server = open_server("127.0.0.1", port, world_size=2, timeout=TIMEOUT, waits=False)
    client = open_client("127.0.0.1", port, world_size=2, timeout=TIMEOUT, waits=False)
    client.set("word", "carried")
    assert (server.port, server.get("word")) == (port, b"carried")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_store_of_this_machine_listens_on_loopback_alone(name: str) -> None:
    store = open_server(name, 0, world_size=1, timeout=TIMEOUT, waits=False)
    places = [s.laddr.ip for s in psutil.Process().net_connections("tcp") if s.laddr.port == store.port and not s.raddr]
    assert places == ["127.0.0.1"]


def test_collectives_stay_on_loopback_unless_an_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    choose_interface("nowhere.invalid")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    choose_interface("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "eth7")


def test_gloo_takes_the_interface_that_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    reached = {
        each.address: name
        for name, given in psutil.net_if_addrs().items()
        for each in given
        if each.family == socket.AF_INET
    }
    own, interface = max(reached.items())
    choose_interface(own)
    assert os.environ["GLOO_SOCKET_IFNAME"] in (interface, "lo")
    assert own.startswith("127.") or "NCCL_SOCKET_IFNAME" not in os.environ
