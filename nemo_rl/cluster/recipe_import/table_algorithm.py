"""What becomes of `grpo`, `loss_fn`, `reward_penalties`, `on_policy_distillation` and `async_rl` of NeMo-RL."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.cluster.recipe_import.key_rule import (
    Table,
    moved,
    no_effect,
    not_supported,
    refused,
    same,
    with_others,
)

__all__ = ["ALGORITHM"]

ASYNC = "rollouts and training take turns here; there is no asynchronous trainer"
ONE_TRAINER = "a debugging switch of another trainer"
DISTILLATION = "distillation is not here"
OTHER_ALGORITHMS: Mapping[str, str] = {
    **{"sft": "supervised fine-tuning", "dpo": "DPO", "rm": "reward-model training", "ppo": "PPO"},
    **{"distillation": "distillation", "teacher": "distillation", "value": "PPO", "eval": "evaluation"},
}
"""Sections of NeMo-RL's other recipes."""
OWN_LOSS = "write it as a loss of your own (loss_fn.name=module:Class)"
GYM = "messages of tools and NeMo-Gym are not here"

_GRPO: Table = {
    **{
        f"grpo.{name}": same()
        for name in (
            *("num_prompts_per_step", "num_generations_per_prompt", "max_num_epochs", "max_num_steps"),
            *("normalize_rewards", "use_leave_one_out_baseline", "advantage_clip_low", "advantage_clip_high"),
            *("val_at_start", "val_at_end", "seed", "overlong_filtering"),
        )
    },
    "grpo.val_period": same(convert=lambda value: value or 0, why="0 turns it off"),
    "grpo.max_val_samples": with_others("all prompts where it is null"),
    "grpo.max_rollout_turns": refused("rollouts of several turns are not here", off=(None, 1)),
    "grpo.val_start_at": not_supported("validation begins with val_at_start or val_period", off=(None, -1, 0)),
    "grpo.val_batch_size": no_effect("validation decodes policy.generation.max_batch_size rows together"),
    "grpo.val_num_generations_per_prompt": moved("evaluation.num_samples", convert=lambda value: value or 1),
    "grpo.stop_at_validation_metric": with_others("becomes grpo.stop_at_validation_accuracy"),
    "grpo.stop_at_validation_threshold": with_others("becomes grpo.stop_at_validation_accuracy"),
    "grpo.use_dynamic_sampling": same(),
    "grpo.dynamic_sampling_max_gen_batches": same(),
    "grpo.batch_multiplier": same(),
    **{
        f"grpo.reward_{part}.{name}": same()
        for part, names in (
            ("scaling", ("enabled", "source_min", "source_max", "target_min", "target_max")),
            ("shaping", ("enabled", "overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")),
            ("shaping", ("stop_properly_penalty_coef",)),
        )
        for name in names
    },
    "grpo.adv_estimator.name": with_others("with what it reads"),
    "grpo.adv_estimator.normalize_rewards": moved("grpo.normalize_rewards"),
    "grpo.adv_estimator.use_leave_one_out_baseline": moved("grpo.use_leave_one_out_baseline"),
    "grpo.adv_estimator.minus_baseline": with_others("becomes a part of grpo.adv_estimator.name"),
    "grpo.adv_estimator.reward_weights": with_others("weights of a reward's components"),
    "grpo.adv_estimator.reward_weights.*": with_others("weights of a reward's components"),
    "grpo.seq_logprob_error_threshold": same(),
    "grpo.invalid_tool_call_advantage": refused(GYM),
    "grpo.malformed_thinking_advantage": refused(GYM),
    "grpo.skip_reference_policy_logprobs_calculation": with_others(
        "here loss_fn.reference_policy_kl_penalty=0 leaves the pass out"
    ),
    "grpo.calculate_advantages_on_gpu": no_effect("advantages are a few numbers per row"),
    "grpo.deduplicate_multimodal_data": refused("prompts are text: images, video and sound are not here"),
    "grpo.debug_payload_metrics": no_effect(ONE_TRAINER),
    "grpo.async_grpo.enabled": not_supported(ASYNC),
    "grpo.async_grpo.*": no_effect("belongs to async_grpo.enabled"),
    "grpo.async_grpo": not_supported(ASYNC),
}

_LOSS: Table = {
    **{
        f"loss_fn.{name}": same()
        for name in (
            *("reference_policy_kl_penalty", "use_on_policy_kl_approximation"),
            *("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "force_on_policy_ratio", "token_level_loss"),
            *("use_importance_sampling_correction", "truncated_importance_sampling_ratio"),
            "truncated_importance_sampling_ratio_min",
        )
    },
    "loss_fn.reference_policy_kl_type": with_others("with the gradient that it has there"),
    "loss_fn.kl_input_clamp_value": same(
        convert=lambda value: 80.0 if value is None else value, why="null is a number that no token reaches"
    ),
    "loss_fn.kl_output_clamp_value": same(
        convert=lambda value: 1e30 if value is None else value, why="null is a number that no token reaches"
    ),
    "loss_fn.truncated_importance_sampling_type": with_others("of a ratio per row it weighs rows"),
    "loss_fn.sequence_level_importance_ratios": with_others("becomes loss_fn.name=gspo"),
    "loss_fn.use_kl_in_reward": with_others("of reinforce_plus_plus, which alone takes it there"),
    "loss_fn.use_cispo": with_others("becomes loss_fn.name=cispo"),
    "loss_fn.disable_ppo_ratio": with_others("becomes loss_fn.name=reinforce"),
    "loss_fn.positive_example_nll_weight": refused(OWN_LOSS, off=(None, 0, 0.0)),
}

_REST: Table = {
    "reward_penalties.token_ids.*": no_effect("belongs to penalties of NeMo-Gym"),
    "reward_penalties.*": refused(GYM),
    "reward_penalties": refused(GYM, off=(None, {})),
    "on_policy_distillation": refused(DISTILLATION, off=(None, {})),
    "on_policy_distillation.enabled": refused(DISTILLATION),
    "on_policy_distillation.*": no_effect("belongs to on_policy_distillation.enabled"),
    **{
        section: refused(f"this is a recipe of {name}, and GRPO alone is here", off=(None, {}))
        for word, name in OTHER_ALGORITHMS.items()
        for section in (word, f"{word}.*")
    },
    "async_rl": not_supported(ASYNC, off=(None, {})),
    "async_rl.*": not_supported(ASYNC, off=()),
}

ALGORITHM: Table = {**_GRPO, **_LOSS, **_REST}
"""By key; `.*` ends one that stands for all below it."""
