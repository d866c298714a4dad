"""What a reward function prints, writes and starts stays apart from its rewards, and ends with it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from nemo_rl.environments.process_environment import RewardLog
from nemo_rl.errors import RewardError
from nemo_rl.utils.console import printable
from tests.unit.environments.test_process_environment import custom, environment, score


def test_prints_are_shown_a_few_at_a_time_and_kept_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "run" / "reward.log"
    with environment(**custom("chatty"), log_file=log) as env:
        # More than a pipe holds: nobody may wait for the other.
        report = score(env, ["2", "9000"])
        assert report.rewards == (2.0, 9000.0)
        assert report.printed[:2] == (r"line 0 \x1b[2J\u202e of 2", r"line 1 \x1b[2J\u202e of 2")
        assert report.printed[5:] == (f"... and 8997 more lines in {log}",)
        assert score(env, ["0"]).printed == ()
    assert len(log.read_text(encoding="utf-8").splitlines()) == 9002


def test_the_log_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl.environments.process_environment._FILE_LIMIT_BYTES", 100)
    log = RewardLog(tmp_path / "reward.log")
    for _ in range(50):
        log.hear("ten bytes.")
    assert (tmp_path / "reward.log").read_text().splitlines()[-1] == "... more was printed than this file holds"
    assert (tmp_path / "reward.log").stat().st_size < 200


def test_an_error_shows_what_was_printed_before_it() -> None:
    with environment(**custom("chatty")) as env, pytest.raises(RewardError, match=r"printed: line 0 (.|\n)*of 1"):
        score(env, ["1", "no number"])


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("stdout", "x"),
        ("stderr", "x"),
        ("stderr", "\xff"),
        ("stdout", "\n"),
        ("stdout", "ab\r\n"),
        ("everywhere", "x\n"),
    ],
)
def test_a_reward_that_prints_without_end_is_ended_at_its_limit(response: str, text: str, tmp_path: Path) -> None:
    with environment(**custom("floods", timeout_s=1.0), log_file=tmp_path / "reward.log") as env:
        started = time.monotonic()
        report = score(env, [response, "quiet"], answer=text)
        assert report.rewards == (0.0, 1.0) and report.num_timeouts == 1
        assert time.monotonic() - started < 15


@pytest.mark.parametrize("text", ["x", "\n"])
def test_a_thread_that_prints_without_end_keeps_no_answer_back(text: str) -> None:
    with environment(**custom("floods", num_workers=1, timeout_s=20.0)) as env:
        started = time.monotonic()
        assert score(env, ["stdout later", "quiet", "quiet"], answer=text).rewards == (1.0, 1.0, 1.0)
        assert time.monotonic() - started < 20


def test_of_a_long_line_the_beginning_is_kept_and_the_rest_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "reward.log"
    with environment(**custom("says_one_long_line"), log_file=log) as env:
        score(env, ["1000000"])
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith(r"\xff\xfeyyy") and lines[0].endswith("yyy ... and 934466 more bytes")
    assert lines[1:] == ["short", "no end"]


def test_what_a_reward_writes_to_other_descriptors_is_no_reward() -> None:
    with environment(**custom("writes_everywhere")) as env:
        assert score(env, ["0.5", "0.25", "0.75"]).rewards == (0.5, 0.25, 0.75)


@pytest.mark.parametrize("ends", ["shutdown", "exit"])
def test_processes_of_a_reward_in_sessions_of_their_own_are_ended(ends: str, tmp_path: Path) -> None:
    number = tmp_path / "pid"
    with environment(**custom("leaves_a_session")) as env:
        if ends == "exit":
            with pytest.raises(RewardError, match="ended its process: exit code 3"):
                score(env, [str(number)], answer="exit")
        else:
            score(env, [str(number)])
            assert psutil.pid_exists(int(number.read_text()))
    assert not psutil.pid_exists(int(number.read_text()))


def test_control_characters_are_spelt_out_and_long_texts_cut() -> None:
    assert printable("a\x07\x1b]0;b\u202e\ud800\n", limit=50) == r"a\x07\x1b]0;b\u202e\ud800\n"
    assert printable("zwölf\tü\n", limit=50, keep_lines=True) == "zwölf\tü\n"
    assert printable("x" * 90, limit=10) == "x" * 10 + " ... (80 more characters)"
