"""The page of a comparison: well-formed, complete, and safe whatever the recordings hold."""

from __future__ import annotations

from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from nemo_rl.records.sites import SiteKind
from nemo_rl_tools.compare.comparison import RecordingComparison
from nemo_rl_tools.compare.folders import compare_folders
from nemo_rl_tools.compare.page import page_text, write_page
from nemo_rl_tools.verdict import Comparison, Finding, SiteCheck, Verdict
from tests.helpers.probe_recordings import FORWARD, Layout, Truth, one_site, whole_truth, write_recording

HOSTILE = "</title></style><script>alert('1')</script><img src=x onerror=\"alert(1)\"> & \u202e\ud800\x1b[31m"


class Reader(HTMLParser):
    """Fails on elements that are not closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def differing(folder: Path, **manifest: object) -> RecordingComparison:
    truth = whole_truth()
    worse = deepcopy(truth)
    worse.values[(SiteKind.MLP_OUT, 1, FORWARD)]["s2"][3] += 1
    worse.values[(SiteKind.ATTN_Q, 1, FORWARD)]["s2"][3] = torch.nan
    a = write_recording(folder / "a", truth, **manifest)
    return compare_folders(a, write_recording(folder / "b", worse, Layout(tp=2), engine="megatron"))


def test_the_page_holds_everything_and_needs_nothing(tmp_path: Path) -> None:
    page = read(write_page(tmp_path / "out 'quoted' \"twice\"" / "page.html", differing(tmp_path)).read_text())
    for words in ("MISMATCH", "train/mlp.out[1]", "token_rel, train, update 0, forward", "sample 's2', position 3"):
        assert words in page.text
    assert "first divergence: train/attn.q[1]" in page.text and "not finite, B: train/attn.q[1]" in page.text
    assert {"dtensor", "megatron"} <= {word.strip('"') for word in page.text.replace('"', ' " ').split()}
    assert page.tags.count("polyline") == 7 and page.tags.count("rect") == 18 * 9
    assert ("class", "differs") in page.attributes and ("stroke", "#d00000") in page.attributes
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href") or name.startswith("on")]


def test_every_comparison_has_a_page_with_what_its_text_says(tmp_path: Path) -> None:
    found = Comparison(
        title=f"replay of {HOSTILE}",
        sites=[
            SiteCheck(name="loss", step=3, a="1", b="2", agrees=False, difference="at most 1"),
            SiteCheck(name="weights", step=3, a="x", b="x", agrees=True),
        ],
        findings=[Finding(verdict=Verdict.INCOMPLETE, text="one run alone has step 4")],
        inexact=["one process in place of 2"],
        what_if=[],
        notes=["the limits are those of float32"],
        recorded=differing(tmp_path),
    )
    page = read(page_text(found))
    for words in (
        "MISMATCH",
        "loss of step 3",
        "1 -> 2; at most 1",
        "one run alone has step 4",
        "one process in place",
    ):
        assert words in page.text
    assert "the limits are those of float32" in page.text and "first divergence: train/attn.q[1]" in page.text
    rows = [value for name, value in page.attributes if name == "class" and value in ("fail", "verdict mismatch")]
    assert rows[:2] == ["verdict mismatch", "fail"] and rows.count("verdict mismatch") == 2
    assert "script" not in page.tags and "img" not in page.tags


def test_nothing_of_a_recording_becomes_markup(tmp_path: Path) -> None:
    truth = one_site(torch.ones(3), key=HOSTILE)
    worse = deepcopy(truth)
    worse.values = {where: {key: value * 2 for key, value in own.items()} for where, own in worse.values.items()}
    hostile = {"versions": {HOSTILE: HOSTILE}, "weights": HOSTILE, "tokenizer": HOSTILE, "unobserved": {HOSTILE: "x"}}
    a = write_recording(tmp_path / "<script>a", truth, **hostile)
    b = write_recording(tmp_path / "b\"><script>'", worse, engine=HOSTILE)
    found = compare_folders(a, b)
    assert all(line.isprintable() for line in found.lines(is_all=True))
    page = read(write_page(tmp_path / "page.html", found).read_text())
    assert "script" not in page.tags and "img" not in page.tags
    assert page.text.count("<script>alert(") >= 6
    assert {name for name, _ in page.attributes}.isdisjoint({"onerror", "src"})


def test_pages_of_every_end(tmp_path: Path) -> None:
    """Without sites, with rows of one side only, with nothing but gradients, with values that are all zero."""
    truth = whole_truth()
    a = write_recording(tmp_path / "a", truth)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text("{")
    only_grads = [write_recording(tmp_path / f"grads{i}", Truth(tokens={}, grads=truth.grads)) for i in (0, 1)]
    zeros = [write_recording(tmp_path / f"zeros{i}", one_site(torch.zeros(2))) for i in (0, 1)]
    empty = [write_recording(tmp_path / f"empty{i}", one_site(torch.zeros(2, 0))) for i in (0, 1)]
    for pair, words in (
        ((a, a), "VACUOUS"),
        ((a, tmp_path / "c"), "CORRUPT"),
        (only_grads, "PASS"),
        (zeros, "PASS"),
        (empty, "nothing to measure"),
    ):
        assert words in read(page_text(compare_folders(*pair))).text


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError):
        write_page(tmp_path / "file" / "page.html", differing(tmp_path))
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 3
