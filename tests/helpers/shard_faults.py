"""Workers of refits by shards that end, or hold something else than they were sent, where a test says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Literal, cast

import torch

from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.models.weight_sync.shard_transport import ShardReceiver, ShardSender

__all__ = [
    "FAULTS",
    "GATE_UP",
    "VOCABULARY",
    "FaultyShardEngine",
    "build_dying_policy",
    "build_faulty_engine",
    "end_at",
]

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
VOCABULARY = "lm_head.weight"


def _swap_halves(weight: torch.Tensor, before: torch.Tensor) -> None:
    weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))


def _keep_an_expert(weight: torch.Tensor, before: torch.Tensor) -> None:
    weight[3] = before[3]


def _shift_rows(weight: torch.Tensor, before: torch.Tensor) -> None:
    weight.copy_(weight.roll(1, dims=0))


FAULTS: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], None]]] = {
    "halves of gate_up are swapped": (GATE_UP, _swap_halves),
    "an expert is of the version before": (GATE_UP, _keep_an_expert),
    "rows of the vocabulary are off by one": (VOCABULARY, _shift_rows),
}


def end_at(kind: type, method: str, number: int) -> None:
    """Let this process end in the given round of the next refit, counted from 0."""
    original, count = getattr(kind, method), 0

    def counted(self: object, *arguments: Any) -> object:
        nonlocal count
        count += 1
        if count == number + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    setattr(kind, method, counted)


class FaultyShardEngine(EngineWorker):
    """The embedded engine with faults that are planted from outside."""

    fault: str | None = None

    def plant(self, *, fault: str | None) -> None:
        self.fault = fault

    def end_at(self, *, number: int) -> None:
        end_at(ShardReceiver, "_finish", number)

    def receive_shards(self, kind: Literal["weights", "adapter"]) -> None:
        if self.fault is None:
            super().receive_shards(kind)
            return
        name, damage = FAULTS[self.fault]
        weight = self.refit_module.state_dict()[name]
        before = weight.clone()
        super().receive_shards(kind)
        damage(weight, before)


def build_faulty_engine(spec: EngineSpec) -> FaultyShardEngine:
    torch.set_num_threads(1)
    return cast(
        "FaultyShardEngine",
        FaultyShardEngine.from_config(spec.policy, number=spec.number, num_engines=2, adapter_slots=3),
    )


class DyingPolicy:
    """A worker of the policy that ends where it is told to."""

    def __init__(self, worker: TQWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def end_at(self, *, number: int) -> None:
        end_at(ShardSender, "_begin", number)

    def fail_at(self, *, number: int) -> None:
        """Fail in the given round of the next refit."""
        original, count = ShardSender._begin, 0

        def counted(self: ShardSender, place: int) -> None:
            nonlocal count
            count += 1
            if count == number + 1:
                ShardSender._begin = original  # type: ignore[method-assign]
                raise OSError("the disk of this test is full")
            original(self, place)

        ShardSender._begin = counted  # type: ignore[method-assign]


def build_dying_policy(spec: WorkerSpec) -> DyingPolicy:
    return DyingPolicy(build_policy_worker(spec))
