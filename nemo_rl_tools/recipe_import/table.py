"""The tables of NeMo-RL keys: every key of every section, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_tools.recipe_import.keys import (
    OFF,
    Table,
    each,
    moved,
    no_effect,
    not_supported,
    refused,
    same,
    with_others,
)

__all__ = ["NEMO_RL"]

ASYNC = "becomes grpo.async and policy.generation.in_flight"
ATTEMPTS = "a failed group is sampled again, up to 5 times if the infrastructure failed and 2 times otherwise"
WHOLE_STEPS = "a step has all its groups: another prompt replaces one that fails for good"
WAITS = "cluster.stage_timeout_s bounds every wait, and policy.generation.engine_timeout_s those for an engine"
ONE_TRAINER = "a debugging switch of another trainer"
DISTILLATION = (
    "write it as loss_fn.distillation: a teacher with the policy's tokenizer, top_k, kl, and mode alone or added"
)
OTHER_ALGORITHMS: Mapping[str, str] = {
    **{"sft": "supervised fine-tuning", "dpo": "DPO", "rm": "reward-model training", "ppo": "PPO"},
    **{"value": "PPO", "eval": "evaluation"},
}
"""Sections of NeMo-RL's other recipes."""
OWN_LOSS = "write it as a loss of your own (loss_fn.name=module:Class)"
TOOLS = "no advantage by the form of a turn; calls that cannot be read end a conversation as invalid_calls"

_SAME: Table = each(
    same(),
    "grpo: num_prompts_per_step num_generations_per_prompt max_num_epochs max_num_steps normalize_rewards seed",
    "grpo: use_leave_one_out_baseline advantage_clip_low advantage_clip_high val_at_start val_at_end",
    "grpo: overlong_filtering use_dynamic_sampling dynamic_sampling_max_gen_batches batch_multiplier",
    "grpo: seq_logprob_error_threshold",
    "grpo.reward_scaling: enabled source_min source_max target_min target_max",
    "grpo.reward_shaping: enabled overlong_buffer_length overlong_buffer_penalty max_response_length",
    "grpo.reward_shaping: stop_properly_penalty_coef",
    "loss_fn: reference_policy_kl_penalty use_on_policy_kl_approximation ratio_clip_min ratio_clip_max ratio_clip_c",
    "loss_fn: force_on_policy_ratio token_level_loss use_importance_sampling_correction",
    "loss_fn: truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min",
    "policy: model_name train_global_batch_size train_micro_batch_size logprob_batch_size max_total_sequence_length",
    "policy: precision max_grad_norm router_replay.enabled",
    "policy: optimizer optimizer.name optimizer.kwargs optimizer.kwargs.* scheduler.name scheduler.kwargs.*",
    "policy.dynamic_batching: enabled microbatch_order",
    "policy.sequence_packing: enabled algorithm microbatch_order",
    "policy.dtensor_cfg: enabled cpu_offload sequence_parallel activation_checkpointing tensor_parallel_size",
    "policy.dtensor_cfg: context_parallel_size custom_parallel_plan custom_parallel_plan.* env_vars env_vars.*",
    "policy.megatron_cfg: enabled tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size",
    "policy.megatron_cfg: expert_model_parallel_size expert_tensor_parallel_size sequence_parallel",
    "policy.megatron_cfg: num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
    "policy.megatron_cfg: activation_checkpointing recompute_granularity recompute_method recompute_num_layers",
    "policy.megatron_cfg: freeze_moe_router moe_router_load_balancing_type moe_router_bias_update_rate",
    "policy.megatron_cfg: moe_permute_fusion apply_rope_fusion moe_aux_loss_coeff moe_grouped_gemm",
    "policy.megatron_cfg: virtual_pipeline_model_parallel_size env_vars env_vars.*",
    "policy.megatron_cfg.optimizer: optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum",
    "policy.megatron_cfg.optimizer: use_distributed_optimizer use_precision_aware_optimizer optimizer_cpu_offload",
    "policy.megatron_cfg.optimizer: optimizer_offload_fraction",
    "policy.megatron_cfg.scheduler: start_weight_decay end_weight_decay weight_decay_incr_style lr_decay_iters",
    "policy.megatron_cfg.scheduler: lr_warmup_iters lr_warmup_init lr_decay_style",
    "policy.megatron_cfg.distributed_data_parallel_config: grad_reduce_in_fp32 overlap_grad_reduce",
    "policy.megatron_cfg.distributed_data_parallel_config: overlap_param_gather",
    "policy.generation: temperature top_p val_temperature stop_token_ids colocated.enabled",
    "data: shuffle",
    "cluster: gpus_per_node num_nodes env_vars env_vars.*",
    "checkpointing: enabled checkpoint_dir higher_is_better keep_top_k save_period save_optimizer",
    "logger: log_dir wandb_enabled tensorboard_enabled mlflow_enabled wandb.project wandb.name",
    "logger: mlflow.experiment_name mlflow.run_name mlflow.tracking_uri",
    "data_plane: impl backend simple.num_storage_units observability.enabled observability.callback",
)

_GRPO: Table = {
    "grpo.val_period": same(convert=lambda value: value or 0, why="0 turns it off"),
    "grpo.max_val_samples": with_others("all prompts where it is null"),
    "grpo.val_start_at": not_supported("validation begins with val_at_start or val_period", off=(None, -1, 0)),
    "grpo.val_batch_size": no_effect("validation decodes policy.generation.max_batch_size rows together"),
    "grpo.val_num_generations_per_prompt": moved("evaluation.num_samples", convert=lambda value: value or 1),
    "grpo.stop_at_validation_metric": with_others("becomes grpo.stop_at_validation_accuracy"),
    "grpo.stop_at_validation_threshold": with_others("becomes grpo.stop_at_validation_accuracy"),
    "grpo.adv_estimator.name": with_others("with what it reads"),
    "grpo.adv_estimator.normalize_rewards": moved("grpo.normalize_rewards"),
    "grpo.adv_estimator.use_leave_one_out_baseline": moved("grpo.use_leave_one_out_baseline"),
    "grpo.adv_estimator.minus_baseline": with_others("becomes a part of grpo.adv_estimator.name"),
    "grpo.adv_estimator.reward_weights": with_others("weights of a reward's components"),
    "grpo.adv_estimator.reward_weights.*": with_others("weights of a reward's components"),
    "grpo.invalid_tool_call_advantage": refused(TOOLS),
    "grpo.malformed_thinking_advantage": refused(TOOLS),
    "grpo.skip_reference_policy_logprobs_calculation": with_others(
        "here loss_fn.reference_policy_kl_penalty=0 leaves the pass out"
    ),
    "grpo.calculate_advantages_on_gpu": no_effect("advantages are a few numbers per row"),
    "grpo.deduplicate_multimodal_data": refused("prompts are text: images, video and sound are not here"),
    "grpo.debug_payload_metrics": no_effect(ONE_TRAINER),
    **each(with_others(ASYNC), "grpo.async_grpo: enabled max_trajectory_age_steps in_flight_weight_updates"),
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": with_others(ASYNC),
    "grpo.async_grpo.max_generation_failures": no_effect(ATTEMPTS),
    "grpo.async_grpo": no_effect("an empty section asks for nothing"),
}

_LOSS: Table = {
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
    "reward_penalties.*": refused(TOOLS),
    "reward_penalties": refused(TOOLS, off=(None, {})),
    "on_policy_distillation": refused(DISTILLATION, off=(None, {})),
    "on_policy_distillation.enabled": refused(DISTILLATION),
    "on_policy_distillation.*": no_effect("belongs to on_policy_distillation.enabled"),
    **each(refused(DISTILLATION, off=(None, {})), "distillation distillation.* teacher teacher.*"),
    **{
        section: refused(f"this is a recipe of {name}, and GRPO alone is here", off=(None, {}))
        for word, name in OTHER_ALGORITHMS.items()
        for section in (word, f"{word}.*")
    },
}

_SINGLE_CONTROLLER: Table = {
    "async_rl": no_effect("an empty section asks for nothing"),
    **each(with_others(ASYNC), "async_rl.sampler: name max_lookahead_versions max_staleness_versions"),
    "async_rl.sampler.sample_freshest_first": not_supported(
        "grpo.async.selection=module:Class may order groups so; grpo.async.max_staleness holds for it as well"
    ),
    "async_rl.sampler.target": not_supported("write it as grpo.async.selection=module:Class", off=(None,)),
    "async_rl.recompute_kv_cache_after_weight_updates": with_others(ASYNC),
    "async_rl.min_groups_for_streaming_train": no_effect("a step begins when it has all its groups"),
    "async_rl.max_inflight_prompts": no_effect("grpo.async.lookahead bounds the groups that are sampled"),
    "async_rl.max_buffered_rollouts": no_effect("grpo.async.lookahead bounds the groups that wait"),
    "async_rl.diagnostics": no_effect("every step has the account of its groups"),
    "async_rl.rollout_failure.on_dropped_prompt": not_supported(WHOLE_STEPS, off=(None, "replace")),
    "async_rl.rollout_failure.min_step_batch_fraction": not_supported(WHOLE_STEPS, off=(None, 1, 1.0)),
    "async_rl.rollout_failure.*": no_effect(ATTEMPTS),
    "async_rl.rollout_failure.nemo_gym.*": no_effect("belongs to NeMo-Gym"),
    "async_rl.rollout_failure.native.*": no_effect(WAITS),
    "async_rl.stall_watchdog.*": no_effect(WAITS),
    "async_rl.generation_fleet_health.*": no_effect("an engine that is lost is started again"),
    "async_rl.generation_router.*": no_effect("engines have no ports"),
}

OTHER_ENGINE = "a setting of an engine that is not here; see policy.generation.backend"
IMAGES = "prompts are text: images, video and sound are not here"
REWARD_MODEL = "reward models are not here; a reward of your own may ask one (env.name=custom)"
ENGINE = "an engine setting without a key here; policy.generation.vllm_kwargs takes vLLM's own arguments"
SPEED = "a matter of speed that has no switch here"
CHUNKS = "log-probabilities always work through chunks"
MTP = "heads for several tokens (MTP) are not here"
FP8 = "training and decoding in fp8 are not here"

_MAIN: Table = {
    "policy.make_sequence_length_divisible_by": same(why="a layout that needs more takes it"),
    "policy.tokenizer.name": with_others("null where it is the model's own"),
    "policy.tokenizer.chat_template": with_others("null is the tokenizer's own here, and none at all there"),
    "policy.tokenizer.chat_template_kwargs": refused("write them into the template", off=(None, {})),
    "policy.tokenizer.chat_template_kwargs.*": refused("write them into the template", off=(None,)),
    "policy.tokenizer.use_processor": refused(IMAGES),
    "policy.tokenizer.video": refused(IMAGES, off=(None, {})),
    "policy.tokenizer.video.*": refused(IMAGES, off=(None,)),
    "policy.reward_model_cfg.enabled": refused(REWARD_MODEL),
    "policy.reward_model_cfg.*": no_effect("belongs to reward_model_cfg.enabled"),
    "policy.reward_model_cfg": refused(REWARD_MODEL, off=(None, {})),
    "policy.tokenizer.use_fastokens": no_effect("tokenizers are the fast ones"),
    "policy.hf_config_overrides": refused("change config.json in the model folder", off=(None, {})),
    "policy.hf_config_overrides.*": refused("change config.json in the model folder", off=()),
    "policy.generation_batch_size": moved(
        "policy.generation.max_batch_size", why="rows that an engine decodes together"
    ),
    "policy.logprob_chunk_size": no_effect(CHUNKS),
    "policy.offload_optimizer_for_logprob": not_supported("policy.dtensor_cfg.cpu_offload keeps it on the CPU"),
    "policy.refit_buffer_size_gb": no_effect("policy.generation.refit_buffer_ratio is a share of free memory"),
    **each(
        with_others("at least the longest sequence"),
        "policy.dynamic_batching: train_mb_tokens logprob_mb_tokens",
        "policy.sequence_packing: train_mb_tokens logprob_mb_tokens",
    ),
    **each(
        no_effect("lengths are not rounded: padding alone"),
        "policy: dynamic_batching.sequence_length_round sequence_packing.sequence_length_round",
    ),
    "policy.draft.enabled": not_supported("drafters are not here"),
    "policy.draft.*": no_effect("belongs to draft.enabled"),
    "policy.draft": not_supported("drafters are not here", off=(None, {})),
    "policy.scheduler": same(why="a list of torch schedulers is taken as it is"),
}

_DTENSOR: Table = {
    "policy.dtensor_cfg._v2": no_effect("there is one DTensor worker"),
    "policy.dtensor_cfg.automodel_kwargs": not_supported("the model is Hugging Face's own", off=(None, {})),
    **each(
        no_effect("kernels: the model is Hugging Face's own"),
        "policy.dtensor_cfg.automodel_kwargs: force_hf use_liger_kernel use_sdpa_patching backend backend.*",
    ),
    "policy.dtensor_cfg.automodel_kwargs.*": not_supported("the model is Hugging Face's own", off=(None,)),
    "policy.dtensor_cfg.expert_parallel_size": not_supported(
        "the DTensor worker splits experts over its tensor axis; the Megatron worker has an expert axis", off=(None, 1)
    ),
    "policy.dtensor_cfg.dp_replicate_size": moved(
        "policy.dtensor_cfg.replicate_size", convert=lambda value: value or 1, why="null: one copy"
    ),
    "policy.dtensor_cfg.defer_fsdp_grad_sync": no_effect("gradients are reduced once, after the last microbatch"),
    "policy.dtensor_cfg.clear_cache_every_n_steps": no_effect(SPEED),
}

_MEGATRON: Table = {
    "policy.megatron_cfg.recompute_modules": same(
        convert=lambda value: value or ["core_attn"], why="null is core_attn"
    ),
    "policy.megatron_cfg.moe_router_dtype": same(
        convert=lambda value: None if value in (None, "null", "bf16") else value, why="null: the model's"
    ),
    "policy.megatron_cfg.moe_token_dispatcher_type": same(
        convert=lambda value: value if value in ("alltoall", "allgather") else "alltoall", why="alltoall or allgather"
    ),
    "policy.megatron_cfg.checkpoint.async_save": moved("checkpointing.async_save"),
    "policy.megatron_cfg.model_overrides": refused("change config.json in the model folder", off=(None, {})),
    "policy.megatron_cfg.model_overrides.*": refused("change config.json in the model folder", off=()),
    "policy.megatron_cfg.pipeline_dtype": no_effect("activations travel in policy.precision"),
    "policy.megatron_cfg.fine_grained_activation_offloading": not_supported(
        "activations are recomputed, not offloaded"
    ),
    "policy.megatron_cfg.offload_modules": no_effect("belongs to fine_grained_activation_offloading"),
    **each(no_effect(CHUNKS), "policy.megatron_cfg: use_fused_linear_logprobs fused_linear_logprobs_chunk_size"),
    "policy.megatron_cfg.force_reconvert_from_hf": no_effect("weights are read from the Hugging Face folder each time"),
    "policy.megatron_cfg.converter_type": no_effect("the model folder says which family it is"),
    **each(
        no_effect(SPEED),
        "policy.megatron_cfg: empty_unused_memory_level cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps",
        "policy.megatron_cfg: cuda_graph_scope moe_enable_deepep moe_shared_expert_overlap defer_fp32_logits",
        "policy.megatron_cfg: gradient_accumulation_fusion moe_per_layer_logging bias_activation_fusion",
        "policy.megatron_cfg: checkpoint.ckpt_assume_constant_structure",
        "policy.megatron_cfg.distributed_data_parallel_config: average_in_collective data_parallel_sharding_strategy",
        "policy.megatron_cfg.distributed_data_parallel_config: bucket_size check_for_nan_in_grad",
    ),
    "policy.megatron_cfg.layernorm_epsilon": refused(
        "change rms_norm_eps of config.json in the model folder", off=(None,)
    ),
    "policy.megatron_cfg.mtp_num_layers": refused(MTP, off=(None, 0)),
    "policy.megatron_cfg.mtp_*": no_effect("belongs to mtp_num_layers"),
    "policy.megatron_cfg.fp8_cfg.enabled": not_supported(FP8),
    "policy.megatron_cfg.fp8_cfg.*": no_effect("belongs to fp8_cfg.enabled"),
    "policy.megatron_cfg.fp8_cfg": not_supported(FP8, off=(None, {})),
    "policy.megatron_cfg.optimizer.clip_grad": with_others("becomes policy.max_grad_norm where this worker trains"),
    **each(no_effect("policy.precision says it"), "policy.megatron_cfg.optimizer: bf16 fp16 params_dtype"),
    "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp": not_supported(
        "the DTensor worker shards by FSDP2"
    ),
}

FILTERS = "tokens are drawn by temperature, top_p and top_k alone"
_FILTERS_OFF: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("min_p", "min_tokens", "presence_penalty", "frequency_penalty"), (None, 0, 0.0)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (None, 1, 1.0)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output"), OFF),
    "skip_special_tokens": (None, True),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
}
"""Arguments of other samplers, with the values that ask for nothing."""

_GENERATION: Table = {
    "policy.generation.backend": with_others("vllm stays vllm; another is the embedded engine"),
    "policy.generation.max_new_tokens": with_others("prompt and response together fit max_total_sequence_length"),
    "policy.generation.top_k": same(convert=lambda value: None if value in (None, -1, 0) else value, why="null: all"),
    **each(with_others("validation samples from the set of training"), "policy.generation: val_top_p val_top_k"),
    "policy.generation.stop_strings": same(convert=lambda value: value or [], why="none is an empty list"),
    "policy.generation.bad_words": refused("no token is forbidden", off=(None, [])),
    **{f"policy.generation.{name}": refused(FILTERS, off=off) for name, off in _FILTERS_OFF.items()},
    **each(no_effect("engines have no ports"), "policy.generation: port_range_low port_range_high"),
    "policy.generation.refit_transport": with_others("auto takes what fits"),
    **each(no_effect("policy.generation.refit_transport takes what fits"), "policy.generation: refit_cfg refit_cfg.*"),
    "policy.generation.real_quant_export_cpu_offload": not_supported(FP8),
    "policy.generation.colocated.resources.gpus_per_node": moved("policy.generation.colocated.gpus_per_node"),
    "policy.generation.colocated.resources.num_nodes": moved("policy.generation.colocated.num_nodes"),
    "policy.generation.vllm_cfg.precision": with_others("policy.generation.precision"),
    "policy.generation.vllm_cfg.kv_cache_dtype": not_supported(FP8, off=(None, "auto", "bfloat16")),
    "policy.generation.vllm_cfg.logprobs_mode": refused(
        "log-probabilities are those of the sampling distribution", off=(None, "processed_logprobs")
    ),
    **each(
        with_others("the same, with backend vllm"),
        "policy.generation.vllm_cfg: tensor_parallel_size pipeline_parallel_size expert_parallel_size",
        "policy.generation.vllm_cfg: gpu_memory_utilization max_model_len enforce_eager",
    ),
    "policy.generation.vllm_cfg.async_engine": no_effect("grpo.async.enabled decides whether rows come and go"),
    **each(
        no_effect("it changes no response"),
        "policy.generation.vllm_cfg: use_tqdm skip_tokenizer_init load_format reset_encoder_cache_after_weight_update",
        "policy.generation.vllm_cfg: enable_vllm_metrics_logger vllm_metrics_logger_interval expose_http_server",
        "policy.generation.vllm_cfg: http_server_serving_chat_kwargs http_server_serving_chat_kwargs.*",
    ),
    "policy.generation.vllm_cfg.use_deep_gemm": not_supported(FP8),
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": not_supported(FP8, off=(None, 0)),
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": not_supported(FP8, off=(None, 0)),
    "policy.generation.vllm_cfg.limit_mm_per_prompt": not_supported(IMAGES, off=(None, {})),
    "policy.generation.vllm_cfg.*": not_supported(ENGINE, off=(None,)),
    **each(
        with_others("arguments of vLLM's engine, by vLLM's own names"), "policy.generation: vllm_kwargs vllm_kwargs.*"
    ),
    **each(
        no_effect(OTHER_ENGINE),
        "policy.generation: sglang_cfg sglang_cfg.* sglang_kwargs sglang_kwargs.* trtllm_cfg trtllm_cfg.*",
        "policy.generation: trtllm_kwargs trtllm_kwargs.* dynamo_cfg dynamo_cfg.*",
        "policy.generation: mcore_generation_config mcore_generation_config.*",
    ),
}

PROMPTS = "becomes data.train, data.validation and env.name"
GYM = "NeMo-Gym is not here"
_DATASET = (
    "dataset_name data_path input_key output_key split split_validation_size seed prompt_file system_prompt_file "
    "processor env_name"
)


def _metric(value: object) -> object:
    """Return the name of a metric as it is here: `val_reward` and `val:reward` mean the same."""
    text = str(value)
    for area in ("val", "train"):
        if text.startswith((f"{area}_", f"{area}/")):
            return f"{area}:{text[len(area) + 1 :]}"
    return value


_DATA: Table = {
    "data.max_input_seq_length": with_others("prompt and response together fit policy.max_total_sequence_length"),
    "data.num_workers": no_effect("prompts are read once, before the first step"),
    "data.use_multiple_dataloader": refused("one source of prompts"),
    "data.num_prompts_per_dataloader": no_effect("belongs to use_multiple_dataloader"),
    "data.custom_dataloader": refused("write a dataset of your own (data.train.dataset_name=module:function)"),
    **each(
        with_others(PROMPTS),
        "data: train validation default",
        # Older recipes have these beside the sections.
        *(f"{section}: {_DATASET}" for section in ("data", "data.train", "data.validation", "data.default")),
    ),
    **each(
        no_effect("nothing is downloaded here"),
        "data: download_dir train.download_dir default.download_dir validation.download_dir",
    ),
    **each(not_supported("the chat template decides"), "data: add_bos add_eos"),
    "data.add_generation_prompt": refused("the chat template's generation prompt is always added", off=(None, True)),
}

_ENV: Table = {
    "env.should_use_nemo_gym": refused(GYM),
    **each(no_effect("belongs to should_use_nemo_gym"), "env: should_log_nemo_gym_responses nemo_gym nemo_gym.*"),
    "env.*": with_others("of the environments that data sets name"),
    "env": no_effect("an empty section"),
}

_CLUSTER: Table = {
    **each(
        no_effect("ports are bound before they are announced"), "cluster: master_port_range_low master_port_range_high"
    ),
    "cluster.segment_size": not_supported("nodes are taken as Ray offers them"),
}

_CHECKPOINTING: Table = {
    "checkpointing.metric_name": same(convert=_metric, why="val:NAME or train:NAME"),
    "checkpointing.checkpoint_must_save_by": moved("checkpointing.must_save_by"),
    "checkpointing.ft_save_period": not_supported("one period of saving: checkpointing.save_period"),
    "checkpointing.ft_keep_latest_k": not_supported("the latest checkpoint is always kept", off=(None, 0, 1)),
    "checkpointing.model_save_format": not_supported(
        "weights are saved as Hugging Face safetensors", off=(None, "safetensors")
    ),
    "checkpointing.save_consolidated": no_effect("weights are always one Hugging Face folder"),
    **each(no_effect("belongs to is_peft"), "checkpointing: peft_config peft_config.*"),
    "checkpointing.pretrained_checkpoint": refused("policy.model_name is a Hugging Face folder", off=(None, {})),
    "checkpointing.pretrained_checkpoint.*": refused("policy.model_name is a Hugging Face folder"),
}

_LOGGER: Table = {
    "logger.wandb.*": not_supported("wandb has project, name and mode here"),
    "logger.mlflow.*": not_supported("mlflow has experiment_name, run_name and tracking_uri here"),
    "logger.swanlab_enabled": not_supported("write a tracker of your own (logger.trackers)"),
    **each(no_effect("belongs to swanlab_enabled"), "logger: swanlab swanlab.*"),
    **each(no_effect("events lie in tensorboard/ of logger.log_dir"), "logger: tensorboard tensorboard.*"),
    "logger.num_val_samples_to_print": no_effect(
        "nothing is printed: rollouts are written to files (logger.num_rollouts_to_log)"
    ),
    **each(no_effect("memory of the workers is always logged"), "logger: monitor_gpus gpu_monitoring gpu_monitoring.*"),
}

_DATA_PLANE: Table = {
    "data_plane.enabled": with_others("there is one trainer; false takes the store that fits, with its defaults"),
    "data_plane.storage_capacity": moved("data_plane.storage_capacity.rows", why="a limit that holds: puts wait"),
    "data_plane.num_storage_units": moved("data_plane.simple.num_storage_units"),
    "data_plane.simple.storage_capacity": moved("data_plane.storage_capacity.rows", why="a limit that holds"),
    "data_plane.claim_meta_poll_interval_s": no_effect("a claim is answered when rows are there, without polling"),
    "data_plane.global_segment_size": moved("data_plane.mooncake.segment_bytes"),
    "data_plane.local_buffer_size": moved("data_plane.mooncake.local_buffer_bytes"),
    "data_plane.mooncake_cpu.global_segment_size": moved("data_plane.mooncake.segment_bytes"),
    "data_plane.mooncake_cpu.local_buffer_size": moved("data_plane.mooncake.local_buffer_bytes"),
    **each(no_effect("NeMo-RL never reads it"), "data_plane: controller_address ack_timeout_ms"),
}

NEMO_RL: Table = {
    **_SAME,
    **{**_GRPO, **_LOSS, **_REST, **_SINGLE_CONTROLLER},
    **{**_MAIN, **_DTENSOR, **_MEGATRON, **_GENERATION},
    **{**_DATA, **_ENV, **_CLUSTER, **_CHECKPOINTING, **_LOGGER, **_DATA_PLANE},
}
"""Rules by key; a key that ends in `.*` stands for all below it."""
