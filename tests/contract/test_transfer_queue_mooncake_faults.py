"""TransferQueue over Mooncake: dead servers and full segments end calls with an error; failed puts leave nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transfer_queue as tq

from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore
from nemo_rl.data_plane.factory import start_store
from nemo_rl.errors import CapacityExceeded, DataPlaneClosed, KeysNotFound
from tests.helpers import mooncake
from tests.helpers.data_planes import wait_until
from tests.helpers.mooncake import SEGMENT_BYTES, chunk, is_alive, kill, under_transfer_queue, within

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(bool(mooncake.why_not()), reason=mooncake.why_not() or "Mooncake runs here"),
    pytest.mark.usefixtures("cluster"),
]

IDS = [chunk("run-q", i) for i in range(4)]
PIECE = memoryview(bytes(1 << 20))


@pytest.fixture
def store() -> Iterator[TransferQueueStore]:
    store = start_store(under_transfer_queue(timeout_s=12), run_id="run-q")
    assert isinstance(store, TransferQueueStore)
    yield store
    with within(60):
        store.close()


def servers(store: TransferQueueStore) -> dict[str, int]:
    assert store._session.servers is not None
    return store._session.servers.process_ids


def test_a_put_that_does_not_fit_fails_whole_and_its_keys_can_be_used_for_others(store: TransferQueueStore) -> None:
    too_many = {chunk("run-q", 100 + i): (PIECE,) for i in range(SEGMENT_BYTES // PIECE.nbytes + 4)}
    with within(60), pytest.raises(CapacityExceeded, match="data_plane.mooncake.segment_bytes"):
        store.put(too_many, timeout_s=3)
    assert not any(tq.kv_list().values())
    fits = {chunk("run-q", 200 + i): (PIECE,) for i in range(SEGMENT_BYTES // PIECE.nbytes - 2)}
    store.put(fits, timeout_s=12)
    assert len(store.get(list(fits), timeout_s=12, handles={})) == len(fits)
    store.drop(list(fits), timeout_s=12)
    with pytest.raises(KeysNotFound):
        store.get(list(fits), timeout_s=12, handles={})


@pytest.mark.parametrize("victim", ["mooncake_master", "mooncake_client"])
def test_a_killed_server_ends_calls_with_an_error_that_names_it(store: TransferQueueStore, victim: str) -> None:
    store.put({name: (PIECE,) for name in IDS}, timeout_s=12)
    pid = servers(store)[victim]
    kill(pid)
    wait_until(lambda: not is_alive(pid) and not store.health().is_alive)
    with within(36), pytest.raises(DataPlaneClosed, match="Mooncake's"):
        store.get(IDS, timeout_s=12, handles={})


def test_a_clear_without_a_master_does_not_claim_success_and_close_ends_all_processes(
    store: TransferQueueStore,
) -> None:
    store.put({name: (PIECE,) for name in IDS}, timeout_s=12)
    pids = servers(store)
    kill(pids["mooncake_master"])
    wait_until(lambda: not store.health().is_alive)
    with within(12), pytest.raises(DataPlaneClosed, match="has lost Mooncake's master"):
        store.drop(IDS, timeout_s=12)
    with within(60):
        store.close()
    assert not any(is_alive(pid) for pid in pids.values())
