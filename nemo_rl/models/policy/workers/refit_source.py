"""`RefitSource`: how a policy worker hands its weights to the generation engines.

A base of `PolicyWorker`; `WeightSync` begins and ends a refit from outside. Invariant: every rank takes part in
gathering each weight, in the same order; the buffer is freed at the end. For deltas the weights that were sent last
stay in the memory of each rank that has a buffer, on the CPU, in the engines' dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl.config.backends import LoraConfig
from nemo_rl.distributed.job_store import own_address
from nemo_rl.models.adapters.lora import folded, merged
from nemo_rl.models.hf.files import Box
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.policy.workers.base import WorkerState
from nemo_rl.models.policy.workers.device_states import DeviceStates
from nemo_rl.models.weight_sync import buckets, transport
from nemo_rl.models.weight_sync.buckets import NUM_SLOTS, BucketFiller, RefitPlan, in_dtypes
from nemo_rl.models.weight_sync.delta_buckets import DeltaFiller, HeldWeights
from nemo_rl.models.weight_sync.receipt import Sent
from nemo_rl.models.weight_sync.receipt.fingerprint import Fingerprints, PartFingerprints
from nemo_rl.models.weight_sync.shard_plan import Boxes, ShardPart
from nemo_rl.models.weight_sync.shard_transport import ShardSender
from nemo_rl.models.weight_sync.transport import (
    BucketSender,
    ChannelOffer,
    ChannelRequest,
    IpcHandle,
    RefitGroup,
    RefitGroupSpec,
    SharedSlots,
)
from nemo_rl.models.weight_sync.weights_digest import WeightsDigest, digest_weights

__all__ = ["RefitSource"]

REFIT_KEYS = ("policy.generation.refit_buffer_ratio", "policy.generation.vllm_cfg.gpu_memory_utilization")
"""Keys that lower the memory of a refit."""


class RefitSource(DeviceStates):
    """The sending side of a refit.

    Args:
        takes_fingerprints: rank 0 takes those of what it sends, for the receipt.
        lora: None: the engine trains its weights.
    """

    def __init__(self, *, takes_fingerprints: bool = False, lora: LoraConfig | None = None) -> None:
        self._takes_fingerprints = takes_fingerprints and self.rank == 0
        self._proves = takes_fingerprints
        self._lora = lora
        self._merge_loss = MergeLoss()
        self._fingerprints = Fingerprints()
        self._filler: BucketFiller | None = None
        self._buffer: torch.Tensor | None = None
        self._held = HeldWeights()
        self._num_buckets = self._num_bytes = 0
        self._refit_group: RefitGroup | None = None
        self._refit_store: dist.Store | None = None
        self._slot_bytes = 0
        self._shared: SharedSlots | None = None
        self._channel: BucketSender | None = None
        self._parts: dict[str, ShardPart] = {}
        self._part_prints: PartFingerprints | None = None

    # What is sent.

    def prepare_refit_info(self) -> dict[str, TensorInfo]:
        """Return name, shape and dtype of every weight in HF naming, in export order."""
        return self.engine.weight_infos()

    def prepare_adapter_info(self) -> dict[str, TensorInfo]:
        """Return name, shape and dtype of every tensor of the adapter, in the order in which it is sent."""
        return self.engine.adapter_infos()

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Yield the full CPU weights in HF naming, one at a time, on every rank."""
        self.require("export_weights", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        yield from self.engine.export_weights()

    def weights_digest(self) -> WeightsDigest | None:
        """(collective) Return the digest of the trained weights at rank 0, None elsewhere: of the adapter where one is
        trained, else of all exported ones."""
        weights = self.export_weights()
        if self.engine.adapter_infos():
            weights = ((name, weight.to("cpu")) for name, weight in self.engine.full_adapter())
        if self.rank == 0:
            return digest_weights(weights)
        for _ in weights:
            """Each is gathered from all ranks."""
        return None

    # A refit.

    def offer_refit(
        self, *, kind: Literal["weights", "adapter"], on_device: bool
    ) -> tuple[dict[str, tuple[int, ...]], int]:
        """Return the shapes of what a refit would bring, empty but at rank 0, and `refit_free_bytes`."""
        free = self.refit_free_bytes(on_device=on_device)
        if self.rank:
            return {}, free
        infos = self.prepare_adapter_info() if kind == "adapter" else self.prepare_refit_info()
        return {name: info.shape for name, info in infos.items()}, free

    def refit_free_bytes(self, *, on_device: bool) -> int:
        """Return memory that a buffer may take a part of: of the worker's device, or of this machine."""
        return buckets.free_bytes(self.device if on_device else torch.device("cpu"))

    def begin_refit(self, plan: RefitPlan, *, on_device: bool, num_slots: int = 1, is_shared: bool = False) -> int:
        """Allocate the buffer; return the number of buckets.

        Args:
            on_device: the buffer is on the worker's device, else on the CPU, where only rank 0 needs one.
            num_slots: buckets that the buffer holds.
            is_shared: the buffer on the CPU is memory that other processes can map.
        """
        self.require("begin_refit", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        # What an adapter sends stays as it is until `end_refit`: copies, but for A of float32 engines, which no step
        # changes.
        self._fingerprints, self._merge_loss = Fingerprints(defers=plan.kind == "adapter"), MergeLoss()
        self._buffer, self._slot_bytes, size = None, plan.buffer_bytes, num_slots * plan.buffer_bytes
        if on_device:
            with self._device_side.plain_segments(), self.guarding("refit", REFIT_KEYS):
                self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        elif self.rank == 0 and is_shared:
            self._shared = SharedSlots(num_slots=num_slots, slot_bytes=plan.buffer_bytes)
            self._buffer = self._shared.slots
        elif self.rank == 0:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        self._filler = self._filler_of(plan)
        self._num_buckets, self._num_bytes = self._filler.num_missing, 0
        return self._num_buckets

    def _stream_of(self, plan: RefitPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Yield what the plan names: weights as they are or with the adapter merged, or A and s B."""
        engine, lora = self.engine, self._lora
        if lora is None or (lora.is_native and plan.kind == "weights"):
            # The cast of a shard is the shard of the cast, and half of the bytes to gather.
            return engine.full_weights({slot.name: getattr(torch, slot.dtype) for slot in plan.slots})
        if lora.is_native:
            return folded(engine.full_adapter(), lora.scale)
        adapter = dict(engine.full_adapter())
        return self._merge_loss.passing(plan, engine.full_weights(), adapter, lora.scale)

    def _filler_of(self, plan: RefitPlan) -> BucketFiller:
        weights = self._stream_of(plan)
        if self._takes_fingerprints:
            # Taken before the buckets are filled, so that the receipt proves these as well.
            weights = self._fingerprints.passing(in_dtypes(plan, weights))
        if plan.delta is not None and self._buffer is not None:
            return DeltaFiller(plan, weights, self._held)
        self._held.forget()
        return BucketFiller(plan, weights)

    def open_refit_channel(self, plan: RefitPlan, request: ChannelRequest) -> ChannelOffer | None:
        """Begin a refit whose buckets engines read by themselves; None where this rank offers none to anybody.

        Raises:
            RuntimeError: CUDA cannot export the memory.
        """
        num_slots = len(plan.buckets()) if request.holds_all else min(NUM_SLOTS, len(plan.buckets()))
        self._close_channel()
        self.begin_refit(plan, on_device=request.on_device, num_slots=num_slots, is_shared=True)
        if self._buffer is None:
            return None
        self._channel = BucketSender(
            own_address(request.address),
            num_buckets=self._num_buckets,
            num_slots=num_slots,
            slot_bytes=plan.buffer_bytes,
            timeout_s=request.timeout_s,
            memory=self._shared,
        )
        handle = IpcHandle.share(self._buffer) if request.on_device else None
        return ChannelOffer(spec=self._channel.spec, handle=handle)

    def send_buckets(self, num_readers: Mapping[int, int]) -> None:
        """(collective, while the engines receive) Fill one slot after another; no engine reads what is being written.

        Args:
            num_readers: rank -> engines that read its buckets.
        """
        channel = self._channel
        if channel is not None:
            channel.accept(num_readers.get(self.rank, 0))
        with self._telling_of_errors():
            for _ in range(self._num_buckets):
                size = self._fill(0 if channel is None else channel.slot())
                if self._device_side.is_cuda:
                    torch.cuda.synchronize(self.device)
                if channel is not None:
                    channel.send(size)

    def hold_buckets(self) -> None:
        """(collective) Fill the slots of all buckets, which engines read one after the other until `end_refit`."""
        sizes = [self._fill(number) for number in range(self._num_buckets)]
        if self._channel is not None:
            self._channel.serve(sizes)

    @contextmanager
    def _telling_of_errors(self) -> Iterator[None]:
        """Let the engines hear of an error of the block as text."""
        try:
            yield
        except Exception as error:
            for side in (self._refit_group, self._channel):
                if side is not None:
                    side.send_error(f"{type(error).__name__}: {error}")
            raise

    def next_bucket(self) -> np.ndarray | None:
        """(collective) Return the next bucket as uint8 at rank 0, valid until the one after it; None elsewhere."""
        size = self._fill()
        return self._buffer[:size].numpy() if self._buffer is not None else None

    def end_refit(self) -> Sent:
        """Free the buffer; say what was put into it since `begin_refit`. Idempotent."""
        self._filler, self._buffer = None, None
        self._close_channel()
        if self._device_side.is_cuda:
            # Memory that another process had open is only freed when torch looks for it.
            torch.cuda.ipc_collect()
        self._device_side.release_cache()
        taken, self._fingerprints = self._fingerprints, Fingerprints()
        prints, self._part_prints = self._part_prints, None
        return Sent(
            num_bytes=self._num_bytes,
            fingerprints=taken.result(),
            parts={} if prints is None else prints.sums(),
            merge_loss=self._merge_loss.share(),
        )

    def open_refit_store(self, *, address: str, world_size: int, timeout_s: float) -> int:
        """(rank 0) Open the store of the refit group; return its port."""
        store = transport.open_store(address, world_size, timeout_s=timeout_s)
        self._refit_store = store
        return int(store.port)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        """(rank 0, by shards every rank, while every engine joins) Make the refit group, in place of the one before."""
        if self._refit_group is not None:
            self._refit_group.close()
        self._refit_group = RefitGroup(spec, device=self.device, store=self._refit_store)

    def broadcast_weights(self) -> None:
        """(collective, while every engine receives) Send all buckets from rank 0.

        Raises:
            CollectiveTimeout: an engine is gone or late. An error of rank 0 reaches the engines as text.
        """
        for _ in range(self._num_buckets):
            with self._telling_of_errors():
                size = self._fill()
            if self._refit_group is not None and self._buffer is not None:
                self._refit_group.send(self._buffer[:size])

    def report_shards(self, names: tuple[str, ...], kind: Literal["weights", "adapter"]) -> Boxes:
        """Return the boxes of each of these weights, or tensors of the adapter, that this rank holds."""
        held = self._held_shards(kind)
        return [[box for box, _ in held.get(name, ())] for name in names]

    def take_shard_part(self, part: ShardPart, kind: Literal["weights", "adapter"]) -> None:
        """Keep what this rank sends in each refit by shards of this kind from here on."""
        self._parts[kind] = part

    def send_shards(self, kind: Literal["weights", "adapter"]) -> None:
        """(every rank, while every engine receives) Send this rank's parts of all weights.

        Raises:
            CollectiveTimeout: all engines are gone or late. An error of this rank reaches its receivers as text.
        """
        self.require("send_shards", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        assert self._refit_group is not None, "join_refit_group and take_shard_part come first"
        self._part_prints = PartFingerprints() if self._proves else None
        with self.guarding("refit", REFIT_KEYS):
            sender = ShardSender(self._parts[kind], self._refit_group, prints=self._part_prints)
            try:
                self._num_bytes = sender.send(self._held_shards(kind))
            except Exception as error:
                sender.send_error(f"{type(error).__name__}: {error}")
                raise

    def _held_shards(self, kind: Literal["weights", "adapter"]) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        held: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        scale = 1.0 if self._lora is None else self._lora.scale
        for name, box, values in self.engine.shards(kind):
            [(_, sent)] = folded([(name, values)], scale) if kind == "adapter" else [(name, values)]
            held.setdefault(name, []).append((box, sent))
        return held

    def _close_refit(self) -> None:
        """Leave the refit group. Idempotent."""
        self._close_channel()
        if self._refit_group is not None:
            self._refit_group.close()
        self._refit_group, self._refit_store = None, None

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel, self._shared = None, None

    def _fill(self, slot: int = 0) -> int:
        assert self._filler is not None, "begin_refit comes first"
        place = slot * self._slot_bytes
        room = None if self._buffer is None else self._buffer[place : place + self._slot_bytes]
        with self.guarding("refit", REFIT_KEYS):
            size = self._filler.fill(room)
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
