"""A ledger in a Ray actor whose process is killed: with a journal it comes back, and calls go on."""

from __future__ import annotations

import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from nemo_rl.config.data_plane import DataPlaneConfig, LedgerConfig
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.ledger.host_ray import NAMESPACE
from nemo_rl.data_plane.ledger.journal import JOURNAL_FILE
from nemo_rl.errors import ConfigError, DataPlaneClosed, LeaseExpired
from tests.helpers.data_planes import Plane, ids_column, keys_of, open_plane, rows_of, wait_until
from tests.helpers.ledger_kills import kill_under_work

FIELDS = ("input_ids", "sample_mask", "prev_logprobs")
KEYS, LENGTHS = keys_of(2), [2] * 8
JOURNAL = LedgerConfig(recovery="journal")


def process_of_ledger(plane: Plane) -> int:
    actor = ray.get_actor(plane.owner.address.ledger.actor_name, namespace=NAMESPACE)
    address = ray.get(actor.socket_address.remote(), timeout=60)
    return address.process_id


def read(client: DataPlaneClient, partition: str) -> list:
    return rows_of(client.kv_batch_get(KEYS, partition, ["input_ids"])["input_ids"])


def test_a_ledger_that_is_killed_under_work_loses_nothing_and_hands_nothing_out_twice(
    cluster: None, tmp_path: Path
) -> None:
    result = kill_under_work(tmp_path, kills=2, workers=2, pause_s=0.5)
    result.problems = [problem for problem in result.problems if "a recovery took" not in problem]
    assert result.problems == [] and result.kills == 2 and result.rows > 0, result.summary()


def test_rows_claims_and_waiting_calls_outlive_the_ledger(cluster: None) -> None:
    with open_plane("ray-holder", mode="actors", ledger=JOURNAL, lease_s=60.0) as plane:
        partition, expected = plane.partition(FIELDS, tasks=["train"]), rows_of(ids_column(LENGTHS))
        plane.owner.kv_batch_put(KEYS, partition, {"input_ids": ids_column(LENGTHS)})
        meta = plane.peer.get_meta(partition, "train", ["input_ids"], 4, consumer_id="c")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(
                plane.owner.get_meta, partition, "train", ["prev_logprobs"], 4, consumer_id="w", timeout_s=90
            )
            time.sleep(0.3)
            os.kill(process_of_ledger(plane), signal.SIGKILL)
            assert read(plane.owner, partition) == read(plane.peer, partition) == expected
            plane.peer.kv_batch_put(KEYS[4:], partition, {"prev_logprobs": ids_column([2] * 4).float()})
            assert waiting.result(timeout=120).keys == tuple(KEYS[4:])
        # The address that the owner gave away names a port that is gone.
        late = plane.attach()
        assert read(late, partition) == expected
        late.release(meta)
        with pytest.raises(LeaseExpired, match="not claimed by"):
            late.release(meta.__class__(partition_id=partition, keys=(KEYS[4],), task_name="train"))
        assert late.check_consumption_status(partition, ["train"])
        plane.settle()
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))


def test_a_ledger_that_cannot_recover_ends_calls_with_the_reason(cluster: None, tmp_path: Path) -> None:
    config = DataPlaneConfig(impl="ray", ledger=JOURNAL, timeout_s=60.0)
    client = build_data_plane_client(config, run_id="doomed", log_dir=tmp_path)
    plane = Plane("ray-producer", client)
    try:
        client.register_partition("p", FIELDS, 8, [])
        assert stat.S_IMODE((tmp_path / JOURNAL_FILE).stat().st_mode) == 0o600
        (tmp_path / JOURNAL_FILE).unlink()
        os.kill(process_of_ledger(plane), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(DataPlaneClosed, match=r"kv_list\('p'\): .* is gone .*: run 'doomed': .* cannot be opened"):
            while time.monotonic() - started < 60:
                client.kv_list("p")
    finally:
        client.close()
    assert not (tmp_path / JOURNAL_FILE).exists()
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))


def test_a_ledger_of_the_owners_process_has_no_journal() -> None:
    for impl in ("noop", "shm"):
        with pytest.raises(ConfigError, match="needs the ledger in its own process"):
            build_data_plane_client(DataPlaneConfig(impl=impl, ledger=JOURNAL), run_id="refused")
