"""Runs over two hosts: same numbers as on one, every store and refit, a host that is cut off, a resume on one host.

Hosts are those of `tests/helpers/hosts.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nemo_rl.utils.trackers import read_metrics
from tests.helpers.hosts import END_S, HostRun, RayHosts, missing, place, ray_on_hosts
from tests.helpers.model_families import write_family
from tests.helpers.runs import logged_steps, write_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]

LOST_LIMIT_S = 150.0
"""A node that is cut off ends our processes after a minute."""
ONE_HOST = {"cluster.num_nodes": "1", "cluster.cpu_workers_per_node": "2"}
TWO_HOSTS = {"cluster.num_nodes": "2", "cluster.cpu_workers_per_node": "1"}
R3 = {
    "policy.router_replay.enabled": "true",
    "policy.generation.precision": "bfloat16",
    "policy.megatron_cfg.expert_model_parallel_size": "2",
    "policy.megatron_cfg.expert_tensor_parallel_size": "1",
    "policy.megatron_cfg.tensor_model_parallel_size": "2",
    "policy.megatron_cfg.sequence_parallel": "true",
}
SAVED = {"enabled": True, "save_period": 1, "metric_name": "train:reward"}
TWO_ENGINES = {"policy.generation.colocated.enabled": "false", "policy.generation.num_replicas": "2"}
WAYS = {
    "ray": {"data_plane.impl": "ray"},
    "ray, shared memory of each node": {"data_plane.impl": "ray", "data_plane.ray.owner": "node"},
    "ray, a holder": {"data_plane.impl": "ray", "data_plane.ray.owner": "holder"},
    "transfer_queue": {
        "data_plane.impl": "transfer_queue",
        "data_plane.simple.num_storage_units": "2",
        "data_plane.simple.placement": "spread",
    },
    "transfer_queue on mooncake, tensor parallel": {
        **{"data_plane.impl": "transfer_queue", "data_plane.backend": "mooncake_cpu"},
        **{"data_plane.mooncake.host": "node", "policy.dtensor_cfg.tensor_parallel_size": "2"},
    },
    "mooncake, engines apart, broadcast": {
        **{"data_plane.impl": "mooncake", "data_plane.mooncake.host": "node"},
        "policy.generation.refit_transport": "broadcast",
    },
}
"""Overrides of the dense recipe, besides the place."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    # Ray's sockets have names of at most 107 bytes.
    with ray_on_hosts(tmp_path_factory.mktemp("h")) as cluster:
        yield cluster


def test_a_run_over_two_hosts_goes_on_with_one(cluster: RayHosts, model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model, checkpointing=SAVED)
    own = {
        "data_plane.impl": "transfer_queue",
        "policy.generation.env_vars": "{OF_ENGINES: 1}",
        "grpo.max_num_steps": "2",
    }
    code, output = HostRun(cluster, recipe, TWO_HOSTS, TWO_ENGINES, own).end()
    assert code == 0, output
    assert [place(tmp_path, "policy", rank) for rank in range(2)] == ["host-a", "host-b"]
    assert [place(tmp_path, "generation", rank) for rank in range(2)] == ["host-a", "host-b"]
    code, output = HostRun(cluster, recipe, ONE_HOST, {"checkpointing.resume": "true"}).end()
    assert code == 0, output
    assert [row["step"] for row in read_metrics(tmp_path / "logs" / "metrics.jsonl")] == [1, 2, 3]
    assert [place(tmp_path, "policy", rank) for rank in range(2)] == ["host-a", "host-a"]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_are_those_of_one_host(cluster: RayHosts, model: Path, tmp_path: Path, way: str) -> None:
    apart = {"policy.generation.colocated.enabled": "false"} if "apart" in way else {}
    recipes = {name: write_recipe(tmp_path / name, model) for name in ("one", "two")}
    for name, where in {"one": ONE_HOST, "two": {**TWO_HOSTS, **apart}}.items():
        engines = {"policy.generation.colocated.num_nodes": "0", "policy.generation.num_replicas": "2"}
        code, output = HostRun(cluster, recipes[name], where, WAYS[way], engines).end()
        assert code == 0, output
    assert {place(tmp_path / "two", "policy", rank) for rank in range(2)} == {"host-a", "host-b"}
    assert logged_steps(tmp_path / "two" / "logs") == logged_steps(tmp_path / "one" / "logs")


@pytest.mark.full
def test_routes_are_replayed_across_hosts(cluster: RayHosts, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", "qwen3_moe")
    for name, where in {"one": ONE_HOST, "two": TWO_HOSTS}.items():
        recipe = write_recipe(tmp_path / name, model)
        sections = yaml.safe_load(recipe.read_text())
        del sections["policy"]["optimizer"], sections["policy"]["dynamic_batching"]
        sections["policy"]["megatron_cfg"] = {"enabled": True}
        sections["policy"]["dtensor_cfg"] = {"enabled": False}
        recipe.write_text(yaml.safe_dump(sections))
        code, output = HostRun(cluster, recipe, where, R3, {"data_plane.impl": "ray"}).end()
        assert code == 0, output
    assert logged_steps(tmp_path / "two" / "logs") == logged_steps(tmp_path / "one" / "logs")


@pytest.mark.full
@pytest.mark.parametrize("stage", ["train", "refit", "checkpoint", "rollout"])
def test_a_host_that_is_cut_off_ends_the_run_which_names_it(
    cluster: RayHosts, model: Path, tmp_path: Path, stage: str
) -> None:
    recipe = write_recipe(tmp_path, model, checkpointing=SAVED)
    before = cluster.second.processes()
    deadlines = {"cluster.collective_timeout_s": "15", "cluster.stage_timeout_s": "40", "data_plane.timeout_s": "15"}
    run = HostRun(cluster, recipe, TWO_HOSTS, TWO_ENGINES, deadlines, {"grpo.max_num_steps": "100000"})
    log = tmp_path / "logs" / "workers" / ("generation_1.log" if stage == "rollout" else "policy_1.log")
    try:
        _wait_for_stage(log, stage, run)
        cluster.second.pull_cable()
        began = time.monotonic()
        code, output = run.end(timeout_s=LOST_LIMIT_S)
        assert code == 1 and "host-b" in output and "Traceback" not in output, output
        print(f"{stage}: ended after {time.monotonic() - began:.0f} s")
        give_up = time.monotonic() + LOST_LIMIT_S
        while left := {pid: name for pid, name in cluster.second.processes().items() if pid not in before}:
            assert time.monotonic() < give_up, left
            time.sleep(0.5)
    finally:
        cluster.second.plug_cable()
        cluster.restart_node(cluster.second)
    assert not [name for name in cluster.second.shared_memory() if "nemo" in name]


def _wait_for_stage(log: Path, stage: str, run: HostRun) -> None:
    """Wait until the stage runs after the second step has begun."""
    give_up = time.monotonic() + END_S
    word = {"rollout": "process", "checkpoint": "checkpoint:"}.get(stage, f"{stage}:")
    while time.monotonic() < give_up:
        assert run.process.poll() is None, run.log.read_text()
        text = log.read_text() if log.exists() else ""
        if text.count(word) >= (1 if stage == "rollout" else 3) and "step " in run.log.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"no {stage} within {END_S:.0f} s:\n{run.log.read_text()}")
