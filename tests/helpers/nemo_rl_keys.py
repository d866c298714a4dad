"""Every key of a NeMo-RL GRPO recipe (main branch of August 2026) with a value that asks for something, and its fate.

S same, M another key or value, N not supported, I without effect. A key whose rules switch it off in this very recipe
is I as well; each such row says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from nemo_rl_tools.recipe_import.keys import Fate

__all__ = ["FATES", "KEYS", "nested"]

FATES: Mapping[str, Fate] = {"S": Fate.SAME, "M": Fate.MAPPED, "N": Fate.NOT_SUPPORTED, "I": Fate.IGNORED}
_TEXT = """
grpo.num_prompts_per_step S 32
grpo.num_generations_per_prompt S 16
grpo.max_num_epochs S 1
grpo.max_num_steps S 100
grpo.max_rollout_turns I 3
grpo.normalize_rewards S true
grpo.use_leave_one_out_baseline S true
grpo.advantage_clip_low S -5.0
grpo.advantage_clip_high S 5.0
grpo.val_period S 10
grpo.val_start_at N 5
grpo.val_batch_size I 256
grpo.val_at_start S true
grpo.val_at_end S true
grpo.max_val_samples M 256
grpo.val_num_generations_per_prompt M 4
grpo.stop_at_validation_metric M val:accuracy
grpo.stop_at_validation_threshold M 0.9
grpo.seed S 42
grpo.overlong_filtering S true
grpo.use_dynamic_sampling S true
grpo.dynamic_sampling_max_gen_batches S 10
grpo.batch_multiplier I 2  # an asynchronous run has no rounds
grpo.reward_shaping.enabled S true
grpo.reward_shaping.overlong_buffer_length S 128
grpo.reward_shaping.overlong_buffer_penalty S 1
grpo.reward_shaping.max_response_length I 100
grpo.reward_shaping.stop_properly_penalty_coef S 0.1
grpo.reward_scaling.enabled S true
grpo.reward_scaling.source_min S 0
grpo.reward_scaling.source_max S 1
grpo.reward_scaling.target_min S 0
grpo.reward_scaling.target_max S 1
grpo.adv_estimator.name M gdpo
grpo.adv_estimator.normalize_rewards M true
grpo.adv_estimator.use_leave_one_out_baseline M true
grpo.adv_estimator.minus_baseline M false
grpo.adv_estimator.reward_weights M {a: 1.0}
grpo.seq_logprob_error_threshold S 2.0
grpo.invalid_tool_call_advantage N -1.0
grpo.malformed_thinking_advantage N -1.0
grpo.skip_reference_policy_logprobs_calculation N true
grpo.calculate_advantages_on_gpu I true
grpo.deduplicate_multimodal_data N true
grpo.debug_payload_metrics I true
grpo.async_grpo.enabled M true
grpo.async_grpo.max_trajectory_age_steps M 1
grpo.async_grpo.max_generation_failures I 0
grpo.async_grpo.in_flight_weight_updates M true
grpo.async_grpo.recompute_kv_cache_after_weight_updates M true
reward_penalties.penalize_duplicated_reasoning N true
reward_penalties.penalize_empty_final_answer N true
reward_penalties.penalize_unwanted_tokens N true
reward_penalties.penalize_malformed_think_tag N true
reward_penalties.token_ids.unwanted I [1]
reward_penalties.token_ids.think_open I 1
reward_penalties.token_ids.think_close I 2
loss_fn.reference_policy_kl_penalty S 0.01
loss_fn.reference_policy_kl_type M k3
loss_fn.kl_input_clamp_value M null
loss_fn.kl_output_clamp_value S 10.0
loss_fn.ratio_clip_min S 0.2
loss_fn.ratio_clip_max S 0.28
loss_fn.ratio_clip_c I 3.0  # CISPO wins
loss_fn.use_on_policy_kl_approximation S true
loss_fn.use_importance_sampling_correction S true
loss_fn.truncated_importance_sampling_type M tis
loss_fn.truncated_importance_sampling_ratio S 2.0
loss_fn.truncated_importance_sampling_ratio_min S 0.5
loss_fn.sequence_level_importance_ratios M true
loss_fn.token_level_loss S true
loss_fn.force_on_policy_ratio I true  # CISPO wins
loss_fn.use_kl_in_reward N true  # reinforce_plus_plus alone takes it
loss_fn.use_cispo M true
loss_fn.disable_ppo_ratio M true
loss_fn.positive_example_nll_weight N 0.1
policy.model_name S Qwen/Qwen3-30B-A3B
policy.tokenizer.name M other/tokenizer
policy.tokenizer.chat_template M null
policy.tokenizer.chat_template_kwargs.enable_thinking N false
policy.tokenizer.use_fastokens I true
policy.tokenizer.use_processor N true
policy.reward_model_cfg.enabled N true
policy.hf_config_overrides.rope_theta N 1.0
policy.train_global_batch_size S 512
policy.train_micro_batch_size I 1  # packing decides
policy.logprob_batch_size I 2  # packing decides
policy.generation_batch_size M 32
policy.logprob_chunk_size I 1024
policy.max_total_sequence_length S 4096
policy.precision S bfloat16
policy.make_sequence_length_divisible_by S 8
policy.max_grad_norm S 0.5
policy.offload_optimizer_for_logprob N true
policy.refit_buffer_size_gb I 4
policy.router_replay.enabled S true
policy.dynamic_batching.enabled S false
policy.dynamic_batching.train_mb_tokens I 4096  # packing is on
policy.dynamic_batching.logprob_mb_tokens I 16384  # packing is on
policy.dynamic_batching.sequence_length_round I 64
policy.sequence_packing.enabled S true
policy.sequence_packing.train_mb_tokens M 4096
policy.sequence_packing.logprob_mb_tokens M 8192
policy.sequence_packing.algorithm S modified_first_fit_decreasing
policy.sequence_packing.microbatch_order S largest_first
policy.sequence_packing.sequence_length_round I 64
policy.dtensor_cfg._v2 I true
policy.dtensor_cfg.enabled S false
policy.dtensor_cfg.cpu_offload I true  # megatron-core trains
policy.dtensor_cfg.sequence_parallel I true  # megatron-core trains
policy.dtensor_cfg.activation_checkpointing I true  # megatron-core trains
policy.dtensor_cfg.tensor_parallel_size I 2  # megatron-core trains
policy.dtensor_cfg.context_parallel_size I 2  # megatron-core trains
policy.dtensor_cfg.custom_parallel_plan I {a: colwise}  # megatron-core trains
policy.dtensor_cfg.automodel_kwargs.force_hf I true
policy.dtensor_cfg.lora_cfg.enabled M true
policy.dtensor_cfg.lora_cfg.dim M 8
policy.dtensor_cfg.expert_parallel_size N 8
policy.dtensor_cfg.dp_replicate_size N 2
policy.dtensor_cfg.defer_fsdp_grad_sync I true
policy.dtensor_cfg.clear_cache_every_n_steps I 10
policy.megatron_cfg.enabled S true
policy.megatron_cfg.model_overrides.x N 1
policy.megatron_cfg.checkpoint.async_save M true
policy.megatron_cfg.checkpoint.ckpt_assume_constant_structure I true
policy.megatron_cfg.tensor_model_parallel_size S 4
policy.megatron_cfg.pipeline_model_parallel_size S 2
policy.megatron_cfg.context_parallel_size S 2
policy.megatron_cfg.expert_model_parallel_size S 4
policy.megatron_cfg.expert_tensor_parallel_size S 1
policy.megatron_cfg.num_layers_in_first_pipeline_stage S 23
policy.megatron_cfg.num_layers_in_last_pipeline_stage S 25
policy.megatron_cfg.pipeline_dtype I bfloat16
policy.megatron_cfg.sequence_parallel S true
policy.megatron_cfg.activation_checkpointing S true
policy.megatron_cfg.recompute_granularity S selective
policy.megatron_cfg.recompute_modules S [core_attn]
policy.megatron_cfg.cuda_graph_impl I none
policy.megatron_cfg.cuda_graph_modules I [attn]
policy.megatron_cfg.cuda_graph_warmup_steps I 3
policy.megatron_cfg.fine_grained_activation_offloading N true
policy.megatron_cfg.offload_modules I [attn]
policy.megatron_cfg.use_fused_linear_logprobs I true
policy.megatron_cfg.fused_linear_logprobs_chunk_size I 256
policy.megatron_cfg.force_reconvert_from_hf I true
policy.megatron_cfg.empty_unused_memory_level I 1
policy.megatron_cfg.freeze_moe_router S true
policy.megatron_cfg.moe_router_dtype S fp64
policy.megatron_cfg.moe_router_load_balancing_type S none
policy.megatron_cfg.moe_router_bias_update_rate S 0.0
policy.megatron_cfg.moe_permute_fusion S true
policy.megatron_cfg.moe_per_layer_logging I true
policy.megatron_cfg.moe_enable_deepep I true
policy.megatron_cfg.moe_token_dispatcher_type S alltoall
policy.megatron_cfg.moe_shared_expert_overlap I true
policy.megatron_cfg.apply_rope_fusion S true
policy.megatron_cfg.bias_activation_fusion I true
policy.megatron_cfg.defer_fp32_logits I true
policy.megatron_cfg.gradient_accumulation_fusion I true
policy.megatron_cfg.layernorm_epsilon N 0.1
policy.megatron_cfg.mtp_num_layers N 1
policy.megatron_cfg.mtp_loss_scaling_factor I 0.1
policy.megatron_cfg.peft.enabled M true
policy.megatron_cfg.peft.dim M 8
policy.megatron_cfg.optimizer.optimizer S adam
policy.megatron_cfg.optimizer.lr S 0.00001
policy.megatron_cfg.optimizer.min_lr S 0.000001
policy.megatron_cfg.optimizer.weight_decay S 0.01
policy.megatron_cfg.optimizer.adam_beta1 S 0.9
policy.megatron_cfg.optimizer.adam_beta2 S 0.99
policy.megatron_cfg.optimizer.adam_eps S 0.00000001
policy.megatron_cfg.optimizer.clip_grad M 0.5
policy.megatron_cfg.optimizer.sgd_momentum S 0.9
policy.megatron_cfg.optimizer.use_distributed_optimizer S true
policy.megatron_cfg.optimizer.use_precision_aware_optimizer S true
policy.megatron_cfg.optimizer.optimizer_cpu_offload S true
policy.megatron_cfg.optimizer.optimizer_offload_fraction S 0.5
policy.megatron_cfg.optimizer.bf16 I true
policy.megatron_cfg.optimizer.fp16 I false
policy.megatron_cfg.optimizer.params_dtype I float32
policy.megatron_cfg.scheduler.start_weight_decay I 0.01  # the style is constant
policy.megatron_cfg.scheduler.end_weight_decay I 0.01  # the style is constant
policy.megatron_cfg.scheduler.weight_decay_incr_style S constant
policy.megatron_cfg.scheduler.lr_decay_style S cosine
policy.megatron_cfg.scheduler.lr_decay_iters S 90
policy.megatron_cfg.scheduler.lr_warmup_iters S 10
policy.megatron_cfg.scheduler.lr_warmup_init S 0.000001
policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32 S false
policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce S true
policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather S true
policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp N true
policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy I optim
policy.megatron_cfg.fp8_cfg.enabled N true
policy.megatron_cfg.fp8_cfg.fp8 I e4m3
policy.megatron_cfg.env_vars.A ENV 1
policy.dtensor_cfg.env_vars.A ENV 1
policy.draft.enabled N true
policy.draft.model_name I x
policy.draft.loss_weight I 0.1
policy.draft.num_layers I 1
policy.draft.aux_layer_indices I [1]
policy.optimizer.name S torch.optim.AdamW
policy.optimizer.kwargs I {lr: 0.1}  # megatron-core trains
policy.scheduler I [{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}]  # megatron-core trains
policy.generation.backend M vllm
policy.generation.max_new_tokens M 4096
policy.generation.temperature S 0.9
policy.generation.top_p S 0.9
policy.generation.top_k S 50
policy.generation.val_temperature S 0.5
policy.generation.val_top_p N 0.5
policy.generation.val_top_k N 10
policy.generation.stop_token_ids S [1]
policy.generation.stop_strings M null
policy.generation.bad_words N [no]
policy.generation.min_p N 0.1
policy.generation.ignore_eos N true
policy.generation.skip_special_tokens N false
policy.generation.repetition_penalty N 1.1
policy.generation.port_range_low I 3000
policy.generation.port_range_high I 4999
policy.generation.refit_transport M nixl
policy.generation.refit_cfg.nixl.x I 1
policy.generation.refit_cfg.sparse.x I 1
policy.generation.real_quant_export_cpu_offload N true
policy.generation.colocated.enabled COLOCATED false
policy.generation.colocated.resources.gpus_per_node COLOCATED 4
policy.generation.colocated.resources.num_nodes COLOCATED 1
policy.generation.vllm_cfg.async_engine I true
policy.generation.vllm_cfg.precision M float32
policy.generation.vllm_cfg.kv_cache_dtype N fp8
policy.generation.vllm_cfg.logprobs_mode N raw_logprobs
policy.generation.vllm_cfg.tensor_parallel_size M 2
policy.generation.vllm_cfg.pipeline_parallel_size M 2
policy.generation.vllm_cfg.expert_parallel_size M 2
policy.generation.vllm_cfg.gpu_memory_utilization M 0.6
policy.generation.vllm_cfg.max_model_len M 4096
policy.generation.vllm_cfg.enforce_eager M true
policy.generation.vllm_cfg.use_tqdm I true
policy.generation.vllm_cfg.use_deep_gemm N true
policy.generation.vllm_cfg.num_first_layers_in_bf16 N 1
policy.generation.vllm_cfg.num_last_layers_in_bf16 N 1
policy.generation.vllm_cfg.enable_vllm_metrics_logger I true
policy.generation.vllm_cfg.vllm_metrics_logger_interval I 0.5
policy.generation.vllm_cfg.expose_http_server I true
policy.generation.vllm_cfg.anything_new N 1
policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update I true
policy.generation.vllm_kwargs.enable_prefix_caching M false
policy.generation.mcore_generation_config.x I 1
data.max_input_seq_length M 4096
data.shuffle S true
data.num_workers I 1
data.use_multiple_dataloader N true
data.num_prompts_per_dataloader I 8
data.custom_dataloader N mine
data.train.dataset_name M ResponseDataset
data.train.data_path M data/mine.jsonl
data.train.input_key M question
data.train.output_key M answer
data.train.split M train
data.train.split_validation_size M 0.1
data.train.seed I 1
data.train.prompt_file M prompts/cot.txt
data.train.system_prompt_file M prompts/system.txt
data.train.processor N multichoice_qa_processor
data.train.env_name M math
data.validation.dataset_name M AIME2024
data.default.prompt_file M prompts/cot.txt
data.default.env_name M math
data.add_bos N true
data.add_eos N true
data.add_generation_prompt N false
env.math.num_workers M 8
env.math.math_verify_impl N dapo_math_verify
env.math.verifier_type N english_multichoice
env.should_use_nemo_gym N true
env.nemo_gym.config_paths I [a]
env.should_log_nemo_gym_responses I true
env.other.x I 1
cluster.gpus_per_node S 8
cluster.num_nodes S 8
cluster.master_port_range_low I 1400
cluster.master_port_range_high I 1999
cluster.segment_size N 16
cluster.env_vars.A ENV 1
checkpointing.enabled S true
checkpointing.checkpoint_dir S results/x
checkpointing.metric_name S val:accuracy
checkpointing.higher_is_better S true
checkpointing.keep_top_k S 3
checkpointing.save_period S 10
checkpointing.ft_save_period N 5
checkpointing.ft_keep_latest_k N 2
checkpointing.checkpoint_must_save_by MUST_SAVE "00:03:45:00"
checkpointing.model_save_format N torch_save
checkpointing.save_consolidated I true
checkpointing.save_optimizer S true
checkpointing.pretrained_checkpoint.path N x
checkpointing.pretrained_checkpoint.format N x
logger.log_dir S logs/x
logger.num_val_samples_to_print I 3
logger.wandb_enabled S true
logger.wandb.project S grpo
logger.wandb.name S x
logger.wandb.entity N me
logger.tensorboard_enabled S true
logger.tensorboard.log_dir I x
logger.mlflow_enabled S true
logger.mlflow.experiment_name S x
logger.mlflow.run_name S x
logger.mlflow.tracking_uri S http://x
logger.swanlab_enabled N true
logger.swanlab.project I x
logger.monitor_gpus I true
logger.gpu_monitoring.collection_interval I 10
logger.gpu_monitoring.flush_interval I 10
on_policy_distillation.enabled N true
data_plane.enabled M true
data_plane.impl S transfer_queue
data_plane.backend S simple
data_plane.storage_capacity M 1000000
data_plane.num_storage_units M 2
data_plane.claim_meta_poll_interval_s I 0.5
data_plane.global_segment_size I 549755813888  # the store is simple
data_plane.local_buffer_size I 68719476736  # the store is simple
data_plane.observability.enabled S true
data_plane.observability.callback S my_module:callback
data_plane.controller_address I x
data_plane.ack_timeout_ms I 1
async_rl.sampler.name M in_order
async_rl.sampler.max_lookahead_versions M 1
async_rl.sampler.max_staleness_versions I 1  # the sampler in_order reads the other one
async_rl.sampler.sample_freshest_first N true
async_rl.sampler.target N 1
async_rl.min_groups_for_streaming_train I 32
async_rl.max_inflight_prompts I 32
async_rl.max_buffered_rollouts I 64
async_rl.recompute_kv_cache_after_weight_updates M false
async_rl.diagnostics I false
async_rl.rollout_failure.max_infra_attempts_per_prompt I 5
async_rl.rollout_failure.max_data_attempts_per_prompt I 2
async_rl.rollout_failure.backoff_base_s I 1
async_rl.rollout_failure.max_backoff_s I 30
async_rl.rollout_failure.max_skipped_prompts I 0
async_rl.rollout_failure.max_consecutive_dropped_prompts I 0
async_rl.rollout_failure.min_step_batch_fraction N 0.9
async_rl.rollout_failure.on_dropped_prompt N shrink
async_rl.rollout_failure.max_replacement_attempts I 1
async_rl.rollout_failure.replacement_reserve_prompts I 1
async_rl.rollout_failure.native.generation_timeout_s I null
async_rl.rollout_failure.native.env_timeout_s I null
async_rl.rollout_failure.nemo_gym.rollout_timeout_s I null
async_rl.rollout_failure.nemo_gym.max_row_attempts I 3
async_rl.stall_watchdog.interval_s I 30
async_rl.stall_watchdog.stall_timeout_s I 600
async_rl.stall_watchdog.stall_action I warn
async_rl.stall_watchdog.gym_subprocess_check I true
async_rl.generation_fleet_health.enabled I false
async_rl.generation_fleet_health.probe_interval_s I 5
async_rl.generation_fleet_health.probe_timeout_s I 2
async_rl.generation_fleet_health.unhealthy_threshold I 3
async_rl.generation_fleet_health.healthy_threshold I 2
async_rl.generation_fleet_health.selection I x
async_rl.generation_fleet_health.on_dead_shard I x
async_rl.generation_fleet_health.max_restart_attempts_per_shard I 5
async_rl.generation_fleet_health.min_healthy_shards I 1
async_rl.generation_router.enabled I false
async_rl.generation_router.port_range I 6000-6099
async_rl.generation_router.backend_timeout_s I 600
async_rl.generation_router.connect_timeout_s I 5
async_rl.generation_router.no_healthy_backend_status I 409
"""


def _rows() -> Mapping[str, tuple[str, Any]]:
    found = {}
    for line in _TEXT.strip().splitlines():
        key, fate, value = line.split(" ", 2)
        found[key] = (fate, yaml.safe_load(value))
    return found


KEYS = _rows()
"""Key -> fate and value; ENV, COLOCATED and MUST_SAVE are keys that the schema may have one day."""


def nested() -> dict[str, Any]:
    """Return one recipe with all keys."""
    tree: dict[str, Any] = {}
    for key, (_, value) in KEYS.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree
