"""The ledger behind a loopback socket: token, run id, frame limits, deadlines, and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.ledger.host import LedgerService, build_ledger
from nemo_rl.data_plane.ledger.host_socket import MAX_FRAME_BYTES, LedgerServer, SocketLedgerHost
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, DataPlaneTimeout, PartitionNotFound


@pytest.fixture
def service() -> LedgerService:
    return LedgerService(build_ledger(DataPlaneConfig(impl="noop"), run_id="r", validate=True))


@pytest.fixture
def server(service: LedgerService) -> Iterator[LedgerServer]:
    before = set(threading.enumerate())
    server = LedgerServer(service)
    yield server
    server.close()
    assert set(threading.enumerate()) <= before


def test_errors_cross_the_socket_with_their_kind(server: LedgerServer) -> None:
    host = SocketLedgerHost(server.address)
    with pytest.raises(PartitionNotFound, match="'nowhere'"):
        host.call("describe", {"partition": "nowhere"}, timeout_s=5)
    with pytest.raises(DataPlaneError, match="could not serve 'nonsense'"):
        host.call("nonsense", {}, timeout_s=5)
    assert host.call("stats", {}, timeout_s=5)["live_rows"] == 0
    host.close()
    with pytest.raises(DataPlaneClosed):
        host.call("stats", {}, timeout_s=5)


def test_a_wrong_token_or_run_is_refused(server: LedgerServer) -> None:
    for change, message in (({"token": "0" * 32}, "refused the token"), ({"run_id": "old"}, "serves run 'r'")):
        host = SocketLedgerHost(dataclasses.replace(server.address, **change))
        with pytest.raises(DataPlaneClosed, match=message):
            host.call("stats", {}, timeout_s=5)
        host.close()


def test_bytes_that_are_no_frames_end_only_their_connection(server: LedgerServer) -> None:
    for content in (
        b"\x00",
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        b"GET / HTTP/1.1\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.address.port), timeout=5) as raw:
            raw.sendall(content)
            raw.settimeout(10)
            with contextlib.suppress(OSError):  # the server may have closed the connection already
                raw.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                raw.recv(4096)
    host = SocketLedgerHost(server.address)
    assert host.call("stats", {}, timeout_s=5)["live_rows"] == 0
    host.close()


def test_a_slow_ledger_is_a_timeout_and_the_next_call_works(server: LedgerServer, service: LedgerService) -> None:
    host = SocketLedgerHost(server.address)
    host.call("stats", {}, timeout_s=5)
    with service._lock:
        started = time.monotonic()
        with pytest.raises(DataPlaneTimeout):
            host.call("stats", {}, timeout_s=0.3)
        assert time.monotonic() - started < 3
    assert host.call("stats", {}, timeout_s=5)["live_rows"] == 0
    host.close()


def test_callers_meet_a_closed_service(server: LedgerServer) -> None:
    host = SocketLedgerHost(server.address)
    host.call("stats", {}, timeout_s=5)
    server.close()
    for _ in range(2):
        with pytest.raises(DataPlaneClosed, match="is gone"):
            host.call("stats", {}, timeout_s=5)
    host.close()


def test_threads_share_a_host(server: LedgerServer) -> None:
    host = SocketLedgerHost(server.address)
    found: list[object] = []
    threads = [
        threading.Thread(
            target=lambda: found.extend(host.call("stats", {}, timeout_s=5)["live_rows"] for _ in range(20))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 80
    host.close()
