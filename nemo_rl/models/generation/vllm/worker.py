"""One vLLM engine as a worker of a group: takes new weights from a refit, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.generation.vllm.engine import VllmEngine
from nemo_rl.models.weight_sync.buckets import RefitPlan, WeightSlot, free_bytes
from nemo_rl.models.weight_sync.ipc_handle import IpcHandle, device_id
from nemo_rl.models.weight_sync.receiver import RefitReceiver
from nemo_rl.models.weight_sync.refit_group import RefitGroupSpec
from nemo_rl.models.weight_sync.target import RefitTarget

__all__ = ["VllmWorker"]


class VllmWorker(RefitTarget, VllmEngine):
    """`VllmEngine` that `WeightSync` brings new weights to.

    Buckets are joined to weights on the engine's device, and each weight goes to vLLM when it is whole. vLLM holds the
    weights of a layer until all of them are there. For deltas a copy of all weights stays in this process, on the CPU.
    """

    def __init__(self, config: PolicyConfig, *, use_gpu: bool, weight_version: int = -1, number: int = 0) -> None:
        super().__init__(config, use_gpu=use_gpu, weight_version=weight_version, number=number)
        self._device = torch.device("cuda" if use_gpu else "cpu")
        self._receiver = RefitReceiver(self._expected, self._device, take=self.take_weight)

    def report_device_id(self) -> str:
        return device_id(self._device)

    def refit_free_bytes(self, *, on_device: bool) -> int:
        return free_bytes(self._device if on_device else torch.device("cpu"))

    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        return self._receiver.match(offered)

    def delta_base(self) -> int | None:
        return self._receiver.delta_base

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        self._receiver.forget_base()
        return super().update_weights(weights, version=version)

    def begin_refit(self, plan: RefitPlan, *, handle: IpcHandle | None = None) -> None:
        self.begin_weights()
        self._receiver.begin(plan, handle)

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        self._receiver.load(bucket)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        self._receiver.join(spec)

    def receive_weights(self) -> None:
        self._receiver.receive()

    def finish_refit(self, *, version: int) -> int:
        self._receiver.finish()
        self.finish_weights(version)
        return version

    def fingerprints(self) -> Mapping[str, str]:
        return self._weights.fingerprints()

    def shutdown(self) -> None:
        self._receiver.close()
        super().shutdown()
