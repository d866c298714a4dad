"""`build_environment`: from the `env` section to an environment. Called by the rollout worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_rl.config.schema import EnvConfig
from nemo_rl.data.reasoning_gym_door import has_reasoning_gym
from nemo_rl.environments.interfaces import Environment
from nemo_rl.environments.process_environment import ProcessEnvironment
from nemo_rl.environments.rewards.math import has_math_verify
from nemo_rl.environments.scorer_pool import ScorerSpec
from nemo_rl.environments.sort import SortEnvironment
from nemo_rl.errors import ConfigError

__all__ = ["ENVIRONMENTS", "build_environment"]


def build_environment(cfg: EnvConfig) -> Environment:
    """The environment that `cfg` names.

    Raises:
        ConfigError: its extra is not installed.
        RewardError: the custom reward cannot be loaded.
    """
    return ENVIRONMENTS[cfg.name](cfg)


def _sort(cfg: EnvConfig) -> Environment:
    del cfg
    return SortEnvironment()


def _reasoning_gym(cfg: EnvConfig) -> Environment:
    _need_extra("reasoning_gym", is_installed=has_reasoning_gym())
    spec = ScorerSpec(target="nemo_rl.environments.rewards.reasoning_gym:make_reasoning_gym_reward", is_factory=True)
    return ProcessEnvironment(cfg, spec, answer_of=lambda prompt: dict(prompt.metadata))


def _math(cfg: EnvConfig) -> Environment:
    _need_extra("math", is_installed=has_math_verify())
    spec = ScorerSpec(target="nemo_rl.environments.rewards.math:make_math_reward", is_factory=True)
    return ProcessEnvironment(cfg, spec, answer_of=lambda prompt: prompt.answer)


def _custom(cfg: EnvConfig) -> Environment:
    if cfg.reward_function is None:
        raise ConfigError("env.reward_function: must be set to module:function when env.name is 'custom'")
    return ProcessEnvironment(cfg, ScorerSpec(target=cfg.reward_function), answer_of=lambda prompt: prompt.answer)


def _need_extra(name: str, *, is_installed: bool) -> None:
    if not is_installed:
        raise ConfigError(f"env.name: {name!r} needs the extra `envs`; run `pip install 'nemo-rl[envs]'`")


ENVIRONMENTS: Mapping[str, Callable[[EnvConfig], Environment]] = {
    "sort": _sort,
    "reasoning_gym": _reasoning_gym,
    "math": _math,
    "custom": _custom,
}
"""`env.name` -> its builder. A new environment is one function and one line here."""
