"""A fleet on a real Ray: a member that dies or hangs is left out and started anew, an error is raised."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.worker_groups import MOST_STARTS, Call, WorkerFleet, ask
from nemo_rl.errors import ConfigError, NonFiniteError, WorkerError, WorkerLate, WorkerLost
from nemo_rl.experience.rollout_handle import RolloutHandle
from tests.helpers.data_planes import IMPORTED, ray_cluster

START_S = 600.0
GONE_S = 60.0
pytestmark = pytest.mark.slow


class Member:
    def __init__(self, number: int) -> None:
        self.number = number

    def process(self) -> int:
        return os.getpid()

    def add(self, value: int) -> int:
        return self.number + value

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def refuse(self) -> None:
        raise NonFiniteError("NaN in row 3")


def started(number: int) -> RayWorkerGroup:
    group = RayWorkerGroup("member", world_size=1, placement=RayPlacement(), first=number)
    group.begin_start(Member, [{"number": number}])
    group.finish_start(timeout_s=START_S)
    return group


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    with ray_cluster(num_cpus=2, imported=[*IMPORTED, "nemo_rl.experience.rollout_worker"]):
        yield


@pytest.fixture
def fleet(own_ray: None) -> Iterator[WorkerFleet]:
    fleet = WorkerFleet([started(number) for number in range(2)], start=started)
    yield fleet
    fleet.shutdown()


def add(fleet: WorkerFleet) -> dict[int, int]:
    return fleet.run(ask(Member.add, value=10), stage="adding", timeout_s=60)


def test_a_dead_member_is_left_out_and_started_anew(fleet):
    other = fleet.copy()
    assert add(fleet) == {0: 10, 1: 11} and fleet.incarnations == {0: 1, 1: 1}
    with pytest.raises(
        WorkerLost, match=r"rank 1, stage dying: the worker process died \(member worker, process \d+\)"
    ):
        fleet.run_one(1, Call(request=ask(Member.die), stage="dying", timeout_s=60))
    assert add(fleet) == {0: 10} and fleet.numbers == (0,)
    # Whoever else knows the process hears of its end by asking.
    assert add(other) == {0: 10} and other.restart_failed() == ()
    assert fleet.restart_failed() == (1,) and fleet.incarnations == {0: 1, 1: 2}
    assert add(fleet) == {0: 10, 1: 11} == add(fleet.copy())


def test_a_member_that_stands_still_is_left_out_and_ended(fleet):
    processes = fleet.run(ask(Member.process), stage="asking", timeout_s=60)
    stopped = psutil.Process(processes[0])
    with pytest.raises(WorkerLate, match=r"ranks \[0\] did not finish in 2 s .*is stopped \(state T"):
        fleet.run_one(0, Call(request=ask(Member.stop), stage="stopping", timeout_s=2, deadline_key="engine.key"))
    assert add(fleet) == {1: 11} and fleet.restart_failed() == (0,)
    _, left = psutil.wait_procs([stopped], timeout=GONE_S)
    assert not left, "the process that stood still is still there"


def test_an_error_of_a_member_is_raised_and_no_loss(fleet):
    with pytest.raises(NonFiniteError, match="NaN in row 3"):
        fleet.run(ask(Member.refuse), stage="adding", timeout_s=60)
    assert fleet.numbers == (0, 1)


def test_with_none_left_the_first_loss_is_raised(fleet):
    with pytest.raises(WorkerLost, match="rank 0, stage dying: the worker process died"):
        fleet.run(ask(Member.die), stage="dying", timeout_s=60)
    with pytest.raises(WorkerError, match="rank 0, stage dying"):
        add(fleet)
    # Another end of all has another cause.
    assert fleet.restart_failed() == (0, 1)
    with pytest.raises(WorkerLost, match="rank 0, stage again: the worker process died"):
        fleet.run(ask(Member.die), stage="again", timeout_s=60)


def test_a_member_that_never_starts_again_is_given_up(own_ray):
    tries = []

    def start(number: int) -> RayWorkerGroup:
        tries.append(number)
        raise ConfigError("no such model")

    fleet = WorkerFleet([started(0)], start=start)
    fleet.lose(0, WorkerLost("gone", rank=0, stage="adding"))
    assert [fleet.restart_failed() for _ in range(4)] == [()] * 4 and tries == [0] * MOST_STARTS


def test_an_abort_does_not_wait_for_workers_that_are_being_replaced(own_ray):
    begun, may_end = threading.Event(), threading.Event()

    def start(number: int) -> RayWorkerGroup:
        begun.set()
        may_end.wait(60)
        raise ConfigError("no such model")

    fleet = WorkerFleet([started(0)], start=start)
    fleet.lose(0, WorkerLost("gone", rank=0, stage="adding"))
    rollout = RolloutHandle(fleet, timeout_s=60, report=print)
    replacing = threading.Thread(target=rollout.replace_lost)
    replacing.start()
    assert begun.wait(60)
    with pytest.raises(WorkerLate, match=r"within 0.1 s: lost ones are being replaced"):
        rollout.abort(["group"], timeout_s=0.1)
    may_end.set()
    replacing.join(60)
    rollout.abort(["group"])
    begun.clear()
    rollout.shutdown()
    assert rollout.replace_lost() == () and not begun.is_set()
