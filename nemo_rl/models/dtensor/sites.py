"""Sites of a Hugging Face model under FSDP2: layouts by how weights are split, gradients and weights made whole.

Called by `DTensorEngine.taps`. Under sequence parallelism what lies between the blocks is a part of the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.collectives import ParallelGroups
from nemo_rl.models.dtensor.optim import LossScaler
from nemo_rl.models.dtensor.parallelize import PolicyModel, full_weight
from nemo_rl.models.hf_sites import HFSites
from nemo_rl.models.loading import named_weights
from nemo_rl.models.policy.recording.taps import Taps, Tokens
from nemo_rl.models.policy.steps import ThisRank
from nemo_rl.records.record import Split

__all__ = ["taps_of"]

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def taps_of(
    model: PolicyModel, here: ThisRank, groups: ParallelGroups, scaler: LossScaler, *, weights: Weights
) -> Taps:
    """The sites of this rank.

    Args:
        weights: (collective) whole weights by name.
    """
    between = Tokens.CHUNK if here.layout.sequence_parallel else Tokens.ALL
    found = HFSites(model.hf, between=between, split_of=partial(_split_of, here))
    return Taps(
        taps=tuple(found.taps),
        unobserved=found.unobserved,
        chunk=(here.coordinates.tp, here.layout.tp) if here.layout.sequence_parallel else (0, 1),
        # FSDP averages over its ranks, which the train step makes up for in the loss.
        loss_factor=lambda: groups.fsdp_mesh.size() * scaler.scale,
        gradients=partial(_gradients, model, scaler),
        weights=weights,
        place=here.coordinates,
    )


def _gradients(model: PolicyModel, scaler: LossScaler) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) FSDP's mean has undone the factor of the train step; the loss scale is left."""
    for name, weight in named_weights(model.hf):
        if weight.grad is not None:
            gradient = full_weight(weight.grad)
            yield name, gradient if scaler.scale == 1.0 else gradient / scaler.scale


def _split_of(here: ThisRank, module: torch.nn.Module, dim: int) -> Split | None:
    """This rank's part of the features, as the module's weight has been split over the tensor axis."""
    weight = module._parameters.get("weight")
    if not isinstance(weight, DTensor):
        return None
    names = weight.device_mesh.mesh_dim_names or ()
    if "tp" not in names or not weight.placements[names.index("tp")].is_shard(dim):
        return None
    return Split(index=here.coordinates.tp, count=here.layout.tp)
