"""Ray stores on a cluster of two nodes (two raylets of one machine): rows cross nodes, and go with their node."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
import ray
import torch
from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config.data_plane import DataPlaneConfig, RayStoreConfig
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client
from nemo_rl.distributed.environment import FAIR_SHARE, NO_SPARE_WORKERS
from nemo_rl.errors import DataPlaneError, PayloadLost
from tests.helpers.data_planes import ids_column, keys_of, rows_of, segments, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    variables = {**FAIR_SHARE, **NO_SPARE_WORKERS, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    os.environ.update(variables)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            # A node that is merely slow on a loaded machine must not be taken for dead.
            "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 10},
            "num_cpus": 4,
            "object_store_memory": 100 << 20,
            "include_dashboard": False,
        },
    )
    reset_ray_address()  # else every Ray start on this machine would join it
    cluster.add_node(num_cpus=4, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    for name in variables:
        del os.environ[name]


class Worker:
    """A process of the second node."""

    def __init__(self, address: object) -> None:
        torch.set_num_threads(1)
        self._client = attach_data_plane(address)

    def put(self, partition: str, keys: list[str]) -> object:
        return self._client.kv_batch_put(keys, partition, {"input_ids": ids_column(range(1, len(keys) + 1))})

    def read(self, partition: str, keys: list[str]) -> list:
        return rows_of(self._client.kv_batch_get(keys, partition, ["input_ids"])["input_ids"])

    def clear(self, partition: str) -> None:
        self._client.kv_clear(None, partition)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def close(self) -> None:
        self._client.close()


def second_node() -> str:
    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own)


@pytest.mark.parametrize(
    "owner", ["producer", *(pytest.param(owner, marks=pytest.mark.full) for owner in ("holder", "node"))]
)
def test_rows_cross_nodes_in_both_directions(nodes: Cluster, owner: str) -> None:
    config = DataPlaneConfig(impl="ray", ray=RayStoreConfig(owner=owner), timeout_s=20.0)
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    client = build_data_plane_client(config, run_id=run_id)
    try:
        client.register_partition("p", ["input_ids"], 64, [])
        there = NodeAffinitySchedulingStrategy(second_node(), soft=False)
        worker = ray.remote(Worker).options(num_cpus=0, scheduling_strategy=there).remote(client.address)
        assert ray.get(worker.node.remote()) != ray.get_runtime_context().get_node_id()
        keys, others = keys_of(2), keys_of(2, prefix="v")
        expected = rows_of(ids_column(range(1, 9)))
        ray.get(worker.put.remote("p", keys))
        client.kv_batch_put(others, "p", {"input_ids": ids_column(range(1, 9))})
        assert rows_of(client.kv_batch_get(keys, "p", ["input_ids"])["input_ids"]) == expected
        assert ray.get(worker.read.remote("p", others[::-1])) == expected[::-1]
        mixed = [*keys[:2], *others[:2]]
        assert rows_of(client.kv_batch_get(mixed, "p", ["input_ids"])["input_ids"]) == expected[:2] * 2
        ray.get(worker.clear.remote("p"))
        assert client.stats()["live_chunks"] == 0
        ray.get(worker.close.remote())
        ray.kill(worker)
    finally:
        client.close()
    assert segments(run_id) == []


@pytest.mark.full
def test_rows_of_a_node_that_died_are_lost_with_an_error_that_names_it(nodes: Cluster) -> None:
    config = DataPlaneConfig(impl="ray", ray=RayStoreConfig(owner="node"), timeout_s=20.0)
    extra = nodes.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"doomed": 1})
    nodes.wait_for_nodes()
    client = build_data_plane_client(config, run_id=f"run-{uuid.uuid4().hex[:8]}")
    try:
        client.register_partition("p", ["input_ids"], 64, [])
        worker = ray.remote(Worker).options(num_cpus=0, resources={"doomed": 1}).remote(client.address)
        ray.get(worker.put.remote("p", keys_of(1)))
        dead = ray.get(worker.node.remote())
        nodes.remove_node(extra, allow_graceful=False)
        wait_until(lambda: not any(node["NodeID"] == dead and node["Alive"] for node in ray.nodes()), timeout_s=90)
        with pytest.raises(PayloadLost, match=r"partition 'p'.*u0_g0.*cannot be read"):
            client.kv_batch_get(keys_of(1), "p", ["input_ids"])
        assert issubclass(PayloadLost, DataPlaneError)
    finally:
        client.close()
