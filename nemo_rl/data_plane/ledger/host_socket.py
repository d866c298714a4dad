"""The ledger behind a loopback socket: the host for torchrun and plain processes on one machine, without Ray.

The owner runs a `LedgerServer` in threads of its process; others connect with port and token. A frame is a four-byte
length and a msgpack value, so nothing that arrives is ever executed.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping

import msgpack

from nemo_rl.data_plane.address import Handles, LedgerAddress
from nemo_rl.data_plane.ledger.host import LedgerHost, LedgerService, final_loss, read_reply
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, DataPlaneTimeout, LedgerLost, to_record
from nemo_rl.utils.files import receive_exactly, time_left

__all__ = ["LedgerServer", "SocketLedgerHost"]

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_FRAME_BYTES = 64 << 20
"""Far above any request: a million rows are cleared with about 40 MB of keys."""
MAX_HELLO_BYTES = 4096
HELLO_TIMEOUT_S = 5.0
_LENGTH = struct.Struct("<I")


class LedgerServer:
    """Serves one ledger to the processes of this machine that know the token."""

    def __init__(self, service: LedgerService) -> None:
        self._service = service
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((LOOPBACK, 0))
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="ledger-accept", daemon=True)
        self._thread.start()

    @property
    def address(self) -> LedgerAddress:
        port: int = self._listener.getsockname()[1]
        return LedgerAddress(
            kind="socket", run_id=self._service.run_id, port=port, token=self._token, process_id=os.getpid()
        )

    def close(self) -> None:
        """End the service: callers meet a closed connection. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            open_now = dict(self._connections)
        self._service.close()
        _shut(self._listener)
        self._thread.join()
        for connection in open_now:
            _shut(connection)
        for thread in open_now.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="ledger-serve", daemon=True)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if self._is_welcome(connection):
                    while True:
                        request = _receive(connection, limit=MAX_FRAME_BYTES, deadline=None)
                        _send(connection, self._answer(request))
        except (OSError, EOFError, ValueError) as error:
            logger.debug("a ledger connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _is_welcome(self, connection: socket.socket) -> bool:
        hello = _receive(connection, limit=MAX_HELLO_BYTES, deadline=time.monotonic() + HELLO_TIMEOUT_S)
        token = hello.get("token") if isinstance(hello, dict) else None
        is_welcome = isinstance(token, str) and hmac.compare_digest(token.encode(), self._token.encode())
        refusal = {"error": to_record(DataPlaneClosed("the ledger refused the token; use the owner's address"))}
        _send(connection, {"ok": {}} if is_welcome else refusal)
        connection.settimeout(None)
        return is_welcome

    def _answer(self, request: object) -> Mapping[str, object]:
        if not isinstance(request, dict):
            return {"error": to_record(DataPlaneError(f"malformed request of type {type(request).__name__}"))}
        try:
            return self._service.handle(request, timeout_s=float(request["timeout_s"]))
        except DataPlaneError as error:
            return {"error": to_record(error)}


class SocketLedgerHost(LedgerHost):
    """One client's way to a `LedgerServer`; idle connections are kept for the next call."""

    def __init__(self, address: LedgerAddress, *, server: LedgerServer | None = None) -> None:
        """Args:
        server: given by the owner, whose close ends it.
        """
        self._address, self._server = address, server
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def address(self) -> LedgerAddress:
        return self._address

    def call(self, op: str, args: Args, *, timeout_s: float, handles: Handles | None = None) -> Reply:
        request = {"run": self._address.run_id, "op": op, "args": args, "handles": handles}
        with final_loss():
            return read_reply(self.exchange(request, timeout_s=timeout_s))

    def exchange(self, request: Mapping[str, object], *, timeout_s: float) -> Reply:
        """Send one request and return the reply, which may carry an error.

        Raises:
            LedgerLost: the ledger's process or the connection is gone; it may have served the request.
        """
        deadline = time.monotonic() + timeout_s
        connection = None
        try:
            connection = self._take(deadline)
            connection.settimeout(time_left(deadline))
            _send(connection, {**request, "timeout_s": timeout_s})
            reply = _receive(connection, limit=MAX_FRAME_BYTES, deadline=deadline)
        except TimeoutError as error:
            _drop(connection)
            raise DataPlaneTimeout(f"the ledger's socket did not answer within {timeout_s:.1f} s") from error
        except (OSError, EOFError) as error:
            _drop(connection)
            raise LedgerLost(
                f"run {self._address.run_id!r}: the ledger's socket is gone (process {self._address.process_id}): "
                f"{error}"
            ) from error
        except ValueError as error:
            _drop(connection)
            raise DataPlaneError(f"the ledger's socket cannot carry this call: {error}") from error
        except BaseException:
            _drop(connection)
            raise
        self._put_back(connection)
        assert isinstance(reply, dict), f"malformed reply of type {type(reply).__name__}"
        return reply

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self.drop_idle()
        if self._server is not None:
            self._server.close()

    def drop_idle(self) -> None:
        """Close the connections that no call uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            _drop(connection)

    def _take(self, deadline: float) -> socket.socket:
        with self._lock:
            if self._is_closed:
                raise DataPlaneClosed(f"this client of run {self._address.run_id!r} is closed")
            if self._idle:
                return self._idle.pop()
        connection = socket.create_connection((LOOPBACK, self._address.port), timeout=time_left(deadline))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send(connection, {"token": self._address.token})
            welcome = _receive(connection, limit=MAX_HELLO_BYTES, deadline=deadline)
            assert isinstance(welcome, dict), "malformed welcome"
            read_reply(welcome)
        except (DataPlaneClosed, ValueError, AssertionError) as error:
            connection.close()
            # Another process may have got the port of a ledger that is gone.
            raise LedgerLost(f"run {self._address.run_id!r}: port {self._address.port} refused: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _put_back(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()


def _send(connection: socket.socket, value: Mapping[str, object]) -> None:
    content = msgpack.packb(value)
    if len(content) > MAX_FRAME_BYTES:
        raise ValueError(f"a ledger frame of {len(content)} bytes is over the limit of {MAX_FRAME_BYTES}")
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket, *, limit: int, deadline: float | None) -> object:
    (size,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline=deadline))
    if size > limit:
        raise ValueError(f"a ledger frame of {size} bytes is over the limit of {limit}")
    return msgpack.unpackb(receive_exactly(connection, size, deadline=deadline))


def _drop(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()


def _shut(connection: socket.socket) -> None:
    """Wake a thread that is blocked on the socket."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("socket was closed already: %s", error)
    connection.close()
