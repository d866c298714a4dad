"""Transports of the bytes of a refit between processes: `IpcHandle` on one GPU, `RefitGroup` between any processes.

A handle is GPU memory of one process, opened by another one on the same GPU: plain bytes and numbers, so nothing has to
be unpickled. It opens only on the GPU it was made on, in another process, while its maker keeps the memory. A group is
policy rank 0 and the engines in their own process group: rank 0 calls `send`, the others `receive`, bucket by
bucket. A status word comes before every bucket, so an error of the sender reaches the receivers as text; every wait
ends with the group's deadline.

`BucketSender` and `BucketReader`: a policy worker and engines walk the buckets of a refit without the driver.

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
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from nemo_rl.distributed.job_store import choose_interface, open_client, open_server
from nemo_rl.errors import CollectiveTimeout, WorkerError
from nemo_rl.torch_private import nccl_options

__all__ = [
    "BucketReader",
    "BucketSender",
    "ChannelOffer",
    "ChannelRequest",
    "ChannelSpec",
    "IpcHandle",
    "RefitGroup",
    "RefitGroupSpec",
    "SharedSlots",
    "device_id",
    "open_store",
]

logger = logging.getLogger(__name__)


def device_id(device: torch.device) -> str:
    """Return a name that two processes share only if they share the device: the GPU's UUID, or host and `cpu`."""
    if device.type != "cuda":
        return f"{socket.gethostname()}-cpu"
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@dataclass(frozen=True, kw_only=True, slots=True)
class IpcHandle:
    """The numbers that CUDA and torch need to map the memory of another process."""

    device_id: str
    memory: bytes
    num_bytes: int
    offset: int
    """Offset of the storage in CUDA's own allocation."""
    counter: bytes
    """Name of the shared memory in which torch counts who still uses the storage."""
    counter_offset: int
    event: bytes
    needs_event: bool

    @classmethod
    def share(cls, buffer: torch.Tensor) -> IpcHandle:
        """Return a handle to the whole storage of a CUDA tensor, which must not lie in an expandable segment.

        Raises:
            RuntimeError: CUDA cannot export this memory.
        """
        shared = buffer.untyped_storage()._share_cuda_()
        _, memory, num_bytes, offset, counter, counter_offset, event, needs_event = shared
        return cls(
            device_id=device_id(buffer.device),
            memory=memory,
            num_bytes=num_bytes,
            offset=offset,
            counter=counter,
            counter_offset=counter_offset,
            event=event,
            needs_event=needs_event,
        )

    def open(self, device: torch.device) -> torch.Tensor:
        """Return `[num_bytes]` uint8 that shares the maker's memory; drop it before the maker does.

        Raises:
            WorkerError: `device` is another GPU.
        """
        if device_id(device) != self.device_id:
            raise WorkerError(
                f"a CUDA-IPC handle of {self.device_id} cannot be opened on {device_id(device)}; "
                "set policy.generation.refit_transport=payload",
                stage="refit",
            )
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index if device.index is not None else torch.cuda.current_device(),
            self.memory,
            self.num_bytes,
            self.offset,
            self.counter,
            self.counter_offset,
            self.event,
            self.needs_event,
        )
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload, no-any-return]


STATUS_OK, STATUS_ERROR = 0, 1
SENDER = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitGroupSpec:
    """The settings of one member of a refit group."""

    address: str
    port: int
    """Port of the store that rank 0 has opened."""
    rank: int
    """0 for the policy, 1 and up for the engines."""
    world_size: int
    backend: str
    """`gloo` moves CPU buffers between any processes; `nccl` GPU buffers, where every member has a GPU of its own."""
    timeout_s: float


def open_store(address: str, world_size: int, *, timeout_s: float) -> dist.TCPStore:
    """Return the store of a group, on a port that is free; rank 0 keeps it as long as the group lives."""
    return open_server(address, 0, world_size=world_size, timeout=timedelta(seconds=timeout_s), waits=False)


class RefitGroup:
    """One member's side of the process group of a refit."""

    def __init__(self, spec: RefitGroupSpec, *, device: torch.device, store: dist.Store | None = None) -> None:
        """(collective) Join the group; all members construct it.

        Args:
            device: of this member; buffers are there with `nccl`.
            store: rank 0 passes the one that it has opened.
        """
        self._spec = spec
        self._timeout = timedelta(seconds=spec.timeout_s)
        self.device = device if spec.backend == "nccl" else torch.device("cpu")
        choose_interface(spec.address)
        if store is None:
            store = open_client(spec.address, spec.port, world_size=spec.world_size, timeout=self._timeout, waits=True)
        self._store = store
        if spec.backend == "nccl":
            options = nccl_options(self._timeout)
            self._group: dist.ProcessGroup = dist.ProcessGroupNCCL(store, spec.rank, spec.world_size, options)  # type: ignore[assignment]
        else:
            self._group = dist.ProcessGroupGloo(store, spec.rank, spec.world_size, self._timeout)  # type: ignore[assignment]

    def send(self, buffer: torch.Tensor) -> None:
        """(rank 0, while the others `receive`) Send one bucket, uint8 on `device`."""
        self._broadcast(torch.tensor([STATUS_OK, buffer.numel()], device=self.device))
        self._broadcast(buffer)

    def send_error(self, text: str) -> None:
        """(rank 0, while the others `receive`) End the refit on all members."""
        raw = torch.frombuffer(bytearray(text.encode() or b"?"), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([STATUS_ERROR, raw.numel()], device=self.device))
        self._broadcast(raw)

    def receive(self, buffer: torch.Tensor) -> torch.Tensor:
        """(ranks above 0) Receive the next bucket, at the head of `buffer`.

        Raises:
            WorkerError: the sender failed, with its text. CollectiveTimeout: it did not send in time.
        """
        word = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._broadcast(word)
        status, size = (int(value) for value in word.tolist())
        if status == STATUS_ERROR:
            text = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._broadcast(text)
            raise WorkerError(f"the policy could not send weights: {bytes(text.tolist()).decode()}", stage="refit")
        part = buffer[:size]
        self._broadcast(part)
        return part

    @property
    def rank(self) -> int:
        return self._spec.rank

    def start_send(self, tensor: torch.Tensor, *, to: int) -> dist.Work:
        """Begin to send to one member, which begins to receive as much from this one; `tensor` must stay as it is."""
        return self._start(self._group.send, tensor, to)

    def start_receive(self, tensor: torch.Tensor, *, source: int) -> dist.Work:
        return self._start(self._group.recv, tensor, source)

    def _start(self, begin: Callable[..., dist.Work], tensor: torch.Tensor, peer: int) -> dist.Work:
        try:
            return begin([tensor], peer, 0)
        except RuntimeError as error:
            raise self._lost(error, peer) from error

    def finish(self, work: dist.Work, *, peer: int) -> None:
        """Wait for what `start_send` or `start_receive` has begun with a member.

        Raises:
            CollectiveTimeout: the member is gone or late.
        """
        try:
            work.wait(self._timeout)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise self._lost(error, peer) from error

    def leave_error(self, text: str) -> None:
        """Write why this member fails, for members that hear from it that it does."""
        self._store.set(f"error of {self.rank}", text)

    def read_error(self, rank: int) -> str:
        return self._store.get(f"error of {rank}").decode()

    def _lost(self, error: RuntimeError, peer: int) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"refit: rank {self.rank} of {self._spec.world_size} lost the other members, first rank {peer}, or waited "
            f"{self._spec.timeout_s:.0f} s: {str(error).splitlines()[0]}",
            stage="refit",
        )

    def leave(self, error: BaseException) -> None:
        """Leave the group because of an error of this member, so that the others hear of it at once: what was begun and
        not finished keeps the connections open, and the error's frames hold it."""
        at: BaseException | None = error
        while at is not None:
            traceback.clear_frames(at.__traceback__)
            at = at.__cause__ or at.__context__
        self.close()

    def close(self) -> None:
        """Leave the group; members that still wait for this one fail soon. Idempotent."""
        group, self._group = self._group, None  # type: ignore[assignment]
        if group is not None and self.device.type == "cuda":
            # Without it the communicator of a group that lost a member, and its memory, may stay for good.
            group.abort()
        del group

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        options.timeout = self._timeout
        try:
            self._group.broadcast([tensor], options).wait(self._timeout)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise CollectiveTimeout(
                f"refit: rank {self._spec.rank} of {self._spec.world_size} lost the other members or waited "
                f"{self._spec.timeout_s:.0f} s: {str(error).splitlines()[0]}",
                stage="refit",
            ) from error


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
