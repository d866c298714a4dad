"""What the counting client counts: calls, bytes, milliseconds and errors, per operation and stage."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from nemo_rl.config.data_plane import ObservabilityConfig
from nemo_rl.data_plane.observability import MetricsDataPlaneClient, merge_snapshots
from nemo_rl.errors import KeysNotFound
from tests.helpers.planes import Plane, ids_column, keys_of, open_plane


@pytest.fixture
def plane() -> Iterator[Plane]:
    with open_plane("noop") as plane:
        yield plane
        plane.settle()


def test_calls_bytes_errors_and_time_are_counted_per_operation_and_stage(plane: Plane) -> None:
    partition, client = plane.partition(["input_ids", "sample_mask"]), MetricsDataPlaneClient(plane.owner)
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
    put = snapshot["operations"]["kv_batch_put"]
    assert (put["count"], put["errors"], put["payload_bytes"]) == (1, 0, 4 * 3 * 4 + 4 * 4)
    assert put["ms"] > 0 and 0 < put["meta_bytes"] < 150
    assert snapshot["stages"]["rollout"]["put_async"]["payload_bytes"] == 16
    assert snapshot["stages"]["train"]["get_data"]["payload_bytes"] == 48
    assert snapshot["stages"]["train"]["kv_batch_get"] | {"ms": 0} == {
        "count": 1,
        "errors": 1,
        "ms": 0,
        "payload_bytes": 0,
        "meta_bytes": 0,
    }
    assert list(snapshot["stages"][""]) == ["kv_clear"]
    assert snapshot["payload_bytes"] == 64 + 16 + 48
    assert client.snapshot()["operations"] == {}


def test_snapshots_of_processes_add_up(plane: Plane) -> None:
    partition, client = plane.partition(), MetricsDataPlaneClient(plane.owner)
    client.kv_batch_put(keys_of(1), partition, {"sample_mask": torch.ones(4)})
    one = client.snapshot()
    both = merge_snapshots([one, one])
    assert both["payload_bytes"] == 2 * one["payload_bytes"] and both["meta_bytes"] == 2 * one["meta_bytes"]
    assert both["operations"]["kv_batch_put"]["count"] == 2
    assert merge_snapshots([one]) == one


def test_threads_count_for_their_own_stage(plane: Plane) -> None:
    client = MetricsDataPlaneClient(plane.owner)

    def work(stage: str) -> None:
        for _ in range(50):
            with client.stage(stage):
                client.stats()

    threads = [threading.Thread(target=work, args=(f"s{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {s: c["stats"]["count"] for s, c in client.snapshot()["stages"].items()} == {f"s{i}": 50 for i in range(4)}


def test_the_drivers_share_is_small_for_long_rows(plane: Plane) -> None:
    """Rows of 512 tokens: keys, lengths and tags are under one percent of the columns."""
    partition, client = plane.partition(["input_ids", "generation_logprobs"]), MetricsDataPlaneClient(plane.owner)
    keys, ids = keys_of(32, 16, prefix="3f2504e04f8941d39a0c0305e82c3301-"), ids_column([512] * 512)
    tags = [{"std": i * 0.1, "weight_version": 1} for i in range(512)]
    client.kv_batch_put(keys, partition, {"input_ids": ids, "generation_logprobs": ids.to(torch.float32)}, tags)
    snapshot = client.snapshot()
    assert snapshot["meta_bytes"] < 0.01 * snapshot["payload_bytes"]


def test_nothing_is_counted_when_observability_is_off() -> None:
    with open_plane("noop", observability=ObservabilityConfig(enabled=False)) as plane:
        partition, client = plane.partition(), MetricsDataPlaneClient(plane.owner)
        client.kv_batch_put(keys_of(1), partition, {"sample_mask": torch.ones(4)})
        client.put_async(keys_of(1), partition, {"sample_mask": torch.ones(4)}).result(timeout=10)
        assert client.snapshot() == {"operations": {}, "stages": {}, "payload_bytes": 0, "meta_bytes": 0}
        client.kv_clear(None, partition)
        plane.settle()
