"""The metrics endpoint: what Prometheus reads of a whole run, when it answers, and the dashboard that draws it."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from nemo_rl.config.data_plane import DataPlaneConfig, ObservabilityConfig, StorageCapacityConfig
from nemo_rl.data_plane.address import read_attach_file
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.metrics_endpoint import METRICS, PREFIX, MetricsEndpoint, check_metrics_port
from nemo_rl.errors import DataPlaneClosed, KeysNotFound, ResourceError
from tests.helpers.data_planes import ids_column, keys_of, wait_until

BOARD = Path(__file__).parents[3] / "docs" / "grafana" / "data_plane.json"
ANY = ObservabilityConfig(metrics_port=0)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DataPlaneClient]:
    """A run whose clients reach the ledger by its socket, as those of other processes do."""
    before = set(threading.enumerate())
    config = DataPlaneConfig(impl="shm", lease_s=20.0, observability=ANY)
    owner = build_data_plane_client(config, run_id="watched", log_dir=tmp_path)
    owner.register_partition("train", ["input_ids", "sample_mask"], 99, ["train"])
    yield owner
    owner.close()
    assert set(threading.enumerate()) <= before


def text_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return reply.read().decode()


def scrape(folder: Path) -> Samples:
    """Samples by name without the prefix and by labels without those of the run."""
    found: Samples = {}
    for family in text_string_to_metric_families(text_of(read_attach_file(folder).metrics_port)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("run"), labels.pop("store")) == ("watched", "shm")
            found[sample.name.removeprefix(PREFIX), frozenset(labels.items())] = sample.value
    return found


def of(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def test_the_endpoint_tells_rows_claims_and_the_calls_of_every_client(run, tmp_path: Path) -> None:
    worker = attach_data_plane(run.address)
    with worker.stage("rollout"):
        columns = {"input_ids": ids_column([3] * 4), "sample_mask": torch.ones(4)}
        worker.kv_batch_put(keys_of(1), "train", columns)
    worker.snapshot(reset=True)  # as after each step: the counters go on
    with worker.stage("rollout"):
        worker.kv_batch_put(keys_of(1, prefix="v"), "train", columns)
    with run.stage("train"):
        meta = run.get_meta("train", "train", ["input_ids"], 3, consumer_id="c")
        run.get_data(meta)
        with pytest.raises(KeysNotFound):
            run.kv_batch_get(["nobody"], "train", ["input_ids"])
    run.release(meta.subset([0]))
    put = {"client": worker._link.label, "stage": "rollout", "operation": "kv_batch_put"}
    failed = {"client": run._link.label, "stage": "train", "operation": "kv_batch_get", "kind": "KeysNotFound"}
    wait_until(lambda: of(scrape(tmp_path), "client_calls_total", **put) == 2)
    wait_until(lambda: of(scrape(tmp_path), "client_errors_total", **failed) == 1)
    seen = scrape(tmp_path)
    stats = run.stats()
    assert of(seen, "up") == 1 and of(seen, "live_rows") == of(seen, "partition_rows", partition="train") == 8
    assert of(seen, "live_bytes") == stats["live_bytes"] and of(seen, "stored_bytes") == stats["stored_bytes"]
    assert of(seen, "field_bytes", partition="train", field="input_ids") == 96
    assert of(seen, "capacity_rows") == 1_000_000 and of(seen, "capacity_bytes") is None
    states = {s: of(seen, "task_rows", partition="train", task="train", state=s) for s in ("pending", "leased", "done")}
    assert states == {"pending": 5, "leased": 2, "done": 1}
    assert of(seen, "task_claims", partition="train", task="train") == 1
    assert of(seen, "client_rows_held", client=run._link.label) == 2
    assert of(seen, "client_rows_held", client=worker._link.label) == 0
    assert of(seen, "client_bytes_total", **put) == 2 * (48 + 16)
    assert of(seen, "moved_bytes_total", field="input_ids") == 96 + 36
    assert of(seen, "ledger_requests_total", request="commit") == 2
    assert of(seen, "ledger_errors_total", request="locate", kind="KeysNotFound") == 1
    assert 0 < of(seen, "oldest_row_age_seconds") < 600
    durations = {"stage": "rollout", "operation": "kv_batch_put"}
    assert of(seen, "call_duration_seconds_bucket", le="+Inf", **durations) == 2
    assert of(seen, "call_duration_seconds_sum", **durations) == of(seen, "client_call_seconds_total", **put) > 0
    worker.close()
    closed = scrape(tmp_path)
    assert of(closed, "client_rows_held", client=worker._link.label) is None
    assert of(closed, "client_calls_total", **put) == 2, "what a client has done stays counted after its end"


def test_puts_that_wait_are_seen_while_they_do(tmp_path: Path) -> None:
    config = DataPlaneConfig(
        impl="shm", storage_capacity=StorageCapacityConfig(rows=4, bytes=1 << 20), observability=ANY
    )
    owner = build_data_plane_client(config, run_id="watched", log_dir=tmp_path)
    try:
        owner.register_partition("train", ["sample_mask"], 99, [])
        owner.kv_batch_put(keys_of(1), "train", {"sample_mask": torch.ones(4)})
        late = owner.put_async(keys_of(1, prefix="v"), "train", {"sample_mask": torch.ones(4)})
        wait_until(lambda: of(scrape(tmp_path), "puts_waiting") == 1)
        assert of(scrape(tmp_path), "capacity_bytes") == 1 << 20
        owner.kv_clear(keys_of(1), "train")
        late.result(timeout=20)
        seen = scrape(tmp_path)
        assert of(seen, "puts_waiting") == 0 and of(seen, "blocked_put_seconds_total") > 0
    finally:
        owner.close()


def test_the_endpoint_is_on_loopback_for_the_life_of_the_owner(run, tmp_path: Path) -> None:
    port = read_attach_file(tmp_path).metrics_port
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20)
    with pytest.raises(OSError):  # the machine's other addresses
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    run.close()
    with pytest.raises(urllib.error.URLError):
        text_of(port)


def test_a_taken_port_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = DataPlaneConfig(impl="shm", observability=ObservabilityConfig(metrics_port=port))
        before = set(threading.enumerate())
        with pytest.raises(ResourceError, match=f"metrics_port: port {port} of 127.0.0.1 cannot be used"):
            build_data_plane_client(config, run_id="taken", log_dir=tmp_path)
        assert set(threading.enumerate()) == before and list(tmp_path.iterdir()) == []
        assert len(check_metrics_port(port)) == 1
    assert check_metrics_port(port) == check_metrics_port(0) == check_metrics_port(None) == []
    build_data_plane_client(config, run_id="taken").close()


class DeadLedger:
    """A ledger whose process is gone."""

    def call(self, op: str, args: dict, *, timeout_s: float, handles: object = None) -> dict:
        raise DataPlaneClosed("gone")


def test_a_ledger_that_does_not_answer_is_down() -> None:
    endpoint = MetricsEndpoint(0)
    endpoint.serve(run_id="r", store="shm", ledger=DeadLedger())
    samples = [s for family in text_string_to_metric_families(text_of(endpoint.port)) for s in family.samples]
    assert [(sample.name, sample.value) for sample in samples] == [(f"{PREFIX}up", 0)]
    endpoint.close()
    endpoint.close()


def test_nothing_is_served_unless_it_is_asked_for(tmp_path: Path) -> None:
    owner = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id="silent", log_dir=tmp_path)
    assert read_attach_file(tmp_path).metrics_port == 0
    assert not any(thread.name == "data-plane-metrics" for thread in threading.enumerate())
    owner.close()


def test_buckets_count_the_calls_up_to_their_bound() -> None:
    counts = OperationCount()
    for ms in (0.3, 1.5, 1.9, 2.1, 100.0):
        counts.add(OperationCount.of_call(ms, error=None, payload_bytes=0, meta_bytes=0))
    assert [counts.within_ms(limit) for limit in (0.25, 0.5, 1, 2, 4, 64, 128)] == [0, 1, 1, 3, 4, 4, 5]
    totals = Totals(stages={"train": {"get_data": counts}}, field_bytes={"input_ids": 7}, over_read_bytes=3)
    assert Totals.from_plain(json.loads(json.dumps(totals.to_plain()))) == totals


def test_the_dashboard_names_what_the_endpoint_serves(run, tmp_path: Path) -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text_of(read_attach_file(tmp_path).metrics_port), re.MULTILINE))
    served = {name.removeprefix(PREFIX).removesuffix("_total"): kind for name, kind in types.items()}
    assert served == {name: metric.kind for name, metric in METRICS.items()}
    names = {*types, *(f"{name}_{part}" for name, kind in types.items() if kind == "histogram" for part in ("bucket",))}
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    assert board["schemaVersion"] >= 36 and len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["type"] in ("stat", "timeseries") and panel["title"] and set(panel["gridPos"]) == set("xywh")
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            used = re.findall(rf"{PREFIX}\w+", target["expr"])
            assert used and set(used) <= names, target["expr"]
            for name, labels in re.findall(rf"{PREFIX}(\w+?)(?:_total|_bucket)?\{{([^}}]*)\}}", target["expr"]):
                asked = set(re.findall(r"(\w+)=", labels))
                assert asked <= {"run", "store", *METRICS[name].labels}, target["expr"]
    (variable,) = (v for v in board["templating"]["list"] if v["name"] == "run")
    assert f"{PREFIX}up" in variable["definition"]
