"""Every rule over several keys: what would be ignored, or cannot work, is refused when the recipe is loaded.

Each rule is one function `rule_*(config)` that yields its problems; a line starts with the dotted path of the key to
change. All rules run, so that all problems are reported at once. The loader calls them. A new rule is a new function
beside the section it is about; rules about prompts, the cluster, checkpoints and the logger are here.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config import (
    async_grpo,
    conversation,
    data_plane,
    diagnostics,
    distillation,
    dtensor,
    evaluation,
    generation,
    lora,
    loss,
    megatron,
    policy,
    rewards,
    router_replay,
)
from nemo_rl.config.base import Section
from nemo_rl.config.parts import (
    ADVANTAGE_ESTIMATORS,
    DATASETS,
    ENGINES,
    ENVIRONMENTS,
    GENERATED_DATASETS,
    LOSSES,
    PROGRAM,
    STORES,
    TURN_ENVIRONMENTS,
    PluginKind,
)
from nemo_rl.config.rule import Rule, keys_besides_the_switch, rules_in, would_be_ignored
from nemo_rl.config.schema import DatasetConfig, MasterConfig

__all__ = ["RULES"]


def rule_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    policy, tracer, steps = config.policy, config.diagnostics.tracer, config.diagnostics.keep_steps
    receipt = policy.generation.receipt
    sections: tuple[tuple[str, Section, bool], ...] = (
        ("policy.generation.receipt", receipt, receipt.enabled),
        ("policy.lora", policy.lora, policy.lora.enabled),
        ("policy.router_replay", policy.router_replay, policy.router_replay.enabled),
        ("diagnostics.keep_steps", steps, steps.enabled),
        ("diagnostics.tracer", tracer, tracer.enabled),
    )
    for prefix, section, is_on in sections:
        if not is_on:
            yield from would_be_ignored(section, prefix, keys_besides_the_switch(section), switch=f"{prefix}.enabled")
    if not tracer.enabled:
        switches = type(policy.tracer).model_fields
        yield from would_be_ignored(policy.tracer, "policy.tracer", switches, switch="diagnostics.tracer.enabled")


def rule_lengths_fit(config: MasterConfig) -> Iterator[str]:
    policy, prompt = config.policy, config.data.max_input_seq_length
    new, total = policy.generation.max_new_tokens, policy.max_total_sequence_length
    if new is None and prompt >= total:
        yield (
            f"policy.max_total_sequence_length: {total} leaves no token for the response to a prompt of "
            f"data.max_input_seq_length {prompt}; lower that to at most {total - 1}"
        )
    elif new is not None and prompt + new > total:
        yield (
            f"policy.max_total_sequence_length: {total} does not hold data.max_input_seq_length {prompt} + "
            f"policy.generation.max_new_tokens {new} = {prompt + new}"
        )


# ---- prompts and rewards


def rule_dataset_keys_fit_their_kind(config: MasterConfig) -> Iterator[str]:
    train = config.data.train
    lines = _dataset_lines(train, "data.train")
    for name, dataset in config.data.held_out.items():
        lines += _dataset_lines(dataset, config.data.held_out_key(name))
    because = "training prompts have no tables"
    yield from lines + would_be_ignored(train, "data.train", ["category_key"], switch="data.train", because=because)


def _dataset_lines(dataset: DatasetConfig, prefix: str) -> list[str]:
    name = dataset.dataset_name
    lines, ignored = [], []
    if not DATASETS.is_builtin(name):
        # What a user-defined dataset reads of its section is not known here.
        return _template_lines(dataset, prefix)
    is_on_hub = DATASETS.is_on_hub(name)
    ignored += [] if is_on_hub or name == "huggingface" else ["subset"]
    if is_on_hub:
        ignored += ["data_path", "seed", "options"]
    elif name in GENERATED_DATASETS:
        ignored += ["data_path", "split", "input_key", "output_key", "image_key"]
        if dataset.size is None:
            lines.append(f"{prefix}.size: must be set: {name} is generated")
    else:
        ignored += ["seed", "options"]
        if dataset.data_path is None:
            lines.append(f"{prefix}.data_path: must be set: {name} reads local files")
    if name == "jsonl":
        ignored.append("split")
    if name == "reasoning_gym":
        if dataset.task is None:
            lines.append(f"{prefix}.task: must be set to a reasoning_gym task, for example chain_sum")
    else:
        ignored.append("task")
    options = GENERATED_DATASETS.get(name)
    if options is not None:
        unknown = [option for option in dataset.options if option not in options]
        lines += [f"{prefix}.options.{o}: {name} takes {' and '.join(options)} only" for o in unknown]
    lines += _template_lines(dataset, prefix)
    switch = f"{prefix}.dataset_name"
    return lines + would_be_ignored(dataset, prefix, ignored, switch=switch, because=f"{switch} is {name!r}")


def _template_lines(dataset: DatasetConfig, prefix: str) -> list[str]:
    if "{input}" in dataset.prompt_template:
        return []
    return [f"{prefix}.prompt_template: expected a text with {{input}}, got {dataset.prompt_template!r}"]


def rule_images_need_single_turns_and_dtensor(config: MasterConfig) -> Iterator[str]:
    if not config.data.has_images:
        return
    data = config.data
    sources = {"data.train": data.train, **{data.held_out_key(name): source for name, source in data.held_out.items()}}
    where, source = next((where, source) for where, source in sources.items() if source.has_images)
    key = f"{where}.{'dataset_name' if source.image_key is None else 'image_key'}"
    if config.experience.conversation.enabled:
        yield f"{key}: prompts have images, and conversations are of text alone; leave one of them out"
    if config.policy.megatron_cfg.enabled:
        yield (
            f"{key}: prompts have images, and the Megatron worker has models of text alone; set "
            "policy.dtensor_cfg.enabled=true and policy.megatron_cfg.enabled=false"
        )


def rule_extra_columns_can_be_written(config: MasterConfig) -> Iterator[str]:
    for name, column in config.data.extra_columns.items():
        key, is_object = f"data.extra_columns.{name}", column.dtype == "object"
        if is_object and column.dims:
            yield f"{key}.dims: a column of objects has none, got {list(column.dims)}"
        if is_object and set(column.read_by) - {"log"}:
            yield f"{key}.read_by: passes read tensors; of objects expected log alone, got {list(column.read_by)}"
        if "T" in column.dims[1:]:
            yield f"{key}.dims: T can only be the first dim, got {list(column.dims)}"
        if column.source == "environment" and ENVIRONMENTS.is_builtin(config.env.name):
            yield (
                f"{key}.source: the environment {config.env.name!r} returns no columns; name your own in env.name "
                "(module:Class), whose EnvReport has them, or set source to prompt"
            )


def rule_options_need_a_plugin(config: MasterConfig) -> Iterator[str]:
    plane, generation = config.active_data_plane, config.policy.generation
    parts: list[tuple[Section, str, str, PluginKind]] = [
        (config.loss_fn, "loss_fn.name", config.loss_fn.name, LOSSES),
        (config.grpo.adv_estimator, "grpo.adv_estimator.name", config.grpo.adv_estimator.name, ADVANTAGE_ESTIMATORS),
        (config.env, "env.name", config.env.name, ENVIRONMENTS),
        (generation, "policy.generation.backend", generation.backend, ENGINES),
        (plane, "data_plane.impl", plane.impl or "noop", STORES),
    ]
    for section, switch, name, kind in parts:
        has_options = kind is ENVIRONMENTS and (name in TURN_ENVIRONMENTS or name == PROGRAM)
        if kind.is_builtin(name) and not has_options:
            prefix = switch.rpartition(".")[0]
            yield from would_be_ignored(section, prefix, ["options"], switch=switch, because=f"{switch} is {name!r}")


def rule_custom_reward_needs_a_function(config: MasterConfig) -> Iterator[str]:
    name, function = config.env.name, config.env.reward_function
    if name == "custom" and function is None:
        yield "env.reward_function: must be set to module:function or FILE.py:function when env.name is 'custom'"
    elif name not in ("custom", PROGRAM) and function is not None:
        because = f"env.name is {name!r}"
        yield from would_be_ignored(config.env, "env", ["reward_function"], switch="env.name", because=because)
    elif function is not None and not all(part.strip() for part in function.partition(":")):
        yield f"env.reward_function: expected module:function or FILE.py:function, got {function!r}"


def rule_reasoning_gym_reward_needs_its_prompts(config: MasterConfig) -> Iterator[str]:
    if config.env.name != "reasoning_gym":
        return
    data = config.data
    datasets = {"data.train": data.train} | {data.held_out_key(name): held for name, held in data.held_out.items()}
    yield from (
        f"{prefix}.dataset_name: env.name 'reasoning_gym' scores reasoning_gym prompts only, got {d.dataset_name!r}"
        for prefix, d in datasets.items()
        if d.dataset_name != "reasoning_gym"
    )


def rule_scorer_keys_fit_the_environment(config: MasterConfig) -> Iterator[str]:
    env = config.env
    if not ENVIRONMENTS.is_builtin(env.name):
        # What a user-defined environment reads of its section is not known here; a threshold is what ours apply.
        because = f"env.name is {env.name!r}"
        yield from would_be_ignored(env, "env", ["score_threshold"], switch="env.name", because=because)
        return
    has_function = env.name == "custom" or (env.name == PROGRAM and env.reward_function is not None)
    has_turns = env.name in TURN_ENVIRONMENTS or env.name == PROGRAM
    ignored = [] if env.name != "sort" else ["timeout_s", "on_timeout", "num_workers"]
    if env.name != "reasoning_gym" and not has_function:
        ignored.append("score_threshold")
    if not has_function:
        ignored += ["reward_weights", "reward_batch_size", "preflight_reward"]
    if has_turns and not has_function:
        # What is late there ends a conversation as env_error.
        ignored.append("on_timeout")
    if env.name == PROGRAM and not has_function:
        ignored.append("num_workers")
    if not has_turns:
        ignored.append("memory_mib")
    if not has_turns or env.name == PROGRAM:
        ignored.append("network")
    yield from would_be_ignored(env, "env", ignored, switch="env.name", because=f"env.name is {env.name!r}")


def rule_accuracy_needs_binary_rewards(config: MasterConfig) -> Iterator[str]:
    env = config.env
    if env.is_accuracy:
        return
    graded = f"env.name {env.name!r} gives graded rewards"
    if config.grpo.stop_at_validation_accuracy is not None:
        yield f"grpo.stop_at_validation_accuracy: {graded}; set env.score_threshold, or null"
    if config.checkpointing.enabled and config.checkpointing.metric_name in ("val:accuracy", "train:accuracy"):
        yield f"checkpointing.metric_name: {graded}, so no accuracy is logged; set val:reward, or env.score_threshold"


# ---- files


def rule_checkpoint_keys_need_checkpointing(config: MasterConfig) -> Iterator[str]:
    checkpointing = config.checkpointing
    if checkpointing.enabled:
        return
    if checkpointing.resume:
        yield "checkpointing.resume: needs checkpointing.enabled=true"
        return
    ranking = ("keep_top_k", "metric_name", "higher_is_better")
    names = ("save_period", *ranking, "save_optimizer", "async_save", "must_save_by")
    switch = "checkpointing.enabled"
    yield from would_be_ignored(checkpointing, "checkpointing", names, switch=switch)


def rule_checkpoint_metric_is_logged(config: MasterConfig) -> Iterator[str]:
    checkpointing = config.checkpointing
    if not checkpointing.enabled:
        return
    if checkpointing.keep_top_k is None:
        names, switch = ("metric_name", "higher_is_better"), "checkpointing.keep_top_k"
        because = f"{switch} is null: all are kept"
        yield from would_be_ignored(checkpointing, "checkpointing", names, switch=switch, because=because)
        return
    area, _, metric = checkpointing.metric_name.partition(":")
    if area not in ("val", "train") or not metric:
        yield f"checkpointing.metric_name: expected val:NAME or train:NAME, got {checkpointing.metric_name!r}"
    elif config.checkpoint_metric.startswith("val:") and not config.has_validation:
        yield (
            f"checkpointing.metric_name: {checkpointing.metric_name!r} is never measured without validation; "
            "set train:reward, or keep_top_k=null, or add data.validation"
        )


def rule_resume_needs_the_optimizer(config: MasterConfig) -> Iterator[str]:
    section = config.checkpointing
    if section.resume and not section.save_optimizer:
        yield "checkpointing.save_optimizer: false cannot be resumed from; set it to true, or resume=false"
    elif not section.resume:
        switch = "checkpointing.resume"
        because = f"{switch} is false"
        # A replay of kept steps compares as well.
        names = ["load_optimizer"] if config.diagnostics.keep_steps.enabled else ["load_optimizer", "allow_changed"]
        yield from would_be_ignored(section, "checkpointing", names, switch=switch, because=because)


def rule_resume_excludes_overwrite(config: MasterConfig) -> Iterator[str]:
    if config.checkpointing.resume and config.logger.overwrite:
        yield "logger.overwrite: removes the run that checkpointing.resume continues; leave one of them out"


def rule_tracker_keys_need_their_tracker(config: MasterConfig) -> Iterator[str]:
    logger = config.logger
    trackers: list[tuple[str, bool, Section]] = [
        ("wandb", logger.wandb_enabled, logger.wandb),
        ("mlflow", logger.mlflow_enabled, logger.mlflow),
    ]
    for name, is_on, section in trackers:
        if not is_on:
            switch, names = f"logger.{name}_enabled", tuple(type(section).model_fields)
            yield from would_be_ignored(section, f"logger.{name}", names, switch=switch)


# ---- processes and machines


def rule_cpu_workers_need_no_gpus(config: MasterConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.cpu_workers_per_node is not None and cluster.gpus_per_node > 0:
        because = f"cluster.gpus_per_node is {cluster.gpus_per_node}"
        yield from would_be_ignored(
            cluster, "cluster", ["cpu_workers_per_node"], switch="cluster.gpus_per_node", because=because
        )


def rule_local_launcher_needs_one_process(config: MasterConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.launcher != "local":
        return
    if cluster.num_workers > 1:
        yield (
            f"cluster.launcher: 'local' runs one worker in this process, got {cluster.num_workers}; "
            "set cluster.cpu_workers_per_node=1 (or gpus_per_node=1) and num_nodes=1, or launcher=ray"
        )
    replicas = config.policy.generation.num_replicas
    if replicas > 1:
        yield f"policy.generation.num_replicas: one process holds one engine, got {replicas}; set it to 1"
    names = ("address", "num_cpus")
    because = "cluster.launcher is 'local'"
    yield from would_be_ignored(cluster, "cluster", names, switch="cluster.launcher", because=because)


def rule_several_nodes_need_an_address(config: MasterConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.address is not None and cluster.num_cpus is not None:
        yield "cluster.num_cpus: would be ignored, because cluster.address names a running Ray cluster; leave it out"
    if cluster.launcher == "ray" and cluster.num_nodes > 1 and cluster.address is None:
        yield f"cluster.num_nodes: {cluster.num_nodes} nodes need a running Ray cluster; set cluster.address=auto"


def rule_env_vars_need_processes(config: MasterConfig) -> Iterator[str]:
    if config.cluster.launcher != "local":
        return
    policy = config.policy
    sections: dict[str, Section] = {
        "cluster": config.cluster,
        "policy.generation": policy.generation,
        policy.parallel_section: policy.megatron_cfg if policy.megatron_cfg.enabled else policy.dtensor_cfg,
    }
    given = {"switch": "cluster.launcher", "because": "cluster.launcher is 'local': export them instead"}
    lines = [line for name, each in sections.items() for line in would_be_ignored(each, name, ("env_vars",), **given)]
    given["because"] = "cluster.launcher is 'local'"
    yield from lines + would_be_ignored(config.logger, "logger", ("worker_level",), **given)


_SECTIONS = (
    async_grpo,
    conversation,
    data_plane,
    diagnostics,
    distillation,
    dtensor,
    evaluation,
    generation,
    lora,
    loss,
    megatron,
    policy,
    rewards,
    router_replay,
)
"""Modules of `nemo_rl.config` whose rules stand beside their section."""

_ALL = rules_in(globals()) | {name: rule for module in _SECTIONS for name, rule in rules_in(vars(module)).items()}

RULES: tuple[Rule, ...] = tuple(_ALL[name] for name in sorted(_ALL))
"""Every rule, sorted by name."""
