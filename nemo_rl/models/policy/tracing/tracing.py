"""`Tracing`: what a worker shows to the tracer's hub: one of its `Onlookers`, made with it.

The driver says which step begins and what is watched in it (`begin`, `end`), the same to all ranks. Invariant: without
a `TraceSpec` nothing is shown, and whatever becomes of the hub, passes go on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.policy.recording.sight import SiteSink
from nemo_rl.models.policy.recording.taps import Taps
from nemo_rl.models.policy.steps import ThisRank
from nemo_rl.models.policy.tracing.phases import GroupPlace, TracedPhases, TraceSpec

__all__ = ["NO_TRACING", "SiteTracing", "TraceSpec", "Tracing"]


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


class SiteTracing(TracedPhases):
    """What this rank shows."""

    def __init__(self, spec: TraceSpec, taps: Taps, here: ThisRank) -> None:
        place = here.coordinates
        axes = {"dp": place.dp, "cp": place.cp, "tp": place.tp, "pp": place.pp}
        super().__init__(
            spec,
            GroupPlace(rank=here.rank, world=here.layout.world_size, axes=axes),
            unobserved=taps.unobserved,
        )

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        """As in `Onlooker`."""
        return self.begin_phase(phase.value)

    def end_call(self, phase: WorkerPass) -> None:
        """As in `Onlooker`."""
        self.end_phase(phase.value)
