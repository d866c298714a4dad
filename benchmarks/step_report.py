"""Records of `grpo_step`: the samples of each run, what is wrong with them, and the table.

Pure functions of measured numbers. Invariant: a report without problems has counted bytes, left no row behind and
computed the same losses through every store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from benchmarks.common import Spread

__all__ = [
    "GroupStatistics",
    "RunResult",
    "StepSample",
    "group_statistics_problems",
    "pair_problems",
    "run_problems",
    "stage_table",
    "step_sample",
]

WARMUP_STEPS = 1
"""Left out of medians where there are more: first calls allocate and compile."""
DRIVER_SHARE_LIMIT = 0.01
LONG_RESPONSE_TOKENS = 512
"""The limit holds for responses of this mean length or more."""
GROUP_STATISTICS_LIMIT_MS = 1.0
STAGES = ("rollout", "prev_logprobs", "reference_logprobs", "advantages", "train", "log", "refit")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """Raw numbers of one step."""

    step: int
    seconds: float
    """Rollout to cleared rows; refit comes after it."""
    stage_seconds: dict[str, float]
    data_plane_seconds: float
    """On the step's own path: of each stage, the process that spent most in the data plane."""
    process_seconds: float
    """In the data plane, added up over processes that work side by side."""
    payload_bytes: float
    """Columns put and fetched."""
    driver_bytes: float
    """Metas, plans, row scalars and results that the driver sent or received."""
    live_rows: float | None
    """Rows in the data plane after the step; None where nobody counted."""
    mean_response_tokens: float
    loss: float | None
    """None when nothing was trained."""
    grad_norm: float | None

    @property
    def data_plane_share(self) -> float:
        return self.data_plane_seconds / self.seconds if self.seconds else math.inf

    @property
    def driver_share(self) -> float:
        return self.driver_bytes / self.payload_bytes if self.payload_bytes else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """One run of some steps."""

    name: str
    impl: str
    """Payload store that the run was asked for."""
    is_long: bool = False
    """Whether its responses must be long, so that the limit of the driver's share holds."""
    config: Mapping[str, object] = field(default_factory=dict)
    load_before: Sequence[float] = ()
    load_after: Sequence[float] = ()
    samples: tuple[StepSample, ...]

    @property
    def steady(self) -> tuple[StepSample, ...]:
        """The samples that medians are made of."""
        return self.samples[WARMUP_STEPS:] or self.samples

    def stage_spread(self, stage: str) -> Spread | None:
        """None for a stage that this run does not have."""
        seconds = [s.stage_seconds[stage] for s in self.steady if stage in s.stage_seconds]
        return Spread.of(seconds) if seconds else None

    def spreads(self) -> dict[str, Spread]:
        """Medians and ranges by name; seconds unless the name says otherwise."""
        stages = {stage: self.stage_spread(stage) for stage in STAGES}
        named: dict[str, list[float]] = {
            "step": [s.seconds for s in self.steady],
            "data_plane": [s.data_plane_seconds for s in self.steady],
            "data_plane_all_processes": [s.process_seconds for s in self.steady],
            "data_plane_share": [s.data_plane_share for s in self.steady],
            "payload_bytes": [s.payload_bytes for s in self.steady],
            "driver_bytes": [s.driver_bytes for s in self.steady],
            "driver_share": [s.driver_share for s in self.steady],
        }
        measured = {name: Spread.of(values) for name, values in named.items()}
        return {**{f"stage/{name}": spread for name, spread in stages.items() if spread is not None}, **measured}

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "impl": self.impl,
            "config": dict(self.config),
            "load_before": list(self.load_before),
            "load_after": list(self.load_after),
            "warmup_steps": len(self.samples) - len(self.steady),
            "summary": {name: asdict(spread) for name, spread in self.spreads().items() if _is_finite(spread)},
            "samples": [asdict(sample) for sample in self.samples],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatistics:
    """Raw milliseconds of one step's driver maths."""

    num_groups: int
    group_size: int
    statistics_ms: tuple[float, ...]
    """`group_statistics`."""
    total_ms: tuple[float, ...]
    """`group_statistics` and `estimate_advantages`."""

    def to_json(self) -> dict[str, object]:
        summary = {"statistics_ms": Spread.of(self.statistics_ms), "total_ms": Spread.of(self.total_ms)}
        return {**asdict(self), "summary": {name: asdict(spread) for name, spread in summary.items()}}


def step_sample(metrics: Mapping[str, float]) -> StepSample:
    """The sample in one line of `metrics.jsonl`."""
    stages = {name: metrics[f"timing/{name}_s"] for name in STAGES if f"timing/{name}_s" in metrics}
    return StepSample(
        step=int(metrics["step"]),
        seconds=metrics["timing/step_s"],
        stage_seconds=stages,
        data_plane_seconds=metrics.get("data_plane/seconds", 0.0),
        process_seconds=metrics.get("data_plane/process_seconds", 0.0),
        payload_bytes=metrics.get("data_plane/payload_bytes", 0.0),
        driver_bytes=metrics.get("data_plane/driver_bytes", 0.0),
        live_rows=metrics.get("data_plane/live_rows"),
        mean_response_tokens=metrics["rollout/mean_response_tokens"],
        loss=metrics.get("train/loss"),
        grad_norm=metrics.get("train/grad_norm"),
    )


def run_problems(result: RunResult, *, num_steps: int) -> list[str]:
    """Why the numbers of a run cannot be trusted; empty when they can."""
    where, problems = result.name, []
    if len(result.samples) != num_steps:
        problems.append(f"{where}: expected {num_steps} steps, got {len(result.samples)}")
    used = _impl_of(result.config)
    if used is not None and used != result.impl:
        problems.append(f"{where}: expected data plane {result.impl!r}, the run used {used!r}")
    for sample in result.samples:
        problems += [f"{where}, step {sample.step}: {text}" for text in _sample_problems(sample)]
        if result.is_long:
            problems += [f"{where}, step {sample.step}: {text}" for text in _long_problems(sample)]
    if result.samples and all(sample.loss in (None, 0.0) for sample in result.samples):
        problems.append(f"{where}: no step has a loss other than 0; nothing was trained")
    return problems


def pair_problems(reference: RunResult, other: RunResult) -> list[str]:
    """Steps at which two runs on the same model, seed and number of ranks differ in any bit."""
    problems = []
    if len(reference.samples) != len(other.samples):
        problems.append(
            f"{reference.name} has {len(reference.samples)} steps, {other.name} {len(other.samples)}; "
            "their losses cannot be compared"
        )
    for ours, theirs in zip(reference.samples, other.samples, strict=False):
        for what, a, b in (("loss", ours.loss, theirs.loss), ("gradient norm", ours.grad_norm, theirs.grad_norm)):
            if a != b:
                problems.append(
                    f"step {ours.step}: {what} must be bit-identical, {reference.name} has {a!r}, {other.name} {b!r}"
                )
    return problems


def group_statistics_problems(measured: GroupStatistics) -> list[str]:
    median = Spread.of(measured.total_ms).median
    if median <= GROUP_STATISTICS_LIMIT_MS:
        return []
    return [
        f"group statistics and advantages of {measured.num_groups} groups x {measured.group_size}: expected a median "
        f"of at most {GROUP_STATISTICS_LIMIT_MS} ms, got {median:.3f} ms"
    ]


def stage_table(results: Sequence[RunResult], *, title: str) -> Table:
    """One column per run, one row per stage: median (lowest..highest)."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("median (min..max)")
    for result in results:
        table.add_column(result.name, justify="right")
    spreads = [result.spreads() for result in results]
    for stage in STAGES:
        cells = [str(found.get(f"stage/{stage}", "")) for found in spreads]
        if any(cells):
            table.add_row(f"{stage} s", *cells)
    for name, label in (
        ("step", "step s (without refit)"),
        ("data_plane", "data plane s"),
        ("data_plane_all_processes", "data plane s, all processes"),
    ):
        table.add_row(label, *(str(found[name]) for found in spreads))
    table.add_row("data plane share", *(_percent(found["data_plane_share"]) for found in spreads))
    table.add_row("payload bytes", *(f"{found['payload_bytes'].median:,.0f}" for found in spreads))
    table.add_row("driver bytes", *(f"{found['driver_bytes'].median:,.0f}" for found in spreads))
    table.add_row("driver share", *(_percent(found["driver_share"]) for found in spreads))
    return table


def _sample_problems(sample: StepSample) -> list[str]:
    problems = []
    if sample.payload_bytes <= 0 or sample.driver_bytes <= 0 or sample.data_plane_seconds <= 0:
        problems.append(
            f"the data plane counted nothing (payload {sample.payload_bytes:.0f} B, driver {sample.driver_bytes:.0f} "
            f"B, {sample.data_plane_seconds:.3f} s); is data_plane.observability.enabled off?"
        )
    if sample.live_rows != 0:
        problems.append(f"expected 0 live rows after the step, got {sample.live_rows}")
    if sample.seconds <= 0 or sample.data_plane_seconds >= sample.seconds:
        problems.append(f"the step took {sample.seconds:.3f} s, its data plane {sample.data_plane_seconds:.3f} s")
    inside = sum(seconds for stage, seconds in sample.stage_seconds.items() if stage != "refit")
    if inside > sample.seconds or not {"rollout", "train"} <= set(sample.stage_seconds):
        problems.append(f"stages {sample.stage_seconds} do not fit into a step of {sample.seconds:.3f} s")
    problems += [
        f"{what} is {value}"
        for what, value in (("loss", sample.loss), ("gradient norm", sample.grad_norm))
        if value is None or not math.isfinite(value)
    ]
    return problems


def _long_problems(sample: StepSample) -> list[str]:
    problems = []
    if sample.mean_response_tokens < LONG_RESPONSE_TOKENS:
        problems.append(
            f"expected responses of at least {LONG_RESPONSE_TOKENS} tokens, got {sample.mean_response_tokens:.0f}"
        )
    if sample.driver_share > DRIVER_SHARE_LIMIT:
        problems.append(
            f"expected a driver share of at most {DRIVER_SHARE_LIMIT}, got {sample.driver_bytes:.0f} B of "
            f"{sample.payload_bytes:.0f} B = {sample.driver_share:.4f}"
        )
    return problems


def _impl_of(config: Mapping[str, object]) -> str | None:
    """The payload store in a resolved config; None where there is none to look at."""
    section = config.get("data_plane")
    if not isinstance(section, Mapping):
        return None
    return str(section["impl"]) if section["enabled"] else "noop"


def _is_finite(spread: Spread) -> bool:
    return math.isfinite(spread.maximum)


def _percent(spread: Spread) -> str:
    return f"{spread.median:.2%} ({spread.minimum:.2%}..{spread.maximum:.2%})"
