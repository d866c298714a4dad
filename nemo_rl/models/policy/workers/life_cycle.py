"""`LifeCycle`: states of a policy worker, what memory they take, its reference weights, questions about its device.

A mixin of the worker, which makes model and optimizer and then calls `_start_life_cycle`. Invariant: after each state
change parameters, gradients and optimizer state are where the state promises (`base.check_placement`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.dtensor.parallelize import local_shard
from nemo_rl.models.policy.workers.base import DeviceSide, Placement, WorkerState, pinned_copy

__all__ = ["LifeCycle"]

logger = logging.getLogger(__name__)

STAGE_NAMES: Mapping[WorkerState, str] = MappingProxyType(
    {
        WorkerState.TRAINING: "train",
        WorkerState.LOGPROBS: "logprobs",
        WorkerState.REFIT: "refit",
        WorkerState.OFFLOADED: "generation",
    }
)
"""What runs while a worker is in a state."""
MIB = 2**20


class LifeCycle:
    """What happens to a worker between its stages."""

    config: PolicyConfig
    rank: int
    device: torch.device

    # What an engine provides.

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of every weight and persistent buffer."""
        raise NotImplementedError

    def _drop_gradients(self) -> None:
        raise NotImplementedError

    def _move(self, placement: Placement) -> None:
        """Brings model and optimizer state where they belong; called on a GPU only."""
        raise NotImplementedError

    def _placement(self, state: WorkerState) -> Placement:
        """Where things are in a state."""
        raise NotImplementedError

    def _check_placement(self) -> None:
        """Raises AssertionError for a tensor that is elsewhere than `_placement` of the present state says."""
        raise NotImplementedError

    def _start_life_cycle(self, *, keep_reference: bool, owns_group: bool) -> None:
        """Called once, when device, model and optimizer exist: the worker is ready for training.

        Args:
            keep_reference: keep the present weights on the CPU, for `use_reference_model`.
            owns_group: the process group was made by this worker and ends with it.
        """
        self._owns_group = owns_group
        self._device_side = DeviceSide(self.device)
        self._memory: dict[str, int] = {}
        self._reference = self._copy_shards() if keep_reference else None
        self._aside: list[torch.Tensor] = []
        self._is_reference_in_use = False
        self._is_shut_down = False
        self._state = WorkerState.TRAINING
        self._check_placement()

    # States.

    def prepare_for_lp_inference(self) -> None:
        """Weights on the device, gradients gone, optimizer state on the CPU."""
        self._change_state(WorkerState.LOGPROBS)

    def prepare_for_training(self) -> None:
        """Weights and optimizer state on the device."""
        self._change_state(WorkerState.TRAINING)

    def offload_before_refit(self) -> None:
        """Frees what a weight export does not need: gradients and optimizer state."""
        self._change_state(WorkerState.REFIT)

    def offload_after_refit(self) -> None:
        """Frees the device for generation: everything on the CPU."""
        self._change_state(WorkerState.OFFLOADED)

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """(collective) Reference weights in place; the policy's come back on exit, also after an error."""
        if self._reference is None:
            raise RuntimeError("no reference weights are kept; set loss_fn.reference_policy_kl_penalty above 0")
        if self._is_reference_in_use:
            raise RuntimeError("use_reference_model does not nest")
        self._set_aside()
        self._write_shards(self._reference)
        self._is_reference_in_use = True
        try:
            yield
        finally:
            self._write_shards(self._aside)
            self._is_reference_in_use = False

    # Device and process.

    def memory_report(self) -> dict[str, int]:
        """Bytes since the last report, on this worker's GPU or resident on a CPU.

        `<stage>_peak` of every stage, `<stage>_start` and `<stage>_end` around the changes of state: the end of one
        stage and the start of the next are the memory before and after the move.
        """
        self._note_peak()
        report, self._memory = self._memory, {}
        return report

    def reset_peak_memory_stats(self) -> None:
        self._device_side.reset_peak_memory_stats()

    def get_gpu_info(self) -> dict[str, object]:
        return {"rank": self.rank, **self._device_side.info()}

    def report_device_id(self) -> str:
        return self._device_side.device_id()

    def start_gpu_profiling(self) -> None:
        self._device_side.start_profiling()

    def stop_gpu_profiling(self) -> None:
        self._device_side.stop_profiling()

    def is_alive(self) -> bool:
        return not self._is_shut_down

    def shutdown(self) -> None:
        """Ends the process group if it was made here. Idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self.stop_gpu_profiling()
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()

    # Private parts.

    def _change_state(self, state: WorkerState) -> None:
        if self._is_shut_down:
            raise RuntimeError(f"cannot change to {state.value!r}: this worker was shut down")
        if self._is_reference_in_use:
            raise RuntimeError(f"cannot change to {state.value!r} while the reference weights are in place")
        self._note_peak()
        before, came_from = self._device_side.used_bytes(), self._state
        placement = self._placement(state)
        self._drop_gradients()
        if self._device_side.is_cuda:
            self._move(placement)
            self._device_side.release_cache()
        self._state = state
        self._device_side.reset_peak_memory_stats()
        self._check_placement()
        after = self._device_side.used_bytes()
        self._memory |= {f"{STAGE_NAMES[came_from]}_end": before, f"{STAGE_NAMES[state]}_start": after}
        logger.info(
            "rank %d: %s -> %s: %.1f MiB -> %.1f MiB on %s",
            self.rank,
            came_from.value,
            state.value,
            before / MIB,
            after / MIB,
            self.device,
        )

    def _note_peak(self) -> None:
        name = f"{STAGE_NAMES[self._state]}_peak"
        self._memory[name] = max(self._memory.get(name, 0), self._device_side.peak_bytes())

    @contextmanager
    def _ready_for_training(self) -> Iterator[None]:
        """Everything on the device meanwhile, whatever the state was."""
        before = self._state
        self._change_state(WorkerState.TRAINING)
        try:
            yield
        finally:
            self._change_state(before)

    def _require(self, method: str, *allowed: WorkerState) -> None:
        if self._is_shut_down:
            raise RuntimeError(f"{method}: this worker was shut down")
        if self._state not in allowed:
            names = " or ".join(repr(state.value) for state in allowed)
            raise RuntimeError(
                f"{method}: expected state {names}, got {self._state.value!r}; call prepare_for_training or "
                "prepare_for_lp_inference first"
            )

    def _shards(self) -> list[torch.Tensor]:
        return [local_shard(weight.detach()) for _, weight in self._weights()]

    def _copy_shards(self) -> list[torch.Tensor]:
        return [pinned_copy(shard, is_pinned=self._device_side.is_cuda) for shard in self._shards()]

    def _set_aside(self) -> None:
        """Copies the policy's shards to the CPU, into the same memory each time: pinning it is slow."""
        if not self._aside:
            self._aside = self._copy_shards()
            return
        for kept, shard in zip(self._aside, self._shards(), strict=True):
            kept.copy_(shard)

    def _write_shards(self, values: list[torch.Tensor]) -> None:
        # From pinned memory the copies run one after another on the device's stream, without a wait for each.
        with torch.no_grad():
            for shard, value in zip(self._shards(), values, strict=True):
                shard.copy_(value, non_blocking=self._device_side.is_cuda)
        if self._device_side.is_cuda:
            torch.cuda.synchronize(self.device)
