"""Every key of a NeMo-RL GRPO recipe (main branch of August 2026) with a value that asks for something, and its fate.

A line has keys of one section. S same, M another key or value, N not supported, I without effect. A key whose rules
switch it off in this very recipe is I as well; each such row says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from nemo_rl_tools.recipe_import.keys import Fate

__all__ = ["FATES", "KEYS", "nested"]

FATES: Mapping[str, Fate] = {"S": Fate.SAME, "M": Fate.MAPPED, "N": Fate.NOT_SUPPORTED, "I": Fate.IGNORED}
_TEXT = """
grpo: num_prompts_per_step S 32 | num_generations_per_prompt S 16 | max_num_epochs S 1 | max_num_steps S 100
grpo: max_rollout_turns I 3 | normalize_rewards S true | use_leave_one_out_baseline S true | advantage_clip_low S -5.0
grpo: advantage_clip_high S 5.0 | val_period S 10 | val_start_at N 5 | val_batch_size I 256 | val_at_start S true
grpo: val_at_end S true | max_val_samples M 256 | val_num_generations_per_prompt M 4
grpo: stop_at_validation_metric M val:accuracy | stop_at_validation_threshold M 0.9 | seed S 42
grpo: overlong_filtering S true | use_dynamic_sampling S true | dynamic_sampling_max_gen_batches S 10
grpo: batch_multiplier I 2  # an asynchronous run has no rounds
grpo.reward_shaping: enabled S true | overlong_buffer_length S 128 | overlong_buffer_penalty S 1
grpo.reward_shaping: max_response_length I 100 | stop_properly_penalty_coef S 0.1
grpo.reward_scaling: enabled S true | source_min S 0 | source_max S 1 | target_min S 0 | target_max S 1
grpo.adv_estimator: name M gdpo | normalize_rewards M true | use_leave_one_out_baseline M true | minus_baseline M false
grpo.adv_estimator: reward_weights M {a: 1.0}
grpo: seq_logprob_error_threshold S 2.0 | invalid_tool_call_advantage N -1.0 | malformed_thinking_advantage N -1.0
grpo: skip_reference_policy_logprobs_calculation N true | calculate_advantages_on_gpu I true
grpo: deduplicate_multimodal_data N true | debug_payload_metrics I true
grpo.async_grpo: enabled M true | max_trajectory_age_steps M 1 | max_generation_failures I 0
grpo.async_grpo: in_flight_weight_updates M true | recompute_kv_cache_after_weight_updates M true
reward_penalties: penalize_duplicated_reasoning N true | penalize_empty_final_answer N true
reward_penalties: penalize_unwanted_tokens N true | penalize_malformed_think_tag N true
reward_penalties.token_ids: unwanted I [1] | think_open I 1 | think_close I 2
loss_fn: reference_policy_kl_penalty S 0.01 | reference_policy_kl_type M k3 | kl_input_clamp_value M null
loss_fn: kl_output_clamp_value S 10.0 | ratio_clip_min S 0.2 | ratio_clip_max S 0.28 | ratio_clip_c I 3.0  # CISPO wins
loss_fn: use_on_policy_kl_approximation S true | use_importance_sampling_correction S true
loss_fn: truncated_importance_sampling_type M tis | truncated_importance_sampling_ratio S 2.0
loss_fn: truncated_importance_sampling_ratio_min S 0.5 | sequence_level_importance_ratios M true
loss_fn: token_level_loss S true | force_on_policy_ratio I true  # CISPO wins
loss_fn: use_kl_in_reward N true  # reinforce_plus_plus alone takes it | use_cispo M true | disable_ppo_ratio M true
loss_fn: positive_example_nll_weight N 0.1
policy: model_name S Qwen/Qwen3-30B-A3B
policy.tokenizer: name M other/tokenizer | chat_template M null
policy.tokenizer.chat_template_kwargs: enable_thinking N false
policy.tokenizer: use_fastokens I true | use_processor N true
policy.reward_model_cfg: enabled N true
policy.hf_config_overrides: rope_theta N 1.0
policy: train_global_batch_size S 512 | train_micro_batch_size I 1  # packing decides
policy: logprob_batch_size I 2  # packing decides | generation_batch_size M 32 | logprob_chunk_size I 1024
policy: max_total_sequence_length S 4096 | precision S bfloat16 | make_sequence_length_divisible_by S 8
policy: max_grad_norm S 0.5 | offload_optimizer_for_logprob N true | refit_buffer_size_gb I 4
policy.router_replay: enabled S true
policy.dynamic_batching: enabled S false | train_mb_tokens I 4096  # packing is on
policy.dynamic_batching: logprob_mb_tokens I 16384  # packing is on | sequence_length_round I 64
policy.sequence_packing: enabled S true | train_mb_tokens M 4096 | logprob_mb_tokens M 8192
policy.sequence_packing: algorithm S modified_first_fit_decreasing | microbatch_order S largest_first
policy.sequence_packing: sequence_length_round I 64
policy.dtensor_cfg: _v2 I true | enabled S false | cpu_offload I true  # megatron-core trains
policy.dtensor_cfg: sequence_parallel I true  # megatron-core trains
policy.dtensor_cfg: activation_checkpointing I true  # megatron-core trains
policy.dtensor_cfg: tensor_parallel_size I 2  # megatron-core trains | context_parallel_size I 2  # megatron-core trains
policy.dtensor_cfg: custom_parallel_plan I {a: colwise}  # megatron-core trains
policy.dtensor_cfg.automodel_kwargs: force_hf I true
policy.dtensor_cfg.lora_cfg: enabled M true | dim M 8
policy.dtensor_cfg: expert_parallel_size N 8 | dp_replicate_size I 2  # megatron-core trains
policy.dtensor_cfg: defer_fsdp_grad_sync I true
policy.dtensor_cfg: clear_cache_every_n_steps I 10
policy.megatron_cfg: enabled S true
policy.megatron_cfg.model_overrides: x N 1
policy.megatron_cfg.checkpoint: async_save M true | ckpt_assume_constant_structure I true
policy.megatron_cfg: tensor_model_parallel_size S 4 | pipeline_model_parallel_size S 2 | context_parallel_size S 2
policy.megatron_cfg: expert_model_parallel_size S 4 | expert_tensor_parallel_size S 1
policy.megatron_cfg: num_layers_in_first_pipeline_stage S 23 | num_layers_in_last_pipeline_stage S 25
policy.megatron_cfg: pipeline_dtype I bfloat16 | sequence_parallel S true | activation_checkpointing S true
policy.megatron_cfg: recompute_granularity S selective | recompute_modules S [core_attn] | cuda_graph_impl I none
policy.megatron_cfg: cuda_graph_modules I [attn] | cuda_graph_warmup_steps I 3
policy.megatron_cfg: fine_grained_activation_offloading N true | offload_modules I [attn]
policy.megatron_cfg: use_fused_linear_logprobs I true | fused_linear_logprobs_chunk_size I 256
policy.megatron_cfg: force_reconvert_from_hf I true | empty_unused_memory_level I 1 | freeze_moe_router S true
policy.megatron_cfg: moe_router_dtype S fp64 | moe_router_load_balancing_type S none | moe_router_bias_update_rate S 0.0
policy.megatron_cfg: moe_permute_fusion S true | moe_per_layer_logging I true | moe_enable_deepep I true
policy.megatron_cfg: moe_token_dispatcher_type S alltoall | moe_shared_expert_overlap I true | apply_rope_fusion S true
policy.megatron_cfg: bias_activation_fusion I true | defer_fp32_logits I true | gradient_accumulation_fusion I true
policy.megatron_cfg: layernorm_epsilon N 0.1 | mtp_num_layers N 1 | mtp_loss_scaling_factor I 0.1
policy.megatron_cfg.peft: enabled M true | dim M 8
policy.megatron_cfg.optimizer: optimizer S adam | lr S 0.00001 | min_lr S 0.000001 | weight_decay S 0.01
policy.megatron_cfg.optimizer: adam_beta1 S 0.9 | adam_beta2 S 0.99 | adam_eps S 0.00000001 | clip_grad M 0.5
policy.megatron_cfg.optimizer: sgd_momentum S 0.9 | use_distributed_optimizer S true
policy.megatron_cfg.optimizer: use_precision_aware_optimizer S true | optimizer_cpu_offload S true
policy.megatron_cfg.optimizer: optimizer_offload_fraction S 0.5 | bf16 I true | fp16 I false | params_dtype I float32
policy.megatron_cfg.scheduler: start_weight_decay I 0.01  # the style is constant
policy.megatron_cfg.scheduler: end_weight_decay I 0.01  # the style is constant | weight_decay_incr_style S constant
policy.megatron_cfg.scheduler: lr_decay_style S cosine | lr_decay_iters S 90 | lr_warmup_iters S 10
policy.megatron_cfg.scheduler: lr_warmup_init S 0.000001
policy.megatron_cfg.distributed_data_parallel_config: grad_reduce_in_fp32 S false | overlap_grad_reduce S true
policy.megatron_cfg.distributed_data_parallel_config: overlap_param_gather S true | use_custom_fsdp N true
policy.megatron_cfg.distributed_data_parallel_config: data_parallel_sharding_strategy I optim
policy.megatron_cfg.fp8_cfg: enabled N true | fp8 I e4m3
policy.megatron_cfg.env_vars: A ENV 1
policy.dtensor_cfg.env_vars: A ENV 1
policy.draft: enabled N true | model_name I x | loss_weight I 0.1 | num_layers I 1 | aux_layer_indices I [1]
policy.optimizer: name S torch.optim.AdamW | kwargs I {lr: 0.1}  # megatron-core trains
policy: scheduler I [{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}]  # megatron-core trains
policy.generation: backend M vllm | max_new_tokens M 4096 | temperature S 0.9 | top_p S 0.9 | top_k S 50
policy.generation: val_temperature S 0.5 | val_top_p N 0.5 | val_top_k N 10 | stop_token_ids S [1] | stop_strings M null
policy.generation: bad_words N [no] | min_p N 0.1 | ignore_eos N true | skip_special_tokens N false
policy.generation: repetition_penalty N 1.1 | port_range_low I 3000 | port_range_high I 4999 | refit_transport M nixl
policy.generation.refit_cfg.nixl: x I 1
policy.generation.refit_cfg.sparse: x I 1
policy.generation: real_quant_export_cpu_offload N true
policy.generation.colocated: enabled COLOCATED false
policy.generation.colocated.resources: gpus_per_node COLOCATED 4 | num_nodes COLOCATED 1
policy.generation.vllm_cfg: async_engine I true | precision M float32 | kv_cache_dtype N fp8
policy.generation.vllm_cfg: logprobs_mode N raw_logprobs | tensor_parallel_size M 2 | pipeline_parallel_size M 2
policy.generation.vllm_cfg: expert_parallel_size M 2 | gpu_memory_utilization M 0.6 | max_model_len M 4096
policy.generation.vllm_cfg: enforce_eager M true | use_tqdm I true | use_deep_gemm N true | num_first_layers_in_bf16 N 1
policy.generation.vllm_cfg: num_last_layers_in_bf16 N 1 | enable_vllm_metrics_logger I true
policy.generation.vllm_cfg: vllm_metrics_logger_interval I 0.5 | expose_http_server I true | anything_new N 1
policy.generation.vllm_cfg: reset_encoder_cache_after_weight_update I true
policy.generation.vllm_kwargs: enable_prefix_caching M false
policy.generation.mcore_generation_config: x I 1
data: max_input_seq_length M 4096 | shuffle S true | num_workers I 1 | use_multiple_dataloader N true
data: num_prompts_per_dataloader I 8 | custom_dataloader N mine
data.train: dataset_name M ResponseDataset | data_path M data/mine.jsonl | input_key M question | output_key M answer
data.train: split M train | split_validation_size M 0.1 | seed I 1 | prompt_file M prompts/cot.txt
data.train: system_prompt_file M prompts/system.txt | processor N multichoice_qa_processor | env_name M math
data.validation: dataset_name M AIME2024
data.default: prompt_file M prompts/cot.txt | env_name M math
data: add_bos N true | add_eos N true | add_generation_prompt N false
env.math: num_workers M 8 | math_verify_impl N dapo_math_verify | verifier_type N english_multichoice
env: should_use_nemo_gym N true
env.nemo_gym: config_paths I [a]
env: should_log_nemo_gym_responses I true
env.other: x I 1
cluster: gpus_per_node S 8 | num_nodes S 8 | master_port_range_low I 1400 | master_port_range_high I 1999
cluster: segment_size N 16
cluster.env_vars: A ENV 1
checkpointing: enabled S true | checkpoint_dir S results/x | metric_name S val:accuracy | higher_is_better S true
checkpointing: keep_top_k S 3 | save_period S 10 | ft_save_period N 5 | ft_keep_latest_k N 2
checkpointing: checkpoint_must_save_by MUST_SAVE "00:03:45:00" | model_save_format N torch_save
checkpointing: save_consolidated I true | save_optimizer S true
checkpointing.pretrained_checkpoint: path N x | format N x
logger: log_dir S logs/x | num_val_samples_to_print I 3 | wandb_enabled S true
logger.wandb: project S grpo | name S x | entity N me
logger: tensorboard_enabled S true
logger.tensorboard: log_dir I x
logger: mlflow_enabled S true
logger.mlflow: experiment_name S x | run_name S x | tracking_uri S http://x
logger: swanlab_enabled N true
logger.swanlab: project I x
logger: monitor_gpus I true
logger.gpu_monitoring: collection_interval I 10 | flush_interval I 10
on_policy_distillation: enabled N true
data_plane: enabled M true | impl S transfer_queue | backend S simple | storage_capacity M 1000000
data_plane: num_storage_units M 2 | claim_meta_poll_interval_s I 0.5
data_plane: global_segment_size I 549755813888  # the store is simple
data_plane: local_buffer_size I 68719476736  # the store is simple
data_plane.observability: enabled S true | callback S my_module:callback
data_plane: controller_address I x | ack_timeout_ms I 1
async_rl.sampler: name M in_order | max_lookahead_versions M 1
async_rl.sampler: max_staleness_versions I 1  # the sampler in_order reads the other one | sample_freshest_first N true
async_rl.sampler: target N 1
async_rl: min_groups_for_streaming_train I 32 | max_inflight_prompts I 32 | max_buffered_rollouts I 64
async_rl: recompute_kv_cache_after_weight_updates M false | diagnostics I false
async_rl.rollout_failure: max_infra_attempts_per_prompt I 5 | max_data_attempts_per_prompt I 2 | backoff_base_s I 1
async_rl.rollout_failure: max_backoff_s I 30 | max_skipped_prompts I 0 | max_consecutive_dropped_prompts I 0
async_rl.rollout_failure: min_step_batch_fraction N 0.9 | on_dropped_prompt N shrink | max_replacement_attempts I 1
async_rl.rollout_failure: replacement_reserve_prompts I 1
async_rl.rollout_failure.native: generation_timeout_s I null | env_timeout_s I null
async_rl.rollout_failure.nemo_gym: rollout_timeout_s I null | max_row_attempts I 3
async_rl.stall_watchdog: interval_s I 30 | stall_timeout_s I 600 | stall_action I warn | gym_subprocess_check I true
async_rl.generation_fleet_health: enabled I false | probe_interval_s I 5 | probe_timeout_s I 2 | unhealthy_threshold I 3
async_rl.generation_fleet_health: healthy_threshold I 2 | selection I x | on_dead_shard I x
async_rl.generation_fleet_health: max_restart_attempts_per_shard I 5 | min_healthy_shards I 1
async_rl.generation_router: enabled I false | port_range I 6000-6099 | backend_timeout_s I 600 | connect_timeout_s I 5
async_rl.generation_router: no_healthy_backend_status I 409
"""


def _rows() -> Mapping[str, tuple[str, Any]]:
    found = {}
    for line in _TEXT.strip().splitlines():
        section, _, cells = line.partition(": ")
        for cell in cells.split(" | "):
            name, fate, value = cell.split(" ", 2)
            found[f"{section}.{name}".lstrip(".")] = (fate, yaml.safe_load(value))
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
