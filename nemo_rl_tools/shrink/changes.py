"""The changes of a recipe that let its code run on this machine: one `ShrinkChange` per key, each with its reason.

What is not changed here is as in the recipe: stages, loss, advantages, store, batching, replay, refit. `SmallLayout`
has the parallel axes of the recipe at 2 each, as far as this machine bears so many processes: an axis that is above 1
in the recipe is above 1 here unless `reduced` says why not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import ParallelSizes
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import lookup, put
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.errors import ConfigError, UserError

__all__ = ["TEACHER", "Changes", "ShrinkChange", "changes_of", "small_layout", "teacher_sizes"]

KEPT = 2
"""Ranks along an axis that has several: the fewest that exchange anything."""
GIVEN_UP_IN_TURN = ("expert_tensor", "pipeline", "context", "tensor", "expert")
"""Axes in the order in which they are given up where all of them at 2 are too many processes; the data axis goes before
them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallLayout:
    """Sizes of the axes here."""

    sizes: ParallelSizes
    workers: int
    """Policy workers in all."""
    real: ParallelSizes
    real_workers: int
    reduced: tuple[str, ...]
    """Axes of the recipe that are 1 here, each with the reason."""

    @property
    def data(self) -> int:
        """Return the number of data-parallel shards."""
        return self.workers // self.sizes.replica_size

    @property
    def text(self) -> str:
        """Return the layout as a text for people.

        Example:
            >>> small_layout(ParallelSizes(tensor=4, sequence_parallel=True), 16, max_workers=8).text
            '16 workers (tp 4, dp 4, sp) -> 4 workers (tp 2, dp 2, sp)'
        """
        return f"{_said(self.real, self.real_workers)} -> {_said(self.sizes, self.workers)}"


def small_layout(real: ParallelSizes, workers: int, *, max_workers: int) -> SmallLayout:
    """Return the layout here of a recipe with so many workers."""
    sizes = kept = _capped(real)
    given_up = list[str]()
    for name in GIVEN_UP_IN_TURN:
        if _fewest(sizes) > max_workers:
            sizes = _without(sizes, name)
            given_up.append(name)
    # One that was given up before a larger one may fit after all.
    for name in list(given_up):
        others = [other for other in given_up if other != name]
        if _fewest(_without(kept, *others)) <= max_workers:
            sizes, given_up = _without(kept, *others), others
    reduced = [
        f"{name.replace('_', ' ')} parallel: {_fewest(kept)} processes are more than {max_workers}" for name in given_up
    ]
    fewest = _fewest(sizes)
    real_data, data = workers // real.replica_size, fewest // sizes.replica_size
    if real_data > 1 and data == 1:
        if fewest * KEPT <= max_workers:
            fewest *= KEPT
        else:
            reduced.append(f"data parallel: {fewest * KEPT} processes are more than {max_workers}")
    sizes = replace(sizes, copies=math.gcd(real.copies, fewest // (sizes.tensor * sizes.pipeline), KEPT))
    return SmallLayout(sizes=sizes, workers=fewest, real=real, real_workers=workers, reduced=tuple(reduced))


def _capped(real: ParallelSizes) -> ParallelSizes:
    return replace(real, **{axis: min(getattr(real, axis), KEPT) for axis in GIVEN_UP_IN_TURN})  # type: ignore[arg-type]


def _fewest(sizes: ParallelSizes) -> int:
    """Return the fewest workers that both the dense weights and the experts divide."""
    return math.lcm(sizes.replica_size, sizes.expert_tensor * sizes.expert * sizes.pipeline)


def _without(sizes: ParallelSizes, *names: str) -> ParallelSizes:
    changes: dict[str, int] = dict.fromkeys(names, 1)
    is_split = sizes.sequence_parallel and "tensor" not in names
    return replace(sizes, **changes, sequence_parallel=is_split)  # type: ignore[arg-type]


def _said(sizes: ParallelSizes, workers: int) -> str:
    axes = {
        "tp": sizes.tensor,
        "pp": sizes.pipeline,
        "cp": sizes.context,
        "ep": sizes.expert,
        "etp": sizes.expert_tensor if sizes.expert > 1 else 1,
        "dp": workers // sizes.replica_size,
    }
    shown = [f"{name} {size}" for name, size in axes.items() if size > 1]
    shown += ["sp"] if sizes.sequence_parallel else []
    return f"{workers} worker{'s' if workers > 1 else ''}" + (f" ({', '.join(shown)})" if shown else "")


REWARD = "nemo_rl_tools.shrink:odd_share"
PROMPT_TOKENS, NEW_TOKENS = 40, 16
SMALL_RANK = 4
TEACHER, SMALL_TOP_K = "teacher", 16
"""Folder of a teacher beside that of the small model; most tokens of its distributions."""
GROUP, ROWS = 4, 16
"""Samples of a prompt, and about as many rows in a step."""
VALIDATION_ROWS = 8
BATCH_ROWS = 64
CAP_SEQUENCES = 4
"""Most longest sequences that a microbatch holds, so that a step has several microbatches."""
STAGE_S, COLLECTIVE_S = 300.0, 60.0
"""Deadlines of so small a run: a layout that hangs ends here."""
RATE = 1e-3
SEGMENT_BYTES = 1 << 26
TRAIN_SEED, VALIDATION_SEED = 20_000_042, 777
NO_GPU = "there is no GPU here"
ONE_MACHINE = "one machine"
TWO = "two ranks along each axis"
SMALL_BATCH = "a small step"
SMALL_ROWS = "short rows"
OWN = "its own run"
ON_GPUS = (
    *("apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion"),
    "distributed_data_parallel_config.overlap_param_gather",
    *("optimizer.optimizer_cpu_offload", "optimizer.use_distributed_optimizer"),
    "optimizer.use_precision_aware_optimizer",
)
"""Switches of `policy.megatron_cfg` for GPUs alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkChange:
    """One changed key, with its reason."""

    key: str
    was: object
    now: object
    why: str

    @property
    def text(self) -> str:
        """Return the text for people."""
        return f"{self.key} {_shown(self.was)} -> {_shown(self.now)}"


class Changes:
    """Collects changes of one config; a value that is as before is none."""

    def __init__(self, config: MasterConfig) -> None:
        self._tree = config.model_dump(mode="json")
        self.found: list[ShrinkChange] = []

    def set(self, key: str, now: object, why: str) -> None:
        is_set, was = lookup(self._tree, key.split("."))
        if not is_set or was != now:
            self.found.append(ShrinkChange(key=key, was=was, now=now, why=why))

    def set_all(self, section: str, values: Mapping[str, object], why: str) -> None:
        for name, now in values.items():
            self.set(f"{section}.{name}", now, why)

    def cap(self, key: str, most: float, why: str) -> None:
        """Lower a number to at most so much; null stays."""
        _, was = lookup(self._tree, key.split("."))
        if isinstance(was, (int, float)) and was > most:
            self.set(key, most, why)

    def at_least(self, key: str, least: float, why: str) -> None:
        """Raise a number to at least so much."""
        _, was = lookup(self._tree, key.split("."))
        if isinstance(was, (int, float)) and was < least:
            self.set(key, least, why)

    def tree(self) -> dict[str, Any]:
        """Return the changes as a recipe that inherits from the real one."""
        tree: dict[str, Any] = {}
        for change in self.found:
            now = {"_override_": True, **change.now} if isinstance(change.now, Mapping) else change.now
            put(tree, change.key.split("."), now)
        return tree


def changes_of(
    config: MasterConfig, layout: SmallLayout, *, steps: int, out: Path, model: Path, num_layers: int
) -> Changes:
    """Return everything that is other than in the recipe.

    Args:
        model: folder of the small model.
        num_layers: of that model.

    Raises:
        ConfigError: the recipe is of supervised training.
    """
    if config.sft.enabled:
        raise ConfigError(
            "sft.enabled: a small run is compared by its kept steps, which supervised training does not keep; run the "
            "recipe itself with grpo.max_num_steps=2 and a smaller policy.train_global_batch_size"
        )
    changes = Changes(config)
    _model(changes, config, model)
    _layout(changes, config, layout, num_layers)
    if config.loss_fn.distillation.enabled:
        _teacher(changes, config, model.parent / TEACHER)
    _batches(changes, config, layout)
    _lengths(changes, config, layout)
    _prompts(changes, config)
    _steps(changes, config, steps)
    _store(changes, config)
    _outputs(changes, out)
    return changes


def _model(changes: Changes, config: MasterConfig, model: Path) -> None:
    changes.set("policy.model_name", str(model), "a small random model of its family")
    lora = config.policy.lora
    if lora.enabled and lora.rank > SMALL_RANK:
        changes.set("policy.lora.rank", SMALL_RANK, "narrow layers")
        ratio = SMALL_RANK / lora.rank
        changes.set("policy.lora.alpha", lora.alpha * (ratio**0.5 if lora.rslora else ratio), "the same scale")
    if lora.adapter is not None:
        changes.set("policy.lora.adapter", None, "it is of the real model")
        changes.set("policy.lora.reference", "base", "no adapter to start from")
    own = ("tokenizer.name", "tokenizer.chat_template", "generation.stop_token_ids")
    changes.set_all("policy", dict.fromkeys(own), "the tokenizer of the small model")
    changes.set("policy.precision", "float32", "one process must give the same numbers")


def _layout(changes: Changes, config: MasterConfig, layout: SmallLayout, num_layers: int) -> None:
    policy, sizes = config.policy, layout.sizes
    changes.set("cluster.num_nodes", 1, ONE_MACHINE)
    changes.set("cluster.gpus_per_node", 0, NO_GPU)
    if config.cluster.launcher == "ray":
        changes.set("cluster.cpu_workers_per_node", layout.workers, "gloo ranks in place of GPUs")
    changes.set_all(
        "cluster", {"address": None, "num_cpus": None, "spare_nodes": 0, "threads_per_worker": 1}, ONE_MACHINE
    )
    changes.cap("cluster.stage_timeout_s", STAGE_S, "a layout that hangs ends")
    changes.cap("cluster.collective_timeout_s", COLLECTIVE_S, "a layout that hangs ends")
    same: dict[str, object] = {"context_parallel_size": sizes.context, "sequence_parallel": sizes.sequence_parallel}
    if not policy.megatron_cfg.enabled:
        section = "policy.dtensor_cfg"
        same |= {"tensor_parallel_size": sizes.tensor, "replicate_size": sizes.copies}
        changes.set_all(section, same, TWO)
        changes.set(f"{section}.cpu_offload", False, NO_GPU)
        return
    axes: dict[str, object] = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
    }
    if policy.megatron_cfg.expert_tensor_parallel_size is not None or sizes.expert_tensor != sizes.tensor:
        axes["expert_tensor_parallel_size"] = sizes.expert_tensor
    changes.set_all("policy.megatron_cfg", {**axes, **same}, TWO)
    _megatron(changes, config, layout, num_layers)


def _teacher(changes: Changes, config: MasterConfig, model: Path) -> None:
    section, sizes = "loss_fn.distillation", teacher_sizes(config)
    changes.set(f"{section}.teacher.model_name", str(model), "a small random model of the policy's family")
    changes.set(f"{section}.teacher.precision", None, "that of the policy")
    axes = {f"{name}_parallel_size": getattr(sizes, name) for name in ("tensor", "context", "pipeline", "expert")}
    changes.set_all(f"{section}.teacher", {"num_workers": _fewest(sizes), **axes}, TWO)
    changes.cap(f"{section}.top_k", SMALL_TOP_K, "the vocabulary of the small model")


def teacher_sizes(config: MasterConfig) -> ParallelSizes:
    """Return the sizes of the axes of a teacher here."""
    return _capped(config.teacher_policy.parallel_sizes)


def _megatron(changes: Changes, config: MasterConfig, layout: SmallLayout, num_layers: int) -> None:
    megatron, section = config.policy.megatron_cfg, "policy.megatron_cfg"
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    is_piped = layout.sizes.pipeline > 1
    # Unequal stages stay unequal; with two stages the other one has the rest.
    fewer = max(1, num_layers // layout.sizes.pipeline - 1)
    if first is not None:
        changes.set(f"{section}.num_layers_in_first_pipeline_stage", fewer if is_piped else None, "few layers")
    if last is not None:
        rest = num_layers - fewer if first is not None else fewer
        changes.set(f"{section}.num_layers_in_last_pipeline_stage", rest if is_piped else None, "few layers")
    if megatron.activation_checkpointing and megatron.recompute_granularity == "full":
        changes.set(f"{section}.recompute_num_layers", 1, "few layers")
    tree = megatron.model_dump()
    for name in ON_GPUS:
        _, value = lookup(tree, name.split("."))
        if value is True:
            default = None if name in ("moe_grouped_gemm", "optimizer.use_distributed_optimizer") else False
            changes.set(f"{section}.{name}", default, NO_GPU)
    changes.set(f"{section}.optimizer.optimizer_offload_fraction", 0.0, NO_GPU)
    if "moe_act" in megatron.recompute_modules:
        modules = ["moe" if name == "moe_act" else name for name in megatron.recompute_modules]
        changes.set(f"{section}.recompute_modules", list(dict.fromkeys(modules)), NO_GPU)


def _batches(changes: Changes, config: MasterConfig, layout: SmallLayout) -> None:
    grpo, policy = config.grpo, config.policy
    group = min(grpo.num_generations_per_prompt, GROUP)
    real_rows = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    updates = min(real_rows // policy.train_global_batch_size, 2)
    rows_per_pass = min(policy.train_micro_batch_size, 2)
    # Each rank has two microbatches in each update, and updates begin with whole groups.
    unit = math.lcm(layout.data * rows_per_pass * 2, group)
    batch = unit * -(-ROWS // (updates * unit))
    rows = {"num_generations_per_prompt": group, "num_prompts_per_step": batch * updates // group}
    changes.set_all("grpo", rows, SMALL_BATCH)
    changes.set("policy.train_global_batch_size", batch, SMALL_BATCH)
    if not (policy.sequence_packing.is_on or policy.dynamic_batching.enabled):
        changes.cap("policy.train_micro_batch_size", rows_per_pass, SMALL_BATCH)
        changes.cap("policy.logprob_batch_size", 2 * rows_per_pass, SMALL_BATCH)
    changes.cap("policy.generation.num_replicas", 2, ONE_MACHINE)
    changes.cap("policy.generation.max_batch_size", BATCH_ROWS, SMALL_BATCH)
    if not policy.generation.colocated.enabled:
        changes.set("policy.generation.colocated.gpus_per_node", 0, NO_GPU)
        changes.set("policy.generation.colocated.num_nodes", 0, ONE_MACHINE)
    if policy.generation.refit_transport == "ipc":
        changes.set("policy.generation.refit_transport", "payload", NO_GPU)


def _lengths(changes: Changes, config: MasterConfig, layout: SmallLayout) -> None:
    policy = config.policy
    multiple = math.lcm(policy.make_sequence_length_divisible_by, layout.sizes.length_multiple)
    if policy.make_sequence_length_divisible_by > 2 * layout.sizes.length_multiple:
        changes.set("policy.make_sequence_length_divisible_by", 2 * layout.sizes.length_multiple, SMALL_ROWS)
        multiple = 2 * layout.sizes.length_multiple
    total = -(-(PROMPT_TOKENS + NEW_TOKENS) // multiple) * multiple
    changes.set("policy.max_total_sequence_length", total, SMALL_ROWS)
    changes.set("policy.generation.max_new_tokens", NEW_TOKENS, SMALL_ROWS)
    changes.set("data.max_input_seq_length", PROMPT_TOKENS, SMALL_ROWS)
    for name, section in (("sequence_packing", policy.sequence_packing), ("dynamic_batching", policy.dynamic_batching)):
        if section.is_on:
            caps = {"train_mb_tokens": section.train_mb_tokens, "logprob_mb_tokens": section.logprob_mb_tokens}
            for key, cap in caps.items():
                sequences = max(1, min(cap // policy.max_total_sequence_length, CAP_SEQUENCES))
                changes.set(f"policy.{name}.{key}", sequences * total, SMALL_ROWS)


def _prompts(changes: Changes, config: MasterConfig) -> None:
    why = "prompts that a small tokenizer can write"
    for name, size, seed in (("train", 256, TRAIN_SEED), ("validation", VALIDATION_ROWS, VALIDATION_SEED)):
        if getattr(config.data, name) is not None:
            options = {"min_digits": 4, "max_digits": 8}
            generated = {"dataset_name": "sort_digits", "size": size, "seed": seed, "options": options}
            changes.set(f"data.{name}", generated, why)
    if config.data.validation_sets:
        changes.set("data.validation_sets", {}, why)
    if config.data.curriculum.is_on:
        changes.set("data.curriculum", {}, "one source, and few steps")
    _sampling(changes, config.grpo)
    changes.set("env", {"name": "custom", "reward_function": REWARD}, "a reward that differs from sample to sample")
    changes.set("grpo.stop_at_validation_accuracy", None, "all steps run")
    if config.is_accuracy and config.checkpointing.metric_name.endswith(":accuracy"):
        metric = config.checkpointing.metric_name.removesuffix("accuracy") + "reward"
        changes.set("checkpointing.metric_name", metric, "another reward")


def _sampling(changes: Changes, grpo: GRPOConfig) -> None:
    """Change the keys that depend on rewards and lengths, which differ here."""
    if grpo.use_dynamic_sampling:
        why = "rewards that differ in every group, steps that are run again"
        changes.set("grpo.use_dynamic_sampling", False, why)
        for name in ("batch_multiplier", "dynamic_sampling_max_gen_batches"):
            changes.set(f"grpo.{name}", type(grpo).model_fields[name].default, why)
    shaping = grpo.reward_shaping
    if shaping.enabled and shaping.stop_properly_penalty_coef is None:
        lengths = {"max_response_length": NEW_TOKENS, "overlong_buffer_length": NEW_TOKENS // 4}
        changes.set_all("grpo.reward_shaping", lengths, SMALL_ROWS)


def _steps(changes: Changes, config: MasterConfig, steps: int) -> None:
    changes.set_all("grpo", {"max_num_steps": steps, "max_num_epochs": None}, "few steps")
    if config.data.validation is not None:
        changes.cap("grpo.max_val_samples", VALIDATION_ROWS, SMALL_BATCH)
        changes.cap("grpo.val_period", steps, "few steps")
    if config.checkpointing.enabled:
        changes.set("checkpointing.save_period", steps, "one checkpoint, of the last step")
    changes.set_all(
        "checkpointing", {"resume": False, "load_optimizer": True, "checkpoint_dir": None, "staging_dir": None}, OWN
    )
    _rates(changes, config)


def _rates(changes: Changes, config: MasterConfig) -> None:
    """Set rates at which three steps move the weights by more than rounding does."""
    why = "an update that shows"
    if config.policy.megatron_cfg.enabled:
        changes.at_least("policy.megatron_cfg.optimizer.lr", RATE, why)
        changes.cap("policy.megatron_cfg.scheduler.lr_warmup_iters", 1, "few steps")
        changes.set("policy.megatron_cfg.scheduler.lr_decay_iters", None, "few steps")
        return
    if "lr" in config.policy.optimizer.kwargs:
        changes.at_least("policy.optimizer.kwargs.lr", RATE, why)
    if not config.policy.scheduler.phases:
        changes.cap("policy.scheduler.warmup_steps", 1, "few steps")
        changes.set("policy.scheduler.decay_steps", None, "few steps")


def _store(changes: Changes, config: MasterConfig) -> None:
    plane = config.active_data_plane
    if plane.impl == "transfer_queue" and plane.backend == "simple":
        changes.cap("data_plane.simple.num_storage_units", 2, ONE_MACHINE)
    if plane.is_guest_of_queue:
        changes.set("data_plane.transfer_queue.connect", False, ONE_MACHINE)
    changes.set("data_plane.storage_capacity.bytes", None, SMALL_BATCH)
    if not plane.uses_mooncake:
        return
    if not _is_installed(plane):
        missing = "mooncake is not installed here"
        if plane.is_queue_on_mooncake:
            changes.set("data_plane.backend", "simple", missing)
        else:
            changes.set("data_plane.impl", "transfer_queue", missing)
        return
    local = {"host": "127.0.0.1", "master_address": None, "protocol": "tcp", "device_name": ""}
    changes.set_all("data_plane.mooncake", local, ONE_MACHINE)
    for name in ("segment_bytes", "local_buffer_bytes"):
        changes.cap(f"data_plane.mooncake.{name}", SEGMENT_BYTES, SMALL_BATCH)


def _is_installed(plane: DataPlaneConfig) -> bool:
    try:
        kind_named(plane.impl or "ray").check_installed(plane)
    except UserError:
        return False
    return True


def _outputs(changes: Changes, out: Path) -> None:
    off = ("tensorboard_enabled", "wandb_enabled", "mlflow_enabled", "reward_curve", "live_panel")
    logger = {"log_dir": str(out / "run"), "overwrite": True, **dict.fromkeys(off, False), "trackers": []}
    changes.set_all("logger", logger, OWN)
    changes.set_all("diagnostics", {"tracer.enabled": False, "record.steps": []}, OWN)
    changes.set("diagnostics.keep_steps.enabled", True, "the steps are run again in one process")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        name = value.get("dataset_name") or value.get("reward_function") or value.get("name")
        return str(name)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
