"""The processes of a run: how many, their environment variables, CPUs and data plane clients, and imports that are done
once for all workers.

Read by `start`, which starts them, by preflight and plan. Imports neither torch nor Ray itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from nemo_rl.config.parts import ENGINES, TRAINING_ENGINES
from nemo_rl.config.policy import CUBLAS_VARIABLE, REPEATABLE_WORKSPACES, PolicyConfig
from nemo_rl.config.r3_trace_env import trace_environment
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.store_kinds import kind_named, transport_environment
from nemo_rl.distributed.environment import LEAST_OPEN_FILES, raise_open_files, worker_environment
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.layout import ParallelLayout

__all__ = [
    "ROLLOUT_CPUS",
    "cpus_per_bundle",
    "driver_environment",
    "environment_lines",
    "forked_modules",
    "logical_cpus",
    "num_clients",
    "num_engine_bundles",
    "other_cpus",
    "run_environment",
    "too_few_cpus",
    "worker_forks",
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


LAUNCH = "nemo_rl.models.policy.workers.launch"
"""Modules that every policy worker imports, whichever engine it has."""


def worker_forks(config: MasterConfig) -> AbstractContextManager[ForkServer | None]:
    """The fork server of a run that starts its own Ray on CPUs, to be opened before anything slow is done.

    None for other runs: what has looked at a GPU must not be forked, a running cluster has its own workers, and only
    Linux can watch and end processes as the server does.

    Raises:
        ResourceError: the driver may not open as many files as a run needs.
    """
    raise_open_files(least=LEAST_OPEN_FILES)
    cluster = config.cluster
    if cluster.launcher != "ray" or cluster.address is not None or cluster.gpus_per_node or sys.platform != "linux":
        return nullcontext()
    return ForkServer(
        forked_modules(config),
        environment=worker_environment(cluster.threads_per_worker, uses_gpu=False),
        deadline_s=cluster.worker_start_timeout_s,
    )


def forked_modules(config: MasterConfig) -> tuple[str, ...]:
    """Return the modules to import. None of them may import Ray, whose library works only in the process that has
    imported it. Parts of the user's own are left to the workers.
    """
    trainer = TRAINING_ENGINES.builtin["megatron" if config.policy.megatron_cfg.enabled else "dtensor"]
    rollout = ENGINES.builtin.get(config.policy.generation.backend)
    of_store = kind_named(config.active_data_plane.impl or "noop").forked_modules
    engines = tuple(part.partition(":")[0] for part in (trainer, rollout) if part is not None)
    return (*_modeling(config.policy.model_name), LAUNCH, *engines, *of_store)


def _modeling(model_name: str) -> tuple[str, ...]:
    """The module of the model's layers; nothing is said here about a folder that cannot be read."""
    try:
        model_type = json.loads((Path(model_name) / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, LookupError, TypeError):
        return ()
    is_name = isinstance(model_type, str) and model_type.isidentifier()
    return (f"transformers.models.{model_type}.modeling_{model_type}",) if is_name else ()


def run_environment(config: MasterConfig) -> dict[str, str]:
    """Return the variables of every process of a run under Ray; what a worker has besides is in its section."""
    return {name: value for _, given in _common(config) for name, value in given.items()}


def driver_environment(config: MasterConfig) -> dict[str, str]:
    """Return the variables of the process that drives a run, to be set before torch is imported, where they are not."""
    deterministic = {CUBLAS_VARIABLE: REPEATABLE_WORKSPACES[0]} if config.policy.deterministic else {}
    return {"OMP_NUM_THREADS": str(config.cluster.threads_per_worker), **deterministic}


def environment_lines(config: MasterConfig) -> list[str]:
    """Return one line per variable and kind of process, with what set it last, for people."""
    if config.cluster.launcher == "local":
        return ["environment: that of this process"]
    policy = config.policy
    kinds: dict[str, list[tuple[str, Mapping[str, str]]]] = {
        "all processes": _common(config),
        "policy workers": [(f"{policy.parallel_section}.env_vars", policy.worker_env_vars)],
        "engines": [("policy.generation.env_vars", policy.generation.env_vars)],
    }
    lines = ["environment, besides what Ray was started with; a later line wins over an earlier one"]
    for kind, sources in kinds.items():
        values = {name: (value, source) for source, given in sources for name, value in given.items()}
        lines += [f"  {kind}: {name}={value} ({source})" for name, (value, source) in sorted(values.items())]
    return lines


def _common(config: MasterConfig) -> list[tuple[str, Mapping[str, str]]]:
    """Return variables by what sets them; a later one wins."""
    cluster = config.cluster
    usual = worker_environment(cluster.threads_per_worker, uses_gpu=cluster.gpus_per_node > 0)
    return [
        ("cluster.threads_per_worker and defaults", usual),
        ("data_plane", transport_environment(config.active_data_plane)),
        ("route trace", trace_environment()),
        ("policy.deterministic", {CUBLAS_VARIABLE: REPEATABLE_WORKSPACES[0]} if config.policy.deterministic else {}),
        ("cluster.env_vars", config.cluster.env_vars),
    ]
