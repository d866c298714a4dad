"""`TracedEngines`: tells the generation engines of a run which step's decoding the live tracer shows.

Called by `LiveTracing`, and only in steps in which a watch names the phase `generation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.distributed.calls import Request, ask
from nemo_rl.distributed.worker_fleet import WorkerFleet
from nemo_rl.models.generation.interfaces import TracedEngine, traced_row

__all__ = ["TracedEngines"]

STAGE = "tracing"


class TracedEngines:
    """The engines, as the tracer sees them.

    Args:
        engines: of which each worker is a `TracedEngine`; None: those of this run show nothing.
        timeout_s: deadline of one call.
    """

    def __init__(self, engines: WorkerFleet | None, *, timeout_s: float) -> None:
        self._engines, self._timeout_s = engines, timeout_s
        self._is_open = False

    @property
    def can_show(self) -> bool:
        """Whether the engines of this run can be asked."""
        return self._engines is not None

    def keys(self, num_rows: int) -> list[str]:
        """Names of the first rows of each engine, engine by engine."""
        numbers = () if self._engines is None else self._engines.numbers
        return [traced_row(engine, row) for engine in numbers for row in range(num_rows)]

    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        """The requests from here on show the tracer's hub what is watched, until `end`."""
        self._is_open = True
        self._run(ask(TracedEngine.begin_tracing, step=step, watches=tuple(watches), keys=tuple(keys)))

    def end(self) -> None:
        """Nothing of the step is shown from here on. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._run(ask(TracedEngine.end_tracing))

    def _run(self, request: Request[None]) -> None:
        assert self._engines is not None, "engines that show nothing are not asked"
        self._engines.run(request, stage=STAGE, timeout_s=self._timeout_s)
