"""`ScheduleFile`: what the engines, the trainer and the refits of an asynchronous run did, in `schedule.jsonl`.

Written while the run goes on; `read_schedule` gives it to `nemo-rl compare RUN replay --to N`, which does it again.
One line is one event: `start` of the run (again, where it was resumed), events of the engines' batches
(`ScheduleEntry`), `step` with the groups that it trained, and `weights` with a digest of what the engines were sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from nemo_rl.errors import CheckpointError
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.utils.files import read_plain

__all__ = ["SCHEDULE_FILE", "RunSchedule", "ScheduleFile", "read_schedule"]

SCHEDULE_FILE = "schedule.jsonl"
"""File in `logger.log_dir`."""


class ScheduleFile:
    """Appends the events of a run; several threads may write.

    Args:
        step: the last one that was trained before this start.
    """

    def __init__(self, log_dir: Path, *, step: int) -> None:
        self._path, self._lock = log_dir / SCHEDULE_FILE, Lock()
        self._write({"event": "start", "step": step})

    def engines(self, entries: Sequence[ScheduleEntry]) -> None:
        """Append what the batches of engines did."""
        self._write(*({"event": "engine", **entry.to_json()} for entry in entries))

    def step(self, number: int, groups: Sequence[str]) -> None:
        """Append the names of the groups that a step has trained, in its order of rows."""
        self._write({"event": "step", "step": number, "groups": list(groups)})

    def weights(self, version: int, digest: str) -> None:
        """Append the digest of the weights that the engines were sent."""
        self._write({"event": "weights", "version": version, "digest": digest})

    def _write(self, *lines: Mapping[str, object]) -> None:
        if lines:
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


@dataclass(kw_only=True, slots=True)
class RunSchedule:
    """The events of one start of a run."""

    start: int
    """The last step before it."""
    scripts: dict[int, list[ScheduleEntry]] = field(default_factory=dict)
    """Engine -> what its batch did, in order."""
    steps: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step -> names of its groups."""
    weights: dict[int, str] = field(default_factory=dict)
    """Version -> digest of the weights."""


def read_schedule(log_dir: Path, *, start: int) -> RunSchedule:
    """Return the last start of the run in `log_dir` after step `start`.

    Raises:
        CheckpointError: the folder has no schedule, none that begins there, or it cannot be followed.
    """
    path = log_dir / SCHEDULE_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: not there; only asynchronous runs (grpo.async.enabled) have a schedule")
    found: RunSchedule | None = None
    starts: list[int] = []
    for place, text in enumerate(read_plain(path).decode("utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            event = line["event"]
            if event == "start":
                starts.append(int(line["step"]))
                found = RunSchedule(start=starts[-1]) if starts[-1] == start else found
                is_wanted = starts[-1] == start
            elif found is not None and is_wanted:
                _add(found, event, line)
        except (ValueError, KeyError, TypeError) as problem:
            raise CheckpointError(f"{path}, line {place}: expected an event of a schedule, got {text!r}") from problem
    if found is None:
        raise CheckpointError(f"{path}: no start after step {start}; expected one of {starts or 'none'}: give --from")
    for engine, entries in found.scripts.items():
        entries.sort(key=lambda entry: entry.number)
        if [entry.number for entry in entries] != list(range(len(entries))):
            raise CheckpointError(
                f"{path}: engine {engine} was replaced in this run, or events of it are missing, so its batches cannot "
                "be formed again; replay the steps one by one with --step N"
            )
    return found


def _add(schedule: RunSchedule, event: str, line: Mapping[str, object]) -> None:
    if event == "engine":
        entry = ScheduleEntry.from_json(line)
        schedule.scripts.setdefault(entry.engine, []).append(entry)
    elif event == "step":
        groups = line["groups"]
        assert isinstance(groups, list), "groups are a list"
        schedule.steps[int(str(line["step"]))] = tuple(map(str, groups))
    elif event == "weights":
        schedule.weights[int(str(line["version"]))] = str(line["digest"])
    else:
        raise ValueError(event)
