"""Life cycle and device side of a policy worker, shared by every training engine.

Called by the workers. Invariant: after each state change the worker checks where parameters, buffers, gradients and
optimizer state really are, so memory that should be free for generation is free.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

from nemo_rl.models.dtensor.parallelize import local_shard
from nemo_rl.utils.memory import resident_bytes

__all__ = ["DeviceSide", "Placement", "WorkerState", "check_placement", "move_optimizer_state"]


class WorkerState(Enum):
    """What a worker is ready for."""

    TRAINING = "training"
    LOGPROBS = "log-probability inference"
    REFIT = "refit"
    OFFLOADED = "offloaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where things are in one state; "device" is the worker's own, which on a CPU machine is the CPU as well."""

    weights: str
    """`device` or `cpu`: parameters and buffers."""
    optimizer: str
    """`device` or `cpu`."""
    has_gradients: bool
    """Whether gradients may exist."""


PLACEMENTS: Mapping[WorkerState, Placement] = MappingProxyType(
    {
        WorkerState.TRAINING: Placement(weights="device", optimizer="device", has_gradients=True),
        WorkerState.LOGPROBS: Placement(weights="device", optimizer="cpu", has_gradients=False),
        WorkerState.REFIT: Placement(weights="device", optimizer="cpu", has_gradients=False),
        WorkerState.OFFLOADED: Placement(weights="cpu", optimizer="cpu", has_gradients=False),
    }
)


def check_placement(
    state: WorkerState, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Compares where tensors are with what the state promises.

    Raises:
        AssertionError: names the first tensor that is elsewhere.
    """
    expected = PLACEMENTS[state]
    weights_on = device.type if expected.weights == "device" else "cpu"
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        found = local_shard(weight).device.type
        assert found == weights_on, f"state {state.value}: {name} is on {found}, expected {weights_on}"
    if not expected.has_gradients:
        for name, parameter in model.named_parameters():
            assert parameter.grad is None, f"state {state.value}: {name} still has a gradient"
    optimizer_on = device.type if expected.optimizer == "device" else "cpu"
    for name, tensor in _optimizer_tensors(optimizer):
        found = local_shard(tensor).device.type
        assert found == optimizer_on, f"state {state.value}: optimizer {name} is on {found}, expected {optimizer_on}"


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves moments to another device; counters of no dimension stay where the optimizer keeps them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(device, non_blocking=True)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield name, value


class DeviceSide:
    """Questions about the worker's device; on a machine without CUDA the answers say `cpu` and nothing is measured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_profiling = False

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """`cpu`, or the GPU's product name."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu"

    def release_cache(self) -> None:
        """Gives unused memory back to the device, for the generation engine that shares it."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def reset_peak_memory_stats(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def info(self) -> dict[str, object]:
        """Device, process and memory in bytes; peak numbers are of the GPU."""
        common: dict[str, object] = {
            "device": str(self.device),
            "name": self.name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "resident_bytes": resident_bytes(),
        }
        if not self.is_cuda:
            return common
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            **common,
            "free_bytes": free,
            "total_bytes": total,
            "allocated_bytes": torch.cuda.memory_allocated(self.device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device),
        }

    def device_id(self) -> str:
        """A name that two processes share only if they share the device: the GPU's UUID, or host and `cpu`."""
        if self.is_cuda:
            return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        return f"{socket.gethostname()}-cpu"

    def start_profiling(self) -> None:
        """Opens the range that `nsys --capture-range=cudaProfilerApi` records."""
        if self.is_cuda and not self._is_profiling:
            torch.cuda.profiler.start()
            self._is_profiling = True

    def stop_profiling(self) -> None:
        if self._is_profiling:
            with suppress(RuntimeError):
                torch.cuda.profiler.stop()
            self._is_profiling = False
