"""The versions of an adapter that an engine holds: which one rows get that begin, and which may go.

    ServesAdapters    the engine: receives versions and puts them to use     TorchEngine, VllmEngine
    HeldAdapters      the tensors of each version                            AdapterSlots, VllmAdapters
    AdapterVersions   their numbers

Invariant: a version goes only to make room for another one, and never while it is in use or rows that are being sampled
have it. Imports no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from nemo_rl.errors import WorkerError, name_some
from nemo_rl.models.adapters.lora import AdaptedLayer
from nemo_rl.models.generation.interfaces import BASE, GenerationInterface
from nemo_rl.models.weight_sync.buckets import WeightSlot, match_adapter

__all__ = ["AdapterVersions", "HeldAdapters", "ServesAdapters"]


class AdapterVersions:
    """Versions of one adapter.

    Args:
        most: versions that are held at once.

    Example:
        >>> versions = AdapterVersions(most=2)
        >>> for version in (0, 1):
        ...     versions.begin(version), versions.hold(version), versions.use(version)
        ((), None, None)
        ((), None, None)
        >>> versions.begin(2)
        (0,)
    """

    def __init__(self, *, most: int) -> None:
        self._most, self._held = most, list[int]()
        self.current: int | None = None
        """Version of rows that name none; None before the first."""

    @property
    def held(self) -> tuple[int, ...]:
        """Return versions that are held, oldest first."""
        return tuple(self._held)

    def has_room(self, version: int, live: Collection[int]) -> bool:
        """Return whether a version can be held beside those that rows have."""
        return len({old for old in self._held if old == self.current or old in live} - {version}) < self._most

    def begin(self, version: int, *, live: Collection[int] = ()) -> tuple[int, ...]:
        """Make room for a version, and return those that go; none where one of this number is held, which it replaces.

        Args:
            live: versions of rows that are being sampled.

        Raises:
            WorkerError: there is no room.
        """
        if version in self._held:
            # Sent again: a refit has failed, or other engines were lost in it.
            return ()
        gone = list[int]()
        for old in sorted(self._held):
            if len(self._held) - len(gone) < self._most:
                break
            if old != self.current and old not in live:
                gone.append(old)
        if len(self._held) - len(gone) >= self._most:
            raise WorkerError(
                f"expected a free slot for version {version} of the adapter, got {self._most} versions in use: "
                f"{name_some(self._held)}",
                stage="refit",
            )
        self._held = [old for old in self._held if old not in gone]
        return tuple(gone)

    def hold(self, version: int) -> None:
        if version not in self._held:
            self._held.append(version)

    def use(self, version: int) -> None:
        self.check(version)
        self.current = version

    def resolved(self, version: int | None) -> int:
        """Return the version of a row, or `BASE`.

        Raises:
            WorkerError: it names none, and none was received yet; or it was retired.
        """
        if version is None:
            if self.current is None:
                raise WorkerError(
                    "expected an adapter, none was received yet; bring one by a refit", stage="generation"
                )
            return self.current
        if version != BASE:
            self.check(version)
        return version

    def check(self, version: int) -> None:
        """Raises:
        WorkerError: the version is not held.
        """
        if version not in self._held:
            raise WorkerError(
                f"expected version {version} of the adapter among those that are held, got "
                f"{name_some(self._held) or 'none'}; it was retired, or never received",
                stage="generation",
            )

    def check_request(self, versions: Sequence[int]) -> None:
        """Raises:
        WorkerError: a row would have a version that is not held.
        """
        named: Sequence[int | None] = versions or (None,)
        for version in set(named):
            self.resolved(version)


class HeldAdapters(ABC):
    """Versions of one adapter of a model.

    Args:
        most: versions that are held at once.
    """

    device: torch.device | None = None
    """Device of the tensors; None: they stay where they are."""

    def __init__(self, *, most: int) -> None:
        self.versions = AdapterVersions(most=most)
        self.known: dict[str, WeightSlot] = {}
        """Tensors of a version, as they are received."""

    def _expect(self, layer: AdaptedLayer, weight: torch.Tensor, *, rank: int) -> None:
        """Know the tensors of an adapted layer, which come in the dtype of its weight."""
        dtype = str(weight.dtype).removeprefix("torch.")
        for name, shape in layer.shapes(rank).items():
            self.known[name] = WeightSlot(name=name, dtype=dtype, shape=shape)

    def add(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, live: Collection[int] = ()) -> None:
        """Hold a version, which no row has before it is used; the tensors must not change from here on.

        Args:
            live: versions of rows that are being sampled, which stay.

        Raises:
            ValueError: a name is unknown or missing, or has another shape.
            WorkerError: there is no slot for it.
        """
        found = dict(tensors)
        match_adapter({name: tuple(tensor.shape) for name, tensor in found.items()}, self.known)
        gone = self.versions.begin(version, live=live)
        given = {name: found[name].to(self.device, getattr(torch, slot.dtype)) for name, slot in self.known.items()}
        self._take(version, given, gone)
        self.versions.hold(version)

    @abstractmethod
    def _take(self, version: int, given: Mapping[str, torch.Tensor], gone: Sequence[int]) -> None:
        """Keep the tensors of a version, and forget those of the versions that are gone."""

    @abstractmethod
    def fingerprints(self, version: int) -> Mapping[str, str]:
        """Return name -> fingerprint of A and s B, from the memory that serves the version."""


Held = TypeVar("Held", bound=HeldAdapters)


class ServesAdapters(GenerationInterface, Generic[Held]):
    """An engine that serves versions of an adapter beside the frozen weights, where it was given a place for them."""

    _adapters: Held | None = None
    """Versions that are held; None where the engine serves none."""
    _weight_version: int
    _is_continuous = True
    """False: rows of one call are decoded at a time, so that a version is put to use between two."""

    @property
    def adapter_slots(self) -> Held:
        """Return the versions of the adapter.

        Raises:
            NotImplementedError: the engine serves none.
        """
        if self._adapters is None:
            raise self._no_adapters()
        return self._adapters

    def update_adapter(self, adapter: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        # Copies: the caller may go on to train.
        self.hold_adapter(((name, tensor.clone()) for name, tensor in adapter), version=version)
        return self.use_adapter(version)

    def hold_adapter(self, adapter: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Hold a version of the adapter, which rows have from `use_adapter` on. Waits while rows have all slots.

        Raises:
            ValueError: a name is missing, unknown or of another shape.
        """
        slots = self.adapter_slots
        if self._decoding is None:
            slots.add(version, adapter)
            return
        found = dict(adapter)

        def attempt(live: set[int]) -> bool:
            if not slots.versions.has_room(version, live):
                return False
            slots.add(version, found.items(), live=live)
            return True

        self._decoding.between_turns(attempt, waits_for=f"a slot for version {version} of the adapter")

    def use_adapter(self, version: int) -> int:
        """Let rows that begin from here on have a version that is held; return the version in use."""
        if self._decoding is None or not self._is_continuous:
            self._use_adapter(version)
        else:
            self._decoding.switch(lambda: self._use_adapter(version))
        return self._weight_version

    def _use_adapter(self, version: int) -> None:
        self.adapter_slots.versions.use(version)
        self._weight_version = version

    def match_adapter(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        return match_adapter(offered, self.adapter_slots.known)

    def adapter_fingerprints(self, version: int) -> Mapping[str, str]:
        return self.adapter_slots.fingerprints(version)

    def adapter_versions(self) -> tuple[int, ...]:
        return self.adapter_slots.versions.held
