"""Process groups and meshes of one rank's coordinates in a `ParallelLayout`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nemo_rl.distributed.collectives import new_group
from nemo_rl.distributed.layout import Coordinates, ParallelLayout

__all__ = ["ParallelGroups"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """Where this rank stands, and with whom it talks. A group of one rank is None."""

    layout: ParallelLayout
    coordinates: Coordinates
    context: dist.ProcessGroup | None
    fsdp_mesh: DeviceMesh
    """Data x context ranks, which share the weights' shards; one-dimensional."""
    tensor_mesh: DeviceMesh | None
    """None without tensor parallelism."""

    @classmethod
    def build(cls, layout: ParallelLayout, *, rank: int, device: torch.device) -> ParallelGroups:
        """(collective: every rank of the job, with the same layout) Makes all groups at once."""
        if layout.tp == 1:
            mesh = DeviceMesh.from_group(_world(), device.type, mesh_dim_names=("fsdp",))
            tensor_mesh = None
        else:
            shape = torch.arange(layout.world_size).view(-1, layout.tp)
            groups = [_group(rank, shape.t().tolist()), _group(rank, shape.tolist())]
            both = DeviceMesh.from_group(groups, device.type, mesh=shape, mesh_dim_names=("fsdp", "tp"))
            mesh, tensor_mesh = both["fsdp"], both["tp"]
        return cls(
            layout=layout,
            coordinates=layout.coordinates(rank),
            context=_group(rank, layout.context_groups()) if layout.cp > 1 else None,
            fsdp_mesh=mesh,
            tensor_mesh=tensor_mesh,
        )

    @property
    def is_writer(self) -> bool:
        """Whether this rank speaks for its data-parallel shard."""
        return self.layout.rank_of(self.coordinates) == self.layout.writer(self.coordinates.dp)


def _group(rank: int, buckets: list[list[int]]) -> dist.ProcessGroup:
    """This rank's bucket as a group; meshes want one even where a rank is alone."""
    if len(buckets) == 1:
        return _world()
    mine = [group for ranks in buckets if (group := new_group(ranks)) is not None]
    assert len(mine) == 1, f"rank {rank} is in {len(mine)} of {buckets}"
    return mine[0]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "initialise the default process group first"
    return group
