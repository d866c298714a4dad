"""Overrides of a recipe of two tensor ranks of Megatron that rules refuse or accept, as in `refused_configs`."""

from __future__ import annotations

from tests.helpers.refused_configs import GPUS, LOCAL, Refused

_M = "policy.megatron_cfg"
RECOMPUTE = (f"{_M}.activation_checkpointing=true",)
SELECTIVE = (*RECOMPUTE, f"{_M}.recompute_granularity=selective")
AUX_LOSS = (f"{_M}.moe_router_load_balancing_type=aux_loss", f"{_M}.moe_aux_loss_coeff=0.01")
PRECISION_AWARE = (*GPUS, f"{_M}.optimizer.use_precision_aware_optimizer=true")
OFFLOAD = (*PRECISION_AWARE, f"{_M}.optimizer.optimizer_cpu_offload=true")
OVERLAP = (
    *GPUS,
    f"{_M}.distributed_data_parallel_config.overlap_grad_reduce=true",
    f"{_M}.distributed_data_parallel_config.overlap_param_gather=true",
)
SGD = (f"{_M}.optimizer.optimizer=sgd", f"~{_M}.optimizer.adam_beta1", f"~{_M}.optimizer.adam_beta2")
CONSTANT = (f"{_M}.scheduler.lr_decay_style=constant", f"~{_M}.optimizer.min_lr")
RISING = (
    f"{_M}.scheduler.weight_decay_incr_style=linear",
    f"{_M}.scheduler.start_weight_decay=0.1",
    f"{_M}.scheduler.end_weight_decay=0.2",
)

REFUSED_BY_MEGATRON: Refused = {
    "rule_megatron_has_no_vision_tower": [
        (("policy.vision.freeze_tower=true",), "policy.vision.freeze_tower: true, but the Megatron worker trains")
    ],
    "rule_worker_keys_fit_the_worker": [
        (("policy.optimizer.kwargs={lr: 0.1}",), "policy.optimizer.kwargs: would be ignored, because the Megatron w"),
        (("policy.scheduler.warmup_steps=3",), "policy.scheduler.warmup_steps: 3 would be ignored"),
        (("policy.dtensor_cfg.context_parallel_size=2",), "policy.dtensor_cfg.context_parallel_size: 2 would be"),
    ],
    "rule_parallel_sizes_divide_the_workers": [
        ((f"{_M}.pipeline_model_parallel_size=2",), "2 x context_parallel_size 1 does not divide 2 workers")
    ],
    "rule_leader_broadcast_needs_a_replica_group": [
        (
            ("data_plane.fetch_policy=leader_broadcast", f"~{_M}.tensor_model_parallel_size"),
            f"{_M}.tensor_model_parallel_size or {_M}.pipeline_model_parallel_size or {_M}.context_parallel_size above",
        )
    ],
    "rule_batching_keys_need_their_switch": [
        (
            ("policy.max_total_sequence_length=63", "policy.sequence_packing.train_mb_tokens=63"),
            "policy.sequence_packing.train_mb_tokens: 63 tokens do not hold one sequence; expected at least 64",
        )
    ],
    "rule_megatron_fits_the_machine": [
        (("policy.megatron_cfg.apply_rope_fusion=true",), f"{_M}.apply_rope_fusion: true needs GPUs"),
        ((f"{_M}.moe_grouped_gemm=true",), f"{_M}.moe_grouped_gemm: true needs GPUs"),
        ((f"{_M}.moe_permute_fusion=true",), f"{_M}.moe_permute_fusion: true needs GPUs"),
        (OVERLAP[2:], f"{_M}.distributed_data_parallel_config.overlap_param_gather: true needs GPUs"),
        (OFFLOAD[2:], f"{_M}.optimizer.optimizer_cpu_offload: true needs GPUs"),
        ((f"{_M}.optimizer.use_distributed_optimizer=true",), f"{_M}.optimizer.use_distributed_optimizer: true needs"),
        (PRECISION_AWARE[2:], f"{_M}.optimizer.use_precision_aware_optimizer: true needs GPUs"),
    ],
    "rule_megatron_precision_is_not_half": [
        (("policy.precision=float16",), "policy.precision: the Megatron worker has no loss scaling for 'float16'")
    ],
    "rule_megatron_pipeline_layout_is_supported": [
        ((f"{_M}.virtual_pipeline_model_parallel_size=2",), "interleaved pipelines are not supported, got 2"),
        ((f"{_M}.num_layers_in_first_pipeline_stage=1",), "num_layers_in_first_pipeline_stage: 1 would be ignored"),
        ((f"{_M}.num_layers_in_last_pipeline_stage=1",), f"{_M}.num_layers_in_last_pipeline_stage: 1 would be"),
    ],
    "rule_megatron_sequence_parallel_needs_ranks": [
        (
            (f"~{_M}.tensor_model_parallel_size", f"{_M}.sequence_parallel=true"),
            f"{_M}.sequence_parallel: True would be ignored, because {_M}.tensor_model_parallel_size is 1",
        )
    ],
    "rule_megatron_experts_divide_the_workers": [
        ((f"{_M}.expert_model_parallel_size=2",), "2 x pipeline_model_parallel_size 1 does")
    ],
    "rule_megatron_allgather_needs_equal_lengths": [
        (
            (
                f"~{_M}.tensor_model_parallel_size",
                f"~{_M}.sequence_parallel",
                f"{_M}.pipeline_model_parallel_size=2",
                f"{_M}.moe_token_dispatcher_type=allgather",
            ),
            f"{_M}.moe_token_dispatcher_type: 'allgather' cannot serve a pipeline",
        ),
        (
            (
                f"~{_M}.tensor_model_parallel_size",
                f"~{_M}.sequence_parallel",
                f"{_M}.expert_model_parallel_size=2",
                f"{_M}.moe_token_dispatcher_type=allgather",
            ),
            "but 2 x 1 expert ranks span data-parallel shards",
        ),
    ],
    "rule_megatron_recompute_keys_need_their_switch": [
        ((f"{_M}.recompute_granularity=selective",), f"{_M}.recompute_granularity: 'selective' would be ignored"),
        ((f"{_M}.recompute_modules=[mlp]",), f"because {_M}.activation_checkpointing is false"),
        ((*RECOMPUTE, f"{_M}.recompute_modules=[mlp]"), f"because {_M}.recompute_granularity is 'full'"),
        ((*SELECTIVE, f"{_M}.recompute_num_layers=2"), f"{_M}.recompute_num_layers: 2 would be ignored"),
        ((*SELECTIVE, f"{_M}.recompute_method=block"), f"{_M}.recompute_method: 'block' would be ignored"),
        ((*SELECTIVE, f"{_M}.recompute_modules=[moe_act]"), f"{_M}.recompute_modules: 'moe_act' is inside"),
        (
            (*GPUS, *SELECTIVE, f"{_M}.recompute_modules=[moe_act]", f"{_M}.moe_grouped_gemm=false"),
            f"{_M}.recompute_modules: 'moe_act' is inside",
        ),
        ((*SELECTIVE, f"{_M}.recompute_modules=[]"), f"{_M}.recompute_modules: expected a list of at least 1, got []"),
        ((*SELECTIVE, f"{_M}.recompute_modules=[mla_up_proj]"), f"{_M}.recompute_modules.0: expected one of"),
    ],
    "rule_megatron_auxiliary_loss_needs_its_keys": [
        (AUX_LOSS[:1], f"{_M}.moe_aux_loss_coeff: 0 gives 'aux_loss' no weight"),
        (AUX_LOSS[1:], f"{_M}.moe_aux_loss_coeff: 0.01 would be ignored"),
        (
            (*AUX_LOSS, f"{_M}.freeze_moe_router=true"),
            f"{_M}.moe_router_load_balancing_type: 'aux_loss' teaches the routers",
        ),
        (
            (*AUX_LOSS, f"{_M}.moe_router_load_balancing_type=seq_aux_loss"),
            f"{_M}.moe_router_load_balancing_type: 'seq_aux_loss' takes a packed row",
        ),
    ],
    "rule_megatron_frozen_router_keeps_its_bias": [
        (
            (f"{_M}.freeze_moe_router=true", f"{_M}.moe_router_bias_update_rate=0.001"),
            f"{_M}.moe_router_bias_update_rate: 0.001 moves",
        )
    ],
    "rule_megatron_optimizer_keys_fit_their_kind": [
        ((f"{_M}.optimizer.sgd_momentum=0.5",), f"{_M}.optimizer.sgd_momentum: 0.5 would be ignored"),
        ((*SGD[:1], SGD[1], f"{_M}.optimizer.adam_beta2=0.5"), f"{_M}.optimizer.adam_beta2: 0.5 would be ignored"),
    ],
    "rule_megatron_optimizer_must_be_distributed": [
        (
            (*GPUS, *SGD, f"{_M}.optimizer.use_distributed_optimizer=true"),
            f"{_M}.optimizer.use_distributed_optimizer: true shards the state of 'adam' only",
        ),
        (
            (*PRECISION_AWARE, f"{_M}.optimizer.use_distributed_optimizer=false"),
            f"{_M}.optimizer.use_precision_aware_optimizer: true needs",
        ),
        (
            (*OVERLAP, f"{_M}.optimizer.use_distributed_optimizer=false"),
            f"{_M}.distributed_data_parallel_config.overlap_param_gather: true needs",
        ),
        ((*OVERLAP, *SGD), f"{_M}.distributed_data_parallel_config.overlap_param_gather: true needs"),
        ((*GPUS, OVERLAP[-1]), f"{_M}.distributed_data_parallel_config.overlap_grad_reduce: must be true"),
    ],
    "rule_megatron_offload_needs_its_keys": [
        ((f"{_M}.optimizer.optimizer_offload_fraction=0.5",), f"{_M}.optimizer.optimizer_offload_fraction: 0.5 would"),
        (OFFLOAD, f"{_M}.optimizer.optimizer_offload_fraction: 0 offloads nothing"),
        (
            (*OFFLOAD, f"{_M}.optimizer.use_precision_aware_optimizer=false"),
            f"{_M}.optimizer.use_precision_aware_optimizer: must be true",
        ),
    ],
    "rule_megatron_gradient_dtype_needs_low_precision": [
        (
            (f"{_M}.distributed_data_parallel_config.grad_reduce_in_fp32=false",),
            f"{_M}.distributed_data_parallel_config.grad_reduce_in_fp32: False would be ignored",
        )
    ],
    "rule_megatron_learning_rates_are_ordered": [
        ((f"{_M}.optimizer.min_lr=0.1",), f"{_M}.optimizer.min_lr: 0.1 is above"),
        ((f"{_M}.scheduler.lr_warmup_init=0.1",), f"{_M}.scheduler.lr_warmup_init: 0.1 is above"),
    ],
    "rule_megatron_decay_follows_the_warmup": [
        (
            (f"{_M}.scheduler.lr_warmup_iters=0", f"{_M}.scheduler.lr_warmup_init=1e-5"),
            f"{_M}.scheduler.lr_warmup_init: 1e-05 would be ignored",
        ),
        ((*CONSTANT, f"{_M}.scheduler.lr_decay_iters=9"), f"{_M}.scheduler.lr_decay_iters: 9 would be ignored"),
        ((CONSTANT[0], f"{_M}.optimizer.min_lr=1e-6"), f"{_M}.optimizer.min_lr: 1e-06 would be ignored"),
        ((f"{_M}.scheduler.lr_decay_iters=4",), f"{_M}.scheduler.lr_warmup_iters: 4 leaves no step"),
    ],
    "rule_megatron_weight_decay_is_increasing": [
        ((f"{_M}.scheduler.end_weight_decay=0.1",), f"{_M}.scheduler.end_weight_decay: 0.1 would be ignored"),
        (RISING[:1], f"{_M}.scheduler.start_weight_decay: must be set"),
        (RISING[:2], f"{_M}.scheduler.end_weight_decay: must be set"),
        ((*RISING, f"{_M}.scheduler.start_weight_decay=0.3"), f"{_M}.scheduler.start_weight_decay: 0.3 is above"),
        ((*RISING, f"{_M}.optimizer.weight_decay=0.3"), f"{_M}.optimizer.weight_decay: 0.3 would be ignored"),
    ],
}

ACCEPTED_BY_MEGATRON: list[tuple[str, ...]] = [
    (*LOCAL, f"~{_M}.tensor_model_parallel_size", f"~{_M}.sequence_parallel"),
    ("policy.sequence_packing.enabled=false", "policy.dynamic_batching.enabled=true"),
    ("policy.sequence_packing.enabled=false",),
    RECOMPUTE,
    (*RECOMPUTE, f"{_M}.recompute_method=block", f"{_M}.recompute_num_layers=2"),
    (*SELECTIVE, f"{_M}.recompute_modules=[core_attn, layernorm, mlp, moe, shared_experts]"),
    (*GPUS, *SELECTIVE, f"{_M}.recompute_modules=[moe_act]"),
    AUX_LOSS,
    (*AUX_LOSS, f"{_M}.moe_router_load_balancing_type=seq_aux_loss", "policy.sequence_packing.enabled=false"),
    (f"{_M}.freeze_moe_router=true",),
    (f"{_M}.moe_token_dispatcher_type=allgather", f"{_M}.expert_tensor_parallel_size=1"),
    (f"{_M}.expert_model_parallel_size=2", f"{_M}.expert_tensor_parallel_size=1"),
    (f"{_M}.distributed_data_parallel_config.overlap_grad_reduce=true",),
    ("policy.precision=bfloat16", f"{_M}.distributed_data_parallel_config.grad_reduce_in_fp32=false"),
    OVERLAP,
    (*OFFLOAD, f"{_M}.optimizer.optimizer_offload_fraction=1"),
    (*SGD, f"{_M}.optimizer.sgd_momentum=0"),
    CONSTANT,
    RISING,
    ("grpo.max_num_steps=2",),
    ("data_plane.fetch_policy=leader_broadcast",),
]
"""Combinations that work."""
