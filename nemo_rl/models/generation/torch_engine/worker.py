"""One embedded engine as a worker of a group: starts it, and loads weights from a bundle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.weight_bundle import WeightBundle

__all__ = ["EngineSpec", "EngineWorker", "build_engine_worker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What one replica needs to start."""

    policy: PolicyConfig
    use_gpu: bool = False
    threads: int = 1


class EngineWorker(TorchEngine):
    """`TorchEngine` that takes its weights from a `WeightBundle`."""

    def load_bundle(self, bundle: WeightBundle, *, version: int) -> int:
        """Loads every weight and returns the version now in use."""
        return self.update_weights(iter(bundle), version=version)


def build_engine_worker(spec: EngineSpec) -> EngineWorker:
    """Starts one replica; its first weights come by refit."""
    torch.set_num_threads(spec.threads)
    engine = EngineWorker.from_config(spec.policy, device="cuda" if spec.use_gpu else "cpu")
    assert isinstance(engine, EngineWorker)
    return engine
