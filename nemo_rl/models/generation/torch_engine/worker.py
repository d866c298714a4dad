"""One embedded engine as a worker of a group: starts it, takes new weights from a refit, and is traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nemo_rl.models.generation.interfaces import EngineSpec, RecordedEngine, SleepReport, TracedEngine
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.generation.turn_batch import ContinuousSpec
from nemo_rl.models.weight_sync.buckets import WeightSlot
from nemo_rl.models.weight_sync.target import ModuleRefitTarget

__all__ = ["EngineWorker", "build_engine_worker"]


class EngineWorker(TorchEngine, TracedEngine, RecordedEngine, ModuleRefitTarget):
    """A `TorchEngine` that `WeightSync` brings new weights to, and whose decoding the live tracer shows."""

    @property
    def refit_module(self) -> torch.nn.Module:
        return self._loaded_model()

    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        # What is free is asked for after this.
        self._states.wake_weights()
        return super().match_refit(offered)

    def hold_version(self, version: int) -> None:
        if self._decoding is not None:
            self._decoding.check_rest()
        self._weight_version = version
        self._states.has_weights = self._states.has_weights or version >= 0

    def sleep(self, level: int) -> SleepReport:
        report = super().sleep(level)
        if not self._states.has_weights:
            # A delta would build on weights that are gone.
            self._refit().forget_base()
        return report

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        self._refit().forget_base()
        return super().update_weights(weights, version=version)

    def begin_tracing(self, step: int, watches: Sequence[str], keys: Sequence[str]) -> None:
        if self._tracing is not None:
            self._tracing.begin(step, watches=watches, keys=keys)

    def end_tracing(self) -> None:
        if self._tracing is not None:
            self._tracing.end()

    def shutdown(self) -> None:
        self.leave_refit()
        super().shutdown()


def build_engine_worker(spec: EngineSpec) -> EngineWorker:
    torch.set_num_threads(spec.threads)
    engine = EngineWorker.from_config(
        spec.policy,
        device="cuda" if spec.use_gpu else "cpu",
        number=spec.number,
        num_engines=spec.num_engines,
        weight_version=spec.weight_version,
        trace=spec.trace,
        record=spec.record,
        adapter_slots=spec.adapter_slots,
    )
    assert isinstance(engine, EngineWorker)
    if spec.continuous:
        engine.decode_continuously(
            ContinuousSpec.of(spec, places=spec.policy.generation.max_batch_size),
            with_routes=spec.policy.router_replay.enabled,
        )
    if spec.sleep_level and spec.weight_version < 0:
        engine.sleep(spec.sleep_level)
    return engine
