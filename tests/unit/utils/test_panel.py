"""What a run shows: plain lines without a terminal, a redrawn panel on one."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.utils.panel import Panel, StepReport, final_lines, step_line

REPORT = StepReport(
    step=7,
    num_steps=60,
    reward=0.4321,
    val_reward=0.305,
    loss=-0.01234,
    kl=0.00031,
    mismatch=1.00021,
    tokens_per_s=21345.6,
    stage_seconds={"rollout": 0.512, "train": 0.7},
    stage_bytes={"rollout": 137_216, "train": 3 * 1024**2},
)


class Clock:
    """Time that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_step_line_shows_what_tells_how_a_run_goes_and_everything_where_asked_to() -> None:
    assert step_line(REPORT, ["elapsed 0:07"]) == (
        "step  7/60  reward 0.432  val 0.305  loss -0.0123  21346 tokens/s  elapsed 0:07"
    )
    assert step_line(REPORT, is_full=True) == (
        "step  7/60  reward 0.432  val 0.305  loss -0.0123  kl 0.00031  mismatch 1.0002  21346 tokens/s  "
        "| rollout 0.51s/134KiB train 0.70s/3MiB"
    )


def test_step_line_leaves_out_what_was_not_measured() -> None:
    assert step_line(StepReport(step=1, num_steps=2, reward=0.0)) == "step 1/2  reward 0.000  0 tokens/s"


def test_without_a_terminal_there_is_one_line_per_step() -> None:
    console = Console(file=io.StringIO(), width=300)
    with Panel(console, clock=Clock()) as panel:
        panel.validation(0, 0.25, measure="accuracy")
        panel.step(REPORT)
    validation, step = console.file.getvalue().splitlines()
    assert validation == "validation after step 0: accuracy 0.250"
    assert step == step_line(REPORT, ["elapsed 0:00", "left 0:00"])


@pytest.mark.parametrize("is_full", [False, True])
def test_on_a_terminal_the_panel_redraws_and_restores_the_cursor_after_an_error(is_full: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    with pytest.raises(RuntimeError), Panel(console, is_full=is_full) as panel:
        panel.step(REPORT)
        raise RuntimeError("stop")
    shown = console.file.getvalue()
    assert all(text in shown for text in ("step 7 of 60", "reward 0.432", "loss -0.0123", "of the last 1 steps"))
    assert [text in shown for text in ("134KiB", "rollout", "mismatch 1.0002")] == [is_full] * 3
    assert shown.rstrip().endswith("\x1b[?25h")


def test_live_panel_can_be_turned_off_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=300, color_system=None)
    with Panel(console, live=False, clock=Clock()) as panel:
        panel.step(REPORT)
    assert console.file.getvalue() == step_line(REPORT, ["elapsed 0:00", "left 0:00"]) + "\n"


def test_final_lines_state_the_gain_and_the_files() -> None:
    lines = final_lines(
        first_reward=0.301,
        last_reward=0.914,
        measure="accuracy",
        num_steps=60,
        seconds=95.7,
        peak_bytes=5 << 29,
        paths={"metrics": Path("a/metrics.jsonl")},
    )
    assert lines == [
        "validation accuracy 0.30 -> 0.91 in 60 steps, 96 s",
        "  peak memory  2.5GiB, all processes on this machine",
        "  metrics      a/metrics.jsonl",
    ]


def test_elapsed_time_and_what_is_left_come_from_the_steps_alone() -> None:
    clock, console = Clock(), Console(file=io.StringIO(), width=300)
    with Panel(console, clock=clock) as panel:
        clock.now += 600  # a slow start
        panel.begin()
        for step in (1, 2):
            clock.now += 30
            panel.step(StepReport(step=step, num_steps=60, reward=0.0))
    first, second = console.file.getvalue().splitlines()
    assert "elapsed 10:30  left 29:30" in first
    assert "elapsed 11:00  left 29:00" in second


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_panel_fits_the_terminal_and_says_what_runs_now(width: int) -> None:
    clock = Clock()
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=30, color_system=None, soft_wrap=True
    )
    with Panel(console, is_full=True, clock=clock) as panel:
        panel.stage("start")
        panel.begin()
        for step in range(1, 70):
            clock.now += 1
            panel.step(replace(REPORT, step=step, num_steps=100))
        panel.stage("reference_logprobs")
        clock.now += 75
        panel.refresh()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n").splitlines()
    assert max(len(line) for line in lines) <= width
    shown = "\n".join(lines)
    for text in ("now reference_logprobs 1:15", "elapsed 2:24", "reward 0.432", "tokens/s 21346", "rollout"):
        assert text in shown, "no text is broken over two lines"


def test_the_panel_tells_what_each_of_several_engines_samples() -> None:
    for total, is_told in ((2, True), (1, False)):
        console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
        with Panel(console, is_full=True) as panel:
            panel.step(replace(REPORT, num_engines=total, all_engines=total, engine_speeds={0: 512.4, 1: 498.0}))
        shown = console.file.getvalue()
        assert [text in shown for text in ("engine 0 512 tokens/s", "engine 1 498 tokens/s")] == [is_told] * 2


def test_engines_are_told_only_while_one_is_missing() -> None:
    told = [step_line(replace(REPORT, num_engines=alive, all_engines=2)) for alive in (None, 2, 1)]
    assert ["engines" in line for line in told] == [False, False, True] and "  engines 1/2  " in told[2]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    with Panel(console) as panel:
        panel.step(replace(REPORT, num_engines=1, all_engines=2))
    assert "engines 1/2" in console.file.getvalue()
