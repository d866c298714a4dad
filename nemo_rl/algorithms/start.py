"""Starts the processes of a run: cluster, policy and teacher workers, engines, rollout workers, data plane.

Called by `setup`. Whatever was started is ended in reverse order when its block ends, also after an error.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from nemo_rl.algorithms.engines import (
    EngineStarts,
    RolloutStarts,
    engine_scheduler,
    engine_spec,
    gpu_share,
    local_engines,
    log_place,
    rollout_worker,
)
from nemo_rl.algorithms.observers import record_spec
from nemo_rl.algorithms.processes import cpus_per_bundle, num_clients, num_engine_bundles, other_cpus, run_environment
from nemo_rl.algorithms.scheduled_batches import RunSchedule
from nemo_rl.algorithms.teacher import local_teacher, rank_specs, ray_teacher
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.store_kinds import memory_plan
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.job_store import reserve_port
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet, WorkerGroup
from nemo_rl.errors import NemoRLError
from nemo_rl.experience.rollouts import RolloutSpec
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.utils.deadlines import StartUp

__all__ = ["RunProcesses", "open_cluster", "open_processes", "planned_stages", "what_starts"]

PLANNER = "nemo_rl_tools.plan"
"""Belongs to the tools, which a machine that trains need not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProcesses:
    """The processes of a run, as the driver calls them."""

    policy: WorkerGroup
    engines: WorkerFleet
    rollout: WorkerFleet
    teacher: WorkerGroup | None = None
    """The workers of a teacher; None without distillation."""
    address: str = "127.0.0.1"
    """Address of policy rank 0, as the other processes reach it."""


def open_cluster(
    config: MasterConfig, start: StartUp, forks: ForkServer | None
) -> AbstractContextManager[RayVirtualCluster | None]:
    """Return the cluster, to be opened; None in one process. On GPU an engine shares its GPU and its bundle with a
    policy worker, unless it stands apart."""
    if config.cluster.launcher != "ray":
        return nullcontext()
    colocated = config.policy.generation.colocated
    return RayVirtualCluster(
        config.cluster,
        other_cpus=other_cpus(config),
        cpus_per_bundle=cpus_per_bundle(config),
        num_engine_bundles=num_engine_bundles(config),
        engine_nodes=colocated.num_nodes,
        gpus_per_engine_node=colocated.gpus_per_node,
        environment=run_environment(config),
        start=start,
        forks=forks,
        logs_to=config.logger.log_dir / "ray_logs",
    )


@contextmanager
def open_processes(
    config: MasterConfig,
    cluster: RayVirtualCluster | None,
    start: StartUp,
    *,
    rollout: RolloutSpec,
    trace: TraceSpec | None,
    stages: Collection[str],
    schedule: RunSchedule | None,
) -> Iterator[tuple[RunProcesses, DataPlaneClient]]:
    """Start workers, engines and the data plane.

    Args:
        trace: settings of workers and engines whose model is shown live.
        stages: names of the stages of a step.
        schedule: the one that engines follow.
    """
    record = record_spec(config.diagnostics.record, config.policy, stages=stages, log_dir=config.logger.log_dir)
    keeps_reference, planned = config.loss_fn.reference_policy_kl_penalty > 0, planned_stages(config)

    def worker(rank: RankSpec) -> WorkerSpec:
        spec = _worker_spec(config, rank)
        return replace(spec, keep_reference=keeps_reference, record=record, trace=trace, planned=planned)

    def engine(number: int) -> EngineSpec:
        script = () if schedule is None else tuple(schedule.scripts.get(number, ()))
        return engine_spec(config, number, trace=trace, script=script)

    with ExitStack() as stack:
        if cluster is None:
            groups = _local_groups(config, stack, worker=worker, engine=engine, rollout=rollout)
        else:
            groups = _ray_groups(config, cluster, stack, start, worker=worker, engine=engine, rollout=rollout)
        plane = config.active_data_plane
        if plane.mooncake.host == "node" and cluster is not None:
            plane = plane.model_copy(update={"mooncake": plane.mooncake.model_copy(update={"host": cluster.address})})
        # The workers build while the storage actors of the data plane start.
        client = build_data_plane_client(
            plane, run_id=uuid.uuid4().hex[:12], role="owner", log_dir=config.logger.log_dir, start=start
        )
        stack.callback(client.close)
        for group in (*groups.rollout.members, *groups.engines.members, groups.policy, groups.teacher):
            if isinstance(group, RayWorkerGroup):
                with start.waiting_for(f"the {group.name} workers"):
                    group.finish_start(timeout_s=start.timeout_s)
        yield groups, client


def _local_groups(
    config: MasterConfig,
    stack: ExitStack,
    *,
    worker: Callable[[RankSpec], WorkerSpec],
    engine: Callable[[int], EngineSpec],
    rollout: RolloutSpec,
) -> RunProcesses:
    alone = RankSpec(rank=0, world_size=1)
    spec = worker(alone)
    policy = LocalWorkerGroup(lambda: build_policy_worker(spec))
    stack.callback(policy.shutdown)
    teacher = local_teacher(_worker_spec(config.as_teacher, alone), stack) if config.num_teacher_workers else None
    engines = WorkerFleet([])
    if config.policy.generation.num_replicas:
        engines = local_engines(config, engine)
    stack.callback(engines.shutdown)
    replicas, build = engine_scheduler(config, engines), rollout_worker(config)
    rollouts = WorkerFleet([LocalWorkerGroup(lambda: build(rollout, generation=replicas))])
    stack.callback(rollouts.shutdown)
    return RunProcesses(policy=policy, engines=engines, rollout=rollouts, teacher=teacher)


def _ray_groups(
    config: MasterConfig,
    cluster: RayVirtualCluster,
    stack: ExitStack,
    start: StartUp,
    *,
    worker: Callable[[RankSpec], WorkerSpec],
    engine: Callable[[int], EngineSpec],
    rollout: RolloutSpec,
) -> RunProcesses:
    log = log_place(config)
    policy = RayWorkerGroup(
        "policy",
        world_size=cluster.num_workers,
        placement=RayPlacement(
            num_gpus=gpu_share(config),
            placement_group=cluster.placement_group,
            bundles=cluster.policy_bundles,
            environment=config.policy.worker_env_vars,
        ),
        **log,
    )
    stack.callback(policy.shutdown)
    starts = EngineStarts(config, engine, cluster)
    engines = starts.fleet(timeout_s=start.timeout_s)
    stack.callback(engines.shutdown)
    starting = RolloutStarts(config, rollout, lambda: engine_scheduler(config, engines))
    rollouts = starting.fleet(timeout_s=start.timeout_s)
    stack.callback(rollouts.shutdown)
    with start.waiting_for("the first policy worker"):
        address, port = policy.rendezvous(reserve_port, timeout_s=start.timeout_s)
    ranks = rank_specs(cluster.num_workers, address, port)
    if config.sleep_level:
        # They look at free memory when they start, and sleep when the policy comes.
        starts.begin_all()
        with start.waiting_for("the generation workers"):
            starts.finish_all(timeout_s=start.timeout_s)
    policy.begin_start(build_policy_worker, [{"spec": worker(rank)} for rank in ranks])
    teacher = None
    if config.num_teacher_workers:
        teacher = ray_teacher(
            partial(_worker_spec, config.as_teacher),
            cluster,
            stack,
            start,
            num_workers=config.num_teacher_workers,
            num_gpus=gpu_share(config),
            log=log,
        )
    if not config.sleep_level:
        starts.begin_all()
    starting.begin_all()
    return RunProcesses(policy=policy, engines=engines, rollout=rollouts, teacher=teacher, address=address)


def _worker_spec(config: MasterConfig, rank: RankSpec) -> WorkerSpec:
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


def planned_stages(config: MasterConfig) -> dict[str, int]:
    """Return the bytes of a GPU by stage, as `nemo-rl plan` counts them; empty on CPUs, and without a plan, which
    supervised training has none of. With `gradient_accumulation: auto` gradients count whole."""
    if config.cluster.gpus_per_node == 0 or config.sft.enabled:
        return {}
    sizes = config.policy.dtensor_cfg
    if sizes.gradient_accumulation == "auto":
        sizes = sizes.model_copy(update={"gradient_accumulation": "whole"})
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"dtensor_cfg": sizes})})
    try:
        found: dict[str, int] = vars(importlib.import_module(PLANNER))["stage_bytes"](config)
    except (ModuleNotFoundError, NemoRLError):
        # A model that the plan does not know is no reason not to train it.
        return {}
    return found


def what_starts(config: MasterConfig) -> str:
    """Return a line about the processes that a run starts."""
    plan = memory_plan(config.active_data_plane, num_processes=num_clients(config))
    if config.cluster.launcher == "local":
        parts = "policy, teacher, engine" if config.num_teacher_workers else "policy, engine"
        parts = "policy" if config.sft.enabled else parts
        return "; ".join(filter(None, (f"starting {parts} and rollout worker in this process", plan)))
    count = config.num_teacher_workers
    teacher = f"{count} teacher worker{'s' if count > 1 else ''}, " if count else ""
    rollouts = config.experience.num_workers
    workers = f"{rollouts} rollout worker{'s' if rollouts > 1 else ''}"
    ray = "starting Ray" if config.cluster.address is None else f"joining Ray at {config.cluster.address}"
    what = (
        f"{ray}, {config.cluster.num_workers} policy workers, {teacher}"
        f"{config.policy.generation.num_replicas} engines, {workers}, data plane {config.active_data_plane.impl}"
    )
    return "; ".join(filter(None, (what, plan)))
