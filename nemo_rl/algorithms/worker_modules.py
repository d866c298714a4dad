"""What the workers of a run import, for `ForkServer`: seconds of a core that are spent once instead of per process."""

from __future__ import annotations

from nemo_rl.config.parts import ENGINES
from nemo_rl.config.schema import MasterConfig
from nemo_rl.models.policy.workers.launch import worker_module

__all__ = ["worker_modules"]


def worker_modules(config: MasterConfig, *, model_type: str) -> tuple[str, ...]:
    """Modules by name; none on GPUs, where processes must not be forked.

    No module here may import Ray, whose library works in the process that has imported it only. Parts of the user's
    own are left to the workers.

    Args:
        model_type: as in config.json of the model.
    """
    if config.cluster.gpus_per_node:
        return ()
    generation = config.policy.generation.backend
    engine = [ENGINES.builtin[generation].partition(":")[0]] if ENGINES.is_builtin(generation) else []
    tables = ["tensordict"] if config.active_data_plane.impl == "transfer_queue" else []
    return (
        f"transformers.models.{model_type}.modeling_{model_type}",
        worker_module(config.policy),
        *engine,
        *tables,
    )
