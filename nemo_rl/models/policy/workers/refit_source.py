"""`RefitSource`: how a policy worker hands its weights to the generation engines.

A part of the worker; `WeightSync` drives it from outside, one bucket at a time. Invariant: every rank takes part in
gathering each weight, in the same order; the buffer is freed at the end. For deltas the weights that were sent last
stay in the memory of each rank that has a buffer, on the CPU, in the engines' dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl.config.lora import LoraConfig
from nemo_rl.models.lora import folded, merged
from nemo_rl.models.policy.workers.base import DeviceSide, WorkerState
from nemo_rl.models.policy.workers.device_states import DeviceStates
from nemo_rl.models.policy.workers.engine import Engine
from nemo_rl.models.weight_sync import buckets, transport
from nemo_rl.models.weight_sync.buckets import BucketFiller, RefitPlan, in_dtypes
from nemo_rl.models.weight_sync.delta_buckets import DeltaFiller, HeldWeights
from nemo_rl.models.weight_sync.receipt import Sent
from nemo_rl.models.weight_sync.receipt.fingerprint import Fingerprints
from nemo_rl.models.weight_sync.transport import IpcHandle, RefitGroup, RefitGroupSpec

__all__ = ["RefitSource"]


class RefitSource:
    """The sending side of a refit.

    Args:
        takes_fingerprints: rank 0 takes those of what it sends, for the receipt.
        lora: None: the engine trains its weights.
    """

    def __init__(
        self,
        engine: Engine,
        device_states: DeviceStates,
        device_side: DeviceSide,
        *,
        rank: int,
        takes_fingerprints: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        self._engine, self._device_states, self._device_side, self._rank = engine, device_states, device_side, rank
        self._takes_fingerprints = takes_fingerprints and rank == 0
        self._lora = lora
        self._loss = MergeLoss()
        self._fingerprints = Fingerprints()
        self._filler: BucketFiller | None = None
        self._buffer: torch.Tensor | None = None
        self._held = HeldWeights()
        self._num_buckets = self._num_bytes = 0
        self._group: RefitGroup | None = None
        self._store: dist.Store | None = None

    def free_bytes(self, *, on_device: bool) -> int:
        """Return memory that a buffer may take a part of: of the worker's device, or of this machine."""
        return buckets.free_bytes(self._device_side.device if on_device else torch.device("cpu"))

    def begin(self, plan: RefitPlan, *, on_device: bool) -> int:
        """Allocate the buffer; return the number of buckets.

        Args:
            on_device: the buffer is on the worker's device, else on the CPU, where only rank 0 needs one.
        """
        self._device_states.require("begin_refit", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        # What an adapter sends stays as it is until `end`: copies, but for A of float32 engines, which no step changes.
        self._fingerprints, self._loss = Fingerprints(defers=plan.kind == "adapter"), MergeLoss()
        self._buffer = None
        if on_device:
            with self._device_side.plain_segments():
                self._buffer = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=self._device_side.device)
        elif self._rank == 0:
            self._buffer = torch.empty(plan.buffer_bytes, dtype=torch.uint8)
        self._filler = self._filler_of(plan)
        self._num_buckets, self._num_bytes = self._filler.num_missing, 0
        return self._num_buckets

    def _stream_of(self, plan: RefitPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Yield what the plan names: weights as they are or with the adapter merged, or A and s B."""
        engine, lora = self._engine, self._lora
        if lora is None or (lora.is_native and plan.kind == "weights"):
            return engine.full_weights()
        if lora.is_native:
            return folded(engine.full_adapter(), lora.scale)
        adapter = dict(engine.full_adapter())
        return self._loss.passing(plan, engine.full_weights(), adapter, lora.scale)

    def _filler_of(self, plan: RefitPlan) -> BucketFiller:
        weights = self._stream_of(plan)
        if self._takes_fingerprints:
            # Taken before the buckets are filled, so that the receipt proves these as well.
            weights = self._fingerprints.passing(in_dtypes(plan, weights))
        if plan.delta is not None and self._buffer is not None:
            return DeltaFiller(plan, weights, self._held)
        self._held.forget()
        return BucketFiller(plan, weights)

    def share_buffer(self) -> IpcHandle:
        """Return a handle by which an engine on the same GPU opens the buffer."""
        assert self._buffer is not None, "begin_refit comes first"
        return IpcHandle.share(self._buffer)

    def fill_bucket(self) -> None:
        """(collective) Write the next bucket into the buffer, and wait until the device is done with it."""
        self._fill()
        if self._device_side.is_cuda:
            torch.cuda.synchronize(self._device_side.device)

    def next_bucket(self) -> np.ndarray | None:
        """(collective) Return the next bucket as uint8 at rank 0, valid until the one after it; None elsewhere."""
        size = self._fill()
        return self._buffer[:size].numpy() if self._buffer is not None else None

    def end(self) -> Sent:
        """Free the buffer; say what was put into it since `begin`. Idempotent."""
        self._filler, self._buffer = None, None
        if self._device_side.is_cuda:
            # Memory that another process had open is only freed when torch looks for it.
            torch.cuda.ipc_collect()
        self._device_side.release_cache()
        taken, self._fingerprints = self._fingerprints, Fingerprints()
        return Sent(num_bytes=self._num_bytes, fingerprints=taken.result(), merge_loss=self._loss.share())

    def open_store(self, *, address: str, world_size: int, timeout_s: float) -> int:
        """(rank 0) Open the store of the refit group; return its port."""
        store = transport.open_store(address, world_size, timeout_s=timeout_s)
        self._store = store
        return int(store.port)

    def join_group(self, spec: RefitGroupSpec) -> None:
        """(rank 0, while every engine joins) Make the refit group, in place of the one before."""
        if self._group is not None:
            self._group.close()
        self._group = RefitGroup(spec, device=self._device_side.device, store=self._store)

    def broadcast(self) -> None:
        """(collective, while every engine receives) Send all buckets from rank 0.

        Raises:
            CollectiveTimeout: an engine is gone or late. An error of rank 0 reaches the engines as text.
        """
        for _ in range(self._num_buckets):
            try:
                size = self._fill()
            except Exception as error:
                if self._group is not None:
                    self._group.send_error(f"{type(error).__name__}: {error}")
                raise
            if self._group is not None and self._buffer is not None:
                self._group.send(self._buffer[:size])

    def close(self) -> None:
        """Leave the refit group. Idempotent."""
        if self._group is not None:
            self._group.close()
        self._group, self._store = None, None

    def _fill(self) -> int:
        assert self._filler is not None, "begin_refit comes first"
        size = self._filler.fill(self._buffer)
        self._num_bytes += size
        return size


class MergeLoss:
    """The share of an adapter that the engines' dtype loses when it is merged into the weights.

    Of an adapted weight W and its change D it is |q(W + D) - q(W) - D| / |D|, where q rounds to the engines' dtype.
    """

    def __init__(self) -> None:
        self._lost: list[torch.Tensor] = []
        self._whole: list[torch.Tensor] = []

    def passing(
        self,
        plan: RefitPlan,
        weights: Iterable[tuple[str, torch.Tensor]],
        adapter: Mapping[str, torch.Tensor],
        scale: float,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights with the adapter merged, each measured on its way."""
        dtypes = {slot.name: getattr(torch, slot.dtype) for slot in plan.slots}
        for name, weight in weights:
            _, result = next(merged([(name, weight)], adapter, scale))
            if result is not weight:
                dtype = dtypes.get(name, result.dtype)
                base = weight.to(result.dtype)
                change = result - base
                served = result.to(dtype).to(result.dtype) - base.to(dtype).to(result.dtype)
                self._lost.append((served - change).double().square().sum())
                self._whole.append(change.double().square().sum())
            yield name, result

    def share(self) -> float | None:
        """Return the share of all adapted weights together; None where none was merged, or the adapter is zero."""
        if not self._whole:
            return None
        lost, whole = (float(torch.stack(parts).sum()) for parts in (self._lost, self._whole))
        return (lost / whole) ** 0.5 if whole else None
