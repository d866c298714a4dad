"""A policy of one process and engines of any kind, brought to new weights with a receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import LossConfig
from nemo_rl.distributed.calls import Call, Request, ask
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.worker_fleet import WorkerFleet
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerGroup
from nemo_rl.models.loading import load_model_config
from nemo_rl.models.policy.workers.compose import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.factory import receipt_spec
from tests.helpers.engine_process import EngineChild
from tests.helpers.tiny_model import tiny_batch

STEPS = 400
"""Of the learning-rate schedule."""


@contextmanager
def policy_of(config: PolicyConfig) -> Iterator[WorkerGroup]:
    """One worker in this process."""
    spec = WorkerSpec(policy=config, rank=RankSpec(rank=0, world_size=1), num_steps=STEPS, keep_reference=False, seed=0)
    group = LocalWorkerGroup(lambda: build_policy_worker(spec))
    yield group
    group.shutdown()


class Proxy:
    """A worker whose methods are called elsewhere."""

    def __init__(self, child: EngineChild) -> None:
        self._child = child

    def __getattr__(self, name: str) -> Callable[..., object]:
        return partial(self._child, name)


@dataclass(kw_only=True)
class Bench:
    """A policy and one engine with faults."""

    parties: RefitParties
    sync: WeightSync
    plant: Callable[..., object]
    version: int = 0

    def step(self) -> None:
        """One optimizer step, and a refit."""
        train(self.parties.policy, seed=self.version)
        self.version += 1
        self.sync.sync(self.version)


def train(policy: WorkerGroup, *, seed: int = 0) -> None:
    """One optimizer step."""

    def run(request: Request[object]) -> None:
        policy.run(Call(request=request, stage="train", timeout_s=60))

    run(ask(PolicyWorker.prepare_for_training))
    run(ask(PolicyWorker.train, batch=tiny_batch(8, seed=seed), loss_fn=PolicyLoss(config=LossConfig())))


def parties_of(config: PolicyConfig, engines: list[object], policy: WorkerGroup) -> RefitParties:
    """With a receipt of each refit."""
    fleet = WorkerFleet([LocalWorkerGroup(lambda engine=engine: engine) for engine in engines])
    spec = receipt_spec(config, load_model_config(config.model_name).to_dict())
    assert spec is not None, "receipts are on by default"
    # Refits of a test follow each other at once, without the time of a step.
    spec = replace(spec, every=1)
    return RefitParties(policy=policy, engines=fleet, timeout_s=60, max_bucket_bytes=50_000, receipt=spec)
