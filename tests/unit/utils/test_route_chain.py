"""The verifier of route traces: what a right run proves, and what each mistake looks like."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from nemo_rl.utils.r3_trace import trace_retired
from nemo_rl_tools.route_chain.chain import RouteReport, verify_trace
from nemo_rl_tools.verdict import Verdict
from tests.helpers.route_traces import RouteRun


def check(run: type[RouteRun], folder: Path, **options: bool) -> RouteReport:
    return verify_trace(run(folder / "trace").write(), **options)


@pytest.fixture(scope="module")
def right_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once; left as it is."""
    before = dict(os.environ)
    try:
        return RouteRun(tmp_path_factory.mktemp("run") / "trace").write()
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def trace(right_run: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(right_run, tmp_path / "trace"))


def expect(report: RouteReport, *, hop: str, guess: str, **places: object) -> None:
    """A mismatch at this hop with this guess."""
    assert report.verdict is Verdict.MISMATCH, report.lines()
    assert report.mismatch is not None
    assert (report.mismatch.hop, report.mismatch.guess.partition(":")[0]) == (hop, guess), report.lines()
    for name, value in places.items():
        assert getattr(report.mismatch, name) == value, name


def test_right_routes_pass_at_every_hop(right_run: Path) -> None:
    report = verify_trace(right_run, require_forward_verify=True, require_cp_identity=True)
    assert report.verdict is Verdict.PASS and not report.gaps, report.lines()
    per_stage = (sum(RouteRun.lengths) - len(RouteRun.missing)) * len(RouteRun.layers)
    shards = 2 * per_stage  # both tensor ranks hold the shard of their context rank
    assert report.compared == {
        **{f"{hop}/{stage}": per_stage for hop in ("fetch", "assignment", "forward") for stage in RouteRun.stages},
        **{"shard/prev_logprobs": shards, "shard/train": shards},
        **{"action/prev_logprobs": per_stage, "action/train": 2 * per_stage, "recompute/train": per_stage},
    }
    assert report.num_processes == 9


class SwappedSamples(RouteRun):
    def fetch(self, stage):
        routes = super().fetch(stage)
        if stage == "train":
            routes[0], routes[1] = routes[1], routes[0]
        return routes


class SwappedTokens(RouteRun):
    def shard_positions(self, batch, cp):
        places = super().shard_positions(batch, cp)
        places[0], places[3] = places[3], places[0]
        return places


class OffByOne(RouteRun):
    def shard_positions(self, batch, cp):
        return [(i, p if i is None else p + 1) for i, p in super().shard_positions(batch, cp)]


class OffByOneAtRest(RouteRun):
    def fetch(self, stage):
        return {i: np.roll(routes, 1, axis=0) for i, routes in super().fetch(stage).items()}


class Contiguous(RouteRun):
    """Each sequence is cut into one run per context rank."""

    def shard_positions(self, batch, cp):
        places = []
        for i in batch:
            half = self.padded(i) // self.cp_size
            places += [(i if p < self.lengths[i] else None, p) for p in range(cp * half, (cp + 1) * half)]
        return places


class ContiguousRow(RouteRun):
    """The packed row is cut into one run per context rank."""

    lengths = [16, 16, 16, 16]

    def shard_positions(self, batch, cp):
        row = [(i, p) for i in batch for p in range(self.padded(i))]
        half = len(row) // self.cp_size
        return row[cp * half : (cp + 1) * half]


class WrongLayerMap(RouteRun):
    def layer_map(self, held):
        return [(layer, 1 - column) for column, layer in enumerate(held)]


class Narrow(RouteRun):
    num_experts, top_k = 200, 4

    def fetch(self, stage):
        return {i: routes.astype(np.int8).astype(np.int64) for i, routes in super().fetch(stage).items()}


class NarrowUnsigned(RouteRun):
    num_experts = 512

    def fetch(self, stage):
        # Missing rows are restored from their bitmap.
        return {i: np.where(routes < 0, routes, routes.astype(np.uint8)) for i, routes in super().fetch(stage).items()}


class Lost(RouteRun):
    def fetch(self, stage):
        routes = {i: rows.copy() for i, rows in super().fetch(stage).items()}
        routes[2][5] = -1
        return routes


class WrongRecompute(RouteRun):
    def use(self, action, ids):
        return ids[[1, 0, *range(2, len(ids))]] if action == "replay_backward" else ids


class OwnChoice(RouteRun):
    """The router ignores what it was given."""

    def use(self, action, ids):
        return (ids + 1) % self.num_experts


@pytest.mark.parametrize(
    ("run", "hop", "guess", "places"),
    [
        (SwappedSamples, "fetch", "swapped rows", {"key": "a_g0", "stage": "train", "position": 0, "layer": 1}),
        (SwappedTokens, "shard", "swapped rows", {"key": "a_g0", "position": 0, "microbatch": 0}),
        (OffByOne, "shard", "shift by 1", {"rank": 0, "coords": {"dp": 0, "cp": 0, "tp": 0, "pp": 0}}),
        (OffByOneAtRest, "fetch", "shift by 1", {"stage": "prev_logprobs"}),
        (Contiguous, "shard", "contiguous instead of zigzag", {"stage": "prev_logprobs", "step": 0}),
        (ContiguousRow, "shard", "contiguous instead of zigzag", {}),
        (WrongLayerMap, "assignment", "wrong layer map", {"layer": 1, "process": "host/200"}),
        (Narrow, "fetch", "narrow integer", {}),
        (NarrowUnsigned, "fetch", "narrow integer", {}),
        (Lost, "fetch", "lost route", {"key": "b_g0", "position": 5, "got": [-1, -1]}),
        (WrongRecompute, "recompute", "swapped rows", {"stage": "train"}),
        (OwnChoice, "forward", "no known mistake explains it", {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_is_named_at_its_hop(run: type[RouteRun], hop: str, guess: str, places, tmp_path: Path) -> None:
    expect(check(run, tmp_path), hop=hop, guess=guess, **places)


@pytest.mark.parametrize("cp", range(RouteRun.cp_size))
@pytest.mark.parametrize("cut", [Contiguous, ContiguousRow])
def test_a_contiguous_cut_is_told_on_every_context_rank(cut: type[RouteRun], cp: int, tmp_path: Path) -> None:
    class OneRank(cut):
        dead_ranks = [rank for rank in range(8) if rank // 2 % 2 != cp]

    expect(check(OneRank, tmp_path), hop="shard", guess="contiguous instead of zigzag")


def test_expected_and_got_are_ids(tmp_path: Path) -> None:
    run = WrongLayerMap(tmp_path / "trace")
    found = verify_trace(run.write()).mismatch
    assert found is not None
    routes = run.routes[run.keys.index(found.key)][found.position]
    assert found.expected == routes[0].tolist() and found.got == routes[1].tolist()
    assert found.guess == "wrong layer map: layer 1 holds the routes of layer 2"


def test_tokens_in_other_slots_than_named_are_a_mismatch(tmp_path: Path) -> None:
    class WrongRuns(RouteRun):
        def slots(self, batch, cp):
            runs, places = super().slots(batch, cp)
            (key, start, length), *rest = runs
            return [(key, start + 1, length), *rest], places

    expect(check(WrongRuns, tmp_path), hop="shard", guess="shift by 1", layer=None)


def test_slots_behind_the_end_of_a_sample_are_a_mismatch(tmp_path: Path) -> None:
    class TooFar(RouteRun):
        def slots(self, batch, cp):
            runs, places = super().slots(batch, cp)
            (_, _, length), *rest = runs
            return [("a_g0", 20, length), *rest], places

    found = check(TooFar, tmp_path).mismatch
    assert found is not None and (found.key, found.position) == ("a_g0", 20)
    assert found.expected == "nothing: the rollout has 13 tokens and layers [1, 2, 4, 5]"


class LongSamples(Narrow):
    """Too long for their records to hold ids."""

    lengths = [4200, 13, 9, 16]


def test_mistakes_are_told_from_digests_alone(tmp_path: Path) -> None:
    report = check(LongSamples, tmp_path)
    expect(report, hop="fetch", guess="narrow integer", key="a_g0")
    assert report.mismatch is not None and str(report.mismatch.got).startswith("digest ")


def without(folder: Path, *events: str, stage: str | None = None, pid: str = "") -> None:
    """Takes records out of a trace."""
    for path in folder.glob(f"*pid{pid}*"):
        lines = path.read_text().splitlines(keepends=True)
        kept = [
            line
            for line in lines
            if json.loads(line)["event"] not in events or stage not in (None, json.loads(line).get("stage"))
        ]
        path.write_text("".join(kept))


def expect_gap(report: RouteReport, what: str, text: str) -> None:
    assert report.verdict is Verdict.INCOMPLETE, report.lines()
    assert any(gap.what == what and text in gap.text for gap in report.gaps), report.lines()


class DroppedAtFetch(RouteRun):
    def fetch(self, stage):
        return {i: routes for i, routes in super().fetch(stage).items() if (stage, i) != ("train", 1)}


class DroppedAtPacking(RouteRun):
    def write_batch(self, traced, number, batch, fetched, held):
        super().write_batch(traced, number, [i for i in batch if i != 2], fetched, held)


class Retired(DroppedAtFetch):
    def write_driver(self):
        super().write_driver()
        trace_retired(keys=["a_g1"], reason="equal rewards in its group")


def test_a_dropped_sample_is_missing_unless_it_was_retired(tmp_path: Path) -> None:
    report = check(DroppedAtFetch, tmp_path / "fetch")
    expect_gap(report, "sample", "dropped sample: a_g1 was rolled out, never fetched for stage train")
    expect_gap(check(DroppedAtPacking, tmp_path / "pack"), "sample", "dropped sample: b_g0 is in no microbatch")
    report = check(Retired, tmp_path / "retired")
    assert report.verdict is Verdict.PASS and "1 samples were retired: equal rewards in its group" in report.notes


class DeadRanks(RouteRun):
    dead_ranks = (3, 6)


class HalfLayers(RouteRun):
    def layer_map(self, held):
        return super().layer_map(held)[:1]


class ShortSlots(RouteRun):
    """One tensor rank is given no tokens."""

    def write_batch(self, traced, number, batch, fetched, held):
        if traced.coords["tp"] == 0:
            super().write_batch(traced, number, batch, fetched, held)
        else:
            traced.traces(number)


@pytest.mark.parametrize(
    ("run", "what", "text"),
    [
        (DeadRanks, "rank", "no trace of rank 3, 6"),
        (HalfLayers, "layer", "no routes to the routers of layer 2"),
        (
            ShortSlots,
            "tokens",
            "a_g1: no rank was given 12 of its tokens, the first at position 0, in layer 1, 2, 4, 5",
        ),
    ],
)
def test_missing_ranks_layers_and_tokens_are_named(run: type[RouteRun], what: str, text: str, tmp_path: Path) -> None:
    expect_gap(check(run, tmp_path), what, text)


@pytest.mark.parametrize(
    ("events", "stage", "options", "what", "text"),
    [
        (["tq_fetch_sample"], "train", {}, "stage", "stage train: no sample was fetched"),
        (["router_replay_assignment"], "train", {}, "stage", "stage train: no router was given routes"),
        (["rollout_payload_sample"], None, {}, "sample", "no rollout of a_g0"),
        (["router_replay_action", "router_replay_forward_verify"], None, {}, "forward", "no forward used"),
        (["stage_ended"], "train", {}, "rank", "did not come to its end"),
        (
            ["router_replay_forward_verify"],
            "prev_logprobs",
            {"require_forward_verify": True},
            "forward",
            "stage prev_logprobs: --require-forward-verify",
        ),
    ],
)
def test_records_that_are_absent_are_named(events, stage, options, what: str, text: str, trace: Path) -> None:
    without(trace, *events, stage=stage)
    expect_gap(verify_trace(trace, **options), what, text)


def test_verified_forwards_are_optional_unless_they_are_required(trace: Path) -> None:
    without(trace, "router_replay_forward_verify")
    assert verify_trace(trace).verdict is Verdict.PASS


def test_a_recomputation_is_to_be_verified_like_a_forward_pass(trace: Path) -> None:
    for path in trace.glob("*"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not ("scores_shape" in line and 'replay_backward"' in line)))
    assert verify_trace(trace).verdict is Verdict.PASS
    gap = "stage train: --require-forward-verify: no verified recomputation"
    expect_gap(verify_trace(trace, require_forward_verify=True), "forward", gap)


def without_tokens(trace: Path, *, stage: int, num_stages: int = 2) -> None:
    """The shards of one pipeline stage of so many tell no tokens."""
    for path in trace.glob("*"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            if record["event"] == "cp_routed_experts" and record["coords"]["pp"] == stage:
                del record["input_ids"]
            if record["event"] == "stage_started":
                record["sizes"]["pp"] = num_stages
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.parametrize("stage", [0, 1])
def test_identity_of_shards_can_be_required(trace: Path, stage: int) -> None:
    without_tokens(trace, stage=stage)
    assert verify_trace(trace).verdict is Verdict.PASS
    expect_gap(verify_trace(trace, require_cp_identity=True), "identity", "--require-cp-identity")


def test_a_stage_inside_a_pipeline_sees_no_tokens_to_tell(trace: Path) -> None:
    without_tokens(trace, stage=1, num_stages=3)
    assert verify_trace(trace, require_cp_identity=True).verdict is Verdict.PASS


def test_microbatches_beyond_the_limit_are_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_R3_TRACE", "1")
    monkeypatch.setenv("NRL_R3_TRACE_MICROBATCHES", "1")
    report = check(RouteRun, tmp_path / "one")
    assert report.verdict is Verdict.PASS, report.lines()
    assert report.compared["assignment/train"] == (13 + 13 - 1) * 4
    monkeypatch.setenv("NRL_R3_TRACE_MICROBATCHES", "0")
    assert check(RouteRun, tmp_path / "none").verdict is Verdict.VACUOUS


def test_steps_beyond_the_limit_are_no_gap(tmp_path: Path) -> None:
    class TwoSteps(RouteRun):
        def write_rank(self, cp, tp, pp):
            super().write_rank(cp, tp, pp)
            self.keys = [f"next_{key}" for key in self.keys]
            super().write_rank(cp, tp, pp)
            self.keys = RouteRun.keys

    report = check(TwoSteps, tmp_path)
    assert report.verdict is Verdict.PASS and report.events["stage_started"] == 16, report.lines()


def test_two_attempts_with_other_routes_for_one_sample_are_a_mismatch(trace: Path, tmp_path: Path) -> None:
    again = RouteRun(tmp_path / "again", seed=1).write()
    for path in again.glob("*"):
        path.rename(trace / path.name.replace("pid", "pid9"))
    report = verify_trace(trace)
    expect(report, hop="rollout", guess="two attempts wrote into one folder", key="a_g0")


def test_a_torn_last_line_is_reported_and_left_out(trace: Path) -> None:
    path = next(trace.glob("*pid203*"))
    lines = path.read_bytes().splitlines(keepends=True)
    # A process that was killed and one of the same number after it.
    path.write_bytes(b"".join(lines) + lines[-1][:40])
    report = verify_trace(trace)
    assert report.verdict is Verdict.PASS and report.notes[0].endswith(f"{path.name}:{len(lines) + 1}")
    # The next process of this number has closed the line.
    path.write_bytes(b"".join(lines) + lines[-1][:40] + b"\n" + lines[0])
    report = verify_trace(trace)
    assert report.verdict is Verdict.PASS and len(report.notes) == 1 and report.num_processes == 10
    path.write_bytes(b"".join(lines)[:-40])
    expect_gap(verify_trace(trace), "rank", "rank 3 (host/203) did not come to its end")


@pytest.mark.parametrize(
    "line",
    [
        b"\xff{not json",
        b"[1, 2]",
        b'{"event":"retired","keys":["a_g0"]}',
        b'{"event":"cp_routed_experts","stage":"train","trace_step":0,"microbatch_idx":0,"layers":["x"]}',
        b'{"event":"router_replay_assignment","stage":"train","trace_step":0,"microbatch_idx":7,"layer_number":1,'
        b'"first_slot":0,"digests":{"b64":"AAAA","dtype":"<i8","shape":[1,1]}}',
        b'{"event":"tq_fetch_sample","key":"a_g0","trace_step":0,"stage":"train","input_ids":{},"digests":7}',
        b'{"event":"tq_fetch_sample","key":"a_g0","trace_step":0,"stage":"train","input_ids":{"values":{"b64":"AAAAAA==",'
        b'"dtype":"<i4","shape":[1]}},"routed_experts":{"valid_shape":[1,1,2],"min":null},"layers":[1],'
        b'"digests":{"b64":"AAAAAAAAAAA=","dtype":"<i8","shape":[1,1]}}',
        b'{"event":"stage_started","stage":"train","trace_step":0,"rank":"3"}',
    ],
)
def test_a_line_that_is_no_record_makes_a_trace_incomplete(line: bytes, trace: Path) -> None:
    path = next(trace.glob("*pid203*"))
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(b"\n".join([first, line, rest]))
    expect_gap(verify_trace(trace), "record", f"{path.name}:2")


class AllMissing(RouteRun):
    missing = [(i, token) for i, length in enumerate(RouteRun.lengths) for token in range(length)]


class Uniform(RouteRun):
    missing = []

    def _draw(self, rng, length):
        return np.tile(np.arange(self.top_k), (length, len(self.layers), 1))


@pytest.mark.parametrize("run", [AllMissing, Uniform])
def test_routes_that_cannot_differ_prove_nothing(run: type[RouteRun], tmp_path: Path) -> None:
    assert check(run, tmp_path).verdict is Verdict.VACUOUS


def test_a_folder_without_records_proves_nothing(tmp_path: Path) -> None:
    assert verify_trace(tmp_path).verdict is Verdict.VACUOUS


def test_layers_that_the_payload_does_not_name_are_those_of_the_routers(trace: Path) -> None:
    for path in trace.glob("*"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            if record["event"] in ("rollout_payload_sample", "tq_fetch_sample"):
                record["layers"] = None
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert verify_trace(trace).verdict is Verdict.PASS


def test_a_digests_column_that_lost_its_way_is_a_mismatch(trace: Path) -> None:
    path = next(trace.glob("*pid203*"))
    path.write_text(path.read_text().replace('"matches_expected": true', '"matches_expected": false', 1))
    report = verify_trace(trace)
    assert report.verdict is Verdict.MISMATCH and "digests that travelled with them differ" in report.notes[0]
