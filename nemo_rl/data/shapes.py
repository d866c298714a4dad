"""Pictures of shapes, drawn by a seed, and questions about them: how many of a kind there are, or which kind it is.

Called by the dataset loader and by the starter of the vision demo. Invariant: the same arguments give the same pictures
to the last byte with one version of pillow.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from nemo_rl.errors import DatasetError

__all__ = ["COLORS", "KINDS", "ShapeProblem", "shape_problems"]

KINDS = ("circle", "square", "triangle")
COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220)}
BACKGROUND = (245, 245, 245)
TASKS = ("count", "name")
SMALLEST, SHADES = 8, 20
"""Pixels of the smallest shape, and how far its color may be from that of its name."""
CELL = 14
"""Pixels along the side of the cell of one shape: a multiple of common patch sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeProblem:
    """One picture, a question about it, and the only right answer."""

    prompt: str
    answer: str
    picture: bytes
    """PNG."""


def shape_problems(n: int, *, seed: int, cells: int = 2, most: int = 4, task: str = "count") -> list[ShapeProblem]:
    """Draw `n` problems.

    Args:
        cells: cells along each side of the picture; one holds a shape or nothing.
        most: most shapes of a picture.
        task: `count`: how many shapes there are; `name`: which kind and color the only shape has.

    Raises:
        DatasetError: shapes do not fit, or the task is unknown.
    """
    if task not in TASKS:
        raise DatasetError(f"shapes: expected a task of {', '.join(TASKS)}, got {task!r}; correct data.*.options")
    if not 1 <= cells <= 16 or not 1 <= most <= cells * cells:
        raise DatasetError(
            f"shapes: expected 1 to 16 cells along a side and 1 to {cells * cells} shapes, got cells={cells} and "
            f"most={most}; correct data.*.options"
        )
    draws = random.Random(seed)
    return [_problem(draws, cells=cells, most=most, task=task) for _ in range(n)]


def _problem(draws: random.Random, *, cells: int, most: int, task: str) -> ShapeProblem:
    image = Image.new("RGB", (cells * CELL, cells * CELL), BACKGROUND)
    canvas = ImageDraw.Draw(image)
    count = draws.randint(1, most) if task == "count" else 1
    found = []
    for place in draws.sample(range(cells * cells), count):
        kind, color = draws.choice(KINDS), draws.choice(sorted(COLORS))
        # No two pictures are the same, so that held-out ones leave no kind of picture out of the others.
        side = draws.randint(SMALLEST, CELL - 2)
        at = [cell * CELL + draws.randint(1, CELL - 1 - side) for cell in (place % cells, place // cells)]
        shade = tuple(max(0, min(255, part + draws.randint(-SHADES, SHADES))) for part in COLORS[color])
        _draw(canvas, kind, shade, box=(*at, *(start + side for start in at)))
        found.append(f"{color} {kind}")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    if task == "count":
        return ShapeProblem(prompt="how many shapes", answer=str(count), picture=buffer.getvalue())
    return ShapeProblem(prompt="which shape", answer=found[0], picture=buffer.getvalue())


def _draw(canvas: ImageDraw.ImageDraw, kind: str, color: tuple[int, ...], *, box: tuple[int, ...]) -> None:
    left, top, right, bottom = box
    if kind == "circle":
        canvas.ellipse(box, fill=color)
    elif kind == "square":
        canvas.rectangle(box, fill=color)
    else:
        canvas.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill=color)
