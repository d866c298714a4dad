"""`LiveTracing`: the driver's side of the live tracer: hub, what is watched in each step, and the run's numbers.

    open_tracing             the hub's process, the line to it               (open_job)
    GRPOTrainer.step
      |- at the start        what is watched in this step is settled         (LiveTracing.begin)
      |- during "rollout"    engines show decoding, where a watch names it   (TracedEngines.begin, DecodeTracing.begin)
      |- after "score"       which rows are trained is known: begin          (LiveTracing.after_stage)
      |- every worker pass shows its sites                                   (SiteTracing.begin_call)
      `- at the end          end                                             (LiveTracing.end)
    then the numbers of the step                                             (LiveTracing.report)

What is watched may change while the run goes on: the latest word of the hub counts from the next step that begins, on
all ranks, for the driver tells all of them. Invariant: no error of the hub or of the line to it reaches the trainer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.algorithms.observers import StepObserver
from nemo_rl.algorithms.run_folder import TRACER
from nemo_rl.algorithms.stages.stage import StepState
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.parts import ENGINE_CAPABILITIES, EngineCapabilities
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.run import TracerConfig, TracerSwitches
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.worker_groups import Request, WorkerFleet, ask
from nemo_rl.errors import UserError
from nemo_rl.models.generation.interfaces import TracedEngine, traced_row
from nemo_rl.models.policy.recording import model_identity
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.tracer.process import HubSpec, TracedJob, open_job
from nemo_rl.tracer.protocol import RankGroup
from nemo_rl.tracer.watch import CLASSICAL, GENERATION, WatchPlan

__all__ = ["LiveTracing", "TracedEngines", "TracedRun", "build_tracing", "open_tracing"]

logger = logging.getLogger(__name__)

CLASSICAL_REDUCER = "tiles(96, mean)"
ROLLOUT, SCORE = "rollout", "score"
"""Stage in which engines decode, and stage after which the rows of a step are known."""
NO_DECODING = (
    f"phase {GENERATION}: this run's generation engine shows nothing; only the embedded one "
    "(policy.generation.backend: torch) can be watched while it decodes"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRun:
    """A run whose hub is there."""

    config: TracerConfig
    spec: TraceSpec
    """Settings for the workers."""
    job: TracedJob
    watched: _Watched


class _Watched:
    def __init__(self, watches: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._watches = tuple(watches)

    def hear(self, message: Mapping[str, object]) -> None:
        """Called by the thread of the line to the hub."""
        given = message.get("watches")
        if message.get("type") != "plan" or not isinstance(given, list):
            return
        try:
            plan = WatchPlan.parse(str(text) for text in given)
        except UserError as error:
            logger.warning("tracer: %s", error)
            return
        with self._lock:
            self._watches = plan.texts

    def now(self) -> tuple[str, ...]:
        with self._lock:
            return self._watches


class LiveTracing(StepObserver):
    """Tells workers, engines and hub what is watched in each step."""

    def __init__(self, run: TracedRun, policy: TQPolicy, engines: TracedEngines) -> None:
        self._run, self._policy, self._engines = run, policy, engines
        self._watches: tuple[str, ...] | None = None
        """Watches of the step, or None when it is not traced."""
        self._is_open = self._has_told = False
        self._last = -math.inf

    def begin(self, number: int) -> None:
        self._watches, now = None, time.monotonic()
        if now - self._last < 1.0 / self._run.config.max_hz:
            return
        self._last, self._watches = now, self._run.watched.now()
        plan = WatchPlan.parse(self._watches)
        self._run.job.link.say({"type": "applied", "step": number, "digest": plan.digest})
        if plan.is_due(GENERATION, number):
            self._begin_decoding(number, self._watches)

    def _begin_decoding(self, step: int, watches: Sequence[str]) -> None:
        if self._engines.can_show:
            keys = self._engines.keys(self._run.config.rows)
            self._run.job.link.say({"type": "step", "step": step, "keys": keys, "group": RankGroup.GENERATION.value})
            self._engines.begin(step, watches=watches, keys=keys)
        elif not self._has_told:
            self._has_told = True
            self._run.job.link.say({"type": "problem", "text": NO_DECODING})

    def after_stage(self, stage: str, step: StepState) -> None:
        if stage == ROLLOUT:
            self._engines.end()
        if stage != SCORE or step.chosen is None or self._watches is None:
            return
        keys = list(step.chosen.meta.keys[: self._run.config.rows])
        self._run.job.link.say({"type": "step", "step": step.number, "keys": keys})
        request = ask(PolicyWorker.begin_tracing, step=step.number, watches=tuple(self._watches), keys=tuple(keys))
        self._policy.run(request, "tracing")
        self._is_open = True

    def end(self, step: StepState, *, last_checkpoint: int) -> None:
        if self._is_open:
            self._is_open = False
            self._policy.run(ask(PolicyWorker.end_tracing), "tracing")

    def report(self, number: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._run.job.link.say({"type": "metrics", "step": number, "metrics": finite})


def build_tracing(
    run: TracedRun | None, policy: TQPolicy, engines: WorkerFleet, config: GenerationConfig, *, timeout_s: float
) -> list[LiveTracing]:
    """Return the observer of a traced run; none of another one.

    Args:
        config: of the engines, of which the tracer asks those that are known to be a `TracedEngine`.
        timeout_s: deadline of one call of an engine.
    """
    if run is None:
        return []
    capabilities = ENGINE_CAPABILITIES.get(config.backend, EngineCapabilities())
    shown = TracedEngines(engines if capabilities.shows_decoding else None, timeout_s=timeout_s)
    return [LiveTracing(run, policy, shown)]


@contextmanager
def open_tracing(
    section: TracerConfig,
    policy: PolicyConfig,
    *,
    layout: ParallelLayout,
    log_dir: Path,
    start_timeout_s: float,
    note: Callable[[str], None],
) -> Iterator[TracedRun | None]:
    """The hub of a run, until the run ends; None where none is asked for.

    Args:
        note: shows a line to the person at the terminal.

    Raises:
        UserError: the hub cannot start, for example because the port is taken.
    """
    if not section.enabled:
        yield None
        return
    watches, run_id = watches_of(section, policy.tracer), uuid.uuid4().hex[:12]
    tokenizer = Path(policy.tokenizer.name or policy.model_name).absolute()
    artifacts = None if section.artifacts is None else section.artifacts.absolute()
    spec = HubSpec(
        folder=(log_dir / TRACER).absolute(),
        run=run_id,
        host=section.host,
        port=section.port,
        origins=tuple(section.origins),
        watches=watches,
        record=section.record,
        record_bytes=section.record_bytes,
        compat=section.compatibility,
        tokenizer=tokenizer,
        artifacts=artifacts,
        start_timeout_s=start_timeout_s,
    )
    facts = {
        "name": log_dir.name,
        "model": model_identity(policy),
        "layout": layout.sizes,
        "tokenizer": str(tokenizer),
    }
    watched = _Watched(watches)
    with open_job(spec, facts, on_message=watched.hear) as job:
        trace = TraceSpec(address=job.address, run=run_id, memory_bytes=section.memory_bytes, artifacts=artifacts)
        note(job.note)
        yield TracedRun(config=section, spec=trace, job=job, watched=watched)


def watches_of(section: TracerConfig, switches: TracerSwitches) -> tuple[str, ...]:
    """Return what the recipe watches: the selectors, and those of the classical switches that are on.

    Raises:
        UserError: one of them cannot be read.
    """
    on = switches.model_dump()
    classical = [f"{each.sites} | {CLASSICAL_REDUCER}" for each in CLASSICAL if on[each.switch]]
    return WatchPlan.parse([*section.selectors, *classical]).texts


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
        """Stop showing the step. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._run(ask(TracedEngine.end_tracing))

    def _run(self, request: Request[None]) -> None:
        assert self._engines is not None, "engines that show nothing are not asked"
        self._engines.run(request, stage=STAGE, timeout_s=self._timeout_s)
