"""`nemo-rl inspect RUN tracer`: what a recording holds, for people and machines."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from nemo_rl_tools.tracer.store import StreamWriter, stream_files
from tests.helpers.tracer_recordings import RUN_MESSAGE, small_recording, stats_frame


def test_the_planted_layer_is_named_as_the_first_that_is_not_finite(tmp_path: Path, output_of) -> None:
    small_recording(tmp_path / "logs" / "tracer", num_steps=5, num_layers=4, bad=(2, 3))
    shown = output_of("inspect", tmp_path / "logs", "tracer")
    assert "NaN, inf  step 3, train, mlp.out[2]: 2 values are NaN or infinite; first seen there" in shown
    assert "state     ended (completed)" in shown and "steps     1..5, 45 frames" in shown
    assert "moe.logits: the model has no router" in shown and "step 5: look here" in shown
    (row,) = (line for line in shown.splitlines() if "tiles(8, mean)" in line)
    assert row.endswith("1..5; train")
    record = json.loads(output_of("inspect", tmp_path / "logs", "tracer", "--json"))
    (only,) = record["runs"]
    assert only["first_non_finite"]["site"] == {"kind": "mlp.out", "layer": 2, "direction": "forward"}
    assert (only["state"], only["steps"], only["missing"], only["dropped"]) == ("ended", [1, 2, 3, 4, 5], {}, 0)
    (tiles,) = (site for site in only["sites"] if site["reducer"] == "tiles(8, mean)")
    assert (tiles["kind"], tiles["frames"], tiles["layers"]) == ("layer.out", 5, [0])


def test_what_the_hub_has_seen_counts_where_its_frames_have_fallen_out(tmp_path: Path, output_of) -> None:
    first = {"step": 1, "phase": "train", "text": "step 1, train, attn.out[0]: 3 values"}
    with StreamWriter(tmp_path, 1 << 20) as writer:
        writer.message({**RUN_MESSAGE, "first_non_finite": first})
        writer.frame(stats_frame(7, [float("nan")]).encode())
    assert "NaN, inf  step 1, train, attn.out[0]: 3 values\n" in output_of("inspect", tmp_path, "tracer")


def test_dropped_frames_missing_ranks_and_damage_are_told(tmp_path: Path, output_of) -> None:
    with StreamWriter(tmp_path, 1 << 20) as writer:
        writer.message(RUN_MESSAGE)
        for layer in range(3):
            writer.frame(stats_frame(4, layer=layer, dropped=5, missing=(1, 3)).encode())
        for _ in range(2):
            writer.message({"type": "problem", "text": "rank 3: its connection ended"})
        writer.frame(stats_frame(5, dropped=2).encode())
    (path,) = stream_files(tmp_path).values()
    path.write_bytes(path.read_bytes()[:-1])
    shown = output_of("inspect", tmp_path, "tracer")
    assert "dropped   5 frames by ranks, most in step 4, train" in shown
    assert "missing   rank 1 in 3 frames" in shown and "missing   rank 3 in 3 frames" in shown
    assert shown.count("\n  rank 3: its connection ended\n") == 1
    assert "0 damaged stretches, 1 torn ends" in shown
    assert "state     running (no end is recorded)" in shown


def test_numbers_of_a_site_over_steps(tmp_path: Path, output_of) -> None:
    small_recording(tmp_path / "r", num_steps=3, num_layers=1, bad=(0, 3))
    lines = output_of("inspect", tmp_path / "r", "tracer", "--site", "mlp.out[0]").splitlines()
    assert lines[0].split() == ["step", "phase", "mean", "rms", "min", "max", "NaN", "inf"]
    assert lines[2].split() == ["2", "train", "3", "3.697", "1", "6", "0", "0"]
    assert lines[3].split() == ["3", "train", "1", "1", "1", "1", "1", "1"]
    assert "3 rows" in output_of(
        "inspect", tmp_path / "r", "tracer", "--site", "mlp.out[0]", "--csv", tmp_path / "out.csv"
    )
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert float(rows[1]["rms"]) == pytest.approx((41 / 3) ** 0.5)
    record = json.loads(output_of("inspect", tmp_path / "r", "tracer", "--site", "mlp.out[0]", "--json"))
    assert record[2]["nan"] == 1 and record[2]["site"] == "mlp.out[0]"


def test_what_cannot_be_shown_ends_with_exit_code_2(tmp_path: Path, refusal_of) -> None:
    small_recording(tmp_path / "r", num_layers=1)
    with StreamWriter(tmp_path / "torn", 1 << 20):
        pass
    (tmp_path / "torn" / "stream_00001.nrt").write_bytes(b"NRTE")
    assert "expected a recording" in refusal_of("inspect", tmp_path, "tracer")
    assert "no such folder" in refusal_of("inspect", tmp_path / "nowhere", "tracer")
    assert "without one whole entry" in refusal_of("inspect", tmp_path / "torn", "tracer")
    assert "it has mlp.out[0]" in refusal_of("inspect", tmp_path / "r", "tracer", "--site", "mlp.aut[0]")
    assert "expected --site, too" in refusal_of("inspect", tmp_path / "r", "tracer", "--csv", "x.csv")


def test_texts_of_a_run_cannot_write_on_the_terminal(tmp_path: Path, output_of) -> None:
    with StreamWriter(tmp_path, 1 << 20) as writer:
        writer.message({**RUN_MESSAGE, "name": "\x1b[2Jevil", "model": "\x1b]0;title\x07"})
        writer.message({"type": "mark", "label": "\x1b[31mred", "step": 1})
    assert "\x1b" not in output_of("inspect", tmp_path, "tracer")
