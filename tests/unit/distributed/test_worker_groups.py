"""Worker groups on a real Ray: results in order, root cause with rank and stage, nothing reused after a failure."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import pytest
import ray

from nemo_rl.distributed.environment import MOST_OPEN_FILES, raise_open_files
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.worker_groups import Call, LocalWorkerGroup, Pending, Request, ask
from nemo_rl.errors import CollectiveTimeout, NonFiniteError, ResourceError, WorkerError, WorkerLate, WorkerLost
from tests.helpers.data_planes import IMPORTED, ray_cluster

START_S = 600.0
T = TypeVar("T")


class Echo:
    def __init__(self, rank: int) -> None:
        self.rank, self.released = rank, 0

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

    def count(self, up_to: int, end: str = "") -> Iterator[int]:
        """Waits before each number until `release` was called once more."""
        for number in range(up_to):
            while self.released <= number:
                time.sleep(0.01)
            yield number
        if end == "fail":
            raise NonFiniteError("loss is NaN in rows k1, k2")
        if end == "die":
            os._exit(3)

    def release(self) -> int:
        self.released += 1
        return self.released

    def shutdown(self) -> None:
        self.rank = -1


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(num_cpus=4, imported=[*IMPORTED, "nemo_rl.experience.rollout_worker"]):
        yield


@pytest.fixture
def group(cluster, tmp_path):
    made = RayWorkerGroup("echo", world_size=2, placement=RayPlacement(num_cpus=0), log_dir=tmp_path / "workers")
    made.begin_start(Echo, [{"rank": 0}, {"rank": 1}])
    made.finish_start(timeout_s=START_S)
    yield made
    made.shutdown()


def call(request: Request[T] | list[Request[T]], timeout_s: float = 30.0) -> Call[T]:
    return Call(request=request, stage="train", timeout_s=timeout_s)


@pytest.mark.slow
def test_results_come_in_rank_order_however_many_ranks_there_are(group):
    assert group.run(call([ask(Echo.who, value=10), ask(Echo.who, value=20)])) == [(0, 10), (1, 20)]
    assert group.run(Call(request=ask(Echo.who), stage="s", timeout_s=30, ranks=[1])) == [(1, 0)]
    # The driver's own work must not grow with the square of the ranks.
    refs = [ray.put({"ok": True, "value": rank}) for rank in range(3000)]
    started = time.monotonic()
    replies = group._collect(refs, [0] * 3000, stage="s", timeout_s=60, deadline=started + 60, key="k")
    assert [reply["value"] for reply in replies] == list(range(3000)) and time.monotonic() - started < 5


@pytest.mark.slow
def test_the_first_cause_is_raised_not_what_it_did_to_the_peers(group):
    with pytest.raises(WorkerError, match=r"rank 1, stage train: ValueError: the real cause") as caught:
        group.run(call(ask(Echo.fail, bad_rank=1, text="the real cause")))
    assert caught.value.rank == 1 and caught.value.stage == "train"
    assert not group.is_running
    with pytest.raises(WorkerError, match="has been shut down"):
        group.run(call(ask(Echo.who)))


@pytest.mark.slow
def test_what_a_worker_logs_is_in_its_file_and_its_warnings_reach_the_driver(group, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="nemo_rl")
    group.run(call(ask(Echo.warn, text="little memory")))
    shown = [record.getMessage() for record in caplog.records]
    assert sorted(shown) == [f"echo rank {rank}, stage train: little memory \\x1b[2J from {rank}" for rank in (0, 1)]
    written = [(tmp_path / "workers" / f"echo_{rank}.log").read_text() for rank in (0, 1)]
    assert all("INFO train: quietly: little memory" in text for text in written)
    with pytest.raises(WorkerError):
        group.run(call(ask(Echo.fail, bad_rank=1, text="the real cause")))
    assert "ValueError: the real cause" in (tmp_path / "workers" / "echo_1.log").read_text()
    assert len(caplog.records) == 2, "each warning once"


@pytest.mark.slow
def test_an_error_the_user_can_fix_keeps_its_kind(group):
    with pytest.raises(NonFiniteError, match="rows k1, k2") as caught:
        group.run(call(ask(Echo.refuse)))
    assert "stage train" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_dead_worker_is_named(group):
    with pytest.raises(WorkerError, match=r"rank 1, stage train: the worker process died \(echo worker, process \d+\)"):
        group.run(call(ask(Echo.die, bad_rank=1)))


@pytest.mark.slow
def test_a_stage_past_its_deadline_ends_the_group(group):
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"ranks \[0, 1\] did not finish in 1 s"):
        group.run(call(ask(Echo.sleep, seconds=60.0), timeout_s=1.0))
    assert time.monotonic() - started < 10
    assert not group.is_running


@pytest.mark.slow
def test_two_calls_are_in_flight_at_once_and_each_gives_its_own_results(group):
    started = time.monotonic()
    slow = group.submit(call(ask(Echo.sleep, seconds=1.0)))
    quick = group.submit(call([ask(Echo.who, value=10), ask(Echo.who, value=20)]))
    assert time.monotonic() - started < 0.9, "submit waits for nothing"
    assert quick.result() == [(0, 10), (1, 20)], "each rank does its calls in their order"
    assert time.monotonic() - started >= 1.0
    assert slow.result() == [None, None] and slow.result() == [None, None]
    assert group.is_running


@pytest.mark.slow
def test_a_failure_is_raised_by_the_call_that_failed_and_ends_the_group(group):
    good = group.submit(call(ask(Echo.who, value=1)))
    bad = group.submit(call(ask(Echo.fail, bad_rank=1, text="the real cause")))
    assert good.result() == [(0, 1), (1, 1)]
    with pytest.raises(WorkerError, match="the real cause"):
        bad.result()
    with pytest.raises(WorkerError, match="has been shut down"):
        group.submit(call(ask(Echo.who)))


@pytest.mark.slow
def test_a_deadline_counts_from_submit_and_results_that_came_in_time_wait(group):
    quick = group.submit(call(ask(Echo.who, value=1), timeout_s=2.0))
    time.sleep(3.0)
    assert quick.result() == [(0, 1), (1, 1)], "the driver looked late, the ranks were not"
    started = time.monotonic()
    slow = group.submit(call(ask(Echo.sleep, seconds=60.0), timeout_s=2.0))
    time.sleep(2.0)
    with pytest.raises(CollectiveTimeout, match=r"ranks \[0, 1\] did not finish in 2 s"):
        slow.result()
    assert time.monotonic() - started < 3.5 and not group.is_running


@pytest.fixture
def streaming(cluster):
    group = RayWorkerGroup("echo", world_size=1, placement=RayPlacement(), num_streams=1)
    group.begin_start(Echo, [{"rank": 0}])
    group.finish_start(timeout_s=START_S)
    yield group
    group.shutdown()


@pytest.mark.slow
def test_results_of_a_stream_come_one_by_one_beside_other_calls(streaming):
    numbers = streaming.stream(call(ask(Echo.count, up_to=3)))
    for number in range(3):
        assert streaming.run(call(ask(Echo.release))) == [number + 1], "no call waits for the stream"
        assert next(numbers) == number
    with pytest.raises(StopIteration):
        next(numbers)
    assert streaming.run(call(ask(Echo.who, value=5))) == [(0, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "error", "words"),
    [
        ("fail", NonFiniteError, "rows k1, k2"),
        ("die", WorkerLost, "process died"),
        ("late", WorkerLate, "not finish in 1"),
    ],
)
def test_a_stream_that_ends_with_an_error_gives_what_came_before_it(streaming, end, error, words):
    for _ in range(2):
        streaming.run(call(ask(Echo.release)))
    up_to, timeout_s = (3, 1.0) if end == "late" else (2, 30.0)
    numbers = streaming.stream(call(ask(Echo.count, up_to=up_to, end=end), timeout_s))
    came = []
    with pytest.raises(error, match=words):
        for number in numbers:
            came.append(number)
    # What a process has not handed over when it dies is lost with it.
    assert came == [0, 1] or (end == "die" and came == [0, 1][: len(came)])
    assert not streaming.is_running


@pytest.mark.slow
def test_the_first_of_several_results_is_waited_for_and_calls_back(group):
    slow, fast = group.submit(call(ask(Echo.sleep, seconds=1.0))), Pending.done(3)
    assert Pending.first([slow], timeout_s=0.01) is None and not slow.is_ready
    assert Pending.first([slow, fast], timeout_s=30) is fast
    heard, is_heard = [], threading.Event()
    changed = slow.then(len)
    changed.when_ready(lambda pending: (heard.append(pending.result()), is_heard.set()))
    assert Pending.first([changed], timeout_s=30) is changed and is_heard.wait(30)
    assert heard == [2] and slow.is_ready
    failing = group.submit(call(ask(Echo.fail, bad_rank=0, text="planted")))
    assert Pending.first([failing], timeout_s=30) is failing, "a failure is a result"
    with pytest.raises(WorkerError, match="planted"):
        failing.result()


def test_a_local_stream_is_the_workers_own():
    group = LocalWorkerGroup(lambda: Echo(0))
    numbers = group.stream(call(ask(Echo.count, up_to=2, end="fail")))
    group.run(call(ask(Echo.release)))
    assert next(numbers) == 0
    group.run(call(ask(Echo.release)))
    with pytest.raises(NonFiniteError):
        list(numbers)


def test_a_process_raises_its_limit_of_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        raise_open_files()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == (MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES))
        with pytest.raises(ResourceError, match="open files: .*hard limit here is .*--ulimit nofile"):
            raise_open_files(least=MOST_OPEN_FILES + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_arguments_are_named():
    assert ask(Echo.who, value=3) == Request("who", {"value": 3})
    with pytest.raises(TypeError, match=r"ask\(Echo.who\): name every argument"):
        ask(Echo.who, 3)


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(cluster):
    made = RayWorkerGroup("echo", world_size=1, placement=RayPlacement(num_cpus=0))
    made.begin_start(Echo, [{"wrong": 1}])
    with pytest.raises(WorkerError, match=r"start of echo: TypeError"):
        made.finish_start(timeout_s=START_S)


def test_a_local_group_runs_in_this_process():
    local = LocalWorkerGroup(lambda: Echo(0))
    assert local.run(call(ask(Echo.who, value=3))) == [(0, 3)]
    refused = local.submit(call(ask(Echo.refuse)))
    with pytest.raises(NonFiniteError, match="rows k1, k2"):
        refused.result()
    assert local.is_running
    local.shutdown()
    assert not local.is_running
    with pytest.raises(WorkerError, match="shut down"):
        local.run(call(ask(Echo.who)))
