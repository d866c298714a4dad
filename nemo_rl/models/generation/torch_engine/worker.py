"""One embedded engine as a worker of a group: starts it, and takes new weights from a refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.weight_sync.buckets import RefitPlan, WeightSlot, free_bytes
from nemo_rl.models.weight_sync.ipc_handle import IpcHandle, device_id
from nemo_rl.models.weight_sync.receiver import RefitReceiver
from nemo_rl.models.weight_sync.refit_group import RefitGroupSpec

__all__ = ["EngineSpec", "EngineWorker", "build_engine_worker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What one replica needs to start."""

    policy: PolicyConfig
    use_gpu: bool = False
    threads: int = 1
    number: int = 0
    """Of the replica."""


class EngineWorker(TorchEngine):
    """`TorchEngine` that `WeightSync` brings new weights to, bucket by bucket."""

    _receiver: RefitReceiver | None = None

    @property
    def device(self) -> torch.device:
        return self._loaded_model().device

    def report_device_id(self) -> str:
        """The GPU's UUID, or host and `cpu`."""
        return device_id(self.device)

    def refit_free_bytes(self, *, on_device: bool) -> int:
        """Memory that a buffer may take a part of: of the engine's device, or of this machine."""
        return free_bytes(self.device if on_device else torch.device("cpu"))

    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        """The policy's weights in this engine's dtypes.

        Raises:
            ValueError: a name is unknown or missing, or has another shape; the old weights stay in use.
        """
        return self._refit().match(offered)

    def begin_refit(self, plan: RefitPlan, *, handle: IpcHandle | None = None) -> None:
        """From here to `finish_refit` this engine holds no version."""
        self._weight_version = -1
        self._refit().begin(plan, handle)

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        """The next bucket, given as uint8, or read from the shared memory."""
        self._refit().load(bucket)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        """(collective over the refit group)"""
        self._refit().join(spec)

    def receive_weights(self) -> None:
        """(collective over the refit group) All buckets, while the policy sends them."""
        self._refit().receive()

    def finish_refit(self, *, version: int) -> int:
        """All weights have come; returns the version now in use."""
        self._refit().finish()
        self._weight_version = version
        return version

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None
        super().shutdown()

    def _refit(self) -> RefitReceiver:
        if self._receiver is None:
            self._receiver = RefitReceiver(self._loaded_model(), self.device)
        return self._receiver


def build_engine_worker(spec: EngineSpec) -> EngineWorker:
    """Starts one replica; its first weights come by refit."""
    torch.set_num_threads(spec.threads)
    engine = EngineWorker.from_config(spec.policy, device="cuda" if spec.use_gpu else "cpu", number=spec.number)
    assert isinstance(engine, EngineWorker)
    return engine
