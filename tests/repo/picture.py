"""`make picture`: the SVG files of the docs, light and dark.

`processes_*.svg` shows the processes of a run and what flows between them, from the boxes and arrows below.
`demo_llm_*.svg` is the curve of `make demo-llm`, from the numbers in demo_llm.json, which a run has written to its
metrics.jsonl. A test compares the files with what this module writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["THEMES", "curve", "draw", "files"]

WIDTH, HEIGHT = 920, 470
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "text": "#1f2328",
        "soft": "#59636e",
        "line": "#8c959f",
        "box": "#f6f8fa",
        "plane": "#ddf4ff",
        "mark": "#0969da",
    },
    "dark": {
        "text": "#f0f6fc",
        "soft": "#9198a1",
        "line": "#656c76",
        "box": "#151b23",
        "plane": "#0c2d4a",
        "mark": "#4493f8",
    },
}
"""Colours, by the name that ends the file's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """One process, or several of a kind."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: Sequence[str]
    is_plane: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """A flow, along the corners of a line."""

    points: Sequence[tuple[int, int]]
    label: str
    at: tuple[int, int]
    """Place of the label's middle."""
    is_both_ways: bool = False
    is_control: bool = False
    """True for messages of the driver, which hold no value per token."""


BOXES = (
    Box(
        x=330,
        y=20,
        width=260,
        height=92,
        title="Driver",
        lines=("GRPOTrainer, BatchSource", "keys, lengths, one number per row"),
    ),
    Box(
        x=20,
        y=180,
        width=230,
        height=100,
        title="Rollout worker",
        lines=("prompts, tokenizer, rewards", "EngineScheduler"),
    ),
    Box(
        x=20,
        y=350,
        width=230,
        height=92,
        title="Generation engines",
        lines=("embedded (torch) or vLLM", "each its own worker"),
    ),
    Box(
        x=345,
        y=180,
        width=230,
        height=100,
        title="Data plane",
        lines=("rows and columns in flight", "Ray, TransferQueue, Mooncake"),
        is_plane=True,
    ),
    Box(
        x=670,
        y=180,
        width=230,
        height=100,
        title="Policy workers",
        lines=("FSDP2 or megatron-core", "a leader fetches for its group"),
    ),
    Box(
        x=670, y=350, width=230, height=92, title="Weight sync", lines=("buckets or deltas", "every engine is verified")
    ),
)
ARROWS = (
    Arrow(points=((330, 62), (135, 62), (135, 180)), label="groups to sample", at=(232, 50), is_control=True),
    Arrow(points=((590, 62), (785, 62), (785, 180)), label="pack plans, loss", at=(690, 50), is_control=True),
    Arrow(points=((460, 180), (460, 112)), label="row keys", at=(500, 146), is_control=True),
    Arrow(points=((250, 230), (345, 230)), label="new rows", at=(298, 218)),
    Arrow(points=((575, 230), (670, 230)), label="columns", at=(622, 218), is_both_ways=True),
    Arrow(points=((135, 350), (135, 280)), label="samples", at=(172, 318), is_both_ways=True),
    Arrow(points=((785, 280), (785, 350)), label="weights", at=(822, 318)),
    Arrow(points=((670, 392), (250, 392)), label="new weights, refit after every step", at=(460, 380)),
)


def draw(theme: str) -> str:
    """Return the picture as SVG text in the colours of a theme."""
    colours = THEMES[theme]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" role="img">',
        "<title>Processes of a run and what flows between them</title>",
        _marker(colours["line"]),
    ]
    parts += [_arrow(arrow, colours) for arrow in ARROWS]
    parts += [_box(box, colours) for box in BOXES]
    return "\n".join([*parts, "</svg>", ""])


def _marker(colour: str) -> str:
    return (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker></defs>'
    )


def _box(box: Box, colours: Mapping[str, str]) -> str:
    middle = box.x + box.width // 2
    fill = colours["plane"] if box.is_plane else colours["box"]
    texts = [_text(middle, box.y + 32, box.title, size=17, colour=colours["text"], weight=600)]
    texts += [
        _text(middle, box.y + 56 + 20 * row, line, size=13, colour=colours["soft"])
        for row, line in enumerate(box.lines)
    ]
    outline = (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8" fill="{fill}" '
        f'stroke="{colours["line"]}"/>'
    )
    return "\n".join([outline, *texts])


def _arrow(arrow: Arrow, colours: Mapping[str, str]) -> str:
    points = " ".join(f"{x},{y}" for x, y in arrow.points)
    start = ' marker-start="url(#tip)"' if arrow.is_both_ways else ""
    dashes = ' stroke-dasharray="5 4"' if arrow.is_control else ""
    line = (
        f'<polyline points="{points}" fill="none" stroke="{colours["line"]}" stroke-width="1.6"{dashes} '
        f'marker-end="url(#tip)"{start}/>'
    )
    return "\n".join([line, _text(*arrow.at, arrow.label, size=12, colour=colours["text"])])


def _text(x: int, y: int, text: str, *, size: int, colour: str, weight: int = 400) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="middle" font-size="{size}" font-weight="{weight}" fill="{colour}">'
        f"{escape(text)}</text>"
    )


def curve(theme: str, numbers: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return the learning curve as SVG text: training reward as a line, held-out accuracy as points.

    Args:
        numbers: (step, value) pairs under `reward` and `accuracy`; values are between 0 and 1.
    """
    colours = THEMES[theme]
    last = max(step for step, _ in numbers["accuracy"])

    def at(step: float, value: float) -> tuple[int, int]:
        return round(50 + 540 * step / last), round(210 - 180 * value)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 250" font-family="{FONT}" role="img">',
        "<title>Learning curve of make demo-llm</title>",
    ]
    for tenth in range(0, 11, 2):
        x, y = at(0, tenth / 10)
        parts.append(f'<line x1="{x}" y1="{y}" x2="590" y2="{y}" stroke="{colours["line"]}" stroke-opacity="0.3"/>')
        parts.append(_text(x - 20, y + 4, f"{tenth / 10:.1f}", size=12, colour=colours["soft"]))
    parts += [_text(at(step, 0)[0], 230, str(step), size=12, colour=colours["soft"]) for step in range(0, last + 1, 4)]
    line = " ".join(f"{x},{y}" for x, y in (at(*point) for point in numbers["reward"]))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{colours["mark"]}" stroke-width="2"/>')
    for step, value in numbers["accuracy"]:
        x, y = at(step, value)
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colours["text"]}"/>')
        parts.append(_text(x, y - 10, f"{value:.2f}", size=12, colour=colours["text"], weight=600))
    parts.append(
        _text(320, 247, "step; line: training reward, points: held-out accuracy", size=12, colour=colours["soft"])
    )
    return "\n".join([*parts, "</svg>", ""])


def files(folder: Path) -> dict[str, str]:
    """Return the content of each picture of a folder by its name."""
    numbers = json.loads((folder / "demo_llm.json").read_text(encoding="utf-8"))
    found = {f"processes_{theme}.svg": draw(theme) for theme in THEMES}
    return found | {f"demo_llm_{theme}.svg": curve(theme, numbers) for theme in THEMES}


def main(folder: str) -> None:
    """Write the pictures into a folder."""
    for name, text in files(Path(folder)).items():
        (Path(folder) / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
