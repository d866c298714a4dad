"""Overrides of the sort demo that rules refuse, and the text that the refusal must hold, by rule.

The demo takes the sampler's log-probabilities as pi_old, has no KL penalty and two updates per rollout.
"""

from __future__ import annotations

Refused = dict[str, list[tuple[tuple[str, ...], str]]]
"""Rule -> pairs of overrides and a part of the message."""
LOCAL = (
    "cluster.launcher=local",
    "cluster.cpu_workers_per_node=1",
    "policy.generation.num_replicas=1",
    "data_plane.impl=noop",
)
GPUS = ("~cluster.cpu_workers_per_node", "cluster.gpus_per_node=2")
APART = "policy.generation.colocated.enabled=false"

REFUSED_CLUSTERS: Refused = {
    "rule_cpu_workers_need_no_gpus": [
        (("cluster.gpus_per_node=1", "cluster.cpu_workers_per_node=2"), "cluster.cpu_workers_per_node: 2 would be")
    ],
    "rule_local_launcher_needs_one_process": [
        ((*LOCAL, "cluster.cpu_workers_per_node=2"), "cluster.launcher: 'local' runs one worker"),
        ((*LOCAL, "policy.generation.num_replicas=2"), "policy.generation.num_replicas: one process holds one engine"),
        ((*LOCAL, "cluster.address=auto"), "cluster.address: 'auto' would be ignored"),
    ],
    "rule_colocated_engines_fit_the_workers": [
        (
            ("~cluster.cpu_workers_per_node", "cluster.gpus_per_node=1", "policy.generation.num_replicas=2"),
            "policy.generation.num_replicas: an engine shares a GPU",
        ),
    ],
    "rule_engine_timeout_below_stage_timeout": [
        (("policy.generation.engine_timeout_s=1800",), "policy.generation.engine_timeout_s: expected less than"),
    ],
    "rule_engine_fits_launcher": [
        ((*LOCAL, "policy.generation.backend=vllm"), "policy.generation.backend: 'vllm' needs a process of its own"),
    ],
    "rule_engine_keys_fit_the_engine": [
        (("policy.generation.vllm_cfg.block_size=64",), "policy.generation.vllm_cfg.block_size: 64 would be ignored"),
        (("+policy.generation.vllm_kwargs.x=1",), "policy.generation.vllm_kwargs: would be ignored"),
    ],
    "rule_engine_needs_one_gpu": [
        (
            (*GPUS, "policy.generation.backend=vllm", f"policy.generation.vllm_cfg.{axis}_parallel_size=2"),
            f"policy.generation.vllm_cfg.{axis}_parallel_size: 2 with cluster.gpus_per_node 2: an engine uses one GPU",
        )
        for axis in ("tensor", "pipeline")
    ],
    "rule_several_nodes_need_an_address": [
        (("cluster.num_nodes=2",), "cluster.num_nodes: 2 nodes need"),
        (("cluster.address=auto", "cluster.num_cpus=8"), "cluster.num_cpus: would be ignored"),
    ],
    "rule_delta_refit_needs_processes": [
        (
            (*LOCAL, "policy.generation.refit_delta.enabled=true"),
            "policy.generation.refit_delta.enabled: true, but with cluster.launcher 'local' weights never leave",
        ),
        (
            ("policy.generation.refit_delta.full_every=9",),
            "policy.generation.refit_delta.full_every: 9 would be ignored",
        ),
    ],
    "rule_refit_transport_fits_the_processes": [
        (
            ("policy.generation.refit_transport=broadcast", "cluster.launcher=local"),
            "policy.generation.refit_transport: 'broadcast' moves weights between processes",
        ),
        (("policy.generation.refit_transport=ipc",), "policy.generation.refit_transport: 'ipc' shares GPU memory"),
        (
            (APART, *GPUS, "policy.generation.colocated.gpus_per_node=2", "policy.generation.refit_transport=ipc"),
            "policy.generation.refit_transport: 'ipc' needs engines on the workers' GPUs",
        ),
    ],
    "rule_colocated_keys_need_non_colocated_engines": [
        (("policy.generation.colocated.num_nodes=1",), "policy.generation.colocated.num_nodes: 1 would be ignored"),
    ],
    "rule_non_colocated_engines_need_their_own_gpus": [
        ((*LOCAL, APART), "policy.generation.colocated.enabled: false needs processes"),
        ((APART, "policy.generation.colocated.num_nodes=1"), "policy.generation.colocated.num_nodes: nodes of their"),
        (
            (APART, "policy.generation.colocated.gpus_per_node=1"),
            "policy.generation.colocated.gpus_per_node: expected",
        ),
        ((APART, *GPUS), "policy.generation.colocated.gpus_per_node: expected at least 1"),
        (
            (APART, *GPUS, "policy.generation.colocated.gpus_per_node=3"),
            "policy.generation.num_replicas: expected 3, one for each",
        ),
        (
            (APART, "cluster.address=auto", "cluster.num_nodes=3", "cluster.cpu_workers_per_node=2"),
            "policy.generation.num_replicas: expected a multiple of the 3 nodes",
        ),
    ],
    "rule_env_vars_need_processes": [
        ((*LOCAL, "cluster.env_vars={A_B: 1}"), "cluster.env_vars: would be ignored"),
        ((*LOCAL, "policy.generation.env_vars={A: b}"), "policy.generation.env_vars: would be ignored"),
        ((*LOCAL, "logger.worker_level=DEBUG"), "logger.worker_level: 'DEBUG' would be ignored"),
        ((*LOCAL, "policy.dtensor_cfg.env_vars={A: b}"), "policy.dtensor_cfg.env_vars: would be ignored"),
    ],
}
"""Refusals by the rules about processes and machines."""


OWN_PREV = ("grpo.use_generation_logprobs_as_prev=false",)
ROWS = ("loss_fn.token_level_loss=false",)
GSPO = ("loss_fn.name=gspo", *ROWS)
CORRECTED = (*OWN_PREV, "loss_fn.use_importance_sampling_correction=true")
PENALTY = ("loss_fn.reference_policy_kl_penalty=0.1",)
IN_REWARD = (*PENALTY, "loss_fn.use_kl_in_reward=true")
FORCED = (*OWN_PREV, "loss_fn.force_on_policy_ratio=true", "~loss_fn.ratio_clip_max")
ONE_UPDATE = ("policy.train_global_batch_size=1024",)


def corrected(kind: str, low: float | None, high: float | None) -> tuple[str, ...]:
    bounds = {"_ratio_min": low, "_ratio": high}
    prefix = "loss_fn.truncated_importance_sampling"
    given = tuple(f"{prefix}{name}={value}" for name, value in bounds.items() if value is not None)
    return (*CORRECTED, f"{prefix}_type={kind}", *given)


def key_of(name: str) -> str:
    return f"loss_fn.truncated_importance_sampling_{name}"


REFUSED_LOSSES: Refused = {
    "rule_loss_keys_fit_the_loss": [
        (
            ("loss_fn.name=cispo", "loss_fn.ratio_clip_c=3"),
            "loss_fn.ratio_clip_c: 3.0 would be ignored, because loss_fn.name is 'cispo'",
        ),
        (("loss_fn.name=sapo", "loss_fn.ratio_clip_max=0.3"), "loss_fn.ratio_clip_max: 0.3 would be ignored"),
        (("loss_fn.name=reinforce", "loss_fn.ratio_clip_min=0.3"), "loss_fn.ratio_clip_min: 0.3 would be ignored"),
        (("loss_fn.sapo.tau_positive=2",), "loss_fn.sapo.tau_positive: 2.0 would be ignored"),
        ((*GSPO, "loss_fn.dppo.delta_low=0.1"), "loss_fn.dppo.delta_low: 0.1 would be ignored"),
        (("loss_fn.dro.beta=1",), "loss_fn.dro.beta: 1.0 would be ignored"),
        (("loss_fn.name=dppo_tv", *FORCED), "loss_fn.force_on_policy_ratio: True would be ignored"),
    ],
    "rule_dro_needs_beta": [(("loss_fn.name=dro",), "loss_fn.dro.beta: must be set to a number > 0")],
    "rule_row_loss_needs_row_mean": [
        (("loss_fn.name=gspo",), "loss_fn.token_level_loss: gspo has one ratio per row and is a mean over rows; set"),
        ((*GSPO, "loss_fn.constant_length=8"), "loss_fn.constant_length: 8 would be ignored"),
    ],
    "rule_loss_normalization_named_once": [
        ((*ROWS, "loss_fn.constant_length=8"), "loss_fn.token_level_loss: false would be ignored"),
    ],
    "rule_forced_ratio_needs_one_update": [
        (FORCED, "loss_fn.force_on_policy_ratio: the policy is its own pi_old in the first optimizer step"),
        ((*FORCED[1:], *ONE_UPDATE), "grpo.use_generation_logprobs_as_prev: true would be ignored"),
        ((*FORCED[:2], *ONE_UPDATE, "loss_fn.ratio_clip_min=0.1"), "loss_fn.ratio_clip_min: 0.1 would be ignored"),
    ],
    "rule_correction_keys_need_a_correction": [
        ((f"{key_of('type')}=tis",), f"{key_of('type')}: 'tis' would be ignored"),
        ((*CORRECTED, f"{key_of('ratio')}=2"), f"{key_of('ratio')}: 2.0 would be ignored"),
        ((f"{key_of('ratio_min')}=0.5",), f"{key_of('ratio_min')}: 0.5 would be ignored"),
    ],
    "rule_correction_bounds_are_an_interval": [
        (corrected("tis", None, None), f"{key_of('ratio')}: must be set: tis has an upper bound"),
        (corrected("icepop", None, 2), f"{key_of('ratio_min')}: must be set: icepop has a lower bound"),
        (corrected("seq-mask-tis", 2, 2), f"{key_of('ratio_min')}: 2.0 is not below"),
    ],
    "rule_correction_fits_the_loss": [
        ((*GSPO, *corrected("tis", None, 2)), f"{key_of('type')}: gspo has one ratio per row, and 'tis' weighs tokens"),
        (("loss_fn.name=vespo", *corrected("tis", None, 2)), f"{key_of('type')}: vespo has the weights in its own"),
    ],
    "rule_correction_needs_two_policies": [
        (CORRECTED[1:], "loss_fn.use_importance_sampling_correction: true would be ignored"),
    ],
    "rule_kl_keys_need_a_penalty": [
        (("loss_fn.reference_policy_kl_type=k2",), "loss_fn.reference_policy_kl_type: 'k2' would be ignored"),
        (("loss_fn.use_kl_in_reward=true",), "loss_fn.use_kl_in_reward: True would be ignored"),
        (
            ("loss_fn.use_on_policy_kl_approximation=true",),
            "loss_fn.use_on_policy_kl_approximation: True would be ignored",
        ),
    ],
    "rule_kl_in_reward_excludes_kl_in_loss": [
        (
            (*OWN_PREV, *IN_REWARD, "loss_fn.reference_policy_kl_type=k2"),
            "loss_fn.reference_policy_kl_type: 'k2' would be ignored, because loss_fn.use_kl_in_reward is true",
        ),
        (
            (*OWN_PREV, *IN_REWARD, "loss_fn.kl_output_clamp_value=5"),
            "loss_fn.kl_output_clamp_value: 5.0 would be ignored, because loss_fn.use_kl_in_reward is true",
        ),
        (
            (*IN_REWARD, "policy.generation.top_p=0.9"),
            "loss_fn.use_kl_in_reward: with policy.generation.top_p or top_k pi_old is a distribution on the sampling",
        ),
        (IN_REWARD, "loss_fn.use_kl_in_reward: needs the trainer's log-probabilities before the update"),
        (
            (*OWN_PREV, *IN_REWARD, "grpo.adv_estimator.name=maxrl"),
            "grpo.adv_estimator.name: 'maxrl' is for rewards that are not negative",
        ),
        (
            (*OWN_PREV, *IN_REWARD, "grpo.adv_estimator.name=gdpo"),
            "grpo.adv_estimator.name: 'gdpo' reads the components of the reward",
        ),
    ],
    "rule_kl_gradient_fits_the_estimator": [
        (
            (*PENALTY, "loss_fn.reference_policy_kl_type=k1"),
            "loss_fn.reference_policy_kl_gradient: that of k1 is 0 in expectation",
        ),
        (
            (
                *PENALTY,
                "loss_fn.reference_policy_kl_type=k2",
                "loss_fn.reference_policy_kl_gradient=importance_weighted",
            ),
            "loss_fn.reference_policy_kl_gradient: weighted k2 has the gradient of the mean of x^2 / 2",
        ),
        (
            (*PENALTY, "loss_fn.reference_policy_kl_type=k2", "loss_fn.reference_policy_kl_gradient=straight_through"),
            "loss_fn.reference_policy_kl_gradient: 'straight_through' would be ignored",
        ),
    ],
}
"""Refusals by the rules about `loss_fn`."""

ACCEPTED_LOSSES: list[tuple[str, ...]] = [
    *((f"loss_fn.name={name}",) for name in ("reinforce", "cispo", "sapo", "dppo_tv", "dppo_kl", "vespo")),
    *((f"loss_fn.name={name}", *ROWS) for name in ("gspo", "gspo_token", "luspo", "gmpo")),
    ("loss_fn.name=dro", "loss_fn.dro.beta=0.5"),
    ("loss_fn.ratio_clip_c=10",),
    ("loss_fn.constant_length=10",),
    (*FORCED, *ONE_UPDATE),
    (*GSPO, *FORCED, *ONE_UPDATE),
    CORRECTED,
    (*GSPO, *CORRECTED),
    corrected("tis", None, 2),
    corrected("icepop", 0.5, 5),
    (*GSPO, *corrected("geo-mask", 0.99, 1.01)),
    ("loss_fn.name=vespo", *CORRECTED),
    (*PENALTY, "loss_fn.reference_policy_kl_type=k1", "loss_fn.reference_policy_kl_gradient=straight_through"),
    ("loss_fn.entropy_coefficient=0.01",),
    # What a loss of one's own reads is not known.
    ("loss_fn.name=mine:Loss", "loss_fn.dro.beta=0.5", "loss_fn.ratio_clip_c=3", "loss_fn.options={a: 1}"),
]
"""Combinations that work."""


REFUSED_REWARDS: Refused = {
    "rule_validation_set_names_are_unique": [
        (
            ("+data.validation_sets.reward={dataset_name: sort_digits, size: 4}",),
            "data.validation_sets.reward: is no name",
        ),
    ],
    "rule_evaluation_has_enough_samples": [
        (("evaluation.pass_at=[1, 4]", "evaluation.num_samples=2"), "evaluation.pass_at: 4 is more than"),
        (("evaluation.majority_at=[3]",), "evaluation.majority_at: 3 is more than evaluation.num_samples 1"),
        (
            ("evaluation.greedy=true", "policy.generation.val_temperature=0"),
            "evaluation.greedy: True would be ignored, because policy.generation.val_temperature is 0",
        ),
    ],
    "rule_estimator_keys_fit_the_estimator": [
        (
            ("grpo.adv_estimator.name=maxrl", "grpo.normalize_rewards=false"),
            "grpo.normalize_rewards: False would be ignored, because grpo.adv_estimator.name is 'maxrl'",
        ),
        (("+grpo.adv_estimator.component_weights.a=1",), "grpo.adv_estimator.component_weights: would be ignored"),
        (("grpo.adv_estimator.name=reinforce_plus_plus",), "grpo.drop_zero_advantage_groups: true leaves out rows"),
    ],
    "rule_gdpo_needs_reward_components": [
        (
            ("grpo.adv_estimator.name=gdpo", "grpo.drop_zero_advantage_groups=false"),
            "grpo.adv_estimator.name: 'gdpo' needs components of the reward, and env.name 'sort' gives one number",
        ),
    ],
    "rule_dynamic_sampling_is_complete": [
        (("grpo.batch_multiplier=2",), "grpo.batch_multiplier: 2.0 would be ignored"),
        (
            ("grpo.use_dynamic_sampling=true", "grpo.drop_zero_advantage_groups=false"),
            "grpo.drop_zero_advantage_groups: False would be ignored, because grpo.use_dynamic_sampling is true",
        ),
        (
            ("grpo.use_dynamic_sampling=true", "diagnostics.keep_steps.enabled=true"),
            "diagnostics.keep_steps.enabled: a step with grpo.use_dynamic_sampling",
        ),
    ],
    "rule_logprob_errors_need_two_policies": [
        (
            ("grpo.seq_logprob_error_threshold=2", "grpo.use_generation_logprobs_as_prev=true"),
            "grpo.seq_logprob_error_threshold: 2 has no log-probabilities of the trainer",
        ),
    ],
    "rule_token_baseline_needs_prev_logprobs": [
        (
            ("grpo.adv_estimator.name=optimal_token_baseline",),
            "grpo.adv_estimator.name: 'optimal_token_baseline' needs the whole distributions of the trainer",
        ),
    ],
    "rule_token_advantages_fit_the_loss": [
        (
            (
                *("grpo.adv_estimator.name=reinforce_plus_plus", "grpo.drop_zero_advantage_groups=false"),
                *("grpo.use_generation_logprobs_as_prev=false", "loss_fn.reference_policy_kl_penalty=0.1"),
                *("loss_fn.use_kl_in_reward=true", "loss_fn.name=luspo", "loss_fn.token_level_loss=false"),
            ),
            "loss_fn.name: 'luspo' has one advantage per row, and grpo.adv_estimator.name 'reinforce_plus_plus' gives",
        ),
    ],
    "rule_reward_scaling_maps_an_interval": [
        (("grpo.reward_scaling.target_max=2",), "grpo.reward_scaling.target_max: 2.0 would be ignored"),
        (
            ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=1"),
            "grpo.reward_scaling.source_min: 1.0 is not below source_max 1.0",
        ),
        (
            ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_min=1"),
            "grpo.reward_scaling.target_min: 1.0 is not below target_max 1.0",
        ),
    ],
    "rule_reward_shaping_is_complete": [
        (("grpo.reward_shaping.overlong_buffer_penalty=2",), "overlong_buffer_penalty: 2.0 would be ignored"),
        (("grpo.reward_shaping.enabled=true",), "grpo.reward_shaping.max_response_length: must be set"),
        (
            (
                "grpo.reward_shaping.enabled=true",
                "grpo.reward_shaping.max_response_length=9",
                "grpo.reward_shaping.stop_properly_penalty_coef=0.5",
            ),
            "grpo.reward_shaping.max_response_length: 9 would be ignored",
        ),
        (
            ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.max_response_length=9"),
            "grpo.reward_shaping.overlong_buffer_length: 128 is more than max_response_length 9",
        ),
        (
            (
                "grpo.reward_shaping.enabled=true",
                "grpo.reward_shaping.max_response_length=900",
                "grpo.reward_shaping.overlong_buffer_length=4",
            ),
            "grpo.reward_shaping.max_response_length: no response of policy.generation.max_new_tokens 10 tokens",
        ),
    ],
}
"""Refusals by the rules about validation, rewards, advantages and sampling."""

ASYNC = ("grpo.async.enabled=true",)
"""The bypass of the demo corrects for the age of a row."""
BOUND_ZERO = (*ASYNC, "grpo.async.max_staleness=0")
IN_FLIGHT = "policy.generation.in_flight"
VLLM, VLLM_CFG = ("policy.generation.backend=vllm",), "policy.generation.vllm_cfg"

REFUSED_ASYNC: Refused = {
    "rule_async_keys_need_their_switch": [
        (("grpo.async.max_staleness=2",), "grpo.async.max_staleness: 2 would be ignored, because grpo.async.enabled"),
        (("experience.num_workers=2",), "experience.num_workers: 2 would be ignored, because grpo.async.enabled is"),
        ((f"{IN_FLIGHT}=drain",), f"{IN_FLIGHT}: 'drain' would be ignored, because grpo.async.enabled is false"),
        ((*BOUND_ZERO, f"{IN_FLIGHT}=keep"), f"{IN_FLIGHT}: 'keep' would be ignored, because grpo.async.max_stale"),
        ((*BOUND_ZERO, "grpo.async.overdue=drop"), "grpo.async.overdue: 'drop' would be ignored, because grpo.async"),
        ((*BOUND_ZERO, "experience.num_workers=2"), "experience.num_workers: 2 would be ignored, because grpo.async"),
    ],
    "rule_lookahead_within_max_staleness": [
        (
            (*ASYNC, "grpo.async.lookahead=3", "grpo.async.max_staleness=2"),
            "grpo.async.lookahead: 3 steps ahead, but rows sampled so far ahead would be older",
        ),
        ((*BOUND_ZERO, "grpo.async.lookahead=1"), "lower it to at most 0, or raise max_staleness"),
    ],
    "rule_overdue_needs_a_choice_of_groups": [
        (
            (*ASYNC, "grpo.async.selection=in_order", "grpo.async.overdue=drop"),
            "grpo.async.overdue: 'drop' would be ignored, because grpo.async.selection is 'in_order'",
        ),
        (
            (*ASYNC, "grpo.async.lookahead=0", "grpo.async.overdue=error"),
            "grpo.async.overdue: 'error' would be ignored, because grpo.async.lookahead is 0",
        ),
    ],
    "rule_stale_rows_need_a_correction": [
        (
            (*ASYNC, *OWN_PREV),
            "loss_fn.use_importance_sampling_correction: false, but rows may be 1 updates old",
        ),
        (
            (*ASYNC, *FORCED, *ONE_UPDATE),
            "or grpo.use_generation_logprobs_as_prev=true with loss_fn.force_on_policy_ratio=false, or grpo.async.max",
        ),
        (
            (*ASYNC, "loss_fn.name=reinforce", "~loss_fn.ratio_clip_max"),
            "loss_fn.name: 'reinforce' has no ratio, and rows may be 1 updates old",
        ),
        ((*ASYNC, *OWN_PREV, f"{IN_FLIGHT}=keep"), f"{IN_FLIGHT}: 'keep' samples from old caches under new weights"),
    ],
    "rule_async_engines_have_their_own_gpus": [
        ((*ASYNC, *GPUS), "policy.generation.colocated.enabled: true lets an engine and a policy worker take turns"),
    ],
    "rule_rollout_workers_need_processes": [
        ((*ASYNC, *LOCAL, "experience.num_workers=2"), "experience.num_workers: cluster.launcher 'local' runs one"),
    ],
    "rule_group_fits_the_engine": [
        (
            (*ASYNC, "policy.generation.max_batch_size=4"),
            "policy.generation.max_batch_size: 4 rows, but a group joins an engine's batch as a whole; expected at "
            "least grpo.num_generations_per_prompt=8",
        ),
    ],
    "rule_kept_groups_need_a_choice": [
        (
            (*ASYNC, "grpo.async.keep_finished=true", "grpo.async.selection=in_order"),
            "grpo.async.keep_finished: true with grpo.async.selection=in_order: prompts that are sampled again come",
        ),
        (
            (*ASYNC, "grpo.async.keep_finished=true", "grpo.async.lookahead=0"),
            "grpo.async.keep_finished: would be ignored, because no group waits between two steps",
        ),
    ],
    "rule_vllm_rows_can_stand_still": [
        ((*ASYNC, *VLLM, f"{VLLM_CFG}.tensor_parallel_size=2"), f"{VLLM_CFG}.tensor_parallel_size: 2 with grpo.async"),
        (
            (*ASYNC, *VLLM, "policy.router_replay.enabled=true", "grpo.use_generation_logprobs_as_prev=true"),
            f"{IN_FLIGHT}: 'recompute' with policy.router_replay.enabled: vLLM forgets the routes",
        ),
        (
            (*ASYNC, *VLLM, "policy.generation.max_batch_size=16", f"{VLLM_CFG}.max_num_batched_tokens=24"),
            f"{VLLM_CFG}.max_num_batched_tokens: 24 is less than a token of each of 32 rows",
        ),
    ],
    "rule_continuous_engine_shows_no_decoding": [
        (
            (*ASYNC, "diagnostics.tracer.enabled=true", f"diagnostics.tracer.selectors=['layer.out | stats | {when}']"),
            f"diagnostics.tracer.selectors: 'layer.out | stats | {when}' watches the engine decode",
        )
        for when in ("generation", "train; generation")
    ],
    "rule_async_dynamic_sampling_has_no_rounds": [
        (
            ("grpo.use_dynamic_sampling=true", *ASYNC, f"grpo.{name}={value}"),
            f"grpo.{name}: {value} would be ignored, because an asynchronous run has no rounds",
        )
        for name, value in (("batch_multiplier", "2.0"), ("dynamic_sampling_max_gen_batches", "3"))
    ],
}
"""Refusals by the rules about asynchronous runs."""

ACCEPTED_ASYNC: list[tuple[str, ...]] = [
    ASYNC,
    BOUND_ZERO,
    (*BOUND_ZERO, *OWN_PREV),
    (*BOUND_ZERO, *GPUS),
    (*BOUND_ZERO, "loss_fn.name=reinforce", "~loss_fn.ratio_clip_max"),
    (*BOUND_ZERO, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"),
    (*ASYNC, "grpo.async.max_staleness=8", "grpo.async.lookahead=8", "grpo.async.overdue=drop"),
    (*ASYNC, "grpo.async.selection=my_package.orders:Shortest", "experience.num_workers=3"),
    (*ASYNC, *corrected("tis", None, 2.0), f"{IN_FLIGHT}=keep"),
    (*ASYNC, *corrected("geo-mask", 0.5, 2.0)),
    (*ASYNC, *CORRECTED),
    (*ASYNC, *GPUS, APART, "policy.generation.colocated.gpus_per_node=2"),
    (*ASYNC, *LOCAL),
    (*ASYNC, "grpo.use_dynamic_sampling=true"),
    (*ASYNC, "diagnostics.tracer.enabled=true"),
    (*ASYNC, "loss_fn.name=my_package.losses:MyLoss", "~loss_fn.ratio_clip_max"),
]
"""Asynchronous runs that no rule refuses."""

TURNS = ("experience.conversation.enabled=true",)
C, TOOL = "experience.conversation", "env.tools.use=[{name: calculator}]"
PROGRAM = (*TURNS, "env.name=program", "+env.options.command=[python, agent.py]")
BY_TURN = (*TURNS, "grpo.adv_estimator.name=outcome_plus_turn")

REFUSED_CONVERSATIONS: Refused = {
    "rule_conversation_keys_need_conversations": [
        ((f"{C}.max_turns=3",), f"{C}.max_turns: 3 would be ignored, because {C}.enabled is false"),
        (("env.tools.timeout_s=3",), f"env.tools.timeout_s: 3.0 would be ignored, because {C}.enabled is false"),
        (("data.history=new_row",), "data.history: 'new_row' would be ignored"),
    ],
    "rule_tool_keys_need_tools": [
        (
            (*TURNS, "env.tools.format=llama3"),
            "env.tools.format: 'llama3' would be ignored, because env.tools.use names",
        ),
        ((*PROGRAM, "env.tools.num_workers=3"), "env.tools.num_workers: 3 would be ignored"),
    ],
    "rule_programs_have_a_command": [
        ((*TURNS, "env.name=program"), "env.options.command: expected program and arguments"),
        ((*PROGRAM, "env.options.command=agent.py"), "env.options.command: expected program and arguments"),
        ((*PROGRAM, "+env.options.shell=true"), "env.options.shell: env.name 'program' takes command only"),
        ((*PROGRAM, TOOL), "env.tools.use: the program of env.name 'program' brings tools of its own"),
    ],
    "rule_environments_with_turns_need_conversations": [
        ((name,), f"{C}.enabled: env.name {name.partition('=')[2]!r} is an environment with turns")
        for name in ("env.name=guess", "env.name=program")
    ],
    "rule_rewards_of_conversations_have_no_length": [
        (
            (*TURNS, "grpo.reward_shaping.enabled=true", "grpo.reward_shaping.max_response_length=9"),
            "grpo.reward_shaping.overlong_buffer_length: the penalty is on the length of one response",
        ),
    ],
    "rule_rewards_of_turns_stay_as_they_are": [
        ((*BY_TURN, "grpo.reward_scaling.enabled=true"), "grpo.reward_scaling.enabled: true changes the reward of a c"),
        (
            (*BY_TURN, "grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0.5}"),
            "grpo.reward_shaping.enabled: true changes the reward of a conversation",
        ),
    ],
    "rule_conversations_take_no_kl_from_rewards": [
        ((*TURNS, "loss_fn.use_kl_in_reward=true"), "loss_fn.use_kl_in_reward: true takes the KL of one response"),
    ],
    "rule_conversations_are_not_kept_with_checkpoints": [
        ((*TURNS, *ASYNC, "grpo.async.keep_finished=true"), "grpo.async.keep_finished: true keeps finished groups of"),
    ],
    "rule_groups_have_enough_rows": [
        ((*TURNS, f"{C}.min_scored=99"), f"{C}.min_scored: 99 is more than grpo.num_generations_per_prompt"),
    ],
    "rule_scorer_keys_fit_the_environment": [
        (("env.timeout_s=3",), "env.timeout_s: 3.0 would be ignored"),
        (("env.score_threshold=1",), "env.score_threshold: 1.0 would be ignored"),
        (("+env.reward_weights.a=1",), "env.reward_weights: would be ignored"),
        (("env.reward_batch_size=8",), "env.reward_batch_size: 8 would be ignored"),
        (("env.name=a:B", "env.score_threshold=0.5"), "env.score_threshold: 0.5 would be ignored"),
        (("env.memory_mib=512",), "env.memory_mib: 512 would be ignored"),
        (("env.network=true",), "env.network: True would be ignored"),
        ((*TURNS, "env.name=guess", "env.on_timeout=error"), "env.on_timeout: 'error' would be ignored"),
        ((*TURNS, "env.name=guess", "env.score_threshold=1"), "env.score_threshold: 1.0 would be ignored"),
        ((*TURNS, "env.name=guess", "env.reward_batch_size=8"), "env.reward_batch_size: 8 would be ignored"),
        ((*PROGRAM, "env.network=true"), "env.network: True would be ignored"),
        ((*PROGRAM, "env.score_threshold=0.5"), "env.score_threshold: 0.5 would be ignored"),
        ((*PROGRAM, "env.num_workers=3"), "env.num_workers: 3 would be ignored"),
    ],
}
"""Refusals by the rules about conversations."""

ACCEPTED_CONVERSATIONS: list[tuple[str, ...]] = [
    TURNS,
    (*TURNS, TOOL, "env.tools.format=llama3"),
    (*TURNS, "env.name=guess", "env.memory_mib=512", "env.network=true", "env.num_workers=2"),
    PROGRAM,
    (*PROGRAM, "env.tools.format=llama3", "data.history=new_row", "env.memory_mib=512"),
    (*PROGRAM, "env.reward_function=a:b", "env.score_threshold=0.5", "env.on_timeout=error"),
    BY_TURN,
    (*TURNS, "grpo.reward_scaling.enabled=true"),
    (*TURNS, *ASYNC),
]
"""Conversations that no rule refuses."""

ADAPTERS = ("policy.lora.enabled=true",)
MERGED = (*ADAPTERS, "policy.lora.serve=merged")
FINISH = f"{IN_FLIGHT}=finish"

REFUSED_ADAPTERS: Refused = {
    "rule_lora_keys_need_lora": [(("policy.lora.rank=8",), "policy.lora.rank: 8 would be ignored")],
    "rule_lora_reference_needs_an_adapter": [
        ((*ADAPTERS, "policy.lora.reference=start"), "policy.lora.reference: 'start' needs an adapter to start from")
    ],
    "rule_finish_needs_adapters": [
        ((*ASYNC, FINISH), "policy.generation.in_flight: 'finish' lets rows of two versions run side by side"),
        ((*ASYNC, FINISH, *MERGED), "policy.generation.in_flight: 'finish' lets rows of two versions"),
    ],
    "rule_vllm_rows_keep_their_adapter": [
        ((*ASYNC, *ADAPTERS, *VLLM), "policy.generation.in_flight: 'recompute' changes the adapter of running rows"),
        ((*ASYNC, *ADAPTERS, *VLLM, f"{IN_FLIGHT}=keep"), "policy.generation.in_flight: 'keep' changes the adapter"),
    ],
    "rule_adapters_are_sent_whole": [
        ((*ADAPTERS, "policy.generation.refit_delta.enabled=true"), "policy.generation.refit_delta.enabled: true, but"),
    ],
}
"""Refusals by the rules about how adapters reach engines."""
ACCEPTED_ADAPTERS: list[tuple[str, ...]] = [
    (*ASYNC, *ADAPTERS, FINISH),
    (*ASYNC, *ADAPTERS, FINISH, *VLLM),
    (*ASYNC, *ADAPTERS),
    (*ASYNC, *MERGED, *VLLM),
    (*ADAPTERS, *VLLM),
    (*MERGED, "policy.generation.refit_delta.enabled=true"),
]

ACCEPTED = [*ACCEPTED_ADAPTERS, *ACCEPTED_LOSSES, *ACCEPTED_ASYNC, *ACCEPTED_CONVERSATIONS]
MORE_REFUSED: Refused = (
    REFUSED_ADAPTERS | REFUSED_ASYNC | REFUSED_CLUSTERS | REFUSED_CONVERSATIONS | REFUSED_LOSSES | REFUSED_REWARDS
)
