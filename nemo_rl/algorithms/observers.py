"""`StepObserver`: what follows the steps of a run without taking part in them.

    GRPOTrainer walks its list of observers:
      begin          before a step's rollout
      before_stage   a stage starts                       (StageDisplay)
      after_stage    a stage has run                      (StepRecorder, LiveTracing)
      end            all stages have run, the rows are still there
      failed         instead of `end`, when the step ends with an error
      metrics        numbers of the observer's own, for the log
      text           words about the step, for the panel
      report         the numbers of the step are known    (MismatchWarning, JumpWarning, LiveTracing)

Here are the small ones; `StepRecorder` and `LiveTracing` have their own files. Invariant: an observer changes no
number of a run.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from nemo_rl.algorithms.kept_steps.folder import RECORDS
from nemo_rl.algorithms.run_folder import PROFILES, STEPS
from nemo_rl.algorithms.stages.columns import ROLLOUT
from nemo_rl.algorithms.stages.stage import Stage, StageTools, StepState
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import PolicyConfig, ProfileConfig
from nemo_rl.config.run import DiagnosticsConfig, RecordConfig
from nemo_rl.data_plane.schema import ROUTE_FIELDS
from nemo_rl.distributed.worker_groups import Request, WorkerFleet, ask
from nemo_rl.models.generation.interfaces import RecordedEngine
from nemo_rl.models.policy.recording import RecordSpec, recorded_model
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.utils.panel import Panel
from nemo_rl.utils.r3_trace import trace_plan

__all__ = [
    "MISMATCH_METRIC",
    "MISMATCH_THRESHOLD",
    "JumpWarning",
    "MismatchWarning",
    "RouteTracePlan",
    "StageDisplay",
    "StepObserver",
    "StepObservers",
    "StepProfile",
    "TensorRecording",
    "build_observers",
    "record_spec",
]


class StepObserver:
    """Follows the steps of a run; every method does nothing unless it is overridden."""

    def begin(self, number: int) -> None:
        """The step begins; its rows are sampled next."""

    def before_stage(self, stage: str) -> None:
        """A stage starts."""

    def after_stage(self, stage: str, step: StepState) -> None:
        """A stage has run."""

    def end(self, step: StepState, *, last_checkpoint: int) -> None:
        """All stages have run; the rows are cleared next.

        Args:
            last_checkpoint: its step, 0 where there is none.
        """

    def failed(self, step: StepState, error: BaseException, *, stage: str) -> None:
        """The step has failed in `stage`; its rows may be gone."""

    def metrics(self) -> Mapping[str, float]:
        """Return numbers of the last step, for the log."""
        return {}

    def text(self) -> str:
        """Return words about the last step for the person at the terminal; empty: none."""
        return ""

    def report(self, number: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step are known."""


class StepObservers(StepObserver):
    """Several observers as one: each call goes to all of them, in order."""

    def __init__(self, *observers: StepObserver) -> None:
        self.all = observers

    def begin(self, number: int) -> None:
        for observer in self.all:
            observer.begin(number)

    def before_stage(self, stage: str) -> None:
        for observer in self.all:
            observer.before_stage(stage)

    def after_stage(self, stage: str, step: StepState) -> None:
        for observer in self.all:
            observer.after_stage(stage, step)

    def end(self, step: StepState, *, last_checkpoint: int) -> None:
        for observer in self.all:
            observer.end(step, last_checkpoint=last_checkpoint)

    def failed(self, step: StepState, error: BaseException, *, stage: str) -> None:
        for observer in self.all:
            observer.failed(step, error, stage=stage)

    def metrics(self) -> Mapping[str, float]:
        return {name: value for observer in self.all for name, value in observer.metrics().items()}

    def text(self) -> str:
        return "; ".join(filter(None, (observer.text() for observer in self.all)))

    def report(self, number: int, metrics: Mapping[str, float]) -> None:
        for observer in self.all:
            observer.report(number, metrics)


class StageDisplay(StepObserver):
    """Shows in the panel which stage runs."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel

    def before_stage(self, stage: str) -> None:
        self._panel.stage(stage)


def record_spec(
    config: RecordConfig, policy: PolicyConfig, *, stages: Collection[str], log_dir: Path
) -> RecordSpec | None:
    """Return the recording of the policy workers, or None where none of their passes is recorded.

    Args:
        stages: names of the stages of a step.
    """
    phases = tuple(phase for phase in config.phases if phase in stages)
    if not config.steps or not phases:
        return None
    return RecordSpec(
        # Workers have directories of their own.
        folder=(log_dir / STEPS / "step_{step}" / RECORDS).absolute(),
        sites=config.sites,
        phases=phases,
        model=recorded_model(policy),
        weights=f"run {log_dir}",
        must_succeed=False,
    )


RECORDING = "recording"
"""Stage of calls that begin and end recordings, in errors."""


class TensorRecording(StepObserver):
    """Has the policy workers, and the engines, write their tensors in the steps that the recipe names.

    Args:
        stages: names of the stages of a step: workers are asked where one of their passes is recorded.
    """

    def __init__(
        self,
        config: RecordConfig,
        *,
        policy: TQPolicy,
        engines: WorkerFleet,
        stages: Collection[str],
        timeout_s: float,
    ) -> None:
        self._steps, self._timeout_s = frozenset(config.steps), timeout_s
        self._policy = policy if set(config.phases) & set(stages) else None
        self._engines = engines if config.has_generation else None
        self._decodes = False

    def begin(self, number: int) -> None:
        if number not in self._steps:
            return
        if self._engines is not None:
            self._decodes = True
            self._ask_engines(self._engines, ask(RecordedEngine.begin_recording, step=number))
        if self._policy is not None:
            self._policy.run(ask(PolicyWorker.begin_recording, step=number), RECORDING)

    def after_stage(self, stage: str, step: StepState) -> None:
        if stage == ROLLOUT and self._engines is not None and self._decodes:
            self._decodes = False
            self._ask_engines(self._engines, ask(RecordedEngine.end_recording))

    def end(self, step: StepState, *, last_checkpoint: int) -> None:
        if step.number in self._steps and self._policy is not None:
            self._policy.run(ask(PolicyWorker.end_recording), RECORDING)

    def _ask_engines(self, engines: WorkerFleet, request: Request[None]) -> None:
        engines.run(request, stage=RECORDING, timeout_s=self._timeout_s)


class StepProfile(StepObserver):
    """Has the policy workers profile the steps that the recipe names (`policy.profile.steps`)."""

    def __init__(self, policy: TQPolicy, config: ProfileConfig, *, log_dir: Path) -> None:
        self._policy, self._config, self._folder = policy, config, (log_dir / PROFILES).absolute()

    def begin(self, number: int) -> None:
        if number in self._config.steps:
            folder = self._folder / f"step_{number}" if self._config.kind == "torch" else None
            self._policy.run(ask(PolicyWorker.start_gpu_profiling, folder=folder), "profiling")

    def end(self, step: StepState, *, last_checkpoint: int) -> None:
        if step.number in self._config.steps:
            self._policy.run(ask(PolicyWorker.stop_gpu_profiling), "profiling")


class RouteTracePlan(StepObserver):
    """Writes into the route trace, once, which stages replay routes."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages: list[str] | None = [stage.name for stage in stages if set(stage.reads) & set(ROUTE_FIELDS)]

    def begin(self, number: int) -> None:
        stages, self._stages = self._stages, None
        if stages is not None:
            trace_plan(stages=stages)


MISMATCH_METRIC, RATIO_METRIC = "train/token_mult_prob_error", "train/gen_probs_ratio"
MISMATCH_THRESHOLD = 1.05
"""Mean factor between the two probabilities of a token above which a fault is likelier than rounding."""


class MismatchWarning(StepObserver):
    """Warns, once in a run, that rollout and trainer give sampled tokens different probabilities.

    Args:
        note: shows a line to the person at the terminal.
    """

    def __init__(
        self,
        grpo: GRPOConfig,
        policy: PolicyConfig,
        *,
        keeps_steps: bool,
        log_dir: Path,
        note: Callable[[str], None],
    ) -> None:
        self._grpo, self._policy, self._keeps_steps, self._log_dir = grpo, policy, keeps_steps, log_dir
        self._note, self._is_said = note, False
        generation = policy.generation
        has_filter = generation.top_p < 1 or generation.top_k is not None
        self._tells_bias = has_filter and not generation.record_support

    def report(self, number: int, metrics: Mapping[str, float]) -> None:
        ratio, error = metrics.get(RATIO_METRIC), metrics.get(MISMATCH_METRIC)
        if self._tells_bias and ratio is not None:
            self._tells_bias = False
            self._note(self._bias(number, ratio))
        # Rows of older weights differ by what was learned since.
        is_stale = self._grpo.samples_ahead and self._grpo.async_.max_staleness > 0
        if not self._is_said and not is_stale and error is not None and error > MISMATCH_THRESHOLD:
            self._is_said = True
            self._note(self._mismatch(number, error))

    def _bias(self, step: int, ratio: float) -> str:
        return (
            "WARNING: policy.generation.top_p or top_k without policy.generation.record_support: engine and trainer "
            f"each have their own sampling mask; the mean of pi_old / pi_gen in step {step} is {ratio:.4f}, "
            "where 1 is without bias (with the sampler's log-probabilities for pi_old, updates within the step move "
            "it, too)"
        )

    def _mismatch(self, step: int, error: float) -> str:
        generation = self._policy.generation
        causes = ["engines with weights of another step", "a precision or kernel of the engine that rounds otherwise"]
        if self._grpo.use_generation_logprobs_as_prev:
            causes.append("several updates per rollout (grpo.use_generation_logprobs_as_prev compares with the newest)")
        if generation.top_p < 1 or generation.top_k is not None:
            causes.append("sampling masks of top-p or top-k that differ")
        if not self._policy.router_replay.enabled:
            causes.append("experts chosen otherwise, in a mixture of experts (policy.router_replay.enabled)")
        kept = "" if self._keeps_steps else ", after a run with diagnostics.keep_steps.enabled=true"
        return (
            f"WARNING: {MISMATCH_METRIC} is {error:.4f} in step {step}, above {MISMATCH_THRESHOLD}: trainer and "
            f"rollout differ on the tokens that were sampled. Likely causes: {'; '.join(causes)}. To find it: "
            f"nemo-rl inspect {self._log_dir} step {step} mismatch{kept}"
        )


JUMP_FLOORS = {"train/reference_kl": 0.05, "train/policy_kl": 0.05, "train/grad_norm": 1.0}
"""Metrics of which a jump is told -> the value up to which no increase is one; gradients below the usual
`policy.max_grad_norm` do no harm."""
JUMP_FACTOR = 5.0
JUMP_STEPS, JUMP_LEAST_STEPS = 20, 10
"""Steps whose median a value is compared with, and the least number of them."""


class JumpWarning(StepObserver):
    """Warns in one line of a jump of KL or gradient norm, once until the value is down again.

    Args:
        note: shows a line to the person at the terminal.
    """

    def __init__(self, *, note: Callable[[str], None]) -> None:
        self._note = note
        self._last = {name: deque[float](maxlen=JUMP_STEPS) for name in JUMP_FLOORS}
        self._is_up = dict.fromkeys(JUMP_FLOORS, False)

    def report(self, number: int, metrics: Mapping[str, float]) -> None:
        for name, last in self._last.items():
            value = metrics.get(name, math.nan)
            usual = statistics.median(last) if len(last) >= JUMP_LEAST_STEPS else math.inf
            is_up = value > max(JUMP_FLOORS[name], JUMP_FACTOR * usual)
            if is_up and not self._is_up[name]:
                self._note(
                    f"WARNING: {name} jumped to {value:.3g} in step {number}; its median of the last {len(last)} steps "
                    f"is {usual:.3g}"
                )
            self._is_up[name] = is_up
            if math.isfinite(value):
                last.append(value)


def build_observers(
    config: DiagnosticsConfig,
    tools: StageTools,
    engines: WorkerFleet,
    stages: Sequence[Stage],
    *,
    panel: Panel,
    timeout_s: float,
) -> list[StepObserver]:
    """Return the observers of every run; the step recorder, the tracer and the account are built beside their code.

    Args:
        timeout_s: deadline of one call of the engines.
    """
    policy, settings, log_dir, names = (
        tools.policy,
        tools.settings,
        tools.logger.log_dir,
        [each.name for each in stages],
    )
    keeps_steps = config.keep_steps.enabled
    return [
        StageDisplay(panel),
        RouteTracePlan(stages),
        TensorRecording(config.record, policy=policy, engines=engines, stages=names, timeout_s=timeout_s),
        StepProfile(policy, settings.profile, log_dir=log_dir),
        MismatchWarning(tools.grpo, settings, keeps_steps=keeps_steps, log_dir=log_dir, note=panel.note),
        JumpWarning(note=panel.note),
    ]
