"""A node dies in the middle of a step: the run goes on with a spare one to the same numbers, or ends with its name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.algorithms.run import NODES_LOST_METRIC
from tests.helpers.hosts import END_S, HostRun, RayHosts, missing, place, ray_on_hosts
from tests.helpers.runs import logged_steps, write_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
NODES = {"cluster.num_nodes": "2", "cluster.cpu_workers_per_node": "1"}
STORES = {
    "ray": {"data_plane.impl": "ray"},
    "transfer_queue": {
        **{"data_plane.impl": "transfer_queue", "data_plane.simple.num_storage_units": "2"},
        "data_plane.simple.placement": "spread",
    },
}
SAVED = {"enabled": True, "save_period": 2, "metric_name": "train:reward"}
DEADLINES = {"cluster.collective_timeout_s": "30", "cluster.stage_timeout_s": "120", "data_plane.timeout_s": "30"}
LOST_LIMIT_S = 300.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    with ray_on_hosts(tmp_path_factory.mktemp("h"), number=3) as cluster:
        yield cluster


@pytest.fixture
def whole(cluster: RayHosts) -> Iterator[RayHosts]:
    """The cluster, whose dead nodes are started again after a test."""
    yield cluster
    for host in cluster.hosts[1:]:
        if not host.processes():
            cluster.restart_node(host)


def wait_in_training(run: HostRun, log: Path, *, after_step: int) -> None:
    """Wait until a rank trains the step after `after_step`."""
    metrics, give_up = log.parents[1] / "metrics.jsonl", time.monotonic() + END_S
    seen = 0
    while time.monotonic() < give_up:
        assert run.process.poll() is None, run.log.read_text()
        if metrics.exists() and f'"step": {after_step}' in metrics.read_text():
            seen = seen or log.read_text().count("train:")
            if log.read_text().count("train:") > seen:
                return
        time.sleep(0.01)
    raise AssertionError(f"no step {after_step} within {END_S:.0f} s:\n{run.log.read_text()}")


def learned(logs: Path) -> list[dict[str, float]]:
    """Return the metrics of each step, without the traffic, which is another in the first step of a start."""
    return [{k: v for k, v in row.items() if not k.startswith("data_plane/")} for row in logged_steps(logs)]


def wait_for_step(run: HostRun, logs: Path, step: int) -> None:
    give_up = time.monotonic() + END_S
    while f'"step": {step},' not in (logs / "metrics.jsonl").read_text():
        assert run.process.poll() is None and time.monotonic() < give_up, run.log.read_text()
        time.sleep(0.1)


def test_a_run_does_not_start_with_fewer_spare_nodes(cluster: RayHosts, model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model, checkpointing=SAVED)
    code, output = HostRun(cluster, recipe, NODES, STORES["ray"], {"cluster.spare_nodes": "2"}).end()
    assert code == 2, output
    assert "cluster.spare_nodes: expected 2 nodes of the Ray cluster with 1 CPUs each, got 1" in output
    assert "host-c (10.77.0.3): 5 CPUs" in output


@pytest.mark.parametrize("store", STORES)
def test_a_run_goes_on_with_a_spare_node_to_the_same_numbers_and_without_one_ends_with_its_name(
    whole: RayHosts, model: Path, tmp_path: Path, store: str
) -> None:
    steps = {"max_num_steps": 12}
    undisturbed = write_recipe(tmp_path / "undisturbed", model, grpo=steps)
    code, output = HostRun(whole, undisturbed, NODES, STORES[store]).end()
    assert code == 0, output
    first, second, third = whole.hosts
    before = {host.name: host.processes() for host in whole.hosts}
    recipe, logs = write_recipe(tmp_path, model, checkpointing=SAVED, grpo=steps), tmp_path / "logs"
    run = HostRun(whole, recipe, NODES, STORES[store], DEADLINES, {"cluster.spare_nodes": "1"})
    wait_in_training(run, logs / "workers" / "policy_1.log", after_step=3)
    second.kill()
    wait_for_step(run, logs, 6)
    assert [place(tmp_path, "policy", rank) for rank in range(2)] == [first.name, third.name]
    wait_in_training(run, logs / "workers" / "policy_1.log", after_step=6)
    third.kill()
    killed = time.monotonic()
    code, output = run.end(timeout_s=LOST_LIMIT_S)
    print(f"ended {time.monotonic() - killed:.0f} s after the second loss\n{output}")
    assert code == 1 and "Traceback" not in output, output
    went_on, ended = (line for line in output.splitlines() if "of the Ray cluster is lost" in line)
    assert went_on.startswith("warning: host-b (10.77.0.2) ") and "policy ranks [1]" in went_on, output
    assert went_on.endswith("going on after step 2 on the nodes that are alive"), output
    assert ended.startswith("error: host-c (10.77.0.3) ") and "policy ranks [1]" in ended, output
    rows = [row for row in learned(logs) if NODES_LOST_METRIC not in row]
    assert [row["step"] for row in rows][:6] == [*range(1, 7)]
    assert rows == learned(tmp_path / "undisturbed" / "logs")[: len(rows)]
    lost = [row for row in logged_steps(logs) if NODES_LOST_METRIC in row]
    assert lost == [{"step": 2, NODES_LOST_METRIC: 1}]
    give_up = time.monotonic() + LOST_LIMIT_S
    while left := first.processes().keys() - before[first.name].keys():
        assert time.monotonic() < give_up, {pid: first.processes().get(pid) for pid in left}
        time.sleep(0.5)
