"""The route trace: its switches, its file, its records, and what it costs when it is off."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import subprocess
import sys
import threading
import timeit
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.config.r3_trace_env import TraceLimits, router_replay_validate_enabled, trace_environment, trace_limits
from nemo_rl.routes.digest import route_digests
from nemo_rl.utils import r3_trace

LAYERS = [2, 5]
HEAD = {"time", "host", "pid", "event"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NRL_R3_TRACE", "1")
    monkeypatch.setenv("NRL_R3_TRACE_DIR", str(tmp_path / "trace"))
    r3_trace.reset_r3_trace()
    yield tmp_path / "trace"
    r3_trace.reset_r3_trace()


def records(folder: Path, event: str | None = None) -> list[dict]:
    (path,) = folder.glob("*")
    told = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in told if event in (None, record["event"])]


def columns(dtype: torch.dtype = torch.int16) -> dict[str, torch.Tensor]:
    routes = torch.arange(3 * 4 * 2 * 2).reshape(3, 4, 2, 2) % 8
    return {
        "input_ids": torch.arange(12, dtype=torch.int32).reshape(3, 4),
        "input_lengths": torch.tensor([4, 2, 3], dtype=torch.int32),
        "routed_experts": routes.to(dtype),
    }


def rollout(**more) -> None:
    r3_trace.trace_rollout_payload(keys=["a_g0", "a_g1", "a_g2"], data=columns(), layers=LAYERS, **more)


def decoded(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["b64"]), packed["dtype"]).reshape(packed["shape"])


@pytest.mark.parametrize("value", ["1", "true", "YES", " On "])
def test_a_switch_is_on_in_any_case(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NRL_R3_TRACE", "NRL_R3_TRACE_VERIFY_FORWARD", "NRL_ROUTER_REPLAY_VALIDATE"):
        monkeypatch.setenv(name, value)
    assert r3_trace.r3_trace_enabled() and r3_trace.r3_trace_verify_forward_enabled()
    assert router_replay_validate_enabled()


@pytest.mark.parametrize("value", [None, "", "0", "false", "no", "2"])
def test_a_switch_is_off_by_default_and_for_other_words(value, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NRL_R3_TRACE", raising=False)
    if value is not None:
        monkeypatch.setenv("NRL_R3_TRACE", value)
    monkeypatch.setenv("NRL_R3_TRACE_VERIFY_FORWARD", "1")
    assert not r3_trace.r3_trace_enabled() and not r3_trace.r3_trace_verify_forward_enabled()


def test_bad_integers_mean_the_default_and_negative_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace_limits() == TraceLimits() == TraceLimits(steps=1, samples=2, microbatches=2)
    monkeypatch.setenv("NRL_R3_TRACE_STEPS", "many")
    monkeypatch.setenv("NRL_R3_TRACE_SAMPLES", "-3")
    monkeypatch.setenv("NRL_R3_TRACE_MICROBATCHES", " 7 ")
    assert trace_limits() == TraceLimits(steps=1, samples=0, microbatches=7)


def test_the_module_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, nemo_rl.utils.r3_trace; assert not {'torch', 'numpy'} & sys.modules.keys(), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_off_it_writes_nothing_and_costs_next_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NRL_R3_TRACE", raising=False)
    monkeypatch.setenv("NRL_R3_TRACE_DIR", str(tmp_path / "trace"))
    rollout()
    r3_trace.trace_retired(keys=["a_g0"], reason="any")
    with r3_trace.r3_trace_stage("train") as stage:
        assert stage is None
        router = r3_trace.TracedRouter(microbatch=0, layer_number=0)
        assign = lambda: r3_trace.trace_router_replay_assignment(  # noqa: E731
            stage, router, payload_idx=0, ids=None
        )
        assign()
    assert list(tmp_path.iterdir()) == []
    # A per-layer call is a comparison with None, a per-step call a look into the environment.
    assert min(timeit.repeat(assign, number=10_000, repeat=5)) / 10_000 < 5e-6
    assert min(timeit.repeat(rollout, number=100, repeat=5)) / 100 < 1e-3


def test_a_sample_is_described_in_its_valid_region(folder: Path) -> None:
    rollout()
    header, first, second, third = records(folder)
    assert header["limits"] == {"steps": 1, "samples": 2, "microbatches": 2} and header["event"] == "trace_started"
    data = columns()
    valid = data["routed_experts"][1, :2]
    assert second.keys() >= HEAD | {"trace_step", "sample_idx", "key", "valid_length", "routed_experts", "input_ids"}
    assert (second["key"], second["sample_idx"], second["valid_length"], second["trace_step"]) == ("a_g1", 1, 2, 0)
    told = second["routed_experts"]
    assert (told["full_shape"], told["valid_shape"], told["dtype"]) == ([4, 2, 2], [2, 2, 2], "int16")
    assert told["valid_sha256"] == hashlib.sha256(valid.numpy().tobytes()).hexdigest()
    assert told["valid_preview"] == valid.flatten().tolist()
    assert decoded(second["input_ids"]["values"]).tolist() == [4, 5]
    assert np.array_equal(decoded(second["ids"]), valid.numpy())
    assert np.array_equal(decoded(second["digests"]), route_digests(valid.long(), [0, 0]).numpy())
    assert "valid_preview" in first["routed_experts"] and "valid_preview" not in third["routed_experts"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bfloat16])
def test_digests_do_not_depend_on_the_dtype(dtype: torch.dtype, folder: Path) -> None:
    for name, column in (("x", columns()), ("y", columns(dtype))):
        r3_trace.trace_tq_fetch_payload(stage=name, keys=["a_g0", "a_g1", "a_g2"], data=column, layers=LAYERS)
    told = records(folder, "tq_fetch_sample")
    assert [record["digests"] for record in told[:3]] == [record["digests"] for record in told[3:]]


def test_routes_may_be_given_apart_and_jagged(folder: Path) -> None:
    data = columns()
    rows = [row[:length] for row, length in zip(data["routed_experts"], data["input_lengths"].tolist(), strict=True)]
    r3_trace.trace_rollout_payload(
        keys=["a_g0", "a_g1", "a_g2"], data={"input_ids": data["input_ids"]}, routes=torch.nested.nested_tensor(rows)
    )
    r3_trace.trace_tq_fetch_payload(stage="train", keys=["a_g0", "a_g1", "a_g2"], data=data)
    told = records(folder)[1:]
    assert [record["digests"] for record in told[:3]] == [record["digests"] for record in told[3:]]


def test_what_is_not_there_is_left_out(folder: Path) -> None:
    data = columns()
    wire = {**data, "routed_experts_missing": torch.zeros(3, 1, dtype=torch.uint8)}
    r3_trace.trace_rollout_payload(keys=["a_g0", "a_g1", "a_g2"], data=wire)
    assert all("digests" not in record for record in records(folder))


def test_only_the_first_calls_of_each_name_are_traced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_R3_TRACE_STEPS", "2")
    for _ in range(3):
        rollout()
        r3_trace.trace_tq_fetch_payload(stage="train", keys=["a_g0"], data=columns(), layers=LAYERS)
        with r3_trace.r3_trace_stage("train") as stage:
            assert (stage is None) == (_ == 2)
    with r3_trace.r3_trace_stage("prev_logprobs") as other:
        assert other is not None and other.trace_step == 0
    counts = [record["trace_step"] for record in records(folder, "rollout_payload_sample")]
    assert counts == [0, 0, 0, 1, 1, 1]
    assert [record["trace_step"] for record in records(folder, "tq_fetch_sample")] == [0, 1]


def test_a_stage_tells_its_rank_layers_and_end(folder: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        r3_trace.r3_trace_stage("train", coords={"cp": 1}, sizes={"cp": 2}, layers=LAYERS) as stage,
    ):
        assert stage is not None
        for microbatch in range(4):
            stage.traces(microbatch)
        _ = 1 / 0
    started, ended = records(folder)[1:]
    assert (started["coords"], started["sizes"], started["layers"]) == ({"cp": 1}, {"cp": 2}, LAYERS)
    assert (ended["is_complete"], ended["microbatches"]) == (False, 4)


def test_records_tell_the_rank_in_a_process_group(folder: Path) -> None:
    store = torch.distributed.FileStore(str(folder.parent / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        rollout()
    finally:
        torch.distributed.destroy_process_group()
    r3_trace.trace_retired(keys=["a_g0"], reason="any")
    told = [(record.get("rank"), record.get("world_size")) for record in records(folder)]
    assert told == [(0, 1)] * 4 + [(None, None)]


def router_records(folder: Path, *, layer_number: int = 5, **used) -> bool:
    """All records of one router; whether its forward was right."""
    ids = torch.tensor([[1, 2], [3, 0], [0, 1]])
    expected = route_digests(ids[:, None], [5])[:, 0]
    missing = torch.tensor([False, False, True])
    with r3_trace.r3_trace_stage("train", coords={"cp": 1, "tp": 0}) as stage:
        runs = [("a_g0", 2, 2), (None, 0, 1)]
        r3_trace.trace_cp_routed_experts(
            stage,
            microbatch=0,
            slots=r3_trace.TracedSlots(runs=runs, input_ids=torch.tensor([[7, 8, 0]])),
            routes=ids[:, None],
            layers=[5],
        )
        router = r3_trace.TracedRouter(microbatch=0, layer_number=5)
        r3_trace.trace_router_replay_assignment(stage, router, payload_idx=1, ids=ids)
        for action in ("replay_forward", "clear"):
            given = ids if action == "replay_forward" else None
            r3_trace.trace_router_replay_action(stage, router, action=action, ids=given, pending=1)
        used = {"actual": ids, "expected": expected, "missing": missing, "num_experts": 8, **used}
        return r3_trace.trace_router_replay_forward_verify(
            stage,
            replace(router, layer_number=layer_number),
            r3_trace.UsedRoutes(**used),
            action="replay_forward",
            pending=(1, 2),
        )


def test_routers_tell_all_that_the_verifier_needs(folder: Path) -> None:
    assert router_records(folder)
    cp, assignment, forward, clear, verify = records(folder)[2:7]
    place = {"stage": "train", "trace_step": 0, "microbatch_idx": 0, "coords": {"cp": 1, "tp": 0}}
    assert all(place.items() <= record.items() for record in (cp, assignment, forward, clear, verify))
    assert cp["token_identity"] == [["a_g0", 2, 2], [None, 0, 1]] and cp["cp_rank"] == 1
    assert decoded(cp["input_ids"]["values"]).tolist() == [7, 8, 0] and cp["tensor"]["shape"] == [3, 1, 2]
    assert (assignment["layer_number"], assignment["payload_idx"], assignment["tensor"]["dtype"]) == (5, 1, "int64")
    assert assignment["token_identity"] is None and decoded(assignment["digests"]).shape == (3, 1)
    assert (forward["action"], forward["replay_backward_list_len"]) == ("replay_forward", 1)
    assert clear["action"] == "clear" and "digests" not in clear
    assert (verify["topk"], verify["scores_shape"], verify["fallback_rows"]) == (2, [3, 8], 1)
    assert (verify["replay_backward_list_len_before"], verify["replay_backward_list_len_after"]) == (1, 2)
    assert verify["matches_expected"] is True and verify["actual"]["preview"] == [1, 2, 3, 0, 0, 1]


def test_a_forward_with_other_experts_is_found_also_when_it_is_not_traced(folder: Path) -> None:
    other = torch.tensor([[1, 2], [0, 3], [5, 6]])
    assert not router_records(folder, actual=other)
    assert records(folder, "router_replay_forward_verify")[0]["num_differing"] == 1
    assert not router_records(folder, actual=other)  # the second step
    assert router_records(folder, actual=other[[0, 0, 0]], missing=torch.tensor([False, True, True]))
    assert len(records(folder, "router_replay_forward_verify")) == 1


def test_the_same_experts_in_another_layer_are_not_the_same_route(folder: Path) -> None:
    assert not router_records(folder, layer_number=4)


def test_microbatches_beyond_the_limit_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_R3_TRACE_MICROBATCHES", "0")
    router_records(folder)
    assert [record["event"] for record in records(folder)] == ["trace_started", "stage_started", "stage_ended"]


def test_records_of_threads_do_not_mix(folder: Path) -> None:
    with r3_trace.r3_trace_stage("train") as stage:
        work = lambda layer: [  # noqa: E731
            r3_trace.trace_router_replay_assignment(
                stage, r3_trace.TracedRouter(microbatch=0, layer_number=layer), payload_idx=0, ids=torch.zeros(500, 2)
            )
            for _ in range(20)
        ]
        threads = [threading.Thread(target=work, args=(layer,)) for layer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(records(folder, "router_replay_assignment")) == 80


def test_keys_are_sorted_and_a_torn_line_before_is_closed(folder: Path) -> None:
    rollout()
    (path,) = folder.glob("*")
    with path.open("a") as file:
        file.write('{"event":"ret')
    r3_trace.reset_r3_trace()
    r3_trace.trace_retired(keys=["a_g0"], reason="equal rewards")
    lines = path.read_text().splitlines()
    assert lines[4] == '{"event":"ret' and json.loads(lines[6])["reason"] == "equal rewards"
    assert all(list(json.loads(line)) == sorted(json.loads(line)) for line in [*lines[:4], *lines[5:]])


def test_a_folder_that_cannot_be_made_is_one_log_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file in its place")
    with caplog.at_level(logging.WARNING, logger="nemo_rl"):
        rollout()
        assert router_records(folder)
    assert [record.getMessage().partition(": ")[2][:30] for record in caplog.records] == [
        "routes are no longer traced by"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_log_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollout()
    (path,) = folder.glob("*")
    r3_trace.reset_r3_trace()
    path.unlink()
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="nemo_rl"):
        rollout()
        rollout()
    assert len(caplog.records) == 1 and "No space left" in caplog.text


FORK = """
import os
from nemo_rl.utils.r3_trace import trace_retired
trace_retired(keys=["a_g0"], reason="before")
child = os.fork()
trace_retired(keys=["a_g0"], reason="parent" if child else "child")
if child:
    os.waitpid(child, 0)
    trace_retired(keys=["a_g0"], reason="after")
    print(os.getpid(), child)
"""


def test_a_forked_process_writes_its_own_file(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60, capture_output=True, text=True)
    told = [
        [
            json.loads(line).get("reason")
            for path in folder.glob(f"*pid{pid}.jsonl")
            for line in path.read_text().splitlines()
        ]
        for pid in done.stdout.split()
    ]
    assert told == [[None, "before", "parent", "after"], [None, "child"]]


def test_processes_that_inherit_no_environment_are_told_the_switches(tmp_path, monkeypatch) -> None:
    for name in ("NRL_R3_TRACE", "NRL_R3_TRACE_DIR", "NRL_ROUTER_REPLAY_VALIDATE"):
        monkeypatch.delenv(name, raising=False)
    assert trace_environment() == {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NRL_R3_TRACE", "1")
    monkeypatch.setenv("NRL_R3_TRACE_STEPS", "3")
    monkeypatch.setenv("NRL_ROUTER_REPLAY_VALIDATE", "yes")
    assert trace_environment() == {
        "NRL_R3_TRACE": "1",
        "NRL_R3_TRACE_STEPS": "3",
        "NRL_ROUTER_REPLAY_VALIDATE": "yes",
        "NRL_R3_TRACE_DIR": str(tmp_path / "logs" / "r3_trace"),
    }
