"""The features of torch that have no public name. Written for torch 2.13; the tests of the callers fail when a name
moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor

__all__ = [
    "Compilations",
    "abort_nccl",
    "after_backward",
    "clear_cublas_workspaces",
    "copy_all",
    "default_store",
    "is_dispatch_intercepted",
    "jagged_parts",
    "jagged_view",
    "nccl_options",
    "norms_of",
    "replace_tensors",
    "scale_",
    "set_expandable_segments",
    "timeout_of",
    "with_shard",
]


def jagged_view(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return a jagged nested tensor over rows that lie end to end.

    `nested_tensor_from_jagged` gives the same by way of the dispatcher, which takes several times as long and is needed
    for tensors with a gradient alone.
    """
    if values.requires_grad:
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    return NestedTensor(values, offsets)


def jagged_parts(nested: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return values and offsets of a jagged nested tensor whose rows lie end to end, ragged in their first dim and
    without holes between them; None of any other.

    Without a gradient the values do not pass the dispatcher, which takes longer than to copy a small column.
    """
    if not isinstance(nested, NestedTensor) or nested._lengths is not None or nested._ragged_idx != 1:
        return None
    return nested.values() if nested.requires_grad else nested._values, nested._offsets


def norms_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the 2-norm of each, in few kernels."""
    return tuple(torch._foreach_norm(list(tensors)))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, which may be of another dtype, in few kernels."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def scale_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply each in place, in few kernels."""
    torch._foreach_mul_(list(tensors), factor)


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that is running now ends; to be called from one of its hooks."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def set_expandable_segments(is_on: bool) -> None:
    """Choose how the allocator of the GPU takes memory from here on."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_on}")


MOST_GRAPHS = 64
"""Graphs of a function beyond which torch raises an error; passes never come to so many."""


class Compilations:
    """The graphs that torch compiles in this process from here on, and the seconds that it takes."""

    def __init__(self) -> None:
        self.num_graphs, self.seconds = 0, 0.0
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        torch._dynamo.callback.on_compile_start(self._begin)
        torch._dynamo.callback.on_compile_end(self._end)

    def _begin(self, call: Any) -> None:
        # A backward pass is compiled when it first runs, and belongs to a graph that was counted.
        self.num_graphs += call.callback_trigger.name == "DYNAMO"
        self.seconds -= time.monotonic()

    def _end(self, _: object) -> None:
        self.seconds += time.monotonic()


def clear_cublas_workspaces() -> None:
    """Give back the memory in which cuBLAS computes, 32 MiB for each stream on Hopper; it takes others when it next
    needs some."""
    torch._C._cuda_clearCublasWorkspaces()


def default_store() -> dist.Store:
    """Return the store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a collective of the group may take on a device."""
    return group._get_backend(device).options._timeout


def nccl_options(timeout: timedelta) -> dist.ProcessGroupNCCL.Options:
    """Return the options of a group made by hand."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def abort_nccl() -> int:
    """End the communicators of all NCCL groups of this process; how many there were."""
    count = 0
    for group, (backend, _) in list(dist.distributed_c10d._world.pg_map.items()):
        if "nccl" in str(backend):
            group._get_backend(torch.device("cuda")).abort()
            count += 1
    return count


def replace_tensors(model: torch.nn.Module, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `new(tensor)` in the place of each parameter and buffer; parameters stay the same objects, and FSDP looks at
    its shards anew."""
    model._apply(new)


def with_shard(weight: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a weight like this one, with another tensor as this rank's part, on any device; `DTensor.from_local` would
    move it to that of the mesh."""
    return DTensor(shard, weight._spec, requires_grad=False) if isinstance(weight, DTensor) else shard


def is_dispatch_intercepted() -> bool:
    """Return whether a `TorchDispatchMode` sees the operations of this thread."""
    return torch._C._len_torch_dispatch_stack() > 0
