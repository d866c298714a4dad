"""`DeviceStates`: the engine of a policy worker on its device: states, memory, reference weights.

The base of the other parts of `PolicyWorker`. Invariant: after each state change parameters, gradients and optimizer
state are where the state promises (`base.check_placement`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from nemo_rl.config.generation import DeviceSharing
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.workers.base import (
    DeviceSide,
    HostBuffers,
    Placement,
    WorkerState,
    out_of_memory_of,
    placement_of,
)
from nemo_rl.models.policy.workers.engine import Engine

__all__ = ["DeviceStates", "Shards"]

logger = logging.getLogger(__name__)

STAGE_NAMES: Mapping[WorkerState, str] = MappingProxyType(
    {
        WorkerState.TRAINING: "train",
        WorkerState.LOGPROBS: "logprobs",
        WorkerState.REFIT: "refit",
        WorkerState.OFFLOADED: "generation",
    }
)
"""State of a worker -> name of the stage that runs in it."""
MIB = 2**20
MOVE_KEYS = ("policy.generation.sleep_level", "policy.generation.vllm_cfg.gpu_memory_utilization")
"""Keys that leave more of a device to a worker that comes back to it."""


class Shards:
    """This rank's part of weights, copied out of the model and written into it.

    Args:
        weights: all of the model, or all of its adapters.
    """

    def __init__(self, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]], host: HostBuffers) -> None:
        self._weights, self._host = weights, host

    def held(self) -> list[torch.Tensor]:
        """Return the weights of the model, sharing memory."""
        # The local part first: of one that stays on the CPU, while the mesh is of GPUs, torch detaches no other.
        return [local_shard(weight).detach() for _, weight in self._weights()]

    def copy(self, part: str, *, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return copies on the CPU, pinned where there is a GPU; the next ones of the part take the same memory.

        Args:
            dtype: of the copies of parameters, where passes compute in less than they are held in, or less still on a
                CPU where it holds the same values; None keeps it.
        """
        copies = self._host.away(part, [self._as(weight, dtype) for _, weight in self._weights()])
        self._host.settle()
        return copies

    def aside(self) -> list[torch.Tensor]:
        """Return copies that make room for other values; on a CPU each has memory of its own, free again after use."""
        return self.copy("aside") if self._host.is_pinned else [shard.clone() for shard in self.held()]

    def _as(self, weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        shard = local_shard(weight).detach()
        # Buffers are computed with as they are held.
        if dtype is None or not isinstance(weight, torch.nn.Parameter):
            return shard
        cast = shard.to(dtype) if dtype.itemsize < shard.itemsize else shard
        return cast if self._host.is_pinned else _in_half(cast)

    def write(self, values: list[torch.Tensor]) -> None:
        # From pinned memory the copies run one after another on the device's stream, without a wait for each.
        with torch.no_grad():
            for shard, value in zip(self.held(), values, strict=True):
                shard.copy_(value, non_blocking=True)
        self._host.settle()


def _in_half(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in bfloat16 where that holds the same values, as the weights of most model folders; else as it
    is."""
    narrow = tensor.to(torch.bfloat16)
    is_smaller = narrow.itemsize < tensor.itemsize
    return narrow if is_smaller and torch.equal(narrow.to(tensor.dtype), tensor) else tensor


class DeviceStates:
    """One rank's engine, which it moves between the states of a worker. Starts ready for training.

    Args:
        keep_reference: keep the present weights on the CPU, for `use_reference_model`; of a policy with adapters those
            of the adapters, and none where its reference is the model without them.
        adapter_reference: reference of a policy with adapters.
        sharing: the other users of the device.
    """

    def __init__(
        self,
        engine: Engine,
        device_side: DeviceSide,
        here: RankInfo,
        *,
        keep_reference: bool,
        adapter_reference: Literal["base", "start"] = "base",
        sharing: DeviceSharing = "crowded",
    ) -> None:
        self.engine, self._device_side, self._here, self._sharing = engine, device_side, here, sharing
        self.rank, self.device = here.rank, here.device
        self.layout, self.world_size = here.layout, here.layout.world_size
        self._host = HostBuffers(is_pinned=device_side.is_cuda)
        self.shards = Shards(engine.weights, self._host)
        has_adapters = bool(engine.adapter_infos())
        self._is_reference_base = has_adapters and adapter_reference == "base"
        self._replaced = Shards(engine.adapters, self._host) if has_adapters else self.shards
        """The tensors that hold other values while the reference is in place."""
        self.reference: list[torch.Tensor] | None = None
        """Parts of the reference weights, on the CPU, in the dtype of the pass; None where none are kept."""
        if keep_reference and not self._is_reference_base:
            self.reference = self._replaced.copy("reference", dtype=engine.pass_dtype)
        self._memory: dict[str, int] = {}
        self.moved_bytes: dict[str, int] = {}
        """Stage -> bytes moved to get ready for it, so far; on a CPU those that a GPU would have moved."""
        self._is_reference_in_use = False
        self._is_shut_down = False
        self._state = WorkerState.TRAINING
        self._placement = self._placement_in(self._state)
        engine.check_placement(self._placement)

    # States.

    def prepare_for_lp_inference(self) -> None:
        """Bring weights to the device, drop gradients, optimizer state on the CPU."""
        self.change_state(WorkerState.LOGPROBS)

    def prepare_for_training(self) -> None:
        self.change_state(WorkerState.TRAINING)

    def offload_before_refit(self) -> None:
        """Free what a weight export does not need: gradients and optimizer state."""
        self.change_state(WorkerState.REFIT)

    def offload_after_refit(self) -> None:
        """Free the device for generation: everything on the CPU."""
        self.change_state(WorkerState.OFFLOADED)

    def change_state(self, state: WorkerState) -> None:
        """Bring everything where the state wants it; gradients are gone afterwards."""
        if self._is_shut_down:
            raise RuntimeError(f"cannot change to {state.value!r}: this worker was shut down")
        if self._is_reference_in_use:
            raise RuntimeError(f"cannot change to {state.value!r} while the reference weights are in place")
        self._note_peak()
        before, came_from = self._device_side.used_bytes(), self._state
        self.engine.drop_gradients()
        placement = self._placement_in(state)
        self._count_moves(STAGE_NAMES[state], placement)
        with self.guarding(STAGE_NAMES[state], MOVE_KEYS):
            if self._device_side.is_cuda:
                self.engine.move(placement, self._host)
                self._device_side.release_cache()
        self._state, self._placement = state, placement
        self._device_side.reset_peak_memory_stats()
        self.engine.check_placement(placement)
        after = self._device_side.used_bytes()
        self._memory |= {f"{STAGE_NAMES[came_from]}_end": before, f"{STAGE_NAMES[state]}_start": after}
        logger.info(
            "rank %d: %s -> %s: %.1f MiB -> %.1f MiB on %s",
            self.rank,
            came_from.value,
            state.value,
            before / MIB,
            after / MIB,
            self._device_side.device,
        )

    def _placement_in(self, state: WorkerState) -> Placement:
        placement = placement_of(state, cpu_offload=self.engine.cpu_offload, sharing=self._sharing)
        return placement if placement.optimizer is not None else replace(placement, optimizer=self._placement.optimizer)

    def _count_moves(self, stage: str, placement: Placement) -> None:
        before, moved = self._placement, 0
        if before.weights != placement.weights:
            moved += sum(shard.nbytes for shard in self.shards.held())
        if before.optimizer != placement.optimizer:
            moved += sum(local_shard(moment).nbytes for moment in self.engine.moments())
        self.moved_bytes[stage] = self.moved_bytes.get(stage, 0) + moved

    def enter(self, state: WorkerState) -> None:
        """Change the state, unless the worker is in it."""
        if self._state is not state:
            self.change_state(state)

    @contextmanager
    def ready_for_training(self) -> Iterator[None]:
        """Keep everything on the device meanwhile, whatever the state was."""
        before = self._state
        self.change_state(WorkerState.TRAINING)
        try:
            yield
        finally:
            self.change_state(before)

    def require(self, method: str, *allowed: WorkerState) -> None:
        """Raise RuntimeError unless the worker is in one of these states."""
        if self._is_shut_down:
            raise RuntimeError(f"{method}: this worker was shut down")
        if self._state not in allowed:
            names = " or ".join(repr(state.value) for state in allowed)
            raise RuntimeError(
                f"{method}: expected state {names}, got {self._state.value!r}; call prepare_for_training or "
                "prepare_for_lp_inference first"
            )

    def require_policy_weights(self, method: str) -> None:
        """Raise RuntimeError while the reference weights are in place."""
        if self._is_reference_in_use:
            raise RuntimeError(f"{method}: the reference weights are in place; leave use_reference_model first")

    def guarding(
        self, stage: str, keys: Sequence[str], *, microbatch: Callable[[], str] = lambda: ""
    ) -> AbstractContextManager[None]:
        """Surround what may find no memory on the device; see `out_of_memory_of`."""
        side = self._device_side
        return out_of_memory_of(stage, side.device, keys=keys, planned=side.planned, microbatch=microbatch)

    def is_alive(self) -> bool:
        return not self._is_shut_down

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """(collective) Put the reference weights in place; the policy's come back on exit, also after an error. Where
        the reference is the model without adapters, they are switched off and nothing is copied."""
        if self._is_reference_in_use:
            raise RuntimeError("use_reference_model does not nest")
        with self.engine.without_adapter() if self._is_reference_base else self._reference_in_place():
            self._is_reference_in_use = True
            try:
                yield
            finally:
                self._is_reference_in_use = False

    @contextmanager
    def _reference_in_place(self) -> Iterator[None]:
        if self.reference is None:
            raise RuntimeError("no reference weights are kept; set loss_fn.reference_policy_kl_penalty above 0")
        aside = self._replaced.aside()
        self._replaced.write(self.reference)
        try:
            yield
        finally:
            self._replaced.write(aside)

    # The device.

    def get_gpu_info(self) -> dict[str, object]:
        return {"rank": self.rank, **self._device_side.info()}

    def report_device_id(self) -> str:
        return self._device_side.device_id()

    def start_gpu_profiling(self, folder: Path | None = None) -> None:
        """Profile this rank until `stop_gpu_profiling`.

        Args:
            folder: gets `rank_N.json.gz`, a trace of torch's profiler; None opens the range that
                `nsys --capture-range=cudaProfilerApi` records.
        """
        self._device_side.start_profiling(None if folder is None else folder / f"rank_{self.rank}.json.gz")

    def stop_gpu_profiling(self) -> None:
        """End the profile and write its trace. Idempotent."""
        self._device_side.stop_profiling()

    def reset_peak_memory_stats(self) -> None:
        self._device_side.reset_peak_memory_stats()

    def memory_report(self) -> dict[str, int]:
        """Return bytes since the last report, on this worker's GPU or resident on a CPU.

        `<stage>_peak` of every stage, `<stage>_start` and `<stage>_end` around the changes of state: the end of one
        stage and the start of the next are the memory before and after the move.
        """
        self._note_peak()
        report, self._memory = self._memory, {}
        return report

    def _note_peak(self) -> None:
        name = f"{STAGE_NAMES[self._state]}_peak"
        self._memory[name] = max(self._memory.get(name, 0), self._device_side.peak_bytes())
