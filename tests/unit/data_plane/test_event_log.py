"""The event log: who did what to which rows, on disk and in the history of live rows."""

from __future__ import annotations

import itertools
import stat
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config.data_plane import DataPlaneConfig, ObservabilityConfig
from nemo_rl.data_plane.address import ATTACH_FILE, read_attach_file
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client, observe
from nemo_rl.data_plane.ledger.events import EVENTS_FILE, compact_keys, expand_keys, names_key, read_events
from nemo_rl.errors import DataPlaneClosed, UserError
from tests.helpers.data_planes import ids_column, keys_of

KEYS = st.lists(
    st.one_of(
        st.builds("{}_g{}".format, st.sampled_from(["a", "b", "u-1"]), st.integers(0, 40)),
        st.sampled_from(["solo", "x_g007", "x_g7", "y_gz", "_g", "_g5", "a_g0-3", "b_g", "c_g1_g2"]),
    ),
    unique=True,
)


@given(KEYS)
def test_compact_keys_name_exactly_the_keys_that_went_in(keys: list[str]) -> None:
    packed = compact_keys(keys)
    assert sorted(expand_keys(packed)) == sorted(keys)
    for key in {*keys, "a_g41", "a_g1", "b_g0", "nobody", "x_g7", "x_g007", "_g5", "c_g1"}:
        assert names_key(packed, key) is (key in keys)


def live_through_a_step(log_dir: Path, **options: object) -> None:
    before = set(threading.enumerate())
    config = DataPlaneConfig(impl="noop", timeout_s=20.0, lease_s=0.2, **options)
    client = build_data_plane_client(config, run_id="events", log_dir=log_dir)
    client.register_partition("train", ["input_ids", "prev_logprobs"], 99, ["prev_lp"])
    with client.stage("rollout"):
        client.put_async(keys_of(2), "train", {"input_ids": ids_column([1] * 8)}).result(timeout=10)
    worker = attach_data_plane(client.address)
    with worker.stage("prev_logprobs"):
        meta = worker.get_meta("train", "prev_lp", ["input_ids"], 4, consumer_id="w")
        worker.get_data(meta)
        worker.kv_batch_put(meta.keys, "train", {"prev_logprobs": torch.zeros(4, 1)})
        worker.release(worker.get_meta("train", "prev_lp", ["input_ids"], 4, consumer_id="w"))
    client.kv_clear(["u1_g3"], "train", reason="dynamic sampling")
    client.kv_clear(None, "train", reason="step end")
    worker.close()
    client.close()
    assert set(threading.enumerate()) <= before


def test_every_change_is_logged_with_who_stage_and_reason(tmp_path: Path) -> None:
    live_through_a_step(tmp_path)
    events = list(read_events(tmp_path / EVENTS_FILE))
    told = [(event["event"], event.get("stage"), event.get("rows")) for event in events]
    assert told == [
        ("open", None, 0),
        ("register", None, 0),
        ("commit", "rollout", 8),
        ("claim", "prev_logprobs", 4),
        ("read", "prev_logprobs", 4),
        ("commit", "prev_logprobs", 4),
        ("claim", "prev_logprobs", 4),
        ("release", "prev_logprobs", 4),
        ("clear", None, 1),
        ("clear", None, 7),
    ]
    assert [event.get("reason") for event in events[-2:]] == ["dynamic sampling", "step end"]
    assert events[2]["groups"] == {"u0": "0-3", "u1": "0-3"} and events[2]["fields"] == ["input_ids"]
    owner, worker = events[2]["who"], events[4]["who"]
    assert owner != worker and events[3]["task"] == "prev_lp" and events[3]["by"] == f"w@{worker}"
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(events))


def test_a_second_run_in_the_folder_continues_the_file(tmp_path: Path) -> None:
    live_through_a_step(tmp_path)
    live_through_a_step(tmp_path)
    assert [event["event"] for event in read_events(tmp_path / EVENTS_FILE)].count("open") == 2


def test_nothing_is_written_when_the_event_log_is_off(tmp_path: Path) -> None:
    live_through_a_step(tmp_path, observability=ObservabilityConfig(event_log=False))
    assert list(tmp_path.iterdir()) == []


def test_live_rows_tell_their_history_and_lapsed_claims(tmp_path: Path) -> None:
    owner = build_data_plane_client(DataPlaneConfig(impl="noop", lease_s=0.2), run_id="told", log_dir=tmp_path)
    try:
        owner.register_partition("p", ["input_ids"], 99, ["train"])
        owner.kv_batch_put(["a", "b"], "p", {"input_ids": ids_column([1, 2])}, [{"x": 1}, {"x": 2}])
        dying = attach_data_plane(owner.address)
        dying.get_meta("p", "train", ["input_ids"], 2, consumer_id="d")
        dying.close()
        heir = owner.get_meta("p", "train", ["input_ids"], 2, consumer_id="h", timeout_s=10)
        host = observe(read_attach_file(tmp_path))
        (row,) = host.call("explain", {"key": "b"}, timeout_s=5)["rows"]
        assert [event["event"] for event in row["history"]] == ["commit", "claim", "expire", "claim"]
        assert row["history"][2]["by"].startswith("d@") and row["tags"] == {"x": 2} and row["length"] == 2
        assert row["tasks"]["train"].startswith("claimed by h@") and row["fields"]["input_ids"]["version"] == 1
        owner.release(heir)
        assert host.call("explain", {"key": "b"}, timeout_s=5)["rows"][0]["tasks"] == {"train": "done"}
        assert host.call("explain", {"key": "c"}, timeout_s=5)["rows"] == []
        for _ in range(100):
            owner.kv_batch_get(["a"], "p", ["input_ids"])
        history = host.call("explain", {"key": "a"}, timeout_s=5)["rows"][0]["history"]
        assert len(history) == 64 and history[0]["event"] == "commit", "a long history keeps its start"
        host.close()
    finally:
        owner.close()


def test_the_attach_file_is_private_and_gone_after_the_run(tmp_path: Path) -> None:
    owner = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id="attach", log_dir=tmp_path)
    path = tmp_path / ATTACH_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    point = read_attach_file(tmp_path)
    host = observe(point)
    assert point.run_id == "attach" and host.call("stats", {}, timeout_s=5)["live_rows"] == 0
    owner.close()
    assert not path.exists() and read_attach_file(tmp_path) is None
    with pytest.raises(DataPlaneClosed):
        host.call("stats", {}, timeout_s=5)
    host.close()
    path.write_text("{}")
    with pytest.raises(UserError, match="expected the file that a running job writes"):
        read_attach_file(tmp_path)
