"""`Hub`: what is known of runs, what is watched, and who gets it; no sockets, no assembly.

    nemo_rl_tools.tracer.hub.ranks      assembled pictures         -> publish_table, publish_frame
    nemo_rl_tools.tracer.hub.sessions   words of driver, viewers   -> set_run, publish_message, set_plan, add_viewer
    playback of a recording       what was published before  -> publish_*, set_run
    to                            viewers, history, sinks

Invariant: nothing here waits; all is called on one event loop, but `problem` may come from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from nemo_rl.errors import UserError, name_some
from nemo_rl.records.sites import SITES
from nemo_rl.tracer.frame import Frame, FrameTable
from nemo_rl.tracer.protocol import PROTOCOL_VERSION, HubLimits, Role, RunState, dump
from nemo_rl.tracer.reducer import REDUCERS, VECTOR_FILES, Project
from nemo_rl.tracer.watch import WatchPlan
from nemo_rl_tools.tracer.hub.history import History
from nemo_rl_tools.tracer.hub.viewer import Viewer
from nemo_rl_tools.tracer.summary import FirstNonFinite

__all__ = ["Hub", "Sink", "SinkThread"]

logger = logging.getLogger(__name__)

CLOSE_S = 20.0
"""Seconds to write what still waits when the hub ends."""
MAX_RUNS = 64
"""Runs whose facts are kept."""
MAX_MARKS = 1000
"""Last marks, for viewers that come later."""
MAX_PROBLEMS = 20
"""Last problems, for viewers that come later."""
METRICS_KEPT = 1000
"""Steps whose metrics viewers that come later get."""
FACTS: Mapping[str, type] = {
    **dict.fromkeys(("name", "text"), str),
    **dict.fromkeys(("step", "world"), int),
    **dict.fromkeys(("model", "layout", "unobserved", "first_non_finite"), Mapping),
}
"""Facts of a run that a record may set, with their kinds."""


@dataclass(kw_only=True, slots=True)
class HubRunFacts:
    """The facts of one run, as viewers get them."""

    run: str
    name: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    unobserved: Mapping[str, str] = field(default_factory=dict)
    """Kinds of sites that cannot be looked at, and why."""
    state: RunState = RunState.RUNNING
    text: str = ""
    """The reason why the run ended."""
    step: int | None = None
    """The newest that is known."""
    world: int = 0
    """Ranks that send."""
    first_non_finite: Mapping[str, object] | None = None
    metrics: deque[Mapping[str, object]] = field(default_factory=lambda: deque(maxlen=METRICS_KEPT))
    """`metrics` messages of the last steps."""

    def as_record(self) -> dict[str, object]:
        record = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "metrics"}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in record.items()}

    def take(self, record: Mapping[str, Any]) -> None:
        for name, kind in FACTS.items():
            value = record.get(name)
            if isinstance(value, kind) and not isinstance(value, bool):
                setattr(self, name, dict(value) if isinstance(value, Mapping) else value)
        if record.get("state") in list(RunState):
            self.state = RunState(record["state"])


class Sink(Protocol):
    """Takes what viewers get, such as a recording; a message on which it raises is skipped."""

    def frame(self, message: bytes) -> object:
        """Return a frame or a table."""

    def message(self, message: dict[str, Any]) -> object:
        """Return a JSON message."""

    def close(self) -> object:
        """End the sink; no message follows."""


class SinkThread:
    """Feeds one sink in its own thread."""

    def __init__(self, sink: Sink, *, max_bytes: int, problem: Callable[[str], None], name: str = "recording") -> None:
        """Args:
        max_bytes: that may wait for it.
        problem: is told, once, why something is left out; called by any thread.
        """
        self._sink, self._max_bytes, self._problem, self._name = sink, max_bytes, problem, name
        self._queue: queue.SimpleQueue[bytes | dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_bytes, self._has_told = 0, False
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def frame(self, message: bytes) -> None:
        """Take a frame or a table, unless too much waits."""
        with self._lock:
            is_full = self._num_bytes + len(message) > self._max_bytes
            self._num_bytes += 0 if is_full else len(message)
        if is_full:
            self._tell(f"{self._name}: the disk is too slow, pictures are skipped")
        else:
            self._queue.put(message)

    def message(self, message: Mapping[str, object]) -> None:
        self._queue.put(dict(message))

    def close(self) -> None:
        """Write what waits, within a deadline."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s: not closed within %g s", self._name, CLOSE_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, bytes):
                    with self._lock:
                        self._num_bytes -= len(item)
                    self._sink.frame(item)
                else:
                    self._sink.message(item)
            except Exception as error:  # noqa: BLE001 - whatever a disk does: looking on goes on
                self._tell(f"{self._name}: entries are skipped: {type(error).__name__}: {str(error)[:300]}")
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(f"{self._name}: could not be closed: {type(error).__name__}: {str(error)[:300]}")

    def _tell(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._problem(text)


class Hub:
    """Publishes the frames of one job, or of recorded runs."""

    def __init__(
        self, *, limits: HubLimits | None = None, plan: WatchPlan | None = None, artifacts: Path | None = None
    ) -> None:
        """Args:
        artifacts: the folder that has the vectors of `project(NAME)`; None takes every name.
        """
        self.limits, self.plan = limits or HubLimits(), plan or WatchPlan()
        self.effective_step: int | None = None
        """First step that the plan counts for; None until the driver has applied it."""
        self.history = History(self.limits.history_bytes)
        self.runs: dict[str, HubRunFacts] = {}
        self.driver: Viewer | None = None
        self.problems: list[str] = []
        self.marks: list[Mapping[str, Any]] = []
        self._artifacts, self._sinks = artifacts, list[SinkThread]()
        self.subscribers: list[Viewer] = []
        self._first = FirstNonFinite()
        self._loop = asyncio.get_running_loop()

    # Publishing.

    def set_run(self, record: Mapping[str, Any]) -> HubRunFacts:
        """Return facts of a run (`run`, `name`, `model`, `layout`, `unobserved`, `state`, `text`, `step`, `world`,
        `first_non_finite`; what is left out stays as it is), told to all."""
        run = str(record["run"])
        before = self.runs[run].as_record() if run in self.runs else None
        if before is None and len(self.runs) >= MAX_RUNS:
            self.runs.pop(next(iter(self.runs)))
        facts = self.runs.setdefault(run, HubRunFacts(run=run))
        facts.take(record)
        if facts.as_record() != before:
            self._tell_run(facts)
        return facts

    def publish_table(self, table: FrameTable) -> None:
        kept = self.history.add_table(table)
        for sink in self._sinks:
            sink.frame(kept.message)

    def publish_frame(self, frame: Frame) -> None:
        kept = self.history.add_frame(frame)
        for subscriber in self.subscribers:
            subscriber.frame(kept)
        for sink in self._sinks:
            sink.frame(kept.message)
        facts = self._facts(frame.where.run)
        is_newer = facts.step is None or frame.where.step > facts.step
        facts.step = frame.where.step if is_newer else facts.step
        is_first = self._first.add(frame)
        if is_first and (found := self._first.of(frame.where.run)) is not None:
            facts.first_non_finite = found.as_record()
        if is_newer or is_first:
            self._tell_run(facts)

    def publish_message(self, message: Mapping[str, Any]) -> None:
        """Publish a JSON message of the protocol: `metrics`, `mark`, `problem`, `plan`; `run` is as `set_run`."""
        if message.get("type") == "run":
            self.set_run(message)
            return
        if message.get("type") == "metrics" and "run" in message:
            facts = self._facts(str(message["run"]))
            facts.metrics.append(dict(message))
            if type(step := message.get("step")) is int and (facts.step is None or step > facts.step):
                facts.step = step
        if message.get("type") == "mark":
            self.marks = [*self.marks, dict(message)][-MAX_MARKS:]
        self._tell(message)

    def problem(self, text: str) -> None:
        """Tell all that something is wrong; from any thread."""
        self._loop.call_soon_threadsafe(self._tell_problem, text)

    def mark(self, label: str) -> None:
        """Publish a mark of the controller, at the newest step."""
        steps = [facts.step for facts in self.runs.values() if facts.step is not None]
        self.publish_message({"type": "mark", "label": label, "step": max(steps, default=0)})

    @property
    def is_ahead(self) -> bool:
        """Return whether a viewer that reads has not yet taken what was published."""
        return any(subscriber.is_behind for subscriber in self.subscribers)

    # Watches.

    def read_plan(self, texts: list[str]) -> WatchPlan:
        """Raises:
        UserError: a watch that cannot be read, or a vector that is not among the artifacts.
        """
        plan = WatchPlan.parse(texts)
        vectors = [each.vector for watch in plan.watches for each in watch.reducers if isinstance(each, Project)]
        if self._artifacts is not None:
            known = {path.stem for end in VECTOR_FILES for path in self._artifacts.glob(f"*{end}") if path.is_file()}
            for vector in set(vectors) - known:
                raise UserError(
                    f"reducer project: expected a vector of the folder of artifacts "
                    f"({name_some(sorted(known)) or 'none'}), got {vector!r}"
                )
        return plan

    def set_plan(self, plan: WatchPlan) -> None:
        """Watch something else from the step on that the driver will name."""
        self.plan, self.effective_step = plan, None
        self._tell(self.plan_record())
        if self.driver is not None:
            self.driver.message(self.driver_plan())

    def applied(self, step: int, digest: str) -> None:
        """Take the plan that counts, as the driver says in every step; the first step of a plan is the one it counts
        from."""
        if digest == self.plan.digest and self.effective_step is None:
            self.effective_step = step
            self._tell(self.plan_record())

    def driver_plan(self) -> str:
        """Return the `plan` message to the driver."""
        return dump({"type": "plan", "watches": list(self.plan.texts), "digest": self.plan.digest})

    # Viewers.

    def add_sink(self, sink: SinkThread) -> None:
        self._sinks.append(sink)
        sink.message(self.plan_record())

    def close_sinks(self) -> None:
        """Wait until they have written; blocks."""
        while self._sinks:
            self._sinks.pop().close()

    def welcome(self, role: Role) -> str:
        """Return the `welcome` message."""
        return dump(
            self.plan_record()
            | {
                "type": "welcome",
                "v": PROTOCOL_VERSION,
                "role": role.value,
                "runs": [facts.as_record() for facts in self.runs.values()],
                "sites": [{"kind": kind.value, **asdict(site)} for kind, site in SITES.items()],
                "reducers": {name: kind.text for name, kind in REDUCERS.items()},
                "limits": asdict(self.limits),
            }
        )

    def greet(self, subscriber: Viewer) -> None:
        """Send a viewer what it missed: metrics, marks, problems and the last frame of each place."""
        metrics = [message for facts in self.runs.values() for message in facts.metrics]
        for message in (*metrics, *self.marks, *({"type": "problem", "text": text} for text in self.problems)):
            subscriber.message(dump(message))
        for kept in self.history.latest():
            subscriber.frame(kept)

    def end_run(self, run: str, state: RunState, text: str) -> None:
        if run in self.runs:
            self.set_run({"run": run, "state": state, "text": text})

    def plan_record(self) -> dict[str, object]:
        """Return the `plan` message to viewers."""
        return {
            "type": "plan",
            "watches": list(self.plan.texts),
            "digest": self.plan.digest,
            "effective_step": self.effective_step,
        }

    def _facts(self, run: str) -> HubRunFacts:
        return self.runs[run] if run in self.runs else self.set_run({"run": run})

    def _tell_run(self, facts: HubRunFacts) -> None:
        self._tell({"type": "run", **facts.as_record()})

    def _tell(self, message: Mapping[str, Any]) -> None:
        text = dump(message)
        for subscriber in self.subscribers:
            subscriber.message(text)
        for sink in self._sinks:
            sink.message(message)

    def _tell_problem(self, text: str) -> None:
        logger.warning("%s", text)
        self.problems = [*self.problems, text][-MAX_PROBLEMS:]
        self.publish_message({"type": "problem", "text": text})
