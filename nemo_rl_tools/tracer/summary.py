"""`StreamSummary`: what a recording holds of each run, read once from its beginning to its end, and its readings.

`Reading` has the numbers of one frame of `stats`, `FirstNonFinite` finds the site that was the first to hold NaN or
infinities, out of frames that come in any order. Called by `nemo-rl inspect RUN tracer`, by `play` and `trace watch`,
and by the hub. Invariant: the first site does not depend on the order of frames.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.frame import BadFrame, Frame, Where
from nemo_rl.tracer.protocol import RunState
from nemo_rl.tracer.reducer import STATS, Stats
from nemo_rl.tracer.watch import GENERATION, PHASES
from nemo_rl_tools.tracer.entry import EntryKind, StreamEntry
from nemo_rl_tools.tracer.store import quiet_s, stream_files
from nemo_rl_tools.tracer.stream_reader import StreamReader

__all__ = ["FirstNonFinite", "Reading", "RecordingSummary", "SiteKey", "SiteSummary", "StreamSummary", "summarize"]

RUN_ORDER: Mapping[str, int] = {
    phase: place for place, phase in enumerate((GENERATION, *(phase for phase in PHASES if phase != GENERATION)))
}
"""Phases as a step runs them: it generates before it scores and trains."""
REFERENCE = "reference_logprobs"
"""Its passes use other parameters than those of the other phases."""
BEFORE_BACKWARD = 1 << 20
"""More than there are kinds of sites: what is recomputed comes before the backward pass of its layer."""

Order = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class NonFiniteSite:
    """A site that held NaN or infinities."""

    where: Where
    num: int
    """Values that are NaN or infinite."""

    @property
    def text(self) -> str:
        """Return a text such as `step 5, train, mlp.out[2]: 4096 values are NaN or infinite; first seen there`."""
        at = self.where
        update = f", update {at.update}" if at.update else ""
        values = "1 value is" if self.num == 1 else f"{self.num} values are"
        head = f"step {at.step}, {at.phase}{update}, {at.site.text}: {values} NaN or infinite"
        if at.site.kind is SiteKind.PARAM:
            return f"{head} in the parameter itself; what was computed with it comes after"
        return f"{head}; first seen there"

    @property
    def order(self) -> Order:
        at, site = self.where, self.where.site
        phase = RUN_ORDER.get(at.phase, len(RUN_ORDER))
        if site.kind is SiteKind.PARAM and at.update == 0 and at.phase != REFERENCE:
            # All passes before the first update of a step use the same parameters.
            phase = -1
        passes = site.order
        if site.is_recomputed:
            passes = (1, -passes[1], passes[2] - BEFORE_BACKWARD)
        return (at.step, phase, at.update, *passes, site.text, str(at.reducer))

    def as_record(self) -> dict[str, object]:
        return {
            "step": self.where.step,
            "phase": self.where.phase,
            "update": self.where.update,
            "site": self.where.site.as_record(),
            "site_text": self.where.site.text,
            "num": self.num,
            "text": self.text,
        }


@dataclass(slots=True)
class FirstNonFinite:
    """Finds the first non-finite site of each run.

    Example:
        >>> first = FirstNonFinite()
        >>> first.of("run 1") is None
        True
    """

    _found: dict[str, NonFiniteSite] = field(default_factory=dict)

    def add(self, frame: Frame) -> bool:
        """Add a frame and return whether it is the first of its run, among those seen so far."""
        if frame.num_not_finite == 0:
            return False
        new, old = NonFiniteSite(frame.where, frame.num_not_finite), self._found.get(frame.where.run)
        if old is not None and old.order <= new.order:
            return False
        self._found[frame.where.run] = new
        return True

    def of(self, run: str) -> NonFiniteSite | None:
        """Return the first non-finite site of a run, or None where all values that were looked at are finite."""
        return self._found.get(run)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The numbers of `stats` for one site in one pass; extremes, mean and rms are those of the finite values, NaN
    without."""

    run: str
    step: int
    phase: str
    update: int
    site: str
    count: int
    mean: float
    rms: float
    min: float
    max: float
    absmax: float
    zeros: int
    nan: int
    inf: int
    missing: int
    dropped: int
    """Frames that ranks have dropped in this phase."""

    @classmethod
    def of(cls, frame: Frame) -> Reading:
        """
        Raises:
            BadFrame: it is none of `stats`.
        """
        if not isinstance(frame.where.reducer, Stats) or frame.payload.shape != (len(STATS),):
            raise BadFrame(f"expected stats of {len(STATS)} numbers, got {frame.where.reducer} {frame.payload.shape}")
        said = dict(zip(STATS, frame.payload.tolist(), strict=True))
        finite, where = said["count"] - said["nan"] - said["posinf"] - said["neginf"], frame.where
        least, most, absmax = (said[name] if finite else math.nan for name in ("min", "max", "absmax"))
        return cls(
            run=where.run,
            step=where.step,
            phase=where.phase,
            update=where.update,
            site=where.site.text,
            mean=said["sum"] / finite if finite else math.nan,
            rms=math.sqrt(said["sumsq"] / finite) if finite else math.nan,
            min=least,
            max=most,
            absmax=absmax,
            count=int(said["count"]),
            zeros=int(said["zeros"]),
            nan=int(said["nan"]),
            inf=int(said["posinf"] + said["neginf"]),
            missing=len(frame.missing),
            dropped=frame.dropped,
        )

    @property
    def text(self) -> str:
        update = f" update {self.update}" if self.update else ""
        numbers = "  ".join(
            f"{name} {getattr(self, name):< 11.4g}"  # the sign of a number takes no other place than its absence
            for name in ("mean", "rms", "absmax")
        )
        return (
            f"step {self.step:<6} {self.phase + update:<18} {self.site:<24} {numbers} nan {self.nan}  inf {self.inf}"
            f"{self.lack}"
        )

    @property
    def lack(self) -> str:
        """Return what the numbers may lack, or an empty text."""
        missing = f"  without {self.missing} ranks" if self.missing else ""
        return missing + (f"  {self.dropped} dropped" if self.dropped else "")

    def as_record(self) -> dict[str, object]:
        """Return the numbers as JSON holds them: null for NaN."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@dataclass(slots=True)
class SiteSummary:
    """Frames of one kind of site by one reducer."""

    num_frames: int = 0
    num_bad: int = 0
    """Frames with values that are NaN or infinite."""
    layers: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
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
class StreamSummary:
    """The summary of one run of a recording."""

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
        key = (where.site.kind, where.site.direction, where.site.is_recomputed, str(where.reducer))
        self.sites.setdefault(key, SiteSummary()).add(frame)

    @property
    def state(self) -> str:
        """Return `ended`, `lost`, or `running`: no finish is recorded."""
        if self.finish is not None:
            return RunState.ENDED.value
        state = str(self.said.get("state", RunState.RUNNING.value))
        return state if state in (RunState.ENDED, RunState.LOST, RunState.RECORDED) else RunState.RUNNING.value

    @property
    def end_text(self) -> str:
        said = self.finish or self.said
        return " ".join(str(said[name]) for name in ("reason", "text") if said.get(name))

    @property
    def first_non_finite(self) -> Mapping[str, Any] | None:
        """Return the first of the frames that are here or, where these are later, of those that the hub has seen."""
        found, said = self.first.of(self.run), self.said.get("first_non_finite")
        step = said.get("step") if isinstance(said, Mapping) else None
        if type(step) is int and (found is None or step < found.where.step):
            return said
        return None if found is None else found.as_record()

    @property
    def num_frames(self) -> int:
        return sum(site.num_frames for site in self.sites.values())


@dataclass(slots=True)
class RecordingSummary:
    """The summary of a recording."""

    folder: Path
    runs: dict[str, StreamSummary] = field(default_factory=dict)
    watches: list[str] = field(default_factory=list)
    marks: list[tuple[int | None, str]] = field(default_factory=list)
    """Step and label."""
    problems: list[str] = field(default_factory=list)
    """Problems that the hub reported, each once."""
    num_entries: int = 0
    num_damaged: int = 0
    num_torn: int = 0
    num_unreadable: int = 0
    """Whole entries that hold nothing this version knows."""
    num_bytes: int = 0
    age_s: float = 0.0
    """Since something was written last."""

    def run(self, name: str) -> StreamSummary:
        return self.runs.setdefault(name, StreamSummary(name))

    def add(self, entry: StreamEntry) -> None:
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
    """Read a whole recording."""
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
