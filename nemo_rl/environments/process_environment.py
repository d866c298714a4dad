"""Rewards from a function that runs in killable processes: math, reasoning_gym and custom rewards.

Built by the factory. A call that takes too long gives its responses 0 or stops the run, as `env.on_timeout` says; a
function that raises, or returns no finite number, always stops it. All that rewards print goes to a file of the run, a
few lines of it to the terminal; a reward that prints without end fills neither the disk nor the screen.

`build_environment`: the environment that the `env` section names. Called by the rollout worker.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl.config.env import EnvConfig
from nemo_rl.config.parts import ENVIRONMENTS, JUDGE, PROGRAM
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.reasoning_gym_wrapper import has_reasoning_gym
from nemo_rl.environments.interfaces import NO_REWARD, Environment, EnvReport, HasSource, Response
from nemo_rl.environments.rewards import answer_problem, exact_match, has_math_verify
from nemo_rl.environments.scorer_pool import Score, ScoreOutcome, ScorerItem, ScorerPool, ScorerSpec
from nemo_rl.errors import ConfigError, RewardError, name_some
from nemo_rl.utils.console import printable
from nemo_rl.utils.exits import machine_problem

__all__ = [
    "EnvironmentStart",
    "PartialEnvironment",
    "ProcessEnvironment",
    "RewardLog",
    "SortEnvironment",
    "build_environment",
    "reward_identity",
]


_FILE_LIMIT_BYTES = 64 * 1024 * 1024
"""Most bytes of the file of one run; it then ends with a line that says so."""
_LINES_SHOWN = 5
"""Per call: a step, a validation."""
_LAST_LINES = 5
"""Kept for the message of an error."""
_LINE_LIMIT = 300
"""Characters of a line that is shown."""


class RewardLog:
    """Takes lines and keeps what is to be shown.

    Args:
        path: the file, made with the first line; None writes none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._shown: list[str] = []
        self._num_hidden = 0
        self._last: deque[str] = deque(maxlen=_LAST_LINES)

    def hear(self, line: str) -> None:
        """Take one line."""
        with self._lock:
            self._write(line)
            text = printable(line, limit=_LINE_LIMIT)
            self._last.append(text)
            if len(self._shown) < _LINES_SHOWN:
                self._shown.append(text)
            else:
                self._num_hidden += 1

    def take(self) -> tuple[str, ...]:
        """Return the lines to show since the last call, and how many more there were."""
        with self._lock:
            lines, hidden = self._shown, self._num_hidden
            self._shown, self._num_hidden = [], 0
        if hidden:
            where = f" in {self._path}" if self._path is not None else ""
            lines.append(f"... and {hidden} more lines{where}")
        return tuple(lines)

    def last(self) -> tuple[str, ...]:
        """Return the newest lines, for the message of an error."""
        with self._lock:
            return tuple(self._last)

    def _write(self, line: str) -> None:
        if self._path is None or self._num_bytes > _FILE_LIMIT_BYTES:
            return
        encoded = line.encode("utf-8", "backslashreplace") + b"\n"
        self._num_bytes += len(encoded)
        if self._num_bytes > _FILE_LIMIT_BYTES:
            encoded = b"... more was printed than this file holds\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(encoded)
        except OSError as error:
            # No reward fails for what it prints; what a run must write names the problem as its end.
            self._num_bytes = _FILE_LIMIT_BYTES + 1
            self._shown.append(f"what rewards print is kept no more: {machine_problem(error) or error}")


# Characters of a prompt or response, and of a cause, in an error message.
TEXT_SHOWN = 200
CAUSE_SHOWN = 2500
_COMPONENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""It becomes a part of metric names and of curves."""


class ProcessEnvironment:
    """An environment that scores with one function, in processes that can be killed.

    Args:
        cfg: limits, number of processes, weights of components.
        spec: the function.
        start_timeout_s: for loading it.
        answer_of: what the function gets as `answer`.
        log_file: gets what the function prints; None keeps it nowhere.
    """

    def __init__(
        self,
        cfg: EnvConfig,
        spec: ScorerSpec,
        *,
        start_timeout_s: float,
        answer_of: Callable[[Prompt], object],
        log_file: Path | None = None,
    ) -> None:
        self._cfg = cfg
        self._spec = spec
        self._answer_of = answer_of
        self._log = RewardLog(log_file)
        self._pool = ScorerPool(
            spec,
            num_workers=cfg.num_workers,
            timeout_s=cfg.timeout_s,
            start_timeout_s=start_timeout_s,
            batch_size=cfg.reward_batch_size or 1,
            hear=self._log.hear,
        )

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        """Score every response, truncated ones included: the function sees what the model wrote."""
        items = [self._item(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        outcomes = self._pool.score(items)
        for item, outcome in zip(items, outcomes, strict=True):
            self._check(item, outcome)
        components = self._components(items, outcomes)
        return EnvReport(
            rewards=tuple(self._reward(outcome) for outcome in outcomes),
            components=components,
            num_timeouts=sum(outcome.timed_out for outcome in outcomes),
            printed=self._log.take(),
        )

    @property
    def overlaps(self) -> bool:
        """See `WaitsForOthers`: an `async def` waits."""
        return self._pool.is_async

    @property
    def source(self) -> str:
        """Return the digest of the function's source."""
        return self._pool.source

    def answer_problems(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """See `ChecksAnswers`: the function's `check_answer` says it, where it has one; a row without a column that the
        function needs cannot be scored either."""
        found = self._pool.answer_problems([self._answer_of(prompt) for prompt in prompts])
        needed = [name for name, is_needed in self._pool.columns.items() if is_needed]
        for place, prompt in enumerate(prompts):
            if missing := [name for name in needed if name not in prompt.metadata]:
                found[place] = (
                    f"reward function {self._spec.target!r} takes {name_some(missing)} by name, and the row has "
                    f"{name_some(sorted(prompt.metadata)) or 'no further columns'}"
                )
        return found

    def shutdown(self) -> None:
        """End the scoring processes. Idempotent."""
        self._pool.shutdown()

    def _item(self, prompt: Prompt, response: Response) -> ScorerItem:
        return ScorerItem(
            prompt=prompt.text,
            response=response.text,
            answer=self._answer_of(prompt),
            row=dict(prompt.metadata),
            prompt_tokens=len(prompt.ids),
            response_tokens=response.num_tokens,
            truncated=response.truncated,
        )

    def _check(self, item: ScorerItem, outcome: ScoreOutcome) -> None:
        cause = outcome.error
        if outcome.timed_out and self._cfg.on_timeout == "error":
            cause = (
                f"took longer than env.timeout_s {self._cfg.timeout_s:g} s; raise it, or set env.on_timeout=zero to "
                "give such responses reward 0"
            )
        if cause is not None:
            raise self._error(item, cause)

    def _error(self, item: ScorerItem, cause: str) -> RewardError:
        lines = [
            f"reward function {self._spec.target!r} {printable(cause, limit=CAUSE_SHOWN, keep_lines=True)}",
            f"  prompt: {item.prompt[:TEXT_SHOWN]!r}",
            f"  response: {item.response[:TEXT_SHOWN]!r}",
        ]
        lines += [f"  printed: {line}" for line in self._log.last()]
        return RewardError("\n".join(lines))

    def _components(
        self, items: Sequence[ScorerItem], outcomes: Sequence[ScoreOutcome]
    ) -> dict[str, tuple[float, ...]]:
        """Return the parts by name, NaN for rows without a score; check that every row has the same ones."""
        scored = [(item, outcome.score) for item, outcome in zip(items, outcomes, strict=True) if not outcome.timed_out]
        names = set(self._cfg.reward_weights)
        if not names and scored and isinstance(scored[0][1], dict):
            names = set(scored[0][1])
        for item, score in scored:
            self._check_components(item, score, names)
        return {
            name: tuple(_part(outcome.score, name) for outcome in outcomes)
            for name in sorted(names)
            if any(not outcome.timed_out for outcome in outcomes)
        }

    def _check_components(self, item: ScorerItem, score: Score, names: set[str]) -> None:
        if not isinstance(score, dict):
            if names:
                raise self._error(item, f"returned {score!r}, expected the components {name_some(sorted(names))}")
            return
        if set(score) != names or not names:
            why = "env.reward_weights names others" if self._cfg.reward_weights else "other responses have others"
            raise self._error(
                item,
                f"returned the components {name_some(sorted(score)) or 'of nothing'}, expected "
                f"{name_some(sorted(names)) or 'at least one'}: {why}; return the same ones for every response, and "
                "give each a weight (0 only draws its curve)",
            )
        for name in names:
            if not _COMPONENT_NAME.fullmatch(name):
                raise self._error(item, f"returned the component {name!r}, expected a name of letters, digits, _ . -")

    def _reward(self, outcome: ScoreOutcome) -> float:
        if isinstance(outcome.score, dict):
            weights = self._cfg.reward_weights
            reward = math.fsum(weights.get(name, 1.0) * part for name, part in outcome.score.items())
        else:
            reward = outcome.score
        threshold = self._cfg.score_threshold
        return reward if threshold is None else float(reward >= threshold)


def _part(score: Score, name: str) -> float:
    return score.get(name, math.nan) if isinstance(score, dict) else math.nan


class PartialEnvironment(ProcessEnvironment):
    """An environment whose function may return None, or components of which some are None (`env.on_none`): NaN here."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        report = super().score(prompts, responses)
        is_none = [math.isnan(reward) for reward in report.rewards]
        return replace(
            report,
            rewards=tuple(0.0 if none else reward for none, reward in zip(is_none, report.rewards, strict=True)),
            unscored=tuple(NO_REWARD if none else "" for none in is_none),
        )

    def _components(
        self, items: Sequence[ScorerItem], outcomes: Sequence[ScoreOutcome]
    ) -> dict[str, tuple[float, ...]]:
        rows = [row for row, outcome in enumerate(outcomes) if not _is_none(outcome.score)]
        found = super()._components([items[row] for row in rows], [outcomes[row] for row in rows])
        places = {row: place for place, row in enumerate(rows)}
        return {
            name: tuple(part[places[row]] if row in places else math.nan for row in range(len(items)))
            for name, part in found.items()
        }

    def _reward(self, outcome: ScoreOutcome) -> float:
        if _is_none(outcome.score) or not isinstance(outcome.score, dict):
            return math.nan if _is_none(outcome.score) else super()._reward(outcome)
        given = {name: part for name, part in outcome.score.items() if not math.isnan(part)}
        return super()._reward(replace(outcome, score=given)) if given else math.nan


def _is_none(score: Score) -> bool:
    return isinstance(score, float) and math.isnan(score)


class SortEnvironment:
    """Scores in this process: a comparison of two short texts."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        """Give 1 for the right text that ended by itself, else 0."""
        rows = zip(prompts, responses, strict=True)
        return EnvReport(
            rewards=tuple(
                0.0 if response.truncated else exact_match(response.text, prompt.answer) for prompt, response in rows
            )
        )

    def answer_problems(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """See `ChecksAnswers`."""
        return [answer_problem(prompt.answer) for prompt in prompts]

    def shutdown(self) -> None:
        pass


def build_environment(cfg: EnvConfig, *, start_timeout_s: float, log_file: Path | None = None) -> Environment:
    """Return the environment that `cfg` names.

    Args:
        start_timeout_s: for loading a reward.
        log_file: gets what a reward prints.

    Raises:
        ConfigError: its extra is not installed, or a user-defined environment cannot be imported.
        RewardError: the custom reward cannot be loaded.
    """
    environment: Environment = ENVIRONMENTS.load(cfg.name, key="env.name")(
        cfg, EnvironmentStart(timeout_s=start_timeout_s, log_file=log_file)
    )
    return environment


def reward_identity(cfg: EnvConfig, environment: Environment) -> str:
    """Return the name of a built-in reward; of one of the user's, a digest of its source."""
    if cfg.name not in ("custom", JUDGE, PROGRAM) and ENVIRONMENTS.is_builtin(cfg.name):
        return cfg.name
    if isinstance(environment, HasSource):
        return f"{cfg.name}:{environment.source}"
    file = inspect.getsourcefile(type(environment))
    source = b"" if file is None else Path(file).read_bytes()
    return f"{cfg.name}:{hashlib.blake2b(source, digest_size=16).hexdigest()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentStart:
    """The settings that an environment gets besides its section."""

    timeout_s: float
    """Seconds for the start of the environment."""
    log_file: Path | None
    """The file for the output of a reward, or None to drop it."""


def sort_environment(cfg: EnvConfig, start: EnvironmentStart) -> Environment:
    del cfg, start
    return SortEnvironment()


def reasoning_gym_environment(cfg: EnvConfig, start: EnvironmentStart) -> Environment:
    _need_extra("reasoning_gym", is_installed=has_reasoning_gym())
    spec = ScorerSpec(target="nemo_rl.environments.rewards:make_reasoning_gym_reward", is_factory=True)
    return _scored_in_processes(cfg, start, spec, lambda prompt: dict(prompt.metadata))


def math_environment(cfg: EnvConfig, start: EnvironmentStart) -> Environment:
    _need_extra("math", is_installed=has_math_verify())
    spec = ScorerSpec(target="nemo_rl.environments.rewards:make_math_reward", is_factory=True)
    return _scored_in_processes(cfg, start, spec, lambda prompt: prompt.answer)


def custom_environment(cfg: EnvConfig, start: EnvironmentStart) -> Environment:
    if cfg.reward_function is None:
        raise ConfigError(f"env.reward_function: must be set to module:function when env.name is {cfg.name!r}")
    spec = ScorerSpec(
        target=cfg.reward_function,
        in_batches=cfg.reward_batch_size is not None,
        keeps_none=cfg.on_none == "leave_out",
        code=cfg.code,
    )
    return _scored_in_processes(cfg, start, spec, lambda prompt: prompt.answer)


def _scored_in_processes(
    cfg: EnvConfig, start: EnvironmentStart, spec: ScorerSpec, answer_of: Callable[[Prompt], object]
) -> Environment:
    environment = PartialEnvironment if spec.keeps_none else ProcessEnvironment
    return environment(cfg, spec, start_timeout_s=start.timeout_s, answer_of=answer_of, log_file=start.log_file)


def _need_extra(name: str, *, is_installed: bool) -> None:
    if not is_installed:
        raise ConfigError(f"env.name: {name!r} needs the extra `envs`; run `pip install -e '.[envs]'`")
