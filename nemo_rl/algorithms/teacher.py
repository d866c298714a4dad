"""The teacher of a distillation: a second policy that trains nothing, its processes and what the driver knows of it.

Called by `setup`. With `cluster.launcher: local` it is another object of the process; under Ray it has workers of its
own, which on GPUs share those of the policy's workers and leave them between its passes.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

from nemo_rl.algorithms.engines import gpu_share, log_place
from nemo_rl.algorithms.stages.stage import Teacher
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.distributed.calls import ask
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.job_store import reserve_port
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerGroup
from nemo_rl.models.hf.loading import decoder_sizes, load_model_config
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.utils.deadlines import StartUp

__all__ = ["local_teacher", "rank_specs", "ray_teacher", "teacher_of", "worker_spec"]


def worker_spec(config: MasterConfig, rank: RankSpec) -> WorkerSpec:
    """Return the spec of one rank of the recipe's policy, without what only a policy that is trained has."""
    return WorkerSpec(
        policy=config.policy,
        rank=rank,
        num_steps=config.grpo.max_num_steps,
        keep_reference=False,
        seed=config.grpo.seed,
        use_gpu=config.cluster.gpus_per_node > 0,
        threads=config.cluster.threads_per_worker,
        collective_timeout_s=config.cluster.collective_timeout_s,
        start_timeout_s=config.cluster.worker_start_timeout_s,
        sharing=config.device_sharing,
    )


def rank_specs(world_size: int, address: str, port: int) -> list[RankSpec]:
    """Return the ranks of a job that meets at an address."""
    return [
        RankSpec(rank=rank, world_size=world_size, master_addr=address, master_port=port) for rank in range(world_size)
    ]


def local_teacher(config: MasterConfig, stack: ExitStack) -> WorkerGroup | None:
    """Make the teacher in this process, after the policy's worker; None without distillation."""
    if not config.loss_fn.distillation.enabled:
        return None
    spec = worker_spec(config.as_teacher, RankSpec(rank=0, world_size=1))
    joined = dataclasses.replace(spec, joins_process=True)
    teacher = LocalWorkerGroup(lambda: build_policy_worker(joined))
    stack.callback(teacher.shutdown)
    return teacher


def ray_teacher(
    config: MasterConfig, cluster: RayVirtualCluster, stack: ExitStack, start: StartUp
) -> RayWorkerGroup | None:
    """Begin the start of the teacher's workers; None without distillation."""
    world_size = config.num_teacher_workers
    if not world_size:
        return None
    teacher = RayWorkerGroup(
        "teacher",
        world_size=world_size,
        placement=RayPlacement(
            num_gpus=gpu_share(config),
            placement_group=cluster.placement_group if cluster.uses_gpu else None,
            bundles=cluster.policy_bundles if cluster.uses_gpu else (),
        ),
        **log_place(config),
    )
    stack.callback(teacher.shutdown)
    with start.waiting_for("the first worker of the teacher"):
        address, port = teacher.rendezvous(reserve_port, timeout_s=start.timeout_s)
    seen = config.as_teacher
    specs = [{"spec": worker_spec(seen, rank)} for rank in rank_specs(world_size, address, port)]
    teacher.begin_start(build_policy_worker, specs)
    return teacher


def teacher_of(config: MasterConfig, workers: WorkerGroup | None, *, address: DataPlaneAddress) -> Teacher | None:
    """Return what a step's stages need of the teacher, whose workers have started; None without distillation."""
    if workers is None:
        return None
    settings = config.teacher_policy
    layout = ParallelLayout.of_policy(settings, world_size=workers.world_size)
    policy = TQPolicy(workers, address=address, timeout_s=config.cluster.stage_timeout_s, layout=layout)
    policy.run(ask(TQWorker.rest), "start")
    student, taught = (decoder_sizes(load_model_config(each.model_name)) for each in (config.policy, settings))
    return Teacher(
        policy=policy,
        settings=settings,
        top_k=config.loss_fn.distillation.top_k,
        vocab_size=min(student["vocab_size"], taught["vocab_size"]),
    )
