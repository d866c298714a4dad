"""`RunAccount`: who waits in an asynchronous run, and what more staleness would bring, from the measured times.

An observer of the run's steps that measures, and the pure `account_of` that it calls. Two models are used:

- Two stages that exchange a batch and weights take max(t_gen, t_train) + t_refit a step in steady state, where t_gen is
  the time of a step's groups in engines whose places are all taken: the trainer cannot train two steps at once, the
  engines cannot decode more rows, and both stand still for a refit. It is the limit for any staleness.
- Short of it, the longest rows count: a group must end before its deadline. This is what `ideal_run` adds: it runs the
  schedule itself, in virtual time, over the measured times of groups.

Both take a row for no slower beside others, which is true while decoding is bound by the memory of a GPU. Engines that
are bound by arithmetic, as on a CPU, gain less than is said here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nemo_rl.algorithms.async_batches import limits_of
from nemo_rl.algorithms.async_groups import AsyncLimits
from nemo_rl.algorithms.async_simulation import Pipeline, ideal_run
from nemo_rl.algorithms.observers import StepObserver
from nemo_rl.algorithms.stages.columns import ROLLOUT
from nemo_rl.algorithms.stages.state import StepState
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.models.generation.interfaces import EngineLoad
from nemo_rl.models.weight_sync.base import WeightSync

__all__ = [
    "AsyncAccount",
    "AsyncTimes",
    "RunAccount",
    "account_of",
    "build_account",
    "pipeline_bound_s",
    "simulated_step_s",
]

Side = Literal["engines", "trainer", "staleness"]
IDLE_SHARE = 0.05
"""A side that is idle for less is busy: steps are never all of the same length."""
SIMULATED_STEPS = 10
WARM_UP_STEPS = 3
"""Steps that are left out of a mean, since the first ones start with nothing sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncTimes:
    """The measured times of one step, or summed over several; all times in seconds."""

    seconds: float
    num_steps: int = 1
    waited_s: float
    """The trainer waited for groups."""
    refit_s: float
    """The trainer sent weights and waited for engines that took them."""
    engine_idle_s: float
    """Engines had no row to decode and no weights to take; summed over engines."""
    num_engines: int = 1
    group_places: int
    """Groups that all engines together decode at once: engines x (`max_batch_size` // rows of a group)."""
    group_seconds: Sequence[float]
    """Time of each group that ended: from the join of its rows to the end of the last one."""

    @property
    def train_s(self) -> float:
        """Everything of a step but the wait for groups and the refit."""
        return max(0.0, self.seconds - self.waited_s - self.refit_s) / self.num_steps

    @property
    def generation_s(self) -> float:
        """Time that a step's groups take when all places are taken."""
        return sum(self.group_seconds) / self.group_places / self.num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncAccount:
    """The account of an asynchronous run.

    Example:
        >>> account = AsyncAccount(trainer_idle_share=0.4, engine_idle_share=0.01, binds="engines", gain_s=0.0)
        >>> account.text()
        'trainer idle 40 %, engines idle 1 %: the engines bind'
    """

    trainer_idle_share: float
    engine_idle_share: float
    binds: Side
    """The side that a faster run needs to be faster; `staleness`: none, but the engines would decode more groups beside
    the longest rows if more could be admitted."""
    gain_s: float | None
    """Seconds of a step that one more unit of `max_staleness` and `lookahead` would save at most; None: no group has
    ended."""

    def text(self) -> str:
        bound = {
            "engines": "the engines bind",
            "trainer": "the trainer binds",
            "staleness": "the staleness bound binds",
        }[self.binds]
        gain = f"; one more unit of staleness would save up to {self.gain_s:.2f} s a step" if self.gain_s else ""
        return (
            f"trainer idle {100 * self.trainer_idle_share:.0f} %, engines idle {100 * self.engine_idle_share:.0f} %: "
            f"{bound}{gain}"
        )


def account_of(times: AsyncTimes, limits: AsyncLimits) -> AsyncAccount:
    """Return the account of measured times.

    Example:
        Of four groups of a step one takes much longer than the others, and the trainer waits for it:

        >>> times = AsyncTimes(
        ...     seconds=10.0, waited_s=8.0, refit_s=0.0, engine_idle_s=1.0, group_places=8, group_seconds=[2, 2, 2, 20]
        ... )
        >>> account = account_of(times, AsyncLimits(num_groups=4, max_staleness=1, lookahead=1))
        >>> account.binds, round(account.gain_s, 2)
        ('staleness', 5.43)
    """
    trainer = min(1.0, max(0.0, times.waited_s / times.seconds))
    engines = min(1.0, max(0.0, times.engine_idle_s / (times.num_engines * times.seconds)))
    gain_s = _gain_s(times, limits, trainer)
    binds: Side = "trainer"
    if trainer > IDLE_SHARE:
        binds = "staleness" if (gain_s or 0.0) > IDLE_SHARE * times.seconds / times.num_steps else "engines"
    return AsyncAccount(trainer_idle_share=trainer, engine_idle_share=engines, binds=binds, gain_s=gain_s)


def pipeline_bound_s(times: AsyncTimes) -> float:
    """Return max(t_gen, t_train) + t_refit, the least time of a step at any staleness."""
    return max(times.generation_s, times.train_s) + times.refit_s / times.num_steps


def simulated_step_s(times: AsyncTimes, limits: AsyncLimits) -> float:
    """Return the time of a step in virtual time, where groups take the measured times in turn."""
    measured = times.group_seconds
    run = ideal_run(
        Pipeline(
            limits=replace(limits, overdue="wait", max_num_steps=SIMULATED_STEPS),
            row_seconds=lambda ordinal: [measured[ordinal % len(measured)]],
            train_s=times.train_s,
            refit_s=times.refit_s / times.num_steps,
            places=times.group_places,
        )
    )
    ends = [step.ended_at_s for step in run.steps[WARM_UP_STEPS - 1 :]]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _gain_s(times: AsyncTimes, limits: AsyncLimits, trainer_idle_share: float) -> float | None:
    if not times.group_seconds:
        return None
    if trainer_idle_share <= IDLE_SHARE:
        return 0.0
    more = replace(limits, max_staleness=limits.max_staleness + 1, lookahead=limits.lookahead + 1)
    now_s, then_s = (max(pipeline_bound_s(times), simulated_step_s(times, each)) for each in (limits, more))
    return max(0.0, now_s - then_s)


class RunAccount(StepObserver):
    """Keeps the account of a run, step by step.

    Args:
        limits: of its schedule.
        group_places: as in `AsyncTimes`.
        loads: asks each engine what it has done since the last call.
        refit_s: returns the seconds of the last refit.
    """

    def __init__(
        self,
        limits: AsyncLimits,
        *,
        group_places: int,
        loads: Callable[[], Mapping[int, EngineLoad]],
        refit_s: Callable[[], float],
    ) -> None:
        self._limits, self._group_places, self._loads, self._refit_s = limits, group_places, loads, refit_s
        self._began = self._asked = time.monotonic()
        self._waited_s = 0.0
        self._rows: Counter[int] = Counter()
        """Rows of the step by their staleness."""
        self._account: AsyncAccount | None = None

    def before_stage(self, stage: str) -> None:
        if stage == ROLLOUT:
            self._asked = time.monotonic()

    def after_stage(self, stage: str, step: StepState) -> None:
        if stage == ROLLOUT:
            self._waited_s = time.monotonic() - self._asked
            self._rows = Counter((step.policy_version - step.rows.weight_versions).tolist())

    def metrics(self) -> Mapping[str, float]:
        """Return the account of the step: shares of the time since the one before, and counts."""
        now, loads = time.monotonic(), self._loads()
        seconds, self._began = now - self._began, now
        busy_s = sum(load.busy_s for load in loads.values())
        times = AsyncTimes(
            seconds=seconds,
            waited_s=self._waited_s,
            refit_s=self._refit_s(),
            engine_idle_s=max(0.0, len(loads) * seconds - busy_s),
            num_engines=len(loads),
            group_places=self._group_places,
            group_seconds=[each for load in loads.values() for each in load.group_seconds],
        )
        account = self._account = account_of(times, self._limits)
        return {
            "async/trainer_idle_share": account.trainer_idle_share,
            "async/engine_idle_share": account.engine_idle_share,
            "async/gain_of_staleness_s": account.gain_s or 0.0,
            "async/thrown_tokens": float(sum(load.thrown_tokens for load in loads.values())),
            **{f"async/rows_of_staleness/{age}": float(count) for age, count in sorted(self._rows.items())},
        }

    def text(self) -> str:
        if self._account is None:
            return ""
        rows = " ".join(f"{age}:{count}" for age, count in sorted(self._rows.items()))
        return f"{self._account.text()}; rows by staleness {rows}"


def build_account(grpo: GRPOConfig, generation: GenerationConfig, weight_sync: WeightSync) -> list[RunAccount]:
    """Return the observer that says who waits, of an asynchronous run; none of another one."""
    if not grpo.samples_ahead:
        return []
    return [
        RunAccount(
            limits_of(grpo),
            group_places=generation.num_replicas * (generation.max_batch_size // grpo.num_generations_per_prompt),
            loads=weight_sync.take_loads,
            refit_s=lambda: 0.0 if weight_sync.report is None else weight_sync.report.ms / 1e3,
        )
    ]
