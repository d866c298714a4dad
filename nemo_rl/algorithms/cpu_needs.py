"""Logical CPUs and data plane clients of a run. Read by `start`, which starts them, by preflight and plan."""

from __future__ import annotations

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.distributed.layout import ParallelLayout

__all__ = [
    "ROLLOUT_CPUS",
    "cpus_per_bundle",
    "logical_cpus",
    "num_clients",
    "num_engine_bundles",
    "other_cpus",
    "too_few_cpus",
]

ROLLOUT_CPUS = 1
"""CPUs of a rollout worker."""


def num_engine_bundles(config: MasterConfig) -> int:
    """Bundles of engines that are not colocated: one for each rank on GPUs, and one for each engine on CPUs."""
    generation = config.policy.generation
    if generation.colocated.enabled:
        return 0
    return generation.num_replicas * (generation.ranks_per_engine if config.cluster.gpus_per_node > 0 else 1)


def cpus_per_bundle(config: MasterConfig) -> int:
    """CPUs of a policy worker; on GPUs an engine, unless it is not colocated, and a teacher's worker share its
    bundle."""
    if config.cluster.gpus_per_node == 0:
        return 1
    return 1 + int(config.policy.generation.colocated.enabled) + int(config.loss_fn.distillation.enabled)


def other_cpus(config: MasterConfig) -> int:
    """CPUs of rollout, storage, and on CPU of the engines that Ray places, and of a teacher's workers."""
    plane, generation, is_cpu = config.active_data_plane, config.policy.generation, config.cluster.gpus_per_node == 0
    engines = generation.num_replicas if is_cpu and generation.colocated.enabled else 0
    teacher = config.num_teacher_workers if is_cpu else 0
    return (
        engines + teacher + ROLLOUT_CPUS * config.experience.num_workers + kind_named(plane.impl or "noop").cpus(plane)
    )


def logical_cpus(config: MasterConfig) -> int:
    """CPUs of the whole run."""
    return config.cluster.num_workers * cpus_per_bundle(config) + num_engine_bundles(config) + other_cpus(config)


def num_clients(config: MasterConfig) -> int:
    """Data plane clients: the driver, the rollout workers and the workers of policy and teacher that read or write."""
    if config.cluster.launcher == "local":
        return 1
    teacher = config.num_teacher_workers
    return (
        1
        + config.experience.num_workers
        + _worker_clients(config, config.policy, config.cluster.num_workers)
        + (_worker_clients(config, config.teacher_policy, teacher) if teacher else 0)
    )


def _worker_clients(config: MasterConfig, policy: PolicyConfig, num_workers: int) -> int:
    if config.active_data_plane.fetch_policy == "independent":
        return num_workers
    layout = ParallelLayout.of_policy(policy, world_size=num_workers)
    # Of a replica group the leader reads and the writer writes, which in a pipeline is another rank.
    return layout.dp * min(layout.pp, 2)


def too_few_cpus(config: MasterConfig, *, have: float) -> str:
    """Return a warning when `have` is less than `logical_cpus`."""
    return (
        f"cluster: {logical_cpus(config)} logical CPUs are needed ({config.cluster.num_workers} policy workers and "
        f"{other_cpus(config)} for rollout, generation and storage), cluster.num_cpus is {have:.0f}; raise it (or set "
        "it to null), or use fewer workers, replicas or storage units"
    )
