"""TransferQueue clients that know nothing of this library read a run's rows and add columns; runs join their queue."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator

import pytest
import ray
import torch

from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.keys import QUEUE_PREFIX, queue_partition
from nemo_rl.data_plane.schema import extra_field
from nemo_rl.errors import CapacityExceeded, FieldNotProduced, KeysNotFound, PayloadLost, ResourceError, SchemaMismatch
from tests.helpers import mooncake
from tests.helpers.data_plane_peers import ActorPeer
from tests.helpers.data_planes import CONFIGS, Plane, ids_column, keys_of, open_plane, rows_of, wait_until
from tests.helpers.foreign_queue import SIMPLE, Program, foreign_queue

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

CONNECT = CONFIGS["transfer_queue-connect"]
FIELDS = ("input_ids", "input_lengths", "token_mask", "sample_mask", "prev_logprobs", "advantages", "staleness")
LENGTHS = [3, 1, 2, 4]
NEEDS_MOONCAKE = pytest.mark.skipif(bool(mooncake.why_not()), reason=mooncake.why_not() or "Mooncake runs here")
BACKENDS = [
    "transfer_queue-native",
    pytest.param("transfer_queue-native-mooncake", marks=[pytest.mark.full, NEEDS_MOONCAKE]),
]


@pytest.fixture(params=BACKENDS)
def native(request: pytest.FixtureRequest) -> Iterator[tuple[Plane, Program]]:
    """A run with layout native, and another program's client of the same TransferQueue."""
    with open_plane(request.param) as plane:
        program = Program()
        try:
            yield plane, program
        finally:
            program.end()


def rollout(plane: Plane, partition: str, keys: list[str]) -> None:
    columns = {
        "input_ids": ids_column(LENGTHS),
        "input_lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        "token_mask": torch.nested.nested_tensor_from_jagged(
            torch.ones(sum(LENGTHS), dtype=torch.bool), torch.tensor([0, 3, 4, 6, 10])
        ),
        "sample_mask": torch.ones(4),
    }
    plane.owner.kv_batch_put(keys, partition, columns, [{"reward": float(i)} for i in range(4)])


def rows_like_ids(dtype: torch.dtype = torch.float32, lengths: list[int] = LENGTHS) -> list[torch.Tensor]:
    return [torch.arange(count, dtype=dtype) / 8 for count in lengths]


def test_a_client_reads_a_step_and_adds_columns_that_a_stage_waits_for(native: tuple[Plane, Program]) -> None:
    plane, program = native
    partition, keys = plane.partition(FIELDS, tasks=["train"], grpo_group_size=4), keys_of(1)
    there = queue_partition(plane.owner.address.run_id, partition)
    rollout(plane, partition, keys)
    ids = rows_of(ids_column(LENGTHS))
    assert program.listed()[there] == {key: {"reward": float(i)} for i, key in enumerate(keys)}
    assert program.get(keys[::-1], there, ["input_ids"]) == {"input_ids": ids[::-1]}
    # Its own cursor hands out whole rows; ours does not know, nor does it mind.
    assert program.fetch(there, "theirs", ["input_ids"], 3) == {"input_ids": ids[:3]}
    assert program.stream(there, "streamed", ["input_ids"], 4) == {"input_ids": ids}

    needed = ["input_ids", "prev_logprobs", "advantages"]
    assert not plane.owner.get_meta(partition, "train", needed, 4, consumer_id="c", blocking=False).keys
    program.put(keys, there, {"prev_logprobs": rows_like_ids(), "theirs": torch.ones(4, 2)})
    assert not plane.owner.get_meta(partition, "train", needed, 4, consumer_id="c", blocking=False).keys
    program.put(keys[:2], there, {"advantages": torch.tensor([1.0, 2.0])})
    with pytest.raises(FieldNotProduced, match=f"advantages are not written yet for 2 of 4 rows: {keys[2]}"):
        plane.owner.kv_batch_get(keys, partition, ["advantages"])
    program.put(keys[2:], there, {"advantages": torch.tensor([[3.0], [4.0]])})  # as over Mooncake
    meta = plane.peer.get_meta(partition, "train", needed, 4, consumer_id="c", timeout_s=20.0)
    assert sorted(meta.keys) == sorted(keys) and meta.sequence_lengths == tuple(LENGTHS)
    rows = plane.owner.get_data(meta)
    assert rows["advantages"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert rows_of(rows["prev_logprobs"]) == [row.tolist() for row in rows_like_ids()]
    assert rows_of(rows["input_ids"]) == ids

    # What the ledger has is settled; what a stage of ours rewrites is seen by the other program.
    program.put(keys, there, {"advantages": torch.zeros(4)})
    plane.owner.kv_batch_put(keys[:1], partition, {"sample_mask": torch.zeros(1)})
    assert plane.owner.get_data(meta, ["advantages"])["advantages"].tolist() == [1.0, 2.0, 3.0, 4.0]
    masks = program.get(keys, there, ["sample_mask"])["sample_mask"]
    assert torch.tensor(masks).flatten().tolist() == [0.0, 1.0, 1.0, 1.0]
    assert plane.owner.kv_batch_get(keys, partition, ["sample_mask"])["sample_mask"].tolist() == [0.0, 1.0, 1.0, 1.0]

    program.put(keys[1:2], there, {"input_ids": [torch.zeros(5, dtype=torch.int32)]})
    with pytest.raises(PayloadLost, match=f"'input_ids' of {keys[1]} has 20 bytes.*where this run wrote 4: a Transfer"):
        plane.owner.get_data(meta, ["input_ids"])

    plane.owner.kv_clear(keys[:1], partition)
    assert list(program.listed()[there]) == keys[1:]
    plane.owner.kv_clear(None, partition)
    assert program.listed()[there] == {}
    plane.settle()


def test_columns_that_do_not_fit_are_refused_by_name(native: tuple[Plane, Program]) -> None:
    plane, program = native
    extra = extra_field("spots", dtypes=["int32"], dims=("spots", 2))
    partition, keys = plane.partition((*FIELDS, extra), tasks=["train"]), keys_of(1)
    there = queue_partition(plane.owner.address.run_id, partition)
    rollout(plane, partition, keys)

    def refused(field: str) -> str:
        with pytest.raises(SchemaMismatch, match=f"what a TransferQueue client has written.*{field}") as caught:
            plane.owner.kv_batch_get(keys, partition, [field])
        return str(caught.value)

    program.put(keys, there, {"advantages": torch.tensor([1.0, 2.0, 3.0, 1e300], dtype=torch.float64)})
    assert "expected dtype float32, got float64" in refused("advantages")
    program.put(keys, there, {"prev_logprobs": rows_like_ids(lengths=[3, 1, 2, 5])})
    with pytest.raises(SchemaMismatch, match=f"row '{keys[3]}' has 4 tokens, got a column with 5"):
        plane.owner.get_meta(partition, "train", ["prev_logprobs"], 4, consumer_id="c", timeout_s=5.0)
    program.put(keys, there, {"spots": torch.ones(4, 3, dtype=torch.int32)})
    assert "expected rows with dims ['spots', 2]" in refused("spots")
    # The declared dtype is not the only one that is taken: a cast that changes no value is made, as for our own puts.
    program.put(keys, there, {"staleness": torch.tensor([0, 1, 2, 3])})
    assert plane.owner.kv_batch_get(keys, partition, ["staleness"])["staleness"].dtype == torch.int32
    plane.owner.kv_clear(None, partition)

    rollout(plane, partition, keys)
    program.put(keys[:2], there, {"advantages": torch.ones(2)})
    program.put(keys[2:], there, {"advantages": torch.ones(2, dtype=torch.float64) / 3})
    assert re.search("rows of several dtypes|got float64, and 2 values change", refused("advantages"))
    plane.owner.kv_clear(None, partition)
    plane.settle()


def test_rows_of_another_program_are_ignored_and_counted(
    native: tuple[Plane, Program], caplog: pytest.LogCaptureFixture
) -> None:
    plane, program = native
    partition, keys = plane.partition(FIELDS, tasks=["train"]), keys_of(1)
    there = queue_partition(plane.owner.address.run_id, partition)
    rollout(plane, partition, keys)
    program.put(["x", "y"], there, {"advantages": torch.ones(2)})
    with caplog.at_level(logging.WARNING):
        assert not plane.owner.get_meta(partition, "train", ["advantages"], 4, consumer_id="c", blocking=False).keys
    assert "ignoring 2 rows that a TransferQueue client has made and this run does not know: x, y" in caplog.text
    assert list(plane.owner.kv_list(partition)) == keys
    with pytest.raises(KeysNotFound):
        plane.owner.kv_batch_get(["x"], partition, ["advantages"])
    plane.owner.kv_clear(None, partition)
    assert list(program.listed()[there]) == ["x", "y"]
    plane.settle()


def test_a_put_that_was_refused_is_not_taken_for_another_programs(native: tuple[Plane, Program]) -> None:
    plane, _ = native
    partition, keys = plane.partition(FIELDS, tasks=["train"], num_samples=4), keys_of(1)
    rollout(plane, partition, keys)
    hasty = plane.attach()
    hasty._link.timeout_s = 1.5
    # Its bytes are in TransferQueue when the ledger says that a row too many cannot come.
    with pytest.raises(CapacityExceeded):
        hasty.kv_batch_put([*keys, "fifth"], partition, {"advantages": torch.ones(5), "sample_mask": torch.ones(5)})
    with pytest.raises(FieldNotProduced):
        plane.owner.kv_batch_get(keys, partition, ["advantages"])
    plane.owner.kv_batch_put(keys, partition, {"advantages": torch.arange(4.0)})
    assert plane.owner.kv_batch_get(keys, partition, ["advantages"])["advantages"].tolist() == [0.0, 1.0, 2.0, 3.0]
    plane.settle()


@pytest.mark.full
def test_a_queue_that_does_not_suit_is_refused_with_the_reason() -> None:
    def refused(config: object, match: str) -> None:
        with pytest.raises(ResourceError, match=match):
            TransferQueueStore.start(config, run_id="guest")

    refused(CONNECT, "no TransferQueue controller to join; start it first")
    polls = {**SIMPLE, "controller": {"polling_mode": False}}
    with foreign_queue(polls):
        refused(CONNECT, "polling_mode=false, where one fetch that finds too few rows stops the controller")
    units = {"num_data_storage_units": 1, "total_storage_size": 100}
    with foreign_queue({**SIMPLE, "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": units}}):
        refused(CONNECT, "100000, but the cluster's TransferQueue holds 100 rows in all")
        refused(CONNECT.model_copy(update={"backend": "mooncake_cpu"}), "stores in SimpleStorage; set .*backend=simple")


@pytest.mark.parametrize("killed", ["owner", pytest.param("owner and guard", marks=pytest.mark.full)])
def test_what_a_dead_run_has_in_another_programs_queue_is_removed(killed: str) -> None:
    with foreign_queue() as program:
        dead = ActorPeer(CONNECT)
        own = queue_partition(dead.address.run_id)
        dead.register_partition("train", FIELDS, 4, ["train"])
        dead.kv_batch_put(["a"], "train", {"sample_mask": torch.ones(1)})
        assert {own, f"{own}/train"} <= set(program.listed())
        if killed == "owner and guard":
            os.kill(dead.work(guard_of), signal.SIGKILL)
        os.kill(dead.pid, signal.SIGKILL)
        wait_until(lambda: not _is_alive(dead))
        if killed == "owner":
            wait_until(lambda: not _ours(program))
        following = build_data_plane_client(CONNECT, run_id="following")
        try:
            assert _ours(program) == [queue_partition("following")]
        finally:
            following.close()


def guard_of(client: LedgerClient) -> int:
    return client._link.store._guard.pid


def _ours(program: Program) -> list[str]:
    return [name for name in program.listed() if name.startswith(QUEUE_PREFIX)]


def _is_alive(peer: ActorPeer) -> bool:
    try:
        peer._send("pid", ())
    except ray.exceptions.RayActorError:
        return False
    return True
