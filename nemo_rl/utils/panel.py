"""What a person sees during a run: a panel that redraws itself on a terminal, one plain line per step elsewhere.

Called by the trainer after every step with a `StepReport`; `final_lines` ends the output of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as RichPanel
from rich.table import Table
from rich.text import Text

__all__ = ["Panel", "StepReport", "final_lines"]

# Rewards drawn in the panel: as many as fit beside the numbers on an 80-column terminal.
HISTORY_SHOWN = 60
_BARS = "_.-=+*#%@"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The numbers of one finished step."""

    step: int
    num_steps: int
    reward: float
    val_accuracy: float | None = None
    """Latest validation accuracy; None before the first validation."""
    loss: float | None = None
    """None when the step had nothing to train on."""
    kl: float | None = None
    """KL to the reference where it is computed, else to the policy that sampled; None without an update."""
    tokens_per_s: float = 0.0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    stage_bytes: Mapping[str, int] = field(default_factory=dict)
    """Payload bytes put and fetched per stage."""


class Panel:
    """Shows a run. A context manager: the terminal is restored at its end, also after an error.

    Args:
        console: where to draw.
        live: redraw in place; only on a terminal, elsewhere there is one line per step.
    """

    def __init__(self, console: Console, *, live: bool = True) -> None:
        self._console = console
        self._live = (
            Live(console=console, refresh_per_second=4, transient=False) if live and console.is_terminal else None
        )
        self._rewards: list[float] = []
        self._is_open = False

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
        """Ends redrawing. Idempotent."""
        if self._live is not None and self._is_open:
            self._live.stop()
        self._is_open = False

    def note(self, text: str) -> None:
        """A line above the numbers: what is being started, what is waited for."""
        self._console.print(text)

    def validation(self, step: int, accuracy: float) -> None:
        """A validation outside the steps, such as the one before training."""
        self._console.print(f"validation after step {step}: accuracy {accuracy:.3f}")

    def step(self, report: StepReport) -> None:
        """Shows a finished step."""
        self._rewards.append(report.reward)
        if self._live is None:
            self._console.print(step_line(report))
        else:
            self._live.update(_draw(report, self._rewards[-HISTORY_SHOWN:]), refresh=True)


def step_line(report: StepReport) -> str:
    """One line with everything the panel shows."""
    width = len(str(report.num_steps))
    parts = [f"step {report.step:>{width}}/{report.num_steps}", f"reward {report.reward:.3f}"]
    parts += [f"{name} {text}" for name, text in _optional_numbers(report)]
    parts.append(f"{report.tokens_per_s:.0f} tokens/s")
    stages = " ".join(f"{name} {_stage_text(report, name)}" for name in _stage_names(report))
    return "  ".join(parts) + (f"  | {stages}" if stages else "")


def final_lines(
    *,
    first_accuracy: float | None,
    last_accuracy: float | None,
    num_steps: int,
    seconds: float,
    paths: Mapping[str, Path],
) -> list[str]:
    """The line that sums a run up, and where its files are.

    Example:
        >>> final_lines(first_accuracy=0.3, last_accuracy=0.91, num_steps=60, seconds=96.2, paths={})
        ['validation accuracy 0.30 -> 0.91 in 60 steps, 96 s']
    """
    if first_accuracy is not None and last_accuracy is not None:
        head = f"validation accuracy {first_accuracy:.2f} -> {last_accuracy:.2f} in {num_steps} steps, {seconds:.0f} s"
    elif last_accuracy is not None:
        head = f"validation accuracy {last_accuracy:.2f} after {num_steps} steps, {seconds:.0f} s"
    else:
        head = f"{num_steps} steps, {seconds:.0f} s, without validation"
    width = max((len(name) for name in paths), default=0)
    return [head, *(f"  {name:<{width}}  {path}" for name, path in paths.items())]


def _optional_numbers(report: StepReport) -> list[tuple[str, str]]:
    numbers: list[tuple[str, float | None, str]] = [
        ("val", report.val_accuracy, ".3f"),
        ("loss", report.loss, "+.4f"),
        ("kl", report.kl, ".5f"),
    ]
    return [(name, format(value, spec)) for name, value, spec in numbers if value is not None]


def _stage_names(report: StepReport) -> list[str]:
    return list(dict.fromkeys((*report.stage_seconds, *report.stage_bytes)))


def _stage_text(report: StepReport, name: str) -> str:
    seconds, moved = report.stage_seconds.get(name), report.stage_bytes.get(name)
    parts = [f"{seconds:.2f}s"] if seconds is not None else []
    parts += [_bytes_text(moved)] if moved is not None else []
    return "/".join(parts)


def _bytes_text(count: int) -> str:
    for limit, unit in ((1024, "B"), (1024**2, "KiB"), (1024**3, "MiB")):
        if count < limit:
            return f"{count / (limit // 1024):.0f}{unit}"
    return f"{count / 1024**3:.1f}GiB"


def _curve(values: Sequence[float]) -> str:
    """Rewards as characters, lowest to highest of those shown."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top)] if math.isfinite(value) else "?" for value in values)


def _draw(report: StepReport, rewards: Sequence[float]) -> RenderableType:
    numbers = Table.grid(padding=(0, 2))
    shown = [("reward", f"{report.reward:.3f}"), *_optional_numbers(report), ("tokens/s", f"{report.tokens_per_s:.0f}")]
    numbers.add_row(*(Text(f"{name} {text}", style="bold") for name, text in shown))
    stages = Table(box=None, padding=(0, 2), show_edge=False)
    stages.add_column("stage")
    stages.add_column("seconds", justify="right")
    stages.add_column("moved", justify="right")
    for name in _stage_names(report):
        seconds, moved = report.stage_seconds.get(name), report.stage_bytes.get(name)
        stages.add_row(
            name, f"{seconds:.2f}" if seconds is not None else "", _bytes_text(moved) if moved is not None else ""
        )
    curve = Text(f"reward of the last {len(rewards)} steps  {_curve(rewards)}")
    return RichPanel(Group(numbers, curve, stages), title=f"step {report.step} of {report.num_steps}", expand=False)
