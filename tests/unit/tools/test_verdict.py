"""The one rule for verdicts over two sides, and the report that every comparison prints."""

from __future__ import annotations

import json

import pytest

from nemo_rl_tools.verdict import Comparison, Finding, SiteCheck, Verdict


def site(name: str, agrees: bool | None, difference: str = "") -> SiteCheck:
    return SiteCheck(name=name, step=2, a="1", b="1" if agrees else "2", agrees=agrees, difference=difference)


RIGHT, WITHIN, WRONG, UNKNOWN = (
    *(site("a", True), site("b", True, "at most 1e-9"), site("c", False, "at most 0.5"), site("d", None)),
)
MISSING = Finding(verdict=Verdict.INCOMPLETE, text="rank 1 wrote nothing")
DAMAGED = Finding(verdict=Verdict.CORRUPT, text="a digest differs")


@pytest.mark.parametrize(
    ("sites", "findings", "verdict", "text"),
    [
        ([RIGHT, WITHIN], [], Verdict.PASS, "all 2 sites agree, 1 of them within their limits"),
        ([RIGHT, WRONG, WRONG], [], Verdict.MISMATCH, "2 of 3 sites differ, first c of step 2: at most 0.5"),
        ([RIGHT, UNKNOWN], [], Verdict.INCOMPLETE, "1 of 2 sites have nothing to be compared with"),
        ([UNKNOWN, WRONG], [], Verdict.MISMATCH, "first c of step 2"),
        ([RIGHT], [MISSING], Verdict.INCOMPLETE, "rank 1 wrote nothing"),
        ([WRONG], [MISSING], Verdict.MISMATCH, "first c"),
        ([WRONG], [MISSING, DAMAGED], Verdict.CORRUPT, "a digest differs"),
    ],
)
def test_the_gravest_reason_is_the_verdict(sites, findings, verdict: Verdict, text: str) -> None:
    found = Comparison(title="t", sites=sites, findings=findings)
    assert found.verdict is verdict and text in found.outcome.text
    assert found.lines()[0] == f"{verdict.name}: {found.outcome.text}"
    told = json.loads(json.dumps(found.as_record()))
    assert (told["verdict"], told["exit_code"]) == (verdict.label, verdict.value)


@pytest.mark.parametrize("sites", [[], [UNKNOWN]])
def test_nothing_compared_is_no_pass(sites) -> None:
    assert Comparison(title="t", sites=sites).verdict is Verdict.VACUOUS


def test_with_another_setting_differences_are_the_answer() -> None:
    found = Comparison(title="t", sites=[RIGHT, WRONG], what_if=("lr=1",))
    assert found.verdict is Verdict.PASS and found.first is WRONG and "what if: lr=1" in found.lines()
    assert Comparison(title="t", sites=[UNKNOWN], what_if=("lr=1",)).verdict is Verdict.VACUOUS


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [([WRONG], Verdict.MISMATCH), ([RIGHT], Verdict.PASS), ([], Verdict.INCOMPLETE), ([UNKNOWN], Verdict.INCOMPLETE)],
)
def test_records_that_differ_count_and_records_that_say_nothing_prove_nothing(theirs, verdict: Verdict) -> None:
    found = Comparison(title="t", sites=[RIGHT], recorded=Comparison(title="r", sites=theirs))
    assert found.verdict is verdict
    assert Comparison(title="t", sites=[WRONG], recorded=found).verdict is Verdict.MISMATCH


def test_the_table_is_aligned_and_of_many_sites_those_that_differ_are_shown() -> None:
    lines = Comparison(title="t", sites=[RIGHT, WRONG, UNKNOWN, site("loss", True)]).lines()
    assert lines[2:6] == [
        "site              result  A -> B",
        "a of step 2        equal  1",
        "c of step 2      DIFFERS  1 -> 2; at most 0.5",
        "d of step 2     not kept  1 -> 2",
    ]
    many = Comparison(title="t", sites=[RIGHT] * 99 + [WRONG])
    assert len(many.lines()) == 5 and len(many.lines(is_all=True)) == 104


def test_nothing_that_a_side_holds_can_write_on_the_terminal() -> None:
    hostile = SiteCheck(name="\x1b[2J", a="\x07", b="\u202e", agrees=False, difference="\x1b]0;t\x07")
    assert all(line.isprintable() for line in Comparison(title="\x1b", sites=[hostile], notes=["\x1b"]).lines())
