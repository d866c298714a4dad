"""What one client does by itself: limits, deadlines, over-read, late replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore
from nemo_rl.data_plane.address import DataPlaneAddress, Handles
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client, open_step
from nemo_rl.data_plane.interfaces import KVBatchMeta, Parts
from nemo_rl.data_plane.ledger.host import InProcessHost, LedgerService, build_ledger
from nemo_rl.errors import (
    ConfigError,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    SchemaMismatch,
)
from tests.helpers.corrupt_payloads import BlockStore
from tests.helpers.data_planes import NOOP, ids_column, keys_of, open_plane


class FaultyStore(NoopStore):
    """A store that loses or delays on request."""

    fault: Exception | None = None

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> None:
        super().put(chunks, timeout_s=timeout_s)
        self._fail()

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        self._fail()
        return super().get(chunk_ids, timeout_s=timeout_s, handles=handles)

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault


def faulty_client(config: DataPlaneConfig = NOOP) -> tuple[LedgerClient, FaultyStore, LedgerService]:
    service, store = LedgerService(build_ledger(config, run_id="r", validate=True)), FaultyStore()
    host = InProcessHost(service, is_owner=True)
    address = DataPlaneAddress(run_id="r", config=config, ledger=host.address, process_id=1)
    client = LedgerClient(host=host, store=store, address=address)
    client.register_partition("p", ["input_ids", "sample_mask"], 99, [])
    return client, store, service


class OverwrittenStore(NoopStore):
    """Its memory is overwritten under the first readers, as shared memory is when a chunk is freed and reused."""

    num_torn = 2

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        payloads = super().get(chunk_ids, timeout_s=timeout_s, handles=handles)
        if not self.num_torn:
            return payloads
        whole = b"".join(bytes(part) for part in payloads[0])
        # A chunk of another size, and one whose bytes are not even a header.
        torn = whole + b"more" if self.num_torn == 2 else whole[:8] + b"\xc1" * (len(whole) - 8)
        return [[memoryview(torn)], *payloads[1:]]

    def confirm(self, chunk_ids: Sequence[str]) -> None:
        if self.num_torn:
            self.num_torn -= 1
            raise KeysNotFound("freed while it was read")


def test_a_field_added_to_rows_keeps_their_metas_however_many_keys_were_cleared(monkeypatch) -> None:
    """More cleared keys than the ledger remembers, while a row lives on."""
    monkeypatch.setattr("nemo_rl.data_plane.ledger.state.MAX_REMEMBERED_KEYS", 1)
    with open_plane("noop") as plane:
        client = plane.owner
        client.register_partition("p", ["input_ids", "token_mask", "sample_mask"], 9, [])
        meta = client.kv_batch_put(["a"], "p", {"input_ids": ids_column([2])})
        for key in ("b", "c", "b"):
            client.kv_batch_put([key], "p", {"input_ids": ids_column([2])})
            client.kv_clear([key], "p")
        added = client.kv_batch_put(["a"], "p", {"token_mask": ids_column([2]).bool()})
        assert added.versions == meta.versions
        assert client.get_data(meta, ["input_ids", "token_mask"]).batch_size[0] == 1


def test_a_chunk_that_is_overwritten_while_it_is_read_is_read_again() -> None:
    store = OverwrittenStore()
    client = client_over(store)
    client.kv_batch_put(["a"], "p", {"sample_mask": torch.ones(1)})
    assert client.kv_batch_get(["a"], "p", ["sample_mask"])["sample_mask"].tolist() == [1.0]
    assert store.num_torn == 0


def test_a_chunk_that_is_damaged_but_not_overwritten_is_an_error() -> None:
    store = OverwrittenStore()
    store.confirm = lambda chunk_ids: None  # type: ignore[method-assign]
    client = client_over(store)
    client.kv_batch_put(["a"], "p", {"sample_mask": torch.ones(1)})
    with pytest.raises(SchemaMismatch, match="were read back"):
        client.kv_batch_get(["a"], "p", ["sample_mask"])


def client_over(store: NoopStore) -> LedgerClient:
    host = InProcessHost(LedgerService(build_ledger(NOOP, run_id="r")), is_owner=True)
    address = DataPlaneAddress(run_id="r", config=NOOP, ledger=host.address, process_id=1)
    client = LedgerClient(host=host, store=store, address=address)
    client.register_partition("p", ["input_ids", "sample_mask"], 99, [])
    return client


def test_blocks_leave_the_store_with_their_chunk() -> None:
    store = BlockStore()
    client = client_over(store)
    keys = [f"k{i}" for i in range(20)]
    client.kv_batch_put(keys, "p", {"input_ids": ids_column([10] * 20)})
    assert client.stats()["live_chunks"] == 1 and len(store._chunks) == 10, "two rows of 40 bytes in each block"
    client.kv_batch_get(keys[5:7], "p", ["input_ids"])
    assert client.counters["get_bytes"] == 160, "rows 5 and 6 lie in blocks 2 and 3"
    client.kv_clear(keys[1:], "p")
    assert client.kv_batch_get(keys[:1], "p", ["input_ids"])["input_ids"].values().tolist() == list(range(10))
    client.kv_clear(keys[:1], "p")
    assert not store._chunks
    client.close()


def test_rows_stay_invisible_when_the_store_fails() -> None:
    client, store, _ = faulty_client()
    store.fault = DataPlaneError("disk on fire")
    with pytest.raises(DataPlaneError, match="disk on fire"):
        client.kv_batch_put(["a"], "p", {"sample_mask": torch.ones(1)})
    store.fault = None
    assert client.kv_list("p") == {}
    client.close()


def test_a_deadline_error_names_what_where_who_and_for_how_long() -> None:
    client, store, service = faulty_client(NOOP.model_copy(update={"timeout_s": 0.2}))
    client.kv_batch_put(["a"], "p", {"sample_mask": torch.ones(1)})
    store.fault = DataPlaneTimeout("the store slept")
    with pytest.raises(DataPlaneTimeout) as caught:
        client.kv_batch_get(["a"], "p", ["sample_mask"])
    for part in ("partition 'p'", "1 rows (a)", "sample_mask", "the store slept", "age 0.", "run 'r' in process 1"):
        assert part in str(caught.value)
    with service._lock, pytest.raises(DataPlaneTimeout, match="ledger was busy"):
        client.stats()
    client.close()


def test_a_store_that_lost_a_chunk_is_an_error_and_not_a_loop() -> None:
    client, store, _ = faulty_client()
    client.kv_batch_put(["a"], "p", {"sample_mask": torch.ones(1)})
    store._chunks.clear()
    with pytest.raises(DataPlaneError, match="names chunks that the store lacks"):
        client.kv_batch_get(["a"], "p", ["sample_mask"])
    client.close()


def test_bytes_read_but_not_asked_for_are_counted() -> None:
    client, _, _ = faulty_client()
    client.kv_batch_put(keys_of(4), "p", {"input_ids": ids_column([10] * 16)})
    client.kv_batch_get(["u0_g0"], "p", ["input_ids"])
    counters = client.counters
    assert counters["get_bytes"] == counters["put_bytes"] > 640
    assert counters["over_read_bytes"] == counters["get_bytes"] - 40
    client.close()


def test_only_one_owner_per_run_and_process() -> None:
    with open_plane("noop") as plane:
        with pytest.raises(DataPlaneError, match="already"):
            build_data_plane_client(NOOP, run_id=plane.owner.address.run_id)
        with pytest.raises(DataPlaneError, match="address of that run's owner"):
            build_data_plane_client(NOOP, run_id="other", role="attach", address=plane.owner.address)
    with pytest.raises(DataPlaneClosed):
        attach_data_plane(plane.owner.address)


def test_a_ledger_in_this_process_cannot_serve_others() -> None:
    with pytest.raises(ConfigError, match="in_process"):
        build_data_plane_client(DataPlaneConfig(impl="transfer_queue", ledger_host="in_process"), run_id="r")


def test_data_plane_disabled_means_noop() -> None:
    client = build_data_plane_client(DataPlaneConfig(enabled=False), run_id="disabled")
    assert client.stats()["live_rows"] == 0
    client.close()


def test_rows_that_a_late_stage_leaves_in_a_step_are_an_error() -> None:
    client, _, _ = faulty_client()
    clear = client.kv_clear
    client.kv_clear = lambda keys, partition, reason: clear(["a"], partition)  # type: ignore[method-assign]
    with (
        pytest.raises(DataPlaneError, match=r"1 rows were not freed after the step.* b \(put by .*:\d+\.\w{6}\)"),
        open_step(client, "p", ["a", "b"]),
    ):
        client.kv_batch_put(["a", "b"], "p", {"sample_mask": torch.ones(2)})
    client.close()


def test_closing_waits_for_background_puts_and_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    client, _, _ = faulty_client()
    client.put_async(["a"], "p", {"sample_mask": torch.ones(1)}).result(timeout=10)
    client.register_partition("q", ["sample_mask"], 9, ["train"])
    client.kv_batch_put(["a"], "q", {"sample_mask": torch.ones(1)})
    assert len(client.get_meta("q", "train", ["sample_mask"], 1, consumer_id="c")) == 1
    assert len(set(threading.enumerate()) - before) >= 2
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 5 and set(threading.enumerate()) <= before


def test_a_string_is_no_list_of_keys_or_names() -> None:
    client = client_over(NoopStore())
    calls = [
        lambda: client.kv_batch_put("ab", "p", {"sample_mask": torch.ones(2)}),
        lambda: client.kv_batch_get("ab", "p", ["sample_mask"]),
        lambda: client.kv_batch_get(["a"], "p", "sample_mask"),
        lambda: client.kv_clear("ab", "p"),
        lambda: client.get_meta("p", "train", "sample_mask", 1, consumer_id="c", blocking=False),
        lambda: client.check_consumption_status("p", "train"),
        lambda: client.register_partition("q", "input_ids", 9, []),
        lambda: client.register_partition("q", ["input_ids"], 9, "train"),
        lambda: KVBatchMeta(partition_id="p", keys="ab"),
        lambda: KVBatchMeta(partition_id="p", keys=("a",), fields="ab"),
        lambda: KVBatchMeta(partition_id="p", keys=("a",)).with_fields("ab"),
        lambda: KVBatchMeta(partition_id="p", keys=("a", "b")).with_tags({"x": "ab"}),
    ]
    for call in calls:
        with pytest.raises(SchemaMismatch, match="got (the string )?'|a string"):
            call()
    client.close()
