"""The runs below a folder, as plain values for the page of `nemo-rl view`.

A run is a folder with `metrics.jsonl`. The overview of a run takes the end of that file, its details all of it: curves
are thinned to `MOST_POINTS` points each, first and last kept, so that the page of a long run stays small.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from nemo_rl.config.sft import WARM_FOLDER
from nemo_rl.config.yaml_text import YamlProblem, parse_yaml, yaml_line
from nemo_rl.data_plane.ledger.events import EVENTS_FILE
from nemo_rl.errors import UserError, boundary
from nemo_rl.tracer.process import HUB_FILE, OPEN_FILE, RECORDING_FOLDER
from nemo_rl.utils.files import read_plain
from nemo_rl.utils.rollout_file import steps_with_rollouts
from nemo_rl.utils.run_lock import RunOutcome, outcome_of
from nemo_rl.utils.trackers import METRICS_FILE, read_metrics
from nemo_rl_tools.tracer.store import stream_files

__all__ = ["COLUMNS", "MOST_POINTS", "ViewedRun", "find_runs", "id_of"]

Steps: TypeAlias = list[int]
Curves: TypeAlias = dict[str, tuple[int, list[float | None]]]
"""Metric -> the place of its steps in a list, and its values."""

CONFIG_FILE = "config.yaml"
COLUMNS = {
    "reward": "train/reward",
    "validation": "val/accuracy",
    "loss": "train/loss",
    "step s": "timing/step_s",
    "tokens/s": "rollout/tokens_per_s",
}
"""Columns of the table of runs, and the metrics whose newest values they have."""
MOST_CONFIG_BYTES = 4 << 20
"""A longer config has no settings on the page."""
TAIL_BYTES = 1 << 20
"""End of the metrics file that the overview reads: some 200 steps."""
WALL = ("timing/step_s", "timing/refit_s", "timing/validation_s", "timing/checkpoint_s", "timing/keep_step_s")
"""Parts of the wall time of a step; start-up, and pauses between the starts of a resumed run, are left out."""
WALL_CURVE = "wall"
MOST_POINTS = 500
"""Points of one curve."""
DIGITS = 6
"""Significant ones of a value of a curve; the page shows 4."""
DEPTH = 4
"""Levels of folders that are searched for runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewedRun:
    """One run."""

    name: str
    """Its path below the folder that is shown."""
    folder: Path

    @property
    def id(self) -> str:
        """Return the name of the run in paths of the page; the same whatever other runs there are."""
        return id_of(self.name)

    def overview(self) -> dict[str, Any]:
        """Return a line of the table of runs, and the settings; of a damaged run only what is damaged."""
        try:
            with boundary(UserError, "damaged"):
                step, newest, settings = 0, dict[str, float](), self.settings()
                for row in read_metrics(self.folder / METRICS_FILE, last_bytes=TAIL_BYTES):
                    step = max(step, int(row["step"]))
                    newest |= row
                return {
                    "id": self.id,
                    "name": self.name,
                    "changed": (self.folder / METRICS_FILE).stat().st_mtime,
                    "outcome": asdict(self.outcome(step, settings)),
                    "model": settings.get("policy.model_name", ""),
                    "mostSteps": settings.get("grpo.max_num_steps"),
                    "steps": step,
                    "numbers": [_number(newest.get(metric)) for metric in COLUMNS.values()],
                    "rollouts": max(steps_with_rollouts(self.folder), default=None),
                    "settings": settings,
                }
        except UserError as error:
            nothing = {"changed": 0.0, "steps": 0, "numbers": [None] * len(COLUMNS), "rollouts": None, "settings": {}}
            return {"id": self.id, "name": f"{self.name} ({error})", **nothing, "outcome": None, "model": ""}

    def outcome(self, step: int, settings: Mapping[str, str]) -> RunOutcome:
        """Return the state of the run, whose metrics end with `step`."""
        limit = settings.get("grpo.max_num_steps", "")
        return outcome_of(self.folder, step=step, num_steps=int(limit) if limit.isdecimal() else None)

    def details(self) -> dict[str, Any]:
        """Return curves, and what else the folder holds.

        Curves of the same steps share them: a curve is the place of its steps in `axes`, and its values.
        """
        path = self.folder / METRICS_FILE
        state = path.stat()
        axes, curves = _curves(path, state.st_mtime_ns, state.st_size)
        return {
            "axes": axes,
            "curves": {name: curve for name, curve in curves.items() if name != WALL_CURVE},
            "wall": curves.get(WALL_CURVE),
            "folder": str(self.folder),
            "command": shlex.quote(str(self.folder)),
            "rollouts": steps_with_rollouts(self.folder),
            "kept": self._kept_steps(),
            "hasEvents": (self.folder / EVENTS_FILE).is_file(),
            "tracer": self._tracer(),
        }

    def settings(self) -> dict[str, str]:
        """Return the keys of its config with their values as text; none where there is no readable config."""
        try:
            tree = parse_yaml(read_plain(self.folder / CONFIG_FILE, most_bytes=MOST_CONFIG_BYTES).decode())
        except (OSError, ValueError, YamlProblem):
            return {}
        return dict(_flat(tree, "")) if isinstance(tree, Mapping) else {}

    def _kept_steps(self) -> list[int]:
        if self.settings().get("diagnostics.keep_steps.enabled") != "true":
            return []
        from nemo_rl.algorithms.kept_steps.folder import StepsFolder  # noqa: PLC0415  (torch takes seconds)

        return [step.number for step in StepsFolder(self.folder).all()]

    def _tracer(self) -> dict[str, str] | None:
        """Return what there is of the live tracer: `running` with the file that opens it, or `recorded`."""
        folder = self.folder / RECORDING_FOLDER
        if (folder / HUB_FILE).is_file():
            return {"state": "running", "file": str(folder / OPEN_FILE)}
        return {"state": "recorded", "file": str(folder)} if stream_files(folder) else None


def id_of(name: str) -> str:
    """Return a short name of letters and digits for a path."""
    return hashlib.blake2s(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


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
        # The first of two stages is a run in the folder of the second one.
        yield from _walk(folder / WARM_FOLDER, 0)
        return
    if not depth:
        return
    try:
        below = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for name in below:
        yield from _walk(folder / name, depth - 1)


@lru_cache(maxsize=16)
def _curves(path: Path, _mtime_ns: int, _size: int) -> tuple[list[Steps], Curves]:
    """Return the curves of a file, and the steps that they share; read once for each state of the file."""
    found: dict[str, dict[int, float | None]] = {}
    seconds: dict[int, float] = {}
    for row in read_metrics(path):
        step = int(row.pop("step"))
        seconds[step] = sum(row.get(name, 0.0) for name in WALL) or seconds.get(step, 0.0)
        for name, value in row.items():
            found.setdefault(name, {})[step] = value
    passed = 0.0
    for step in sorted(seconds):
        passed += seconds[step]
        found.setdefault(WALL_CURVE, {})[step] = passed
    axes: dict[tuple[int, ...], int] = {}
    curves: Curves = {}
    for name, curve in sorted(found.items()):
        steps = _thinned(sorted(curve))  # a run that went on from an earlier step has written some once more
        axis = axes.setdefault(tuple(steps), len(axes))
        curves[name] = axis, [_number(curve[step]) for step in steps]
    return [list(steps) for steps in axes], curves


def _number(value: object) -> float | None:
    try:
        return float(f"{value:.{DIGITS}g}") if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


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
