"""Rules over `policy`: worker, sizes and batches, DTensor, adapters, router replay; `packing_decided`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.base import AUTO
from nemo_rl.config.policy import (
    CUBLAS_VARIABLE,
    FIXED_ROWS,
    REPEATABLE_WORKSPACES,
    DynamicBatchingConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_rl.config.rules.rule import keys_besides_the_switch, would_be_ignored
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import ConfigError

__all__ = ["packing_decided"]


# ---- the worker


def rule_exactly_one_worker_is_enabled(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled:
        yield (
            "policy.megatron_cfg.enabled: true, and so is policy.dtensor_cfg.enabled unless set otherwise, but one "
            "worker trains; set policy.dtensor_cfg.enabled=false"
        )
    elif not policy.dtensor_cfg.enabled and not policy.megatron_cfg.enabled:
        yield (
            "policy.dtensor_cfg.enabled: false, and so is policy.megatron_cfg.enabled: nothing trains; set "
            "one of them to true"
        )


def rule_worker_keys_fit_the_worker(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    dtensor, megatron = policy.dtensor_cfg, policy.megatron_cfg
    for prefix, section, other in (
        ("policy.dtensor_cfg", dtensor, megatron),
        ("policy.megatron_cfg", megatron, dtensor),
    ):
        if not section.enabled and other.enabled:
            names, switch = keys_besides_the_switch(section), f"{prefix}.enabled"
            yield from would_be_ignored(section, prefix, names, switch=switch)
    if megatron.enabled and not dtensor.enabled:
        for name in ("optimizer", "scheduler"):
            because = f"the Megatron worker takes policy.megatron_cfg.{name}"
            yield from would_be_ignored(policy, "policy", [name], switch="policy.megatron_cfg.enabled", because=because)


def rule_profile_kind_fits_the_devices(config: MasterConfig) -> Iterator[str]:
    profile = config.policy.profile
    if profile.kind == "nsys" and profile.steps and not config.cluster.gpus_per_node:
        yield (
            "policy.profile.kind: nsys records CUDA, and the workers are on CPUs (cluster.gpus_per_node: 0); set torch"
        )
    elif not profile.steps:
        because = "policy.profile.steps is empty"
        yield from would_be_ignored(profile, "policy.profile", ["kind"], switch="policy.profile.steps", because=because)


def rule_deterministic_products_repeat(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    found = {**config.cluster.env_vars, **policy.worker_env_vars}.get(CUBLAS_VARIABLE, REPEATABLE_WORKSPACES[0])
    if not policy.deterministic or found in REPEATABLE_WORKSPACES:
        return
    yield (
        f"policy.deterministic: products on CUDA do not repeat with {CUBLAS_VARIABLE} {found!r} of cluster.env_vars or "
        f"{policy.parallel_section}.env_vars; leave it out, or set {' or '.join(REPEATABLE_WORKSPACES)}"
    )


# ---- parallel sizes


def rule_parallel_sizes_divide_the_workers(config: MasterConfig) -> Iterator[str]:
    policy, workers = config.policy, config.cluster.num_workers
    sizes = policy.parallel_sizes
    if workers % sizes.replica_size == 0:
        return
    axes = (
        (sizes.tensor, sizes.pipeline, sizes.context) if policy.megatron_cfg.enabled else (sizes.tensor, sizes.context)
    )
    first, *others = policy.replica_keys
    product = "".join(f" x {key.rsplit('.', 1)[-1]} {size}" for key, size in zip(others, axes[1:], strict=True))
    yield (
        f"{first}: {sizes.tensor}{product} does not divide {workers} workers; change cluster.cpu_workers_per_node or "
        "cluster.gpus_per_node to a multiple"
    )


def rule_copies_divide_the_data_and_context_ranks(config: MasterConfig) -> Iterator[str]:
    sizes, workers = config.policy.parallel_sizes, config.cluster.num_workers
    ranks = workers // (sizes.tensor * sizes.pipeline)
    if workers % sizes.replica_size == 0 and ranks % sizes.copies:
        yield (
            f"policy.dtensor_cfg.replicate_size: {sizes.copies} copies of the weights do not divide {ranks} data x "
            f"context parallel ranks; set it to a divisor of {ranks}"
        )


# ---- batches


def rule_packing_excludes_dynamic_batching(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if policy.sequence_packing.is_on and policy.dynamic_batching.enabled:
        yield "policy.dynamic_batching.enabled: packing and dynamic batching exclude each other; turn one of them off"


def rule_batching_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    sections: tuple[tuple[str, SequencePackingConfig | DynamicBatchingConfig], ...] = (
        ("policy.sequence_packing", policy.sequence_packing),
        ("policy.dynamic_batching", policy.dynamic_batching),
    )
    for prefix, section in sections:
        why_off = _why_auto_is_off(policy) if section.enabled == AUTO else None
        if why_off is not None or not section.enabled:
            names, switch = keys_besides_the_switch(section), f"{prefix}.enabled"
            because = f"{switch} is false" if why_off is None else f"policy.{why_off}"
            yield from would_be_ignored(section, prefix, names, switch=switch, because=because)
        elif section.is_on:
            longest = policy.longest_row
            for name, cap in (
                ("train_mb_tokens", section.train_mb_tokens),
                ("logprob_mb_tokens", section.logprob_mb_tokens),
            ):
                if cap < longest:
                    yield f"{prefix}.{name}: {cap} tokens do not hold one sequence; expected at least {longest}"
    if policy.sequence_packing.is_on or policy.dynamic_batching.enabled:
        switch = f"policy.{'sequence_packing' if policy.sequence_packing.is_on else 'dynamic_batching'}.enabled"
        yield from would_be_ignored(policy, "policy", FIXED_ROWS, switch=switch, because=f"{switch} is true")


def packing_decided(config: MasterConfig, *, fits: Callable[[PolicyConfig], bool]) -> MasterConfig:
    """Return the config with true or false in place of `policy.sequence_packing.enabled: auto`.

    Args:
        fits: whether the model keeps its numbers where rows are packed, asked of a policy that packs them.

    Raises:
        ConfigError: rows are not packed, and the global batch does not divide into microbatches.
    """
    policy = config.policy
    if policy.sequence_packing.enabled != AUTO:
        return config
    longest, packing = policy.longest_row, policy.sequence_packing
    train = max(packing.train_mb_tokens, longest)
    caps = {"train_mb_tokens": train, "logprob_mb_tokens": max(packing.logprob_mb_tokens, train)}
    policy = policy.model_copy(update={"sequence_packing": packing.model_copy(update={"enabled": True, **caps})})
    if _why_auto_is_off(config.policy) is not None or not fits(policy):
        policy = policy.model_copy(update={"sequence_packing": packing.model_copy(update={"enabled": False})})
    config = config.model_copy(update={"policy": policy})
    problems = list(rule_fixed_microbatches_divide(config))
    if problems:
        raise ConfigError(problems)
    return config


def _why_auto_is_off(policy: PolicyConfig) -> str | None:
    """Return what in the recipe keeps `auto` from packing rows, or None."""
    if policy.dynamic_batching.enabled:
        return "dynamic_batching.enabled is true"
    if policy.megatron_cfg.moe_router_load_balancing_type == "seq_aux_loss":
        return "megatron_cfg.moe_router_load_balancing_type is 'seq_aux_loss'"
    fixed = (name for name in FIXED_ROWS if getattr(policy, name) != PolicyConfig.model_fields[name].default)
    return next((f"{name} is set" for name in fixed), None)


def rule_logprob_microbatch_tokens_not_below_train(config: MasterConfig) -> Iterator[str]:
    for name, section in (
        ("sequence_packing", config.policy.sequence_packing),
        ("dynamic_batching", config.policy.dynamic_batching),
    ):
        if section.is_on and section.logprob_mb_tokens < section.train_mb_tokens:
            yield (
                f"policy.{name}.logprob_mb_tokens: expected at least train_mb_tokens {section.train_mb_tokens} (a pass "
                f"without gradients needs less memory), got {section.logprob_mb_tokens}"
            )


def rule_fixed_microbatches_divide(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    # Where the model may still turn `auto` off, `packing_decided` asks again.
    may_pack = policy.sequence_packing.enabled == AUTO and _why_auto_is_off(policy) is None
    if may_pack or policy.sequence_packing.is_on or policy.dynamic_batching.enabled:
        return
    ranks = max(1, config.cluster.num_workers // policy.parallel_sizes.replica_size)
    unit = ranks * policy.train_micro_batch_size
    if config.smallest_group < config.grpo.num_generations_per_prompt:
        yield (
            "policy.dynamic_batching.enabled: false and no packing of rows make microbatches of equal numbers of rows, "
            "and num_generations_per_prompt of a source of data.train makes the rows of each step another number; set "
            "it to true"
        )
    if policy.train_global_batch_size % unit:
        yield (
            f"policy.train_global_batch_size: {policy.train_global_batch_size} does not divide into {ranks} "
            f"data-parallel workers x policy.train_micro_batch_size {policy.train_micro_batch_size}; expected a "
            f"multiple of {unit}, or policy.dynamic_batching.enabled=true, which needs no such thing"
        )


def rule_step_divides_into_global_batches(config: MasterConfig) -> Iterator[str]:
    grpo, batch = config.grpo, config.policy.train_global_batch_size
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if samples % batch and not config.sft.enabled:
        yield (
            f"policy.train_global_batch_size: expected a divisor of grpo.num_prompts_per_step x "
            f"num_generations_per_prompt = {samples}, got {batch}"
        )


def rule_adapters_leave_the_tower(config: MasterConfig) -> Iterator[str]:
    if not config.policy.vision.freeze_tower or not config.policy.lora.enabled:
        return
    yield (
        "policy.vision.freeze_tower: true would be ignored: policy.lora.enabled is true, and adapters leave the vision "
        "tower as it is; leave the key out"
    )


def rule_megatron_has_no_vision_tower(config: MasterConfig) -> Iterator[str]:
    if config.policy.vision.freeze_tower and config.policy.megatron_cfg.enabled:
        yield (
            "policy.vision.freeze_tower: true, but the Megatron worker trains models of text alone; set "
            "policy.dtensor_cfg.enabled=true and policy.megatron_cfg.enabled=false"
        )


# ---- the DTensor worker


def rule_tensor_parallel_keys_need_ranks(config: MasterConfig) -> Iterator[str]:
    sizes = config.policy.dtensor_cfg
    if not sizes.enabled or sizes.tensor_parallel_size > 1:
        return
    switch, names = "policy.dtensor_cfg.tensor_parallel_size", ("sequence_parallel", "custom_parallel_plan")
    yield from would_be_ignored(sizes, "policy.dtensor_cfg", names, switch=switch, because=f"{switch} is 1")


def rule_sequence_parallel_has_a_plan(config: MasterConfig) -> Iterator[str]:
    sizes = config.policy.dtensor_cfg
    if not sizes.enabled or sizes.tensor_parallel_size == 1:
        return
    if sizes.sequence_parallel and sizes.custom_parallel_plan is not None:
        yield (
            "policy.dtensor_cfg.sequence_parallel: a custom_parallel_plan does not say where sequences are split and "
            "brought together; set it to false, or leave the plan out"
        )


def rule_compile_needs_whole_layers(config: MasterConfig) -> Iterator[str]:
    sizes = config.policy.dtensor_cfg
    if not sizes.enabled or sizes.compile != "on":
        return
    found = {
        "dtensor_cfg.tensor_parallel_size is above 1: torch.compile cannot trace how a layer gets its part of the "
        "weights": sizes.tensor_parallel_size > 1,
        "dtensor_cfg.context_parallel_size is above 1: attention is several calls": sizes.context_parallel_size > 1,
        "router_replay.enabled is true: its passes run layers as they are written": config.policy.router_replay.enabled,
        "deterministic is true: bits depend on the passes before": config.policy.deterministic,
    }
    reasons = [reason for reason, holds in found.items() if holds]
    yield from (f"policy.dtensor_cfg.compile: 'on', and policy.{reason}; set it to auto or off" for reason in reasons)


def rule_cpu_offload_needs_a_gpu(config: MasterConfig) -> Iterator[str]:
    because = "cluster.gpus_per_node is 0: everything is on the CPU already"
    if config.policy.dtensor_cfg.enabled and config.cluster.gpus_per_node == 0:
        sizes, switch = config.policy.dtensor_cfg, "cluster.gpus_per_node"
        yield from would_be_ignored(sizes, "policy.dtensor_cfg", ["cpu_offload"], switch=switch, because=because)


# ---- the schedule


def rule_scheduler_keys_need_a_decay(config: MasterConfig) -> Iterator[str]:
    scheduler = config.policy.scheduler
    if scheduler.phases:
        because = "policy.scheduler.phases make the whole curve"
        shape = ("name", "warmup_steps", "decay_steps", "min_factor")
        yield from would_be_ignored(
            scheduler, "policy.scheduler", shape, switch="policy.scheduler.phases", because=because
        )
        return
    if scheduler.name == "constant":
        switch, names = "policy.scheduler.name", ("decay_steps", "min_factor")
        because = f"{switch} is 'constant', which never decays"
        yield from would_be_ignored(scheduler, "policy.scheduler", names, switch=switch, because=because)
        return
    end = scheduler.decay_steps
    if end is not None and scheduler.warmup_steps >= end:
        yield (
            f"policy.scheduler.warmup_steps: {scheduler.warmup_steps} leaves no step to decay before "
            f"policy.scheduler.decay_steps {end}"
        )


def rule_scheduler_milestones_separate_the_phases(config: MasterConfig) -> Iterator[str]:
    scheduler = config.policy.scheduler
    phases, milestones = scheduler.phases, scheduler.milestones
    if len(milestones) != max(0, len(phases) - 1):
        yield (
            f"policy.scheduler.milestones: expected {max(0, len(phases) - 1)}, one less than the {len(phases)} "
            f"phases, got {milestones}"
        )
    elif milestones != sorted(set(milestones)):
        yield f"policy.scheduler.milestones: expected rising steps, got {milestones}"
    elif any(phase.name.endswith("ReduceLROnPlateau") for phase in phases):
        yield "policy.scheduler.phases: ReduceLROnPlateau follows a metric, not the steps; choose another"


# ---- adapters


def rule_lora_reference_needs_an_adapter(config: MasterConfig) -> Iterator[str]:
    lora = config.policy.lora
    if not lora.enabled or lora.reference == "base" or lora.adapter is not None:
        return
    yield "policy.lora.reference: 'start' needs an adapter to start from; set policy.lora.adapter, or reference=base"


def rule_finish_needs_adapters(config: MasterConfig) -> Iterator[str]:
    if config.policy.generation.in_flight != "finish" or config.policy.lora.is_native:
        return
    yield (
        "policy.generation.in_flight: 'finish' lets rows of two versions run side by side, for which engines must hold "
        "adapters; set policy.lora.enabled=true with policy.lora.serve=native, or in_flight=recompute or drain"
    )


def rule_vllm_rows_keep_their_adapter(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    is_changed = generation.in_flight in ("recompute", "keep") and config.grpo.samples_ahead
    if not config.policy.lora.is_native or generation.backend != "vllm" or not is_changed:
        return
    yield (
        f"policy.generation.in_flight: {generation.in_flight!r} changes the adapter of running rows, and a row of vLLM "
        "has one adapter to its end; set it to finish or drain, policy.lora.serve=merged, or "
        "policy.generation.backend=torch"
    )


def rule_adapters_are_sent_whole(config: MasterConfig) -> Iterator[str]:
    if config.policy.lora.is_native and config.policy.generation.refit_delta.enabled:
        yield (
            "policy.generation.refit_delta.enabled: true, but policy.lora.serve is native, so that a refit sends an "
            "adapter, of which every element changes; set it to false, or policy.lora.serve=merged"
        )


# ---- router replay

_SECTION = "policy.router_replay"


def _why_no_logprobs(config: MasterConfig) -> str:
    """Return the key that leaves the pass out."""
    is_sampled = config.grpo.use_generation_logprobs_as_prev
    return "grpo.use_generation_logprobs_as_prev" if is_sampled else "loss_fn.force_on_policy_ratio"


def rule_route_recording_needs_its_pass(config: MasterConfig) -> Iterator[str]:
    replay = config.policy.router_replay
    if replay.enabled and replay.source == "prev_logprobs" and not config.has_prev_logprobs_pass:
        switch = _why_no_logprobs(config)
        yield (
            f"{_SECTION}.source: 'prev_logprobs' never records, because {switch} is true; set it to rollout, or "
            f"{switch}=false"
        )


def rule_missing_route_share_needs_rollout_routes(config: MasterConfig) -> Iterator[str]:
    replay, switch = config.policy.router_replay, f"{_SECTION}.source"
    if not replay.enabled or replay.records_at_rollout:
        return
    because = "a log-probability pass records the route of every token"
    yield from would_be_ignored(replay, _SECTION, ["max_missing_share"], switch=switch, because=because)


def rule_route_comparison_needs_logprob_pass(config: MasterConfig) -> Iterator[str]:
    replay = config.policy.router_replay
    if not replay.enabled:
        return
    if not config.has_prev_logprobs_pass:
        switch = _why_no_logprobs(config)
        because = f"{switch} is true: no pass computes log-probabilities before training"
        yield from would_be_ignored(replay, _SECTION, ["compare_microbatches"], switch=switch, because=because)
    elif not replay.records_at_rollout:
        because = "the pass that records uses the model's own routes anyway"
        switch = f"{_SECTION}.source"
        yield from would_be_ignored(replay, _SECTION, ["compare_microbatches"], switch=switch, because=because)
