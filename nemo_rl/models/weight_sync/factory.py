"""From the config to the transport of a refit."""

from __future__ import annotations

from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.worker_groups import WorkerGroup
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.collective import BroadcastWeightSync
from nemo_rl.models.weight_sync.colocated import IpcWeightSync, PayloadWeightSync

__all__ = ["build_weight_sync"]


def build_weight_sync(config: MasterConfig, *, policy: WorkerGroup, engines: WorkerGroup, address: str) -> WeightSync:
    """The transport of `policy.generation.refit_transport`.

    Args:
        address: of the machine of policy rank 0, as the engines reach it.
    """
    parties = RefitParties(
        policy=policy,
        engines=engines,
        timeout_s=config.cluster.stage_timeout_s,
        buffer_ratio=config.policy.generation.refit_buffer_ratio,
    )
    transport = config.refit_transport
    if transport == "broadcast":
        return BroadcastWeightSync(parties, address=address)
    return IpcWeightSync(parties) if transport == "ipc" else PayloadWeightSync(parties)
