"""A job's store: on a port that nobody can take meanwhile, reachable where the ranks are."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import pytest

from nemo_rl.distributed.job_store import open_client, open_server, reserve_port, stay_on_loopback

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
    stay_on_loopback("10.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    stay_on_loopback("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "eth7")
