"""`TracedPhases`: what one process shows to the tracer's hub, phase by phase.

A part of `SiteTracing`, and of the embedded engine's tracing. The driver says which step begins and what is watched in
it, the same to all ranks of a group. Invariant: whatever becomes of the hub, nothing here waits or fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.models.policy.tracing.outlet import Outlet, Straight
from nemo_rl.models.policy.tracing.trace_sink import TracedStep, TraceSink
from nemo_rl.models.policy.tracing.vectors import Vectors
from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.link import HubAddress, HubLink
from nemo_rl.tracer.protocol import Group, Role
from nemo_rl.tracer.watch import Plan

__all__ = ["GroupPlace", "TraceSpec", "TracedPhases"]

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""What waits at the end of a process is sent within so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSpec:
    """What a rank needs to show its passes; plain values, the same on every rank."""

    address: HubAddress
    run: str
    memory_bytes: int
    """Most bytes that wait to be sent, of each rank."""
    artifacts: Path | None = None
    """Folder of vectors to project on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """Which of the processes that show the same phases one is."""

    group: Group = Group.POLICY
    rank: int
    world: int
    axes: Mapping[str, int]
    """Place on every axis of the layout."""


class TracedPhases:
    """The line of one process, and the step that it is in."""

    def __init__(self, spec: TraceSpec, place: GroupPlace, *, unobserved: Mapping[SiteKind, str]) -> None:
        self._spec, self._place = spec, place
        self._vectors = Vectors(spec.artifacts)
        self._step: TracedStep | None = None
        self._problems: set[str] = set()
        self.link = HubLink(
            spec.address,
            Role.RANK,
            hello={
                "run": spec.run,
                "group": place.group.value,
                "rank": place.rank,
                "world": place.world,
                "unobserved": {kind.value: why for kind, why in unobserved.items()},
            },
            memory_bytes=spec.memory_bytes,
        )

    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        """What follows belongs to this step.

        Args:
            watches: texts of a `Plan`.
            keys: rows whose tokens are shown one by one.
        """
        plan = Plan.parse(watches)
        self._step = TracedStep(run=self._spec.run, number=step, plan=plan, keys=frozenset(keys))
        self.link.open()

    def end(self) -> None:
        """Nothing of the step follows. Idempotent."""
        self._step = None

    def close(self) -> None:
        """Sends what waits, within a deadline. Idempotent."""
        self.end()
        self.link.close(timeout_s=CLOSE_S)

    def begin_phase(self, phase: str, *, outlet: Outlet | None = None) -> TraceSink | None:
        """What sees the sites of a phase that begins; None: nothing of it is watched in this step.

        Args:
            outlet: between the sink and `link`; None: everything is sent as it comes.
        """
        step = self._step
        if step is None or not step.plan.is_due(phase, step.number):
            return None
        self.link.say({"type": "begin", "step": step.number, "phase": phase})
        return TraceSink(
            step,
            phase=phase,
            outlet=outlet or Straight(self.link),
            rank=self._place.rank,
            axes=self._place.axes,
            vectors=self._vectors,
            on_problem=self._report,
        )

    def end_phase(self, phase: str) -> None:
        """A phase that a sink was made for has ended, also by an error."""
        if self._step is not None:
            counts = {"sent": self.link.sent, "dropped": self.link.dropped}
            self.link.say({"type": "end", "step": self._step.number, "phase": phase, **counts})

    def _report(self, text: str) -> None:
        """Once for each problem."""
        if text not in self._problems:
            self._problems.add(text)
            logger.warning("tracer: %s", text)
            self.link.say({"type": "problem", "text": text})
