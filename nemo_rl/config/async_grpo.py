"""Settings of asynchronous training (`grpo.async`), and the rules over them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import NonNegativeInt

from nemo_rl.config.base import Section
from nemo_rl.config.loss import LOSS_PROPERTIES
from nemo_rl.config.parts import ENGINE_CAPABILITIES, LOSSES, SELECTIONS
from nemo_rl.config.rule import keys_besides_the_switch, would_be_ignored

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = ["AsyncConfig", "OverduePolicy"]

OverduePolicy = Literal["wait", "drop", "error"]


class AsyncConfig(Section):
    """Sampling goes on while the policy trains, within a bound that holds for every row."""

    enabled: bool = False
    """Sample ahead of the trainer; false: each step samples its rows, then trains on them."""
    max_staleness: NonNegativeInt = 1
    """Most updates (training steps) between the weights of a row's oldest token and the weights that the row updates.
    No row that may become older is started; 0 is the synchronous trainer."""
    lookahead: NonNegativeInt | None = None
    """Steps whose groups may be sampled beside those of the current step, at most `max_staleness`; null: 1, or 0 where
    `max_staleness` is 0."""
    selection: Annotated[str, SELECTIONS] = "oldest_first"
    """The order in which finished groups are trained, after those that are due in this step. `oldest_first`: by the
    version of their oldest token; `in_order`: by prompt, and a step waits for its prompts; `ready_first`: by the time
    they ended; or `module:Class` of your own, see docs/async.md."""
    overdue: OverduePolicy = "wait"
    """The treatment of a group that must be trained in this step and has not ended: wait for it, drop it and sample
    another prompt (counted with length and reward), or end the run."""

    @property
    def takes_stale_rows(self) -> bool:
        """Return whether a row may be trained by weights that are newer than those that sampled it."""
        return self.enabled and self.max_staleness > 0

    keep_finished: bool = False
    """Save groups that have ended and wait for their step in checkpoints, so that a resumed run trains them; false: it
    samples their prompts again. Not with `in_order`, whose first prompts would be newer than they are."""

    @property
    def steps_ahead(self) -> int:
        """Return `lookahead`, with null decided."""
        return min(1, self.max_staleness) if self.lookahead is None else self.lookahead


_SWITCH = "grpo.async.enabled"
_BOUND = "grpo.async.max_staleness"


def rule_async_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    section = config.grpo.async_
    if section.takes_stale_rows:
        return
    names = ("selection", "overdue") if section.enabled else keys_besides_the_switch(section)
    given = {"switch": _SWITCH, "because": f"{_SWITCH} is false"}
    if section.enabled:
        because = f"{_BOUND} is 0: every step samples its own rows, and trains on all of them"
        given = {"switch": _BOUND, "because": because}
    yield from (
        *would_be_ignored(section, "grpo.async", names, **given),
        *would_be_ignored(config.experience, "experience", ["num_workers"], **given),
        *would_be_ignored(config.policy.generation, "policy.generation", ["in_flight"], **given),
    )


def rule_kept_groups_need_a_choice(config: MasterConfig) -> Iterator[str]:
    section = config.grpo.async_
    if not (section.enabled and section.keep_finished):
        return
    key = "grpo.async.keep_finished"
    if section.selection == "in_order":
        yield (
            f"{key}: true with grpo.async.selection=in_order: prompts that are sampled again come before kept groups, "
            "which would become too old; set it to false, or choose another selection"
        )
    elif section.steps_ahead == 0:
        yield f"{key}: would be ignored, because no group waits between two steps without lookahead; leave it out"


def rule_lookahead_within_max_staleness(config: MasterConfig) -> Iterator[str]:
    section = config.grpo.async_
    if section.enabled and section.steps_ahead > section.max_staleness:
        yield (
            f"grpo.async.lookahead: {section.lookahead} steps ahead, but rows sampled so far ahead would be older than "
            f"grpo.async.max_staleness={section.max_staleness} when they are trained; lower it to at most "
            f"{section.max_staleness}, or raise max_staleness"
        )


def rule_overdue_needs_a_choice_of_groups(config: MasterConfig) -> Iterator[str]:
    section, switch = config.grpo.async_, "grpo.async.selection"
    if not section.takes_stale_rows:
        return
    because = f"{switch} is 'in_order', which waits for the earliest prompts whatever else is ready"
    if section.selection != "in_order":
        switch = "grpo.async.lookahead"
        if section.steps_ahead > 0:
            return
        because = f"{switch} is 0: no other groups are sampled that could be trained instead"
    yield from would_be_ignored(section, "grpo.async", ["overdue"], switch=switch, because=because)


# ---- the loss of stale rows


_CORRECTION = "loss_fn.use_importance_sampling_correction"
_SAMPLED = "grpo.use_generation_logprobs_as_prev"


def rule_stale_rows_need_a_correction(config: MasterConfig) -> Iterator[str]:
    loss, section = config.loss_fn, config.grpo.async_
    if not section.takes_stale_rows or loss.use_importance_sampling_correction or not loss.has_policy_term:
        return
    # What a loss of the user's own does with pi_old is not known here.
    is_sampled = config.grpo.use_generation_logprobs_as_prev
    if is_sampled and (not LOSSES.is_builtin(loss.name) or LOSS_PROPERTIES[loss.name].has_ratio):
        return
    stale = f"rows may be {section.max_staleness} updates old ({_BOUND})"
    correct = f"set {_CORRECTION}=true" + (f" and {_SAMPLED}=false" if is_sampled else "")
    if is_sampled:
        what, other = f"loss_fn.name: {loss.name!r} has no ratio, and {stale}", "loss_fn.name=clipped_pg"
    else:
        what, other = f"{_CORRECTION}: false, but {stale} and pi_old is the trainer's", f"{_SAMPLED}=true"
        if loss.force_on_policy_ratio:
            other += " with loss_fn.force_on_policy_ratio=false"
    advice = f"{correct}, or {other}, or {_BOUND}=0"
    lines = [f"{what}: nothing corrects for the weights that sampled them; {advice}"]
    if config.policy.generation.in_flight == "keep":
        lines.append(
            "policy.generation.in_flight: 'keep' samples from old caches under new weights, which only a correction "
            f"by the recorded log-probabilities allows; {correct}, or in_flight=recompute"
        )
    yield from lines


# ---- engines and workers


def rule_async_engines_have_their_own_gpus(config: MasterConfig) -> Iterator[str]:
    cluster, key = config.cluster, "policy.generation.colocated.enabled"
    is_shared = cluster.gpus_per_node > 0 and config.policy.generation.colocated.enabled
    if not config.grpo.async_.takes_stale_rows or not is_shared:
        return
    yield (
        f"{key}: true lets an engine and a policy worker take turns on a GPU, and {_SWITCH} lets both work at once; "
        f"set {key}=false and policy.generation.colocated.gpus_per_node to the GPUs of engines on each node, or "
        f"{_BOUND}=0"
    )


def rule_rollout_workers_need_processes(config: MasterConfig) -> Iterator[str]:
    workers = config.experience.num_workers
    if workers == 1 or config.cluster.launcher != "local":
        return
    yield (
        f"experience.num_workers: cluster.launcher 'local' runs one rollout worker in this process, got {workers}; set "
        "it to 1, or cluster.launcher=ray"
    )


def rule_group_fits_the_engine(config: MasterConfig) -> Iterator[str]:
    group, places = config.grpo.num_generations_per_prompt, config.policy.generation.max_batch_size
    if not config.grpo.async_.enabled or group <= places:
        return
    yield (
        f"policy.generation.max_batch_size: {places} rows, but a group joins an engine's batch as a whole; expected at "
        f"least grpo.num_generations_per_prompt={group}"
    )


def rule_vllm_rows_can_stand_still(config: MasterConfig) -> Iterator[str]:
    generation, sizes = config.policy.generation, config.policy.generation.vllm_cfg
    if not config.grpo.async_.enabled or generation.backend != "vllm":
        return
    yield from (
        f"policy.generation.vllm_cfg.{name}: {size} with {_SWITCH}: vLLM of several processes decodes while nobody "
        "asks, so that rows cannot stand still for new weights; set it to 1"
        for name, size in (
            ("tensor_parallel_size", sizes.tensor_parallel_size),
            ("pipeline_parallel_size", sizes.pipeline_parallel_size),
        )
        if size > 1
    )
    if config.policy.router_replay.enabled and generation.in_flight == "recompute" and config.grpo.samples_ahead:
        yield (
            "policy.generation.in_flight: 'recompute' with policy.router_replay.enabled: vLLM forgets the routes of "
            "running rows when it computes their caches anew; set it to drain, or policy.generation.backend to torch"
        )
    tokens, places = sizes.max_num_batched_tokens, sizes.max_num_seqs or generation.max_batch_size
    if tokens is not None and tokens < 2 * places:
        yield (
            f"policy.generation.vllm_cfg.max_num_batched_tokens: {tokens} is less than a token of each of {2 * places} "
            f"rows, {places} of groups and as many of validation; raise it, or lower policy.generation.max_batch_size"
        )


_GENERATION = re.compile(r"\|[^|]*\|(.*;)?\s*generation\s*(;|$)")
"""Decoding as a phase of `SITES | REDUCERS | WHEN`."""


def rule_continuous_engine_shows_no_decoding(config: MasterConfig) -> Iterator[str]:
    tracer, backend = config.diagnostics.tracer, config.policy.generation.backend
    is_shown = backend in ENGINE_CAPABILITIES and ENGINE_CAPABILITIES[backend].shows_decoding
    if not config.grpo.async_.enabled or not tracer.enabled or not is_shown:
        return
    watched = [text for text in tracer.selectors if _GENERATION.search(text)]
    yield from (
        f"diagnostics.tracer.selectors: {text!r} watches the engine decode, which it does not show while rows join and "
        f"leave its batch; leave generation out, or set {_SWITCH}=false"
        for text in watched
    )


def rule_async_dynamic_sampling_has_no_rounds(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if not grpo.async_.takes_stale_rows or not grpo.use_dynamic_sampling:
        return
    because = "an asynchronous run has no rounds: each group that is left out is replaced by another prompt"
    yield from would_be_ignored(grpo, "grpo", ("batch_multiplier",), switch=_SWITCH, because=because)
