"""Logical CPUs and data plane clients of a run. Read by `setup`, which starts them, by preflight and plan."""

from __future__ import annotations

from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.distributed.layout import ParallelLayout

__all__ = [
    "ROLLOUT_CPUS",
    "cpus_per_bundle",
    "logical_cpus",
    "num_clients",
    "num_non_colocated_engines",
    "other_cpus",
    "too_few_cpus",
]

ROLLOUT_CPUS = 1
"""CPUs of a rollout worker."""


def num_non_colocated_engines(config: MasterConfig) -> int:
    """Engines with a bundle of their own."""
    generation = config.policy.generation
    return 0 if generation.colocated.enabled else generation.num_replicas


def cpus_per_bundle(config: MasterConfig) -> int:
    """CPUs of a policy worker; on GPUs an engine shares its bundle, unless it is not colocated."""
    return 2 if config.cluster.gpus_per_node > 0 and config.policy.generation.colocated.enabled else 1


def other_cpus(config: MasterConfig) -> int:
    """CPUs of rollout, storage, and on CPU of the engines that Ray places."""
    plane, generation = config.active_data_plane, config.policy.generation
    is_placed_by_ray = config.cluster.gpus_per_node == 0 and generation.colocated.enabled
    engines = generation.num_replicas if is_placed_by_ray else 0
    return engines + ROLLOUT_CPUS * config.experience.num_workers + kind_named(plane.impl or "noop").cpus(plane)


def logical_cpus(config: MasterConfig) -> int:
    """CPUs of the whole run."""
    return config.cluster.num_workers * cpus_per_bundle(config) + num_non_colocated_engines(config) + other_cpus(config)


def num_clients(config: MasterConfig) -> int:
    """Data plane clients: the driver, the rollout workers and the policy workers that read or write."""
    if config.cluster.launcher == "local":
        return 1
    num_workers, plane = config.cluster.num_workers, config.active_data_plane
    layout = ParallelLayout.of_policy(config.policy, world_size=num_workers)
    # Of a replica group the leader reads and the writer writes, which in a pipeline is another rank.
    return (
        1
        + config.experience.num_workers
        + (num_workers if plane.fetch_policy == "independent" else layout.dp * min(layout.pp, 2))
    )


def too_few_cpus(config: MasterConfig, *, have: float) -> str:
    """Return a warning when `have` is less than `logical_cpus`."""
    return (
        f"cluster: {logical_cpus(config)} logical CPUs are needed ({config.cluster.num_workers} policy workers and "
        f"{other_cpus(config)} for rollout, generation and storage), cluster.num_cpus is {have:.0f}; raise it (or set "
        "it to null), or use fewer workers, replicas or storage units"
    )
