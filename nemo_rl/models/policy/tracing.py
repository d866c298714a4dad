"""`SiteTracing`: what a worker shows to the tracer's hub: one of its `HookObservers`, made with it.

The driver says which step begins and what is watched in it (`begin`, `end`), the same to all ranks; `TraceSink`
reduces what is seen and sends the parts. Invariant: without a `TraceSpec` nothing is shown, and whatever becomes of
the hub, nothing here waits or fails and passes go on with the same numbers. No rank talks to another: of ranks that
have the very same tensor one shows it, the others' parts are put together by the hub.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import UserError
from nemo_rl.models.policy.hooks import HookPoints
from nemo_rl.models.policy.observer import Capture, HookObserver, PassRows, SiteSink
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.trace_parts import ReducedValues, Vectors, part_of
from nemo_rl.records.record import DimSplit, RecordPlace
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.frame import FramePart, FrameSite, FrameTable, Where
from nemo_rl.tracer.link import DirectSender, FrameSender, HubAddress, HubLink
from nemo_rl.tracer.protocol import RankGroup, Role
from nemo_rl.tracer.reducer import PerToken, Project, Reducer, Sample, Span, Stats, token_hashes
from nemo_rl.tracer.watch import WatchPlan

__all__ = ["SiteTracing", "TraceSink", "TraceSpec", "TracedPhases", "TracedStep"]

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds to send what waits at the end of a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """The settings of one traced step, the same on every rank."""

    run: str
    number: int
    plan: WatchPlan
    keys: frozenset[str]
    """Rows whose tokens are shown one by one."""


class TraceSink(SiteSink):
    """Reduces the captured tensors of one call on one rank, and sends the parts."""

    def __init__(
        self,
        step: TracedStep,
        *,
        phase: str,
        outlet: FrameSender,
        rank: int,
        axes: Mapping[str, int],
        vectors: Vectors,
        on_problem: Callable[[str], None],
    ) -> None:
        self._step, self._phase, self._outlet = step, phase, outlet
        self._rank, self._axes, self._vectors, self._on_problem = rank, axes, vectors, on_problem
        self._reducers: dict[tuple[SiteKind, int | None, Direction, bool], tuple[Reducer, ...]] = {}
        self._tables: dict[tuple[int, str], tuple[str, torch.Tensor]] = {}

    def takes(self, kind: SiteKind, layer: int | None, direction: Direction) -> bool:
        return self._step.plan.looks_at(kind, layer, direction, phase=self._phase, step=self._step.number)

    def see(self, capture: Capture) -> None:
        if not capture.is_first:
            return
        try:
            self._show(capture)
        except Exception as error:  # noqa: BLE001 - what looks on must not end what it looks at
            place = capture.place
            self._on_problem(f"{place.kind.value}, layer {place.layer}: {type(error).__name__}: {error}")

    def _show(self, capture: Capture) -> None:
        reducers = self._reducers_of(capture.place)
        whole = [reducer for reducer in reducers if not isinstance(reducer, PerToken)]
        if whole:
            self._send_whole(capture, whole)
        for reducer in reducers:
            if isinstance(reducer, PerToken) and capture.rows is not None:
                self._send_tokens(capture, capture.rows, reducer)

    def _reducers_of(self, place: RecordPlace) -> tuple[Reducer, ...]:
        plan, step = self._step.plan, self._step.number
        if place.name is not None:
            return plan.reducers_of_parameter(place.kind, place.name, phase=self._phase, step=step)
        site = place.kind, place.layer, place.direction, place.is_recomputed
        if site not in self._reducers:
            self._reducers[site] = plan.reducers_of(
                place.kind, place.layer, place.direction, phase=self._phase, step=step, recomputed=place.is_recomputed
            )
        return self._reducers[site]

    def _send_whole(self, capture: Capture, reducers: Sequence[Reducer]) -> None:
        rows = capture.rows
        if rows is None:
            flat = capture.value.detach().reshape(1, -1)
            values = ReducedValues(flat, _span(None, flat.shape[1]), {}, lambda: np.zeros(1, "u8"))
        else:
            tokens = _two_dim(capture.tokens())
            values = ReducedValues(tokens, _span(capture.split, tokens.shape[1]), {}, lambda: _hashes(rows))
        parts = {reducer: part_of(reducer, values) for reducer in reducers}
        stats = next((part for reducer, part in parts.items() if isinstance(reducer, Stats)), None)
        bad = int(stats[-3:].sum()) if stats is not None else values.num_not_finite
        for reducer, part in parts.items():
            self._offer(capture, reducer, part, span=values.span, table=None, num_not_finite=bad)

    def _send_tokens(self, capture: Capture, rows: PassRows, reducer: PerToken) -> None:
        name, chosen_r = self._table(rows, reducer)
        if not len(chosen_r):
            return
        tokens = _two_dim(capture.value[tuple(index[chosen_r] for index in rows.at)])
        span = _span(capture.split, tokens.shape[1])
        vectors: dict[str, torch.Tensor] = {}
        try:
            if isinstance(reducer, Project):
                layer = capture.place.layer
                vectors[reducer.vector] = self._vectors.of_layer(reducer.vector, layer, size=span.whole)
        except UserError as error:
            self._on_problem(str(error))
            return
        values = ReducedValues(tokens, span, vectors, lambda: _hashes(rows)[chosen_r.numpy()])
        part = part_of(reducer, values)
        self._offer(capture, reducer, part, span=span, table=name, num_not_finite=values.num_not_finite)

    def _table(self, rows: PassRows, reducer: PerToken) -> tuple[str, torch.Tensor]:
        """Name of the table of the tokens that are shown, sent once, and which of the pass's they are."""
        kind = str(reducer) if isinstance(reducer, Sample) else ""
        if (rows.number, kind) not in self._tables:
            table = rows.table
            if isinstance(reducer, Sample):
                chosen_r = torch.from_numpy(np.sort(np.argsort(_hashes(rows), kind="stable")[: reducer.n]))
            else:
                is_shown = torch.tensor([key in self._step.keys for key in table.keys], dtype=torch.bool)
                chosen_r = is_shown[table.row_R].nonzero()[:, 0] if len(table.keys) else table.row_R
            name = f"{self._step.number}.{self._phase}.{len(self._tables)}"
            self._tables[rows.number, kind] = name, chosen_r
            if len(chosen_r):
                parts = (part[chosen_r] for part in (table.row_R, table.position_R, table.token_R))
                tokens = torch.stack(tuple(parts)).to(torch.int32).numpy()
                self._outlet.table(
                    FrameTable(run=self._step.run, name=name, step=self._step.number, keys=table.keys, tokens=tokens)
                )
        return self._tables[rows.number, kind]

    def _offer(
        self,
        capture: Capture,
        reducer: Reducer,
        part: np.ndarray,
        *,
        span: Span,
        table: str | None,
        num_not_finite: int,
    ) -> None:
        place = capture.place
        message = FramePart(
            where=Where(
                run=self._step.run,
                step=self._step.number,
                phase=self._phase,
                site=FrameSite(place.kind, place.layer, place.name, place.direction, place.is_recomputed),
                reducer=reducer,
                update=place.update,
            ),
            payload=part,
            span=span,
            table=table,
            microbatch=place.microbatch,
            rank=self._rank,
            axes=self._axes,
            num_not_finite=num_not_finite,
        )
        self._outlet.part(message)


def _two_dim(tokens: torch.Tensor) -> torch.Tensor:
    """Return `[R, F]`; one number per token is one feature."""
    return tokens.detach().flatten(1) if tokens.dim() > 1 else tokens.detach()[:, None]


def _span(split: DimSplit | None, num_features: int) -> Span:
    """Return the range of these features in the whole; parts are equal."""
    if split is None:
        return Span(0, num_features, num_features)
    start = split.index * num_features
    return Span(start, start + num_features, split.count * num_features)


def _hashes(rows: PassRows) -> np.ndarray:
    table = rows.table
    return token_hashes(table.keys, table.row_R.numpy(), table.position_R.numpy())


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSpec:
    """Settings of a rank's tracing: plain values, the same on every rank."""

    address: HubAddress
    run: str
    memory_bytes: int
    """Most bytes that wait to be sent, of each rank."""
    artifacts: Path | None = None
    """Folder of vectors to project on."""


class TracedPhases:
    """The line of one process to the hub, and the step that it is in.

    Args:
        group: processes that show the same phases.
        rank: of the process in its group of `world` processes.
        axes: place on every axis of the layout.
        unobserved: sites that the process cannot show -> why.
    """

    def __init__(
        self,
        spec: TraceSpec,
        *,
        group: RankGroup = RankGroup.POLICY,
        rank: int,
        world: int,
        axes: Mapping[str, int],
        unobserved: Mapping[SiteKind, str],
    ) -> None:
        self._spec, self._rank, self._axes = spec, rank, axes
        self._vectors = Vectors(spec.artifacts)
        self._step: TracedStep | None = None
        self._problems: set[str] = set()
        self.link = HubLink(
            spec.address,
            Role.RANK,
            hello={
                "run": spec.run,
                "group": group.value,
                "rank": rank,
                "world": world,
                "unobserved": {kind.value: why for kind, why in unobserved.items()},
            },
            memory_bytes=spec.memory_bytes,
        )

    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        """Begin a step, to which the phases that follow belong.

        Args:
            watches: texts of a `WatchPlan`.
            keys: rows whose tokens are shown one by one.
        """
        plan = WatchPlan.parse(watches)
        self._step = TracedStep(run=self._spec.run, number=step, plan=plan, keys=frozenset(keys))
        self.link.open()

    def end(self) -> None:
        """End the step. Idempotent."""
        self._step = None

    def close(self) -> None:
        """Send what waits, within a deadline. Idempotent."""
        self.end()
        self.link.close(timeout_s=CLOSE_S)

    def begin_phase(self, phase: str, *, outlet: FrameSender | None = None) -> TraceSink | None:
        """Begin a phase and return the sink of its sites, or None where nothing of it is watched in this step.

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
            outlet=outlet or DirectSender(self.link),
            rank=self._rank,
            axes=self._axes,
            vectors=self._vectors,
            on_problem=self._report,
        )

    def end_phase(self, phase: str) -> None:
        """End a phase that a sink was made for, also one that ended by an error."""
        if self._step is not None:
            counts = {"sent": self.link.sent, "dropped": self.link.dropped}
            self.link.say({"type": "end", "step": self._step.number, "phase": phase, **counts})

    def _report(self, text: str) -> None:
        if text not in self._problems:
            self._problems.add(text)
            logger.warning("tracer: %s", text)
            self.link.say({"type": "problem", "text": text})


class SiteTracing(TracedPhases, HookObserver):
    """Shows the passes of this rank."""

    def __init__(self, spec: TraceSpec, hook_points: HookPoints, here: RankInfo) -> None:
        axes, unobserved = asdict(here.coordinates), hook_points.unobserved
        super().__init__(spec, rank=here.rank, world=here.layout.world_size, axes=axes, unobserved=unobserved)

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        return self.begin_phase(phase.value)

    def end_call(self, phase: WorkerPass) -> None:
        self.end_phase(phase.value)
