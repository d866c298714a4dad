"""What Mooncake would do silently, for minutes, or with a crash: each becomes an error in bounded time."""

from __future__ import annotations

import tempfile
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from nemo_rl.data_plane.adapters.mooncake_link import TRANSFER_FAILED
from nemo_rl.data_plane.adapters.mooncake_master import start_servers
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client, start_store
from nemo_rl.data_plane.interfaces import PayloadStore
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    PayloadLost,
    ResourceError,
)
from tests.helpers import mooncake
from tests.helpers.data_plane_peers import start_forked
from tests.helpers.data_planes import ids_column, keys_of, wait_until
from tests.helpers.mooncake import SEGMENT_BYTES, chunk, is_alive, kill, open_store, small_config, stop, stopped, within

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(mooncake.why_not()), reason=mooncake.why_not() or "Mooncake runs here"),
]

IDS = [chunk("run-a", i) for i in range(3)]
CHUNKS = {IDS[0]: (memoryview(b"abc"), memoryview(b"de")), IDS[1]: (), IDS[2]: (memoryview(bytes(100_000)),)}


def joined(store: PayloadStore, **changes: object) -> PayloadStore:
    from nemo_rl.data_plane.adapters.mooncake import MooncakeStore

    return MooncakeStore.join(small_config(**changes), run_id="run-a", address=store.address)


def content(parts: object) -> bytes:
    return b"".join(bytes(part) for part in parts)  # type: ignore[union-attr]


def test_chunks_are_read_in_order_by_another_client_and_a_freed_one_is_named() -> None:
    with open_store() as store:
        other = joined(store)
        handles = store.put(CHUNKS, timeout_s=10)
        assert handles is not None
        for _ in range(3):  # warm buffers come back with old content
            read = other.get(IDS[::-1], timeout_s=10, handles=handles)
            assert [content(parts) for parts in read] == [bytes(100_000), b"", b"abcde"]
            del read
        assert other.get([], timeout_s=10, handles={}) == []
        other.drop([IDS[0], "unknown"], timeout_s=10)
        with pytest.raises(KeysNotFound, match=f"1 of 2 chunks are gone: {IDS[0]}"):
            other.get([IDS[0], IDS[2]], timeout_s=10, handles=handles)
        with pytest.raises(DataPlaneError, match="expected the handle"):
            other.get([IDS[0]], timeout_s=10, handles={})
        other.close()


def test_a_read_whose_bytes_are_not_as_many_as_the_put_had_is_an_error() -> None:
    with open_store() as store:
        store.put({IDS[0]: (memoryview(b"abcde"),)}, timeout_s=10)
        for wrong in (3, 9):
            with pytest.raises(DataPlaneError, match=rf"expected {wrong} bytes, got"):
                store.get([IDS[0]], timeout_s=10, handles={IDS[0]: [wrong, ""]})


def test_buffers_are_not_reused_while_somebody_sees_their_bytes() -> None:
    with open_store() as store:
        handles = {}
        for number, letter in enumerate(b"xy"):
            handles |= store.put({chunk("run-a", number): (memoryview(bytes([letter]) * 1000),)}, timeout_s=10) or {}
        first = store.get([IDS[0]], timeout_s=10, handles=handles)
        second = store.get([IDS[1]], timeout_s=10, handles=handles)
        assert content(first[0]) == b"x" * 1000 and content(second[0]) == b"y" * 1000
        address = store._link.buffers.lease(1).address
        del first, second
        assert store._link.buffers.free_bytes() > 0 and address
        with pytest.raises(TypeError):
            store.get([IDS[0]], timeout_s=10, handles=handles)[0][0][0] = 1  # type: ignore[index]


def test_a_killed_master_ends_calls_with_an_error_that_names_it() -> None:
    with open_store(timeout_s=6) as store:
        reader = joined(store, timeout_s=6)
        handles = store.put(CHUNKS, timeout_s=6)
        assert handles is not None
        caught: list[BaseException] = []

        def read_for_ever() -> None:
            try:
                while True:
                    reader.get(IDS, timeout_s=6, handles=handles)
            except DataPlaneError as error:
                caught.append(error)

        thread = threading.Thread(target=read_for_ever)
        thread.start()
        time.sleep(0.2)
        with within(30):
            kill(store.process_ids["mooncake_master"])
            thread.join(30)
        assert not thread.is_alive() and isinstance(caught[0], DataPlaneClosed)
        assert "has lost its master" in str(caught[0])
        for call in (
            lambda: reader.put({IDS[0]: (memoryview(b"x"),)}, timeout_s=6),
            lambda: reader.drop([IDS[0]], timeout_s=6),
        ):
            with within(12), pytest.raises(DataPlaneClosed, match="has lost its master"):
                call()
        assert not reader.health().is_alive
        with within(20):
            reader.close()
        with pytest.raises(DataPlaneClosed, match="no Mooncake master listens"):
            joined(store)


def test_a_master_that_does_not_answer_ends_calls_by_their_deadline() -> None:
    with open_store(timeout_s=20) as store:
        handles = store.put(CHUNKS, timeout_s=6)
        assert handles is not None
        with stopped(store.process_ids["mooncake_master"]):
            with within(6), pytest.raises(DataPlaneTimeout, match="get: mooncake did not answer within 1.0 s"):
                store.get(IDS, timeout_s=1, handles=handles)
            with within(1), pytest.raises(DataPlaneClosed, match="earlier get did not end in time"):
                store.put(CHUNKS, timeout_s=1)
        assert not store.health().is_alive


def test_a_killed_holder_loses_its_rows_and_says_so() -> None:
    with open_store(timeout_s=6) as store:
        handles = store.put(CHUNKS, timeout_s=6)
        assert handles is not None
        kill(store.process_ids["mooncake_client"])
        wait_until(lambda: not store.health().is_alive)
        with within(10), pytest.raises(PayloadLost, match="2 of 2 chunks are lost.*its holder at .*here:1.aaaaaa"):
            store.get(IDS, timeout_s=6, handles=handles)
        with within(10), pytest.raises(DataPlaneClosed, match="has lost its holder"):
            store.put({chunk("run-a", 9): (memoryview(b"x"),)}, timeout_s=6)


def test_a_holder_whose_socket_goes_a_moment_after_its_transfer_failed_is_named() -> None:
    with open_store(timeout_s=6) as store:
        late = threading.Timer(0.3, kill, [store.process_ids["mooncake_client"]])
        late.start()
        assert [name.partition(" at ")[0] for name in store._dead_servers([TRANSFER_FAILED])] == ["its holder"]
        late.join(6)


def test_a_holder_that_does_not_answer_ends_calls_by_their_deadline_and_close_is_safe() -> None:
    with open_store(timeout_s=20) as store:
        handles = store.put(CHUNKS, timeout_s=6)
        assert handles is not None
        with stopped(store.process_ids["mooncake_client"]), within(6), pytest.raises(DataPlaneTimeout, match="get"):
            store.get(IDS, timeout_s=1, handles=handles)


def test_close_does_not_tear_a_client_down_under_a_running_call() -> None:
    with open_store(timeout_s=20) as store:
        handles = store.put(CHUNKS, timeout_s=6)
        assert handles is not None
        caught: list[BaseException] = []

        def read() -> None:
            try:
                store.get(IDS, timeout_s=15, handles=handles)
            except DataPlaneError as error:
                caught.append(error)

        pid = store.process_ids["mooncake_client"]
        stop(pid)
        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.3)
        with within(30):
            store.close()
        thread.join(20)
        assert caught and not is_alive(pid)


def test_after_close_every_call_is_refused_and_nothing_is_left() -> None:
    before = set(Path(tempfile.gettempdir()).glob("nemo_rl-mooncake*"))
    with open_store() as store:
        pids = store.process_ids.values()
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        store.close()
        store.close()
        for call in (
            lambda: store.put(CHUNKS, timeout_s=5),
            lambda: store.get([IDS[0]], timeout_s=5, handles={IDS[0]: [5, ""]}),
            lambda: store.drop(IDS, timeout_s=5),
        ):
            with pytest.raises(DataPlaneClosed, match="closed"):
                call()
        assert not any(is_alive(pid) for pid in pids)
    assert set(Path(tempfile.gettempdir()).glob("nemo_rl-mooncake*")) <= before
    assert not [thread for thread in threading.enumerate() if "mooncake" in thread.name]


def test_a_put_into_a_full_segment_waits_for_space_and_then_fails_whole() -> None:
    piece = memoryview(bytes(4 << 20))
    with open_store() as store:
        held = [chunk("run-a", i) for i in range(3)]
        store.put({name: (piece,) for name in held}, timeout_s=10)
        late = {chunk("run-a", 10): (piece,), chunk("run-a", 11): (piece,)}
        # A transfer into the space that is left can take more than a second on a busy machine.
        with within(15), pytest.raises(CapacityExceeded, match="data_plane.mooncake.segment_bytes"):
            store.put(late, timeout_s=4)
        with pytest.raises(KeysNotFound, match="2 of 2"):
            store.get(list(late), timeout_s=5, handles={name: [4 << 20, ""] for name in late})
        timer = threading.Timer(0.5, lambda: store.drop(held, timeout_s=5))
        timer.start()
        assert set(store.put(late, timeout_s=10) or {}) == set(late)
        timer.join()
        with within(9), pytest.raises(CapacityExceeded):
            store.put({chunk("run-a", 20): (memoryview(bytes(SEGMENT_BYTES + 1)),)}, timeout_s=30)


def test_two_runs_on_one_named_master_do_not_mix_and_leave_it_running() -> None:
    servers = start_servers(small_config().mooncake, has_holder=False)
    try:
        named = servers.address.master
        same = chunk("same", 0)
        with open_store("run-a", master_address=named) as first, open_store("run-b", master_address=named) as second:
            assert list(first.process_ids) == ["mooncake_client"]
            handles = {}
            for store, payload in ((first, b"first"), (second, b"other")):
                handles |= store.put({same: (memoryview(payload),)}, timeout_s=10) or {}
            assert content(first.get([same], timeout_s=10, handles=handles)[0]) == b"first"
            assert content(second.get([same], timeout_s=10, handles=handles)[0]) == b"other"
            second.drop([same], timeout_s=10)
            assert content(first.get([same], timeout_s=10, handles=handles)[0]) == b"first"
        assert is_alive(servers.process_ids["mooncake_master"])
    finally:
        servers.stop()
    with pytest.raises(ResourceError, match="nothing listens at"):
        start_store(small_config(master_address=named), run_id="run-c")


def produce(pipe: Connection, address: DataPlaneAddress) -> None:
    """Put two rows in a process that then waits."""
    client = attach_data_plane(address)
    client.kv_batch_put(["u0_g0", "u0_g1"], "train", {"input_ids": ids_column([3, 5])})
    pipe.send("put")
    pipe.recv()


def own(pipe: Connection) -> None:
    """Start a store in a process that then waits."""
    store = start_store(small_config(), run_id="run-a")
    pipe.send([*store.process_ids.values(), store._servers._processes[0].folder])
    pipe.recv()


@pytest.mark.parametrize("owner", ["holder", "producer"])
def test_rows_survive_their_producer_when_a_holder_has_them(owner: str) -> None:
    config = small_config(segment_owner=owner)
    client = build_data_plane_client(config.model_copy(update={"ledger_host": "socket"}), run_id="run-a")
    try:
        client.register_partition("train", ["input_ids"], 8, [])
        child, pipe = start_forked(produce, client.address)
        keys = keys_of(1, 2)
        try:
            assert pipe.recv() == "put"
            assert client.kv_batch_get(keys, "train", ["input_ids"])["input_ids"].shape[0] == 2
        finally:
            end(child)
            pipe.close()
        if owner == "holder":
            assert client.kv_batch_get(keys, "train", ["input_ids"])["input_ids"].shape[0] == 2
        else:
            with within(15), pytest.raises(PayloadLost, match=f"u0_g0.*producer at.*:{child.pid}[.]"):
                client.kv_batch_get(keys, "train", ["input_ids"])
            client.kv_batch_put(["u1_g0"], "train", {"input_ids": ids_column([2])})
            assert client.kv_batch_get(["u1_g0"], "train", ["input_ids"])["input_ids"].shape[0] == 1
    finally:
        client.close()


def end(child: BaseProcess) -> None:
    child.kill()
    child.join()


def test_a_killed_owner_leaves_no_process_and_no_folder() -> None:
    child, pipe = start_forked(own)
    try:
        *pids, folder = pipe.recv()
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    finally:
        end(child)
        pipe.close()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    wait_until(lambda: not Path(folder).exists())
