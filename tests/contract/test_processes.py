"""Plain processes over the socket ledger: without torch, and without the noop store of another process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from multiprocessing.connection import Connection

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.factory import attach_data_plane
from nemo_rl.errors import DataPlaneClosed
from tests.helpers.data_plane_peers import start_forked
from tests.helpers.data_planes import ids_column, keys_of, open_plane

FIELDS = ("input_ids", "sample_mask")

CLAIM_ALL = """
import pickle, sys
from nemo_rl.data_plane.ledger.host_socket import SocketLedgerHost
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


def join(pipe: Connection, address: DataPlaneAddress) -> None:
    try:
        attach_data_plane(address)
    except DataPlaneClosed as error:
        pipe.send(str(error))


def test_a_noop_store_cannot_be_joined_from_another_process() -> None:
    with open_plane("noop-socket") as plane:
        child, pipe = start_forked(join, plane.owner.address)
        assert "noop store lives in process" in pipe.recv()
        pipe.close()
        child.join(60)
