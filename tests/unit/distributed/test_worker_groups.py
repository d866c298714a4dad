"""Worker groups on a real Ray: results in order, first cause with rank and stage, nothing reused after a failure."""

from __future__ import annotations

import logging
import os
import time

import pytest
import ray

from nemo_rl.distributed.own_ray import OwnRay
from nemo_rl.distributed.worker_groups import Call, LocalWorkerGroup, RayPlacement, RayWorkerGroup
from nemo_rl.errors import CollectiveTimeout, NonFiniteError, WorkerError

START_S = 600.0


class Echo:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def who(self, value: int = 0) -> tuple[int, int]:
        return self.rank, value

    def fail(self, bad_rank: int, text: str) -> None:
        if self.rank == bad_rank:
            raise ValueError(text)
        time.sleep(0.3)
        raise RuntimeError("Connection closed by peer")

    def refuse(self) -> None:
        raise NonFiniteError("loss is NaN in rows k1, k2")

    def die(self, bad_rank: int) -> None:
        if self.rank == bad_rank:
            os._exit(3)
        time.sleep(0.5)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def warn(self, text: str) -> None:
        log = logging.getLogger("nemo_rl.echo")
        log.info("quietly: %s", text)
        log.warning("%s \x1b[2J from %d", text, self.rank)

    def total(self, payload: list[int]) -> int:
        return sum(payload)

    def shutdown(self) -> None:
        self.rank = -1


@pytest.fixture(scope="module")
def cluster():
    with OwnRay(num_cpus=4):
        yield


@pytest.fixture
def group(cluster, tmp_path):
    made = RayWorkerGroup("echo", world_size=2, placement=RayPlacement(num_cpus=0), log_dir=tmp_path / "workers")
    made.begin_start(Echo, [{"rank": 0}, {"rank": 1}])
    made.finish_start(timeout_s=START_S)
    yield made
    made.shutdown()


def call(method: str, timeout_s: float = 30.0, **kwargs: object) -> Call:
    return Call(method=method, stage="train", timeout_s=timeout_s, kwargs=kwargs)


def test_results_come_in_rank_order_and_payloads_stay_where_they_are(group):
    per_rank = [{"value": 10}, {"value": 20}]
    assert group.run(Call(method="who", stage="s", timeout_s=30, per_rank=per_rank)) == [(0, 10), (1, 20)]
    assert group.run(Call(method="who", stage="s", timeout_s=30, ranks=[1])) == [(1, 0)]
    payload = group.run_for_payload(call("who", value=5))
    assert isinstance(payload.handle, ray.ObjectRef)
    assert group.run(call("total", payload=payload)) == [5, 5]


def test_the_first_cause_is_raised_not_what_it_did_to_the_peers(group):
    with pytest.raises(WorkerError, match=r"rank 1, stage train: ValueError: the real cause") as caught:
        group.run(call("fail", bad_rank=1, text="the real cause"))
    assert caught.value.rank == 1 and caught.value.stage == "train"
    assert not group.is_running
    with pytest.raises(WorkerError, match="has been shut down"):
        group.run(call("who"))


def test_what_a_worker_logs_is_in_its_file_and_its_warnings_reach_the_driver(group, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="nemo_rl")
    group.run(call("warn", text="little memory"))
    shown = [record.getMessage() for record in caplog.records]
    assert sorted(shown) == [f"echo rank {rank}, stage train: little memory \\x1b[2J from {rank}" for rank in (0, 1)]
    written = [(tmp_path / "workers" / f"echo_{rank}.log").read_text() for rank in (0, 1)]
    assert all("INFO train: quietly: little memory" in text for text in written)
    with pytest.raises(WorkerError):
        group.run(call("fail", bad_rank=1, text="the real cause"))
    assert "ValueError: the real cause" in (tmp_path / "workers" / "echo_1.log").read_text()
    assert len(caplog.records) == 2, "each warning once"


def test_an_error_the_user_can_fix_keeps_its_kind(group):
    with pytest.raises(NonFiniteError, match="rows k1, k2") as caught:
        group.run(call("refuse"))
    assert "stage train" in caught.value.__notes__[0]


def test_a_dead_worker_is_named(group):
    with pytest.raises(WorkerError, match=r"rank 1, stage train: the worker process died \(echo worker, process \d+\)"):
        group.run(call("die", bad_rank=1))


def test_a_stage_past_its_deadline_ends_the_group(group):
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"ranks \[0, 1\] did not finish in 1 s"):
        group.run(call("sleep", timeout_s=1.0, seconds=60.0))
    assert time.monotonic() - started < 10
    assert not group.is_running


def test_a_worker_that_cannot_start_says_why(cluster):
    made = RayWorkerGroup("echo", world_size=1, placement=RayPlacement(num_cpus=0))
    made.begin_start(Echo, [{"wrong": 1}])
    with pytest.raises(WorkerError, match=r"start of echo: TypeError"):
        made.finish_start(timeout_s=START_S)


def test_a_local_group_runs_in_this_process():
    local = LocalWorkerGroup(lambda: Echo(0))
    assert local.run(call("who", value=3)) == [(0, 3)]
    assert local.run(call("total", payload=local.run_for_payload(call("who", value=4)))) == [4]
    local.shutdown()
    assert not local.is_running
    with pytest.raises(WorkerError, match="shut down"):
        local.run(call("who"))
