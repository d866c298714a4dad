"""Transports of the bytes of a refit between processes: `IpcHandle` on one GPU, `RefitGroup` between any processes.

A handle is GPU memory of one process, opened by another one on the same GPU: plain bytes and numbers, so nothing has to
be unpickled. It opens only on the GPU it was made on, in another process, while its maker keeps the memory. A group is
policy rank 0 and the engines in their own process group: rank 0 calls `send`, the others `receive`, bucket by
bucket. A status word comes before every bucket, so an error of the sender reaches the receivers as text; every wait
ends with the group's deadline.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_rl.distributed.job_store import choose_interface, open_client, open_server
from nemo_rl.errors import CollectiveTimeout, WorkerError
from nemo_rl.torch_private import nccl_options

__all__ = ["IpcHandle", "RefitGroup", "RefitGroupSpec", "device_id", "open_store"]


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
