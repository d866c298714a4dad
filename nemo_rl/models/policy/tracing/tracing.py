"""`Tracing`: what a worker shows to the tracer's hub: one of its `Onlookers`, made with it.

The driver says which step begins and what is watched in it (`begin`, `end`), the same to all ranks. Invariant: without
a `TraceSpec` nothing is shown, and whatever becomes of the hub, passes go on with the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.policy.recording.sight import SiteSink
from nemo_rl.models.policy.recording.taps import Taps
from nemo_rl.models.policy.steps import ThisRank
from nemo_rl.models.policy.tracing.trace_sink import TracedStep, TraceSink
from nemo_rl.models.policy.tracing.vectors import Vectors
from nemo_rl.tracer.link import HubAddress, HubLink
from nemo_rl.tracer.protocol import Role
from nemo_rl.tracer.watch import Plan

__all__ = ["NO_TRACING", "SiteTracing", "TraceSpec", "Tracing"]

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""What waits at the end of a worker is sent within so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSpec:
    """What a rank needs to show its passes; plain values, the same on every rank."""

    address: HubAddress
    run: str
    memory_bytes: int
    """Most bytes that wait to be sent, of each rank."""
    artifacts: Path | None = None
    """Folder of vectors to project on."""


class Tracing(Protocol):
    """What is shown."""

    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        """The passes that follow belong to this step.

        Args:
            watches: texts of a `Plan`.
            keys: rows whose tokens are shown one by one.
        """

    def end(self) -> None:
        """No pass of the step follows. Idempotent."""

    def close(self) -> None:
        """Sends what waits, within a deadline. Idempotent."""

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        """As in `Onlooker`."""

    def end_call(self, phase: WorkerPass) -> None:
        """As in `Onlooker`."""


class _NoTracing:
    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        pass

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        return None

    def end_call(self, phase: WorkerPass) -> None:
        pass


NO_TRACING: Tracing = _NoTracing()


class SiteTracing:
    """What this rank shows."""

    def __init__(self, spec: TraceSpec, taps: Taps, here: ThisRank) -> None:
        self._spec, self._rank = spec, here.rank
        place = here.coordinates
        self._axes = {"dp": place.dp, "cp": place.cp, "tp": place.tp, "pp": place.pp}
        self._vectors = Vectors(spec.artifacts)
        self._step: TracedStep | None = None
        self._problems: set[str] = set()
        self.link = HubLink(
            spec.address,
            Role.RANK,
            hello={
                "run": spec.run,
                "rank": here.rank,
                "world": here.layout.world_size,
                "unobserved": {kind.value: why for kind, why in taps.unobserved.items()},
            },
            memory_bytes=spec.memory_bytes,
        )

    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        """As in `Tracing`."""
        plan = Plan.parse(watches)
        self._step = TracedStep(run=self._spec.run, number=step, plan=plan, keys=frozenset(keys))
        self.link.open()

    def end(self) -> None:
        """As in `Tracing`."""
        self._step = None

    def close(self) -> None:
        """As in `Tracing`."""
        self.end()
        self.link.close(timeout_s=CLOSE_S)

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        """As in `Onlooker`."""
        step = self._step
        if step is None or not step.plan.is_due(phase.value, step.number):
            return None
        self.link.say({"type": "begin", "step": step.number, "phase": phase.value})
        return TraceSink(
            step,
            phase=phase.value,
            link=self.link,
            rank=self._rank,
            axes=self._axes,
            vectors=self._vectors,
            on_problem=self._report,
        )

    def end_call(self, phase: WorkerPass) -> None:
        """As in `Onlooker`."""
        if self._step is not None:
            counts = {"sent": self.link.sent, "dropped": self.link.dropped}
            self.link.say({"type": "end", "step": self._step.number, "phase": phase.value, **counts})

    def _report(self, text: str) -> None:
        """Once for each problem."""
        if text not in self._problems:
            self._problems.add(text)
            logger.warning("tracer: %s", text)
            self.link.say({"type": "problem", "text": text})
