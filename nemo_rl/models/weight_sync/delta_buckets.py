"""Buckets that hold what has changed in each piece of a weight, in place of its bytes.

Used by the policy (`DeltaFiller`) and by the engines (`DeltaSink`), for a plan with `delta`. Each side has the weights
that came last as `HeldWeights`. Invariant: these have a version only while every byte of it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from nemo_rl.errors import ConfigError, WorkerError
from nemo_rl.models.weight_sync.buckets import (
    BucketFiller,
    BucketPiece,
    DeltaRefit,
    RefitPlan,
    RefitSink,
    WeightSlot,
    flat_bytes,
)
from nemo_rl.models.weight_sync.delta import apply_block, encode_block, read_block, write_block

__all__ = ["NO_VERSION", "DeltaFiller", "DeltaSchedule", "DeltaSink", "HeldWeights"]

NO_VERSION = -1


class HeldWeights:
    """The weights of one version, in the engine's dtypes: what a delta builds on.

    In memory of their own, on the CPU, or in the tensors of an engine.
    """

    def __init__(self) -> None:
        self.version = NO_VERSION
        """Version of these bytes; -1 where there are none, or not all."""
        self._next_version = NO_VERSION
        self._slots: tuple[WeightSlot, ...] = ()
        self._bytes: list[torch.Tensor] = []

    def begin(self, plan: RefitPlan, targets: Sequence[torch.Tensor] | None = None) -> None:
        """Begin the weights of another version.

        Args:
            targets: the engine's tensors; None: memory is taken here.

        Raises:
            WorkerError: the plan builds on weights that are not these.
        """
        assert plan.delta is not None, "a plan without delta needs no weights from before"
        base = plan.delta.base
        if base != NO_VERSION and (base != self.version or plan.slots != self._slots):
            raise WorkerError(
                f"refit: expected a delta from version {self.version}, which is held here, got one from {base}, or of "
                "other weights",
                stage="refit",
            )
        if targets is not None:
            self._bytes = [flat_bytes(target) for target in targets]
        elif plan.slots != self._slots:
            self._bytes = [torch.empty(slot.num_bytes, dtype=torch.uint8) for slot in plan.slots]
        self._slots, self.version, self._next_version = plan.slots, NO_VERSION, plan.delta.version

    def note(self, *, num_missing: int) -> None:
        """Note how many buckets have not passed yet."""
        if not num_missing:
            self.version = self._next_version

    def part(self, piece: BucketPiece) -> torch.Tensor:
        """Return `[piece.size]` uint8, of the memory itself."""
        return self._bytes[piece.slot][piece.start : piece.start + piece.size]

    def weight(self, slot: int, *, device: torch.device | str) -> torch.Tensor:
        """Return a copy of a whole weight."""
        given = self._slots[slot]
        weight = self._bytes[slot].to(device, copy=True).view(getattr(torch, given.dtype))
        return weight.view(given.shape)

    def forget(self) -> None:
        self.version, self._slots, self._bytes = NO_VERSION, (), []


class DeltaFiller(BucketFiller):
    """The sending side; remembers what it has sent."""

    def __init__(self, plan: RefitPlan, weights: Iterator[tuple[str, torch.Tensor]], held: HeldWeights) -> None:
        super().__init__(plan, weights)
        assert plan.delta is not None
        self._held, self._delta = held, plan.delta
        held.begin(plan)
        held.note(num_missing=self.num_missing)

    def fill(self, buffer: torch.Tensor | None) -> int:
        size = super().fill(buffer)
        self._held.note(num_missing=self.num_missing)
        return size

    def _write(self, piece: BucketPiece, source: torch.Tensor, room: torch.Tensor) -> int:
        before = self._held.part(piece)
        base = None if self._delta.base == NO_VERSION else before.to(source.device)
        block = encode_block(base, source, unit=_unit(self._plan, piece))
        size = write_block(block, room)
        before.copy_(source)
        return size


class DeltaSink(RefitSink):
    """Changes the weights that are held.

    Args:
        held: begun with this plan.
        take: is given a copy of each weight on `device` as soon as its last piece is there; None: nobody wants one.
    """

    def __init__(
        self,
        plan: RefitPlan,
        held: HeldWeights,
        *,
        take: Callable[[str, torch.Tensor], None] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        assert plan.delta is not None
        super().__init__(plan)
        self._held, self._take, self._device = held, take, device
        for index, slot in enumerate(plan.slots):
            if not slot.num_bytes:
                self._whole(index)
        held.note(num_missing=self.num_missing)

    def load(self, buffer: torch.Tensor) -> None:
        at = 0
        for piece in self._buckets[self._num_loaded]:
            block = read_block(buffer[at:])
            apply_block(block, self._held.part(piece), unit=_unit(self._plan, piece))
            at += block.num_bytes
            if piece.start + piece.size == self._plan.slots[piece.slot].num_bytes:
                self._whole(piece.slot)
        self._num_loaded += 1
        self._held.note(num_missing=self.num_missing)

    def _whole(self, slot: int) -> None:
        if self._take is not None:
            self._take(self._plan.slots[slot].name, self._held.weight(slot, device=self._device))


def _unit(plan: RefitPlan, piece: BucketPiece) -> int:
    """Return bytes of an element; 1 where a bucket cuts one."""
    size = plan.slots[piece.slot].element_bytes
    return size if piece.start % size == 0 and piece.size % size == 0 else 1


logger = logging.getLogger(__name__)

KEY = "policy.generation.refit_delta"


class DeltaSchedule:
    """Decides for each refit of a run if it sends a delta or full weights.

    Args:
        full_every: of so many refits one is whole, whatever happens.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._num_since_full = 0
        self._slots: tuple[WeightSlot, ...] = ()
        self._incarnations: Mapping[int, int] = {}

    def next(
        self,
        version: int,
        *,
        before: int,
        slots: tuple[WeightSlot, ...],
        incarnations: Mapping[int, int],
        held: Mapping[int, int | None],
    ) -> DeltaRefit:
        """Return how version `version` is sent.

        Args:
            before: version of the last refit; -1 when there was none, or it failed.
            slots: what is sent.
            incarnations: of the engines: another count is another process.
            held: version that each engine can build on; None: it takes whole buckets alone.

        Raises:
            ConfigError: an engine takes whole buckets alone.
        """
        deaf = [engine for engine, base in held.items() if base is None]
        if deaf:
            raise ConfigError(
                f"{KEY}.enabled: true, but engine {deaf[0]} supports full weights only: its `RefitTarget` has no "
                "`delta_base`; set it to false"
            )
        doubt = self._doubt(before, slots, incarnations, held)
        if doubt is not None and self._slots:
            logger.info("refit to version %d sends all weights whole: %s", version, doubt)
        self._num_since_full = 0 if doubt is not None else self._num_since_full + 1
        self._slots, self._incarnations = slots, dict(incarnations)
        return DeltaRefit(base=before if doubt is None else NO_VERSION, version=version)

    def _doubt(
        self,
        before: int,
        slots: tuple[WeightSlot, ...],
        incarnations: Mapping[int, int],
        held: Mapping[int, int | None],
    ) -> str | None:
        """Return why a delta is not to be trusted, or None where it is."""
        if before == NO_VERSION:
            return "no refit has succeeded since"
        if incarnations != self._incarnations:
            return "the engines are not the same processes"
        if slots != self._slots:
            return "other weights are sent than before"
        if set(held.values()) != {before}:
            return f"the engines do not all hold version {before}: {dict(held)}"
        return f"one of {self._full_every} is" if self._num_since_full + 1 >= self._full_every else None
