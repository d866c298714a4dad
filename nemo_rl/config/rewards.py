"""Settings of rewards before they become advantages (`grpo.reward_scaling`, `grpo.reward_shaping`), and the rules
over rewards and advantages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveInt

from nemo_rl.config.base import Section
from nemo_rl.config.loss import LOSS_PROPERTIES
from nemo_rl.config.parts import ADVANTAGE_ESTIMATORS, LOSSES
from nemo_rl.config.rule import SET_FOR_A_PASS, would_be_ignored

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = ["SESSION", "RewardCode", "RewardScalingConfig", "RewardShapingConfig", "row_loss_problems"]


SESSION = "python:"
"""Before the name of a reward that lives in a Python session alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCode:
    """A function of a Python session, for the processes that score."""

    name: str
    """The name that messages and `config.yaml` have."""
    pickled: bytes
    """The function by value, as cloudpickle writes it."""
    digest: str
    """Digest of its source."""
    paths: tuple[str, ...]
    """Folders from which the session imports."""


class RewardScalingConfig(Section):
    """Rewards are clamped to one interval and mapped linearly to another."""

    enabled: bool = False
    """Scale rewards before shaping; groups are still chosen by the rewards as they were scored."""
    source_min: FiniteFloat = 0.0
    """Rewards below this count as it."""
    source_max: FiniteFloat = 1.0
    """Rewards above this count as it."""
    target_min: FiniteFloat = 0.0
    """The reward that `source_min` is mapped to."""
    target_max: FiniteFloat = 1.0
    """The reward that `source_max` is mapped to."""


class RewardShapingConfig(Section):
    """The penalties of long and truncated responses."""

    enabled: bool = False
    """Shape rewards."""
    overlong_buffer_length: PositiveInt = 128
    """Last tokens before `max_response_length` in which the penalty grows from 0."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Penalty of a response of `max_response_length` tokens or more."""
    max_response_length: PositiveInt | None = None
    """Length in tokens, as a rule `${policy.generation.max_new_tokens}`; must be set for the buffer."""
    stop_properly_penalty_coef: Annotated[float, Field(ge=0, le=1)] | None = None
    """Instead of the buffer: rewards of truncated responses are multiplied by this, which raises negative ones; null
    takes the buffer."""


_BY_TURN = {"outcome_plus_turn": "turn_weight", "discounted_return": "turn_discount"}
"""Built-in estimators of turns, and the key that each reads."""
_BY_KEYS = ("grpo", "gdpo", "outcome_plus_turn")
"""Built-in estimators that read the keys of baseline and normalisation."""
ESTIMATORS_BY_STEP = ("reinforce_plus_plus", "gdpo")
"""Built-in estimators that give advantages to groups whose rewards are all equal."""


def rule_advantage_clip_is_an_interval(config: MasterConfig) -> Iterator[str]:
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    if low is not None and high is not None and low >= high:
        yield f"grpo.advantage_clip_low: {low} is not below grpo.advantage_clip_high {high}"


def rule_estimator_keys_fit_the_estimator(config: MasterConfig) -> Iterator[str]:
    grpo, section, switch = config.grpo, config.grpo.adv_estimator, "grpo.adv_estimator.name"
    name = section.name
    if not ADVANTAGE_ESTIMATORS.is_builtin(name):
        return
    because = f"{switch} is {name!r}"
    if name not in _BY_KEYS:
        names = ["use_leave_one_out_baseline", "use_leave_one_out_std"]
        if name != "discounted_return":
            names = ["normalize_rewards", *names]
        yield from would_be_ignored(grpo, "grpo", names, switch=switch, because=because)
    if name != "gdpo":
        own = ("component_weights",)
        yield from would_be_ignored(section, "grpo.adv_estimator", own, switch=switch, because=because)
    other = tuple(key for word, key in _BY_TURN.items() if word != name)
    yield from would_be_ignored(section, "grpo.adv_estimator", other, switch=switch, because=because)
    if name in _BY_TURN and not config.experience.conversation.enabled:
        yield f"{switch}: {name!r} needs turns; set experience.conversation.enabled=true, or another estimator"
    # Dynamic sampling has taken others in their place before the estimator sees them.
    if name in ESTIMATORS_BY_STEP and grpo.drop_zero_advantage_groups is True and not grpo.use_dynamic_sampling:
        yield (
            f"grpo.drop_zero_advantage_groups: true leaves out rows to which {name!r} gives advantages; set it to "
            "false, or grpo.use_dynamic_sampling=true"
        )


def rule_token_advantages_fit_the_loss(config: MasterConfig) -> Iterator[str]:
    yield from row_loss_problems(config) if config.has_builtin_token_advantages else []


def rule_token_baseline_needs_prev_logprobs(config: MasterConfig) -> Iterator[str]:
    key, name = "grpo.adv_estimator.name", config.grpo.adv_estimator.name
    if name == "optimal_token_baseline" and not config.has_prev_logprobs_pass:
        yield f"{key}: {name!r} needs the whole distributions of the trainer before the update; {SET_FOR_A_PASS}"


def row_loss_problems(config: MasterConfig) -> list[str]:
    """Return the reasons why the loss cannot take an advantage of each token, for any estimator."""
    name = config.loss_fn.name
    if not LOSSES.is_builtin(name) or not LOSS_PROPERTIES[name].has_row_advantages:
        return []
    takers = ", ".join(word for word, capabilities in LOSS_PROPERTIES.items() if not capabilities.has_row_advantages)
    return [
        f"loss_fn.name: {name!r} has one advantage per row, and grpo.adv_estimator.name "
        f"{config.grpo.adv_estimator.name!r} gives each token its own here; set one of {takers}"
    ]


def rule_gdpo_needs_reward_components(config: MasterConfig) -> Iterator[str]:
    if config.grpo.adv_estimator.name != "gdpo" or config.env.name not in ("sort", "math", "reasoning_gym"):
        return
    yield (
        f"grpo.adv_estimator.name: 'gdpo' needs components of the reward, and env.name {config.env.name!r} gives one "
        "number; set env.name=custom, or adv_estimator.name=grpo"
    )


def rule_dynamic_sampling_is_complete(config: MasterConfig) -> Iterator[str]:
    grpo, switch = config.grpo, "grpo.use_dynamic_sampling"
    if not grpo.use_dynamic_sampling:
        names = ("dynamic_sampling_max_gen_batches", "batch_multiplier")
        yield from would_be_ignored(grpo, "grpo", names, switch=switch)
        return
    because = f"{switch} is true, which leaves such groups out itself"
    ignored = ("drop_zero_advantage_groups",) if grpo.drop_zero_advantage_groups is False else ()
    yield from would_be_ignored(grpo, "grpo", ignored, switch=switch, because=because)
    if config.diagnostics.keep_steps.enabled:
        yield (
            f"diagnostics.keep_steps.enabled: a step with {switch} has rows of several rollouts, which cannot be "
            "replayed; set one of them to false"
        )


def rule_reward_scaling_maps_an_interval(config: MasterConfig) -> Iterator[str]:
    section, prefix = config.grpo.reward_scaling, "grpo.reward_scaling"
    if not section.enabled:
        switch = f"{prefix}.enabled"
        names = ("source_min", "source_max", "target_min", "target_max")
        yield from would_be_ignored(section, prefix, names, switch=switch)
        return
    if section.source_min >= section.source_max:
        yield f"{prefix}.source_min: {section.source_min} is not below source_max {section.source_max}"
    if section.target_min >= section.target_max:
        yield f"{prefix}.target_min: {section.target_min} is not below target_max {section.target_max}"


def rule_reward_shaping_is_complete(config: MasterConfig) -> Iterator[str]:
    section, prefix = config.grpo.reward_shaping, "grpo.reward_shaping"
    buffer = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
    if not section.enabled:
        switch, names = f"{prefix}.enabled", (*buffer, "stop_properly_penalty_coef")
        yield from would_be_ignored(section, prefix, names, switch=switch)
        return
    if section.stop_properly_penalty_coef is not None:
        switch = f"{prefix}.stop_properly_penalty_coef"
        yield from would_be_ignored(section, prefix, buffer, switch=switch, because=f"{switch} replaces the buffer")
        return
    longest, most = section.max_response_length, config.policy.longest_response
    if longest is None:
        yield f"{prefix}.max_response_length: must be set, for example to ${{policy.generation.max_new_tokens}}"
    elif section.overlong_buffer_length > longest:
        yield (
            f"{prefix}.overlong_buffer_length: {section.overlong_buffer_length} is more than max_response_length "
            f"{longest}"
        )
    elif longest - section.overlong_buffer_length >= most:
        yield (
            f"{prefix}.max_response_length: no response of policy.generation.max_new_tokens {most} tokens reaches the "
            f"buffer, which begins at {longest - section.overlong_buffer_length}"
        )


def rule_logprob_errors_need_two_policies(config: MasterConfig) -> Iterator[str]:
    key, threshold = "grpo.seq_logprob_error_threshold", config.grpo.seq_logprob_error_threshold
    if threshold is None or config.has_prev_logprobs_pass:
        return
    yield (
        f"{key}: {threshold:g} has no log-probabilities of the trainer to compare with; {SET_FOR_A_PASS}, or {key}=null"
    )


def rule_sibling_std_needs_a_sibling_baseline(config: MasterConfig) -> Iterator[str]:
    for name, is_on in (
        ("normalize_rewards", config.grpo.normalize_rewards),
        ("use_leave_one_out_baseline", config.grpo.use_leave_one_out_baseline),
    ):
        if not is_on:
            switch, names = f"grpo.{name}", ("use_leave_one_out_std",)
            yield from would_be_ignored(config.grpo, "grpo", names, switch=switch)
