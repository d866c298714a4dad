"""Rules over supervised training: what it does not read, and what has no form for it."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.base import Section, is_url
from nemo_rl.config.data import SAMPLING_OF_SOURCE
from nemo_rl.config.rules.rule import keys_besides_the_switch, would_be_ignored
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import dotted
from nemo_rl.config.sft import LOOP_KEYS

__all__ = []

_SWITCH = "sft.enabled"
_OF_BOTH = ("stages", "sft.enabled", "sft.settings", "policy.model_name", "policy.tokenizer", "policy.lora")
"""Keys that two stages cannot have differently."""


def rule_stages_are_one_or_both(config: MasterConfig) -> Iterator[str]:
    if config.stages == ("grpo",):
        return
    if config.stages != ("sft", "grpo"):
        yield f"stages: expected [grpo] or [sft, grpo], got [{', '.join(config.stages)}]; `nemo-rl sft` runs sft alone"
        return
    if config.sft.enabled:
        yield f"{_SWITCH}: true is supervised training alone, and stages are sft and grpo; set stages to [grpo]"
    if config.policy.lora.enabled:
        yield (
            "policy.lora.enabled: a warm start with policy.lora: GRPO would train a new adapter beside that of the "
            "first stage; set it to false, or train, export and merge the first one by `nemo-rl sft`"
        )
    for key, value in dotted(config.sft.settings).items():
        if any(f"{key}.".startswith(f"{shared}.") for shared in (*_OF_BOTH, "logger.log_dir")):
            yield f"sft.settings.{key}: is the same in both stages; set it outside of sft.settings"
        if key == "checkpointing.checkpoint_dir" and is_url(value):
            yield f"sft.settings.{key}: the second stage reads it as a folder; set one"


def rule_supervised_training_reads_its_own_keys(config: MasterConfig) -> Iterator[str]:
    if not config.sft.enabled:
        if "sft" not in config.stages:
            yield from would_be_ignored(config.sft, "sft", keys_besides_the_switch(config.sft), switch=_SWITCH)
        return
    alone = "supervised training alone reads the recipe itself"
    yield from would_be_ignored(config.sft, "sft", ["settings"], switch="stages", because=alone)
    because = f"{_SWITCH} is true, which trains finished conversations without rollouts, rewards and engines"
    policy, data = config.policy, config.data
    parts: list[tuple[Section, str, tuple[str, ...]]] = [
        (config.grpo, "grpo", LOOP_KEYS),
        (config.loss_fn, "loss_fn", ()),
        (config.env, "env", ()),
        (config.experience, "experience", ()),
        (config.evaluation, "evaluation", ()),
        (policy.generation, "policy.generation", ("stop_token_ids",)),
        (policy.router_replay, "policy.router_replay", ()),
        (config.diagnostics.keep_steps, "diagnostics.keep_steps", ()),
        (config.data_plane.durable, "data_plane.durable", ()),
        (data.curriculum, "data.curriculum", ()),
    ]
    for section, prefix, read in parts:
        names = [name for name in type(section).model_fields if name not in read]
        yield from would_be_ignored(section, prefix, names, switch=_SWITCH, because=because)
    names = ["max_input_seq_length", "history", "extra_columns"]
    yield from would_be_ignored(data, "data", names, switch=_SWITCH, because=because)
    for where, source in data.sections.items():
        ignored = ["env", "unreadable", "category_key", "tools"]
        yield from would_be_ignored(source, where, ignored, switch=_SWITCH, because=because)
    for name, named in data.train.named.items():
        where = data.train_key(name)
        yield from would_be_ignored(named, where, SAMPLING_OF_SOURCE, switch=_SWITCH, because=because)


def rule_supervised_training_has_text_and_a_template(config: MasterConfig) -> Iterator[str]:
    if not config.sft.enabled:
        return
    for where, source in config.data.sections.items():
        if source.has_images:
            key = "dataset_name" if source.image_key is None else "image_key"
            yield f"{where}.{key}: {_SWITCH} trains text alone; leave images out"
        if not source.apply_chat_template:
            yield (
                f"{where}.apply_chat_template: false with {_SWITCH}: the chat template says where a turn of the "
                "assistant begins and ends; set it to true"
            )
    if config.diagnostics.tracer.enabled:
        yield f"diagnostics.tracer.enabled: the live tracer does not follow {_SWITCH} yet; set it to false"
