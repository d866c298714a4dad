"""States of a policy worker, where things are in each of them, and questions about its device.

Called by the parts of a worker. Invariant: after each state change it is checked where parameters, buffers, gradients
and optimizer state really are, so memory that should be free for generation is free.

Memory of a policy worker against its plan: an error of ours where it runs out, and gradients whole where they fit.

Called around the passes of a worker, its moves and its refits, and when it is put together. The error says what was
done, how much was planned, and what lowers it. The plan's sums are those of `nemo-rl plan`; the driver sends them where
that is installed.

Moves of a worker's tensors between its device and the CPU.

Called by the training engines at each change of state, and for the reference weights. Invariant: memory on the CPU is
taken once and kept over the run, pinned where there is a GPU; the copies of a move are waited for once, by `settle`.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils import deterministic

from nemo_rl.config.generation import DeviceSharing
from nemo_rl.config.policy import CUBLAS_VARIABLE, REPEATABLE_WORKSPACES, PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import ConfigError, ResourceError
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.weight_sync.transport import device_id
from nemo_rl.torch_private import clear_cublas_workspaces, replace_tensors, set_expandable_segments, with_shard
from nemo_rl.utils.console import bytes_text
from nemo_rl.utils.memory import peak_resident_bytes, reset_peak_resident, resident_bytes

__all__ = [
    "DeviceSide",
    "HostBuffers",
    "Placement",
    "WorkerState",
    "check_placement",
    "check_workspace",
    "deterministic_algorithms",
    "device_name",
    "gradients_decided",
    "has_expandable_segments",
    "largest_microbatch",
    "lowering_keys",
    "move_model",
    "move_optimizer_state",
    "optimizer_tensors",
    "out_of_memory_of",
    "placement_of",
]

logger = logging.getLogger(__name__)


EXPANDABLE_SEGMENTS_FROM = 9
"""Least major compute capability (Hopper) for expandable segments: on Ampere they were seen to crash."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that hold a user's own choice for the allocator; it is left alone but for memory that another process
opens."""


class WorkerState(Enum):
    """The pass that a worker is ready for."""

    TRAINING = "training"
    LOGPROBS = "log-probability inference"
    REFIT = "refit"
    OFFLOADED = "offloaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The places of weights, gradients and optimizer in one state: `True` on the worker's device, which may be the
    CPU, `False` on the CPU."""

    weights: bool
    buffers: bool
    optimizer: bool | None
    """Place of the optimizer; None leaves it where it is."""
    has_gradients: bool
    """True where gradients may exist."""


PLACEMENTS: Mapping[WorkerState, Placement] = MappingProxyType(
    {
        WorkerState.TRAINING: Placement(weights=True, buffers=True, optimizer=True, has_gradients=True),
        WorkerState.LOGPROBS: Placement(weights=True, buffers=True, optimizer=False, has_gradients=False),
        WorkerState.REFIT: Placement(weights=True, buffers=True, optimizer=False, has_gradients=False),
        WorkerState.OFFLOADED: Placement(weights=False, buffers=False, optimizer=False, has_gradients=False),
    }
)
"""Places of tensors where the memory of the device is always needed for something else."""


def placement_of(state: WorkerState, *, cpu_offload: bool = False, sharing: DeviceSharing = "crowded") -> Placement:
    """Return the placement in a state; with `cpu_offload` weights and optimizer never leave the CPU, as FSDP wants
    it."""
    placement = PLACEMENTS[state]
    if sharing == "alone":
        placement = replace(placement, weights=True, buffers=True, optimizer=True)
    elif sharing == "turns" and state is WorkerState.LOGPROBS:
        placement = replace(placement, optimizer=None)
    return replace(placement, weights=False, optimizer=False) if cpu_offload else placement


def check_placement(
    placement: Placement,
    *,
    model: torch.nn.Module,
    optimizer: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    trained: Iterable[torch.nn.Parameter] | None = None,
) -> None:
    """Compare where tensors are with what was promised.

    Args:
        optimizer: its state, without counters.
        trained: parameters that may have gradients; None: all of the model.

    Raises:
        AssertionError: names the first tensor that is elsewhere.
    """
    promised = (
        ("parameter", model.named_parameters(), placement.weights),
        ("buffer", model.named_buffers(), placement.buffers),
        ("optimizer", optimizer, placement.optimizer),
    )
    # On a CPU there is no other place, and to look at every name takes longer than the refit of an adapter.
    for kind, tensors, is_on_device in promised if device.type != "cpu" else ():
        if is_on_device is None:
            continue
        expected = device.type if is_on_device else "cpu"
        for name, tensor in tensors:
            found = local_shard(tensor).device.type
            assert found == expected, f"{kind} {name} is on {found}, expected {expected}"
    if not placement.has_gradients and any(each.grad is not None for each in trained or model.parameters()):
        for name, parameter in model.named_parameters():
            assert parameter.grad is None, f"parameter {name} still has a gradient"


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Return whether a user's own settings of the allocator ask for segments that grow."""
    chosen = ",".join(environment.get(name, "") for name in ALLOCATOR_VARIABLES).replace(" ", "").lower()
    return "expandable_segments:true" in chosen


def device_name(device: torch.device) -> str:
    """Return `cpu`, or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class DeviceSide:
    """Questions about the worker's device; on a machine without CUDA the answers say `cpu` and nothing is measured."""

    def __init__(self, device: torch.device, *, planned: Mapping[str, int] = MappingProxyType({})) -> None:
        """Args:
        planned: bytes on the device by stage, as `nemo-rl plan` counts them; empty where nothing was planned.
        """
        self.device, self.planned = device, planned
        self._end_profile: Callable[[bool], None] | None = None
        """Ends the profile that runs; False discards it."""
        self._has_expandable_segments = self._use_expandable_segments()

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def release_cache(self) -> None:
        """Give unused memory back to the device, for the generation engine that shares it."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
            clear_cublas_workspaces()
            torch.cuda.empty_cache()

    def _use_expandable_segments(self) -> bool:
        """Segments that grow waste less memory between lengths that differ from step to step."""
        if not self.is_cuda:
            return False
        if any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
            return has_expandable_segments(os.environ)
        if torch.cuda.get_device_capability(self.device)[0] < EXPANDABLE_SEGMENTS_FROM:
            return False
        set_expandable_segments(True)
        return True

    @contextmanager
    def plain_segments(self) -> Iterator[None]:
        """Allocate for another process: memory that is allocated inside can be handed to another process: CUDA
        refuses to export growing segments where driver or container do not let processes exchange file descriptors."""
        if not self._has_expandable_segments:
            yield
            return
        set_expandable_segments(False)
        try:
            yield
        finally:
            set_expandable_segments(True)

    def reset_peak_memory_stats(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_peak_resident()

    def used_bytes(self) -> int:
        """Return the bytes that are allocated on the GPU, or resident in this process on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else resident_bytes()

    def peak_bytes(self) -> int:
        """Return most of `used_bytes` since the last reset."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else peak_resident_bytes()

    def info(self) -> dict[str, object]:
        """Return device, process and memory in bytes; peak numbers are of the GPU."""
        common: dict[str, object] = {
            "device": str(self.device),
            "name": device_name(self.device),
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
        """Return `transport.device_id` of this device."""
        return device_id(self.device)

    def start_profiling(self, trace: Path | None = None) -> None:
        """Profile what this thread does until `stop_profiling`; one profile at a time.

        Args:
            trace: file that torch's profiler writes at the end: calls on the CPU and, on a GPU, its kernels. None opens
                the range that `nsys --capture-range=cudaProfilerApi` records, and does nothing on a CPU.
        """
        self.stop_profiling(is_complete=False)
        if trace is not None:
            self._end_profile = _torch_profile(trace, is_cuda=self.is_cuda)
        elif self.is_cuda:
            torch.cuda.profiler.start()
            self._end_profile = _end_cuda_range

    def stop_profiling(self, *, is_complete: bool = True) -> None:
        """End the profile. Idempotent.

        Args:
            is_complete: False discards it.
        """
        end, self._end_profile = self._end_profile, None
        if end is not None:
            end(is_complete)


def _end_cuda_range(_: bool) -> None:
    with suppress(RuntimeError):
        torch.cuda.profiler.stop()


def _torch_profile(path: Path, *, is_cuda: bool) -> Callable[[bool], None]:
    """Begin a profile of `torch.profiler`, and return what ends it. A disk that refuses costs the trace and never the
    step."""
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])])
    profiler.start()

    def end(is_complete: bool) -> None:
        profiler.stop()
        if not is_complete:
            return
        # The suffix decides whether torch compresses it; under its own name it appears whole.
        unfinished = path.with_name(f".{os.getpid()}.tmp.{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        except (OSError, RuntimeError) as error:
            logger.warning("no profile in %s, the run continues: %s", path, error)
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    return end


def check_workspace(device: torch.device) -> None:
    """Refuse a process on CUDA in which products may not repeat: cuBLAS reads the variable with the first of them."""
    found = os.environ.get(CUBLAS_VARIABLE)
    if device.type == "cuda" and found not in REPEATABLE_WORKSPACES:
        raise ConfigError(
            f"policy.deterministic: expected {CUBLAS_VARIABLE} to be {' or '.join(REPEATABLE_WORKSPACES)} in the "
            f"environment of the worker, got {found!r}; export it before the process starts"
        )


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Let torch choose deterministic algorithms inside, and raise where it has none."""
    memory: Any = deterministic
    before, fills = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that was not written, and filling it costs a kernel for each tensor.
    memory.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fills, benchmark


USABLE = 0.96
"""Usable share of a GPU's memory: the rest is lost between blocks of torch's allocator."""


@contextmanager
def out_of_memory_of(
    stage: str,
    device: torch.device,
    *,
    keys: Sequence[str],
    planned: Mapping[str, int],
    microbatch: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Surround what a stage does.

    Args:
        keys: what lowers the memory of the stage.
        planned: bytes by stage; empty where nothing was planned.
        microbatch: says how large the microbatches are; called after an error only.

    Raises:
        ResourceError: torch has found no memory on the device.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = " ".join(part for part in (stage, microbatch()) if part)
        raise ResourceError(
            f"{what}: the memory of {device} is used up: {_measured(device)}, {_planned(stage, planned)}. What lowers "
            f"it: {', '.join(keys)}. torch says: {' '.join(str(error).split())}"
        ) from error


def _measured(device: torch.device) -> str:
    if device.type != "cuda":
        return "nothing is measured on this device"
    counts = {
        "allocated": torch.cuda.memory_allocated(device),
        "at the peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "on the device": torch.cuda.get_device_properties(device).total_memory,
    }
    return ", ".join(f"{bytes_text(count)} {what}" for what, count in counts.items())


def _planned(stage: str, planned: Mapping[str, int]) -> str:
    if stage not in planned:
        return "`nemo-rl plan` says what the stage should need"
    return f"`nemo-rl plan` counts {bytes_text(planned[stage])}"


def largest_microbatch(batch: BatchedDataDict, plan: PackPlan) -> str:
    """Return how many tokens the largest microbatch of a call has."""
    lengths = batch.tensor("input_lengths").tolist()
    parts = [[int(lengths[row]) for row in rows] for part in plan.microbatches for rows in part if rows]
    most = max((sum(part) if plan.packed else len(part) * max(part) for part in parts), default=0)
    return f"with microbatches of up to {most:,} tokens"


def lowering_keys(policy: PolicyConfig, *, is_training: bool) -> list[str]:
    kind = "train" if is_training else "logprob"
    found = [
        f"policy.{name}.{kind}_mb_tokens ({getattr(section, f'{kind}_mb_tokens'):,})"
        for name, section in (
            ("sequence_packing", policy.sequence_packing),
            ("dynamic_batching", policy.dynamic_batching),
        )
        if section.is_on
    ]
    if not found:
        rows = (
            policy.train_micro_batch_size if is_training else policy.logprob_batch_size or policy.train_micro_batch_size
        )
        found = [f"policy.{'train_micro_batch_size' if is_training else 'logprob_batch_size'} ({rows})"]
    sizes, section = policy.parallel_sizes, policy.parallel_section
    if is_training:
        mode = (policy.megatron_cfg if policy.megatron_cfg.enabled else policy.dtensor_cfg).activation_checkpointing
        found.append(f"{section}.activation_checkpointing ({str(mode).lower()})")
        if policy.dtensor_cfg.enabled and policy.dtensor_cfg.gradient_accumulation == "whole":
            found.append(f"{section}.gradient_accumulation (whole)")
    axis = "tensor_model_parallel_size" if policy.megatron_cfg.enabled else "tensor_parallel_size"
    return [*found, f"{section}.{axis} ({sizes.tensor})"]


def gradients_decided(
    config: PolicyConfig, planned: Mapping[str, int], *, room: int, device: torch.device
) -> PolicyConfig:
    """Return the policy with `whole` or `sharded` in place of `gradient_accumulation: auto`, the same on every rank.

    Collective over all ranks where it is `auto`.

    Args:
        planned: bytes by stage with whole gradients; empty where nothing was planned.
        room: bytes of this rank's device; 0 on a CPU.
    """
    sizes = config.dtensor_cfg
    if sizes.gradient_accumulation != "auto":
        return config
    fits = bool(planned) and max(planned.values()) <= USABLE * room
    agreed = torch.tensor(int(fits), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    chosen = "whole" if agreed else "sharded"
    return config.model_copy(update={"dtensor_cfg": sizes.model_copy(update={"gradient_accumulation": chosen})})


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
