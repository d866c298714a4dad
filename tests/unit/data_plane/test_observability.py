"""What a client counts: calls, bytes, milliseconds and errors, per operation and stage."""

from __future__ import annotations

import logging
import math
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config.data_plane import DataPlaneConfig, ObservabilityConfig
from nemo_rl.data_plane.client.meter import CountReporter, DataPlaneEvent
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals, sum_totals
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.ledger.host import read_reply
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import ConfigError, DataPlaneClosed, DataPlaneError, DataPlaneTimeout, KeysNotFound
from tests.helpers.data_planes import Plane, ids_column, keys_of, open_plane, wait_until


@pytest.fixture
def plane() -> Iterator[Plane]:
    with open_plane("noop") as plane:
        yield plane
        plane.settle()


def test_calls_bytes_errors_and_time_are_counted_per_operation_and_stage(plane: Plane) -> None:
    partition, client = plane.partition(["input_ids", "sample_mask"]), plane.owner
    with client.stage("rollout"):
        columns = {"input_ids": ids_column([3] * 4), "sample_mask": torch.ones(4)}
        meta = client.kv_batch_put(keys_of(1), partition, columns)
        client.put_async(keys_of(1), partition, {"sample_mask": torch.ones(4)}).result(timeout=10)
    with client.stage("train"):
        client.get_data(meta.with_fields([], versions={"sample_mask": 2}), ["input_ids"])
        with pytest.raises(KeysNotFound):
            client.kv_batch_get(["nobody"], partition, ["input_ids"])
    client.kv_clear(None, partition)
    snapshot = client.snapshot(reset=True)
    put = snapshot.operations["kv_batch_put"]
    assert (put.count, put.errors, put.payload_bytes) == (1, 0, 4 * 3 * 4 + 4 * 4)
    assert put.ms > 0 and 0 < put.meta_bytes < 250
    assert snapshot.stages["rollout"]["put_async"].payload_bytes == 16
    assert snapshot.stages["train"]["get_data"].payload_bytes == 48
    failed = snapshot.stages["train"]["kv_batch_get"]
    assert replace(failed, ms=0, buckets={}) == OperationCount(count=1, errors=1, error_kinds={"KeysNotFound": 1})
    assert list(snapshot.stages[""]) == ["register_partition", "kv_clear"]
    assert snapshot.payload_bytes == 64 + 16 + 48
    assert snapshot.field_bytes == {"input_ids": 48 + 48, "sample_mask": 16 + 16}
    assert client.snapshot().operations == {}


def test_an_event_of_a_clear_says_how_many_rows_went(plane: Plane) -> None:
    partition, client, events = plane.partition(), plane.owner, []
    client._meter._callback = events.append
    client.kv_batch_put(keys_of(1), partition, {"sample_mask": torch.ones(4)})
    assert client.kv_clear(["u0_g0", "nobody"], partition) == 1
    assert client.kv_clear(None, partition) == 3 and client.drop_partition(partition) == 0
    plane.partitions.remove(partition)
    assert [(e.op, e.rows) for e in events] == [
        ("kv_batch_put", 4),
        ("kv_clear", 1),
        ("kv_clear", 3),
        ("drop_partition", 0),
    ]


def test_snapshots_of_processes_add_up(plane: Plane) -> None:
    partition, client = plane.partition(), plane.owner
    client.kv_batch_put(keys_of(1), partition, {"sample_mask": torch.ones(4)})
    one = client.snapshot()
    both = sum_totals([one, one])
    assert both.payload_bytes == 2 * one.payload_bytes > 0 and both.meta_bytes == 2 * one.meta_bytes > 0
    assert both.operations["kv_batch_put"].count == 2
    assert sum_totals([one]) == one and pickle.loads(pickle.dumps(one)) == one


def test_threads_count_for_their_own_stage(plane: Plane) -> None:
    client = plane.owner

    def work(stage: str) -> None:
        for _ in range(50):
            with client.stage(stage):
                client.stats()

    threads = [threading.Thread(target=work, args=(f"s{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {s: c["stats"].count for s, c in client.snapshot().stages.items()} == {f"s{i}": 50 for i in range(4)}


def test_keys_and_tags_are_few_bytes_beside_long_rows(plane: Plane) -> None:
    """Rows of 512 tokens: keys, lengths and tags are under two percent of the columns."""
    partition, client = plane.partition(["input_ids", "generation_logprobs"]), plane.owner
    keys, ids = keys_of(32, 16, prefix="3f2504e04f8941d39a0c0305e82c3301-"), ids_column([512] * 512)
    tags = [{"std": i * 0.1, "weight_version": 1} for i in range(512)]
    client.kv_batch_put(keys, partition, {"input_ids": ids, "generation_logprobs": ids.to(torch.float32)}, tags)
    snapshot = client.snapshot()
    assert snapshot.meta_bytes < 0.02 * snapshot.payload_bytes


def test_nothing_is_counted_when_observability_is_off() -> None:
    with open_plane("noop", observability=ObservabilityConfig(enabled=False)) as plane:
        partition, client = plane.partition(), plane.owner
        client.kv_batch_put(keys_of(1), partition, {"sample_mask": torch.ones(4)})
        client.put_async(keys_of(1), partition, {"sample_mask": torch.ones(4)}).result(timeout=10)
        client.kv_batch_get(keys_of(1)[:1], partition, ["sample_mask"])
        assert client.snapshot() == Totals()
        client.kv_clear(None, partition)
        plane.settle()


def test_bytes_that_were_read_but_not_asked_for_are_counted_once(plane: Plane) -> None:
    partition, client = plane.partition(), plane.owner
    client.kv_batch_put(keys_of(1), partition, {"sample_mask": torch.ones(4)})
    client.kv_batch_get(keys_of(1)[:1], partition, ["sample_mask"])
    first = client.snapshot(reset=True)
    assert first.over_read_bytes >= 12
    client.kv_batch_get(keys_of(1), partition, ["sample_mask"])
    assert client.snapshot().over_read_bytes < first.over_read_bytes


def test_objects_count_by_their_bytes(plane: Plane) -> None:
    spec = FieldSpec(name="notes", is_object=True, family="extras", produced_by="rollout")
    partition, client = plane.partition([spec]), plane.owner
    client.kv_batch_put(["a", "b"], partition, {"notes": [{"x": "y" * 100}, None]})
    client.kv_batch_get(["a"], partition, ["notes"])
    operations = client.snapshot().operations
    assert 100 < operations["kv_batch_put"].payload_bytes < 120
    assert 100 < operations["kv_batch_get"].payload_bytes < 120


def test_every_call_is_reported_to_the_callback() -> None:
    events: list[DataPlaneEvent] = []
    vars(sys.modules[__name__])["listener"] = events.append
    with plane_with_callback(f"{__name__}:listener") as plane:
        client, partition, claimable = plane.owner, plane.partition(), plane.partition(tasks=["train"])
        events.clear()
        with client.stage("rollout"):
            client.kv_batch_put(keys_of(1), partition, {"input_ids": ids_column([3] * 4), "sample_mask": torch.ones(4)})
        with pytest.raises(KeysNotFound):
            client.kv_batch_get(["nobody"], partition, ["input_ids"])
        with pytest.raises(DataPlaneTimeout):
            client.get_meta(claimable, "train", ["input_ids"], 1, consumer_id="c", timeout_s=0.1)
        put, get, claim = events
        plane.settle()
    assert (put.op, put.stage, put.partition, put.rows) == ("kv_batch_put", "rollout", partition, 4)
    assert put.fields == ("input_ids", "sample_mask") and put.bytes == 64 and put.meta_bytes > 0 and put.ms > 0
    assert [event.status for event in (put, get, claim)] == ["ok", "error", "timeout"]
    assert (get.stage, get.rows, get.bytes, claim.op) == ("", 1, 0, "get_meta")


def test_print_event_logs_a_line_per_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nemo_rl")
    with plane_with_callback("print_event") as plane:
        client, partition = plane.owner, plane.partition()
        with client.stage("rollout"):
            client.kv_batch_put(keys_of(1), partition, {"sample_mask": torch.ones(4)})
        with pytest.raises(KeysNotFound):
            client.kv_batch_get(["nobody"], partition, ["input_ids"])
        plane.settle()
    put = next(line for line in caplog.messages if "kv_batch_put" in line)
    assert put.startswith("data plane: kv_batch_put ok in ")
    assert put.endswith(f", stage rollout, partition {partition}: 4 rows, 16 bytes of sample_mask")
    assert any("kv_batch_get error in" in line and ", stage none," in line for line in caplog.messages)


def test_a_callback_that_raises_is_reported_once_and_breaks_nothing(caplog) -> None:
    vars(sys.modules[__name__])["broken"] = lambda event: 1 / 0
    with plane_with_callback(f"{__name__}:broken") as plane:
        for _ in range(3):
            assert plane.owner.stats()["live_rows"] == 0
        assert plane.owner.snapshot().operations["stats"].count == 3
    assert caplog.text.count("ZeroDivisionError") == 1


@pytest.mark.parametrize("name", ["nowhere.at_all:f", "json:nothing", "json", "json:decoder", ":f"])
def test_a_callback_that_does_not_exist_is_a_config_error_that_leaves_nothing(name: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="data_plane.observability.callback: expected"):
        build_data_plane_client(with_callback(name), run_id="callback")
    assert set(threading.enumerate()) == before
    build_data_plane_client(DataPlaneConfig(impl="noop"), run_id="callback").close()


def plane_with_callback(name: str) -> AbstractContextManager[Plane]:
    return open_plane("noop", observability=ObservabilityConfig(callback=name))


def with_callback(name: str) -> DataPlaneConfig:
    return DataPlaneConfig(impl="noop", observability=ObservabilityConfig(callback=name))


@given(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=200), st.integers(1, 5))
def test_percentiles_of_merged_processes_are_those_of_all_calls(durations: list[float], processes: int) -> None:
    counts = [OperationCount() for _ in range(processes)]
    for i, ms in enumerate(durations):
        counts[i % processes].add(OperationCount.of_call(ms, error=None, payload_bytes=0, meta_bytes=0))
    merged = OperationCount()
    for count in counts:
        merged.add(count)
    for share in (0.5, 0.99):
        exact = sorted(durations)[math.ceil(share * len(durations)) - 1]
        assert merged.percentile_ms(share) == pytest.approx(exact, rel=0.05)
    assert OperationCount().percentile_ms(0.5) == 0.0


def test_many_calls_are_reported_together_and_an_idle_client_has_no_thread() -> None:
    reports: list[bool] = []
    reporter = CountReporter(reports.append, period_s=0.2)
    started = time.monotonic()
    for _ in range(10_000):
        reporter.note()
    wait_until(lambda: reporter._thread is None)
    assert 1 <= len(reports) <= (time.monotonic() - started) / 0.2 and not any(reports)
    before = len(reports)
    reporter.note()
    reporter.close()
    assert reports[-1] is True and len(reports) - before <= 2, "the last one goes out at once"
    reporter.note()
    assert not reporter._thread.is_alive()


@pytest.mark.parametrize("error", [DataPlaneClosed("gone"), DataPlaneTimeout("slow")])
def test_a_report_that_fails_is_made_up_for_by_the_next(error: DataPlaneError) -> None:
    reports: list[bool] = []

    def report(is_last: bool) -> None:
        reports.append(is_last)
        if len(reports) == 1:
            raise error

    reporter = CountReporter(report, period_s=0.05)
    reporter.note()
    wait_until(lambda: len(reports) == 1)
    reporter.note()
    wait_until(lambda: len(reports) >= 2)
    reporter.close()
    assert reports[-1] is True


def test_a_ledger_refuses_counts_that_are_none_or_of_another_run(plane: Plane) -> None:
    host = plane.owner._link._host
    for args in ({"who": "x"}, {"who": "x", "totals": 3, "is_last": False}):
        with pytest.raises(DataPlaneError, match="could not serve 'report'"):
            host.call("report", args, timeout_s=5)
    for op in ("report", "watch"):
        with pytest.raises(DataPlaneClosed, match="the call is of run 'old'"):
            read_reply(host._service.handle({"run": "old", "op": op, "args": {}}, timeout_s=5))
    assert "x" not in host.call("watch", {}, timeout_s=5)["clients"]
