"""`RunSummary`: what a recording holds of each run, read once from its beginning to its end.

Called by `nemo-rl trace ls`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.entry import Entry, EntryKind
from nemo_rl.tracer.frame import BadFrame, Frame, Where
from nemo_rl.tracer.non_finite import FirstNonFinite, NonFinite
from nemo_rl.tracer.protocol import RunState
from nemo_rl.tracer.store import quiet_s, stream_files
from nemo_rl.tracer.stream_reader import StreamReader

__all__ = ["RecordingSummary", "RunSummary", "SiteKey", "SiteSummary", "summarize"]


@dataclass(slots=True)
class SiteSummary:
    """Frames of one kind of site by one reducer."""

    num_frames: int = 0
    num_bad: int = 0
    """Frames with values that are NaN or infinite."""
    layers: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    """Of parameters."""
    steps: set[int] = field(default_factory=set)
    phases: set[str] = field(default_factory=set)

    def add(self, frame: Frame) -> None:
        where = frame.where
        self.num_frames += 1
        self.num_bad += frame.num_not_finite > 0
        self.steps.add(where.step)
        self.phases.add(where.phase)
        if where.site.layer is not None:
            self.layers.add(where.site.layer)
        if where.site.name is not None:
            self.names.add(where.site.name)


SiteKey = tuple[SiteKind, Direction, bool, str]
"""Kind, direction, whether it was recomputed, and reducer."""


@dataclass(slots=True)
class RunSummary:
    """What a recording holds of one run."""

    run: str
    said: Mapping[str, Any] = field(default_factory=dict)
    """The newest `run` message, empty without one."""
    sites: dict[SiteKey, SiteSummary] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    missing: Counter[int] = field(default_factory=Counter)
    """Rank -> frames without it."""
    dropped: dict[tuple[int, str], int] = field(default_factory=dict)
    """Step and phase -> frames that ranks dropped."""
    first: FirstNonFinite = field(default_factory=FirstNonFinite)
    finish: Mapping[str, Any] | None = None

    def add(self, frame: Frame) -> None:
        where = frame.where
        self.steps.add(where.step)
        self.missing.update(frame.missing)
        if frame.dropped:
            at = (where.step, where.phase)
            self.dropped[at] = max(frame.dropped, self.dropped.get(at, 0))
        self.first.add(frame)
        self.sites.setdefault(_site_key(where), SiteSummary()).add(frame)

    @property
    def state(self) -> str:
        """`ended`, `lost`, or `running`: no finish is recorded."""
        if self.finish is not None:
            return RunState.ENDED.value
        state = str(self.said.get("state", RunState.RUNNING.value))
        return state if state in (RunState.ENDED, RunState.LOST, RunState.RECORDED) else RunState.RUNNING.value

    @property
    def end_text(self) -> str:
        """How it ended, as far as somebody said so."""
        said = self.finish or self.said
        return " ".join(str(said[name]) for name in ("reason", "text") if said.get(name))

    @property
    def first_non_finite(self) -> Mapping[str, Any] | None:
        """Of the frames that are here, or, where these are later, of those that the hub has seen."""
        found, said = self.first.of(self.run), self.said.get("first_non_finite")
        if isinstance(said, Mapping) and _is_before(said, found):
            return said
        return None if found is None else found.as_record()

    @property
    def num_frames(self) -> int:
        return sum(site.num_frames for site in self.sites.values())


@dataclass(slots=True)
class RecordingSummary:
    """What a recording holds."""

    folder: Path
    runs: dict[str, RunSummary] = field(default_factory=dict)
    watches: list[str] = field(default_factory=list)
    marks: list[tuple[int | None, str]] = field(default_factory=list)
    """Step and label."""
    problems: list[str] = field(default_factory=list)
    """What the hub told to be wrong, each once."""
    num_entries: int = 0
    num_damaged: int = 0
    num_torn: int = 0
    num_unreadable: int = 0
    """Whole entries that hold nothing this version knows."""
    num_bytes: int = 0
    age_s: float = 0.0
    """Since something was written last."""

    def run(self, name: str) -> RunSummary:
        return self.runs.setdefault(name, RunSummary(name))

    def add(self, entry: Entry) -> None:
        self.num_entries += 1
        try:
            if entry.kind is EntryKind.MESSAGE:
                self._add_message(entry.message())
            elif isinstance(found := entry.frame(), Frame):
                self.run(found.where.run).add(found)
        except BadFrame:
            self.num_unreadable += 1

    def _add_message(self, said: Mapping[str, Any]) -> None:
        kind, run = said.get("type"), said.get("run")
        if kind == "run" and isinstance(run, str):
            self.run(run).said = said
        elif kind == "finish":
            for summary in self.runs.values() if run is None else [self.run(str(run))]:
                summary.finish = said
        elif kind == "plan":
            self.watches = [str(text) for text in said.get("watches") or ()]
        elif kind == "mark":
            step = said.get("step")
            self.marks.append((step if type(step) is int else None, str(said.get("label", ""))))
        elif kind == "problem" and (text := str(said.get("text"))) not in self.problems:
            self.problems.append(text)


def summarize(reader: StreamReader) -> RecordingSummary:
    """Reads a whole recording."""
    summary = RecordingSummary(reader.folder)
    for entry in reader.entries():
        summary.add(entry)
    summary.num_damaged, summary.num_torn = reader.num_damaged, reader.num_torn
    for path in stream_files(reader.folder).values():
        # Old files fall out while a run is on.
        with suppress(FileNotFoundError):
            summary.num_bytes += path.stat().st_size
    summary.age_s = quiet_s(reader.folder)
    return summary


def _is_before(said: Mapping[str, Any], found: NonFinite | None) -> bool:
    step = said.get("step")
    return type(step) is int and (found is None or step < found.where.step)


def _site_key(where: Where) -> SiteKey:
    return (where.site.kind, where.site.direction, where.site.is_recomputed, str(where.reducer))
