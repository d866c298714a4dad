"""Leader broadcast inside a replica group: columns, jagged rows, objects, and errors as text."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from nemo_rl.distributed import collectives
from nemo_rl.distributed.collectives import broadcast_from_leader, replica_group_of
from nemo_rl.errors import KeysNotFound, NemoRLError
from tests.helpers.gloo import run_ranks


def columns() -> dict[str, torch.Tensor | list[object]]:
    ragged = [torch.arange(3), torch.arange(0), torch.arange(5)]
    return {
        "input_ids": torch.nested.nested_tensor(ragged, layout=torch.jagged),
        "bf16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "scalar_rows": torch.tensor([7, 8], dtype=torch.int16),
        "text": ["a", None, {"b": [1]}],
    }


def every_case(rank: int) -> dict[str, object]:
    group = replica_group_of(rank, [[0, 1]])
    alone = replica_group_of(rank, [[0], [1]])
    calls = []

    def fetch() -> dict[str, torch.Tensor | list[object]]:
        calls.append(rank)
        return columns()

    got = broadcast_from_leader(fetch, group=group, leader=1)
    expected = columns()
    assert got["text"] == expected["text"]
    assert torch.equal(got["input_ids"].values(), expected["input_ids"].values())
    assert torch.equal(got["input_ids"].offsets(), expected["input_ids"].offsets())
    for name in ("bf16", "mask", "scalar_rows"):
        assert got[name].dtype == expected[name].dtype and torch.equal(got[name], expected[name])
    only_leader_fetched = list(calls)
    counted = count_broadcasts(group, rank)
    broadcast_from_leader(fetch, group=alone, leader=rank)
    return {
        "calls": only_leader_fetched,
        "counted": counted,
        "alone": alone is None and len(calls) == len(only_leader_fetched) + 1,
    } | errors(rank, group)


def count_broadcasts(group: object, rank: int) -> dict[str, int]:
    """Real broadcasts, counted: all columns, none, messages of 64 bytes, tensors of 64 and 32 bytes by themselves."""
    broadcast, counted, calls = dist.broadcast, {}, []

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return broadcast(*args, **kwargs)

    dist.broadcast = counting
    try:
        for name, fields, limit, own in (
            ("all", columns(), 1 << 20, 1 << 20),
            ("none", {}, 1 << 20, 1 << 20),
            ("split", columns(), 64, 1 << 20),
            ("large by themselves", columns(), 1 << 20, 32),
        ):
            calls.clear()
            collectives.MESSAGE_BYTES, collectives.OWN_BUFFER_BYTES = limit, own
            got = broadcast_from_leader(lambda sent=fields: sent, group=group, leader=0)
            counted[name] = len(calls)
            for column, expected in fields.items():
                same = got[column] == expected if isinstance(expected, list) else got[column].dtype == expected.dtype
                assert same
            assert not fields or torch.equal(got["input_ids"].values(), fields["input_ids"].values())
    finally:
        dist.broadcast = broadcast
    return counted


def errors(rank: int, group: object) -> dict[str, object]:
    seen = {}
    for name, error in (("ours", KeysNotFound("partition 'train': keys a, b")), ("other", ValueError("bad shard"))):

        def fetch(error: Exception = error) -> dict[str, torch.Tensor | list[object]]:
            raise error

        started = time.monotonic()
        with pytest.raises(Exception) as caught:
            broadcast_from_leader(fetch, group=group, leader=0)
        assert time.monotonic() - started < 60
        seen[name] = (type(caught.value).__name__, str(caught.value))
        assert isinstance(caught.value, NemoRLError) or rank == 0
    return seen


def test_a_replica_group_shares_what_its_leader_reads_and_its_errors():
    leader, follower = run_ranks(2, every_case)
    assert leader["calls"] == [] and follower["calls"] == [1]
    assert leader["alone"] and follower["alone"]
    # A status word and a descriptor; then one message for all bytes, however many columns.
    for report in (leader, follower):
        assert report["counted"] == {"all": 3, "none": 2, "split": 2 + 3, "large by themselves": 2 + 3}
    assert leader["ours"] == follower["ours"] == ("KeysNotFound", "partition 'train': keys a, b")
    assert leader["other"] == ("ValueError", "bad shard")
    assert follower["other"] == ("NemoRLError", "ValueError: bad shard")
