"""The amounts of work in a step: turns and operations of engines, tokens and microbatches of policy ranks.

Used to find constants of a measured run and to predict another one, so that both count alike. Rows become microbatches
by the run's own planners. Invariant: amounts are functions of recipe, model and rows; nothing is drawn but by seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.algorithms.grpo import plan_logprobs, plan_train
from nemo_rl.distributed.packing import PackPlan, round_up
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ConfigError
from nemo_rl.utils.flops import transformer_flops
from nemo_rl_tools.plan.memory import adapter_slots, plan_slots
from nemo_rl_tools.plan.setting import PlanSetting, passes_of

__all__ = [
    "PlannedRow",
    "Workload",
    "cache_bytes",
    "decode_amounts",
    "decode_flops",
    "pass_amounts",
    "prefill_flops",
    "refit_bytes",
    "rows_of_group",
    "rows_of_step",
    "turn_bytes",
    "workload_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The rows that a run samples."""

    rows: tuple[tuple[int, int], ...]
    """Tokens of prompt and response, of rows from which others are drawn."""
    trained_share: float = 1.0
    """Share of the groups whose rewards differ, which are trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRow:
    """One row of a simulated run."""

    prompt: int
    response: int
    is_trained: bool

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


def workload_of(text: str, setting: PlanSetting, *, trained_share: float = 1.0) -> Workload:
    """Return the workload that is stated as `N`, or as `N-M` for lengths that are evenly spread; prompts are full.

    Raises:
        ConfigError: the text is neither.
    """
    first, _, last = text.partition("-")
    limit = setting.policy.longest_response
    if not (first.isdigit() and (last.isdigit() or last == text[len(first) :])):
        raise ConfigError(f"--lengths: expected response tokens as N or N-M, such as 200-900, got {text!r}")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= limit:
        raise ConfigError(f"--lengths: expected 1 <= N <= M <= {limit}, the longest response, got {text!r}")
    prompt = max(1, min(setting.config.data.max_input_seq_length, setting.policy.max_total_sequence_length - high))
    rows = tuple((prompt, length) for length in range(low, high + 1))
    return Workload(rows=rows, trained_share=trained_share)


def rows_of_group(setting: PlanSetting, workload: Workload, ordinal: int) -> list[PlannedRow]:
    """Return the rows of the group with this ordinal, the same for each call."""
    draw = random.Random(f"{setting.config.grpo.seed}/{ordinal}")
    prompt, _ = draw.choice(workload.rows)
    is_trained = draw.random() < workload.trained_share
    limit = min(setting.policy.longest_response, setting.policy.max_total_sequence_length - 1)
    prompt = min(prompt, setting.policy.max_total_sequence_length - 1)
    limit = min(limit, setting.policy.max_total_sequence_length - prompt)
    lengths = [draw.choice(workload.rows)[1] for _ in range(setting.config.grpo.num_generations_per_prompt)]
    return [PlannedRow(prompt=prompt, response=min(length, limit), is_trained=is_trained) for length in lengths]


def rows_of_step(setting: PlanSetting, workload: Workload, *, first: int = 0) -> list[PlannedRow]:
    count = setting.config.grpo.num_prompts_per_step
    return [row for number in range(first, first + count) for row in rows_of_group(setting, workload, number)]


def decode_flops(setting: PlanSetting, row: PlannedRow) -> float:
    """Return the operations for the tokens of a row, with its share of the prompt, which its group reads once."""
    shape = setting.model.flops_shape
    prompt = transformer_flops(shape, [row.prompt], with_backward=False)
    whole = transformer_flops(shape, [row.tokens], with_backward=False)
    return (whole - prompt) / setting.policy.generation.ranks_per_engine


def prefill_flops(setting: PlanSetting, prompt: int) -> float:
    flops = transformer_flops(setting.model.flops_shape, [prompt], with_backward=False)
    return flops / setting.policy.generation.ranks_per_engine


def turn_bytes(setting: PlanSetting) -> float:
    """Return the bytes of weights that a rank of an engine reads in a turn."""
    used = setting.model.flops_shape.matmul_flops_per_token / 2 * setting.engine_element_bytes
    return used / setting.policy.generation.ranks_per_engine


def cache_bytes(setting: PlanSetting) -> float:
    """Return the bytes of keys and values of one token on a rank of an engine."""
    shape = setting.model.flops_shape
    size = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * setting.engine_element_bytes
    return size / setting.policy.generation.ranks_per_engine


def decode_amounts(setting: PlanSetting, rows: Sequence[PlannedRow]) -> dict[str, float]:
    """Return the work of the first engine, which has its share of the rows and decodes them batch by batch."""
    generation, size = setting.policy.generation, setting.config.grpo.num_generations_per_prompt
    own = rows[: math.ceil(len(rows) / size / generation.num_replicas) * size]
    batches = [
        own[start : start + generation.max_batch_size] for start in range(0, len(own), generation.max_batch_size)
    ]
    turns = sum(max(row.response for row in batch) for batch in batches)
    prompts = sum(prefill_flops(setting, row.prompt) for row in own[::size])
    cached = sum(row.response * (row.prompt + row.response / 2) for row in own)
    return {
        "decode_flop_s": prompts + sum(decode_flops(setting, row) for row in own),
        "row_turn_s": float(sum(row.response for row in own)),
        "turn_layer_s": float(turns * setting.model.flops_shape.num_layers),
        "turn_byte_s": turns * turn_bytes(setting) + cached * cache_bytes(setting),
    }


def pass_amounts(
    setting: PlanSetting, rows: Sequence[PlannedRow], passes: Sequence[WorkerPass] | None = None
) -> dict[str, float]:
    """Return the work of the busiest policy rank in these passes, by default all of a step.

    Rows of groups that are not trained are left out where the run leaves them out.

    Raises:
        ConfigError: a row does not fit a microbatch, or rows do not divide.
    """
    found = dict.fromkeys(("train_flop_s", "token_layer_s", "microbatch_layer_s", "update_s"), 0.0)
    layout, policy = setting.layout, setting.policy
    size, drops_rows = policy.train_global_batch_size, policy.sequence_packing.is_on or policy.dynamic_batching.enabled
    updates = [
        [row for row in rows[start : start + size] if row.is_trained or not drops_rows]
        for start in range(0, len(rows), size)
        if any(row.is_trained for row in rows[start : start + size])
    ]
    lengths, sizes = [row.tokens for update in updates for row in update], [len(update) for update in updates]
    if not lengths:
        return found
    plan = plan_train(lengths, sizes, policy, layout=layout)
    layers = setting.model.flops_shape.num_layers / layout.pp
    for part in passes_of(setting) if passes is None else passes:
        is_training = part is WorkerPass.TRAIN
        used = plan if is_training else plan_logprobs(plan, lengths, policy, layout=layout)
        thirds = 3 if is_training else 1
        work = [_rank_work(setting, used, rank, lengths, is_training=is_training) for rank in range(used.num_ranks)]
        found["train_flop_s"] += max(flops for flops, _ in work)
        found["token_layer_s"] += thirds * layers * max(tokens for _, tokens in work) / (layout.cp * layout.tp)
        found["microbatch_layer_s"] += thirds * layers * len(used.microbatches[0])
        found["update_s"] += len(sizes) if is_training else 0
    return found


def _rank_work(
    setting: PlanSetting, plan: PackPlan, rank: int, lengths: Sequence[int], *, is_training: bool
) -> tuple[float, float]:
    """Return operations and tokens, with padding, of a data-parallel rank."""
    layout, widths = setting.layout, list[int]()
    multiple = layout.round_up_multiple(setting.policy.make_sequence_length_divisible_by)
    for microbatch in plan.microbatches[rank]:
        own = [round_up(lengths[row], multiple) for row in microbatch]
        widths += own if plan.packed else [max(own)] * len(own)
    flops = transformer_flops(
        setting.model.flops_shape,
        widths,
        with_backward=is_training,
        trains_weights=not setting.policy.lora.enabled,
    )
    return flops / (layout.tp * layout.cp * layout.pp), float(sum(widths))


def refit_bytes(setting: PlanSetting) -> int:
    return sum(slot.num_bytes for slot in adapter_slots(setting) or plan_slots(setting))
