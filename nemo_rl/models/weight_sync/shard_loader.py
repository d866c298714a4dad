"""`ShardLoader`: one rank of an engine with loaders of its own, which is given the parts of weights that they take.

The loaders run over placeholders, once to record the parts (`record`), and at each refit to copy what has come. Held
besides the buffers are the parts of weights that the loaders still keep. Invariant: a weight is handed over when all of
its parts are there, and its fingerprint is of what then lies in the parameters of the engine; of a weight that a loader
takes whole, because it computes with it, it is of what was handed over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nemo_rl.models.hf.files import Box
from nemo_rl.models.weight_sync.buckets import WeightSlot
from nemo_rl.models.weight_sync.placeholder import (
    PartRefused,
    PlaceholderView,
    WeightSource,
    merged_boxes,
    placeholder_of,
)
from nemo_rl.models.weight_sync.receipt.fingerprint import PartFingerprints, summed
from nemo_rl.models.weight_sync.shard_plan import Boxes

__all__ = ["PartPrints", "ShardLoader", "joined_prints"]

logger = logging.getLogger(__name__)

PartPrints = Mapping[str, Mapping[Box, int]]
"""Name of a weight -> hash of each of its boxes."""


@dataclass(slots=True)
class _Parts:
    """The parts of one weight that have come."""

    tensors: dict[Box, torch.Tensor]
    missing: int
    """Elements that have not come."""


@dataclass(slots=True)
class ShardLoader:
    """See the module."""

    device: torch.device
    load: Callable[[str, torch.Tensor], None]
    """The engine's own loading of a placeholder, or of a weight, by its Hugging Face name; it may keep the tensor."""
    _boxes: dict[str, tuple[Box, ...]] = field(default_factory=dict)
    _whole: set[str] = field(default_factory=set)
    """Weights whose loaders refuse a placeholder."""
    _open: dict[str, _Parts] = field(default_factory=dict)
    _prints: PartFingerprints = field(default_factory=PartFingerprints)

    def record(self, slots: Sequence[WeightSlot]) -> Boxes:
        """Return the boxes that the loaders take of each weight, all of it where they need its values or no box; the
        engine's weights stay as they are."""
        taken: dict[str, list[Box]] = {slot.name: [] for slot in slots}

        def note(_: torch.Tensor, view: PlaceholderView) -> None:
            taken[view.name].append(view.box)

        for slot in slots:
            try:
                self.load(slot.name, placeholder_of(self._source(slot, note)))
            except PartRefused as error:
                logger.info("refit: this rank gets a weight whole: %s", error)
                taken[slot.name] = [Box.whole(slot.shape)]
                self._whole.add(slot.name)
        self._boxes = {name: merged_boxes(boxes) for name, boxes in taken.items()}
        return list(self._boxes.values())

    @property
    def left_out(self) -> set[str]:
        """Return the weights of which this rank takes nothing, such as those of other stages of a pipeline."""
        return {name for name, boxes in self._boxes.items() if not boxes}

    def begin(self) -> None:
        self._open, self._prints = {}, PartFingerprints()

    def place(self, slot: WeightSlot, box: Box, values: torch.Tensor) -> None:
        """Keep a piece, and load its weight when it was the last one; `values` may change from here on."""
        parts = self._open.get(slot.name)
        if parts is None:
            dtype, boxes = getattr(torch, slot.dtype), self._boxes[slot.name]
            parts = self._open[slot.name] = _Parts(
                tensors={own: torch.empty(own.size, dtype=dtype, device=self.device) for own in boxes},
                missing=sum(own.count for own in boxes),
            )
        held = next(own for own in parts.tensors if own.meet(box) == box)
        box.of(parts.tensors[held], held=held).copy_(values)
        parts.missing -= box.count
        if not parts.missing:
            del self._open[slot.name]
            if slot.name in self._whole:
                [(whole, weight)] = parts.tensors.items()
                self._prints.add(slot.name, whole, weight, shape=slot.shape)
                self.load(slot.name, weight)
                return

            def fill(target: torch.Tensor, view: PlaceholderView) -> None:
                self._fill(target, view, parts.tensors)

            self.load(slot.name, placeholder_of(self._source(slot, fill)))

    def _fill(self, target: torch.Tensor, view: PlaceholderView, tensors: Mapping[Box, torch.Tensor]) -> None:
        box = view.box
        held = next(own for own in tensors if own.meet(box) == box)
        target.copy_(view.of(tensors[held], held=held))
        if not target.is_meta:
            found = torch.empty(box.size, dtype=tensors[held].dtype, device=target.device)
            view.of(found, held=box).copy_(target.detach())
            self._prints.add(view.name, box, found, shape=view.shape)

    def _source(self, slot: WeightSlot, copy: Callable[[torch.Tensor, PlaceholderView], None]) -> WeightSource:
        dtype = getattr(torch, slot.dtype)
        return WeightSource(name=slot.name, shape=slot.shape, dtype=dtype, device=self.device, copy=copy)

    def prints(self) -> dict[str, dict[Box, int]]:
        """Return the hash of each box that was loaded whole since `begin`, as it lies in the engine's parameters."""
        found: dict[str, dict[Box, int]] = {}
        for name, hashes in self._prints.result().items():
            for own in self._boxes[name]:
                inside = {box: number for box, number in hashes.items() if own.meet(box) == box}
                if sum(box.count for box in inside) == own.count:
                    found.setdefault(name, {})[own] = sum(inside.values())
        return found


def joined_prints(of_ranks: Sequence[PartPrints], slots: Sequence[WeightSlot]) -> dict[str, str]:
    """Return the fingerprints of the weights of an engine from those of the parts that its ranks hold; where ranks that
    hold the same part differ, or a part is nowhere, what is wrong."""
    found: dict[str, str] = {}
    for slot in slots:
        parts: dict[Box, int] = {}
        for rank, prints in enumerate(of_ranks):
            for box, number in prints.get(slot.name, {}).items():
                if parts.setdefault(box, number) != number:
                    found[slot.name] = f"other values in rank {rank} than in a rank before it"
        count, whole = sum(box.count for box in parts), Box.whole(slot.shape).count
        if slot.name not in found and count == whole:
            found[slot.name] = summed(parts.values(), dtype=slot.dtype, shape=slot.shape)
        elif slot.name not in found:
            found[slot.name] = f"{count} of {whole} elements"
    return found
