"""Rules about `loss_fn`: keys that the chosen loss does not read, means that it is not defined for, KL, corrections.

The form of a rule is explained in `nemo_rl.config.validate`, which runs them all. What a loss of the user's own reads
is not known here, so that most rules leave it alone.
"""

from __future__ import annotations

from nemo_rl.config.ignored import would_be_ignored
from nemo_rl.config.loss import CORRECTIONS, LOSS_TRAITS, LossTraits
from nemo_rl.config.parts import LOSSES
from nemo_rl.config.rule import SET_FOR_A_PASS, rules_in
from nemo_rl.config.schema import MasterConfig

__all__ = ["RULES"]

_NAME = "loss_fn.name"
_SWITCH = "loss_fn.use_importance_sampling_correction"
_TYPE = "loss_fn.truncated_importance_sampling_type"
_LOW, _HIGH = "truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio"
_FORCED = "loss_fn.force_on_policy_ratio"
_SAMPLED = "grpo.use_generation_logprobs_as_prev"


def _traits(config: MasterConfig) -> LossTraits | None:
    """None for a loss of the user's own."""
    return LOSS_TRAITS[config.loss_fn.name] if LOSSES.is_builtin(config.loss_fn.name) else None


# ---- the loss itself


def rule_loss_keys_fit_the_loss(config: MasterConfig) -> list[str]:
    traits = _traits(config)
    if traits is None:
        return []
    every = {name for other in LOSS_TRAITS.values() for name in other.keys}
    names, because = sorted(every - set(traits.keys)), f"{_NAME} is {config.loss_fn.name!r}"
    return would_be_ignored(config.loss_fn, "loss_fn", names, switch=_NAME, because=because)


def rule_dro_has_its_square(config: MasterConfig) -> list[str]:
    if config.loss_fn.name == "dro" and config.loss_fn.dro.beta is None:
        return ["loss_fn.dro.beta: must be set to a number > 0 when loss_fn.name is 'dro'"]
    return []


def rule_row_losses_are_means_over_rows(config: MasterConfig) -> list[str]:
    loss, traits = config.loss_fn, _traits(config)
    if traits is None or not traits.is_row_level:
        return []
    what = f"{loss.name} has one ratio per row and is a mean over rows"
    lines = would_be_ignored(loss, "loss_fn", ["constant_length"], switch=_NAME, because=what)
    if loss.token_level_loss:
        lines.append(f"loss_fn.token_level_loss: {what}; set it to false")
    return lines


def rule_one_mean_is_named(config: MasterConfig) -> list[str]:
    loss, switch = config.loss_fn, "loss_fn.constant_length"
    if loss.constant_length is None or loss.token_level_loss:
        return []
    return [
        f"loss_fn.token_level_loss: false would be ignored, because {switch} is {loss.constant_length}; leave it out, "
        f"or set {switch}=null"
    ]


# ---- the ratio


def rule_forced_ratios_are_of_one_update(config: MasterConfig) -> list[str]:
    grpo, loss, policy, traits = config.grpo, config.loss_fn, config.policy, _traits(config)
    if not loss.force_on_policy_ratio or (traits is not None and "force_on_policy_ratio" not in traits.keys):
        return []
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    lines = would_be_ignored(
        loss,
        "loss_fn",
        ["ratio_clip_min", "ratio_clip_max", "ratio_clip_c"],
        switch=_FORCED,
        because=f"{_FORCED} is true: the ratio is 1",
    )
    if policy.train_global_batch_size != samples:
        lines.append(
            f"{_FORCED}: the policy is its own pi_old in the first optimizer step of a rollout only; set "
            f"policy.train_global_batch_size to grpo.num_prompts_per_step x num_generations_per_prompt = {samples}, "
            f"got {policy.train_global_batch_size}"
        )
    if grpo.use_generation_logprobs_as_prev:
        lines.append(f"{_SAMPLED}: true would be ignored, because {_FORCED} takes the policy's own; set it to false")
    return lines


# ---- off-policy correction


def rule_correction_keys_need_a_correction(config: MasterConfig) -> list[str]:
    loss = config.loss_fn
    if not loss.use_importance_sampling_correction:
        names = (_TYPE.rpartition(".")[2], _LOW, _HIGH)
        return would_be_ignored(loss, "loss_fn", names, switch=_SWITCH, because=f"{_SWITCH} is false")
    if loss.truncated_importance_sampling_type is None:
        because = f"{_TYPE} is null: no weight is bounded"
        return would_be_ignored(loss, "loss_fn", (_LOW, _HIGH), switch=_TYPE, because=because)
    return []


def rule_correction_bounds_are_an_interval(config: MasterConfig) -> list[str]:
    loss = config.loss_fn
    kind, low, high = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio_min,
        loss.truncated_importance_sampling_ratio,
    )
    if kind is None or not loss.use_importance_sampling_correction:
        return []
    lines = []
    if high is None:
        lines.append(f"loss_fn.{_HIGH}: must be set: {kind} has an upper bound")
    if low is None and CORRECTIONS[kind].needs_low:
        lines.append(f"loss_fn.{_LOW}: must be set: {kind} has a lower bound")
    if low is not None and high is not None and low >= high:
        lines.append(f"loss_fn.{_LOW}: {low} is not below loss_fn.{_HIGH} {high}")
    return lines


def rule_correction_fits_the_loss(config: MasterConfig) -> list[str]:
    loss, traits = config.loss_fn, _traits(config)
    kind = loss.truncated_importance_sampling_type
    if traits is None or not loss.use_importance_sampling_correction or kind is None:
        return []
    if traits.has_own_correction:
        return [f"{_TYPE}: {loss.name} has the weights in its own kernel, which bounds them; set it to null"]
    if traits.is_row_level and not CORRECTIONS[kind].is_per_row:
        per_row = ", ".join(name for name, of in CORRECTIONS.items() if of.is_per_row)
        return [
            f"{_TYPE}: {loss.name} has one ratio per row, and {kind!r} weighs tokens; set one of {per_row}, or null"
        ]
    return []


def rule_correction_has_two_policies(config: MasterConfig) -> list[str]:
    if config.loss_fn.use_importance_sampling_correction and config.grpo.use_generation_logprobs_as_prev:
        return [
            f"{_SWITCH}: true would be ignored, because {_SAMPLED} is true: pi_old is pi_gen, and every weight 1; set "
            f"{_SAMPLED}=false"
        ]
    return []


# ---- KL to the reference


def rule_kl_keys_need_a_penalty(config: MasterConfig) -> list[str]:
    if config.loss_fn.reference_policy_kl_penalty > 0:
        return []
    names = (
        *("reference_policy_kl_type", "reference_policy_kl_gradient", "use_on_policy_kl_approximation"),
        *("kl_input_clamp_value", "kl_output_clamp_value", "use_kl_in_reward"),
    )
    switch = "loss_fn.reference_policy_kl_penalty"
    return would_be_ignored(config.loss_fn, "loss_fn", names, switch=switch, because=f"{switch} is 0")


def rule_kl_has_a_gradient(config: MasterConfig) -> list[str]:
    loss, key = config.loss_fn, "loss_fn.reference_policy_kl_gradient"
    pair = (loss.reference_policy_kl_type, loss.reference_policy_kl_gradient)
    if not loss.adds_kl:
        return []
    if pair == ("k1", "estimator"):
        return [f"{key}: that of k1 is 0 in expectation, it regularises nothing; set straight_through"]
    if pair == ("k2", "importance_weighted"):
        return [f"{key}: weighted k2 has the gradient of the mean of x^2 / 2, not of the KL; set straight_through"]
    if pair == ("k2", "straight_through"):
        return [f"{key}: 'straight_through' would be ignored, it is the gradient of k2 itself; leave it out"]
    return []


def rule_kl_in_reward_is_the_only_one(config: MasterConfig) -> list[str]:
    grpo, loss, switch = config.grpo, config.loss_fn, "loss_fn.use_kl_in_reward"
    if not loss.use_kl_in_reward or loss.reference_policy_kl_penalty == 0:
        return []
    of_the_term = (
        *("reference_policy_kl_type", "reference_policy_kl_gradient", "use_on_policy_kl_approximation"),
        "kl_output_clamp_value",
    )
    because = f"{switch} is true: the reward loses log(pi_old / pi_ref), and the loss has no KL"
    lines = would_be_ignored(loss, "loss_fn", of_the_term, switch=switch, because=because)
    if not config.has_prev_logprobs_pass:
        lines.append(f"{switch}: needs the trainer's log-probabilities before the update; {SET_FOR_A_PASS}")
    generation = config.policy.generation
    if generation.top_p < 1 or generation.top_k is not None:
        lines.append(
            f"{switch}: with policy.generation.top_p or top_k pi_old is a distribution on the kept set, and pi_ref one "
            "on the whole vocabulary; set top_p=1 and top_k=null, or take the KL in the loss, which compares whole ones"
        )
    name, estimator = grpo.adv_estimator.name, "grpo.adv_estimator.name"
    if name == "gdpo":
        lines.append(f"{estimator}: 'gdpo' reads the components of the reward, from which no KL is taken; set grpo")
    if name == "maxrl":
        lines.append(f"{estimator}: 'maxrl' is for rewards that are not negative, which a KL makes them; set grpo")
    return lines


RULES = rules_in(globals())
"""The rules of this module, by name."""
