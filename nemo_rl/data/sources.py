"""Built-in sources of prompts: generated ones, JSON Lines files, and whatever `datasets` reads.

`raw_prompts` calls the one that a section names (`config.parts`). What a source yields is checked by `load_prompts`.

Pictures of shapes, drawn by a seed, and questions about them: how many of a kind there are, or which kind it is.

Called by the dataset loader and by the starter of the vision demo. Invariant: the same arguments give the same pictures
to the last byte with one version of pillow.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

from PIL import Image, ImageDraw

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.parts import DATASETS
from nemo_rl.data import generated, huggingface_wrapper, reasoning_gym_wrapper
from nemo_rl.data.conversation import Message
from nemo_rl.data.datasets import MISSING, RawPrompt, value_at
from nemo_rl.data.huggingface_wrapper import json_rows, open_text
from nemo_rl.data.messages import messages_of
from nemo_rl.errors import DatasetError, shorten

__all__ = [
    "COLORS",
    "KINDS",
    "ShapeProblem",
    "calculator_sums_prompts",
    "file_rows",
    "guess_prompts",
    "huggingface_prompts",
    "jsonl_prompts",
    "reasoning_gym_prompts",
    "shape_problems",
    "shapes_prompts",
    "sliding_puzzle_prompts",
    "sort_digits_prompts",
]


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


def sort_digits_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    limits = _integer_options(cfg, where)
    for problem in generated.problems(cfg.size or 0, seed=cfg.seed, exclude=exclude, **limits):
        yield RawPrompt(text=problem.prompt, answer=problem.answer, metadata={"digits": len(problem.answer)})


def guess_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    return _turn_prompts(generated.guess_problems, cfg, where, exclude)


def calculator_sums_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    return _turn_prompts(generated.sum_problems, cfg, where, exclude)


def sliding_puzzle_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    return _turn_prompts(generated.puzzle_problems, cfg, where, exclude)


def shapes_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    # Equal questions are asked about other pictures.
    del exclude
    options = {name: value for name, value in cfg.options.items() if name != "task"}
    task = cfg.options.get("task", "count")
    numbers = _integer_options(cfg.model_copy(update={"options": options}), where)
    for problem in shape_problems(cfg.size or 0, seed=cfg.seed, task=str(task), **numbers):
        yield RawPrompt(text=problem.prompt, answer=problem.answer, metadata={}, images=problem.picture)


def _turn_prompts(
    draw: Callable[..., list[generated.TurnProblem]], cfg: DatasetConfig, where: str, exclude: Collection[str]
) -> Iterator[RawPrompt]:
    for problem in draw(cfg.size or 0, seed=cfg.seed, exclude=exclude, **_integer_options(cfg, where)):
        yield RawPrompt(text=problem.prompt, answer=problem.answer, metadata={})


def _integer_options(cfg: DatasetConfig, where: str) -> dict[str, int]:
    options: dict[str, int] = {}
    for name, value in cfg.options.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise DatasetError(f"{where}.options.{name}: expected an integer, got {value!r}")
        options[name] = value
    return options


def reasoning_gym_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    del exclude
    task = reasoning_gym_wrapper.Task(name=cfg.task or "", size=cfg.size or 0, seed=cfg.seed, options=dict(cfg.options))
    for index, (question, answer) in enumerate(reasoning_gym_wrapper.questions(task, where=where)):
        yield RawPrompt(text=question, answer=answer, metadata={"task": task.to_json(), "index": index})


def file_rows(cfg: DatasetConfig, where: str) -> Iterator[tuple[str, Mapping[str, object], str]] | None:
    """Return place, columns and a remark for the user of each row of a source that reads files or the hub; None for one
    that makes prompts itself."""
    if DATASETS.is_on_hub(cfg.dataset_name):
        return _hub_rows(cfg, where)
    read = {"jsonl": _jsonl_rows, "huggingface": _huggingface_rows}.get(cfg.dataset_name)
    return None if read is None else read(cfg, where)


def jsonl_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    del exclude
    yield from _prompts(_jsonl_rows(cfg, where), cfg)


def huggingface_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    del exclude
    yield from _prompts(_huggingface_rows(cfg, where), cfg)


def hub_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    del exclude
    yield from _prompts(_hub_rows(cfg, where), cfg)


def _prompts(rows: Iterator[tuple[str, Mapping[str, object], str]], cfg: DatasetConfig) -> Iterator[RawPrompt]:
    for place, row, remark in rows:
        yield replace(_raw_prompt(row, cfg, place=place), remark=remark)


def _jsonl_rows(cfg: DatasetConfig, where: str) -> Iterator[tuple[str, Mapping[str, object], str]]:
    path = cfg.data_path
    assert path is not None, "rule_dataset_keys_fit_their_kind lets no jsonl dataset pass without data_path"
    try:
        if path.exists() and not path.is_file():
            raise DatasetError(f"{where}.data_path: {path} is not a regular file; expected a JSON Lines file")
        with open_text(path) as file:
            for place, row in islice(json_rows(file, path), cfg.size):
                yield place, row, ""
    except OSError as error:
        raise DatasetError(
            f"{where}.data_path: {path} cannot be read: {error.strerror}; expected a JSON Lines file"
        ) from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}.data_path: {path} is not UTF-8 text: {error}") from error


def _huggingface_rows(cfg: DatasetConfig, where: str) -> Iterator[tuple[str, Mapping[str, object], str]]:
    path = cfg.data_path
    assert path is not None, "rule_dataset_keys_fit_their_kind lets no huggingface dataset pass without data_path"
    told: list[str] = []
    rows = huggingface_wrapper.rows(path, split=cfg.split, where=where, subset=cfg.subset, tell=told.append)
    for number, row in enumerate(islice(rows, cfg.size)):
        yield f"{path} row {number}", row, told.pop() if told else ""


def _hub_rows(cfg: DatasetConfig, where: str) -> Iterator[tuple[str, Mapping[str, object], str]]:
    told: list[str] = []
    rows = huggingface_wrapper.hub_rows(
        cfg.dataset_name, subset=cfg.subset, split=cfg.split, where=where, tell=told.append
    )
    for number, row in enumerate(islice(rows, cfg.size)):
        yield f"{cfg.dataset_name} row {number}", row, told.pop() if told else ""


def _raw_prompt(row: Mapping[str, object], cfg: DatasetConfig, *, place: str) -> RawPrompt:
    text, history, reference, parts = _opening(value_at(row, cfg.input_key), cfg, place)
    answer = value_at(row, cfg.output_key)
    answer = reference if answer is MISSING and reference is not None else answer
    is_apart = cfg.image_key is not None and cfg.image_key != cfg.input_key
    images = value_at(row, cast("str", cfg.image_key)) if is_apart else parts or None
    found = {cfg.image_key: images, cfg.input_key: text, cfg.output_key: answer}
    missing = [key for key, value in found.items() if value is MISSING]
    if missing:
        raise DatasetError(
            f"{place}: no {' and no '.join(map(repr, missing))}, got {shorten(str(sorted(row)))}; set input_key, "
            "output_key and image_key"
        )
    return RawPrompt(
        text=cast("str", text),
        answer=answer,
        metadata={name: value for name, value in row.items() if name not in found},
        place=place,
        history=history,
        images=images,
    )


def _opening(
    value: object, cfg: DatasetConfig, place: str
) -> tuple[object, tuple[Message, ...], str | None, list[object]]:
    """Return the text of a prompt, the messages before it, of a finished conversation its last answer, and the parts of
    its text that are pictures."""
    if not isinstance(value, list | tuple) or not value:
        return value, (), None, []
    try:
        messages, pictures = messages_of(value)
    except ValueError as error:
        raise DatasetError(f"{place}: input_key {cfg.input_key!r}: {error}") from error
    reference = messages.pop().content if messages[-1].role == "assistant" else None
    if not messages or messages[-1].role != "user":
        raise DatasetError(
            f"{place}: input_key {cfg.input_key!r}: expected a last message of the user, or of the assistant after one "
            f"of the user, got roles {[message.role for message in messages]}; leave the row out"
        )
    if pictures and cfg.image_key is None:
        raise DatasetError(
            f"{place}: input_key {cfg.input_key!r}: its messages have parts of type image; set image_key to "
            f"{cfg.input_key!r} where these hold the pictures, or else to the column that does"
        )
    if any(number != len(messages) - 1 for number, _ in pictures):
        raise DatasetError(
            f"{place}: input_key {cfg.input_key!r}: expected pictures in the last message of the user alone, "
            f"got one in message {pictures[0][0]}; leave the row out"
        )
    return messages[-1].content, tuple(messages[:-1]), reference, [part for _, part in pictures]
