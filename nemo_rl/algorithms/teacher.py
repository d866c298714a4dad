"""The teacher of a distillation: a second policy that trains nothing, its processes and what the driver knows of it.

Started by `start`, and put together by `setup`. With `cluster.launcher: local` it is another object of the process;
under Ray it has its own workers, which on GPUs share those of the policy's workers and leave them between its
passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack

from nemo_rl.algorithms.engines import LogPlace
from nemo_rl.algorithms.stages.stage import Teacher
from nemo_rl.config.distillation import DistillationConfig, teacher_policy
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.job_store import reserve_port
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerGroup, ask
from nemo_rl.models.hf.loading import decoder_sizes, load_model_config
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.utils.deadlines import StartUp

__all__ = ["build_teacher", "local_teacher", "rank_specs", "ray_teacher"]


def rank_specs(world_size: int, address: str, port: int) -> list[RankSpec]:
    return [
        RankSpec(rank=rank, world_size=world_size, master_addr=address, master_port=port) for rank in range(world_size)
    ]


def local_teacher(spec: WorkerSpec, stack: ExitStack) -> WorkerGroup:
    """Make the teacher in this process, after the policy's worker."""
    joined = dataclasses.replace(spec, joins_process=True)
    teacher = LocalWorkerGroup(lambda: build_policy_worker(joined))
    stack.callback(teacher.shutdown)
    return teacher


def ray_teacher(
    spec_of: Callable[[RankSpec], WorkerSpec],
    cluster: RayVirtualCluster,
    stack: ExitStack,
    start: StartUp,
    *,
    num_workers: int,
    num_gpus: float,
    log: LogPlace,
) -> RayWorkerGroup:
    """Begin the start of the teacher's workers.

    Args:
        num_gpus: share of a GPU of each.
    """
    teacher = RayWorkerGroup(
        "teacher",
        world_size=num_workers,
        placement=RayPlacement(
            num_gpus=num_gpus,
            placement_group=cluster.placement_group if cluster.uses_gpu else None,
            bundles=cluster.policy_bundles if cluster.uses_gpu else (),
        ),
        **log,
    )
    stack.callback(teacher.shutdown)
    with start.waiting_for("the first worker of the teacher"):
        address, port = teacher.rendezvous(reserve_port, timeout_s=start.timeout_s)
    specs = [{"spec": spec_of(rank)} for rank in rank_specs(num_workers, address, port)]
    teacher.begin_start(build_policy_worker, specs)
    return teacher


def build_teacher(
    config: DistillationConfig,
    student: PolicyConfig,
    workers: WorkerGroup | None,
    *,
    address: DataPlaneAddress,
    timeout_s: float,
) -> Teacher | None:
    """Return what a step's stages need of the teacher, whose workers have started; None without distillation."""
    if workers is None:
        return None
    settings = teacher_policy(config.teacher, student)
    layout = ParallelLayout.of_policy(settings, world_size=workers.world_size)
    policy = TQPolicy(workers, address=address, timeout_s=timeout_s, layout=layout)
    policy.run(ask(TQWorker.rest), "start")
    learns, taught = (decoder_sizes(load_model_config(each.model_name)) for each in (student, settings))
    return Teacher(
        policy=policy,
        settings=settings,
        top_k=config.top_k,
        vocab_size=min(learns["vocab_size"], taught["vocab_size"]),
    )
