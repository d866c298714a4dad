"""`Engine`: model and optimizer of one rank, as the other parts of a policy worker see them.

`DTensorEngine` and `MegatronEngine` are named by import path (`config.parts.TRAINING_ENGINES`), for each takes seconds
to import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.hf.files import Box
from nemo_rl.models.policy.hooks import HookPoints
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.policy.observer import NO_OBSERVER, PassObserver
from nemo_rl.models.policy.routes.worker_replay import PassRoutes, Routers
from nemo_rl.models.policy.steps import BatchForm, RankInfo, Runner
from nemo_rl.models.policy.workers.base import HostBuffers, Placement
from nemo_rl.utils.flops import TransformerShape

__all__ = ["Engine", "EngineFactory", "Schedule", "Snapshot"]


class Schedule(Protocol):
    """Learning rate, one step per training call."""

    def apply(self) -> float:
        """Put the settings of the next call into the optimizer and return its learning rate."""

    def advance(self) -> None:
        """Advance by one training call."""


class Snapshot(Protocol):
    """One rank's part of a model, and of its optimizer, at one moment."""

    def write(self, *, weights: Path, optimizer: Path | None, group: dist.ProcessGroup) -> None:
        """(collective over `group`: the ranks of the job) Write the HF folder at `weights`; optimizer, schedule and
        random state at `optimizer`.

        Raises:
            CheckpointError: on every rank; what was in the folders before is left as it was.
        """


class Engine(ABC):
    """Model, optimizer and passes of one rank. Methods marked (collective): on every rank, in the same order."""

    flops_shape: TransformerShape
    schedule: Schedule
    context: dist.ProcessGroup | None
    """Ranks that share this rank's sequences; None on one."""
    pass_dtype: torch.dtype | None = None
    """Dtype to which parameters are cast for a pass; None where a pass takes them as they are held."""

    @abstractmethod
    def runner(self, layout: BatchForm, routes: PassRoutes, observer: PassObserver = NO_OBSERVER) -> Runner:
        """Run the microbatches of one call."""

    @abstractmethod
    def hook_points(self) -> HookPoints:
        """Return the sites of the model on this rank."""

    @abstractmethod
    def routers(self, *, validates: bool) -> Routers:
        """Return the model's routers, which ask a replayer from here on.

        Raises:
            ConfigError: the model has none, or of a kind that takes no routes.
        """

    # Places of tensors.

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return this rank's part of every weight and persistent buffer."""

    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, which the schedule writes to."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Free them."""

    @abstractmethod
    def moments(self) -> Iterator[torch.Tensor]:
        """Return the optimizer's state on this rank, as far as it moves between the device and the CPU."""

    @property
    def cpu_offload(self) -> bool:
        """Return whether weights and optimizer never leave the CPU."""
        return False

    @abstractmethod
    def move(self, placement: Placement, host: HostBuffers) -> None:
        """Bring model and optimizer state where they belong; called on a GPU only, without gradients."""

    @abstractmethod
    def check_placement(self, placement: Placement) -> None:
        """Raise AssertionError for a tensor that is elsewhere."""

    # Full weights and checkpoints.

    @abstractmethod
    def weight_infos(self) -> dict[str, TensorInfo]:
        """Return name, shape and dtype of every weight in HF naming, in export order."""

    @abstractmethod
    def full_weights(self, dtypes: Mapping[str, torch.dtype] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Yield full weights on the device, one at a time, in the order of `weight_infos`.

        Args:
            dtypes: of weights that are cast, where possible before they are gathered; the others stay as they are.
        """

    @abstractmethod
    def shards(self, kind: Literal["weights", "adapter"]) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield each part that this rank holds of the weights of `full_weights`, or of the tensors of `full_adapter`:
        name, box of the whole, and values, which share memory with the model unless they are cast. A part may be a copy
        of another rank's."""

    # Adapters; an engine without `policy.lora` has none.

    def adapter_infos(self) -> dict[str, TensorInfo]:
        """Return name, shape and dtype of every adapter tensor, in the order of `full_adapter`."""
        return {}

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return this rank's part of every adapter tensor."""
        yield from ()

    def full_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Yield A and B of every adapter, whole, in float32 on the device, one at a time; B without its
        scale."""
        yield from ()

    def without_adapter(self) -> AbstractContextManager[None]:
        """Let the engine compute as the frozen model inside the block."""
        raise NotImplementedError("this engine has no adapter; set policy.lora.enabled=true")

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Yield full weights on the CPU, one at a time."""

    @abstractmethod
    def snapshot(self, *, with_optimizer: bool, copies: bool) -> Snapshot:
        """(collective) Return what a checkpoint holds of this moment.

        Args:
            with_optimizer: and of the optimizer, its schedule and the random state.
            copies: in the memory of this rank's process, for a write that runs beside the training; else it is
                written before anything changes.
        """

    @abstractmethod
    def load(self, *, weights: Path, optimizer: Path | None) -> None:
        """(collective) Continue from a checkpoint of any layout."""

    @abstractmethod
    def close(self) -> None:
        """End the process groups that were made here. Idempotent."""


class EngineFactory(Protocol):
    """(collective) Makes the engine of one rank."""

    def __call__(
        self, config: PolicyConfig, here: RankInfo, *, num_steps: int, collective_timeout_s: float, seed: int
    ) -> Engine:
        """Args:
            num_steps: training calls of the whole run, for the learning-rate schedule.
            collective_timeout_s: deadline of a collective in groups that are made here.

        Raises:
            ModelFolderError: the model's folder is missing or incomplete.
            ConfigError: the model cannot run in this layout.
        """
