"""Rules over `policy.megatron_cfg`."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.rules.rule import would_be_ignored
from nemo_rl.config.schema import MasterConfig

__all__ = []

_SECTION = "policy.megatron_cfg"


# ---- the machine


def rule_megatron_fits_the_machine(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    if not megatron.enabled or config.cluster.gpus_per_node > 0:
        return
    optimizer = megatron.optimizer
    needs_gpus = {
        "apply_rope_fusion": megatron.apply_rope_fusion,
        "moe_grouped_gemm": megatron.moe_grouped_gemm,
        "moe_permute_fusion": megatron.moe_permute_fusion,
        "distributed_data_parallel_config.overlap_param_gather": (
            megatron.distributed_data_parallel_config.overlap_param_gather
        ),
        "optimizer.optimizer_cpu_offload": optimizer.optimizer_cpu_offload,
        "optimizer.use_distributed_optimizer": optimizer.use_distributed_optimizer,
        "optimizer.use_precision_aware_optimizer": optimizer.use_precision_aware_optimizer,
    }
    yield from (
        f"{_SECTION}.{name}: true needs GPUs, but cluster.gpus_per_node is 0; leave it out"
        for name, is_on in needs_gpus.items()
        if is_on
    )


def rule_megatron_precision_is_not_half(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if policy.megatron_cfg.enabled and policy.precision == "float16":
        yield "policy.precision: the Megatron worker has no loss scaling for 'float16'; set bfloat16 or float32"


# ---- parallel sizes


def rule_megatron_pipeline_layout_is_supported(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    if not megatron.enabled:
        return
    if megatron.virtual_pipeline_model_parallel_size is not None:
        yield (
            f"{_SECTION}.virtual_pipeline_model_parallel_size: interleaved pipelines are not supported, got "
            f"{megatron.virtual_pipeline_model_parallel_size}; set it to null"
        )
    if megatron.pipeline_model_parallel_size == 1:
        names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        switch = f"{_SECTION}.pipeline_model_parallel_size"
        yield from would_be_ignored(megatron, _SECTION, names, switch=switch, because=f"{switch} is 1")


def rule_megatron_sequence_parallel_needs_ranks(config: MasterConfig) -> Iterator[str]:
    megatron, switch = config.policy.megatron_cfg, f"{_SECTION}.tensor_model_parallel_size"
    if megatron.enabled and megatron.tensor_model_parallel_size <= 1:
        yield from would_be_ignored(megatron, _SECTION, ["sequence_parallel"], switch=switch, because=f"{switch} is 1")


def rule_megatron_experts_divide_the_workers(config: MasterConfig) -> Iterator[str]:
    policy, workers = config.policy, config.cluster.num_workers
    sizes = policy.parallel_sizes
    if not policy.megatron_cfg.enabled or workers % sizes.replica_size:
        return
    if workers % (sizes.expert_tensor * sizes.expert * sizes.pipeline):
        yield (
            f"{_SECTION}.expert_model_parallel_size: {sizes.expert} x expert_tensor_parallel_size "
            f"{sizes.expert_tensor} x pipeline_model_parallel_size {sizes.pipeline} does not divide {workers} workers; "
            "make one of them smaller (expert_tensor_parallel_size is tensor_model_parallel_size unless set)"
        )


def rule_megatron_allgather_needs_equal_lengths(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    sizes, key = policy.parallel_sizes, f"{_SECTION}.moe_token_dispatcher_type"
    if not policy.megatron_cfg.enabled or policy.megatron_cfg.moe_token_dispatcher_type != "allgather":
        return
    if sizes.pipeline > 1:
        yield f"{key}: 'allgather' cannot serve a pipeline, whose microbatches vary in length; set it to alltoall"
        return
    is_inside_a_replica = (sizes.tensor * sizes.context) % (sizes.expert * sizes.expert_tensor) == 0
    if not is_inside_a_replica:
        yield (
            f"{key}: 'allgather' wants as many tokens on every rank, but {sizes.expert} x {sizes.expert_tensor} expert "
            "ranks span data-parallel shards, whose microbatches vary in length; set it to alltoall"
        )


# ---- recomputation


def rule_megatron_recompute_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    if not megatron.enabled:
        return
    full, selective = ("recompute_method", "recompute_num_layers"), ("recompute_modules",)
    if not megatron.activation_checkpointing:
        names = ("recompute_granularity", *full, *selective)
        switch = f"{_SECTION}.activation_checkpointing"
        yield from would_be_ignored(megatron, _SECTION, names, switch=switch)
        return
    granularity, switch = megatron.recompute_granularity, f"{_SECTION}.recompute_granularity"
    others = selective if granularity == "full" else full
    yield from would_be_ignored(megatron, _SECTION, others, switch=switch, because=f"{switch} is {granularity!r}")
    has_grouped_gemm = megatron.moe_grouped_gemm is not False and config.cluster.gpus_per_node > 0
    if granularity == "selective" and "moe_act" in megatron.recompute_modules and not has_grouped_gemm:
        yield (
            f"{_SECTION}.recompute_modules: 'moe_act' is inside the kernel of moe_grouped_gemm, which is off or has no "
            "GPU; name 'moe' instead"
        )


# ---- mixtures of experts


def rule_megatron_auxiliary_loss_needs_its_keys(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    megatron, switch = policy.megatron_cfg, f"{_SECTION}.moe_router_load_balancing_type"
    if not megatron.enabled:
        return
    kind = megatron.moe_router_load_balancing_type
    if kind == "none":
        because = f"{switch} is 'none'"
        yield from would_be_ignored(megatron, _SECTION, ["moe_aux_loss_coeff"], switch=switch, because=because)
        return
    if megatron.moe_aux_loss_coeff == 0:
        yield f"{_SECTION}.moe_aux_loss_coeff: 0 gives {kind!r} no weight; set a number > 0, or {switch}=none"
    if megatron.freeze_moe_router:
        yield f"{switch}: {kind!r} teaches the routers, but freeze_moe_router is true; set it to none"
    if kind == "seq_aux_loss" and policy.sequence_packing.is_on:
        yield (
            f"{switch}: 'seq_aux_loss' takes a packed row for one sequence; set aux_loss, or "
            "policy.sequence_packing.enabled=false"
        )


def rule_megatron_frozen_router_keeps_its_bias(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    if megatron.enabled and megatron.freeze_moe_router and megatron.moe_router_bias_update_rate > 0:
        yield (
            f"{_SECTION}.moe_router_bias_update_rate: {megatron.moe_router_bias_update_rate} moves the bias of routers "
            "that freeze_moe_router keeps; set one of them to 0 or false"
        )


# ---- optimizer


def rule_megatron_optimizer_keys_fit_their_kind(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    optimizer, prefix = megatron.optimizer, f"{_SECTION}.optimizer"
    if not megatron.enabled:
        return
    names = ("adam_beta1", "adam_beta2", "adam_eps") if optimizer.optimizer == "sgd" else ("sgd_momentum",)
    switch = f"{prefix}.optimizer"
    yield from would_be_ignored(optimizer, prefix, names, switch=switch, because=f"{switch} is {optimizer.optimizer!r}")


def rule_megatron_optimizer_must_be_distributed(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    optimizer, reduction = megatron.optimizer, megatron.distributed_data_parallel_config
    if not megatron.enabled:
        return
    prefix, below = f"{_SECTION}.optimizer", f"{_SECTION}.distributed_data_parallel_config"
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        yield f"{prefix}.use_distributed_optimizer: true shards the state of 'adam' only; set it to false"
    is_distributed = optimizer.optimizer == "adam" and optimizer.use_distributed_optimizer is not False
    because = f"needs {prefix}.optimizer=adam and use_distributed_optimizer, which is off"
    if optimizer.use_precision_aware_optimizer and not is_distributed:
        yield f"{prefix}.use_precision_aware_optimizer: true {because}; set it to false"
    if reduction.overlap_param_gather and not is_distributed:
        yield f"{below}.overlap_param_gather: true {because}; set it to false"
    if reduction.overlap_param_gather and not reduction.overlap_grad_reduce:
        yield f"{below}.overlap_grad_reduce: must be true where overlap_param_gather is"


def rule_megatron_offload_needs_its_keys(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    optimizer, prefix = megatron.optimizer, f"{_SECTION}.optimizer"
    if not megatron.enabled:
        return
    if not optimizer.optimizer_cpu_offload:
        names, switch = ["optimizer_offload_fraction"], f"{prefix}.optimizer_cpu_offload"
        yield from would_be_ignored(optimizer, prefix, names, switch=switch)
        return
    if optimizer.optimizer_offload_fraction == 0:
        yield f"{prefix}.optimizer_offload_fraction: 0 offloads nothing; set a number up to 1"
    if not optimizer.use_precision_aware_optimizer:
        yield f"{prefix}.use_precision_aware_optimizer: must be true where optimizer_cpu_offload is"


def rule_megatron_gradient_dtype_needs_low_precision(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if not policy.megatron_cfg.enabled or policy.precision != "float32":
        return
    section, names = policy.megatron_cfg.distributed_data_parallel_config, ["grad_reduce_in_fp32"]
    because = "policy.precision is 'float32', and so are all gradients"
    prefix = f"{_SECTION}.distributed_data_parallel_config"
    yield from would_be_ignored(section, prefix, names, switch="policy.precision", because=because)


# ---- schedules


def rule_megatron_learning_rates_are_ordered(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    optimizer, scheduler = megatron.optimizer, megatron.scheduler
    if megatron.enabled:
        yield from (
            f"{key}: {value} is above {_SECTION}.optimizer.lr {optimizer.lr}, the peak"
            for key, value in (
                (f"{_SECTION}.optimizer.min_lr", optimizer.min_lr),
                (f"{_SECTION}.scheduler.lr_warmup_init", scheduler.lr_warmup_init),
            )
            if value > optimizer.lr
        )


def rule_megatron_decay_follows_the_warmup(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    scheduler, prefix = megatron.scheduler, f"{_SECTION}.scheduler"
    if not megatron.enabled:
        return
    if scheduler.lr_warmup_iters == 0:
        names, switch = ["lr_warmup_init"], f"{prefix}.lr_warmup_iters"
        yield from would_be_ignored(scheduler, prefix, names, switch=switch, because=f"{switch} is 0")
    end = scheduler.lr_decay_iters
    if scheduler.lr_decay_style == "constant":
        switch = f"{prefix}.lr_decay_style"
        because = f"{switch} is 'constant', which never decays"
        yield from would_be_ignored(scheduler, prefix, ["lr_decay_iters"], switch=switch, because=because)
        yield from would_be_ignored(
            megatron.optimizer, f"{_SECTION}.optimizer", ["min_lr"], switch=switch, because=because
        )
    elif end is not None and scheduler.lr_warmup_iters >= end:
        yield (
            f"{prefix}.lr_warmup_iters: {scheduler.lr_warmup_iters} leaves no step to decay before "
            f"{prefix}.lr_decay_iters {end}"
        )


def rule_megatron_weight_decay_is_increasing(config: MasterConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    scheduler, prefix, switch = (
        megatron.scheduler,
        f"{_SECTION}.scheduler",
        f"{_SECTION}.scheduler.weight_decay_incr_style",
    )
    if not megatron.enabled:
        return
    style, start, end = scheduler.weight_decay_incr_style, scheduler.start_weight_decay, scheduler.end_weight_decay
    because = f"{switch} is {style!r}"
    if style == "constant":
        names = ("start_weight_decay", "end_weight_decay")
        yield from would_be_ignored(scheduler, prefix, names, switch=switch, because=because)
        return
    lines = would_be_ignored(
        megatron.optimizer, f"{_SECTION}.optimizer", ["weight_decay"], switch=switch, because=because
    )
    if start is None or end is None:
        missing = "start_weight_decay" if start is None else "end_weight_decay"
        yield from (*lines, f"{prefix}.{missing}: must be set where {switch} is {style!r}")
        return
    if start > end:
        lines.append(f"{prefix}.start_weight_decay: {start} is above {prefix}.end_weight_decay {end}; it can only rise")
    yield from lines
