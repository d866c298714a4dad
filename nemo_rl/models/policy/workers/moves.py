"""Moves of a worker's tensors between its device and the CPU.

Called by the training engines at each change of state, and for the reference weights. Invariant: memory on the CPU is
taken once and kept over the run, pinned where there is a GPU; the copies of a move are waited for once, by `settle`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.workers.base import Placement
from nemo_rl.torch_private import replace_tensors, with_shard

__all__ = ["HostBuffers", "move_model", "move_optimizer_state", "optimizer_tensors"]

logger = logging.getLogger(__name__)

ALIGN_BYTES = 512
"""Each tensor begins at a multiple of so many bytes, as in memory of its own."""

_Part = tuple[str, torch.dtype]


class HostBuffers:
    """Memory on the CPU for tensors that leave the device and come back.

    Each part of the worker has one flat buffer per dtype: torch rounds every pinned block up to a power of two, so that
    a block for each tensor would take up to twice the memory.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self._flat: dict[_Part, torch.Tensor] = {}

    def away(self, part: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Begin to copy tensors into the memory of the part, and return them there; the same memory each time."""
        return self._copied(part, tensors, self._kept)

    def back(self, part: str, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Begin to copy tensors to the device, and return them there; in one copy per dtype where they lie as `away`
        left them."""

        def flat(key: _Part, length: int) -> torch.Tensor:
            return torch.empty(length, dtype=key[1], device=device)

        return self._copied(part, tensors, flat)

    def moved(self, part: str, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Begin to copy tensors to a device, which may be the CPU, and return them there."""
        return self.away(part, tensors) if device.type == "cpu" else self.back(part, tensors, device)

    def settle(self) -> None:
        """Wait for the copies; memory that they left may be freed from here on, and the CPU's may be read."""
        if self.is_pinned:
            torch.cuda.synchronize()

    def _copied(
        self, part: str, tensors: Sequence[torch.Tensor], room: Callable[[_Part, int], torch.Tensor]
    ) -> list[torch.Tensor]:
        found = dict[int, torch.Tensor]()
        for dtype in {tensor.dtype: None for tensor in tensors}:
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            some = [tensors[place].detach() for place in places]
            starts, length = _layout(some)
            flat, kept = room((part, dtype), length), self._flat.get((part, dtype))
            views = _views(flat, some, starts)
            if kept is not None and kept is not flat and _is_layout(kept, some, starts, length):
                flat.copy_(kept, non_blocking=True)
            else:
                for view, tensor in zip(views, some, strict=True):
                    view.copy_(tensor, non_blocking=True)
            found |= dict(zip(places, views, strict=True))
        return [found[place] for place in range(len(tensors))]

    def _kept(self, key: _Part, length: int) -> torch.Tensor:
        kept = self._flat.get(key)
        if kept is None or len(kept) != length:
            if kept is not None and self.is_pinned:
                torch.cuda.cudart().cudaHostUnregister(kept.data_ptr())
            kept = torch.empty(length, dtype=key[1])
            if self.is_pinned:
                _pin(kept)
            self._flat[key] = kept
        return kept


def _pin(memory: torch.Tensor) -> None:
    """Lock the pages of memory that exists, which takes no more than its size."""
    # An enum of CUDA's; 0 is success.
    if memory.nbytes and int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        logger.warning("CUDA could not pin %d bytes of this machine's memory; moves will be slow", memory.nbytes)


def _layout(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the first element of each tensor in a flat buffer, and the buffer's length."""
    starts, length = list[int](), 0
    for tensor in tensors:
        starts.append(length)
        step = ALIGN_BYTES // tensor.element_size()
        length += -(-tensor.numel() // step) * step
    return starts, length


def _views(flat: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> list[torch.Tensor]:
    return [
        flat[start : start + tensor.numel()].view(tensor.shape) for start, tensor in zip(starts, tensors, strict=True)
    ]


def _is_layout(flat: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int], length: int) -> bool:
    """Return whether the tensors lie in the buffer as they would be laid out there."""
    return len(flat) == length and all(
        tensor.data_ptr() == flat.data_ptr() + start * flat.element_size() and tensor.is_contiguous()
        for start, tensor in zip(starts, tensors, strict=True)
        if tensor.numel()
    )


def move_model(model: torch.nn.Module, placement: Placement, device: torch.device, host: HostBuffers) -> None:
    """Bring parameters and buffers where they belong; FSDP keeps track of its shards.

    Gradients stay where they are: a change of state drops them before.
    """
    cpu, moved = torch.device("cpu"), dict[int, torch.Tensor]()
    for part, held, is_on_device in (
        ("parameters", model.parameters(), placement.weights),
        ("buffers", model.buffers(), placement.buffers),
    ):
        target = device if is_on_device else cpu
        leaving = [tensor for tensor in held if local_shard(tensor).device.type != target.type]
        shards = [local_shard(tensor) for tensor in leaving]
        results = zip(leaving, host.moved(part, shards, target), strict=True)
        moved |= {id(tensor): with_shard(tensor, result) for tensor, result in results}
    if moved:
        # FSDP pads shards of uneven length anew, on the CPU as well.
        host.settle()
        replace_tensors(model, lambda tensor: moved.get(id(tensor), tensor))


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device, host: HostBuffers) -> None:
    """Move moments to another device; counters of no dimension stay where the optimizer keeps them."""
    leaving = [
        (state, name, value)
        for state in optimizer.state.values()
        for name, value in state.items()
        if _is_moment(value) and local_shard(value).device.type != device.type
    ]
    shards = [local_shard(value) for _, _, value in leaving]
    for (state, name, value), result in zip(leaving, host.moved("optimizer", shards, device), strict=True):
        state[name] = with_shard(value, result)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state of an optimizer with the kind of each tensor; counters of no dimension are left out."""
    for state in optimizer.state.values():
        yield from ((name, value) for name, value in state.items() if _is_moment(value))


def _is_moment(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
