"""Rules over prompts, rewards, conversations and the measurement of held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.base import Section
from nemo_rl.config.data import SHARED_KEYS, DatasetConfig
from nemo_rl.config.env import EnvConfig, program_command
from nemo_rl.config.parts import (
    ADVANTAGE_ESTIMATORS,
    DATASETS,
    ENGINES,
    ENVIRONMENTS,
    GENERATED_DATASETS,
    JUDGE,
    LOSSES,
    PROGRAM,
    STORES,
    TURN_ENVIRONMENTS,
    PluginKind,
)
from nemo_rl.config.rules.rule import Ignored, keys_besides_the_switch, would_be_ignored
from nemo_rl.config.schema import MasterConfig

__all__ = []


# ---- prompts and rewards


def rule_dataset_keys_fit_their_kind(config: MasterConfig) -> Iterator[str]:
    data, because = config.data, "training prompts have no tables"
    for where, dataset in data.sections.items():
        yield from _dataset_lines(dataset, where)
    for where, dataset in data.sources.items():
        yield from would_be_ignored(dataset, where, ["category_key"], switch=where, because=because)


def rule_keys_beside_sources_are_shared(config: MasterConfig) -> Iterator[str]:
    train, because = config.data.train, "data.train has several sources, each with a data set of its own"
    if train.named:
        own = [name for name in DatasetConfig.model_fields if name not in SHARED_KEYS]
        yield from would_be_ignored(train, "data.train", own, switch="data.train", because=because)


def rule_sources_have_shares(config: MasterConfig) -> Iterator[str]:
    data, grpo, named = config.data, config.grpo, config.data.train.named
    if not named:
        names = tuple(type(data.mixture).model_fields)
        yield from would_be_ignored(
            data.mixture, "data.mixture", names, switch="data.train", because="data.train is one source"
        )
        return
    if data.mixture.by == "weight":
        switch = "data.mixture.by"
        yield from would_be_ignored(
            data.mixture, "data.mixture", ["size_temperature"], switch=switch, because=f"{switch} is 'weight'"
        )
    if grpo.max_num_epochs is not None:
        yield (
            f"grpo.max_num_epochs: {grpo.max_num_epochs} is of one source, and data.train has {', '.join(named)}; set "
            "it to null, and max_num_epochs of a source that is to end the run"
        )
    by_tokens = data.mixture.unit == "tokens"
    if by_tokens and grpo.samples_ahead:
        yield (
            "data.mixture.unit: 'tokens' draws by what was trained, which an asynchronous run knows at another time in "
            "each run; set it to prompts, or grpo.async.enabled=false"
        )
    if grpo.use_dynamic_sampling or by_tokens:
        if grpo.use_dynamic_sampling and grpo.samples_ahead:
            yield (
                "grpo.use_dynamic_sampling: true draws others for groups of equal rewards, and an asynchronous run "
                "does not take them from the same source of data.train; set it to false, or grpo.async.enabled=false"
            )
        takes = "data.mixture.unit: tokens" if by_tokens else "grpo.use_dynamic_sampling"
        yield from (
            f"data.train.{name}.max_num_epochs: {source.max_num_epochs} ends a run that takes prompts in turns, and "
            f"{takes} takes those that are missing; set it to null"
            for name, source in named.items()
            if source.max_num_epochs is not None
        )
    for step in sorted({step for source in named.values() for step in source.weights}):
        if not any(source.weight_at(step) for source in named.values()):
            yield f"data.train.{next(iter(named))}.weight: is 0 at step {step} as those of all sources are; raise one"


def rule_sampling_of_sources_fits_the_run(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    most = {
        "grpo.num_generations_per_prompt": config.grpo.num_generations_per_prompt,
        "policy.generation.max_new_tokens": generation.max_new_tokens,
    }
    for name, source in config.data.train.named.items() if not config.sft.enabled else ():
        where = config.data.train_key(name)
        for key, asked in zip(most, (source.num_generations_per_prompt, source.max_new_tokens), strict=True):
            limit = most[key]
            if asked is not None and limit is not None and asked > limit:
                yield (
                    f"{where}.{key.rpartition('.')[2]}: {asked} is above {key} {limit}, which is the most of every "
                    "source; raise that one, and set this key of the sources that are to have fewer"
                )
        if source.max_new_tokens is not None and not ENGINES.is_builtin(generation.backend):
            yield (
                f"{where}.max_new_tokens: {generation.backend!r} is an engine of your own, of which it is not known "
                "that it takes a limit for each prompt; set it to null"
            )


def rule_groups_of_sources_fit_the_run(config: MasterConfig) -> Iterator[str]:
    grpo, batch = config.grpo, config.policy.train_global_batch_size
    most = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    for name, source in config.data.train.named.items():
        size = source.num_generations_per_prompt
        if config.sft.enabled or size is None or size >= grpo.num_generations_per_prompt:
            continue  # a larger one is refused above
        key = f"{config.data.train_key(name)}.num_generations_per_prompt"
        if batch != most:
            yield (
                f"{key}: {size} makes the rows of a step another number in each step, which are trained in one "
                "optimizer step; set policy.train_global_batch_size to grpo.num_prompts_per_step x "
                f"num_generations_per_prompt = {most}, got {batch}"
            )
        if grpo.async_.keep_finished:
            yield (
                f"{key}: {size} with grpo.async.keep_finished, which keeps groups of one size; set that to false, or "
                "keep finished groups in files (data_plane.durable.path)"
            )
        section = config.experience.conversation
        if section.enabled and section.min_scored > size:
            yield f"experience.conversation.min_scored: {section.min_scored} is more than {key} {size}; lower it"


def rule_tools_of_sections_are_those_of_the_run(config: MasterConfig) -> Iterator[str]:
    tools, switch = config.env.tools, "experience.conversation.enabled"
    known = [tool.name.rpartition(":")[2] for tool in tools.use]
    for where, section in config.data.sections.items() if not config.sft.enabled else ():
        if not config.experience.conversation.enabled:
            yield from would_be_ignored(section, where, ["tools"], switch=switch)
            continue
        for name in section.tools or ():
            if name not in known:
                yield (
                    f"{where}.tools: expected names of tools of env.tools.use ({', '.join(known) or 'which is empty'}),"
                    f" got {name!r}"
                )


def rule_curriculum_fits_the_run(config: MasterConfig) -> Iterator[str]:
    data, grpo, curriculum, switch = config.data, config.grpo, config.data.curriculum, "data.curriculum"
    if config.sft.enabled:
        return
    if not curriculum.is_on:
        keys, because = ["options", "passed_at", "smoothing", "recent_groups"], "no rule is set"
        yield from would_be_ignored(curriculum, switch, keys, switch=switch, because=because)
        return
    if curriculum.rule is None:
        because = f"{switch}.rule is null"
        yield from would_be_ignored(curriculum, switch, ["options"], switch=f"{switch}.rule", because=because)
    if curriculum.window is not None and curriculum.window.least > curriculum.window.most:
        yield f"{switch}.window.least: {curriculum.window.least} is above most, {curriculum.window.most}"
    yield from _gate_lines(config)
    epochs = {"grpo": grpo.max_num_epochs} | {
        data.train_key(name): each.max_num_epochs for name, each in data.train.named.items()
    }
    for where, count in epochs.items():
        if count is not None:
            yield (
                f"{where}.max_num_epochs: {count} counts passes over the prompts, and {switch} passes over some more "
                "often than over others; set it to null"
            )
    for path, env in config.envs.items():
        for name, judge in env.judges.items():
            if judge.mode != "pointwise":
                yield (
                    f"{path}.judges.{name}.mode: {judge.mode!r} compares the responses of a group, so its rewards do "
                    f"not say how well a prompt is solved, which {switch} asks; set it to pointwise, or leave {switch} "
                    "out"
                )
    if data.train.named and (grpo.use_dynamic_sampling or data.mixture.unit == "tokens"):
        takes = "grpo.use_dynamic_sampling" if grpo.use_dynamic_sampling else "data.mixture.unit"
        yield (
            f"{takes}: takes prompts of the source of which some are missing, and {switch} draws from several sources "
            "in their turns; turn one of the two off"
        )
    if grpo.samples_ahead and config.data_plane.durable.path is not None:
        yield (
            "data_plane.durable.path: finds finished groups by their place in the stream, which after a kill may have "
            f"another prompt with {switch} and an asynchronous run; set one of them to null"
        )


def _gate_lines(config: MasterConfig) -> Iterator[str]:
    gates, names = config.data.curriculum.gates, list(config.data.train.named)
    for name, gate in gates.items():
        where = f"data.curriculum.gates.{name}"
        for each in {name: None, gate.after: None}:
            if each not in names:
                known = ", ".join(names) or "it is one without a name"
                yield f"{where}: expected sources of data.train ({known}), got {each!r}"
        chain = [name]
        while (after := gates.get(chain[-1])) is not None and after.after not in chain:
            chain.append(after.after)
        if after is not None:
            yield f"{where}.after: {' after '.join([*chain, after.after])} never opens; leave one of these gates out"


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
    where, source = next((where, source) for where, source in config.data.sections.items() if source.has_images)
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
        *((env, f"{path}.name", env.name, ENVIRONMENTS) for path, env in config.envs.items()),
        (generation, "policy.generation.backend", generation.backend, ENGINES),
        (plane, "data_plane.impl", plane.impl or "noop", STORES),
    ]
    for section, switch, name, kind in parts:
        has_options = kind is ENVIRONMENTS and (name in TURN_ENVIRONMENTS or name == PROGRAM)
        if kind.is_builtin(name) and not has_options:
            prefix = switch.rpartition(".")[0]
            yield from would_be_ignored(section, prefix, ["options"], switch=switch, because=f"{switch} is {name!r}")


def rule_custom_reward_needs_a_function(config: MasterConfig) -> Iterator[str]:
    for path, env in config.envs.items():
        name, function, switch = env.name, env.reward_function, f"{path}.name"
        if name == "custom" and function is None:
            yield (
                f"{path}.reward_function: must be set to module:function or FILE.py:function when {switch} is 'custom'"
            )
        elif name not in ("custom", JUDGE, PROGRAM) and function is not None:
            because = f"{switch} is {name!r}"
            yield from would_be_ignored(env, path, ["reward_function"], switch=switch, because=because)
        elif function is not None and not all(part.strip() for part in function.partition(":")):
            yield f"{path}.reward_function: expected module:function or FILE.py:function, got {function!r}"


def rule_rewards_of_sections_have_no_turns(config: MasterConfig) -> Iterator[str]:
    name = config.env.name
    for path, env in config.envs.items():
        if path == "env":
            continue
        if name in TURN_ENVIRONMENTS or name == PROGRAM:
            yield f"{path}: env.name {name!r} takes turns, and gives the rewards of all rows; set {path} to null"
        if env.name in TURN_ENVIRONMENTS or env.name == PROGRAM:
            yield f"{path}.name: {env.name!r} takes turns, and a section of data has a reward alone; set env.name to it"
        because, names = "a section of data has a reward alone", tuple(type(env.tools).model_fields)
        yield from would_be_ignored(env.tools, f"{path}.tools", names, switch=f"{path}.name", because=because)


def rule_reasoning_gym_reward_needs_its_prompts(config: MasterConfig) -> Iterator[str]:
    yield from (
        f"{prefix}.dataset_name: {'env' if d.env is None else f'{prefix}.env'}.name 'reasoning_gym' scores "
        f"reasoning_gym prompts only, got {d.dataset_name!r}"
        for prefix, d in config.data.sections.items()
        if (d.env or config.env).name == "reasoning_gym" and d.dataset_name != "reasoning_gym"
    )


def rule_scorer_keys_fit_the_environment(config: MasterConfig) -> Iterator[str]:
    for path, env in config.envs.items():
        yield from _scorer_lines(env, path)


def _scorer_lines(env: EnvConfig, path: str) -> Iterator[str]:
    switch = f"{path}.name"
    if not ENVIRONMENTS.is_builtin(env.name):
        # What a user-defined environment reads of its section is not known here; a threshold is what ours apply.
        because = f"{switch} is {env.name!r}"
        names = ["score_threshold", "judges", "gates", "on_none"]
        yield from would_be_ignored(env, path, names, switch=switch, because=because)
        return
    has_function = env.name in ("custom", JUDGE) or (env.name == PROGRAM and env.reward_function is not None)
    has_turns = env.name in TURN_ENVIRONMENTS or env.name == PROGRAM
    ignored = [] if env.name != "sort" else ["timeout_s", "on_timeout", "num_workers"]
    if env.name != "reasoning_gym" and not has_function:
        ignored.append("score_threshold")
    if not has_function:
        ignored += ["reward_weights", "reward_batch_size", "preflight_reward", "on_none"]
    if has_turns and not has_function:
        # What is late there ends a conversation as env_error.
        ignored.append("on_timeout")
    if env.name == PROGRAM and not has_function:
        ignored.append("num_workers")
    if env.name == JUDGE and env.reward_function is None:
        ignored += ["timeout_s", "on_timeout", "num_workers", "reward_batch_size"]
    if env.name != JUDGE:
        ignored += ["judges", "gates"]
    if not has_turns:
        ignored.append("memory_mib")
    if not has_turns or env.name == PROGRAM:
        ignored.append("network")
    yield from would_be_ignored(env, path, ignored, switch=switch, because=f"{switch} is {env.name!r}")


def rule_none_is_told_apart_from_other_rows(config: MasterConfig) -> Iterator[str]:
    for path, env in config.envs.items():
        if env.on_none == "leave_out" and env.name == JUDGE:
            yield (
                f"{path}.on_none: leave_out is of functions alone, and {path}.name 'judge' has judges, which say by "
                "on_failure what becomes of a row; set it to error"
            )
        gated = next((other for other, each in config.envs.items() if each.gates), None)
        if env.on_none == "leave_out" and gated is not None and config.grpo.adv_estimator.name == "gdpo":
            yield (
                f"{path}.on_none: leave_out with grpo.adv_estimator.name 'gdpo' leaves a missing component out, and "
                f"behind {gated}.gates a missing one counts 0; set it to error, or leave the gates out"
            )


def rule_accuracy_needs_binary_rewards(config: MasterConfig) -> Iterator[str]:
    path, env = next(
        ((path, env) for path, env in config.measuring_envs.items() if not env.is_accuracy), ("", config.env)
    )
    if not path:
        return
    graded = f"{path}.name {env.name!r} gives graded rewards"
    if config.grpo.stop_at_validation_accuracy is not None:
        yield f"grpo.stop_at_validation_accuracy: {graded}; set {path}.score_threshold, or null"
    if config.checkpointing.enabled and config.checkpointing.metric_name in ("val:accuracy", "train:accuracy"):
        yield (
            f"checkpointing.metric_name: {graded}, so no accuracy is logged; set val:reward, or {path}.score_threshold"
        )


# ---- conversations


def rule_conversation_keys_need_conversations(config: MasterConfig) -> Iterator[str]:
    section, prefix = config.experience.conversation, "experience.conversation"
    if section.enabled:
        return
    names, switch = keys_besides_the_switch(section), f"{prefix}.enabled"
    yield from would_be_ignored(section, prefix, names, switch=switch)
    tools = tuple(type(config.env.tools).model_fields)
    yield from would_be_ignored(config.env.tools, "env.tools", tools, switch=switch)
    if config.data.history not in ("auto", "append"):
        yield from would_be_ignored(config.data, "data", ("history",), switch=switch)


def rule_keys_of_programs_need_programs(config: MasterConfig) -> Iterator[str]:
    section, prefix = config.experience.conversation, "experience.conversation"
    if not section.enabled:
        return
    if config.env.name != PROGRAM:
        names = ["max_rows", "side_requests", "equal_requests", "limit_answer"]
        because = f"env.name is {config.env.name!r}, and no program"
        yield from would_be_ignored(section, prefix, names, switch="env.name", because=because)
        if config.data.history == "branch":
            yield from would_be_ignored(config.data, "data", ("history",), switch="env.name", because=because)
    elif config.history != "branch":
        because = f"data.history is {config.history!r}"
        names = ["max_rows", "side_requests"]
        yield from would_be_ignored(section, prefix, names, switch="data.history", because=because)


def rule_branches_need_batches_of_any_size(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if config.data.history == "branch" and not (policy.sequence_packing.is_on or policy.dynamic_batching.enabled):
        yield (
            "data.history: branch gives any number of rows, and microbatches of a fixed number of rows take no other; "
            "set policy.sequence_packing.enabled or policy.dynamic_batching.enabled to true"
        )


def rule_tool_keys_need_tools(config: MasterConfig) -> Iterator[str]:
    section, prefix = config.env.tools, "env.tools"
    if section.use or not config.experience.conversation.enabled:
        return
    kept = ("use", "format") if config.env.name == PROGRAM else ("use",)
    names = tuple(name for name in type(section).model_fields if name not in kept)
    yield from would_be_ignored(section, prefix, names, switch=f"{prefix}.use", because=f"{prefix}.use names no tool")


def rule_programs_have_a_command(config: MasterConfig) -> Iterator[str]:
    if config.env.name != PROGRAM:
        return
    command = program_command(config.env.options)
    lines = [command] if isinstance(command, str) else []
    if config.env.tools.use:
        lines.append(
            f"env.tools.use: the program of env.name {PROGRAM!r} brings tools of its own in its requests; leave it "
            "empty"
        )
    yield from lines


def rule_environments_with_turns_need_conversations(config: MasterConfig) -> Iterator[str]:
    name = config.env.name
    if config.experience.conversation.enabled or not (name in TURN_ENVIRONMENTS or name == PROGRAM):
        return
    yield f"experience.conversation.enabled: env.name {name!r} is an environment with turns; set it to true"


def rule_rewards_of_conversations_have_no_length(config: MasterConfig) -> Iterator[str]:
    shaping = config.grpo.reward_shaping
    has_buffer = shaping.enabled and shaping.stop_properly_penalty_coef is None
    if config.experience.conversation.enabled and has_buffer:
        yield (
            "grpo.reward_shaping.overlong_buffer_length: the penalty is on the length of one response, and "
            "experience.conversation.enabled gives several turns; set grpo.reward_shaping.enabled=false, and "
            "experience.conversation.max_sampled_tokens as a limit"
        )


def rule_rewards_of_turns_stay_as_they_are(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if grpo.adv_estimator.name in ("outcome_plus_turn", "discounted_return"):
        yield from (
            f"grpo.{part}.enabled: true changes the reward of a conversation, and grpo.adv_estimator.name "
            f"{grpo.adv_estimator.name!r} reads those of its turns as they are; set it to false"
            for part, section in (("reward_scaling", grpo.reward_scaling), ("reward_shaping", grpo.reward_shaping))
            if section.enabled
        )


def rule_conversations_take_no_kl_from_rewards(config: MasterConfig) -> Iterator[str]:
    if config.experience.conversation.enabled and config.loss_fn.use_kl_in_reward:
        yield (
            "loss_fn.use_kl_in_reward: true takes the KL of one response from its reward, and "
            "experience.conversation.enabled gives several; set it to false, which adds the KL to the loss"
        )


def rule_conversations_are_not_kept_with_checkpoints(config: MasterConfig) -> Iterator[str]:
    if config.experience.conversation.enabled and config.grpo.async_.keep_finished:
        yield (
            "grpo.async.keep_finished: true keeps finished groups of single turns, and experience.conversation.enabled "
            "gives others; set it to false, which samples their prompts again"
        )


def rule_groups_have_enough_rows(config: MasterConfig) -> Iterator[str]:
    section, size = config.experience.conversation, config.grpo.num_generations_per_prompt
    if section.enabled and section.min_scored > size:
        yield (
            f"experience.conversation.min_scored: {section.min_scored} is more than grpo.num_generations_per_prompt "
            f"{size}; lower it"
        )


# ---- held-out prompts


def rule_validation_needs_prompts(config: MasterConfig) -> Iterator[str]:
    if config.data.validation is not None:
        return
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
    yield from lines + would_be_ignored(config.evaluation, "evaluation", names, switch=switch, because=because)


_NO_SET_NAMES = ("validation", "reward", "category")
"""`data.validation` itself, and what follows `val/` in the names of its metrics."""


def rule_validation_set_names_are_unique(config: MasterConfig) -> Iterator[str]:
    yield from (
        f"data.validation_sets.{name}: is no name for a further set; expected another than {', '.join(_NO_SET_NAMES)}"
        for name in config.data.validation_sets
        if name in _NO_SET_NAMES
    )


def rule_evaluation_has_enough_samples(config: MasterConfig) -> Iterator[str]:
    section = config.evaluation
    yield from (
        f"evaluation.{name}: {k} is more than evaluation.num_samples {section.num_samples}; raise num_samples to {k}"
        for name, ks in (("pass_at", section.pass_at), ("majority_at", section.majority_at))
        for k in ks
        if k > section.num_samples
    )
    if config.policy.generation.val_temperature == 0:
        because = "policy.generation.val_temperature is 0: all responses to a prompt are greedy"
        switch, names = "policy.generation.val_temperature", ("num_samples", "greedy")
        yield from would_be_ignored(section, "evaluation", names, switch=switch, because=because)


def rule_validation_prompts_need_a_validation(config: MasterConfig) -> Iterator[str]:
    if config.data.validation is None or config.has_validation:
        return
    lines = [
        "data.validation: is never used, because grpo.val_period is 0 and val_at_start and val_at_end are false; "
        "set it to null, or turn one of them on"
    ]
    if config.grpo.stop_at_validation_accuracy is not None:
        lines.append("grpo.stop_at_validation_accuracy: nothing is ever validated; set grpo.val_period")
    yield from lines
