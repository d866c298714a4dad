"""The transport of a refit by its name."""

from __future__ import annotations

from nemo_rl.config.policy import RefitTransport
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.collective import BroadcastWeightSync
from nemo_rl.models.weight_sync.colocated import IpcWeightSync, PayloadWeightSync

__all__ = ["build_weight_sync"]


def build_weight_sync(transport: RefitTransport, parties: RefitParties, *, address: str) -> WeightSync:
    """The chosen transport between `parties`.

    Args:
        address: of the machine of policy rank 0, as the engines reach it.
    """
    if transport == "broadcast":
        return BroadcastWeightSync(parties, address=address)
    return IpcWeightSync(parties) if transport == "ipc" else PayloadWeightSync(parties)
