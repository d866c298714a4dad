"""`IpcHandle`: GPU memory of one process, opened by another one on the same GPU.

Made by the policy worker, opened by the engine. A handle is plain bytes and numbers, so nothing has to be unpickled.
Invariant: a handle opens only on the GPU it was made on, in another process, while its maker keeps the memory.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch

from nemo_rl.errors import WorkerError

__all__ = ["IpcHandle", "device_id"]


def device_id(device: torch.device) -> str:
    """A name that two processes share only if they share the device: the GPU's UUID, or host and `cpu`."""
    if device.type != "cuda":
        return f"{socket.gethostname()}-cpu"
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@dataclass(frozen=True, kw_only=True, slots=True)
class IpcHandle:
    """What CUDA and torch need to map the memory of another process."""

    device_id: str
    memory: bytes
    num_bytes: int
    offset: int
    """Of the storage in CUDA's own allocation."""
    counter: bytes
    """Name of the shared memory in which torch counts who still uses the storage."""
    counter_offset: int
    event: bytes
    needs_event: bool

    @classmethod
    def share(cls, buffer: torch.Tensor) -> IpcHandle:
        """A handle to the whole storage of a CUDA tensor, which must not lie in an expandable segment.

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
        """`[num_bytes]` uint8 that shares the maker's memory; drop it before the maker does.

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
