"""Puts that do not fit: they wait without holding bytes, and are refused at their deadline or when waiting is vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig, StorageCapacityConfig
from nemo_rl.data_plane.adapters.noop import NoopStore, SharedNoopStore
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.ledger.host import InProcessHost, LedgerService, build_ledger
from nemo_rl.errors import CapacityExceeded, DataPlaneError
from tests.helpers.data_planes import ids_column, wait_until

ROW_BYTES = 400
LIMIT_BYTES = 4 * ROW_BYTES + 400
"""Four rows of 100 tokens and a header fit, six do not."""


class FaultyStore(NoopStore):
    """Fails on request."""

    fault: Exception | None = None

    def put(self, chunks, *, timeout_s: float) -> None:
        if self.fault is not None:
            raise self.fault
        super().put(chunks, timeout_s=timeout_s)


@dataclass
class Bench:
    """A ledger with limits and clients of several patience."""

    capacity: StorageCapacityConfig
    lease_s: float = 30.0
    now: float | None = None
    """Time of the ledger when the test moves it."""

    def __post_init__(self) -> None:
        self.config = DataPlaneConfig(
            impl="noop", timeout_s=20.0, storage_capacity=self.capacity, lease_s=self.lease_s, chunk_bytes=1 << 20
        )
        ledger = build_ledger(self.config, run_id="r", validate=True)
        self.service = LedgerService(ledger, clock=lambda: time.monotonic() if self.now is None else self.now)
        self.store, self.clients = FaultyStore(), []
        self.client().register_partition("p", ["input_ids", "sample_mask"], 50, [])

    def client(self, timeout_s: float = 20.0) -> LedgerClient:
        host = InProcessHost(self.service, is_owner=False)
        config = self.config.model_copy(update={"timeout_s": timeout_s})
        address = DataPlaneAddress(run_id="r", config=config, ledger=host.address, process_id=0)
        self.clients.append(LedgerClient(host=host, store=SharedNoopStore(self.store), address=address))
        return self.clients[-1]

    def put(self, client: LedgerClient, *keys: str) -> None:
        client.kv_batch_put(keys, "p", {"input_ids": ids_column([100] * len(keys))})

    def stats(self) -> dict:
        return self.clients[0].stats()


@pytest.fixture
def make_bench() -> Iterator[object]:
    benches: list[Bench] = []

    def make(*, rows: int = 1000, limit_bytes: int | None = None, **options: object) -> Bench:
        benches.append(Bench(StorageCapacityConfig(rows=rows, bytes=limit_bytes), **options))
        return benches[-1]

    yield make
    for bench in benches:
        for client in bench.clients:
            client.close()


def test_cleared_rows_give_their_room_back_before_their_chunk_goes(make_bench) -> None:
    bench = make_bench(limit_bytes=LIMIT_BYTES)
    bench.put(bench.clients[0], "a", "b", "c", "d")
    full = bench.stats()
    bench.clients[0].kv_clear(["a", "b", "c"], "p")
    stats = bench.stats()
    assert full["live_bytes"] - stats["live_bytes"] == 3 * ROW_BYTES
    assert stats["stored_bytes"] == full["live_bytes"] and stats["partitions"]["p"]["fields"] == {"input_ids": 400}
    bench.put(bench.client(timeout_s=1.0), "e", "f", "g")
    assert bench.stats()["blocked_put_s"] == 0.0


@pytest.mark.parametrize("limit", [{"rows": 5}, {"limit_bytes": LIMIT_BYTES}])
def test_a_put_waits_for_room_and_goes_on_when_rows_are_cleared(make_bench, limit: dict) -> None:
    bench = make_bench(**limit)
    first, second = bench.client(), bench.client()
    bench.put(first, "a", "b", "c")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bench.put, second, "d", "e", "f")
        time.sleep(0.3)
        assert not waiting.done() and list(first.kv_list("p")) == ["a", "b", "c"]
        if "limit_bytes" in limit:
            assert len(bench.store._chunks) == 1, "a waiting put holds bytes in the store"
        first.kv_clear(["a"], "p")  # its chunk has other rows: bytes stay
        first.kv_clear(["b", "c"], "p")
        waiting.result(timeout=10)
    assert list(first.kv_list("p")) == ["d", "e", "f"]
    stats = bench.stats()
    assert 0.2 < stats["blocked_put_s"] < 10 and stats["reserved_bytes"] == 0


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"rows": 5}, r"3 new rows with 3 live ones are more than data_plane.storage_capacity.rows = 5"),
        ({"limit_bytes": LIMIT_BYTES}, r"\d+ new bytes with \d+ live ones are more than .*bytes = 2000"),
    ],
)
def test_a_put_that_waited_in_vain_says_for_what_and_leaves_nothing(make_bench, limit: dict, text: str) -> None:
    bench = make_bench(**limit)
    first, hasty = bench.client(), bench.client(timeout_s=0.6)
    bench.put(first, "a", "b", "c")
    chunks, started = dict(bench.store._chunks), time.monotonic()
    with pytest.raises(CapacityExceeded, match=text) as caught:
        bench.put(hasty, "d", "e", "f")
    assert 0.3 < time.monotonic() - started < 1.8
    for part in ("waited 0.", "partition 'p'", "3 rows (d, e, f)", "the oldest live row is", "s old, in partition 'p'"):
        assert part in str(caught.value)
    assert list(first.kv_list("p")) == ["a", "b", "c"] and bench.store._chunks == chunks
    stats = bench.stats()
    assert stats["reserved_bytes"] == 0 and stats["blocked_put_s"] > 0.3


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"rows": 2}, "3 rows in one put are more than data_plane.storage_capacity.rows = 2"),
        ({"limit_bytes": 900}, "bytes in one put are more than data_plane.storage_capacity.bytes = 900"),
    ],
)
def test_a_put_that_can_never_fit_is_refused_at_once(make_bench, limit: dict, text: str) -> None:
    bench = make_bench(**limit)
    started = time.monotonic()
    with pytest.raises(CapacityExceeded, match=f"can never fit: .*{text}"):
        bench.put(bench.client(), "a", "b", "c")
    assert time.monotonic() - started < 5 and not bench.store._chunks


def test_many_waiting_puts_all_arrive_and_the_limit_holds(make_bench) -> None:
    """Six writers of 20 puts each, room for two puts, one reader that clears: no row is lost, none is there twice."""
    bench = make_bench(limit_bytes=LIMIT_BYTES)
    reader, seen = bench.client(), []

    def write(number: int) -> None:
        client = bench.client()
        for i in range(20):
            bench.put(client, f"{number}-{i}a", f"{number}-{i}b")

    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(write, number) for number in range(6)]
        give_up = time.monotonic() + 60
        while not all(w.done() for w in writers) or reader.kv_list("p"):
            keys = list(reader.kv_list("p"))
            seen += keys
            reader.kv_clear(keys, "p")
            assert time.monotonic() < give_up
        for writer in writers:
            writer.result()
    assert sorted(seen) == sorted(f"{n}-{i}{x}" for n in range(6) for i in range(20) for x in "ab")
    assert not bench.store._chunks and bench.stats()["peak_bytes"] <= LIMIT_BYTES


def test_reserved_capacity_is_given_back_when_the_store_fails(make_bench) -> None:
    bench = make_bench(limit_bytes=LIMIT_BYTES)
    client = bench.client()
    bench.store.fault = DataPlaneError("disk on fire")
    with pytest.raises(DataPlaneError, match="disk on fire"):
        bench.put(client, "a")
    assert bench.stats()["reserved_bytes"] == 0
    bench.store.fault = None
    bench.put(client, "a", "b", "c", "d")


def test_the_reservation_of_a_writer_that_died_expires(make_bench) -> None:
    bench = make_bench(limit_bytes=LIMIT_BYTES, now=0.0)
    host = InProcessHost(bench.service, is_owner=False)
    args = {"partition": "p", "keys": ["x"], "nbytes": LIMIT_BYTES - 10}
    assert "reservation" in host.call("reserve", args, timeout_s=1)
    assert "reserved for other puts" in host.call("reserve", args, timeout_s=1)["blocked"]
    assert bench.stats()["reserved_bytes"] == LIMIT_BYTES - 10
    bench.now = 31.0
    assert bench.stats()["reserved_bytes"] == 0
    bench.put(bench.client(), "a", "b", "c", "d")


def test_a_commit_whose_reservation_expired_has_to_wait_like_others(make_bench) -> None:
    """A put that takes longer than the lease may find its room taken: it waits and is not over the limit."""
    bench = make_bench(limit_bytes=LIMIT_BYTES, now=0.0)
    slow, quick = bench.client(timeout_s=1.0), bench.client()
    put, gate = bench.store.put, threading.Event()

    def slow_put(chunks, *, timeout_s: float) -> None:
        gate.wait(10)
        put(chunks, timeout_s=timeout_s)

    bench.store.put = slow_put  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(bench.put, slow, "a", "b", "c")
        wait_until(lambda: bench.stats()["reserved_bytes"] > 0)
        bench.store.put = put  # type: ignore[method-assign]
        bench.now = 31.0
        bench.put(quick, "d", "e", "f")
        gate.set()
        with pytest.raises(CapacityExceeded, match="waited"):
            late.result(timeout=10)
    assert list(quick.kv_list("p")) == ["d", "e", "f"] and len(bench.store._chunks) == 1


def test_tags_and_rewrites_of_live_rows_need_no_new_rows(make_bench) -> None:
    bench = make_bench(rows=3)
    client = bench.client(timeout_s=2.0)
    bench.put(client, "a", "b", "c")
    client.kv_batch_put(["a", "b", "c"], "p", {"sample_mask": torch.ones(3)}, [{"x": 1}] * 3)
    assert client.kv_list("p") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1}}
