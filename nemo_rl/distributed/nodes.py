"""The machines of a Ray cluster: which of them a run uses, and in which order.

`RayVirtualCluster` asks before it places anything. Invariant: the choice depends on the cluster alone, so a run that is
started again on the same machines has the same ranks on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import ray

from nemo_rl.errors import ResourceError

__all__ = ["Node", "Share", "alive_nodes", "choose_nodes", "node_resource"]

A_LITTLE = 0.001
"""Of the resource that each node has under its own address: asking for it means asking for that node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine of a Ray cluster."""

    id: str
    """Ray's."""
    address: str
    """Under which the other machines reach it."""
    name: str
    """What it calls itself."""
    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        return self.address if self.name == self.address else f"{self.name} ({self.address})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a run needs on each of some nodes."""

    num_nodes: int
    num_cpus: int
    num_gpus: int
    what: str
    """For messages."""


def alive_nodes() -> list[Node]:
    """Those of the cluster that this process is connected to."""
    return [
        Node(
            id=str(found["NodeID"]),
            address=str(found["NodeManagerAddress"]),
            name=str(found["NodeManagerHostname"]),
            num_cpus=float(found["Resources"].get("CPU", 0)),
            num_gpus=float(found["Resources"].get("GPU", 0)),
        )
        for found in ray.nodes()
        if found["Alive"]
    ]


def choose_nodes(nodes: Sequence[Node], shares: Sequence[Share], *, first: str) -> list[list[Node]]:
    """Nodes for each share, no node for two of them.

    Args:
        first: Ray's id of the node that is taken before others where it has enough: the driver's, so that what the
            driver reads most is near.

    Raises:
        ResourceError: fewer nodes have enough than are asked for.
    """
    free = sorted(nodes, key=lambda node: (node.id != first, _order(node.address), node.id))
    chosen: list[list[Node]] = []
    for share in shares:
        fit = [node for node in free if node.num_cpus >= share.num_cpus and node.num_gpus >= share.num_gpus]
        if len(fit) < share.num_nodes:
            raise ResourceError(_too_few(share, fit, free))
        chosen.append(fit[: share.num_nodes])
        free = [node for node in free if node not in chosen[-1]]
    return chosen


def node_resource(node: Node) -> dict[str, float]:
    """What pins a bundle of a placement group to a node."""
    return {f"node:{node.address}": A_LITTLE}


def _order(address: str) -> tuple[int, int, str]:
    """10.0.0.9 before 10.0.0.10."""
    try:
        number = ip_address(address)
    except ValueError:
        return (99, 0, address)
    return (number.version, int(number), "")


def _too_few(share: Share, fit: Sequence[Node], free: Sequence[Node]) -> str:
    needed = f"{share.num_cpus} CPUs" + (f" and {share.num_gpus} GPUs" if share.num_gpus else "")
    have = "; ".join(f"{node}: {node.num_cpus:.0f} CPUs, {node.num_gpus:.0f} GPUs" for node in free) or "none"
    return (
        f"{share.what}: expected {share.num_nodes} nodes of the Ray cluster with {needed} each, got {len(fit)} (not "
        f"taken yet: {have}); let more nodes join, start Ray there with more, or ask for less"
    )
