"""One embedded engine as a worker of a group: starts it, and takes new weights from a refit."""

from __future__ import annotations

import torch

from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.weight_sync.target import ModuleRefitTarget

__all__ = ["EngineWorker", "build_engine_worker"]


class EngineWorker(ModuleRefitTarget, TorchEngine):
    """`TorchEngine` that `WeightSync` brings new weights to."""

    @property
    def refit_module(self) -> torch.nn.Module:
        return self._loaded_model()

    def hold_version(self, version: int) -> None:
        self._weight_version = version

    def shutdown(self) -> None:
        self.leave_refit()
        super().shutdown()


def build_engine_worker(spec: EngineSpec) -> EngineWorker:
    """Starts one replica; its first weights come by refit."""
    torch.set_num_threads(spec.threads)
    engine = EngineWorker.from_config(spec.policy, device="cuda" if spec.use_gpu else "cpu", number=spec.number)
    assert isinstance(engine, EngineWorker)
    return engine
