"""Two recordings against each other: layouts that must not matter, faults that must, and the verdict of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.errors import UserError
from nemo_rl.records.record import RecordPlace, RecordWriter, end_path, lines_path, payload_path
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl_tools.compare.comparison import RecordingComparison
from nemo_rl_tools.compare.folders import compare_folders
from nemo_rl_tools.compare.measurement import Metric
from nemo_rl_tools.compare.side import ComparedSite
from nemo_rl_tools.verdict import Verdict
from tests.helpers.probe_recordings import (
    BACKWARD,
    FORWARD,
    Layout,
    Truth,
    changed,
    one_site,
    whole_truth,
    write_recording,
)

LOGPROB = (SiteKind.LOGPROB, None, FORWARD)
MLP_OUT = (SiteKind.MLP_OUT, 1, FORWARD)
LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from((1, 2, 4)),
    cp=st.integers(1, 2),
    dp=st.integers(1, 2),
    pp=st.integers(1, 2),
    num_microbatches=st.integers(1, 3),
)


@given(a=LAYOUTS, b=LAYOUTS)
@settings(max_examples=12, deadline=None)
def test_the_layout_does_not_matter(tmp_path_factory: pytest.TempPathFactory, a: Layout, b: Layout) -> None:
    folder, truth = tmp_path_factory.mktemp("layouts"), whole_truth()
    found = compare_folders(write_recording(folder / "a", truth, a), write_recording(folder / "b", truth, b))
    assert found.verdict is Verdict.PASS, found.lines()
    assert len(found.sites) == len(truth.values) + 3 and not found.notes
    for result in found.sites:
        told = result.measurement
        assert told is not None and told.is_bit_equal and not any(told.metrics.values()) and not result.worst
    rows = sum(len(ids) for ids in truth.tokens.values())
    assert {result.num_rows for result in found.sites if result.site.kind is SiteKind.LOGITS} == {rows}


def test_a_layout_of_several_ranks_is_compared_whole(tmp_path: Path) -> None:
    layout, truth = Layout(tp=2, cp=2, pp=2, dp=1, num_microbatches=2), whole_truth(dtype=torch.bfloat16)
    a, b = write_recording(tmp_path / "a", truth), write_recording(tmp_path / "b", truth, layout)
    assert compare_folders(a, b).verdict is Verdict.PASS
    worse = deepcopy(truth)
    worse.values[(SiteKind.ATTN_Q, 1, FORWARD)]["s2"][4, 7] += 2
    found = compare_folders(a, write_recording(tmp_path / "c", worse, layout))
    (bad,) = [result for result in found.sites if result.failures]
    worst = bad.worst[0]
    assert (worst.row.key, worst.row.position, worst.row.token) == ("s2", 4, int(truth.tokens["s2"][4]))
    assert worst.element == 7 and bad.site.label == "train/attn.q[1]" and bad.max_abs_at == worst.row


def set_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop_line(folder: Path, wanted: str, *, rank: int = 0) -> None:
    lines = lines_path(folder, rank).read_text().splitlines(keepends=True)
    kept = [line for line in lines if wanted not in line]
    assert len(kept) < len(lines)
    lines_path(folder, rank).write_text("".join(kept))
    end_path(folder, rank).write_text(json.dumps({"records": len(kept)}))


def flip_byte(folder: Path, *, at: int) -> None:
    payload = bytearray(payload_path(folder, 0).read_bytes())
    payload[at] ^= 0x40
    payload_path(folder, 0).write_bytes(payload)


def cut_line(folder: Path) -> None:
    lines_path(folder, 0).write_bytes(lines_path(folder, 0).read_bytes()[:-20])


def lose_a_loss(folder: Path) -> None:
    drop_line(folder, '"kind": "loss", "phase": "train", "microbatch": 1')
    end_path(folder, 0).unlink()


def spoil_line(folder: Path) -> None:
    lines = lines_path(folder, 0).read_text().splitlines(keepends=True)
    lines_path(folder, 0).write_text("".join(["{]\n", *lines[1:]]))


def remove_rank(folder: Path, rank: int) -> None:
    for path in folder.glob(f"rank_{rank:05d}.*"):
        path.unlink()


def remove_records(folder: Path) -> None:
    lines_path(folder, 0).write_text("")
    end_path(folder, 0).write_text('{"records": 0}')


def rename(truth: Truth, names: dict[str, str]) -> None:
    truth.tokens = {names[key]: ids for key, ids in truth.tokens.items()}
    truth.loss = {names[key]: loss for key, loss in truth.loss.items()}
    truth.values = {where: {names[key]: v for key, v in own.items()} for where, own in truth.values.items()}


def other_tokens(truth: Truth) -> None:
    truth.tokens = {key: ids + 1 for key, ids in truth.tokens.items()}


def other_token(truth: Truth) -> None:
    truth.tokens["s1"][3] += 1


def renamed(truth: Truth) -> None:
    rename(truth, {key: f"other-{key}" for key in truth.tokens})


def disjoint(truth: Truth) -> None:
    renamed(truth)
    other_tokens(truth)


def reordered(truth: Truth) -> None:
    rename(truth, {key: key for key in truth.tokens})
    truth.tokens = dict(reversed(truth.tokens.items()))


def shifted(truth: Truth) -> None:
    truth.values[LOGPROB] = {key: value.roll(1, 0) for key, value in truth.values[LOGPROB].items()}


def shifted_tokens(truth: Truth) -> None:
    truth.tokens = {key: ids.roll(1) for key, ids in truth.tokens.items()}


def longer(truth: Truth) -> None:
    truth.tokens["s1"] = torch.cat((truth.tokens["s1"], torch.tensor([9])))
    for own in truth.values.values():
        own["s1"] = torch.cat((own["s1"], own["s1"][:1]))


def shorter(truth: Truth) -> None:
    truth.tokens["s1"] = truth.tokens["s1"][:-2]
    truth.values = {where: {**own, "s1": own["s1"][:-2]} for where, own in truth.values.items()}


def other_experts(truth: Truth) -> None:
    truth.values[(SiteKind.ROUTER_IDS, 0, FORWARD)]["s0"][2, 0] += 1


def other_loss(truth: Truth) -> None:
    truth.loss["s3"] += 0.25


def other_grad(truth: Truth) -> None:
    truth.grads["model.layers.1.w"][2, 3] += 0.5


def one_nan(truth: Truth) -> None:
    truth.values[MLP_OUT]["s1"][2, 5] = torch.nan


def other_width(truth: Truth) -> None:
    where = (SiteKind.LOGITS, None, FORWARD)
    truth.values[where] = {key: value[:, :8] for key, value in truth.values[where].items()}


def nothing(_: object) -> None:
    """No fault."""


OTHER_MODEL: dict[str, object] = {"model": {"type": "invented", "layers": 3}}
TP2 = Layout(tp=2)
DP2 = Layout(dp=2)
# What is done to the tensors of B, to its files, its layout, its manifest; verdict and words of the reason.
Fault = tuple[Callable[[Truth], None], Callable[[Path], None], Layout, dict[str, object], Verdict, str]
FAULTS: dict[str, Fault] = {
    "nothing": (nothing, nothing, Layout(), {}, Verdict.PASS, "all 20 sites agree within their limits, 20"),
    "samples in another order": (reordered, nothing, Layout(), {}, Verdict.PASS, "all"),
    "keys of another run": (renamed, nothing, Layout(), {}, Verdict.PASS, "all"),
    "disjoint": (disjoint, nothing, Layout(), {}, Verdict.VACUOUS, "no sample in common"),
    "empty": (nothing, remove_records, Layout(), {}, Verdict.VACUOUS, "B recorded nothing"),
    "same run": (nothing, nothing, Layout(), {"run_id": "a"}, Verdict.VACUOUS, "compared with itself"),
    "a token": (
        other_token,
        nothing,
        Layout(),
        {},
        Verdict.MISMATCH,
        "token ids differ at 1 positions, first sample 's1', position 3, token",
    ),
    "shifted values": (shifted, nothing, Layout(), {}, Verdict.MISMATCH, "first train/logprob: max_abs"),
    "shifted tokens": (shifted_tokens, nothing, Layout(), {}, Verdict.MISMATCH, "token ids differ"),
    "longer": (longer, nothing, Layout(), {}, Verdict.INCOMPLETE, "A: 17 rows of B are missing, at 17 sites"),
    "shorter": (shorter, nothing, Layout(), {}, Verdict.INCOMPLETE, "B: 34 rows of A are missing, at 17 sites"),
    "experts": (other_experts, nothing, Layout(), {}, Verdict.MISMATCH, "train/moe.topk_ids[0]: differing_fraction"),
    "loss": (other_loss, nothing, DP2, {}, Verdict.MISMATCH, "train/loss: max_abs 0.25"),
    "gradient": (other_grad, nothing, Layout(), {}, Verdict.MISMATCH, "train/grad[model.layers.1.w]: token_rel"),
    "NaN": (one_nan, nothing, Layout(), {}, Verdict.MISMATCH, "train/mlp.out[1]: 1 values that are not finite on one"),
    "width": (other_width, nothing, Layout(), {}, Verdict.MISMATCH, "train/logits: shapes differ: [16] against [8]"),
    "torn": (nothing, cut_line, Layout(), {}, Verdict.INCOMPLETE, "B: rank_00000.jsonl: its last line is cut off"),
    "torn and other": (shifted, cut_line, Layout(), {}, Verdict.MISMATCH, "train/logprob"),
    "no end": (nothing, lambda f: end_path(f, 0).unlink(), Layout(), {}, Verdict.INCOMPLETE, "B: rank 0 did not end"),
    "no rank": (nothing, lambda f: remove_rank(f, 1), TP2, {}, Verdict.INCOMPLETE, "B: rank 1 wrote nothing"),
    "no data rank": (other_loss, lambda f: remove_rank(f, 1), DP2, {}, Verdict.INCOMPLETE, "B: rank 1 wrote nothing"),
    "no end and less loss": (
        *(nothing, lose_a_loss, Layout(num_microbatches=2), {}),
        *(Verdict.INCOMPLETE, "B: rank 0 did not end"),
    ),
    "no site": (
        *(nothing, lambda f: drop_line(f, '"kind": "mlp.out", "layer": 1'), Layout(), {}),
        *(Verdict.INCOMPLETE, "B: 1 sites of its manifest are missing: mlp.out[1] forward"),
    ),
    "no part": (
        *(nothing, lambda f: drop_line(f, '"kind": "logits"', rank=1), TP2, {}),
        *(Verdict.INCOMPLETE, "B: train/logits: microbatch 0 of rank 0 lacks parts [1] of 2"),
    ),
    "no tokens": (
        *(nothing, lambda f: drop_line(f, '"tokens"'), Layout(), {}),
        *(Verdict.CORRUPT, "names the tokens 't0', of which there are none"),
    ),
    "digest": (nothing, lambda f: flip_byte(f, at=3000), Layout(), {}, Verdict.CORRUPT, "differ from those written"),
    "digest of tokens": (nothing, lambda f: flip_byte(f, at=9), Layout(), {}, Verdict.CORRUPT, "differ from those"),
    "digest and other": (shifted, lambda f: flip_byte(f, at=3000), Layout(), {}, Verdict.CORRUPT, "digest differs"),
    "no JSON": (nothing, spoil_line, Layout(), {}, Verdict.CORRUPT, "B: rank_00000.jsonl, line 1: no record"),
    "manifest": (
        *(nothing, lambda f: (f / "manifest.json").write_text("{"), Layout(), {}),
        *(Verdict.CORRUPT, "not JSON"),
    ),
    "layout of a manifest": (
        *(nothing, lambda f: set_json(f / "manifest.json", layout={"world": "x"}), Layout(), {}),
        *(Verdict.CORRUPT, "its manifest is damaged"),
    ),
    "sites of a manifest": (
        *(nothing, lambda f: set_json(f / "manifest.json", sites=[{"kind": "x"}]), Layout(), {}),
        *(Verdict.CORRUPT, "manifest: no site"),
    ),
    "model": (
        *(nothing, nothing, Layout(), OTHER_MODEL),
        *(Verdict.UNSUPPORTED, "the models differ: layers is 2 in A, 3 in B"),
    ),
    "version": (
        *(nothing, lambda f: set_json(f / "manifest.json", version=9), Layout(), {}),
        *(Verdict.UNSUPPORTED, "expected version 1 of the format of records of tensors, got 9"),
    ),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("right") / "a", whole_truth())


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_its_verdict(name: str, right: Path, tmp_path: Path) -> None:
    change, spoil, layout, manifest, verdict, words = FAULTS[name]
    truth = whole_truth()
    change(truth)
    folder = write_recording(tmp_path / "b", truth, layout, **manifest)
    spoil(folder)
    found = compare_folders(right, folder)
    assert (found.verdict, found.verdict.value == 0) == (verdict, verdict is Verdict.PASS), found.lines()
    assert words in found.outcome.text
    json.dumps(found.as_record(), allow_nan=False)


def test_a_folder_is_not_compared_with_itself(right: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(right)
    for other in (right, right / ".." / right.name, tmp_path / "link"):
        found = compare_folders(right, other)
        assert found.verdict is Verdict.VACUOUS and "with itself" in found.outcome.text
    with pytest.raises(UserError, match="not a folder of records"):
        compare_folders(right, tmp_path / "absent")


def pair(folder: Path, a: Truth, b: Truth, **manifest: object) -> RecordingComparison:
    return compare_folders(write_recording(folder / "a", a, **manifest), write_recording(folder / "b", b, **manifest))


def test_one_bad_token_in_a_thousand_does_not_hide(tmp_path: Path) -> None:
    logprobs = -torch.rand(1000)
    worse = logprobs.clone()
    worse[617] -= 0.9
    for precision in ("float32", "bfloat16", "float16"):
        found = pair(tmp_path / precision, one_site(logprobs), one_site(worse), precision=precision)
        assert found.verdict is Verdict.MISMATCH and found.divergence is not None
        assert found.divergence.result.worst[0].row.position == 617
        assert found.sites[0].measurement is not None and found.sites[0].measurement.metrics[Metric.MEAN_ABS] < 1e-3


def test_a_shifted_position_is_another_token(tmp_path: Path) -> None:
    truth = one_site(torch.rand(9))
    later = Truth(tokens={"s0": truth.tokens["s0"] + 1}, values={LOGPROB: {"s0": truth.values[LOGPROB]["s0"]}})
    found = pair(tmp_path, truth, later)
    assert found.verdict is Verdict.MISMATCH and "token ids differ at 9 positions" in found.outcome.text


def test_zeros_are_equal_and_nan_on_both_sides_is_not(tmp_path: Path) -> None:
    zeros, negative = torch.zeros(5), -torch.zeros(5)
    found = pair(tmp_path / "zeros", one_site(zeros), one_site(negative))
    told = found.sites[0].measurement
    assert found.verdict is Verdict.PASS and told is not None and not told.is_bit_equal and told.cosine == 1
    assert set(told.metrics.values()) == {0.0}
    bad = zeros.clone()
    bad[3] = torch.nan
    found = pair(tmp_path / "nan", one_site(bad), one_site(bad))
    assert found.verdict is Verdict.MISMATCH and "NaN on both sides (1 values)" in found.outcome.text
    assert [(place.side, place.row.position) for place in found.non_finite] == [("A", 3), ("B", 3)]
    bad[3] = -torch.inf
    assert pair(tmp_path / "inf", one_site(bad), one_site(bad)).verdict is Verdict.PASS
    found = pair(tmp_path / "inf against zero", one_site(bad), one_site(zeros))
    told = found.sites[0].measurement
    assert found.verdict is Verdict.MISMATCH and told is not None
    assert told.metrics[Metric.MAX_ABS] == told.metrics[Metric.RMS_REL] == torch.inf


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    truth = whole_truth()
    layout = Layout(tp=2, pp=2)
    a, b = write_recording(tmp_path / "a", truth), write_recording(tmp_path / "b", truth, layout)
    for rank, other in ((0, "ranks 0 and 1"), (2, "ranks 2 and 3")):
        folder = tmp_path / f"b{rank}"
        worse = deepcopy(truth)
        layer = 0 if rank == 0 else 1
        worse.values[(SiteKind.LAYER_OUT, layer, FORWARD)]["s0"][1] *= 1.001
        write_recording(folder, worse, layout)
        # One of the two is right.
        for suffix in ("jsonl", "bin", "end"):
            (folder / f"rank_{rank:05d}.{suffix}").write_bytes((b / f"rank_{rank:05d}.{suffix}").read_bytes())
        found = compare_folders(a, folder)
        assert found.verdict is Verdict.MISMATCH
        assert f"B: train/layer.out[{layer}]: replicas differ: {other}, 1 of 38 rows" in found.outcome.text


def test_a_token_that_pieces_of_other_tokens_hold_must_be_the_same(tmp_path: Path) -> None:
    """Two microbatches share a sample, and not their tables."""
    truth = whole_truth()
    a, b = write_recording(tmp_path / "a", truth), write_recording(tmp_path / "b", truth)
    again = whole_truth()
    again.tokens = {"s0": again.tokens["s0"]}
    again.values = {where: {"s0": own["s0"]} for where, own in again.values.items() if where == LOGPROB}
    for offset, verdict in ((0.0, Verdict.PASS), (0.01, Verdict.MISMATCH)):
        again.values[LOGPROB] = changed(again.values[LOGPROB], "s0", 2, offset)
        again.loss, again.grads = {}, {}
        extra = write_recording(tmp_path / f"extra{offset}", again)
        target = tmp_path / f"b{offset}"
        write_recording(target, truth, Layout(), layout={"world": 2, "dp": 2})
        for suffix in ("jsonl", "bin", "end"):
            (target / f"rank_00001.{suffix}").write_bytes((extra / f"rank_00000.{suffix}").read_bytes())
        lines_path(target, 0).write_text(lines_path(b, 0).read_text())
        found = compare_folders(a, target)
        if verdict is Verdict.PASS:
            assert "no loss of data ranks [1]" in found.outcome.text and found.first is None
        else:
            assert found.verdict is verdict
            assert "ranks 0 and 1 hold the same token, first sample 's0'" in found.outcome.text


def test_samples_of_equal_tokens_are_not_guessed(tmp_path: Path) -> None:
    truth, other = whole_truth(), whole_truth()
    for each in (truth, other):
        each.tokens["s1"] = each.tokens["s0"].clone()
        each.values = {where: {**own, "s1": own["s1"][:5]} for where, own in each.values.items()}
    renamed(other)
    found = pair(tmp_path, truth, other)
    assert found.verdict is Verdict.INCOMPLETE and found.first is None
    (note,) = found.notes
    assert "matched by their tokens; 2 of 4 samples of B have no partner" in note


def test_what_was_not_asked_for_is_a_note(tmp_path: Path) -> None:
    truth, less = whole_truth(), whole_truth()
    less.values = {where: own for where, own in less.values.items() if where[0] is not SiteKind.ATTN_Q}
    a = write_recording(tmp_path / "a", truth)
    for name, manifest, verdict, words in (
        ("asked", {}, Verdict.INCOMPLETE, ""),
        ("not asked", {"selector": "layer.*, l*, embed, moe.*, mlp.*, grad"}, Verdict.PASS, "B was not asked for it"),
        ("cannot", {"unobserved": {"attn.q": "fused"}}, Verdict.PASS, "B cannot give attn.q: fused"),
        ("cannot in words", {"unobserved": {"attn.q in all layers": "fused"}}, Verdict.PASS, "where B cannot give it"),
    ):
        found = compare_folders(a, write_recording(tmp_path / name, less, **manifest))
        assert found.verdict is verdict, (name, found.lines())
        assert any(words in note for note in found.notes) or not words
    found = compare_folders(write_recording(tmp_path / "c", less), a)
    assert found.outcome.text == "A: train/attn.q[0] is missing, B has it"


def test_recomputed_passes_are_compared_with_each_other_only(tmp_path: Path) -> None:
    def recording(name: str, *, offset: float | None) -> Path:
        folder = write_recording(tmp_path / name, one_site(torch.ones(3)), layout={"world": 2, "dp": 2})
        with closing(RecordWriter(folder, rank=1)) as writer:
            if offset is not None:
                place = RecordPlace(kind=SiteKind.LAYER_OUT, layer=0, phase="train", is_recomputed=True)
                writer.tensor(place, torch.ones(2, 2) + offset, tokens=None)
        return folder

    a, b, without = (recording(name, offset=value) for name, value in (("a", 0.0), ("b", 0.5), ("none", None)))
    assert compare_folders(a, recording("c", offset=0.0)).verdict is Verdict.PASS
    found = compare_folders(a, b)
    assert found.verdict is Verdict.MISMATCH and "train/layer.out[0] recomputed" in found.outcome.text
    found = compare_folders(a, without)
    assert found.verdict is Verdict.PASS
    assert "in A only, where B recomputed nothing: train/layer.out[0] recomputed" in found.notes


def test_a_damaged_record_counts_even_where_it_is_compared_with_nothing(tmp_path: Path) -> None:
    more, less = whole_truth(), whole_truth()
    more.values = {LOGPROB: more.values[LOGPROB], (SiteKind.EMBED, None, FORWARD): more.values[LOGPROB]}
    less.values = {LOGPROB: less.values[LOGPROB]}
    a = write_recording(tmp_path / "a", more)
    b = write_recording(tmp_path / "b", less, selector="logprob, loss, grad")
    assert compare_folders(a, b).verdict is Verdict.PASS
    heads = [json.loads(line) for line in lines_path(a, 0).read_text().splitlines()]
    (embed,) = [head for head in heads if head.get("place", {}).get("kind") == "embed"]
    flip_byte(a, at=embed["offset"])
    assert compare_folders(a, b).verdict is Verdict.CORRUPT


def test_the_first_divergence_and_the_largest_contribution_name_the_layer(tmp_path: Path) -> None:
    truth = whole_truth()
    drifted = deepcopy(truth)
    grown = False
    for where, own in drifted.values.items():
        grown = grown or where == (SiteKind.MLP_OUT, 0, FORWARD)
        if where[0] is SiteKind.ROUTER_IDS or where[2] is BACKWARD:
            continue
        # Rounding at first, a fault in the MLP of layer 0, which what follows carries along.
        factor = 1 + (3e-2 if grown else 1e-6)
        drifted.values[where] = {key: value * factor for key, value in own.items()}
    found = pair(tmp_path, truth, drifted)
    assert found.divergence is not None and found.contribution is not None and found.contribution.start is not None
    assert found.divergence.result.site.label == "train/mlp.out[0]"
    assert found.divergence.after is not None and found.divergence.after.label == "train/moe.topk_ids[0]"
    assert found.contribution.start.label == "train/mlp.in[0]"
    assert found.contribution.end.label == "train/mlp.out[0]"
    assert found.contribution.added == pytest.approx(3e-2, rel=1e-3)
    assert "first divergence: train/mlp.out[0]; train/moe.topk_ids[0] before it agrees" in found.lines()


def test_a_backward_pass_runs_the_other_way(tmp_path: Path) -> None:
    truth = whole_truth()
    worse = deepcopy(truth)
    for layer in (0, 1):
        where = (SiteKind.LAYER_OUT, layer, BACKWARD)
        worse.values[where] = {key: value * 1.5 for key, value in worse.values[where].items()}
    worse.values[(SiteKind.LAYER_OUT, 0, BACKWARD)]["s0"] *= 4
    found = pair(tmp_path, truth, worse)
    assert found.divergence is not None and found.divergence.result.site.label == "train/layer.out[1] backward"
    assert found.contribution is not None and found.contribution.start is not None
    labels = (found.contribution.start.label, found.contribution.end.label)
    assert labels == ("train/layer.out[1] backward", "train/layer.out[0] backward")


@pytest.mark.parametrize("way", [FORWARD, BACKWARD])
def test_a_block_of_which_every_part_adds_something_is_named_whole(way: Direction, tmp_path: Path) -> None:
    kinds = [SiteKind.LAYER_IN, SiteKind.ATTN_OUT, SiteKind.LAYER_OUT]
    ordered = kinds if way is FORWARD else kinds[::-1]
    truth, worse = one_site(torch.ones(4)), one_site(torch.ones(4))
    own = {"s0": torch.ones(4, 2)}
    truth.values = {(kind, 0, way): own for kind in ordered}
    worse.values = {(kind, 0, way): {"s0": own["s0"] * 1.01**at} for at, kind in enumerate(ordered)}
    found = pair(tmp_path, truth, worse)
    assert found.contribution is not None and found.contribution.start is not None
    assert [found.contribution.start.kind, found.contribution.end.kind] == [ordered[0], ordered[-1]]


def test_a_difference_before_the_first_site_has_no_start(tmp_path: Path) -> None:
    found = pair(tmp_path, one_site(torch.ones(4)), one_site(torch.ones(4) * 2))
    assert found.contribution is not None and found.contribution.start is None
    assert found.contribution.text.startswith("before train/logprob: rms_rel from 0 to 1")


def test_the_producer_of_nan_is_named_per_side(tmp_path: Path) -> None:
    truth = whole_truth()
    a, b = deepcopy(truth), deepcopy(truth)
    a.values[(SiteKind.LAYER_OUT, 1, FORWARD)]["s2"][6, 0] = torch.nan
    a.values[LOGPROB]["s0"][0] = torch.nan
    b.values[(SiteKind.ATTN_Q, 0, FORWARD)]["s1"][2, 3] = torch.inf
    found = pair(tmp_path, a, b)
    told = [(place.side, place.site.label, place.row.key, place.row.position) for place in found.non_finite]
    assert told == [("A", "train/layer.out[1]", "s2", 6), ("B", "train/attn.q[0]", "s1", 2)]
    assert [(place.num_nan, place.num_inf) for place in found.non_finite] == [(1, 0), (0, 1)]


def test_passes_come_in_the_order_of_a_step(tmp_path: Path) -> None:
    def recording(name: str, offset: float) -> Path:
        folder = tmp_path / name
        write_recording(
            folder, one_site(torch.ones(3)), layout={"world": 2, "dp": 1}, phases=("train", "prev_logprobs")
        )
        with closing(RecordWriter(folder, rank=1)) as writer:
            for phase, update in (("train", 1), ("prev_logprobs", 0)):
                place = RecordPlace(kind=SiteKind.LAYER_OUT, layer=0, phase=phase, update=update)
                writer.tensor(place, torch.ones(2, 2) + offset, tokens=None)
        return folder

    found = compare_folders(recording("a", 0.0), recording("b", 1.0))
    assert [result.site.label for result in found.sites] == [
        *("prev_logprobs/layer.out[0]", "train/logprob", "train#1/layer.out[0]")
    ]
    assert found.divergence is not None and found.divergence.result.site.phase == "prev_logprobs"


def test_recomputed_sites_come_after_all_others_of_an_update() -> None:
    ordered = [
        ComparedSite(phase="prev_logprobs", kind=SiteKind.LOGPROB),
        ComparedSite(phase="reference_logprobs", kind=SiteKind.EMBED),
        ComparedSite(phase="train", kind=SiteKind.LOGPROB),
        ComparedSite(phase="train", kind=SiteKind.LAYER_OUT, layer=1, direction=BACKWARD),
        ComparedSite(phase="train", kind=SiteKind.LAYER_IN, layer=0, is_recomputed=True),
        ComparedSite(phase="train", kind=SiteKind.EMBED, update=1),
        ComparedSite(phase="of somebody else", kind=SiteKind.EMBED),
    ]
    assert sorted(reversed(ordered), key=lambda site: site.order) == ordered


def test_the_table_shows_what_fails_and_all_on_demand(tmp_path: Path) -> None:
    truth = whole_truth()
    worse = deepcopy(truth)
    worse.values[LOGPROB] = changed(worse.values[LOGPROB], "s0", 1, 0.5)
    found = pair(tmp_path, truth, worse)
    lines = found.lines()
    assert sum("train/" in line and line.endswith("ok") for line in lines) == 0
    assert any(line.startswith("train/logprob ") and "max_abs 0.5 > 0.0001" in line for line in lines)
    table = [line for line in found.lines(is_all=True) if line.startswith("train/")]
    assert len(table) == 20 and len({line.index("e+") if "e+" in line else 0 for line in table[:3]}) == 1
    assert lines[-1] == "20 sites compared, 1 fail, 19 are equal bit by bit"


def test_texts_of_tokens_come_from_the_tokenizer_of_the_recording(tmp_path: Path) -> None:
    from nemo_rl.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(["some words"])
    tokenizer.save_pretrained(str(tmp_path / "a tokenizer's folder"))
    truth = one_site(torch.zeros(3))
    truth.tokens["s0"] = torch.tensor([*tokenizer("wor")["input_ids"][:1], 10**6, 1])
    worse = deepcopy(truth)
    worse.values[LOGPROB] = {"s0": torch.ones(3)}
    found = pair(tmp_path, truth, worse, tokenizer=str(tmp_path / "a tokenizer's folder"))
    assert found.texts[int(truth.tokens["s0"][0])].strip() and 10**6 not in found.texts
    for name in ("absent", "a"):
        silent = replace(found, texts={})
        other = pair(tmp_path / f"to {name}", truth, worse, tokenizer=str(tmp_path / name))
        assert not silent.texts and not other.texts and "no texts of tokens" in other.notes[0]
