"""What rules of validation, rewards, advantages and sampling refuse in the demo: overrides, and text of the line."""

from __future__ import annotations

__all__ = ["REFUSED_BY_REWARDS"]

REFUSED_BY_REWARDS: dict[str, list[tuple[tuple[str, ...], str]]] = {
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
