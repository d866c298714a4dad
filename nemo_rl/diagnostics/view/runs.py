"""The runs below a folder, as plain values for the page of `nemo-rl view`.

A run is a folder with `metrics.jsonl`. Its curves are thinned to `MOST_POINTS` points each, first and last kept, so
that a page of many long runs stays small; the table of a run has the values of its newest step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.config.yaml_text import YamlProblem, parse_yaml, yaml_line
from nemo_rl.diagnostics.rollouts.choice import steps_with_rollouts
from nemo_rl.errors import UserError
from nemo_rl.utils.trackers import METRICS_FILE, read_metrics

__all__ = ["MOST_POINTS", "ViewedRun", "find_runs"]

CONFIG_FILE = "config.yaml"
MOST_POINTS = 1000
"""Points of one curve."""
DEPTH = 4
"""Levels of folders that are searched for runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewedRun:
    """One run."""

    name: str
    """Its path below the folder that is shown."""
    folder: Path

    def record(self) -> dict[str, Any]:
        """Return name, settings, curves and newest values as JSON carries them."""
        curves: dict[str, tuple[list[int], list[float]]] = {}
        last: dict[str, float] = {}
        for row in read_metrics(self.folder / METRICS_FILE):
            step = int(row.pop("step"))
            for name, value in row.items():
                steps, values = curves.setdefault(name, ([], []))
                if steps and step <= steps[-1]:
                    continue  # a resumed run has written the step once more
                steps.append(step)
                values.append(value)
            last |= row
        return {
            "name": self.name,
            "steps": max((steps[-1] for steps, _ in curves.values()), default=0),
            "last": last,
            "curves": {name: [_thinned(part) for part in curve] for name, curve in sorted(curves.items())},
            "settings": self.settings(),
            "hasRollouts": bool(steps_with_rollouts(self.folder)),
        }

    def settings(self) -> dict[str, str]:
        """Return the keys of its config with their values as text; none where there is no readable config."""
        try:
            tree = parse_yaml((self.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, YamlProblem):
            return {}
        return dict(_flat(tree, "")) if isinstance(tree, Mapping) else {}


def find_runs(folder: Path) -> list[ViewedRun]:
    """Return the runs below a folder by name; the folder itself may be one.

    Raises:
        UserError: there is none.
    """
    found = [ViewedRun(name=_name(path, folder), folder=path) for path in _walk(folder, DEPTH)]
    if not found:
        raise UserError(
            f"{folder}: no run is here, nor up to {DEPTH} folders below; expected a folder with {METRICS_FILE} "
            "(logger.log_dir of a run), or one above several of them"
        )
    return sorted(found, key=lambda run: run.name)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path != folder else path.absolute().name


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / METRICS_FILE).is_file():
        yield folder
        return
    if not depth:
        return
    try:
        below = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for name in below:
        yield from _walk(folder / name, depth - 1)


def _thinned(values: list[Any]) -> list[Any]:
    stride = -(-len(values) // MOST_POINTS)
    kept = values[::stride] if stride > 1 else values
    return kept if len(kept) < 2 or (len(values) - 1) % max(stride, 1) == 0 else [*kept, values[-1]]


def _flat(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, yaml_line(value)
