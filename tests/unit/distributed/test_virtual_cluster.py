"""The cluster of a run on a real Ray: refusals that count, environment of actors, an end that leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import psutil
import pytest
import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.config.run import ClusterConfig
from nemo_rl.distributed import environment as process_environment
from nemo_rl.distributed import own_ray
from nemo_rl.distributed.own_ray import check_own_ray
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import Call, ask
from nemo_rl.errors import ResourceError, WorkerError
from nemo_rl.utils.deadlines import StartUp

pytestmark = pytest.mark.slow

THREADS = 3
"""Unlike the 1 that this process has, so that an actor cannot have it by accident."""


def terminated(number: int, frame: FrameType | None) -> None:
    """Stands for the launcher's handler."""


class Probe:
    """A worker that says what it was started with."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def shutdown(self) -> None:
        pass


@dataclass
class Opened:
    cluster: RayVirtualCluster
    handler: object
    """Of SIGTERM while the cluster is open."""


@pytest.fixture(scope="module", autouse=True)
def restored() -> Iterator[None]:
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def opened(restored: None) -> Iterator[Opened]:
    signal.signal(signal.SIGTERM, terminated)
    config = ClusterConfig(cpu_workers_per_node=2, threads_per_worker=THREADS)
    with RayVirtualCluster(config, other_cpus=1, environment={"TRANSPORT_WORD": "carried"}) as cluster:
        yield Opened(cluster, signal.getsignal(signal.SIGTERM))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}


def wait_until_gone(before: set[int], *, timeout_s: float = 30.0) -> None:
    give_up = time.monotonic() + timeout_s
    while children() - before:
        left = [psutil.Process(pid).name() for pid in children() - before]
        assert time.monotonic() < give_up, f"still alive: {left}"
        time.sleep(0.1)


# The clusters that refuse or fail come after the shared one: one process has one Ray.


def test_variables_reach_every_actor(opened):
    placement = RayPlacement(placement_group=opened.cluster.placement_group)
    workers = RayWorkerGroup("probe", world_size=2, placement=placement)
    try:
        workers.begin_start(Probe, [{}, {}])
        workers.finish_start(timeout_s=60.0)
        found = workers.run(Call(request=ask(Probe.environment), stage="probe", timeout_s=30.0))
    finally:
        workers.shutdown()
    for environment in found:
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == str(THREADS)
        assert environment["TOKENIZERS_PARALLELISM"] == "false" and environment["HF_HUB_OFFLINE"] == "1"
        assert environment["TRANSPORT_WORD"] == "carried"
        assert environment["MALLOC_TRIM_THRESHOLD_"] == str(1 << 34)


def test_no_worker_is_started_that_nobody_asked_for(opened):
    started = [" ".join(psutil.Process(pid).cmdline()) for pid in children()]
    raylets = [line for line in started if "/raylet/raylet " in line]
    spare = [line for line in started if line.startswith("ray::IDLE") or "default_worker.py" in line]
    assert raylets and not set(spare) - set(raylets)


def test_variables_also_reach_what_others_start_on_the_cluster(opened):
    """Storage actors are started by TransferQueue, outside our worker groups and bundles."""

    @ray.remote(num_cpus=1)
    def environment() -> dict[str, str]:
        return dict(os.environ)

    found = ray.get(environment.remote(), timeout=60.0)
    assert found["OMP_NUM_THREADS"] == str(THREADS) and found["TRANSPORT_WORD"] == "carried"


def test_ray_starts_no_process_that_a_run_has_no_use_for(opened):
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert any("gcs_server" in command for command in commands)
    extra = [c for c in commands if any(word in c for word in ("dashboard.py", "monitor.py", "log_monitor.py"))]
    assert not extra
    # Under this name Ray's own agent of the dashboard, 100 MiB of modules.
    assert not [c for c in commands if "ray::DashboardAgent" in c]
    assert len([c for c in commands if "fork_stub.py idle-agent" in c and "/raylet/raylet " not in c]) == 1


def test_workers_get_their_share_of_a_core_that_somebody_else_keeps_busy(opened):
    """By default Ray starts them with a niceness of 15."""

    @ray.remote(num_cpus=1)
    def niceness() -> int:
        return os.nice(0)

    assert ray.get(niceness.remote(), timeout=60.0) == os.nice(0)


def test_each_worker_has_a_bundle_of_its_own(opened):
    group = opened.cluster.placement_group
    assert opened.cluster.num_workers == group.bundle_count == 2
    assert group.bundle_specs == [{"CPU": 1.0}, {"CPU": 1.0}]
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=1)

    @ray.remote(num_cpus=1, scheduling_strategy=strategy)
    def process() -> int:
        return os.getpid()

    assert ray.get(process.remote(), timeout=60.0) != os.getpid()


def test_the_launchers_handler_of_sigterm_is_kept(opened):
    assert opened.handler is terminated


def test_too_few_cpus_are_counted_and_ray_is_gone(opened):
    opened.cluster.close()
    before = children()
    config = ClusterConfig(num_cpus=3, cpu_workers_per_node=2)
    with (
        pytest.raises(ResourceError, match=r"5 logical CPUs are needed \(2 policy workers and 3 for .*Ray has 3 free"),
        RayVirtualCluster(config, other_cpus=3),
    ):
        raise AssertionError("the cluster must not open")
    assert not ray.is_initialized()
    wait_until_gone(before)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_gpus_that_are_not_there_are_refused(opened):
    opened.cluster.close()
    config = ClusterConfig(gpus_per_node=2)
    with (
        pytest.raises(ResourceError, match=r"2 GPUs are needed, Ray has 0 free; lower cluster.gpus_per_node"),
        RayVirtualCluster(config, other_cpus=1, cpus_per_bundle=2),
    ):
        raise AssertionError("the cluster must not open")
    assert not ray.is_initialized()


def test_a_server_of_ray_that_is_killed_is_named_and_the_rest_goes_with_the_cluster(opened, tmp_path):
    opened.cluster.close()
    before = children()
    said: list[str] = []
    cluster = RayVirtualCluster(
        ClusterConfig(cpu_workers_per_node=1),
        other_cpus=0,
        start=StartUp(report=said.append),
        logs_to=tmp_path / "logs",
    )
    with pytest.raises(WorkerError, match=r"stage train: Ray has lost its gcs_server \(process \d+\)"), cluster:
        check_own_ray(stage="train")
        (server,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "gcs_server"]
        server.kill()
        server.wait(60)
        check_own_ray(stage="train")
    assert said[-1:] == [f"Ray's logs of this run are in {tmp_path / 'logs'}"]
    assert list((tmp_path / "logs").glob("gcs_server*"))
    wait_until_gone(before)


@pytest.mark.full
def test_a_server_of_ray_that_is_stopped_is_ended_and_said_so(opened, monkeypatch):
    opened.cluster.close()
    before = children()
    monkeypatch.setattr(own_ray, "STOPPED_S", 1.0)
    cluster = RayVirtualCluster(ClusterConfig(cpu_workers_per_node=1), other_cpus=0)
    with pytest.raises(WorkerError, match=r"lost its raylet \(process \d+\); it was stopped for 1 s"), cluster:
        (server,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
        server.suspend()
        server.wait(60)
        own_ray.check_own_ray(stage="train")
    wait_until_gone(before)


@pytest.mark.full
def test_a_raylet_that_dies_while_it_starts_is_started_again_and_nothing_of_it_stays(opened, monkeypatch):
    opened.cluster.close()
    before = children()
    monkeypatch.setattr(process_environment, "DEAF_S", 10.0)
    killed = threading.Thread(target=kill_the_first, args=("raylet",))
    killed.start()
    with RayVirtualCluster(ClusterConfig(cpu_workers_per_node=1), other_cpus=0):
        killed.join()
        servers = [p.name() for p in psutil.Process().children(recursive=True) if p.pid not in before]
        assert servers.count("gcs_server") == 1
    wait_until_gone(before)


def kill_the_first(name: str) -> None:
    """Of this process's children of that name, as soon as there is one."""
    while True:
        for child in psutil.Process().children():
            if child.name() == name:
                child.kill()
                return
        time.sleep(0.01)


def test_an_error_inside_the_block_ends_ray_with_all_its_processes(opened):
    opened.cluster.close()
    before = children()
    cluster = RayVirtualCluster(ClusterConfig(cpu_workers_per_node=1), other_cpus=0)
    with pytest.raises(ValueError, match="a stage failed"), cluster:
        assert children() - before, "Ray runs in its own processes"
        raise ValueError("a stage failed")
    assert not ray.is_initialized()
    with pytest.raises(RuntimeError, match="use it in a with statement"):
        _ = cluster.placement_group
    wait_until_gone(before)
    cluster.close()
