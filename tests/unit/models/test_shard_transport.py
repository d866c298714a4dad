"""Rounds of a refit by shards between members of a gloo group: what arrives, who is lost, which errors are heard."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from nemo_rl.errors import CollectiveTimeout, WorkerError
from nemo_rl.models.hf.files import Box
from nemo_rl.models.weight_sync.buckets import WeightSlot
from nemo_rl.models.weight_sync.shard_plan import ShardPlan, plan_shards
from nemo_rl.models.weight_sync.shard_transport import ShardReceiver, ShardSender
from nemo_rl.models.weight_sync.transport import RefitGroup, RefitGroupSpec, open_store

SLOTS = (
    WeightSlot(name="square", dtype="bfloat16", shape=(64, 33)),
    WeightSlot(name="norm", dtype="float32", shape=(31,)),
    WeightSlot(name="last", dtype="bfloat16", shape=(50, 20)),
)
SENDERS, RECEIVERS = (0, 1), (2, 3)
BUCKET, DEADLINE_S, SHORT_S = 600, 20.0, 1.0
Weights = dict[str, torch.Tensor]


@pytest.fixture
def weights() -> Weights:
    return {slot.name: torch.randn(slot.shape) for slot in SLOTS}


def _plan() -> ShardPlan:
    """Senders hold half of the rows each, and copies of the norm; receivers take half of the columns."""
    square, norm, last = (Box.whole(slot.shape) for slot in SLOTS)
    held = [[[square.along(0, 32 * rank, 32)], [norm], [last.along(0, 25 * rank, 25)]] for rank in SENDERS]
    taken = {
        rank: [[square.along(1, 17 * place, 17 - place)], [norm], [last.along(1, 10 * place, 10)]]
        for place, rank in enumerate(RECEIVERS)
    }
    return plan_shards(SLOTS, held, taken, bucket_bytes=BUCKET)


def _held(rank: int, weights: Weights) -> dict[str, list[tuple[Box, torch.Tensor]]]:
    boxes = {name: Box.whole(tuple(weight.shape)) for name, weight in weights.items()}
    halves = {name: box.along(0, box.size[0] // 2 * rank, box.size[0] // 2) for name, box in boxes.items()}
    halves["norm"] = boxes["norm"]
    return {name: [(box, box.of(weights[name], held=boxes[name]))] for name, box in halves.items()}


class Group:
    """Members of one group in threads of this process."""

    def __init__(self, timeout_s: float) -> None:
        self._store = open_store("127.0.0.1", 4, timeout_s=DEADLINE_S)
        self._pool = ThreadPoolExecutor(max_workers=4)
        self._timeout_s = timeout_s
        self.members = [future.result(DEADLINE_S) for future in [self.run(self._join, rank) for rank in range(4)]]

    def _join(self, rank: int) -> RefitGroup:
        spec = RefitGroupSpec(
            address="127.0.0.1",
            port=self._store.port,
            rank=rank,
            world_size=4,
            backend="gloo",
            timeout_s=self._timeout_s,
        )
        return RefitGroup(spec, device=torch.device("cpu"), store=self._store if rank == 0 else None)

    def run(self, action: Callable[..., object], *arguments: object) -> Future:
        return self._pool.submit(action, *arguments)

    def close(self) -> None:
        for member in self.members:
            member.close()
        self._pool.shutdown()


@pytest.fixture
def group() -> Group:
    made = Group(DEADLINE_S)
    yield made
    made.close()


def _send(group: Group, plan: ShardPlan, rank: int, weights: Weights, *, fails_at: int | None = None) -> int:
    sender = ShardSender(plan.of(rank), group.members[rank], prints=None)
    begin = sender._begin

    def begin_or_fail(number: int) -> None:
        if number == fails_at:
            raise OSError("no memory is left")
        begin(number)

    sender._begin = begin_or_fail  # type: ignore[method-assign]
    try:
        return sender.send(_held(rank, weights))
    except OSError as error:
        sender.send_error(str(error))
        raise


def _receive(group: Group, plan: ShardPlan, rank: int, *, leaves_at: int | None = None) -> Weights:
    found = {slot.name: torch.full(slot.shape, float("nan"), dtype=getattr(torch, slot.dtype)) for slot in SLOTS}
    receiver = ShardReceiver(plan.of(rank), group.members[rank])
    begin = receiver._begin

    def begin_or_leave(number: int) -> object:
        if number == leaves_at:
            raise InterruptedError
        return begin(number)

    receiver._begin = begin_or_leave  # type: ignore[method-assign]

    def take(slot: WeightSlot, box: Box, values: torch.Tensor) -> None:
        box.of(found[slot.name], held=Box.whole(slot.shape)).copy_(values)

    try:
        receiver.receive(take)
    except BaseException as error:
        group.members[rank].leave(error)
        raise
    return found


def _check(found: Weights, weights: Weights, place: int) -> None:
    square, last = slice(17 * place, 33 if place else 17), slice(10 * place, 10 * place + 10)
    assert torch.equal(found["square"][:, square], weights["square"][:, square].bfloat16())
    assert torch.equal(found["last"][:, last], weights["last"][:, last].bfloat16())
    assert torch.equal(found["norm"], weights["norm"])
    assert found["square"].isnan().sum() == 64 * (17 if place else 16), "nothing comes that is not taken"


def test_every_rank_gets_what_it_takes_in_its_dtype(group: Group, weights: Weights) -> None:
    plan = _plan()
    assert len(plan.rounds) > 4
    sent = [group.run(_send, group, plan, rank, weights) for rank in SENDERS]
    found = [group.run(_receive, group, plan, rank) for rank in RECEIVERS]
    for place, future in enumerate(found):
        _check(future.result(DEADLINE_S), weights, place)
    packed = sum(future.result(DEADLINE_S) for future in sent)
    assert packed == sum(slot.num_bytes for slot in SLOTS), "each element is packed once"


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_receiver_that_is_gone_is_waited_for_no_longer(group: Group, weights: Weights, place: str) -> None:
    plan = _plan()
    count = len(plan.of(3).rounds)
    leaves_at = {"first": 0, "middle": count // 2, "last": count - 1}[place]
    sent = [group.run(_send, group, plan, rank, weights) for rank in SENDERS]
    gone = group.run(lambda: _receive(group, plan, 3, leaves_at=leaves_at))
    _check(group.run(_receive, group, plan, 2).result(DEADLINE_S), weights, 0)
    assert isinstance(gone.exception(DEADLINE_S), InterruptedError)
    for future in sent:
        future.result(DEADLINE_S)


@pytest.mark.parametrize("fails_at", [0, 2])
def test_an_error_of_a_sender_reaches_the_receivers_as_text(group: Group, weights: Weights, fails_at: int) -> None:
    plan = _plan()
    sent = [
        group.run(lambda rank=rank: _send(group, plan, rank, weights, fails_at=fails_at if rank else None))
        for rank in SENDERS
    ]
    for future in [group.run(_receive, group, plan, rank) for rank in RECEIVERS]:
        error = future.exception(DEADLINE_S)
        assert isinstance(error, WorkerError)
        assert "the policy could not send weights: no memory is left" in str(error)
    assert isinstance(sent[1].exception(DEADLINE_S), OSError)
    assert isinstance(sent[0].exception(DEADLINE_S), CollectiveTimeout | None)


def test_a_sender_that_is_silent_is_given_up_at_the_deadline(weights: Weights) -> None:
    group = Group(SHORT_S)
    plan = _plan()
    sent = group.run(_send, group, plan, 0, weights)
    began = time.monotonic()
    for future in [group.run(_receive, group, plan, rank) for rank in RECEIVERS]:
        error = future.exception(DEADLINE_S)
        assert isinstance(error, CollectiveTimeout) and "lost the other members, first rank 1" in str(error)
    assert isinstance(sent.exception(DEADLINE_S), CollectiveTimeout | None)
    assert time.monotonic() - began < DEADLINE_S
    group.close()


def test_a_rank_that_does_not_hold_what_it_is_to_send_says_so(group: Group, weights: Weights) -> None:
    sender = ShardSender(_plan().of(0), group.members[0], prints=None)
    with pytest.raises(WorkerError, match="rank 0 does not hold .* of square"):
        sender.send({})
