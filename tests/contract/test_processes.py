"""The data plane between processes: Ray actors over TransferQueue, plain processes over the socket ledger."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray
import torch

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.factory import attach_data_plane
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from tests.helpers.planes import Plane, ids_column, keys_of, open_plane, ray_cluster

FIELDS = ("input_ids", "sample_mask")


class Peer:
    """A worker with its own client."""

    def setup(self, address: DataPlaneAddress) -> None:
        torch.set_num_threads(1)
        self.client: DataPlaneClient = attach_data_plane(address)

    def write(self, partition: str, keys: list[str]) -> KVBatchMeta:
        lengths = torch.arange(len(keys), dtype=torch.int32)
        batch = BatchedDataDict(
            input_ids=torch.arange(len(keys) * 9, dtype=torch.int32).reshape(-1, 9),
            input_lengths=lengths,
            sample_mask=torch.ones(len(keys)),
        )
        return kv_first_write(self.client, batch, keys, partition_id=partition, tags=[{"k": key} for key in keys])

    def double(self, meta: KVBatchMeta) -> KVBatchMeta:
        batch = read_columns(self.client, meta, ["input_ids"], pad_values={"input_ids": 0})
        return write_columns(self.client, meta, {"prev_logprobs": batch.tensor("input_ids").float() * 2})

    def consume(self, partition: str) -> list[str]:
        claimed: list[str] = []
        while meta := self.client.get_meta(partition, "train", ["input_ids"], 3, consumer_id="peer", blocking=False):
            claimed += meta.keys
            self.client.release(meta)
        return claimed

    def hold(self, partition: str) -> tuple[str, ...]:
        meta = self.client.get_meta(partition, "train", ["input_ids"], 2, consumer_id="victim")
        return meta.keys

    def close(self) -> None:
        self.client.close()


@pytest.fixture(scope="module")
def queue() -> Iterator[Plane]:
    with ray_cluster(), open_plane("transfer_queue") as plane:
        yield plane


@pytest.fixture(scope="module")
def peers(queue: Plane) -> list[object]:
    actors = [ray.remote(Peer).options(num_cpus=0).remote() for _ in range(2)]
    ray.get([actor.setup.remote(queue.owner.address) for actor in actors])
    return actors


@pytest.fixture
def plane(queue: Plane) -> Iterator[Plane]:
    yield queue
    queue.settle()


def test_actors_hand_columns_to_each_other(plane: Plane, peers: list) -> None:
    partition, keys = plane.partition(DP_TRAIN_FIELDS, tasks=["train"]), keys_of(2)
    written = ray.get(peers[0].write.remote(partition, keys))
    assert written.tags == tuple({"k": key} for key in keys)
    shards = [written.subset([0, 2, 4, 6]), written.subset([7, 5, 3, 1])]
    metas = ray.get([peer.double.remote(shard) for peer, shard in zip(peers, shards, strict=True)])
    for meta, shard in zip(metas, shards, strict=True):
        assert meta.keys == shard.keys and meta.versions["prev_logprobs"] == 1
    batch = read_columns(plane.owner, written, ["input_ids", "prev_logprobs"], pad_values={"input_ids": -1}, pad_to=9)
    for row, length in enumerate(range(8)):
        ids = batch.tensor("input_ids")[row]
        assert ids.tolist() == [*range(row * 9, row * 9 + length), *[-1] * (9 - length)]
        assert batch.tensor("prev_logprobs")[row, :length].tolist() == [2.0 * i for i in ids[:length]]


def test_actors_claim_each_row_once(plane: Plane, peers: list) -> None:
    partition, keys = plane.partition(FIELDS, tasks=["train"]), keys_of(25)
    plane.owner.kv_batch_put(keys, partition, {"input_ids": ids_column([1] * 100)})
    claimed = [key for part in ray.get([peer.consume.remote(partition) for peer in peers]) for key in part]
    assert sorted(claimed) == sorted(keys)


def test_rows_of_a_killed_actor_are_handed_out_again(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=["train"])
    plane.owner.kv_batch_put(["a", "b"], partition, {"input_ids": ids_column([1, 2])})
    victim = ray.remote(Peer).options(num_cpus=0).remote()
    ray.get(victim.setup.remote(plane.owner.address))
    assert ray.get(victim.hold.remote(partition)) == ("a", "b")
    ray.kill(victim)
    again = plane.owner.get_meta(partition, "train", ["input_ids"], 2, consumer_id="heir", timeout_s=15)
    assert again.keys == ("a", "b") and len(plane.owner.get_data(again)) == 2


def test_an_actor_that_closes_its_client_leaves_the_service_running(plane: Plane) -> None:
    partition = plane.partition(FIELDS)
    guest = ray.remote(Peer).options(num_cpus=0).remote()
    ray.get(guest.setup.remote(plane.owner.address))
    ray.get(guest.close.remote())
    plane.owner.kv_batch_put(["a"], partition, {"input_ids": ids_column([3])})
    assert len(plane.owner.kv_batch_get(["a"], partition, ["input_ids"])) == 1


CLAIM_ALL = """
import pickle, sys
from nemo_rl.data_plane.ledger_host_socket import SocketLedgerHost
host = SocketLedgerHost(pickle.loads(bytes.fromhex(sys.argv[1])))
args = {"partition": sys.argv[2], "task": "train", "fields": ["input_ids"], "batch_size": 3, "consumer": "peer"}
print("ready", flush=True)
sys.stdin.readline()
while keys := host.call("claim", args, timeout_s=20)["keys"]:
    print(*keys, sep="\\n")
assert "torch" not in sys.modules
"""


def test_plain_processes_share_the_socket_ledger() -> None:
    with open_plane("noop-socket", lease_s=60) as plane:
        partition, keys = plane.partition(FIELDS, tasks=["train"]), keys_of(25)
        plane.owner.kv_batch_put(keys, partition, {"input_ids": ids_column([1] * 100)})
        address = pickle.dumps(plane.owner.address.ledger).hex()
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CLAIM_ALL, address, partition],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        outputs = [child.communicate("go\n", timeout=60)[0].split() for child in children]
        assert [child.returncode for child in children] == [0, 0]
        assert sorted(outputs[0] + outputs[1]) == sorted(keys)
        plane.settle()


def test_a_noop_store_cannot_be_joined_from_another_process() -> None:
    with open_plane("noop-socket") as plane:
        foreign = pickle.dumps(plane.owner.address).hex()
        code = (
            "import pickle, sys\n"
            "from nemo_rl.data_plane.factory import attach_data_plane\n"
            "from nemo_rl.errors import DataPlaneClosed\n"
            "try:\n    attach_data_plane(pickle.loads(bytes.fromhex(sys.argv[1])))\n"
            "except DataPlaneClosed as error:\n    print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, foreign], capture_output=True, text=True, timeout=120)
        assert "noop store lives in process" in done.stdout, done.stderr
