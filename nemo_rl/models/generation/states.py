"""`EngineStates`: where weights and caches of an engine are while it samples, sleeps, and receives a refit; and
`ModuleMemory`, the memory of the embedded engine, whose caches end with each request.

A part of each built-in engine, as `DeviceStates` is of a policy worker. The levels are vLLM's: at 1 weights go to the
CPU's memory and caches are dropped; at 2 weights are dropped as well, and a refit brings the next ones. A refit into a
sleeping engine wakes its weights alone; caches come back with `prepare_for_generation`, when the policy has left the
device. Invariant: an engine that sleeps has no more memory in use than it had awake, or its sleep raises.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum

import torch

from nemo_rl.config.generation import DROPS_WEIGHTS, NO_SLEEP
from nemo_rl.errors import WorkerError
from nemo_rl.models.generation.interfaces import RankMemoryChange, SleepReport
from nemo_rl.models.weight_sync.transport import device_id

__all__ = ["EngineStates", "ModuleMemory"]

logger = logging.getLogger(__name__)

STAGE = "generation"


class EngineState(StrEnum):
    """State of an engine's memory."""

    AWAKE = "awake"
    WEIGHTS = "weights awake"
    """A refit writes weights, and there is no cache yet."""
    ASLEEP = "asleep"


class SleepingMemory(ABC):
    """The memory of an engine, on each of its ranks."""

    @abstractmethod
    def free_memory(self, level: int) -> Sequence[RankMemoryChange]:
        """Free caches, and move or drop weights."""

    @abstractmethod
    def wake_weights(self) -> Sequence[RankMemoryChange]:
        """Take memory for weights again; after level 1 they are as before."""

    @abstractmethod
    def wake_caches(self) -> Sequence[RankMemoryChange]:
        """Take memory for caches again; they are empty."""


class EngineStates:
    """Moves one engine between its states. Starts awake.

    Args:
        number: of the engine.
    """

    def __init__(self, memory: SleepingMemory, *, number: int) -> None:
        self._memory, self._number = memory, number
        self.state, self._level = EngineState.AWAKE, NO_SLEEP
        self.is_awake = True
        """True where the engine can sample."""
        self.has_weights = True
        """False between a sleep that has dropped the weights and the refit that brings others."""

    def sleep(self, level: int) -> SleepReport:
        """Fall asleep; an engine that sleeps already goes deeper at most."""
        self.wake_caches()
        if level <= self._level:
            return SleepReport(level=self._level, ranks=())
        if self.state is EngineState.ASLEEP:
            self.wake_weights()
            self.wake_caches()
        ranks = self._memory.free_memory(level)
        grown = [rank for rank, change in enumerate(ranks) if change.after > change.before]
        if grown:
            raise WorkerError(
                f"generation engine {self._number}: rank {grown[0]} has more memory in use asleep than awake "
                f"({ranks[grown[0]]}); set policy.generation.sleep_level=0",
                stage=STAGE,
            )
        self.has_weights = self.has_weights and level < DROPS_WEIGHTS
        self._change(EngineState.ASLEEP, ranks, level=level)
        return SleepReport(level=level, ranks=tuple(ranks))

    def wake_weights(self) -> None:
        """Be ready for a refit. Idempotent."""
        if self.state is EngineState.ASLEEP:
            self._change(EngineState.WEIGHTS, self._memory.wake_weights(), level=self._level)

    def wake(self) -> None:
        """Be ready to sample. Idempotent.

        Raises:
            WorkerError: the weights were dropped, and no refit has brought others.
        """
        if not self.has_weights and self.state is not EngineState.AWAKE:
            raise WorkerError(
                f"generation engine {self._number} dropped its weights when it fell asleep, and no refit has brought "
                "others",
                stage=STAGE,
            )
        self.wake_weights()
        self.wake_caches()

    def wake_caches(self) -> None:
        """Take memory for caches; weights are awake. Idempotent."""
        if self.state is EngineState.WEIGHTS:
            self._change(EngineState.AWAKE, self._memory.wake_caches(), level=NO_SLEEP)

    def not_awake(self) -> WorkerError:
        return WorkerError(
            f"generation engine {self._number} cannot sample, it is {self.state.value}; call prepare_for_generation "
            "first",
            stage=STAGE,
        )

    def _change(self, state: EngineState, ranks: Sequence[RankMemoryChange], *, level: int) -> None:
        before, self.state, self._level = self.state, state, level
        self.is_awake = state is EngineState.AWAKE
        for rank, change in enumerate(ranks):
            logger.info(
                "engine %d, rank %d: %s -> %s at level %d: %s",
                *(self._number, rank, before.value, state.value, level, change),
            )


class ModuleMemory(SleepingMemory):
    """Moves the weights of a module to the CPU and back, or drops them.

    A weight without memory keeps its shape: it is one number, seen at every place. The parameters stay the same
    objects, so that what is tied or hooked stays so. Buffers stay: most of them are tables that no refit brings.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._kept: list[torch.Tensor | None] = []
        """Copies on the CPU of the weights that sleep, in the order of the parameters; None where one was dropped."""

    def free_memory(self, level: int) -> list[RankMemoryChange]:
        before, is_on_cpu = self._used_bytes(), self._device.type == "cpu"
        if level < DROPS_WEIGHTS and is_on_cpu:
            return [self._change(before, "weights stay, they are on the CPU")]
        for weight in self._model.parameters():
            self._kept.append(weight.detach().to("cpu", copy=True) if level < DROPS_WEIGHTS else None)
            weight.data = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
        if not is_on_cpu:
            torch.cuda.empty_cache()
        return [self._change(before)]

    def wake_weights(self) -> list[RankMemoryChange]:
        before = self._used_bytes()
        for weight, kept in zip(self._model.parameters(), self._kept, strict=bool(self._kept)):
            weight.data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            if kept is not None:
                weight.data.copy_(kept)
        self._kept = []
        return [self._change(before)]

    def wake_caches(self) -> list[RankMemoryChange]:
        return []

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _used_bytes(self) -> int:
        return sum(weight.untyped_storage().nbytes() for weight in self._model.parameters())

    def _change(self, before: int, note: str = "") -> RankMemoryChange:
        return RankMemoryChange(device=device_id(self._device), before=before, after=self._used_bytes(), note=note)
