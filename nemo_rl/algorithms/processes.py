"""The processes of a run: their environment variables, and imports that are done once for all workers.

Imports neither torch nor Ray itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from nemo_rl.config.parts import ENGINES, TRAINING_ENGINES
from nemo_rl.config.policy import CUBLAS_VARIABLE, REPEATABLE_WORKSPACES
from nemo_rl.config.r3_trace_env import trace_environment
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.store_kinds import kind_named, transport_environment
from nemo_rl.distributed.environment import LEAST_OPEN_FILES, raise_open_files, worker_environment
from nemo_rl.distributed.fork_server import ForkServer

__all__ = ["driver_environment", "environment_lines", "forked_modules", "run_environment", "worker_forks"]

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
