"""Rules over `grpo`: asynchronous sampling, rewards and advantages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nemo_rl.config.grpo import ESTIMATORS_BY_STEP
from nemo_rl.config.loss import LOSS_PROPERTIES, row_loss_problems
from nemo_rl.config.parts import ADVANTAGE_ESTIMATORS, ENGINE_CAPABILITIES, JUDGE, LOSSES
from nemo_rl.config.rules.rule import SET_FOR_A_PASS, keys_besides_the_switch, would_be_ignored
from nemo_rl.config.schema import MasterConfig

_SWITCH = "grpo.async.enabled"

_BOUND = "grpo.async.max_staleness"


def rule_async_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    section = config.grpo.async_
    if section.takes_stale_rows:
        return
    names = ("selection", "overdue") if section.enabled else keys_besides_the_switch(section)
    given = {"switch": _SWITCH, "because": f"{_SWITCH} is false"}
    if section.enabled:
        because = f"{_BOUND} is 0: every step samples its own rows, and trains on all of them"
        given = {"switch": _BOUND, "because": because}
    yield from (
        *would_be_ignored(section, "grpo.async", names, **given),
        *would_be_ignored(config.policy.generation, "policy.generation", ["in_flight"], **given),
    )


def rule_kept_groups_need_a_choice(config: MasterConfig) -> Iterator[str]:
    section = config.grpo.async_
    if not (section.enabled and section.keep_finished):
        return
    key = "grpo.async.keep_finished"
    if section.selection == "in_order":
        yield (
            f"{key}: true with grpo.async.selection=in_order: prompts that are sampled again come before kept groups, "
            "which would become too old; set it to false, or choose another selection"
        )
    elif section.steps_ahead == 0:
        yield f"{key}: would be ignored, because no group waits between two steps without lookahead; leave it out"


def rule_lookahead_within_max_staleness(config: MasterConfig) -> Iterator[str]:
    section = config.grpo.async_
    if section.enabled and section.steps_ahead > section.max_staleness:
        yield (
            f"grpo.async.lookahead: {section.lookahead} steps ahead, but rows sampled so far ahead would be older than "
            f"grpo.async.max_staleness={section.max_staleness} when they are trained; lower it to at most "
            f"{section.max_staleness}, or raise max_staleness"
        )


def rule_overdue_needs_a_choice_of_groups(config: MasterConfig) -> Iterator[str]:
    section, switch = config.grpo.async_, "grpo.async.selection"
    if not section.takes_stale_rows:
        return
    because = f"{switch} is 'in_order', which waits for the earliest prompts whatever else is ready"
    if section.selection != "in_order":
        switch = "grpo.async.lookahead"
        if section.steps_ahead > 0:
            return
        because = f"{switch} is 0: no other groups are sampled that could be trained instead"
    yield from would_be_ignored(section, "grpo.async", ["overdue"], switch=switch, because=because)


# ---- the loss of stale rows

_CORRECTION = "loss_fn.use_importance_sampling_correction"

_SAMPLED = "grpo.use_generation_logprobs_as_prev"


def rule_stale_rows_need_a_correction(config: MasterConfig) -> Iterator[str]:
    loss, section = config.loss_fn, config.grpo.async_
    if not section.takes_stale_rows or loss.use_importance_sampling_correction or not loss.has_policy_term:
        return
    # What a loss of the user's own does with pi_old is not known here.
    is_sampled = config.grpo.use_generation_logprobs_as_prev
    if is_sampled and (not LOSSES.is_builtin(loss.name) or LOSS_PROPERTIES[loss.name].has_ratio):
        return
    stale = f"rows may be {section.max_staleness} updates old ({_BOUND})"
    correct = f"set {_CORRECTION}=true" + (f" and {_SAMPLED}=false" if is_sampled else "")
    if is_sampled:
        what, other = f"loss_fn.name: {loss.name!r} has no ratio, and {stale}", "loss_fn.name=clipped_pg"
    else:
        what, other = f"{_CORRECTION}: false, but {stale} and pi_old is the trainer's", f"{_SAMPLED}=true"
        if loss.force_on_policy_ratio:
            other += " with loss_fn.force_on_policy_ratio=false"
    advice = f"{correct}, or {other}, or {_BOUND}=0"
    lines = [f"{what}: nothing corrects for the weights that sampled them; {advice}"]
    if config.policy.generation.in_flight == "keep":
        lines.append(
            "policy.generation.in_flight: 'keep' samples from old caches under new weights, which only a correction "
            f"by the recorded log-probabilities allows; {correct}, or in_flight=recompute"
        )
    yield from lines


# ---- engines and workers


def rule_async_engines_have_their_own_gpus(config: MasterConfig) -> Iterator[str]:
    cluster, key = config.cluster, "policy.generation.colocated.enabled"
    is_shared = cluster.gpus_per_node > 0 and config.policy.generation.colocated.enabled
    if not config.grpo.async_.takes_stale_rows or not is_shared:
        return
    yield (
        f"{key}: true lets an engine and a policy worker take turns on a GPU, and {_SWITCH} lets both work at once; "
        f"set {key}=false and policy.generation.colocated.gpus_per_node to the GPUs of engines on each node, or "
        f"{_BOUND}=0"
    )


def rule_rollout_workers_need_processes(config: MasterConfig) -> Iterator[str]:
    workers = config.experience.num_workers
    if workers == 1 or config.cluster.launcher != "local":
        return
    yield (
        f"experience.num_workers: cluster.launcher 'local' runs one rollout worker in this process, got {workers}; set "
        "it to 1, or cluster.launcher=ray"
    )


def rule_rollout_workers_of_a_step_keep_no_groups(config: MasterConfig) -> Iterator[str]:
    workers, path = config.experience.num_workers, config.data_plane.durable.path
    if workers == 1 or path is None or config.grpo.samples_ahead:
        return
    yield (
        f"experience.num_workers: {workers} share each step of a synchronous run, and data_plane.durable.path keeps "
        f"the finished groups of one worker; set it to 1, leave data_plane.durable.path out, or set {_SWITCH}=true"
    )


def rule_group_fits_the_engine(config: MasterConfig) -> Iterator[str]:
    group, places = config.grpo.num_generations_per_prompt, config.policy.generation.max_batch_size
    if not config.grpo.async_.enabled or group <= places:
        return
    yield (
        f"policy.generation.max_batch_size: {places} rows, but a group joins an engine's batch as a whole; expected at "
        f"least grpo.num_generations_per_prompt={group}"
    )


def rule_vllm_rows_can_stand_still(config: MasterConfig) -> Iterator[str]:
    generation, sizes = config.policy.generation, config.policy.generation.vllm_cfg
    if not config.grpo.async_.enabled or generation.backend != "vllm":
        return
    yield from (
        f"policy.generation.vllm_cfg.{name}: {size} with {_SWITCH}: vLLM of several processes decodes while nobody "
        "asks, so that rows cannot stand still for new weights; set it to 1"
        for name, size in (
            ("tensor_parallel_size", sizes.tensor_parallel_size),
            ("pipeline_parallel_size", sizes.pipeline_parallel_size),
        )
        if size > 1
    )
    if config.policy.router_replay.enabled and generation.in_flight == "recompute" and config.grpo.samples_ahead:
        yield (
            "policy.generation.in_flight: 'recompute' with policy.router_replay.enabled: vLLM forgets the routes of "
            "running rows when it computes their caches anew; set it to drain, or policy.generation.backend to torch"
        )
    tokens, places = sizes.max_num_batched_tokens, sizes.max_num_seqs or generation.max_batch_size
    if tokens is not None and tokens < 2 * places:
        yield (
            f"policy.generation.vllm_cfg.max_num_batched_tokens: {tokens} is less than a token of each of {2 * places} "
            f"rows, {places} of groups and as many of validation; raise it, or lower policy.generation.max_batch_size"
        )


_GENERATION = re.compile(r"\|[^|]*\|(.*;)?\s*generation\s*(;|$)")
"""Decoding as a phase of `SITES | REDUCERS | WHEN`."""


def rule_continuous_engine_shows_no_decoding(config: MasterConfig) -> Iterator[str]:
    tracer, backend = config.diagnostics.tracer, config.policy.generation.backend
    is_shown = backend in ENGINE_CAPABILITIES and ENGINE_CAPABILITIES[backend].shows_decoding
    if not config.grpo.async_.enabled or not tracer.enabled or not is_shown:
        return
    watched = [text for text in tracer.selectors if _GENERATION.search(text)]
    yield from (
        f"diagnostics.tracer.selectors: {text!r} watches the engine decode, which it does not show while rows join and "
        f"leave its batch; leave generation out, or set {_SWITCH}=false"
        for text in watched
    )


def rule_async_dynamic_sampling_has_no_rounds(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if not grpo.async_.takes_stale_rows or not grpo.use_dynamic_sampling:
        return
    because = "an asynchronous run has no rounds: each group that is left out is replaced by another prompt"
    yield from would_be_ignored(grpo, "grpo", ("batch_multiplier",), switch=_SWITCH, because=because)


# ---- rewards and advantages

_BY_TURN = {"outcome_plus_turn": "turn_weight", "discounted_return": "turn_discount"}
"""Built-in estimators of turns, and the key that each reads."""

_BY_KEYS = ("grpo", "gdpo", "outcome_plus_turn")
"""Built-in estimators that read the keys of baseline and normalisation."""


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
    estimator, loss = config.grpo.adv_estimator, config.loss_fn
    if estimator.is_builtin_per_token(kl_in_reward=loss.use_kl_in_reward):
        yield from row_loss_problems(loss, estimator=estimator.name)


def rule_token_baseline_needs_prev_logprobs(config: MasterConfig) -> Iterator[str]:
    key, name = "grpo.adv_estimator.name", config.grpo.adv_estimator.name
    if name == "optimal_token_baseline" and not config.has_prev_logprobs_pass:
        yield f"{key}: {name!r} needs the whole distributions of the trainer before the update; {SET_FOR_A_PASS}"


def rule_gdpo_needs_reward_components(config: MasterConfig) -> Iterator[str]:
    if config.grpo.adv_estimator.name != "gdpo":
        return
    yield from (
        f"grpo.adv_estimator.name: 'gdpo' needs components of the reward, and {path}.name {env.name!r} gives one "
        f"number; set {path}.name=custom, or adv_estimator.name=grpo"
        for path, env in config.envs.items()
        if env.name in ("sort", "math", "reasoning_gym")
        or (env.name == JUDGE and len(env.judges) == 1 and env.reward_function is None)
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
