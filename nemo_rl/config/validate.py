"""Rules over several keys: what would be ignored, or cannot work, is refused when the recipe is loaded.

Each rule is one function `rule_*(config) -> list[str]`; a line starts with the dotted path of the key to change. All
rules run, so that all problems are reported at once. Called by the loader; add a rule by adding a function, here or
where those of processes, loss, rewards and policy are: `validate_cluster`, `validate_loss`, `validate_rewards`,
`validate_policy`, `validate_megatron` and `validate_router_replay`.
"""

from __future__ import annotations

from nemo_rl.config import (
    validate_cluster,
    validate_loss,
    validate_megatron,
    validate_policy,
    validate_rewards,
    validate_router_replay,
)
from nemo_rl.config.base import Section
from nemo_rl.config.ignored import Ignored, would_be_ignored
from nemo_rl.config.parts import ADVANTAGE_ESTIMATORS, DATASETS, ENGINES, ENVIRONMENTS, LOSSES, STORES, PartKind
from nemo_rl.config.rule import Rule, rules_in
from nemo_rl.config.schema import DatasetConfig, MasterConfig

__all__ = ["RULES"]


# ---- data plane


def rule_data_plane_fits_launcher(config: MasterConfig) -> list[str]:
    impl, launcher = config.active_data_plane.impl, config.cluster.launcher
    if impl in ("noop", "shm") and launcher == "ray":
        reach = "keeps rows in one process" if impl == "noop" else "joins processes of one node without Ray"
        return [f"data_plane.impl: {impl!r} {reach}; set impl=ray (shared memory: ray.owner=node)"]
    if impl in ("ray", "transfer_queue") and launcher == "local":
        return [f"data_plane.impl: {impl!r} lives in Ray; set cluster.launcher=ray, or impl=noop"]
    return []


def rule_ledger_host_fits_launcher(config: MasterConfig) -> list[str]:
    host, cluster = config.data_plane.ledger_host, config.cluster
    if cluster.launcher == "local" and host == "ray_actor":
        return ["data_plane.ledger_host: 'ray_actor' needs Ray; set in_process or socket, or cluster.launcher=ray"]
    if cluster.launcher == "ray" and host == "in_process":
        return ["data_plane.ledger_host: 'in_process' cannot be reached by Ray actors; set ray_actor or socket"]
    if cluster.launcher == "ray" and host == "socket" and (cluster.num_nodes > 1 or cluster.address is not None):
        return ["data_plane.ledger_host: 'socket' serves one machine only; set ray_actor"]
    return []


def rule_store_sections_need_their_store(config: MasterConfig) -> list[str]:
    plane = config.active_data_plane
    is_node = plane.impl == "ray" and plane.ray.owner == "node"
    used = {
        "ray": plane.impl == "ray",
        "shm": plane.impl == "shm" or is_node,
        "simple": plane.impl == "transfer_queue" and plane.backend == "simple",
        "mooncake": plane.uses_mooncake,
    }
    sections: dict[str, Section] = {
        "ray": plane.ray,
        "shm": plane.shm,
        "simple": plane.simple,
        "mooncake": plane.mooncake,
    }
    switch = "data_plane.impl" if config.data_plane.enabled else "data_plane.enabled"
    because = f"the store is {plane.impl!r}" + (f" with owner {plane.ray.owner!r}" if plane.impl == "ray" else "")
    lines: list[str] = []
    for name, section in sections.items():
        if not used[name]:
            names = tuple(type(section).model_fields)
            lines += would_be_ignored(section, f"data_plane.{name}", names, switch=switch, because=because)
    return lines


def rule_store_that_is_off_is_not_named(config: MasterConfig) -> list[str]:
    plane = config.data_plane
    if plane.enabled or plane.impl is None:
        return []
    switch, because = "data_plane.enabled", "data_plane.enabled is false"
    return would_be_ignored(plane, "data_plane", ("impl",), switch=switch, because=because)


def rule_leader_broadcast_needs_a_replica_group(config: MasterConfig) -> list[str]:
    policy = config.policy
    if config.data_plane.fetch_policy != "leader_broadcast" or policy.parallel_sizes.replica_size > 1:
        return []
    return [
        "data_plane.fetch_policy: 'leader_broadcast' needs ranks that share rows; set auto, or "
        f"{' or '.join(policy.replica_keys)} above 1"
    ]


def rule_backend_needs_transfer_queue(config: MasterConfig) -> list[str]:
    plane = config.active_data_plane
    if plane.backend == "simple" or plane.impl == "transfer_queue":
        return []
    return [
        f"data_plane.backend: {plane.backend!r} would be ignored, the store is {plane.impl!r}; set impl=transfer_queue"
    ]


def rule_mooncake_fits_its_user(config: MasterConfig) -> list[str]:
    plane, nodes = config.active_data_plane, config.cluster.num_nodes
    if not plane.uses_mooncake:
        return []
    lines = []
    if nodes > 1 and plane.mooncake.host.startswith("127."):
        lines.append(
            f"data_plane.mooncake.host: {nodes} nodes cannot reach {plane.mooncake.host}; set `node`, the driver's "
            "address in the Ray cluster, or another one in a trusted network"
        )
    if plane.is_queue_on_mooncake:
        names = ("master_address", "chunk_bytes")
        because = "TransferQueue names its objects alike in every run and makes its own sizes"
        switch = "data_plane.impl"
        lines += would_be_ignored(plane.mooncake, "data_plane.mooncake", names, switch=switch, because=because)
    return lines


# ---- rollouts


def rule_sampling_is_random_in_training(config: MasterConfig) -> list[str]:
    if config.policy.generation.temperature == 0:
        return [
            "policy.generation.temperature: 0 is greedy: all samples of a group are equal and nothing is learned; "
            "expected a number > 0 (greedy validation is val_temperature=0)"
        ]
    return []


def rule_lengths_fit(config: MasterConfig) -> list[str]:
    policy, prompt = config.policy, config.data.max_input_seq_length
    new, total = policy.generation.max_new_tokens, policy.max_total_sequence_length
    if new is None and prompt >= total:
        return [
            f"policy.max_total_sequence_length: {total} leaves no token for the response to a prompt of "
            f"data.max_input_seq_length {prompt}; lower that to at most {total - 1}"
        ]
    if new is not None and prompt + new > total:
        return [
            f"policy.max_total_sequence_length: {total} does not hold data.max_input_seq_length {prompt} + "
            f"policy.generation.max_new_tokens {new} = {prompt + new}"
        ]
    return []


# ---- validation


def rule_validation_needs_prompts(config: MasterConfig) -> list[str]:
    if config.data.validation is not None:
        return []
    grpo, switch = config.grpo, "data.validation"
    because = f"there is no {switch} ({switch}=null turns all validation off)"
    asked = {
        "val_period": grpo.val_period > 0,
        "val_at_start": grpo.val_at_start,
        "val_at_end": grpo.val_at_end,
        "stop_at_validation_accuracy": grpo.stop_at_validation_accuracy is not None,
    }
    lines: list[str] = [
        Ignored(f"grpo.{name}", f"{getattr(grpo, name)} ", switch=switch, because=because)
        for name, is_on in asked.items()
        if is_on
    ]
    lines += would_be_ignored(grpo, "grpo", ["max_val_samples"], switch=switch, because=because)
    lines += would_be_ignored(config.data, "data", ["validation_sets"], switch=switch, because=because)
    names = tuple(type(config.evaluation).model_fields)
    return lines + would_be_ignored(config.evaluation, "evaluation", names, switch=switch, because=because)


_NO_SET_NAMES = ("validation", "reward", "category")
"""`data.validation` itself, and what follows `val/` in the names of its metrics."""


def rule_validation_sets_have_names_of_their_own(config: MasterConfig) -> list[str]:
    return [
        f"data.validation_sets.{name}: is no name for a further set; expected another than {', '.join(_NO_SET_NAMES)}"
        for name in config.data.validation_sets
        if name in _NO_SET_NAMES
    ]


def rule_evaluation_has_enough_samples(config: MasterConfig) -> list[str]:
    section = config.evaluation
    lines = [
        f"evaluation.{name}: {k} is more than evaluation.num_samples {section.num_samples}; raise num_samples to {k}"
        for name, ks in (("pass_at", section.pass_at), ("majority_at", section.majority_at))
        for k in ks
        if k > section.num_samples
    ]
    if config.policy.generation.val_temperature == 0:
        because = "policy.generation.val_temperature is 0: all responses to a prompt are greedy"
        switch, names = "policy.generation.val_temperature", ("num_samples", "greedy")
        lines += would_be_ignored(section, "evaluation", names, switch=switch, because=because)
    return lines


def rule_validation_prompts_are_used(config: MasterConfig) -> list[str]:
    if config.data.validation is None or config.has_validation:
        return []
    lines = [
        "data.validation: is never used, because grpo.val_period is 0 and val_at_start and val_at_end are false; "
        "set it to null, or turn one of them on"
    ]
    if config.grpo.stop_at_validation_accuracy is not None:
        lines.append("grpo.stop_at_validation_accuracy: nothing is ever validated; set grpo.val_period")
    return lines


# ---- prompts and rewards


def rule_dataset_keys_fit_their_kind(config: MasterConfig) -> list[str]:
    train = config.data.train
    lines = _dataset_lines(train, "data.train")
    for name, dataset in config.data.held_out.items():
        lines += _dataset_lines(dataset, config.data.held_out_key(name))
    because = "training prompts have no tables"
    return lines + would_be_ignored(train, "data.train", ["category_key"], switch="data.train", because=because)


_GENERATED = ("sort_digits", "reasoning_gym")
_SORT_OPTIONS = ("min_digits", "max_digits")


def _dataset_lines(dataset: DatasetConfig, prefix: str) -> list[str]:
    name = dataset.dataset_name
    lines, ignored = [], []
    if not DATASETS.is_builtin(name):
        # What a user-defined dataset reads of its section is not known here.
        return _template_lines(dataset, prefix)
    is_on_hub = DATASETS.is_on_hub(name)
    ignored += [] if is_on_hub else ["subset"]
    if is_on_hub:
        ignored += ["data_path", "seed", "options"]
    elif name in _GENERATED:
        ignored += ["data_path", "split", "input_key", "output_key"]
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
    if name == "sort_digits":
        unknown = [option for option in dataset.options if option not in _SORT_OPTIONS]
        lines += [f"{prefix}.options.{o}: sort_digits takes {' and '.join(_SORT_OPTIONS)} only" for o in unknown]
    lines += _template_lines(dataset, prefix)
    switch = f"{prefix}.dataset_name"
    return lines + would_be_ignored(dataset, prefix, ignored, switch=switch, because=f"{switch} is {name!r}")


def _template_lines(dataset: DatasetConfig, prefix: str) -> list[str]:
    if "{input}" in dataset.prompt_template:
        return []
    return [f"{prefix}.prompt_template: expected a text with {{input}}, got {dataset.prompt_template!r}"]


def rule_options_need_a_part_of_your_own(config: MasterConfig) -> list[str]:
    lines: list[str] = []
    plane, generation = config.active_data_plane, config.policy.generation
    parts: list[tuple[Section, str, str, PartKind]] = [
        (config.loss_fn, "loss_fn.name", config.loss_fn.name, LOSSES),
        (config.grpo.adv_estimator, "grpo.adv_estimator.name", config.grpo.adv_estimator.name, ADVANTAGE_ESTIMATORS),
        (config.env, "env.name", config.env.name, ENVIRONMENTS),
        (generation, "policy.generation.backend", generation.backend, ENGINES),
        (plane, "data_plane.impl", plane.impl or "noop", STORES),
    ]
    for section, switch, name, kind in parts:
        if kind.is_builtin(name):
            prefix = switch.rpartition(".")[0]
            lines += would_be_ignored(section, prefix, ["options"], switch=switch, because=f"{switch} is {name!r}")
    return lines


def rule_custom_reward_is_named(config: MasterConfig) -> list[str]:
    name, function = config.env.name, config.env.reward_function
    if name == "custom" and function is None:
        return ["env.reward_function: must be set to module:function or FILE.py:function when env.name is 'custom'"]
    if name != "custom" and function is not None:
        because = f"env.name is {name!r}"
        return would_be_ignored(config.env, "env", ["reward_function"], switch="env.name", because=because)
    if function is not None and not all(part.strip() for part in function.partition(":")):
        return [f"env.reward_function: expected module:function or FILE.py:function, got {function!r}"]
    return []


def rule_reasoning_gym_scores_its_own_prompts(config: MasterConfig) -> list[str]:
    if config.env.name != "reasoning_gym":
        return []
    data = config.data
    datasets = {"data.train": data.train} | {data.held_out_key(name): held for name, held in data.held_out.items()}
    return [
        f"{prefix}.dataset_name: env.name 'reasoning_gym' scores reasoning_gym prompts only, got {d.dataset_name!r}"
        for prefix, d in datasets.items()
        if d.dataset_name != "reasoning_gym"
    ]


def rule_scorer_keys_fit_the_environment(config: MasterConfig) -> list[str]:
    env = config.env
    if not ENVIRONMENTS.is_builtin(env.name):
        # What a user-defined environment reads of its section is not known here; a threshold is what ours apply.
        because = f"env.name is {env.name!r}"
        return would_be_ignored(env, "env", ["score_threshold"], switch="env.name", because=because)
    ignored = [] if env.name != "sort" else ["timeout_s", "on_timeout", "num_workers"]
    if env.name not in ("reasoning_gym", "custom"):
        ignored.append("score_threshold")
    if env.name != "custom":
        ignored += ["reward_weights", "reward_batch_size"]
    return would_be_ignored(env, "env", ignored, switch="env.name", because=f"env.name is {env.name!r}")


def rule_accuracy_needs_rewards_that_are_right_or_wrong(config: MasterConfig) -> list[str]:
    env = config.env
    if env.is_accuracy:
        return []
    graded = f"env.name {env.name!r} gives graded rewards"
    lines = []
    if config.grpo.stop_at_validation_accuracy is not None:
        lines.append(f"grpo.stop_at_validation_accuracy: {graded}; set env.score_threshold, or null")
    if config.checkpointing.enabled and config.checkpointing.metric_name in ("val:accuracy", "train:accuracy"):
        lines.append(
            f"checkpointing.metric_name: {graded}, so no accuracy is logged; set val:reward, or env.score_threshold"
        )
    return lines


# ---- files


def rule_checkpoint_keys_need_checkpoints(config: MasterConfig) -> list[str]:
    checkpointing = config.checkpointing
    if checkpointing.enabled:
        return []
    if checkpointing.resume:
        return ["checkpointing.resume: needs checkpointing.enabled=true"]
    ranking = ("keep_top_k", "metric_name", "higher_is_better")
    names = ("save_period", *ranking, "save_optimizer", "async_save", "must_save_by")
    switch = "checkpointing.enabled"
    return would_be_ignored(checkpointing, "checkpointing", names, switch=switch, because=f"{switch} is false")


def rule_checkpoints_are_ranked_by_something_logged(config: MasterConfig) -> list[str]:
    checkpointing = config.checkpointing
    if not checkpointing.enabled:
        return []
    if checkpointing.keep_top_k is None:
        names, switch = ("metric_name", "higher_is_better"), "checkpointing.keep_top_k"
        because = f"{switch} is null: all are kept"
        return would_be_ignored(checkpointing, "checkpointing", names, switch=switch, because=because)
    area, _, metric = checkpointing.metric_name.partition(":")
    if area not in ("val", "train") or not metric:
        return [f"checkpointing.metric_name: expected val:NAME or train:NAME, got {checkpointing.metric_name!r}"]
    if config.checkpoint_metric.startswith("val:") and not config.has_validation:
        return [
            f"checkpointing.metric_name: {checkpointing.metric_name!r} is never measured without validation; "
            "set train:reward, or keep_top_k=null, or add data.validation"
        ]
    return []


def rule_resume_needs_the_optimizer(config: MasterConfig) -> list[str]:
    section = config.checkpointing
    if section.resume and not section.save_optimizer:
        return ["checkpointing.save_optimizer: false cannot be resumed from; set it to true, or resume=false"]
    if not section.resume:
        switch = "checkpointing.resume"
        because = f"{switch} is false"
        # A replay of kept steps compares as well.
        names = ["load_optimizer"] if config.diagnostics.keep_steps.enabled else ["load_optimizer", "allow_changed"]
        return would_be_ignored(section, "checkpointing", names, switch=switch, because=because)
    return []


def rule_a_run_is_resumed_or_overwritten(config: MasterConfig) -> list[str]:
    if config.checkpointing.resume and config.logger.overwrite:
        return ["logger.overwrite: removes the run that checkpointing.resume continues; leave one of them out"]
    return []


def rule_tracker_keys_need_their_tracker(config: MasterConfig) -> list[str]:
    logger, lines = config.logger, []
    trackers: list[tuple[str, bool, Section]] = [
        ("wandb", logger.wandb_enabled, logger.wandb),
        ("mlflow", logger.mlflow_enabled, logger.mlflow),
    ]
    for name, is_on, section in trackers:
        if not is_on:
            switch, names = f"logger.{name}_enabled", tuple(type(section).model_fields)
            lines += would_be_ignored(section, f"logger.{name}", names, switch=switch, because=f"{switch} is false")
    return lines


def rule_kept_steps_need_their_switch(config: MasterConfig) -> list[str]:
    section = config.diagnostics.keep_steps
    if section.enabled:
        return []
    prefix, names = "diagnostics.keep_steps", tuple(type(section).model_fields)
    switch = f"{prefix}.enabled"
    return would_be_ignored(section, prefix, names, switch=switch, because=f"{switch} is false")


def rule_recorded_sites_need_steps(config: MasterConfig) -> list[str]:
    section, prefix = config.diagnostics.record, "diagnostics.record"
    if section.steps:
        return []
    switch = f"{prefix}.steps"
    return would_be_ignored(section, prefix, ("sites", "phases"), switch=switch, because=f"{switch} names no step")


def rule_the_tracer_needs_its_switch(config: MasterConfig) -> list[str]:
    section, switches = config.diagnostics.tracer, config.policy.tracer
    if section.enabled:
        return []
    because = {"switch": "diagnostics.tracer.enabled", "because": "diagnostics.tracer.enabled is false"}
    lines = would_be_ignored(section, "diagnostics.tracer", tuple(type(section).model_fields), **because)
    return lines + would_be_ignored(switches, "policy.tracer", tuple(type(switches).model_fields), **because)


def rule_every_node_reaches_the_hub(config: MasterConfig) -> list[str]:
    section, num_nodes = config.diagnostics.tracer, config.cluster.num_nodes
    if not section.enabled or num_nodes == 1 or not section.host.startswith(("127.", "localhost", "::1")):
        return []
    return [
        f"diagnostics.tracer.host: {section.host!r} is reached from one node alone, and cluster.num_nodes is "
        f"{num_nodes}; set it to 0.0.0.0: then others on the network reach it, too, who need a token"
    ]


_OF_POLICY = validate_policy.RULES | validate_megatron.RULES | validate_router_replay.RULES
_OF_ALGORITHM = validate_loss.RULES | validate_rewards.RULES
_ALL = rules_in(globals()) | validate_cluster.RULES | _OF_ALGORITHM | _OF_POLICY

RULES: tuple[Rule, ...] = tuple(_ALL[name] for name in sorted(_ALL))
"""Every rule, by name."""
