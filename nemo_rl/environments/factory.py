"""`build_environment`: the environment that the `env` section names. Called by the rollout worker."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.config.env import EnvConfig
from nemo_rl.config.parts import ENVIRONMENTS, PROGRAM
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.reasoning_gym_wrapper import has_reasoning_gym
from nemo_rl.environments.interfaces import Environment, EnvReport, Response
from nemo_rl.environments.process_environment import ProcessEnvironment
from nemo_rl.environments.rewards import answer_problem, exact_match, has_math_verify
from nemo_rl.environments.scorer_pool import ScorerSpec
from nemo_rl.errors import ConfigError

__all__ = ["EnvironmentStart", "SortEnvironment", "build_environment", "reward_identity"]


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
    if cfg.name not in ("custom", PROGRAM) and ENVIRONMENTS.is_builtin(cfg.name):
        return cfg.name
    if isinstance(environment, ProcessEnvironment):
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
    spec = ScorerSpec(target=cfg.reward_function, in_batches=cfg.reward_batch_size is not None, code=cfg.code)
    return _scored_in_processes(cfg, start, spec, lambda prompt: prompt.answer)


def _scored_in_processes(
    cfg: EnvConfig, start: EnvironmentStart, spec: ScorerSpec, answer_of: Callable[[Prompt], object]
) -> Environment:
    return ProcessEnvironment(cfg, spec, start_timeout_s=start.timeout_s, answer_of=answer_of, log_file=start.log_file)


def _need_extra(name: str, *, is_installed: bool) -> None:
    if not is_installed:
        raise ConfigError(f"env.name: {name!r} needs the extra `envs`; run `pip install -e '.[envs]'`")
