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
VLLM = ("policy.generation.backend=vllm",)
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
    "rule_engines_fit_their_gpus": [
        (
            ("~cluster.cpu_workers_per_node", "cluster.gpus_per_node=1", "policy.generation.num_replicas=2"),
            "policy.generation.num_replicas: 1 nodes with 1 GPUs with policy workers hold 1 engines of 1 GPUs, got 2",
        ),
        (
            (*GPUS, *VLLM, "policy.generation.num_replicas=2", "policy.generation.vllm_cfg.tensor_parallel_size=2"),
            "policy.generation.num_replicas: 1 nodes with 2 GPUs with policy workers hold 1 engines of 2 GPUs, got 2",
        ),
        (
            (*GPUS, *VLLM, "policy.generation.vllm_cfg.tensor_parallel_size=4"),
            "policy.generation.vllm_cfg.tensor_parallel_size: 4 with pipeline_parallel_size 1: an engine over several",
        ),
    ],
    "rule_engine_timeout_below_stage_timeout": [
        (("policy.generation.engine_timeout_s=1800",), "policy.generation.engine_timeout_s: expected less than")
    ],
    "rule_engine_fits_launcher": [
        ((*LOCAL, "policy.generation.backend=vllm"), "policy.generation.backend: 'vllm' needs its own process")
    ],
    "rule_engine_keys_fit_the_engine": [
        (("policy.generation.vllm_cfg.block_size=64",), "policy.generation.vllm_cfg.block_size: 64 would be ignored"),
        (("+policy.generation.vllm_kwargs.x=1",), "policy.generation.vllm_kwargs: would be ignored"),
    ],
    "rule_expert_parallel_fits_the_ranks": [
        ((*VLLM, "policy.generation.vllm_cfg.enable_expert_parallel=true"), "true, but vLLM's kernels for CPUs crash"),
        (
            (*GPUS, *VLLM, "policy.generation.vllm_cfg.enable_expert_parallel=true"),
            "policy.generation.vllm_cfg.enable_expert_parallel: true would be ignored, tensor_parallel_size is 1",
        ),
    ],
    "rule_sleep_level_fits_the_run": [
        (
            ("policy.generation.sleep_level=2", "policy.generation.refit_delta.enabled=true"),
            "policy.generation.sleep_level: 2 drops the weights that a delta changes",
        ),
        (("policy.generation.sleep_level=1", APART), "but engines that are not colocated leave the policy no memory"),
    ],
    "rule_several_nodes_need_an_address": [
        (("cluster.num_nodes=2",), "cluster.num_nodes: 2 nodes need"),
        (("cluster.address=auto", "cluster.num_cpus=8"), "cluster.num_cpus: would be ignored"),
    ],
    "rule_spare_nodes_need_a_cluster_and_checkpoints": [
        (("cluster.spare_nodes=1",), "cluster.spare_nodes: needs a running Ray cluster of 2 nodes"),
        (
            ("cluster.spare_nodes=1", "cluster.address=auto", "checkpointing.enabled=false"),
            "cluster.spare_nodes: a run goes on from its last checkpoint, and checkpointing.enabled is false",
        ),
        (
            ("cluster.spare_nodes=1", "cluster.address=auto", "checkpointing.save_optimizer=false"),
            "cluster.spare_nodes: a run goes on from its last checkpoint, and checkpointing.save_optimizer is false",
        ),
        (
            (*LOCAL, "cluster.spare_nodes=1"),
            "cluster.spare_nodes: 1 would be ignored, because cluster.launcher is 'local'",
        ),
    ],
    "rule_delta_refit_needs_processes": [
        ((*LOCAL, "policy.generation.refit_delta.enabled=true"), "with cluster.launcher 'local' weights never leave"),
        (("policy.generation.refit_delta.full_every=9",), "generation.refit_delta.full_every: 9 would be ignored"),
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
    "rule_shards_fit_what_is_sent": [
        (
            ("policy.generation.refit_transport=shards", "policy.generation.refit_delta.enabled=true"),
            "policy.generation.refit_transport: 'shards' sends parts of weights, and a delta is of whole ones",
        ),
        (
            ("policy.generation.refit_transport=shards", "policy.lora.enabled=true", "policy.lora.serve=merged"),
            "policy.lora.serve 'merged' adds the adapter to whole ones",
        ),
    ],
    "rule_colocated_keys_need_non_colocated_engines": [
        (("policy.generation.colocated.num_nodes=1",), "policy.generation.colocated.num_nodes: 1 would be ignored")
    ],
    "rule_non_colocated_engines_need_their_own_gpus": [
        ((*LOCAL, APART), "policy.generation.colocated.enabled: false needs processes"),
        ((APART, "policy.generation.colocated.num_nodes=1"), "policy.generation.colocated.num_nodes: nodes of their"),
        ((APART, "policy.generation.colocated.gpus_per_node=1"), "policy.generation.colocated.gpus_per_node: expected"),
        ((APART, *GPUS), "policy.generation.colocated.gpus_per_node: expected at least 1"),
        ((APART, *GPUS, "policy.generation.colocated.gpus_per_node=3"), "3 GPUs on each of 1 nodes for each engine"),
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
        (("loss_fn.name=cispo", "loss_fn.ratio_clip_c=3"), "3.0 would be ignored, because loss_fn.name is 'cispo'"),
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
        ((*ROWS, "loss_fn.constant_length=8"), "loss_fn.token_level_loss: false would be ignored")
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
        (CORRECTED[1:], "loss_fn.use_importance_sampling_correction: true would be ignored")
    ],
    "rule_kl_keys_need_a_penalty": [
        (("loss_fn.reference_policy_kl_type=k2",), "loss_fn.reference_policy_kl_type: 'k2' would be ignored"),
        (("loss_fn.use_kl_in_reward=true",), "loss_fn.use_kl_in_reward: True would be ignored"),
        (("loss_fn.use_on_policy_kl_approximation=true",), "use_on_policy_kl_approximation: True would be ignored"),
    ],
    "rule_kl_in_reward_excludes_kl_in_loss": [
        ((*OWN_PREV, *IN_REWARD, "loss_fn.reference_policy_kl_type=k2"), "because loss_fn.use_kl_in_reward is true"),
        ((*OWN_PREV, *IN_REWARD, "loss_fn.kl_output_clamp_value=5"), "because loss_fn.use_kl_in_reward is true"),
        ((*IN_REWARD, "policy.generation.top_p=0.9"), "top_p or top_k pi_old is a distribution on the sampling"),
        (IN_REWARD, "loss_fn.use_kl_in_reward: needs the trainer's log-probabilities before the update"),
        ((*OWN_PREV, *IN_REWARD, "grpo.adv_estimator.name=maxrl"), "'maxrl' is for rewards that are not negative"),
        ((*OWN_PREV, *IN_REWARD, "grpo.adv_estimator.name=gdpo"), "name: 'gdpo' reads the components of the reward"),
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


JUDGED = (
    "env.name=judge",
    "env.judges={a: {model: m, base_url: 'http://127.0.0.1:1/v1', rubric: r}}",
)

REFUSED_REWARDS: Refused = {
    "rule_judges_can_be_asked": [
        (("env.name=judge",), "env.judges: expected at least one judge"),
        (("env.name=judge", "env.judges={a: {model: m, rubric: r}}"), "env.judges.a.base_url: expected the URL"),
        ((*JUDGED, "env.judges.a.base_url=http://me:secret@h/v1"), "env.judges.a.base_url: expected no password"),
        ((*JUDGED, "env.judges.a.rubric=''"), "env.judges.a.rubric: expected what the judge is to look at"),
        ((*JUDGED, "+env.judges.a.scale=[5, 1]"), "env.judges.a.scale: expected [lowest, highest], got [5, 1]"),
        ((*JUDGED, "+env.judges.a.timeout_s=1"), "env.judges.a.request_timeout_s: expected at most timeout_s 1"),
        ((*JUDGED, "+env.judges.a.on_failure=score"), "env.judges.a.failure_score: expected a reward exactly where"),
        ((*JUDGED, "+env.judges.a.failure_score=0.5"), "env.judges.a.failure_score: expected a reward exactly where"),
        ((*JUDGED, "+env.judges.a.budget_cost=1"), "env.judges.a.budget_cost: costs are unknown"),
        (
            (*JUDGED, "+env.judges.a.mode=pairwise", "+env.judges.a.scale=[0, 1]"),
            "env.judges.a.scale: would be ignored",
        ),
        (("env.name=judge", "env.judges={a: {rubric: r, base_url: 'http://127.0.0.1:1/v1'}}"), "a.model: must be set"),
        ((*JUDGED, "+env.judges.a.options={b: 1}"), "env.judges.a.options: would be ignored"),
        ((*JUDGED, "+env.judges.a.kind=my.module:Judge"), "env.judges.a.base_url: 'http://127.0.0.1:1/v1' would be"),
        ((*JUDGED, "+env.judges.a.kind=classifier"), "env.judges.a.base_url: 'http://127.0.0.1:1/v1' would be ignored"),
        (
            ("env.name=judge", "env.judges={a: {model: m, kind: classifier, mode: pairwise}}"),
            "env.judges.a.mode: a classifier scores one response, got 'pairwise'",
        ),
        ((*JUDGED, "env.gates={b: 1}"), "env.gates.b: no judge has this name; expected a"),
        ((*JUDGED, "env.reward_weights={b: 1}"), "env.reward_weights.b: no judge has this name; expected a"),
        ((*JUDGED, "experience.num_workers=2"), "experience.num_workers: limits and budgets of env.judges"),
        (
            ("env.name=judge", "env.judges={'a.b': {model: m, kind: classifier}}"),
            "env.judges: expected names of letters",
        ),
    ],
    "rule_validation_set_names_are_unique": [
        (
            ("+data.validation_sets.reward={dataset_name: sort_digits, size: 4}",),
            "data.validation_sets.reward: is no name",
        )
    ],
    "rule_evaluation_has_enough_samples": [
        (("evaluation.pass_at=[1, 4]", "evaluation.num_samples=2"), "evaluation.pass_at: 4 is more than"),
        (("evaluation.majority_at=[3]",), "evaluation.majority_at: 3 is more than evaluation.num_samples 1"),
        (("evaluation.greedy=true", "policy.generation.val_temperature=0"), "policy.generation.val_temperature is 0"),
    ],
    "rule_estimator_keys_fit_the_estimator": [
        (
            ("grpo.adv_estimator.name=maxrl", "grpo.normalize_rewards=false"),
            "grpo.normalize_rewards: False would be ignored, because grpo.adv_estimator.name is 'maxrl'",
        ),
        (("+grpo.adv_estimator.component_weights.a=1",), "grpo.adv_estimator.component_weights: would be ignored"),
        (
            ("grpo.adv_estimator.name=reinforce_plus_plus", "grpo.drop_zero_advantage_groups=true"),
            "grpo.drop_zero_advantage_groups: true leaves out rows",
        ),
    ],
    "rule_gdpo_needs_reward_components": [
        (
            ("grpo.adv_estimator.name=gdpo", "grpo.drop_zero_advantage_groups=false"),
            "grpo.adv_estimator.name: 'gdpo' needs components of the reward, and env.name 'sort' gives one number",
        )
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
        )
    ],
    "rule_token_baseline_needs_prev_logprobs": [
        (("grpo.adv_estimator.name=optimal_token_baseline",), "needs the whole distributions of the trainer")
    ],
    "rule_token_advantages_fit_the_loss": [
        (
            (
                *("grpo.adv_estimator.name=reinforce_plus_plus", "grpo.drop_zero_advantage_groups=false"),
                *("grpo.use_generation_logprobs_as_prev=false", "loss_fn.reference_policy_kl_penalty=0.1"),
                *("loss_fn.use_kl_in_reward=true", "loss_fn.name=luspo", "loss_fn.token_level_loss=false"),
            ),
            "loss_fn.name: 'luspo' has one advantage per row, and grpo.adv_estimator.name 'reinforce_plus_plus' gives",
        )
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

SOURCES = (
    "data.train.a={dataset_name: sort_digits, size: 50}",
    "data.train.b={dataset_name: sort_digits, size: 60, seed: 9}",
)
SMALL_GROUP = (*SOURCES, "data.train.a.num_generations_per_prompt=2")

REFUSED_SUPERVISED: Refused = {
    "rule_supervised_training_reads_its_own_keys": [
        (("sft.min_reward=0.5",), "sft.min_reward: 0.5 would be ignored, because sft.enabled is false"),
        (("sft.enabled=true", "grpo.num_generations_per_prompt=3"), "grpo.num_generations_per_prompt: 3 would be"),
        (("sft.enabled=true", "data.curriculum.window={}"), "data.curriculum.window: would be ignored, because sft"),
        (("sft.enabled=true", "data.train.env={name: sort}"), "data.train.env"),
        (("sft.enabled=true", "+sft.settings.grpo.seed=1"), "sft.settings: would be ignored"),
        (("+sft.settings.grpo.seed=1",), "sft.settings: would be ignored"),
        (("sft.enabled=true", *SMALL_GROUP), "data.train.a.num_generations_per_prompt: 2 would be ignored"),
    ],
    "rule_stages_are_one_or_both": [
        (("stages=[grpo, sft]",), "stages: expected [grpo] or [sft, grpo], got [grpo, sft]"),
        (("stages=[sft, grpo]", "sft.enabled=true"), "sft.enabled: true is supervised training alone"),
        (("stages=[sft, grpo]", "policy.lora.enabled=true"), "policy.lora.enabled: a warm start with policy.lora"),
        (("stages=[sft, grpo]", "+sft.settings.policy.model_name=m"), "sft.settings.policy.model_name: is the same"),
        (
            ("stages=[sft, grpo]", "+sft.settings.checkpointing.checkpoint_dir=s3://bucket/run"),
            "sft.settings.checkpointing.checkpoint_dir: the second stage reads it as a folder",
        ),
    ],
    "rule_supervised_training_has_text_and_a_template": [
        (
            ("sft.enabled=true", "data.train.apply_chat_template=false"),
            "data.train.apply_chat_template: false with sft",
        ),
        (("sft.enabled=true", "data.train.image_key=picture"), "data.train.image_key: sft.enabled trains text alone"),
        (("sft.enabled=true", "diagnostics.tracer.enabled=true"), "the live tracer does not follow sft.enabled yet"),
    ],
}
"""Refusals by the rules about supervised training, alone and as a first stage."""
