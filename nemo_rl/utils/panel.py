"""Terminal output during a run: a panel that redraws itself on a terminal, one plain line per step elsewhere.

Called by the trainer: `begin` where its steps start, `stage` where a stage does, `step` with a `StepReport` after every
step; `final_lines` ends the output of a run.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as RichPanel
from rich.table import Table
from rich.text import Text

from nemo_rl.utils.console import bytes_text

__all__ = ["Panel", "StepReport", "final_lines", "step_line"]

# Rewards drawn in the panel, as far as the terminal is wide enough.
HISTORY_SHOWN = 60
# Steps whose mean duration predicts how long the rest will take: enough to even out validations and checkpoints.
STEPS_AVERAGED = 20
_FRAME_WIDTH = 4
_BARS = "_.-=+*#%@"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The numbers of one finished step."""

    step: int
    num_steps: int
    reward: float | None
    """Mean reward of the step's samples; None in supervised training, which shows the loss in its place."""
    val_reward: float | None = None
    """Mean reward of the validation after this step, or its loss; None after other steps."""
    loss: float | None = None
    """Loss of the step, or None when it had nothing to train on."""
    kl: float | None = None
    """KL to the reference where it is computed, else to the old policy; None without an update, and where it is 0 by
    construction."""
    mismatch: float | None = None
    """Mean factor between the probabilities that rollout and trainer give a sampled token; None without an update."""
    num_engines: int | None = None
    """Number of live engines, or None where the run has one alone, without which no step ends."""
    all_engines: int | None = None
    """Number of engines with which the run has started."""
    engine_speeds: Mapping[int, float] = field(default_factory=dict)
    """Tokens per second of each engine that sampled, while it did, by its number."""
    endings: Mapping[str, str] = field(default_factory=dict)
    """Ending of conversations -> their number, reward and tokens as a short text; empty where rows are single turns."""
    refit: str | None = None
    """A short text about the refit: milliseconds, bytes, receipt."""
    account: str = ""
    """A short text about who waited for whom, in an asynchronous run."""
    tokens_per_s: float = 0.0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    stage_bytes: Mapping[str, int] = field(default_factory=dict)
    """Payload bytes put and fetched per stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    elapsed: float
    left: float | None
    """Seconds left, or None before the first step has ended."""
    stage: str | None = None
    """Name of the stage that runs now."""
    stage_elapsed: float = 0.0

    def texts(self) -> list[str]:
        """Return `elapsed 0:42`, `left 5:10`, as far as they are known."""
        left = [f"left {duration_text(self.left)}"] if self.left is not None else []
        return [f"elapsed {duration_text(self.elapsed)}", *left]


class Panel:
    """Shows a run. A context manager: the terminal is restored at its end, also after an error.

    Args:
        console: where to draw.
        live: redraw in place; only on a terminal, elsewhere there is one line per step.
        is_full: show all numbers of a step, in place of the few that tell how the run goes.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        console: Console,
        *,
        live: bool = True,
        is_full: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._is_full = is_full
        self._clock = clock
        self._rewards: list[float] = []
        self._is_open = False
        self._opened = self._step_began = clock()
        self._durations: deque[float] = deque(maxlen=STEPS_AVERAGED)
        self._stage: tuple[str, float] | None = None
        self._report: StepReport | None = None
        # Last, because it draws at once.
        self._live = (
            Live(console=console, refresh_per_second=4, transient=False, get_renderable=self._draw)
            if live and console.is_terminal
            else None
        )

    def __enter__(self) -> Panel:
        if self._live is not None and not self._is_open:
            self._live.start()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End redrawing. Idempotent."""
        self._stage = None
        if self._live is not None and self._is_open:
            self._live.stop()
        self._is_open = False

    def note(self, text: str) -> None:
        """Show a line above the numbers: what is being started, what is waited for."""
        self._console.print(text)

    def begin(self) -> None:
        """Start the clock of the first step: the time before it says nothing about how long steps take."""
        self._step_began = self._clock()

    def stage(self, name: str) -> None:
        self._stage = (name, self._clock())

    def validation(self, step: int, reward: float, *, measure: str) -> None:
        """Show a validation outside the steps, such as the one before training.

        Args:
            measure: what its mean reward is called, accuracy or reward.
        """
        self._console.print(f"validation after step {step}: {measure} {reward:.3f}")

    def step(self, report: StepReport) -> None:
        now = self._clock()
        self._durations.append(now - self._step_began)
        self._step_began = now
        self._rewards.append(_curve_of(report)[1])
        self._report = report
        if self._live is None:
            self._console.print(step_line(report, self._times().texts(), is_full=self._is_full))
        self.refresh()

    def refresh(self) -> None:
        """Redraw now; it happens by itself four times a second."""
        if self._live is not None:
            self._live.refresh()

    def _times(self) -> _Times:
        now, report = self._clock(), self._report
        left = None
        if report is not None:
            per_step = sum(self._durations) / len(self._durations)
            left = max(0.0, per_step * (report.num_steps - report.step) - (now - self._step_began))
        name, since = self._stage or (None, now)
        return _Times(elapsed=now - self._opened, left=left, stage=name, stage_elapsed=now - since)

    def _draw(self) -> RenderableType:
        if not self._is_open and self._report is None:
            return Text("")
        rewards, width = self._rewards[-HISTORY_SHOWN:], self._console.width
        return _draw(self._report, rewards, self._times(), width=width, is_full=self._is_full)


def duration_text(seconds: float) -> str:
    """Return `0:07`, `12:40`, `3:05:00`.

    Example:
        >>> duration_text(59.6), duration_text(3605)
        ('1:00', '1:00:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def step_line(report: StepReport, times: Sequence[str] = (), *, is_full: bool = False) -> str:
    width = len(str(report.num_steps))
    parts = [f"step {report.step:>{width}}/{report.num_steps}", *_reward(report)]
    parts += [f"{name} {text}" for name, text in _optional_numbers(report, is_full=is_full)]
    parts += [f"{report.tokens_per_s:.0f} tokens/s", *times]
    if not is_full:
        return "  ".join(parts)
    stages = " ".join(f"{name} {_stage_text(report, name)}" for name in _stage_names(report))
    endings = "  ".join(_endings(report))
    moved = f"  | {endings}" if endings else ""
    moved += f"  | refit {report.refit}" if report.refit else ""
    moved += f"  | {report.account}" if report.account else ""
    return "  ".join(parts) + (f"  | {stages}" if stages else "") + moved


def final_lines(
    *,
    first_reward: float | None,
    last_reward: float | None,
    measure: str,
    num_steps: int,
    seconds: float,
    peak_bytes: int,
    paths: Mapping[str, str | Path],
) -> list[str]:
    """Return the line that sums a run up, what memory it took, and where its files are.

    Args:
        first_reward: of the validation before the first step; None without one.
        last_reward: of the newest validation; None without one.
        measure: the name of what both rewards are, such as accuracy.
        paths: files of the run by name, or URLs.

    Example:
        >>> rewards = {"measure": "accuracy", "first_reward": 0.3, "last_reward": 0.91}
        >>> final_lines(**rewards, num_steps=60, seconds=96.2, peak_bytes=3 << 30, paths={})
        ['validation accuracy 0.30 -> 0.91 in 60 steps, 96 s', '  peak memory  3.0GiB, all processes on this machine']
    """
    took = f"{num_steps} steps, {seconds:.0f} s"
    if last_reward is None:
        head = f"{took}, without validation"
    elif first_reward is None:
        head = f"validation {measure} {last_reward:.2f} after {took}"
    else:
        head = f"validation {measure} {first_reward:.2f} -> {last_reward:.2f} in {took}"
    facts = {"peak memory": f"{bytes_text(peak_bytes)}, all processes on this machine", **paths}
    width = max(map(len, facts))
    return [head, *(f"  {name:<{width}}  {fact}" for name, fact in facts.items())]


def _optional_numbers(report: StepReport, *, is_full: bool) -> list[tuple[str, str]]:
    numbers: list[tuple[str, float | None, str]] = [("val", report.val_reward, ".3f"), ("loss", report.loss, "+.4f")]
    if is_full:
        numbers += [("kl", report.kl, ".5f"), ("mismatch", report.mismatch, ".4f")]
    shown = [(name, format(value, spec)) for name, value, spec in numbers if value is not None]
    return [*shown, *_missing_engines(report)]


def _missing_engines(report: StepReport) -> list[tuple[str, str]]:
    """Return a text about lost engines, empty while all are alive."""
    alive, total = report.num_engines, report.all_engines
    return [("engines", f"{alive}/{total}")] if alive is not None and total is not None and alive < total else []


def _engines(report: StepReport) -> list[str]:
    if (report.all_engines or 1) == 1:
        return []
    return [f"engine {number} {speed:.0f} tokens/s" for number, speed in sorted(report.engine_speeds.items())]


def _endings(report: StepReport) -> list[str]:
    return [f"{name} {text}" for name, text in report.endings.items()]


def _stage_names(report: StepReport) -> list[str]:
    return list(dict.fromkeys((*report.stage_seconds, *report.stage_bytes)))


def _stage_text(report: StepReport, name: str) -> str:
    seconds, moved = report.stage_seconds.get(name), report.stage_bytes.get(name)
    parts = [f"{seconds:.2f}s"] if seconds is not None else []
    parts += [bytes_text(moved)] if moved is not None else []
    return "/".join(parts)


def _reward(report: StepReport) -> list[str]:
    return [] if report.reward is None else [f"reward {report.reward:.3f}"]


def _curve_of(report: StepReport) -> tuple[str, float]:
    """Return what the curve of the panel shows, and its value in this step."""
    if report.reward is not None:
        return "reward", report.reward
    return "loss", math.nan if report.loss is None else report.loss


def _curve(values: Sequence[float]) -> str:
    """Return the rewards as characters, lowest to highest of those shown."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top)] if math.isfinite(value) else "?" for value in values)


def _draw(
    report: StepReport | None, rewards: Sequence[float], times: _Times, *, width: int, is_full: bool
) -> RenderableType:
    now = [f"now {times.stage} {duration_text(times.stage_elapsed)}"] if times.stage is not None else []
    parts: list[RenderableType] = [_wrapped([*times.texts(), *now])]
    if report is not None:
        optional = _optional_numbers(report, is_full=is_full)
        numbers = [*_reward(report), *(f"{name} {text}" for name, text in optional)]
        label = f"{_curve_of(report)[0]} of the last {len(rewards)} steps  "
        room = max(0, width - _FRAME_WIDTH - len(label))
        parts += [
            _wrapped([*numbers, f"tokens/s {report.tokens_per_s:.0f}"], style="bold"),
            Text(label + _curve(rewards)[-room:] if room else label.strip()),
        ]
    if report is not None and is_full:
        parts += [
            *([_wrapped(engines)] if (engines := _engines(report)) else []),
            *([_wrapped(endings)] if (endings := _endings(report)) else []),
            _stage_table(report),
            *([Text(f"refit {report.refit}")] if report.refit else []),
            *([Text(report.account)] if report.account else []),
        ]
    title = f"step {report.step} of {report.num_steps}" if report is not None else "starting"
    return RichPanel(Group(*parts), title=title, expand=False)


def _wrapped(texts: Sequence[str], *, style: str = "") -> Columns:
    """Return the texts side by side, in as many lines as they need; none is broken."""
    return Columns([Text(text, style=style, no_wrap=True) for text in texts], padding=(0, 2))


def _stage_table(report: StepReport) -> Table:
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("moved", justify="right")
    for name in _stage_names(report):
        seconds, moved = report.stage_seconds.get(name), report.stage_bytes.get(name)
        table.add_row(
            name, f"{seconds:.2f}" if seconds is not None else "", bytes_text(moved) if moved is not None else ""
        )
    return table
