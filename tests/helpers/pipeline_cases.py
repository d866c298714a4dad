"""Replica groups of two ranks in several layouts, each with fresh workers: a step over two stores, planted failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_rl.config.dtensor import DTensorConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from tests.helpers.replica_groups import (
    Plane,
    StepReport,
    in_the_fetch,
    in_the_loss,
    one_step,
    planted,
    shared_cluster,
    start,
)
from tests.helpers.tiny_model import tiny_policy

PIPELINE = "megatron pp2"


def megatron(folder: str, **sizes: int) -> PolicyConfig:
    return tiny_policy(
        folder, dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=MegatronConfig(enabled=True, **sizes)
    )


LAYOUTS: dict[str, Callable[[str], PolicyConfig]] = {
    "megatron tp2": lambda folder: megatron(folder, tensor_model_parallel_size=2),
    PIPELINE: lambda folder: megatron(folder, pipeline_model_parallel_size=2),
    "dtensor cp2": lambda folder: tiny_policy(folder, dtensor_cfg=DTensorConfig(context_parallel_size=2)),
}
STORES = {
    "megatron tp2": ("noop", "shm"),
    PIPELINE: ("shm", "transfer_queue"),
    "dtensor cp2": ("noop", "shm"),
}
"""Rank 1 writes the pipeline's results, and noop lives in the process of rank 0; `test_replica_group` has DTensor over
TransferQueue."""


def in_the_first_stage(worker: TQWorker, meta: KVBatchMeta) -> None:
    """Rank 0 raises in its layer; rank 1 waits for its activations."""
    fail_in_a_layer(worker, rank=0)
    worker.get_logprobs_presharded(meta)


def in_the_last_stage(worker: TQWorker, meta: KVBatchMeta) -> None:
    """Rank 1 raises in its layer; rank 0 is through with the pass and waits for the sums."""
    fail_in_a_layer(worker, rank=1)
    worker.get_logprobs_presharded(meta)


def fail_in_a_layer(worker: TQWorker, *, rank: int) -> None:
    def fail(*_: object) -> None:
        raise ValueError(f"planted in a layer of rank {rank}")

    if worker.rank == rank:
        worker.engine.model.module.decoder.layers[0].mlp.register_forward_pre_hook(fail)


PLANTS: dict[str, Callable[[TQWorker, KVBatchMeta], None]] = {
    plant.__name__: plant for plant in (in_the_fetch, in_the_first_stage, in_the_last_stage, in_the_loss)
}
NUM_JOBS = sum(len(stores) for stores in STORES.values()) + len(PLANTS)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """All that one rank saw."""

    steps: dict[str, dict[str, StepReport]]
    """By layout and store."""
    failures: dict[str, tuple[str, str, float]]
    """Kind, text and seconds of what this rank raised, in the pipeline."""


def everything(rank: int, folder: str, ports: list[int]) -> RankReport:
    """A fresh job for each step and each failure, in the same two processes."""
    left = iter(ports)
    steps: dict[str, dict[str, StepReport]] = {}
    with shared_cluster(rank):
        destroy_process_group()
        for name, policy in LAYOUTS.items():
            for store in STORES[name]:
                worker = start(rank, folder, next(left), policy=policy(folder))
                steps.setdefault(name, {})[store] = one_step(worker, Plane(store))
                worker.shutdown()
    policy = LAYOUTS[PIPELINE](folder)
    failures = {
        name: planted(rank, folder, next(left), plant, policy=policy, plane=Plane("shm"))
        for name, plant in PLANTS.items()
    }
    return RankReport(steps=steps, failures=failures)
