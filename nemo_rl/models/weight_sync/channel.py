"""`BucketSender` and `BucketReader`: a policy worker and engines walk the buckets of a refit without the driver.

The sender listens; each engine that reads its buckets holds one connection. Buckets lie in slots of memory that both
share: of the GPU (`IpcHandle`), or of a file without a name, whose bytes a reader on another machine gets over its
connection. Invariant: a slot is written only when every reader has read what lay there; a reader that is gone is waited
for no longer, and an error of the sender reaches the readers as text. Connections and memory of a process that dies go
with it, so nothing is left.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from nemo_rl.errors import CollectiveTimeout, WorkerError
from nemo_rl.models.weight_sync.transport import IpcHandle

__all__ = ["BucketReader", "BucketSender", "ChannelOffer", "ChannelRequest", "ChannelSpec", "SharedSlots"]

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
"""Bytes that name a channel, at the head of its memory and of each connection."""
HEAD = struct.Struct("<Bq")


class _Kind(IntEnum):
    READY, READ, ERROR = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSpec:
    """The settings by which a reader opens a channel."""

    address: str
    port: int
    token: bytes
    num_buckets: int
    slot_bytes: int
    num_slots: int
    path: str | None
    """File of the sender's process that holds the slots; None where they are memory of a GPU."""
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelRequest:
    """The channels that a refit needs."""

    address: str
    """Address of policy rank 0, as the engines reach it; other ranks take theirs on the same network."""
    on_device: bool
    """Every rank offers its buckets, in the memory of its GPU; else rank 0 alone, on the CPU."""
    timeout_s: float
    holds_all: bool = False
    """All buckets are kept, for engines that read them one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelOffer:
    """Channel and memory by which engines read the buckets of one rank."""

    spec: ChannelSpec
    handle: IpcHandle | None
    """Slots in the memory of a GPU; None where they are on the CPU."""


class SharedSlots:
    """Memory of a file without a name, which other processes of this machine can map."""

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._file = os.memfd_create("nemo_rl_refit")
        os.ftruncate(self._file, TOKEN_BYTES + num_slots * slot_bytes)
        memory = mmap.mmap(self._file, 0)
        memory[:TOKEN_BYTES] = self.token
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.slots = torch.frombuffer(memory, dtype=torch.uint8, offset=TOKEN_BYTES)

    def close(self) -> None:
        """Free the file; the memory goes with the last tensor over it. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    takes_bytes: bool = False
    """True for a reader that cannot map the memory."""
    num_read: int = field(default=0)


class BucketSender:
    """The policy worker's side.

    Args:
        address: of this machine, as the engines reach it.
        memory: the slots; None where they are memory of a GPU.
    """

    def __init__(
        self,
        address: str,
        *,
        num_buckets: int,
        num_slots: int,
        slot_bytes: int,
        timeout_s: float,
        memory: SharedSlots | None,
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._memory, self._readers = memory, list[_Connection]()
        self._num_sent = 0
        self.spec = ChannelSpec(
            address=address,
            port=self._listener.getsockname()[1],
            token=secrets.token_bytes(TOKEN_BYTES) if memory is None else memory.token,
            num_buckets=num_buckets,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            path=None if memory is None else memory.path,
            timeout_s=timeout_s,
        )

    def accept(self, num_readers: int) -> None:
        """Wait for the connections of readers, which all have begun to connect.

        Raises:
            CollectiveTimeout: not all have come in time.
        """
        deadline = time.monotonic() + self.spec.timeout_s
        while len(self._readers) < num_readers:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError as error:
                raise CollectiveTimeout(
                    f"refit: {len(self._readers)} of {num_readers} engines came in {self.spec.timeout_s:.0f} s",
                    stage="refit",
                ) from error
            self._connected(connection)

    def _connected(self, connection: socket.socket) -> _Connection | None:
        """Return the reader; None for anybody else."""
        connection.settimeout(self.spec.timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            if secrets.compare_digest(_exactly(connection, TOKEN_BYTES), self.spec.token):
                reader = _Connection(connection, takes_bytes=_exactly(connection, 1) == b"\1")
                self._readers.append(reader)
                return reader
        connection.close()
        return None

    def slot(self) -> int:
        """Wait until every reader has read what lies in the slot of the next bucket; return its number."""
        for reader in list(self._readers):
            while reader in self._readers and reader.num_read <= self._num_sent - self.spec.num_slots:
                self._hear(reader)
        return self._num_sent % self.spec.num_slots

    def send(self, num_bytes: int) -> None:
        place = self._num_sent % self.spec.num_slots * self.spec.slot_bytes
        self._num_sent += 1
        for reader in list(self._readers):
            self._tell(reader, num_bytes, place)

    def send_error(self, text: str) -> None:
        """End the refit of every reader."""
        raw = text.encode()
        for reader in list(self._readers):
            with suppress(OSError):
                reader.socket.sendall(HEAD.pack(_Kind.ERROR, len(raw)) + raw)

    def close(self) -> None:
        """Close all connections, which ends readers that still wait. Idempotent."""
        # A thread that waits for a connection hears of it by this alone.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for reader in self._readers:
            reader.socket.close()
        self._readers.clear()
        if self._memory is not None:
            self._memory.close()

    def serve(self, sizes: Sequence[int]) -> None:
        """Give all buckets, each in its own slot, to readers that come until `close`, beside what this process
        does."""
        self._listener.settimeout(None)
        threading.Thread(target=self._serve, args=(sizes,), name="refit-buckets", daemon=True).start()

    def _serve(self, sizes: Sequence[int]) -> None:
        while True:
            try:
                reader = self._connected(self._listener.accept()[0])
            except OSError:
                return
            if reader is None:
                continue
            for number, size in enumerate(sizes):
                self._tell(reader, size, number * self.spec.slot_bytes)
            while reader in self._readers and reader.num_read < len(sizes):
                self._hear(reader)

    def _tell(self, reader: _Connection, num_bytes: int, place: int) -> None:
        try:
            reader.socket.sendall(HEAD.pack(_Kind.READY, num_bytes))
            if reader.takes_bytes and self._memory is not None:
                reader.socket.sendall(self._memory.slots[place : place + num_bytes].numpy().data)
        except OSError as error:
            self._lose(reader, error)

    def _hear(self, reader: _Connection) -> None:
        try:
            _receive(reader.socket)
            reader.num_read += 1
        except OSError as error:
            self._lose(reader, error)

    def _lose(self, reader: _Connection, error: OSError) -> None:
        reader.socket.close()
        # `close` may have dropped it meanwhile, in another thread.
        with suppress(ValueError):
            self._readers.remove(reader)
            logger.warning("refit: an engine no longer reads its buckets: %s", error)


class BucketReader:
    """An engine's side."""

    def __init__(self, spec: ChannelSpec) -> None:
        """Connect.

        Raises:
            CollectiveTimeout: the sender is gone or late.
        """
        self._spec, self._num_read = spec, 0
        self._slots = None if spec.path is None else _mapped(spec.path, spec.token)
        self._takes_bytes = spec.path is not None and self._slots is None
        try:
            self._socket = socket.create_connection((spec.address, spec.port), timeout=spec.timeout_s)
            self._socket.sendall(spec.token + bytes([self._takes_bytes]))
        except OSError as error:
            raise self._lost(error) from error

    @property
    def num_missing(self) -> int:
        return self._spec.num_buckets - self._num_read

    def next(self) -> torch.Tensor | None:
        """Wait for the next bucket and return it, uint8; None where it lies in the memory of a GPU.

        Raises:
            WorkerError: the policy failed, with its text. CollectiveTimeout: it is gone or late.
        """
        try:
            kind, size = _receive(self._socket)
            if kind is _Kind.ERROR:
                text = _exactly(self._socket, size).decode()
                raise WorkerError(f"the policy could not send weights: {text}", stage="refit")
            if self._takes_bytes:
                return torch.frombuffer(_exactly(self._socket, size), dtype=torch.uint8)
        except OSError as error:
            raise self._lost(error) from error
        if self._slots is None:
            return None
        place = self._num_read % self._spec.num_slots * self._spec.slot_bytes
        return self._slots[place : place + size]

    def done(self) -> None:
        """Let the sender write over the bucket.

        Raises:
            CollectiveTimeout: it is gone.
        """
        self._num_read += 1
        try:
            self._socket.sendall(HEAD.pack(_Kind.READ, 0))
        except OSError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Leave the channel. Idempotent."""
        self._socket.close()

    def _lost(self, error: OSError) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"refit: this engine lost the other members or waited {self._spec.timeout_s:.0f} s: {error}", stage="refit"
        )


def _mapped(path: str, token: bytes) -> torch.Tensor | None:
    """Return the slots of another process; None where it is of another machine, or hides its files."""
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
    if memory[:TOKEN_BYTES] != token:
        return None
    return torch.frombuffer(memory, dtype=torch.uint8, offset=TOKEN_BYTES)


def _receive(connection: socket.socket) -> tuple[_Kind, int]:
    kind, size = HEAD.unpack(_exactly(connection, HEAD.size))
    return _Kind(kind), size


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """Return so many bytes; raise OSError where the other side is gone or late."""
    found, done = bytearray(size), 0
    view = memoryview(found)
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("the connection was closed")
        done += count
    return found
