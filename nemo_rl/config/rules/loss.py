"""Rules over `loss_fn` and its distillation."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.loss import CORRECTIONS, LOSS_PROPERTIES, LossProperties
from nemo_rl.config.parts import LOSSES
from nemo_rl.config.rules import megatron, policy
from nemo_rl.config.rules.rule import SET_FOR_A_PASS, Rule, keys_besides_the_switch, rules_in, would_be_ignored
from nemo_rl.config.schema import MasterConfig

__all__ = []

_NAME = "loss_fn.name"

_SWITCH = "loss_fn.use_importance_sampling_correction"

_TYPE = "loss_fn.truncated_importance_sampling_type"

_LOW, _HIGH = "truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio"

_FORCED_RATIO = "loss_fn.force_on_policy_ratio"

_SAMPLED = "grpo.use_generation_logprobs_as_prev"


def _properties(config: MasterConfig) -> LossProperties | None:
    return LOSS_PROPERTIES[config.loss_fn.name] if LOSSES.is_builtin(config.loss_fn.name) else None


# ---- the loss itself


def rule_loss_keys_fit_the_loss(config: MasterConfig) -> Iterator[str]:
    properties = _properties(config)
    if properties is None:
        return
    every = {name for other in LOSS_PROPERTIES.values() for name in other.keys}
    names, because = sorted(every - set(properties.keys)), f"{_NAME} is {config.loss_fn.name!r}"
    yield from would_be_ignored(config.loss_fn, "loss_fn", names, switch=_NAME, because=because)


def rule_dro_needs_beta(config: MasterConfig) -> Iterator[str]:
    if config.loss_fn.name == "dro" and config.loss_fn.dro.beta is None:
        yield "loss_fn.dro.beta: must be set to a number > 0 when loss_fn.name is 'dro'"


def rule_row_loss_needs_row_mean(config: MasterConfig) -> Iterator[str]:
    loss, properties = config.loss_fn, _properties(config)
    if properties is None or not properties.is_row_level:
        return
    what = f"{loss.name} has one ratio per row and is a mean over rows"
    yield from would_be_ignored(loss, "loss_fn", ["constant_length"], switch=_NAME, because=what)
    if loss.token_level_loss:
        yield f"loss_fn.token_level_loss: {what}; set it to false"


def rule_loss_normalization_named_once(config: MasterConfig) -> Iterator[str]:
    loss, switch = config.loss_fn, "loss_fn.constant_length"
    if loss.constant_length is None or loss.token_level_loss:
        return
    yield (
        f"loss_fn.token_level_loss: false would be ignored, because {switch} is {loss.constant_length}; leave it out, "
        f"or set {switch}=null"
    )


# ---- the ratio


def rule_forced_ratio_needs_one_update(config: MasterConfig) -> Iterator[str]:
    grpo, loss, policy, properties = config.grpo, config.loss_fn, config.policy, _properties(config)
    if not loss.force_on_policy_ratio or (properties is not None and "force_on_policy_ratio" not in properties.keys):
        return
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    yield from would_be_ignored(
        loss,
        "loss_fn",
        ["ratio_clip_min", "ratio_clip_max", "ratio_clip_c"],
        switch=_FORCED_RATIO,
        because=f"{_FORCED_RATIO} is true: the ratio is 1",
    )
    if policy.train_global_batch_size != samples:
        yield (
            f"{_FORCED_RATIO}: the policy is its own pi_old in the first optimizer step of a rollout only; set "
            f"policy.train_global_batch_size to grpo.num_prompts_per_step x num_generations_per_prompt = {samples}, "
            f"got {policy.train_global_batch_size}"
        )
    if grpo.use_generation_logprobs_as_prev:
        yield f"{_SAMPLED}: true would be ignored, because {_FORCED_RATIO} takes the policy's own; set it to false"


# ---- distillation


def rule_distillation_needs_a_loss_that_has_it(config: MasterConfig) -> Iterator[str]:
    loss = config.loss_fn
    if not loss.distillation.enabled:
        return
    if not LOSSES.is_builtin(loss.name):
        yield f"loss_fn.distillation.enabled: it is a term of the built-in losses, got {_NAME} {loss.name!r}"
        return
    if loss.distillation.mode == "added":
        return
    switch = "loss_fn.distillation.mode"
    names = {"name", "use_importance_sampling_correction", *(key for of in LOSS_PROPERTIES.values() for key in of.keys)}
    names -= {"force_on_policy_ratio"}
    because = f"{switch} is 'alone': the loss has no policy-gradient term"
    yield from would_be_ignored(loss, "loss_fn", sorted(names), switch=switch, because=because)
    if loss.use_kl_in_reward:
        yield f"loss_fn.use_kl_in_reward: true would be ignored, because {switch} is 'alone'; set it to false"


# ---- off-policy correction


def rule_correction_keys_need_a_correction(config: MasterConfig) -> Iterator[str]:
    loss = config.loss_fn
    if not loss.use_importance_sampling_correction:
        names = (_TYPE.rpartition(".")[2], _LOW, _HIGH)
        yield from would_be_ignored(loss, "loss_fn", names, switch=_SWITCH, because=f"{_SWITCH} is false")
    elif loss.truncated_importance_sampling_type is None:
        because = f"{_TYPE} is null: no weight is bounded"
        yield from would_be_ignored(loss, "loss_fn", (_LOW, _HIGH), switch=_TYPE, because=because)


def rule_correction_bounds_are_an_interval(config: MasterConfig) -> Iterator[str]:
    loss = config.loss_fn
    kind, low, high = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio_min,
        loss.truncated_importance_sampling_ratio,
    )
    if kind is None or not loss.use_importance_sampling_correction:
        return
    if high is None:
        yield f"loss_fn.{_HIGH}: must be set: {kind} has an upper bound"
    if low is None and CORRECTIONS[kind].needs_low:
        yield f"loss_fn.{_LOW}: must be set: {kind} has a lower bound"
    if low is not None and high is not None and low >= high:
        yield f"loss_fn.{_LOW}: {low} is not below loss_fn.{_HIGH} {high}"


def rule_correction_fits_the_loss(config: MasterConfig) -> Iterator[str]:
    loss, properties = config.loss_fn, _properties(config)
    kind = loss.truncated_importance_sampling_type
    if properties is None or not loss.use_importance_sampling_correction or kind is None:
        return
    if properties.has_own_correction:
        yield f"{_TYPE}: {loss.name} has the weights in its own kernel, which bounds them; set it to null"
    elif properties.is_row_level and not CORRECTIONS[kind].is_per_row:
        per_row = ", ".join(name for name, of in CORRECTIONS.items() if of.is_per_row)
        yield f"{_TYPE}: {loss.name} has one ratio per row, and {kind!r} weighs tokens; set one of {per_row}, or null"


def rule_correction_needs_two_policies(config: MasterConfig) -> Iterator[str]:
    if config.loss_fn.use_importance_sampling_correction and config.grpo.use_generation_logprobs_as_prev:
        yield (
            f"{_SWITCH}: true would be ignored, because {_SAMPLED} is true: pi_old is pi_gen, and every weight 1; set "
            f"{_SAMPLED}=false"
        )


# ---- KL to the reference


def rule_kl_keys_need_a_penalty(config: MasterConfig) -> Iterator[str]:
    if config.loss_fn.reference_policy_kl_penalty > 0:
        return
    names = (
        *("reference_policy_kl_type", "reference_policy_kl_gradient", "use_on_policy_kl_approximation"),
        *("kl_input_clamp_value", "kl_output_clamp_value", "use_kl_in_reward"),
    )
    switch = "loss_fn.reference_policy_kl_penalty"
    yield from would_be_ignored(config.loss_fn, "loss_fn", names, switch=switch, because=f"{switch} is 0")


def rule_kl_gradient_fits_the_estimator(config: MasterConfig) -> Iterator[str]:
    loss, key = config.loss_fn, "loss_fn.reference_policy_kl_gradient"
    pair = (loss.reference_policy_kl_type, loss.reference_policy_kl_gradient)
    if not loss.adds_kl:
        return
    if pair == ("k1", "estimator"):
        yield f"{key}: that of k1 is 0 in expectation, it regularises nothing; set straight_through"
    elif pair == ("k2", "importance_weighted"):
        yield f"{key}: weighted k2 has the gradient of the mean of x^2 / 2, not of the KL; set straight_through"
    elif pair == ("k2", "straight_through"):
        yield f"{key}: 'straight_through' would be ignored, it is the gradient of k2 itself; leave it out"


def rule_kl_in_reward_excludes_kl_in_loss(config: MasterConfig) -> Iterator[str]:
    grpo, loss, switch = config.grpo, config.loss_fn, "loss_fn.use_kl_in_reward"
    if not loss.use_kl_in_reward or loss.reference_policy_kl_penalty == 0:
        return
    of_the_term = (
        *("reference_policy_kl_type", "reference_policy_kl_gradient", "use_on_policy_kl_approximation"),
        "kl_output_clamp_value",
    )
    because = f"{switch} is true: the reward loses log(pi_old / pi_ref), and the loss has no KL"
    yield from would_be_ignored(loss, "loss_fn", of_the_term, switch=switch, because=because)
    if not config.has_prev_logprobs_pass:
        yield f"{switch}: needs the trainer's log-probabilities before the update; {SET_FOR_A_PASS}"
    generation = config.policy.generation
    if generation.top_p < 1 or generation.top_k is not None:
        yield (
            f"{switch}: with policy.generation.top_p or top_k pi_old is a distribution on the sampling mask, and "
            "pi_ref one on the whole vocabulary; set top_p=1 and top_k=null, or take the KL in the loss, which "
            "compares whole ones"
        )
    name, estimator = grpo.adv_estimator.name, "grpo.adv_estimator.name"
    if name == "gdpo":
        yield f"{estimator}: 'gdpo' reads the components of the reward, from which no KL is taken; set grpo"
    if name == "maxrl":
        yield f"{estimator}: 'maxrl' is for rewards that are not negative, which a KL makes them; set grpo"


# ---- distillation

_SECTION = "loss_fn.distillation"

_TEACHER = f"{_SECTION}.teacher"


# ---- rules


def rule_distillation_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    section, switch = config.loss_fn.distillation, f"{_SECTION}.enabled"
    if section.enabled:
        if section.kl == "mixed":
            return
        because = f"{_SECTION}.kl is {section.kl!r}"
        yield from would_be_ignored(section, _SECTION, ["mixed_weight"], switch=f"{_SECTION}.kl", because=because)
        return
    names = keys_besides_the_switch(section)
    yield from would_be_ignored(section, _SECTION, names, switch=switch)


def rule_distillation_needs_a_teacher(config: MasterConfig) -> Iterator[str]:
    section = config.loss_fn.distillation
    if section.enabled and section.teacher.model_name is None:
        yield f"{_TEACHER}.model_name: must be set to a model folder when {_SECTION}.enabled is true"


def rule_distillation_alone_trains_every_row(config: MasterConfig) -> Iterator[str]:
    section, grpo = config.loss_fn.distillation, config.grpo
    if not section.enabled or section.mode != "alone":
        return
    lines, why = [], f"{_SECTION}.mode 'alone' learns from rows of equal rewards as well"
    if grpo.use_dynamic_sampling:
        lines.append(f"grpo.use_dynamic_sampling: {why}; set it to false")
    if grpo.drop_zero_advantage_groups is True:
        lines.append(f"grpo.drop_zero_advantage_groups: {why}; set it to false")
    yield from lines


def rule_teacher_reads_text(config: MasterConfig) -> Iterator[str]:
    if not config.loss_fn.distillation.enabled or not config.data.has_images:
        return
    yield (
        f"{_SECTION}.enabled: prompts have images, and a teacher gets the tokens of rows alone; set it to false, or "
        "take prompts of text"
    )


def rule_teacher_has_a_place(config: MasterConfig) -> Iterator[str]:
    section, cluster, workers = config.loss_fn.distillation, config.cluster, config.num_teacher_workers
    if not section.enabled:
        return
    lines, key = [], f"{_TEACHER}.num_workers"
    if cluster.launcher == "local":
        if workers > 1:
            lines.append(
                f"{key}: cluster.launcher 'local' runs one worker in this process, got {workers}; set it to 1, or "
                "cluster.launcher=ray"
            )
        if section.teacher.engine == "megatron" and config.policy.megatron_cfg.enabled:
            lines.append(
                f"{_TEACHER}.engine: megatron-core has one set of groups in a process, which the policy's worker uses; "
                "set dtensor, or cluster.launcher=ray"
            )
    elif cluster.gpus_per_node > 0 and workers > cluster.num_workers:
        lines.append(
            f"{key}: the teacher's workers share the GPUs of the policy's, of which there are {cluster.num_workers}, "
            f"got {workers}; set a number of at most {cluster.num_workers}"
        )
    yield from lines


def rule_teacher_engine_has_its_axes(config: MasterConfig) -> Iterator[str]:
    section = config.loss_fn.distillation
    if not section.enabled or section.teacher.engine == "megatron":
        return
    yield from (
        f"{_TEACHER}.{name}: only the Megatron worker has this axis; set {_TEACHER}.engine=megatron, or leave it out"
        for name in ("pipeline_parallel_size", "expert_parallel_size")
        if getattr(section.teacher, name) > 1
    )


_OF_A_POLICY: tuple[Rule, ...] = (
    policy.rule_parallel_sizes_divide_the_workers,
    *rules_in(vars(megatron)).values(),
    policy.rule_tensor_parallel_keys_need_ranks,
    policy.rule_sequence_parallel_has_a_plan,
)
"""Rules over the layout of a policy, which a teacher has to keep as well."""


def rule_teacher_layout_is_that_of_a_policy(config: MasterConfig) -> Iterator[str]:
    section = config.loss_fn.distillation
    if not section.enabled or section.teacher.model_name is None:
        return
    seen = config.as_teacher
    yield from (f"{_TEACHER}: as a policy of its own: {line}" for rule in _OF_A_POLICY for line in rule(seen))
