"""Keys of NeMo-RL that are converted together: lengths, prompts, rewards, validation, engines, caps; and missing ones.

Each function reads the whole recipe and yields keys of ours with a reason; `CONVERSIONS` runs them all. Sources of the
differences: docs/coming_from_nemo_rl.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from nemo_rl.config.generation import VllmConfig
from nemo_rl_tools.recipe_import.dialects import convert_adapters, convert_sources, convert_turns
from nemo_rl_tools.recipe_import.keys import Fate, Given, KeyOutcome, becomes, lacks
from nemo_rl_tools.recipe_import.prompts import convert_environments, convert_prompts

__all__ = ["convert_sections"]

ALL_PROMPTS = 1_000_000
NO_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HEAD = "head-node"
FULL_PRECISIONS = ("float32", "bfloat16")
DRAFTS = ("speculative_config", "speculative_model", "num_speculative_tokens")
OTHER_MODELS = ("hf_overrides", "quantization", "kv_cache_dtype", "enable_lora", "logits_processors")
"""Arguments of vLLM with which engines would sample from another distribution than the trainer's."""


def _lengths(given: Given) -> Iterator[KeyOutcome]:
    total = given.get("policy.max_total_sequence_length")
    prompt, new = given.get("data.max_input_seq_length"), given.get("policy.generation.max_new_tokens")
    keys: dict[str, object] = {"data.max_input_seq_length": prompt, "policy.generation.max_new_tokens": new}
    if not isinstance(total, int) or not isinstance(prompt, int) or not isinstance(new, int):
        yield from (becomes(key, key, value, "") for key, value in keys.items() if value is not None)
        return
    fitted: dict[str, object] = dict(keys)
    why = f"was {{}}; there a response ends where prompt and response reach {total} tokens"
    if prompt + new > total and new >= total - 1:
        fitted = {"data.max_input_seq_length": min(prompt, total - 1), "policy.generation.max_new_tokens": None}
        why += ", as with null here"
    elif prompt + new > total:
        fitted["data.max_input_seq_length"] = total - new
        why += ", here longer prompts are skipped"
    for key, value in keys.items():
        yield becomes(key, key, fitted[key], why.format(value) if fitted[key] != value else "")


def _validation(given: Given) -> Iterator[KeyOutcome]:
    if given.has("grpo.max_val_samples"):
        value = given.get("grpo.max_val_samples")
        yield becomes(
            "grpo.max_val_samples", "grpo.max_val_samples", value or ALL_PROMPTS, "" if value else "null: all"
        )
    metric = given.get("grpo.stop_at_validation_metric")
    threshold = given.get("grpo.stop_at_validation_threshold")
    if metric and threshold is not None:
        if str(metric).endswith("accuracy"):
            to = "grpo.stop_at_validation_accuracy"
            yield becomes("grpo.stop_at_validation_metric", to, threshold, f"{metric} there")
        else:
            yield lacks("grpo.stop_at_validation_metric", f"a run stops at an accuracy, not at {metric!r}")


def _estimator(given: Given) -> Iterator[KeyOutcome]:
    prefix, to = "grpo.adv_estimator", "grpo.adv_estimator.name"
    name, weights = given.get(f"{prefix}.name", "grpo"), given.get(f"{prefix}.reward_weights")
    if name == "reinforce_plus_plus" and given.get(f"{prefix}.minus_baseline", True):
        yield becomes(f"{prefix}.name", to, "reinforce_plus_plus_baseline", "with minus_baseline")
    elif name in ("grpo", "gdpo", "reinforce_plus_plus"):
        yield becomes(f"{prefix}.name", to, name, "")
    else:
        own = "write it as an estimator of your own (grpo.adv_estimator.name=module:Class)"
        yield lacks(f"{prefix}.name", f"{name!r} is not here; {own}", must_decide=True)
    if weights:
        of_sum = "env.reward_weights" if name != "gdpo" else f"{prefix}.component_weights"
        yield becomes(f"{prefix}.reward_weights", of_sum, weights, "weights of a reward's components")


def _loss(given: Given) -> Iterator[KeyOutcome]:
    penalty, kind = (
        given.get("loss_fn.reference_policy_kl_penalty", 0.01),
        given.get("loss_fn.reference_policy_kl_type"),
    )
    key = "loss_fn.reference_policy_kl_type"
    if penalty and kind is not None:
        if kind in ("k1", "k3"):
            yield becomes(key, key, kind, "")
            yield becomes(
                key, "loss_fn.reference_policy_kl_gradient", "importance_weighted", "the gradient that it has there"
            )
        else:
            other = "the gradient of KL(pi, pi_ref), there that of the mean of x^2 / 2 under pi"
            yield lacks(key, f"{kind!r}: k1 and k3 are as there; k2 has {other}", must_decide=True)
    yield from _kl_in_reward(given)
    yield from _policy_loss(given)
    if given.get("grpo.skip_reference_policy_logprobs_calculation") and penalty:
        why = "a KL penalty needs the reference pass"
        yield lacks("grpo.skip_reference_policy_logprobs_calculation", why, must_decide=True)


def _kl_in_reward(given: Given) -> Iterator[KeyOutcome]:
    key, name = "loss_fn.use_kl_in_reward", given.get("grpo.adv_estimator.name", "grpo")
    if not given.get(key):
        return
    if name != "reinforce_plus_plus":
        why = f"with {name!r} there is no KL at all there; here loss_fn.reference_policy_kl_penalty=0 is that"
        yield lacks(key, why, must_decide=True)
    elif given.get("grpo.adv_estimator.minus_baseline", True):
        yield becomes(
            key, key, True, "there each token loses its own KL, here the row's reward loses that of all its tokens"
        )
    else:
        yield becomes(key, key, True, "there each token loses its own KL, here that of all tokens from there on")


def _policy_loss(given: Given) -> Iterator[KeyOutcome]:
    """Convert the switches of the loss to a named loss, and the correction that goes with it."""
    on = [name for name in _LOSS_SWITCHES if given.get(f"loss_fn.{name}")]
    for name in on:
        yield becomes(f"loss_fn.{name}", "loss_fn.name", _LOSS_SWITCHES[name], "one word for each loss")
    if len(on) > 1:
        why = f"one loss trains; {' and '.join(on)} ask for several, the last one is taken"
        yield lacks(f"loss_fn.{on[-1]}", why, must_decide=True)
    key = "loss_fn.truncated_importance_sampling_type"
    kind = given.get(key)
    if kind is None:
        return
    per_row = {"tis": "seq-tis", "icepop": "seq-mis"}
    if not given.get("loss_fn.sequence_level_importance_ratios"):
        yield becomes(key, key, kind, "")
    elif kind in per_row:
        yield becomes(key, key, per_row[str(kind)], "of the product over the row")
    else:
        yield lacks(key, f"{kind} weighs tokens, GSPO rows; take geo-mask", must_decide=True)


_LOSS_SWITCHES = {
    "disable_ppo_ratio": "reinforce",
    "sequence_level_importance_ratios": "gspo",
    "use_cispo": "cispo",
}


def _clip(given: Given) -> Iterator[KeyOutcome]:
    """Convert gradient clipping: the Megatron worker has a key of its own there, and one with the other worker here."""
    key = "policy.megatron_cfg.optimizer.clip_grad"
    if given.has(key) and given.get("policy.megatron_cfg.enabled"):
        yield becomes(key, "policy.max_grad_norm", given.get(key) or None, "the worker that trains clips by it")


def _tokenizer(given: Given) -> Iterator[KeyOutcome]:
    name = given.get("policy.tokenizer.name")
    if name is not None and name != given.get("policy.model_name"):
        yield becomes("policy.tokenizer.name", "policy.tokenizer.name", name, "")
    key = "policy.tokenizer.chat_template"
    if given.has(key):
        template = given.get(key)
        if template is None:
            yield becomes(key, key, NO_TEMPLATE, "null there: texts without a template")
        elif template != "default":
            yield becomes(key, key, template, "")


def _caps(given: Given) -> Iterator[KeyOutcome]:
    """Raise the caps to hold the longest sequence, and log-probability passes hold what training passes do."""
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
                yield becomes(key, key, fitted, why if fitted != value else "")


def _axis(given: Given, axis: str) -> int:
    if given.get("policy.megatron_cfg.enabled"):
        name = "tensor_model" if axis == "tensor" else axis
        return _number(given.get(f"policy.megatron_cfg.{name}_parallel_size")) or 1
    return _number(given.get(f"policy.dtensor_cfg.{axis}_parallel_size")) or 1


def _number(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) else 0


def _engines(given: Given) -> Iterator[KeyOutcome]:
    prefix = "policy.generation"
    backend = given.get(f"{prefix}.backend")
    if backend == "vllm":
        yield becomes(f"{prefix}.backend", f"{prefix}.backend", "vllm", "")
        yield from _vllm(given)
    elif backend is not None:
        why = f"{backend!r} is not here; this is the embedded engine, and vllm the other one (`make vllm`)"
        yield becomes(f"{prefix}.backend", f"{prefix}.backend", "torch", why)
    gpus_per_node = _number(given.get("cluster.gpus_per_node"))
    gpus = gpus_per_node * max(1, _number(given.get("cluster.num_nodes")))
    sizes = {axis: _number(given.get(f"{prefix}.vllm_cfg.{axis}_parallel_size")) for axis in ("tensor", "pipeline")}
    for axis, size in sizes.items():
        key = f"{prefix}.vllm_cfg.{axis}_parallel_size"
        if size > 1 and backend == "vllm":
            yield becomes(key, key, size, "")
        elif size > 1:
            yield lacks(key, f"{size} there, 1 here: the embedded engine holds the whole model on one GPU")
    yield from _expert_parallel(given, prefix, tensor=sizes["tensor"], is_vllm=backend == "vllm")
    if gpus > 1:
        replicas = max(1, gpus // max(1, math.prod(size or 1 for size in sizes.values())))
        yield becomes("", f"{prefix}.num_replicas", replicas, "as many engines as there")
    yield from _precision(given, prefix)
    if given.get(f"{prefix}.refit_transport"):
        yield becomes(f"{prefix}.refit_transport", f"{prefix}.refit_transport", "auto", "takes what fits the machines")
    for name in ("top_p", "top_k"):
        value = given.get(f"{prefix}.val_{name}")
        if value is not None and value != given.get(f"{prefix}.{name}"):
            yield lacks(f"{prefix}.val_{name}", f"validation samples with {prefix}.{name}")


def _precision(given: Given, prefix: str) -> Iterator[KeyOutcome]:
    key = f"{prefix}.vllm_cfg.precision"
    precision = given.get(key)
    if precision in FULL_PRECISIONS and precision != given.get("policy.precision"):
        yield becomes(key, f"{prefix}.precision", precision, "")
    elif precision not in (None, "auto", *FULL_PRECISIONS):
        yield lacks(key, f"{precision!r}: engines compute in {' or '.join(FULL_PRECISIONS)}")


def _expert_parallel(given: Given, prefix: str, *, tensor: int, is_vllm: bool) -> Iterator[KeyOutcome]:
    """Experts are divided among the tensor ranks here; there also among ranks that attend to their own rows."""
    key = f"{prefix}.vllm_cfg.expert_parallel_size"
    experts = _number(given.get(key))
    if experts <= 1:
        return
    if not is_vllm or tensor <= 1:
        yield lacks(key, f"{experts} there, 1 here: experts are divided among vLLM's tensor ranks alone")
        return
    why = "" if experts == tensor else f"among {tensor} tensor ranks, not among {experts} with data-parallel attention"
    yield becomes(key, f"{prefix}.vllm_cfg.enable_expert_parallel", True, why)


def _vllm(given: Given) -> Iterator[KeyOutcome]:
    """Convert the keys of the engine that both have, and arguments that go to it by vLLM's own names."""
    prefix, total = "policy.generation", given.get("policy.max_total_sequence_length")
    for name in ("gpu_memory_utilization", "enforce_eager"):
        key = f"{prefix}.vllm_cfg.{name}"
        if given.get(key) is not None:
            yield becomes(key, key, given.get(key), "")
    key = f"{prefix}.vllm_cfg.max_model_len"
    longest = given.get(key)
    if longest is not None and isinstance(total, int) and _number(longest) < total:
        why = f"{longest} ends rows before policy.max_total_sequence_length {total} does; lower that one"
        yield lacks(key, why, must_decide=True)
    elif longest is not None:
        yield becomes(key, key, longest, "")
    rest = {}
    for name, value in given.section(f"{prefix}.vllm_kwargs").items():
        if name in VllmConfig.model_fields:
            yield becomes(f"{prefix}.vllm_kwargs.{name}", f"{prefix}.vllm_cfg.{name}", value, "")
        elif name in DRAFTS:
            yield lacks(f"{prefix}.vllm_kwargs.{name}", "drafters are not here")
        elif name in OTHER_MODELS:
            yield lacks(f"{prefix}.vllm_kwargs.{name}", "engines hold the policy's own model", must_decide=True)
        else:
            rest[name] = value
    if rest:
        yield becomes(f"{prefix}.vllm_kwargs", f"{prefix}.vllm_kwargs", rest, "arguments of vLLM's engine")


def _placement(given: Given) -> Iterator[KeyOutcome]:
    """Convert the places of non-colocated engines: there they are taken out of the cluster's, here they come on top."""
    prefix, to = "policy.generation.colocated.resources", "policy.generation.colocated"
    nodes, gpus = max(1, _number(given.get("cluster.num_nodes"))), _number(given.get("cluster.gpus_per_node"))
    engine_nodes, engine_gpus = (_number(given.get(f"{prefix}.{name}")) for name in ("num_nodes", "gpus_per_node"))
    if given.get(f"{to}.enabled") is not False or not gpus:
        return
    if nodes > 1 and 0 < engine_nodes < nodes:
        size = engine_gpus or gpus
        why = f"{nodes} there, with the {engine_nodes} of engines"
        yield becomes("cluster.num_nodes", "cluster.num_nodes", nodes - engine_nodes, why)
        yield becomes(f"{prefix}.gpus_per_node" if engine_gpus else "", f"{to}.gpus_per_node", size, "of such a node")
        yield becomes("", "policy.generation.num_replicas", engine_nodes * size, "an engine on each of their GPUs")
    elif nodes == 1 and 0 < engine_gpus < gpus:
        why = f"{gpus} there, with the {engine_gpus} of engines"
        yield becomes("cluster.gpus_per_node", "cluster.gpus_per_node", gpus - engine_gpus, why)
        yield becomes("", "policy.generation.num_replicas", engine_gpus, "an engine on each of their GPUs")
        if engine_nodes:
            yield becomes(f"{prefix}.num_nodes", f"{to}.num_nodes", 0, "engines are on the policy's node")


def _async(given: Given) -> Iterator[KeyOutcome]:
    """Convert the older asynchronous trainer (`grpo.async_grpo`) and the single controller (`async_rl`), whose recipes
    need no switch."""
    prefix = "grpo.async_grpo"
    if given.has(f"{prefix}.enabled"):
        yield becomes(f"{prefix}.enabled", "grpo.async.enabled", bool(given.get(f"{prefix}.enabled")), "")
    age = "max_trajectory_age_steps"
    if given.section(prefix):
        yield from _bound(f"{prefix}.{age}", given.get(f"{prefix}.{age}"), "")
        yield from _in_flight(given, prefix, goes_on=bool(given.get(f"{prefix}.in_flight_weight_updates")))
    if given.section("async_rl"):
        yield becomes("", "grpo.async.enabled", True, "the section async_rl is that of an asynchronous trainer")
        yield from _sampler(given)
        yield from _in_flight(given, "async_rl", goes_on=True)


def _bound(key: str, value: object, why: str) -> Iterator[KeyOutcome]:
    if value is None:
        return
    yield becomes(key, "grpo.async.max_staleness", value, why or "from the oldest token of a row, here for every row")
    if _number(value) > 1:
        yield becomes("", "grpo.async.lookahead", value, f"{key.rpartition('.')[2]} is the depth as well there")


SELECTIONS = {"in_order": "in_order", "weight_fifo": "oldest_first", "ready_first": "ready_first"}
"""Orders of groups here, by the samplers that run ahead a number of batches there."""


def _sampler(given: Given) -> Iterator[KeyOutcome]:
    prefix, to = "async_rl.sampler", "grpo.async.selection"
    name, ahead, age = f"{prefix}.name", f"{prefix}.max_lookahead_versions", f"{prefix}.max_staleness_versions"
    word = given.get(name, "in_order")
    if word == "windowed":
        yield from _bound(age, given.get(age, 1), "there older groups are evicted, here none is started")
        yield becomes(name, "grpo.async.overdue", "drop", "a group that would be too old is replaced")
        unread = ahead
    elif word in SELECTIONS:
        why = "" if word == "in_order" else "batches ahead there, and an age that holds for every row here"
        yield from _bound(ahead, given.get(ahead, 1), why)
        yield becomes(name, to, SELECTIONS[word], "")
        unread = age
    else:
        yield lacks(name, f"{word!r} is not here; write it as an order of your own ({to}=module:Class)")
        return
    if given.has(unread):
        yield KeyOutcome(key=unread, fate=Fate.IGNORED, why=f"the sampler {word!r} does not read it")


def _in_flight(given: Given, section: str, *, goes_on: bool) -> Iterator[KeyOutcome]:
    """Convert what happens to rows that are being sampled when new weights come; the default there keeps old caches."""
    key, to = f"{section}.recompute_kv_cache_after_weight_updates", "policy.generation.in_flight"
    if not goes_on:
        yield becomes(f"{section}.in_flight_weight_updates", to, "drain", "rows end with the weights they began with")
        if given.has(key):
            yield KeyOutcome(key=key, fate=Fate.IGNORED, why="no row is sampled by two versions")
        return
    if section != "async_rl":
        yield KeyOutcome(key=f"{section}.in_flight_weight_updates", fate=Fate.MAPPED, why=f"{to} says how")
    is_computed_anew = bool(given.get(key))
    yield becomes(key if given.has(key) else "", to, "recompute" if is_computed_anew else "keep", "of the cache")


def _store(given: Given) -> Iterator[KeyOutcome]:
    is_on = given.get("data_plane.enabled")
    if is_on is not None:
        yield becomes(
            "data_plane.enabled", "data_plane.enabled", bool(is_on), "" if is_on else "only which store is used"
        )
    if given.get("data_plane.observability.enabled") and not given.get("data_plane.observability.callback"):
        yield becomes("", "data_plane.observability.callback", "print_event", "the default there")
    if is_on and not given.has("data_plane.impl"):
        yield becomes("", "data_plane.impl", "transfer_queue", "the default there")
    nodes = _number(given.get("cluster.num_nodes"))
    if nodes > 1:
        yield becomes("", "cluster.address", "auto", "several nodes need a running Ray")
        if is_on and given.get("data_plane.backend") == "mooncake_cpu":
            yield becomes("", "data_plane.mooncake.host", HEAD, "set the address that all nodes reach")


def _without_a_key(given: Given) -> Iterator[KeyOutcome]:
    """Set the features that NeMo-RL has by default and that are off here by default."""
    if not given.get("grpo.use_dynamic_sampling"):
        yield becomes("", "grpo.drop_zero_advantage_groups", False, "there such groups stay in the divisors")
    normalizes, leaves_out = (
        given.get(f"grpo.{name}", given.get(f"grpo.adv_estimator.{name}", True))
        for name in ("normalize_rewards", "use_leave_one_out_baseline")
    )
    if normalizes and leaves_out:
        yield becomes("", "grpo.use_leave_one_out_std", True, "the standard deviation of the siblings, as there")
    if given.get("data.validation") or given.get("data.train"):
        for name in ("val_at_start", "val_at_end"):
            if not given.has(f"grpo.{name}"):
                yield becomes("", f"grpo.{name}", False, "the default there")
    if given.get("policy.megatron_cfg.enabled"):
        key = "policy.megatron_cfg.optimizer.decay_norms_and_biases"
        yield becomes("", key, False, "megatron-core's way, as there")
        if not given.get("policy.dtensor_cfg.enabled"):
            yield becomes("", "policy.dtensor_cfg.enabled", False, "one worker trains")


CONVERSIONS: tuple[Callable[[Given], Iterator[KeyOutcome]], ...] = (
    *(_without_a_key, _lengths, convert_prompts, convert_environments, _validation, _estimator, _loss),
    *(_clip, _tokenizer, _caps, _engines, _placement, _async, _store, convert_turns, convert_adapters, convert_sources),
)


def convert_sections(given: Given) -> list[KeyOutcome]:
    """Convert everything that more than one key decides, later ones over earlier ones."""
    return [outcome for conversion in CONVERSIONS for outcome in conversion(given)]
