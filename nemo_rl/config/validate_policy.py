"""Rules about the policy: which worker trains, its parallel sizes, its batches, the DTensor worker's own keys.

The form of a rule is explained in `nemo_rl.config.validate`, which runs them all.
"""

from __future__ import annotations

import math

from nemo_rl.config.base import Section
from nemo_rl.config.ignored import would_be_ignored
from nemo_rl.config.policy import DynamicBatchingConfig, SequencePackingConfig
from nemo_rl.config.rule import rules_in
from nemo_rl.config.schema import MasterConfig

__all__ = ["RULES"]


# ---- the worker


def rule_one_worker_trains(config: MasterConfig) -> list[str]:
    policy = config.policy
    if policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled:
        return [
            "policy.megatron_cfg.enabled: true, and so is policy.dtensor_cfg.enabled unless set otherwise, but one "
            "worker trains; set policy.dtensor_cfg.enabled=false"
        ]
    if not policy.dtensor_cfg.enabled and not policy.megatron_cfg.enabled:
        return [
            "policy.dtensor_cfg.enabled: false, and so is policy.megatron_cfg.enabled: nothing trains; set "
            "one of them to true"
        ]
    return []


def rule_keys_of_the_other_worker_stay_out(config: MasterConfig) -> list[str]:
    policy = config.policy
    dtensor, megatron = policy.dtensor_cfg, policy.megatron_cfg
    lines: list[str] = []
    for prefix, section, other in (
        ("policy.dtensor_cfg", dtensor, megatron),
        ("policy.megatron_cfg", megatron, dtensor),
    ):
        if not section.enabled and other.enabled:
            names, switch = _keys_besides_the_switch(section), f"{prefix}.enabled"
            lines += would_be_ignored(section, prefix, names, switch=switch, because=f"{switch} is false")
    if megatron.enabled and not dtensor.enabled:
        for name in ("optimizer", "scheduler"):
            because = f"the Megatron worker takes policy.megatron_cfg.{name}"
            lines += would_be_ignored(policy, "policy", [name], switch="policy.megatron_cfg.enabled", because=because)
    return lines


def _keys_besides_the_switch(section: Section) -> tuple[str, ...]:
    return tuple(name for name in type(section).model_fields if name != "enabled")


# ---- parallel sizes


def rule_parallel_sizes_divide_the_workers(config: MasterConfig) -> list[str]:
    policy, workers = config.policy, config.cluster.num_workers
    sizes = policy.parallel_sizes
    if workers % sizes.replica_size == 0:
        return []
    axes = (
        (sizes.tensor, sizes.pipeline, sizes.context) if policy.megatron_cfg.enabled else (sizes.tensor, sizes.context)
    )
    first, *others = policy.replica_keys
    product = "".join(f" x {key.rsplit('.', 1)[-1]} {size}" for key, size in zip(others, axes[1:], strict=True))
    return [
        f"{first}: {sizes.tensor}{product} does not divide {workers} workers; change cluster.cpu_workers_per_node or "
        "cluster.gpus_per_node to a multiple"
    ]


def rule_tensor_parallel_keys_need_ranks(config: MasterConfig) -> list[str]:
    sizes = config.policy.dtensor_cfg
    if not sizes.enabled or sizes.tensor_parallel_size > 1:
        return []
    switch, names = "policy.dtensor_cfg.tensor_parallel_size", ("sequence_parallel", "custom_parallel_plan")
    return would_be_ignored(sizes, "policy.dtensor_cfg", names, switch=switch, because=f"{switch} is 1")


def rule_sequence_parallel_has_a_plan(config: MasterConfig) -> list[str]:
    sizes = config.policy.dtensor_cfg
    if not sizes.enabled or sizes.tensor_parallel_size == 1:
        return []
    if sizes.sequence_parallel and sizes.custom_parallel_plan is not None:
        return [
            "policy.dtensor_cfg.sequence_parallel: a custom_parallel_plan does not say where sequences are split and "
            "brought together; set it to false, or leave the plan out"
        ]
    return []


def rule_cpu_offload_needs_a_gpu(config: MasterConfig) -> list[str]:
    because = "cluster.gpus_per_node is 0: everything is on the CPU already"
    if config.policy.dtensor_cfg.enabled and config.cluster.gpus_per_node == 0:
        sizes, switch = config.policy.dtensor_cfg, "cluster.gpus_per_node"
        return would_be_ignored(sizes, "policy.dtensor_cfg", ["cpu_offload"], switch=switch, because=because)
    return []


# ---- generation


def rule_receipt_keys_need_receipts(config: MasterConfig) -> list[str]:
    receipt, prefix = config.policy.generation.receipt, "policy.generation.receipt"
    if receipt.enabled:
        return []
    names, switch = _keys_besides_the_switch(receipt), f"{prefix}.enabled"
    return would_be_ignored(receipt, prefix, names, switch=switch, because=f"{switch} is false")


def rule_recorded_support_has_a_use_and_a_reader(config: MasterConfig) -> list[str]:
    generation, key = config.policy.generation, "policy.generation.record_support"
    if not generation.record_support:
        return []
    lines: list[str] = []
    if generation.top_p == 1 and generation.top_k is None:
        lines.append(
            f"{key}: policy.generation.top_p is 1 and policy.generation.top_k is null: every token is kept; set it to "
            "false"
        )
    if generation.backend != "torch":
        lines.append(
            f"{key}: policy.generation.backend is {generation.backend!r}, and only the embedded engine, torch, records "
            "the kept sets; set it to false"
        )
    return lines


# ---- batches


def rule_one_way_of_batching(config: MasterConfig) -> list[str]:
    policy = config.policy
    if policy.sequence_packing.enabled and policy.dynamic_batching.enabled:
        return [
            "policy.dynamic_batching.enabled: packing and dynamic batching exclude each other; turn one of them off"
        ]
    return []


def rule_batching_keys_need_their_switch(config: MasterConfig) -> list[str]:
    policy = config.policy
    lines = []
    sections: tuple[tuple[str, SequencePackingConfig | DynamicBatchingConfig], ...] = (
        ("policy.sequence_packing", policy.sequence_packing),
        ("policy.dynamic_batching", policy.dynamic_batching),
    )
    for prefix, section in sections:
        if not section.enabled:
            names, switch = _keys_besides_the_switch(section), f"{prefix}.enabled"
            lines += would_be_ignored(section, prefix, names, switch=switch, because=f"{switch} is false")
        else:
            multiple = math.lcm(policy.make_sequence_length_divisible_by, policy.parallel_sizes.length_multiple)
            longest = -(-policy.max_total_sequence_length // multiple) * multiple
            for name, cap in (
                ("train_mb_tokens", section.train_mb_tokens),
                ("logprob_mb_tokens", section.logprob_mb_tokens),
            ):
                if cap < longest:
                    lines.append(f"{prefix}.{name}: {cap} tokens do not hold one sequence; expected at least {longest}")
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        fixed = ("train_micro_batch_size", "logprob_batch_size")
        switch = f"policy.{'sequence_packing' if policy.sequence_packing.enabled else 'dynamic_batching'}.enabled"
        lines += would_be_ignored(policy, "policy", fixed, switch=switch, because=f"{switch} is true")
    return lines


def rule_logprob_microbatches_are_not_smaller(config: MasterConfig) -> list[str]:
    lines = []
    for name, section in (
        ("sequence_packing", config.policy.sequence_packing),
        ("dynamic_batching", config.policy.dynamic_batching),
    ):
        if section.enabled and section.logprob_mb_tokens < section.train_mb_tokens:
            lines.append(
                f"policy.{name}.logprob_mb_tokens: expected at least train_mb_tokens {section.train_mb_tokens} (a pass "
                f"without gradients needs less memory), got {section.logprob_mb_tokens}"
            )
    return lines


def rule_fixed_microbatches_divide(config: MasterConfig) -> list[str]:
    policy = config.policy
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        return []
    ranks = max(1, config.cluster.num_workers // policy.parallel_sizes.replica_size)
    unit = ranks * policy.train_micro_batch_size
    if policy.train_global_batch_size % unit:
        return [
            f"policy.train_global_batch_size: {policy.train_global_batch_size} does not divide into {ranks} "
            f"data-parallel workers x policy.train_micro_batch_size {policy.train_micro_batch_size}; expected a "
            f"multiple of {unit}, or policy.dynamic_batching.enabled=true, which needs no such thing"
        ]
    return []


def rule_step_divides_into_global_batches(config: MasterConfig) -> list[str]:
    grpo, batch = config.grpo, config.policy.train_global_batch_size
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if samples % batch:
        return [
            f"policy.train_global_batch_size: expected a divisor of grpo.num_prompts_per_step x "
            f"num_generations_per_prompt = {samples}, got {batch}"
        ]
    return []


# ---- the DTensor worker's schedule


def rule_scheduler_keys_need_a_decay(config: MasterConfig) -> list[str]:
    scheduler = config.policy.scheduler
    if scheduler.phases:
        because = "policy.scheduler.phases make the whole curve"
        shape = ("name", "warmup_steps", "decay_steps", "min_factor")
        return would_be_ignored(scheduler, "policy.scheduler", shape, switch="policy.scheduler.phases", because=because)
    if scheduler.name == "constant":
        switch, names = "policy.scheduler.name", ("decay_steps", "min_factor")
        because = f"{switch} is 'constant', which never decays"
        return would_be_ignored(scheduler, "policy.scheduler", names, switch=switch, because=because)
    end = scheduler.decay_steps
    if end is not None and scheduler.warmup_steps >= end:
        return [
            f"policy.scheduler.warmup_steps: {scheduler.warmup_steps} leaves no step to decay before "
            f"policy.scheduler.decay_steps {end}"
        ]
    return []


def rule_milestones_part_the_phases(config: MasterConfig) -> list[str]:
    scheduler = config.policy.scheduler
    phases, milestones = scheduler.phases, scheduler.milestones
    if len(milestones) != max(0, len(phases) - 1):
        return [
            f"policy.scheduler.milestones: expected {max(0, len(phases) - 1)}, one less than the {len(phases)} "
            f"phases, got {milestones}"
        ]
    if milestones != sorted(set(milestones)):
        return [f"policy.scheduler.milestones: expected rising steps, got {milestones}"]
    if any(phase.name.endswith("ReduceLROnPlateau") for phase in phases):
        return ["policy.scheduler.phases: ReduceLROnPlateau follows a metric, not the steps; choose another"]
    return []


RULES = rules_in(globals())
"""The rules of this module, by name."""
