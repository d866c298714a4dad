"""Imports of a run's workers, done once for all of them. Imports neither torch nor Ray itself."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from nemo_rl.config.parts import ENGINES, TRAINING_ENGINES
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.distributed.environment import worker_environment
from nemo_rl.distributed.fork_server import ForkServer

__all__ = ["forked_modules", "worker_forks"]

LAUNCH = "nemo_rl.models.policy.workers.launch"
"""Modules that every policy worker imports, whichever engine it has."""


def worker_forks(config: MasterConfig) -> AbstractContextManager[ForkServer | None]:
    """The fork server of a run that starts its own Ray on CPUs, to be opened before anything slow is done.

    None for other runs: what has looked at a GPU must not be forked, a running cluster has its own workers, and only
    Linux can watch and end processes as the server does.
    """
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
