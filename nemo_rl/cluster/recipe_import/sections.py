"""Keys of NeMo-RL that are converted together: lengths, prompts, rewards, validation, engines, caps; and missing ones.

Each function reads the whole recipe and yields keys of ours with a reason; `CONVERSIONS` runs them all. Sources of the
differences: docs/coming_from_nemo_rl.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.cluster.recipe_import.key_rule import Fate, Outcome
from nemo_rl.cluster.recipe_import.read import Given

__all__ = ["convert_sections"]

ALL_PROMPTS = 1_000_000
PROMPT_SHARE = 4
"""Prompts get one part in so many where a response may be as long as everything."""
NO_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HEAD = "head-node"
FULL_PRECISIONS = ("float32", "bfloat16")
GRADED = "my_rewards:score"


def _to(key: str, to: str, value: object, why: str) -> Outcome:
    return Outcome(key=key, fate=Fate.MAPPED, to=to, value=value, why=why)


def _lacks(key: str, why: str) -> Outcome:
    return Outcome(key=key, fate=Fate.NOT_SUPPORTED, why=why)


def _lengths(given: Given) -> Iterator[Outcome]:
    total = given.get("policy.max_total_sequence_length")
    prompt, new = given.get("data.max_input_seq_length"), given.get("policy.generation.max_new_tokens")
    keys = {"data.max_input_seq_length": prompt, "policy.generation.max_new_tokens": new}
    if not isinstance(total, int) or not isinstance(prompt, int) or not isinstance(new, int):
        yield from (_to(key, key, value, "") for key, value in keys.items() if value is not None)
        return
    room = total - new if 0 < new < total else total // PROMPT_SHARE
    fitted = {"data.max_input_seq_length": min(prompt, room)}
    fitted["policy.generation.max_new_tokens"] = min(new, total - fitted["data.max_input_seq_length"])
    for key, value in keys.items():
        why = f"was {value}; there a response ends where {total} tokens are reached, here both have limits of their own"
        yield _to(key, key, fitted[key], why if fitted[key] != value else "")


def _prompts(given: Given) -> Iterator[Outcome]:
    default = given.get("data.default")
    default = default if isinstance(default, Mapping) else {}
    flat = {name: given.get(f"data.{name}") for name in ("dataset_name", "data_path") if given.has(f"data.{name}")}
    if not flat and not given.has("data.train") and not given.has("data.validation"):
        return
    shared = {name: value for name, value in given.get("data", {}).items() if name in _SHARED}
    train = given.get("data.train")
    if isinstance(train, list):
        if len(train) > 1:
            yield _lacks("data.train", f"one source of prompts; the first of {len(train)} is taken")
        train = train[0] if train else {}
    train = {**shared, **default, **(train if isinstance(train, Mapping) else {}), **flat}
    yield from _dataset(given, "data.train", train, part="train")
    validation = given.get("data.validation")
    validation = validation[0] if isinstance(validation, list) and validation else validation
    if isinstance(validation, Mapping) and validation:
        yield from _dataset(given, "data.validation", {**shared, **default, **validation}, part="validation")
    elif train.get("split_validation_size"):
        yield from _dataset(given, "data.validation", {**train, "data_path": None}, part="validation")
    else:
        why = "the recipe has no validation prompts"
        yield _to("data.validation", "data.validation", None, why)
        for name, off in (("val_period", 0), ("val_at_start", False), ("val_at_end", False)):
            yield _to(f"grpo.{name}" if given.has(f"grpo.{name}") else "", f"grpo.{name}", off, why)
    yield from _reward(given, str(train.get("env_name") or "math"))


_SHARED = ("prompt_file", "system_prompt_file", "env_name", "input_key", "output_key", "split")


def _dataset(given: Given, where: str, entry: Mapping[str, Any], *, part: str) -> Iterator[Outcome]:
    name, path = str(entry.get("dataset_name") or part), entry.get("data_path")
    if path:
        kind = "jsonl" if str(path).endswith((".jsonl", ".json")) else "huggingface"
        yield _to(f"{where}.data_path", f"{where}.dataset_name", kind, "")
        yield _to(f"{where}.data_path", f"{where}.data_path", str(path), "")
        if entry.get("split") and kind == "huggingface":
            yield _to(f"{where}.split", f"{where}.split", entry["split"], "")
    else:
        file = f"data/{name.lower()}/{part}.jsonl"
        why = f'nothing is downloaded here: write {name} as lines {{"input": ..., "output": ...}} to this file'
        yield _to(f"{where}.dataset_name", f"{where}.dataset_name", "jsonl", "")
        yield _to(f"{where}.dataset_name", f"{where}.data_path", file, why)
    for key in ("input_key", "output_key"):
        if path and entry.get(key):
            yield _to(f"{where}.{key}", f"{where}.{key}", entry[key], "")
    for key, to in (("prompt_file", "prompt_template"), ("system_prompt_file", "system_prompt")):
        if entry.get(key):
            yield _text_of_file(given, f"{where}.{key}", str(entry[key]), f"{where}.{to}")


def _text_of_file(given: Given, key: str, name: str, to: str) -> Outcome:
    for folder in (Path(), given.file.parent, *given.file.parents):
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8").strip()
            return _to(key, to, text.replace("{}", "{input}"), f"the text of {name}")
    value = "{input}" if to.endswith("prompt_template") else None
    return _to(key, to, value, f"{name} is not here: put its text here, with {{input}} where the prompt goes")


def _reward(given: Given, name: str) -> Iterator[Outcome]:
    if name == "math":
        yield _to("data.default.env_name", "env.name", "math", "")
        return
    yield _lacks(f"env.{name}", f"the environment {name!r} is not here; {GRADED} stands for a reward of your own")
    yield _to("data.default.env_name", "env.name", "custom", f"{name!r} there")
    yield _to("data.default.env_name", "env.reward_function", GRADED, "write it: see docs/guide.md")


def _validation(given: Given) -> Iterator[Outcome]:
    if given.has("grpo.max_val_samples"):
        value = given.get("grpo.max_val_samples")
        yield _to("grpo.max_val_samples", "grpo.max_val_samples", value or ALL_PROMPTS, "" if value else "null: all")
    metric = given.get("grpo.stop_at_validation_metric")
    threshold = given.get("grpo.stop_at_validation_threshold")
    if metric and threshold is not None:
        if str(metric).endswith("accuracy"):
            to = "grpo.stop_at_validation_accuracy"
            yield _to("grpo.stop_at_validation_metric", to, float(threshold), f"{metric} there")
        else:
            yield _lacks("grpo.stop_at_validation_metric", f"a run stops at an accuracy, not at {metric!r}")


def _estimator(given: Given) -> Iterator[Outcome]:
    """The estimator by its word here, and what it asks for."""
    prefix, to = "grpo.adv_estimator", "grpo.adv_estimator.name"
    name, weights = given.get(f"{prefix}.name", "grpo"), given.get(f"{prefix}.reward_weights")
    if name == "reinforce_plus_plus" and given.get(f"{prefix}.minus_baseline", True):
        yield _to(f"{prefix}.name", to, "reinforce_plus_plus_baseline", "with minus_baseline")
    elif name in ("grpo", "gdpo", "reinforce_plus_plus"):
        yield _to(f"{prefix}.name", to, name, "")
    else:
        own = "write it as an estimator of your own (grpo.adv_estimator.name=module:Class)"
        yield _lacks(f"{prefix}.name", f"{name!r} is not here; {own}")
    if weights:
        of_sum = "env.reward_weights" if name != "gdpo" else f"{prefix}.component_weights"
        yield _to(f"{prefix}.reward_weights", of_sum, weights, "weights of a reward's components")


def _loss(given: Given) -> Iterator[Outcome]:
    penalty, kind = (
        given.get("loss_fn.reference_policy_kl_penalty", 0.01),
        given.get("loss_fn.reference_policy_kl_type"),
    )
    key = "loss_fn.reference_policy_kl_type"
    if penalty and kind is not None:
        if kind in ("k1", "k3"):
            yield _to(key, key, kind, "")
            yield _to(
                key, "loss_fn.reference_policy_kl_gradient", "importance_weighted", "the gradient that it has there"
            )
        else:
            yield _lacks(
                key, "k2 here has the gradient of KL(pi, pi_ref), k2 there that of the mean of x^2 / 2 under pi"
            )
    yield from _kl_in_reward(given)
    yield from _policy_loss(given)
    if given.get("grpo.skip_reference_policy_logprobs_calculation") and penalty:
        yield _lacks("grpo.skip_reference_policy_logprobs_calculation", "a KL penalty needs the reference pass")


def _kl_in_reward(given: Given) -> Iterator[Outcome]:
    key, name = "loss_fn.use_kl_in_reward", given.get("grpo.adv_estimator.name", "grpo")
    if not given.get(key):
        return
    if name != "reinforce_plus_plus":
        yield _lacks(
            key, f"with {name!r} there is no KL at all there; here loss_fn.reference_policy_kl_penalty=0 is that"
        )
    elif given.get("grpo.adv_estimator.minus_baseline", True):
        yield _to(
            key, key, True, "there each token loses its own KL, here the row's reward loses that of all its tokens"
        )
    else:
        yield _to(key, key, True, "there each token loses its own KL, here that of all tokens from there on")


def _policy_loss(given: Given) -> Iterator[Outcome]:
    """The loss that switches of theirs make, and the correction that goes with it."""
    on = [name for name in _LOSS_SWITCHES if given.get(f"loss_fn.{name}")]
    for name in on:
        yield _to(f"loss_fn.{name}", "loss_fn.name", _LOSS_SWITCHES[name], "one word for each loss")
    if len(on) > 1:
        yield _lacks(f"loss_fn.{on[-1]}", f"one loss trains; {' and '.join(on)} ask for several, the last one is taken")
    key = "loss_fn.truncated_importance_sampling_type"
    kind = given.get(key)
    if kind is None:
        return
    per_row = {"tis": "seq-tis", "icepop": "seq-mis"}
    if not given.get("loss_fn.sequence_level_importance_ratios"):
        yield _to(key, key, kind, "")
    elif kind in per_row:
        yield _to(key, key, per_row[str(kind)], "of the product over the row")
    else:
        yield _lacks(key, f"{kind} weighs tokens, GSPO rows; take geo-mask")


_LOSS_SWITCHES = {
    "disable_ppo_ratio": "reinforce",
    "sequence_level_importance_ratios": "gspo",
    "use_cispo": "cispo",
}


def _tokenizer(given: Given) -> Iterator[Outcome]:
    name = given.get("policy.tokenizer.name")
    if name is not None and name != given.get("policy.model_name"):
        yield _to("policy.tokenizer.name", "policy.tokenizer.name", name, "")
    key = "policy.tokenizer.chat_template"
    if given.has(key):
        template = given.get(key)
        if template is None:
            yield _to(key, key, NO_TEMPLATE, "null there: texts without a template")
        elif template != "default":
            yield _to(key, key, template, "")


def _caps(given: Given) -> Iterator[Outcome]:
    """Caps hold the longest sequence, and log-probability passes hold what training passes do."""
    tensor, context = _axis(given, "tensor"), _axis(given, "context")
    multiple = max(tensor, 1) * (2 * context if context > 1 else 1)
    multiple = math.lcm(multiple, _number(given.get("policy.make_sequence_length_divisible_by")) or 1)
    longest = -(-_number(given.get("policy.max_total_sequence_length")) // multiple) * multiple
    for way in ("sequence_packing", "dynamic_batching"):
        prefix, train = f"policy.{way}", 0
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            key = f"{prefix}.{name}"
            if given.has(key):
                value = _number(given.get(key))
                fitted = train = max(value, longest, train)
                why = f"was {value}; at least the longest sequence, and no less than a training pass"
                yield _to(key, key, fitted, why if fitted != value else "")


def _axis(given: Given, axis: str) -> int:
    if given.get("policy.megatron_cfg.enabled"):
        name = "tensor_model" if axis == "tensor" else axis
        return _number(given.get(f"policy.megatron_cfg.{name}_parallel_size")) or 1
    return _number(given.get(f"policy.dtensor_cfg.{axis}_parallel_size")) or 1


def _number(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) else 0


def _engines(given: Given) -> Iterator[Outcome]:
    prefix = "policy.generation"
    backend = given.get(f"{prefix}.backend")
    if backend is not None:
        yield _to(
            f"{prefix}.backend",
            f"{prefix}.backend",
            "torch",
            f"{backend!r} there; the embedded engine needs nothing, `make vllm` installs vLLM",
        )
    gpus = _number(given.get("cluster.gpus_per_node")) * max(1, _number(given.get("cluster.num_nodes")))
    sizes = {axis: _number(given.get(f"{prefix}.vllm_cfg.{axis}_parallel_size")) for axis in ("tensor", "pipeline")}
    for axis, size in sizes.items():
        if size > 1:
            yield _lacks(f"{prefix}.vllm_cfg.{axis}_parallel_size", "an engine holds the whole model on one GPU")
    if gpus > 1:
        replicas = max(1, gpus // max(1, math.prod(size or 1 for size in sizes.values())))
        yield _to("", f"{prefix}.num_replicas", replicas, "as many engines as there")
    precision = given.get(f"{prefix}.vllm_cfg.precision")
    if precision in FULL_PRECISIONS and precision != given.get("policy.precision"):
        yield _to(f"{prefix}.vllm_cfg.precision", f"{prefix}.precision", precision, "")
    elif precision not in (None, "auto", *FULL_PRECISIONS):
        yield _lacks(
            f"{prefix}.vllm_cfg.precision", f"{precision!r}: engines compute in {' or '.join(FULL_PRECISIONS)}"
        )
    if given.get(f"{prefix}.refit_transport"):
        yield _to(f"{prefix}.refit_transport", f"{prefix}.refit_transport", "auto", "takes what fits the machines")
    for name in ("top_p", "top_k"):
        value = given.get(f"{prefix}.val_{name}")
        if value is not None and value != given.get(f"{prefix}.{name}"):
            yield _lacks(f"{prefix}.val_{name}", f"validation samples with {prefix}.{name}")


def _store(given: Given) -> Iterator[Outcome]:
    is_on = given.get("data_plane.enabled")
    if is_on is not None:
        yield _to("data_plane.enabled", "data_plane.enabled", bool(is_on), "" if is_on else "only which store is used")
    if is_on and not given.has("data_plane.impl"):
        yield _to("", "data_plane.impl", "transfer_queue", "the default there")
    nodes = _number(given.get("cluster.num_nodes"))
    if nodes > 1:
        yield _to("", "cluster.address", "auto", "several nodes need a running Ray")
        if is_on and given.get("data_plane.backend") == "mooncake_cpu":
            yield _to("", "data_plane.mooncake.host", HEAD, "set the address that all nodes reach")


def _without_a_key(given: Given) -> Iterator[Outcome]:
    """What NeMo-RL does without being asked, and this does only when asked."""
    if not given.get("grpo.use_dynamic_sampling"):
        yield _to("", "grpo.drop_zero_advantage_groups", False, "there such groups stay in the divisors")
    normalizes, leaves_out = (
        given.get(f"grpo.{name}", given.get(f"grpo.adv_estimator.{name}", True))
        for name in ("normalize_rewards", "use_leave_one_out_baseline")
    )
    if normalizes and leaves_out:
        yield _to("", "grpo.use_leave_one_out_std", True, "the standard deviation of the siblings, as there")
    if given.get("data.validation") or given.get("data.train"):
        for name in ("val_at_start", "val_at_end"):
            if not given.has(f"grpo.{name}"):
                yield _to("", f"grpo.{name}", False, "the default there")
    if given.get("policy.megatron_cfg.enabled"):
        key = "policy.megatron_cfg.optimizer.decay_norms_and_biases"
        yield _to("", key, False, "megatron-core's way, as there")
        if not given.get("policy.dtensor_cfg.enabled"):
            yield _to("", "policy.dtensor_cfg.enabled", False, "one worker trains")


CONVERSIONS: tuple[Callable[[Given], Iterator[Outcome]], ...] = (
    *(_without_a_key, _lengths, _prompts, _validation, _estimator, _loss),
    *(_tokenizer, _caps, _engines, _store),
)


def convert_sections(given: Given) -> list[Outcome]:
    """Everything that more than one key decides, later ones over earlier ones."""
    return [outcome for conversion in CONVERSIONS for outcome in conversion(given)]
