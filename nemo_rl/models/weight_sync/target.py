"""Targets of a refit: `RefitTarget`, and the receiving side that engines of torch modules share.

Steps of one refit, in order: `report_device_id` and `refit_free_bytes` (once, to choose a transport), `match_refit` and
`delta_base`, `begin_refit`, then `load_bucket` for each bucket or `receive_weights` for all of them, `finish_refit`,
`answer_receipt`. By shards `report_parts` and `take_parts` come once, and `receive_shards` in place of `begin_refit`
and the buckets. Of a refit of an adapter: `match_adapter`, `begin_refit`, the buckets, `finish_refit`,
`adapter_fingerprints`, `use_adapter`, `answer_receipt`; rows go on with the version in use up to `use_adapter`. The
driver asks for several of them in one call (`accept_refit`, `receive_refit`, `refit_by_shards`, `receive_buckets`,
`read_buckets`): of a refit of weights at most four calls go to an engine, and one more where it accepts them for the
first time or builds on a delta.

Invariant of `RefitReceiver`: names and shapes are compared before the first byte is written; from then until the last
bucket the engine holds no version, so that half-loaded weights are never sampled from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nemo_rl.errors import WorkerError
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.hf.files import Box
from nemo_rl.models.weight_sync.buckets import (
    BucketSink,
    RefitPlan,
    RefitSink,
    WeightJoiner,
    WeightSlot,
    free_bytes,
    match_slots,
)
from nemo_rl.models.weight_sync.delta_buckets import DeltaSink, HeldWeights
from nemo_rl.models.weight_sync.receipt import Answer, Probe
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints
from nemo_rl.models.weight_sync.shard_plan import Boxes, ShardPart, whole_boxes
from nemo_rl.models.weight_sync.shard_transport import ShardReceiver
from nemo_rl.models.weight_sync.transport import (
    BucketReader,
    ChannelSpec,
    IpcHandle,
    RefitGroup,
    RefitGroupSpec,
    device_id,
)

__all__ = ["AcceptedRefit", "ModuleRefitTarget", "RefitReceiver", "RefitTarget"]


class RefitReceiver:
    """Loads buckets into the tensors of one model, or joins them to full weights.

    Args:
        device: where weights are.
        take: is given each weight, which may stay; the model is then asked for names, shapes and dtypes alone.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, *, take: Callable[[str, torch.Tensor], None] | None = None
    ) -> None:
        self._model, self._device, self._take = model, device, take
        self._targets: list[torch.Tensor] = []
        self._staged: dict[str, torch.Tensor] = {}
        """Tensors of an adapter, which nothing reads."""
        self._sink: RefitSink | None = None
        self._held = HeldWeights()
        self._num_buckets = 0
        self._buffer_bytes = 0
        self._shared: torch.Tensor | None = None
        self._group: RefitGroup | None = None
        self._parts: dict[str, ShardPart] = {}
        self._num_missing: int | None = None
        """Rounds of a refit by shards that have not come; None: none has begun."""
        self.tied_names: Mapping[str, str] = {}
        """Name of a weight that is not sent -> the sent one that it was tied to in `match`."""

    def match(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        """Return the policy's weights in this engine's dtypes.

        Raises:
            ValueError: a name is unknown or missing, or has another shape.
        """
        state = self._model.state_dict(keep_vars=True)
        slots, self._targets = match_slots(offered, state)
        sent: dict[int, str] = {}
        for name in offered:
            sent.setdefault(id(state[name]), name)
        self.tied_names = {name: sent[id(weight)] for name, weight in state.items() if name not in offered}
        return slots

    def begin(self, plan: RefitPlan, handle: IpcHandle | None = None) -> None:
        """Get ready for the first bucket; with a handle buckets come through the policy's own GPU memory."""
        self._staged = {}
        self._sink = self._adapter_sink(plan) if plan.kind == "adapter" else self._sink_of(plan)
        self._num_buckets, self._buffer_bytes = self._sink.num_missing, plan.buffer_bytes
        self._shared = handle.open(self._device) if handle is not None else None

    def _adapter_sink(self, plan: RefitPlan) -> RefitSink:
        self._staged = self._room_for(plan.slots)
        return BucketSink(plan, list(self._staged.values()))

    def _room_for(self, slots: Iterable[WeightSlot]) -> dict[str, torch.Tensor]:
        return {
            slot.name: torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=self._device) for slot in slots
        }

    def take_adapter(self) -> dict[str, torch.Tensor] | None:
        """Return the adapter that has come, after `finish`; None where weights have come."""
        staged, self._staged = self._staged, {}
        return staged or None

    def _sink_of(self, plan: RefitPlan) -> RefitSink:
        take = self._take
        if take is None:
            self._find_targets(plan.slots)
        if plan.delta is not None:
            # An engine that takes full weights needs the last ones, to apply the changes to them.
            self._held.begin(plan, self._targets if take is None else None)
            return DeltaSink(plan, self._held, take=take, device=self._device)
        self._held.forget()
        return BucketSink(plan, self._targets) if take is None else WeightJoiner(plan, take, device=self._device)

    @property
    def delta_base(self) -> int:
        """Return version that a delta can build on; -1: none."""
        return self._held.version

    def forget_base(self) -> None:
        """Forget the base of deltas: the weights were replaced by another way."""
        self._held.forget()

    def load(self, bucket: np.ndarray | None = None) -> None:
        """Load the next bucket, given as uint8, or read from the shared memory."""
        sink = self._begun()
        if bucket is not None:
            # Torch refuses read-only memory, such as a mapped object of Ray's store.
            sink.load(torch.from_numpy(bucket if bucket.flags.writeable else bucket.copy()))
            return
        assert self._shared is not None, "no handle was given to begin"
        num_slots = len(self._shared) // self._buffer_bytes
        slot = (self._num_buckets - sink.num_missing) % num_slots
        sink.load(self._shared[slot * self._buffer_bytes : (slot + 1) * self._buffer_bytes])
        # The policy writes into the slot again as soon as it hears of it.
        torch.cuda.synchronize(self._device)

    def join(self, spec: RefitGroupSpec) -> None:
        """(collective over the refit group) Leave the one before."""
        if self._group is not None:
            self._group.close()
        self._group = RefitGroup(spec, device=self._device)

    def receive(self) -> None:
        """(collective over the refit group) Receive all buckets, while rank 0 sends them.

        Raises:
            WorkerError: the policy failed. CollectiveTimeout: it did not send in time.
        """
        sink = self._begun()
        assert self._group is not None, "join comes first"
        buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._group.device)
        while sink.num_missing:
            sink.load(self._group.receive(buffer))

    def _find_targets(self, slots: Sequence[WeightSlot]) -> None:
        """Find the weights again: the driver asks for them once in the life of an engine, and each refit lets them
        go."""
        if not self._targets:
            self.match({slot.name: slot.shape for slot in slots})

    def take_part(self, part: ShardPart, kind: Literal["weights", "adapter"]) -> None:
        """Keep what this rank receives in each refit by shards of this kind from here on."""
        self._parts[kind] = part

    def receive_shards(
        self,
        kind: Literal["weights", "adapter"],
        *,
        place: Callable[[WeightSlot, Box, torch.Tensor], None] | None = None,
    ) -> None:
        """Receive the parts of all weights, while every rank of the policy sends them; an adapter lies beside them.

        Args:
            place: is given each piece, which is gone when it returns; None: it goes to its place in the model.

        Raises:
            WorkerError: the policy failed. CollectiveTimeout: a rank of it did not send in time.
        """
        assert self._group is not None, "join and take_part come first"
        part, targets, self._staged = self._parts[kind], dict[str, torch.Tensor](), {}
        self._num_missing = len(part.rounds)

        def copy(slot: WeightSlot, box: Box, values: torch.Tensor) -> None:
            box.of(targets[slot.name], held=Box.whole(slot.shape)).copy_(values)

        try:
            if kind == "adapter":
                targets = self._staged = self._room_for(part.slots)
            elif place is None:
                self._find_targets(part.slots)
                targets = dict(zip((slot.name for slot in part.slots), self._targets, strict=True))
            if kind == "weights":
                self._held.forget()
            ShardReceiver(part, self._group).receive(place or copy)
        except BaseException as error:
            # Ranks of the policy that still send would wait for this one.
            group, self._group = self._group, None
            group.leave(error)
            raise
        self._num_missing = 0

    def finish(self) -> None:
        """Free what the refit needed.

        Raises:
            WorkerError: buckets are missing.
        """
        if self._num_missing is not None:
            missing, self._num_missing, self._targets = self._num_missing, None, []
            if missing:
                raise WorkerError("the parts of weights were not all received", stage="refit")
            return
        missing = self._begun().num_missing
        self._sink, self._targets, self._shared = None, [], None
        if missing:
            raise WorkerError(
                f"expected {self._num_buckets} buckets of weights, {missing} were not received", stage="refit"
            )

    def close(self) -> None:
        """Leave the refit group. Idempotent."""
        if self._group is not None:
            self._group.close()
        self._group, self._shared = None, None

    def _begun(self) -> RefitSink:
        assert self._sink is not None, "begin comes first"
        return self._sink


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptedRefit:
    """An engine's answer to what the policy offers."""

    slots: tuple[WeightSlot, ...]
    """The policy's weights in the engine's dtypes."""
    free_bytes: int
    """Memory that a buffer may take a part of."""
    delta_base: int | None
    """Version that a delta can build on; see `RefitTarget.delta_base`."""


class RefitTarget(ABC):
    """An engine that `WeightSync` brings new weights to, bucket by bucket."""

    @abstractmethod
    def report_device_id(self) -> str:
        """Return the GPU's UUID, or host and `cpu`."""

    def report_device_ids(self) -> tuple[str, ...]:
        """Return the device of each rank of this engine; every rank receives a refit by itself."""
        return (self.report_device_id(),)

    @abstractmethod
    def refit_free_bytes(self, *, on_device: bool) -> int:
        """Return memory that a buffer may take a part of: of the engine's device, or of this machine."""

    @abstractmethod
    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        """Return the policy's weights, by Hugging Face name, in this engine's dtypes.

        Raises:
            ValueError: a name is unknown or missing, or has another shape; the old weights stay in use.
        """

    def delta_base(self) -> int | None:
        """Return version of the weights that a delta can build on; -1: none. None: `load_bucket` knows no deltas."""
        return None

    def match_adapter(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        """Return the tensors of the policy's adapter in this engine's dtypes.

        Raises:
            NotImplementedError: the engine serves no adapters.
            ValueError: a name is unknown or missing, or has another shape.
        """
        raise self._without_adapters()

    def use_adapter(self, version: int) -> int:
        """Let rows that begin from here on have an adapter that a refit has brought; return the version in use."""
        raise self._without_adapters()

    def adapter_fingerprints(self, version: int) -> Mapping[str, str]:
        """Name -> fingerprint of each tensor of an adapter, from the memory that serves this version."""
        raise self._without_adapters()

    def adapter_versions(self) -> tuple[int, ...]:
        """Return versions of the adapter that are held."""
        return ()

    def _without_adapters(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} receives no adapters beside its weights; set policy.lora.serve=merged, or use "
            "another engine"
        )

    @abstractmethod
    def begin_refit(self, plan: RefitPlan, *, handles: Sequence[IpcHandle] = ()) -> None:
        """Begin a refit; this engine holds no version until `finish_refit`, but for one of an adapter.

        Args:
            handles: to the policy's buffers on the devices of `report_device_ids`, in that order; empty where buckets
                come by another way.
        """

    def accept_refit(
        self, offered: Mapping[str, tuple[int, ...]], *, kind: Literal["weights", "adapter"], on_device: bool
    ) -> AcceptedRefit:
        """Return what the driver plans a refit by; see `match_refit`, `match_adapter` and `refit_free_bytes`."""
        slots = self.match_adapter(offered) if kind == "adapter" else self.match_refit(offered)
        free, base = self.refit_free_bytes(on_device=on_device), self.delta_base() if kind == "weights" else None
        return AcceptedRefit(slots=slots, free_bytes=free, delta_base=base)

    def begin_reading(
        self, plan: RefitPlan, *, channels: Sequence[ChannelSpec], handles: Sequence[IpcHandle] = ()
    ) -> None:
        """Begin a refit whose buckets this engine reads by itself, with `receive_buckets`.

        Args:
            channels: of the policy's ranks that have the buckets of this engine's ranks.
            handles: see `begin_refit`.
        """
        self.begin_refit(plan, handles=handles)
        self._readers = tuple(BucketReader(spec) for spec in channels)

    def receive_buckets(self, *, version: int) -> int:
        """Read all buckets, while the policy writes them, and end the refit; see `finish_refit`.

        Raises:
            WorkerError: the policy failed. CollectiveTimeout: it is gone, or did not send in time.
        """
        readers, self._readers = self._readers, ()
        try:
            while readers[0].num_missing:
                [bucket, *_] = [reader.next() for reader in readers]
                self.load_bucket(None if bucket is None else bucket.numpy())
                for reader in readers:
                    reader.done()
        finally:
            for reader in readers:
                reader.close()
        return self.finish_refit(version=version)

    def read_buckets(self, plan: RefitPlan, *, channels: Sequence[ChannelSpec], version: int) -> int:
        """Stand still, read all buckets of a refit, which the policy keeps, and go on; return the version in use."""
        assert isinstance(self, GenerationInterface), "an engine generates"
        self.finish_generation()
        self.begin_reading(plan, channels=channels)
        held = self.receive_buckets(version=version)
        self.prepare_for_generation()
        return held

    def receive_refit(self, plan: RefitPlan, *, version: int) -> int:
        """(collective over the refit group) Begin a refit, receive all buckets while the policy sends them, and end it;
        see `finish_refit`."""
        self.begin_refit(plan)
        self.receive_weights()
        return self.finish_refit(version=version)

    def refit_by_shards(self, *, kind: Literal["weights", "adapter"], version: int) -> int:
        """(collective over the refit group) Receive the parts of all weights, and end the refit; see `finish_refit`."""
        self.receive_shards(kind=kind)
        return self.finish_refit(version=version)

    _readers: tuple[BucketReader, ...] = ()

    @abstractmethod
    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        """Load the next bucket, given as uint8, or read from the shared memory."""

    @abstractmethod
    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        """(collective over the refit group) Join the group of the refit; an engine of several ranks takes as many
        numbers of the group, from `spec.rank` on."""

    @abstractmethod
    def receive_weights(self) -> None:
        """(collective over the refit group) Receive all buckets, while the policy sends them."""

    def report_parts(self, slots: tuple[WeightSlot, ...], kind: Literal["weights", "adapter"]) -> tuple[Boxes, ...]:
        """Return the boxes of each weight that each rank of this engine takes, or those of an adapter; asked after
        `match_refit` or `match_adapter`, once in the life of a plan."""
        raise NotImplementedError(f"{type(self).__name__} takes no parts; set policy.generation.refit_transport=auto")

    def take_parts(self, parts: tuple[ShardPart, ...], kind: Literal["weights", "adapter"]) -> None:
        """Keep what each rank of this engine receives in each refit of this kind from here on."""
        raise NotImplementedError(f"{type(self).__name__} takes no parts; set policy.generation.refit_transport=auto")

    def receive_shards(self, kind: Literal["weights", "adapter"]) -> None:
        """Receive the parts of all weights, while every rank of the policy sends them; this engine holds no version
        until `finish_refit`, but for an adapter."""
        raise NotImplementedError(f"{type(self).__name__} takes no parts; set policy.generation.refit_transport=auto")

    @abstractmethod
    def finish_refit(self, *, version: int) -> int:
        """End the refit, when all weights have come, and return the version now in use; of an adapter the version that
        is held from here on, and that `use_adapter` puts to use."""

    @abstractmethod
    def fingerprints(self) -> Mapping[str, str]:
        """Name -> fingerprint (`receipt.fingerprint`) of each weight as it lies here, or was handed on last."""

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Name of a weight that is not sent -> the sent one that it is tied to, as `match_refit` found them."""
        return {}

    def answer_receipt(self, probe: Probe | None) -> Answer:
        """(ready to generate when it returns) Return what this engine holds, and how it scores the probe on its decode
        path.

        Args:
            probe: None: fingerprints alone.
        """
        assert isinstance(self, GenerationInterface), "an engine generates"
        self.prepare_for_generation()
        held, tied = self.fingerprints(), self.tied_names
        if probe is None:
            return Answer(fingerprints=held, aliases=tied, version=self.weight_version)
        output = self.generate(probe.request())
        return Answer(
            fingerprints=held,
            aliases=tied,
            version=max(output.row_versions),
            token_ids=tuple(output.token_ids.tolist()),
            logprobs=tuple(output.logprobs.tolist()),
            cached_tokens=() if output.cached_tokens is None else tuple(output.cached_tokens.tolist()),
        )

    def score_versions(self, probe: Probe, *, versions: Sequence[int]) -> dict[int, tuple[float, ...]]:
        """Return version of the adapter, or `BASE`, -> log-probabilities of the probe under it; rows of all versions
        are decoded in one batch, side by side."""
        assert isinstance(self, GenerationInterface), "an engine generates"
        output = self.generate(probe.mixed(versions))
        rows = output.logprobs.split(output.lengths.tolist())
        return {
            version: tuple(torch.cat(rows[place :: len(versions)]).tolist()) for place, version in enumerate(versions)
        }


class ModuleRefitTarget(RefitTarget):
    """An engine whose weights are one torch module in this process, under Hugging Face names."""

    _receiver: RefitReceiver | None = None

    @property
    @abstractmethod
    def refit_module(self) -> torch.nn.Module:
        """Return the module whose weights are replaced."""

    @abstractmethod
    def hold_version(self, version: int) -> None:
        """Remember the version of the weights; -1 while they are being replaced."""

    @property
    def device(self) -> torch.device:
        return next(self.refit_module.parameters()).device

    def report_device_id(self) -> str:
        return device_id(self.device)

    def refit_free_bytes(self, *, on_device: bool) -> int:
        return free_bytes(self.device if on_device else torch.device("cpu"))

    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        return self._refit().match(offered)

    def delta_base(self) -> int | None:
        return self._refit().delta_base

    def begin_refit(self, plan: RefitPlan, *, handles: Sequence[IpcHandle] = ()) -> None:
        if plan.kind == "weights":
            self.hold_version(-1)
        self._refit().begin(plan, handles[0] if handles else None)

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        self._refit().load(bucket)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        self._refit().join(spec)

    def receive_weights(self) -> None:
        self._refit().receive()

    def report_parts(self, slots: tuple[WeightSlot, ...], kind: Literal["weights", "adapter"]) -> tuple[Boxes, ...]:
        return (whole_boxes(slots),)

    def take_parts(self, parts: tuple[ShardPart, ...], kind: Literal["weights", "adapter"]) -> None:
        self._refit().take_part(parts[0], kind)

    def receive_shards(self, kind: Literal["weights", "adapter"]) -> None:
        if kind == "weights":
            self.hold_version(-1)
        self._refit().receive_shards(kind)

    def finish_refit(self, *, version: int) -> int:
        self._refit().finish()
        adapter = self._refit().take_adapter()
        if adapter is None:
            self.hold_version(version)
        else:
            self.hold_adapter(adapter.items(), version=version)
        return version

    def hold_adapter(self, adapter: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Keep an adapter that has come beside those in use."""
        raise self._without_adapters()

    def fingerprints(self) -> Mapping[str, str]:
        return fingerprints(self.refit_module.state_dict(keep_vars=True).items())

    @property
    def tied_names(self) -> Mapping[str, str]:
        return self._refit().tied_names

    def leave_refit(self) -> None:
        """Leave the refit group, at `shutdown`. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _refit(self) -> RefitReceiver:
        if self._receiver is None:
            self._receiver = RefitReceiver(self.refit_module, self.device)
        return self._receiver
