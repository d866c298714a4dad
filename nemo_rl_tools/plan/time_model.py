"""`estimate`: a run in virtual time, from constants and the recipe: seconds of a step, its parts, and who waits.

    StepSimulation (the schedule, engines and refits of `AsyncSimulation`)
      |- engines     a turn takes turn_s(rows); a batch of the embedded engine is not joined in synchronous runs
      |- write       rows that ended together are scored and written, one call after the other
      |- train       driver, then each pass of the step over the packs that the run would plan, then what a save blocks
      `- processors  all of these share `cores` where that is given: each then gets cores / processes of its time

A synchronous run is the asynchronous one with a staleness of 0. Invariant: a function of its arguments; busy and idle
seconds of each side add up to the simulated time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from nemo_rl.algorithms.async_account import AsyncSimulation, Pipeline, SimulatedEngine
from nemo_rl.algorithms.async_batches import limits_of
from nemo_rl.algorithms.async_selection import AsyncLimits, StepSelection
from nemo_rl.config.parts import SELECTIONS
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ConfigError
from nemo_rl_tools.plan.setting import PlanSetting, passes_of
from nemo_rl_tools.plan.time_constants import TimeConstants
from nemo_rl_tools.plan.time_work import (
    PlannedRow,
    Workload,
    cache_bytes,
    decode_flops,
    pass_amounts,
    prefill_flops,
    refit_bytes,
    rows_of_group,
    rows_of_step,
    turn_bytes,
)

__all__ = ["TimeEstimate", "estimate"]

WARM_UP_STEPS, STEPS = 3, 8
"""Simulated steps that are left out at the start, and those that are counted; the last ones, ahead of which nothing is
sampled any more, follow."""
PASSES = frozenset(map(str, WorkerPass))
STAGES = ("rollout", "driver", *map(str, WorkerPass), "checkpoint", "refit")
"""Stages of a step in their order; `rollout` is what the trainer waits for groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """A step in seconds, as a mean over simulated ones."""

    step_s: float
    stages: Mapping[str, float]
    """Seconds by stage, as in `STAGES`; they add up to `step_s`."""
    policy_idle_share: float
    """Share of the time in which the policy workers run no pass."""
    engine_idle_share: float
    """Share of the time in which an engine decodes no row."""
    tokens_s: float
    """Tokens of rows, prompts included, in a second."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Work:
    """Something that a process does, beside engines."""

    name: str
    left_s: float
    """Seconds that it still takes if it has its processors to itself."""
    processes: int
    done: Callable[[], None]
    began_at_s: float
    share: float = 1.0
    turn: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """What had been done when an update was done."""

    now_s: float
    tokens: int
    stage_s: Mapping[str, float]
    busy_s: Mapping[str, float]


class StepSimulation(AsyncSimulation):
    """Simulates a recipe.

    Args:
        cores: processors that all processes share; None where each has its own.
    """

    def __init__(
        self, setting: PlanSetting, constants: TimeConstants, workload: Workload, *, cores: float | None, steps: int
    ) -> None:
        grpo, generation = setting.config.grpo, setting.policy.generation
        self.setting, self.constants, self.workload, self.cores = setting, constants, workload, cores
        self._rows: dict[int, list[PlannedRow]] = {}
        # The embedded engine of a synchronous run ends a batch before it begins the next one.
        self._is_static = not grpo.samples_ahead and generation.backend == "torch"
        self._engine_ranks = generation.ranks_per_engine
        self._fixed_turn_s, self._row_turn_s = self._turn_parts()
        self._began: dict[int, float] = {}
        """Engine -> the time at which its batch has begun."""
        self._engine_of: dict[str, int] = {}
        self._kept_back: list[str] = []
        """Groups that have ended in a batch that has not."""
        self._ended: list[str] = []
        """Groups that wait to be written."""
        self._works: list[_Work] = []
        self._is_writing = False
        self.tokens = 0
        self.stage_s: dict[str, float] = defaultdict(float)
        self.busy_s: dict[str, float] = defaultdict(float)
        self.marks: list[_Mark] = []
        ahead = AsyncLimits(num_groups=grpo.num_prompts_per_step, max_staleness=0, lookahead=0)
        limits = replace(limits_of(grpo) if grpo.samples_ahead else ahead, overdue="wait", max_num_steps=steps)
        refit_s = constants.refit_s + constants.refit_byte_s * refit_bytes(setting) * generation.num_replicas
        super().__init__(
            Pipeline(
                limits=limits,
                row_seconds=lambda ordinal: [float(row.response) for row in self.rows_of(ordinal)],
                train_s=0.0,
                refit_s=refit_s,
                num_engines=generation.num_replicas,
                places=max(grpo.num_generations_per_prompt, generation.max_batch_size),
            ),
            order=SELECTIONS.load(grpo.async_.selection, key="grpo.async.selection")(),
        )

    def _turn_parts(self) -> tuple[float, float]:
        """Return the seconds of a turn that do not depend on its rows, and those of each row, as a mean of a step."""
        setting, constants = self.setting, self.constants
        fixed = constants.turn_layer_s * setting.model.flops_shape.num_layers
        fixed += constants.turn_byte_s * turn_bytes(setting)
        rows = rows_of_step(setting, self.workload)
        tokens = sum(row.response for row in rows)
        flops = sum(decode_flops(setting, row) for row in rows) / tokens
        cached = sum(row.response * (row.prompt + row.response / 2) for row in rows) / tokens
        cache_s = cached * cache_bytes(setting) * constants.turn_byte_s
        return fixed, max(1e-12, constants.row_turn_s + flops * constants.decode_flop_s + cache_s)

    def rows_of(self, ordinal: int) -> list[PlannedRow]:
        if ordinal not in self._rows:
            self._rows[ordinal] = rows_of_group(self.setting, self.workload, ordinal)
        return self._rows[ordinal]

    # ---- engines

    def free_places(self, engine: SimulatedEngine) -> int:
        is_closed = self._is_static and engine.rows and self._began.get(engine.number) != self.now_s
        return 0 if is_closed else super().free_places(engine)

    def group_joined(self, engine: SimulatedEngine, ordinal: int) -> None:
        if len(engine.rows) == len(self.rows_of(ordinal)):
            self._began[engine.number] = self.now_s
        engine.stall_s += prefill_flops(self.setting, self.rows_of(ordinal)[0].prompt) * self.constants.decode_flop_s

    def _turn_s(self, engine: SimulatedEngine) -> float:
        """Return the seconds of a turn with the rows that the engine has."""
        return self._fixed_turn_s + len(engine.rows) * self._row_turn_s

    def finished(self, name: str) -> None:
        (self._kept_back if self._is_static else self._ended).append(name)

    def _end_batches(self) -> None:
        """Hand on the groups of batches that have ended; an engine has one at a time."""
        busy = {engine.number for engine in self.engines if engine.rows}
        over = [name for name in self._kept_back if self._engine_of[name] not in busy]
        self._kept_back = [name for name in self._kept_back if self._engine_of[name] in busy]
        self._ended += over

    # ---- writing and training

    def _write(self) -> None:
        """Write all groups that have ended as one call, when the one before is done."""
        if self._is_writing or not self._ended:
            return
        names, self._ended, self._is_writing = self._ended, [], True
        rows = len(names) * self.setting.config.grpo.num_generations_per_prompt
        config = self.setting.config
        seconds = self.constants.row_write_s(config.env.name) * rows / config.experience.num_workers
        self._start("write", seconds, 1, partial(self._written, names))

    def _written(self, names: Sequence[str]) -> None:
        self._is_writing = False
        for name in names:
            super().finished(name)

    def train(self, selection: StepSelection, done: Callable[[], None]) -> None:
        rows = [row for ticket in selection.tickets for row in self.rows_of(ticket.draw.ordinal)]
        self.tokens += sum(row.tokens for row in rows)
        self._train_next(self._stages(rows), done)

    def _stages(self, rows: Sequence[PlannedRow]) -> Iterator[tuple[str, float, int]]:
        """Yield name, seconds and processes of what the trainer does in a step, in order."""
        constants, setting = self.constants, self.setting
        yield "driver", constants.driver_step_s + constants.driver_row_s * len(rows), 1
        for part in passes_of(setting):
            amounts = pass_amounts(setting, rows, [part])
            yield str(part), constants.seconds(amounts), setting.layout.world_size
        saving = setting.config.checkpointing
        if saving.enabled:
            seconds = constants.checkpoint_byte_s * refit_bytes(setting) / saving.save_period
            yield "checkpoint", seconds, setting.layout.world_size

    def _train_next(self, stages: Iterator[tuple[str, float, int]], done: Callable[[], None]) -> None:
        found = next(stages, None)
        if found is None:
            done()
        else:
            self._start(*found, partial(self._train_next, stages, done))

    # ---- processors

    def _start(self, name: str, seconds: float, processes: int, done: Callable[[], None]) -> None:
        work = _Work(name=name, left_s=seconds, processes=processes, done=done, began_at_s=self.now_s)
        self._works.append(work)
        self._plan_work(work)

    def _plan_work(self, work: _Work) -> None:
        work.turn += 1
        self.after(work.left_s / work.share, partial(self._end_work, work, work.turn))

    def _end_work(self, work: _Work, turn: int) -> None:
        if work.turn == turn:
            self._works.remove(work)
            if work.name != "write":
                self.stage_s[work.name] += self.now_s - work.began_at_s
            work.done()

    def _go_on(self) -> None:
        self._end_batches()
        self._write()
        super()._go_on()
        self._share_processors()

    def _share_processors(self) -> None:
        """Give every process its share, and plan anew what ends at another time then."""
        for name, (engine, _) in self.live.items():
            self._engine_of[name] = engine.number
        decoding = [engine for engine in self.engines if engine.rows and not engine.is_frozen]
        count = len(decoding) * self._engine_ranks + sum(work.processes for work in self._works)
        share = 1.0 if self.cores is None or not count else min(1.0, self.cores / count)
        for engine in decoding:
            turn_s = self._turn_s(engine)
            if (engine.share, engine.turn_s) != (share, turn_s):
                engine.move(self.now_s)
                engine.share, engine.turn_s = share, turn_s
                self._plan(engine)
        for work in self._works:
            if work.share != share:
                work.share = share
                self._plan_work(work)

    def trained(self, step: int) -> None:
        # The refit that follows an update belongs to the next mark.
        stage_s = dict(self.stage_s)
        self.stage_s["refit"] += self.pipeline.refit_s
        self.marks.append(_Mark(now_s=self.now_s, tokens=self.tokens, stage_s=stage_s, busy_s=dict(self.busy_s)))

    def pass_time(self, until_s: float) -> None:
        passed = until_s - self.now_s
        for work in self._works:
            work.left_s = max(0.0, work.left_s - passed * work.share)
        self.busy_s["engines"] += passed * sum(bool(engine.rows) and not engine.is_frozen for engine in self.engines)
        self.busy_s["policy"] += passed * any(work.name in PASSES for work in self._works)


def estimate(
    setting: PlanSetting, constants: TimeConstants, workload: Workload, *, cores: float | None, steps: int = STEPS
) -> TimeEstimate:
    """Simulate a run and return the mean of its steps behind the first ones.

    Args:
        cores: as in `StepSimulation`.

    Raises:
        ConfigError: the recipe has what the model does not know, or cannot run in its layout.
    """
    if setting.config.experience.conversation.enabled:
        raise ConfigError("--time: expected rows of a single turn; how long tools and environments take is not known")
    if setting.teacher is not None:
        raise ConfigError("--time: expected a recipe without distillation; what a teacher takes is not known")
    more = 1 + setting.config.grpo.async_.steps_ahead
    simulation = StepSimulation(setting, constants, workload, cores=cores, steps=WARM_UP_STEPS + steps + more)
    simulation.run()
    first, last = simulation.marks[WARM_UP_STEPS - 1], simulation.marks[WARM_UP_STEPS - 1 + steps]
    seconds = last.now_s - first.now_s
    stages = {name: (value - first.stage_s.get(name, 0.0)) / steps for name, value in last.stage_s.items()}
    step_s, engines = seconds / steps, len(simulation.engines)
    stages["rollout"] = max(0.0, step_s - sum(stages.values()))
    return TimeEstimate(
        step_s=step_s,
        stages={name: stages[name] for name in STAGES if name in stages},
        policy_idle_share=1 - (last.busy_s.get("policy", 0.0) - first.busy_s.get("policy", 0.0)) / seconds,
        engine_idle_share=1 - (last.busy_s["engines"] - first.busy_s["engines"]) / seconds / engines,
        tokens_s=(last.tokens - first.tokens) / seconds,
    )
