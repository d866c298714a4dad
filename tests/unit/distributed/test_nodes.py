"""Which nodes a run takes: the driver's first, then by address, none twice, and a refusal that says who has what."""

from __future__ import annotations

import pytest

from nemo_rl.distributed.virtual_cluster import ClusterNode, NodeShare, choose_nodes, node_resource
from nemo_rl.errors import ResourceError


def node(last: int, *, cpus: float = 8, gpus: float = 0) -> ClusterNode:
    return ClusterNode(id=f"id{last}", address=f"10.0.0.{last}", name=f"host{last}", num_cpus=cpus, num_gpus=gpus)


def share(num_nodes: int, *, cpus: int = 4, gpus: int = 0, what: str = "cluster.num_nodes") -> NodeShare:
    return NodeShare(num_nodes=num_nodes, num_cpus=cpus, num_gpus=gpus, what=what)


def chosen(nodes: list[ClusterNode], *shares: NodeShare, first: str = "id9") -> list[list[str]]:
    return [[each.name for each in found] for found in choose_nodes(nodes, shares, first=first)]


def test_the_drivers_node_is_first_and_the_others_follow_by_address() -> None:
    nodes = [node(10), node(2), node(9), node(1)]
    assert chosen(nodes, share(3)) == [["host9", "host1", "host2"]]
    assert chosen(nodes[::-1], share(4)) == [["host9", "host1", "host2", "host10"]]


def test_shares_do_not_meet_and_nodes_with_too_little_are_left_out() -> None:
    nodes = [node(1, gpus=8), node(2, gpus=4), node(3, gpus=8), node(9, cpus=64)]
    engines = share(1, gpus=4, what="policy.generation.colocated.num_nodes")
    assert chosen(nodes, share(2, gpus=8), engines) == [["host1", "host3"], ["host2"]]


def test_a_refusal_names_the_key_and_what_each_node_has() -> None:
    with pytest.raises(ResourceError, match=r"cluster.num_nodes: expected 2 nodes .* 4 CPUs each, got 1") as refused:
        chosen([node(1), node(2, cpus=2)], share(2))
    assert "host2 (10.0.0.2): 2 CPUs, 0 GPUs" in str(refused.value)
    with pytest.raises(ResourceError, match=r"colocated.num_nodes: expected 1 .* \(not taken yet: none\)"):
        chosen([node(1)], share(1), share(1, what="policy.generation.colocated.num_nodes"))


def test_a_bundle_is_pinned_by_the_resource_that_ray_gives_each_node() -> None:
    ((name, amount),) = node_resource(node(7)).items()
    assert name == "node:10.0.0.7" and 0 < amount < 0.01
