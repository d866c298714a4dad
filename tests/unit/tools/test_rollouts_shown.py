"""Readable rollouts on a terminal and as text of a page: what is shown, widths, hostile texts, files of any age."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.cells import cell_len

from nemo_rl.errors import UserError
from nemo_rl.utils.rollout_file import rollout_path
from nemo_rl_tools.rollouts.choice import choose_rollouts
from nemo_rl_tools.rollouts.page import page_text
from nemo_rl_tools.rollouts.row import Grade, grade_of, pieces_of, read_rows
from nemo_rl_tools.rollouts.text import rollout_lines
from tests.helpers.rollout_rows import HOSTILE, earlier_row, token_row, unscored_row, usual_rows, write_rows


def lines(folder: Path, *rows: dict[str, object], width: int = 80) -> list[str]:
    """What the rows look like."""
    shown = choose_rollouts(write_rows(folder, 3, rows), step=None, group=None, limit=None)
    return [line.plain for line in rollout_lines(shown, width=width)]


def test_marks_stand_under_the_tokens_that_are_apart_or_not_trained(tmp_path: Path) -> None:
    row = token_row("aa_g0", ["1", " 2", " 33", " tool", "."], apart={1: 0.12, 2: -0.9, 4: float("nan")}, masked=[3])
    shown = lines(tmp_path, row)
    assert shown[-2:] == ["    1 2 33 tool.", "     ~~^^^-----^"]
    first = shown.index("") + 1
    assert shown[first : first + 4] == [
        "group aa: 1 row, reward 1, ended by stop 1",
        "  |rollout - trainer| mean nan, max 0.9, 2 of 4 tokens far",
        "  prompt",
        "    Sort: 3 1 2",
    ]
    assert shown[first + 4] == "  aa_g0: reward 1, correct 1, format none, advantage +0.5, stop, 5 tokens,"


@pytest.mark.parametrize(
    ("difference", "grade"),
    [
        (None, None),
        (0.05, Grade.CLOSE),
        (-0.051, Grade.APART),
        (0.5, Grade.APART),
        (-0.51, Grade.FAR),
        (float("nan"), Grade.FAR),
        (float("inf"), Grade.FAR),
    ],
)
def test_a_difference_has_one_of_three_grades(difference: float | None, grade: Grade | None) -> None:
    assert grade_of(difference) is grade


@pytest.mark.parametrize("width", [20, 33, 80, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    wide = token_row("w_g0", ["\u4e2d\u6587 text", "e\u0301", "\u2764\ufe0f", HOSTILE] * 20, apart={2: 9.0})
    named = token_row("k" * 90 + "_g0", ["a"], components={"n" * 70: 0.5, "\u4e2d" * 40: None})
    shown = lines(tmp_path, *usual_rows(), wide, named, width=width)
    assert max(map(cell_len, shown)) <= width
    assert max(map(cell_len, shown)) > width - 2 or width == 200


def test_a_wide_character_has_marks_under_both_of_its_cells(tmp_path: Path) -> None:
    shown = lines(tmp_path, token_row("w_g0", ["\u4e2d", "\u6587", "e\u0301", "x"], apart={1: 0.1, 3: 0.7}))
    assert shown[-2:] == ["    \u4e2d\u6587e\u0301x", "      ~~ ^"]


def test_tokens_of_one_character_are_as_far_apart_as_the_worst(tmp_path: Path) -> None:
    row = token_row("w_g0", ["a", "", "", "\U0001f600", "b"], apart={1: 0.8, 3: 0.1})
    (read,) = read_rows(rollout_path(write_rows(tmp_path, 1, [row]), 1))
    assert read.tokens is not None
    pieces = [(piece.text, piece.grade, piece.tokens) for piece in pieces_of(read.tokens)]
    assert pieces == [("a", Grade.CLOSE, (2,)), ("\U0001f600", Grade.FAR, (3, 4, 5)), ("b", Grade.CLOSE, (6,))]


def test_nothing_that_a_response_holds_reaches_a_terminal_or_a_page_as_it_is(tmp_path: Path) -> None:
    hostile = token_row(
        HOSTILE, [HOSTILE, "</pre><script>alert(1)</script>"],
        prompt=[HOSTILE], components={HOSTILE: 1.0}, finish_reason=HOSTILE, group=HOSTILE,
    )  # fmt: skip
    rows = [hostile, unscored_row("b_g0", ["x"], why=HOSTILE), {**earlier_row("c_g0", HOSTILE), "prompt": HOSTILE}]
    shown = lines(tmp_path, *rows)
    assert all(line.isprintable() for line in shown)
    assert sum("\\x1b[2J" in line for line in shown) >= 6
    page = page_text(choose_rollouts(tmp_path, step=3, group=None, limit=None))
    assert "<img" not in page and page.count("<script") == 1 and "http:" not in page and "https:" not in page
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(page)
    assert "&lt;img src=x onerror=&quot;" in page


def test_why_there_is_nothing_to_compare_with_is_said_for_row_and_group(tmp_path: Path) -> None:
    shown = lines(tmp_path, unscored_row("b_g0", ["x"], why="the run has no such pass"))
    assert shown.count("    no log-probabilities of the trainer: the run has no such pass") == 1
    assert shown.count("  no log-probabilities of the trainer: the run has no such pass") == 1
    assert shown[-1] == "    x", "and nothing is marked"


def test_a_file_of_an_earlier_version_is_shown_without_tokens(tmp_path: Path) -> None:
    shown = lines(tmp_path, earlier_row("old_g7", "3 2\n1"), earlier_row("old_g8", ""))
    assert shown[shown.index("") + 1] == "group old: 2 rows, reward 0.25, ended by length 2"
    assert "    3 2\\n" in shown and "    1" in shown and "    (empty)" in shown
    assert "trainer: a file of an earlier version" in "\n".join(shown)


def test_a_row_that_is_left_out_of_the_update_is_dim_and_says_so(tmp_path: Path) -> None:
    shown = choose_rollouts(
        write_rows(tmp_path, 3, [token_row("a_g0", ["x", "y"], sample_mask=0.0)]), step=None, group=None, limit=None
    )
    found = list(rollout_lines(shown, width=200))
    assert found[-3].plain.endswith("weights 4, not trained (sample mask 0)")
    assert all("dim" in str(span.style) for span in found[-1].spans) and found[-1].spans
    assert '<article class="out" ' in page_text(shown)


@pytest.mark.parametrize(
    ("rows", "times"),
    [
        ([unscored_row(key, ["x"], why="no pass") for key in ("a_g0", "a_g1", "b_g0", "b_g1")], 1),
        ([earlier_row(key, "x") for key in ("a_g0", "b_g0", "c_g0")], 1),
        ([unscored_row(key, ["x"], why="no pass") for key in ("a_g0", "a_g1")] + [token_row("b_g0", ["x"])], 1),
        ([unscored_row("a_g0", ["x"], why="no pass"), token_row("a_g1", ["x"])], 1),
    ],
)
def test_a_page_says_once_why_there_are_no_differences(tmp_path, rows, times):
    page = page_text(choose_rollouts(write_rows(tmp_path, 3, rows), step=None, group=None, limit=None))
    assert page.count("no log-probabilities of the trainer") == times


def test_a_page_of_several_steps_sums_up_what_it_shows(tmp_path: Path) -> None:
    write_rows(tmp_path, 3, [token_row("a_g0", ["x"]), token_row("a_g1", ["x"])])
    wrong = {"reward": 0.25, "components": {"correct": 0.0}, "finish_reason": "length"}
    write_rows(tmp_path, 7, [token_row("a_g0", ["x"], **wrong), token_row("a_g1", ["x"])])
    page = page_text(choose_rollouts(tmp_path, step=None, group=None, limit=None, every_step=True))
    assert "Rows: 4, mean reward 0.8125, right 3, truncated 1. Groups: 2, with equal rewards 1." in page
    assert '<option value="3">' in page and '<option value="7">' in page and "Group a of step 7" in page
    assert page.count('data-answer="wrong"') == 1 and page.count('data-step="7"') == 1


def test_rows_of_a_group_come_together_and_the_limit_counts_rows(tmp_path: Path) -> None:
    rows = [token_row(key, ["x"]) for key in ("a_g0", "b_g0", "a_g1", "b_g1")]
    run = write_rows(tmp_path, 3, rows)
    whole = choose_rollouts(run, step=None, group=None, limit=None)
    assert [[row.key for row in group.rows] for group in whole.groups] == [["a_g0", "a_g1"], ["b_g0", "b_g1"]]
    cut = choose_rollouts(run, step=None, group=None, limit=3)
    assert [[row.key for row in group.rows] for group in cut.groups] == [["a_g0", "a_g1"], ["b_g0"]]
    assert cut.groups[1].summary()[0] == "1 of 2 rows" and (cut.num_shown, cut.num_rows) == (3, 4)
    only = choose_rollouts(run, step=3, group="b", limit=None)
    assert [group.uid for group in only.groups] == ["b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got an empty file"),
        ("{", "line 1: expected a row of readable rollouts: JSONDecodeError"),
        ("[1]", "line 1: expected a row"),
        ('{"key": "a_g0", "prompt": "p", "response": "r"}', "line 1: expected a row of readable rollouts: KeyError"),
        (json.dumps(token_row("a_g0", ["x"], token_mask=[1])), r"ValueError: expected token columns of one length"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_rows_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = rollout_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(path) in str(caught.value) and said in str(caught.value)


def conversation_row() -> dict[str, object]:
    """Return a row of a conversation with a failed call, as a run writes it."""
    first = {
        "text": "I ask",
        "num_tokens": 9,
        "truncated": False,
        "calls": [{"name": "add", "arguments": {"a": 1}}],
        "results": [{"text": "no <b>b</b>", "error": "bad_arguments", "seconds": 0.1}],
        "messages": [{"role": "tool", "content": "no <b>b</b>", "calls": [], "name": "add"}],
        "reward": 0.0,
        "engine": 1,
        "cached_tokens": 12,
        "waited_s": 0.5,
        "sampled_s": 2.0,
        "tool_s": 1.5,
    }
    second = {"text": "3", "num_tokens": 2, "truncated": True, "reward": 1.0, "engine": 1, "sampled_s": 1.0}
    more = {"turns": [first, second], "seconds": 6.0, "attempts": 2, "cause": "the backend\x1b is away"}
    return {**token_row("c_g0", ["3", "<|end|>"]), "finish_reason": "env_error", **more}


def test_a_conversation_is_shown_turn_by_turn_with_calls_results_and_times(tmp_path: Path) -> None:
    shown = "\n".join(lines(tmp_path, conversation_row(), token_row("a_g0", ["x"]), width=200))
    assert "env_error, 2 tokens" in shown and "2 turns, 2 attempts, cause: the backend\\x1b is away" in shown
    assert "engine 3 s, tool 1.5 s, waiting 1.5 s" in shown
    turn = "turn 0: 9 tokens, reward 0, engine 1, 12 cached tokens, engine 2 s, tool 1.5 s, waiting 0.5 s"
    assert turn in shown and "turn 1: 2 tokens, cut, reward 1" in shown
    at = [shown.index(text) for text in ("assistant: I ask", 'call: add {"a": 1}', "result of add (bad_arguments): no")]
    assert at == sorted(at) and shown.count("no <b>b</b>") == 1
    assert "turn" not in "\n".join(lines(tmp_path / "single", token_row("a_g0", ["x"]), width=200))


def test_a_row_is_a_conversation_with_its_gold_answer_beside_its_reward(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "system", "content": "Be <b>short</b>"}, {"role": "user", "content": "3 1 2?"}]}
    rows = [token_row(f"a_g{at}", ["123"], answer="123 <i>", **asked) for at in range(2)]
    page = page_text(choose_rollouts(write_rows(tmp_path, 3, rows), step=None, group=None, limit=None))
    places = [
        page.index(text) for text in ("<i>system</i>", "<i>user</i>", "as the model reads it", "<i>assistant</i>")
    ]
    assert places == sorted(places) and page.count("<i>user</i>") == 1
    assert page.count('gold answer <span class="gold">123 &lt;i&gt;</span>') == 2 and "<b>short" not in page
    shown = lines(tmp_path, *rows)
    assert shown[shown.index("  gold answer") + 1] == "    123 <i>" and shown.count("  gold answer") == 1


def test_the_page_has_a_bar_of_times_and_a_table_of_endings(tmp_path: Path) -> None:
    rows = [conversation_row(), token_row("a_g0", ["x"])]
    page = page_text(choose_rollouts(write_rows(tmp_path, 3, rows), step=None, group=None, limit=None))
    assert 'class="engine" style="width:50.00%"' in page and 'class="waiting" style="width:25.00%"' in page
    assert "<td>env_error</td><td>1</td>" in page and "no &lt;b&gt;b&lt;/b&gt;" in page and "<b>b</b>" not in page
    single = page_text(choose_rollouts(write_rows(tmp_path, 4, rows[1:]), step=None, group=None, limit=None))
    assert 'class="endings"' not in single and 'class="time"' not in single
