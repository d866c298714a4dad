"""Batch arithmetic of a step: rows, global batches, microbatches and the sizes of passes.

Planned by the run's own planners, with every row as long as it may be: then there are the most microbatches, and none
is larger. Invariant: `PassTokens` are upper bounds for the rank that has most of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_rl.algorithms.grpo import plan_logprobs, plan_train
from nemo_rl.cluster.plan.activations import PassTokens
from nemo_rl.cluster.plan.setting import PlanSetting
from nemo_rl.distributed.packing import round_up
from nemo_rl.distributed.worker_pass import WorkerPass

__all__ = ["Batches", "pass_tokens", "plan_batches"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The batches of one step with rows of full length."""

    rows: int
    """Samples of a step."""
    row_tokens: int
    """Tokens of the longest row."""
    prompt_tokens: int
    response_tokens: int
    global_batches: int
    """Optimizer steps."""
    global_batch_rows: int
    rows_per_rank: int
    """Rows of a global batch on one data-parallel rank."""
    train_microbatches: int
    """Microbatches of a global batch on one data-parallel rank."""
    logprob_microbatches: int
    """Microbatches of the step on one data-parallel rank."""
    train: PassTokens
    logprob: PassTokens

    @property
    def tokens(self) -> int:
        """Return the most tokens of a step."""
        return self.rows * self.row_tokens


def plan_batches(setting: PlanSetting) -> Batches:
    """Raise ConfigError where a row does not fit a microbatch, or rows do not divide."""
    grpo, policy, layout = setting.config.grpo, setting.policy, setting.layout
    rows, size = grpo.num_prompts_per_step * grpo.num_generations_per_prompt, policy.train_global_batch_size
    width, response = policy.max_total_sequence_length, policy.longest_response
    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    lengths = [width] * rows
    plan = plan_train(lengths, sizes, policy, layout=layout)
    logprobs = plan_logprobs(plan, lengths, policy, layout=layout)
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    capped = packing if packing.enabled else dynamic if dynamic.enabled else None
    rows_per_rank = math.ceil(max(sizes) / layout.dp)
    padded = round_up(width, layout.round_up_multiple(policy.make_sequence_length_divisible_by))
    fixed = (policy.train_micro_batch_size, policy.logprob_batch_size or policy.train_micro_batch_size)
    caps = (
        (capped.train_mb_tokens, capped.logprob_mb_tokens) if capped is not None else [rows * padded for rows in fixed]
    )
    per_rank = (rows_per_rank * padded, math.ceil(rows / layout.dp) * padded)
    train, logprob = (
        pass_tokens(
            setting, tokens=min(cap, most), width=padded, predicted=min(response, width - 1), is_packed=packing.enabled
        )
        for cap, most in zip(caps, per_rank, strict=True)
    )
    return Batches(
        rows=rows,
        row_tokens=width,
        prompt_tokens=min(setting.config.data.max_input_seq_length, width - 1),
        response_tokens=response,
        global_batches=len(sizes),
        global_batch_rows=max(sizes),
        rows_per_rank=rows_per_rank,
        train_microbatches=max(plan.steps),
        logprob_microbatches=max(len(part) for part in logprobs.microbatches),
        train=train,
        logprob=logprob,
    )


def pass_tokens(setting: PlanSetting, *, tokens: int, width: int, predicted: int, is_packed: bool) -> PassTokens:
    """Return the pass of the context rank with the most tokens to predict.

    Args:
        tokens: of the pass over all context ranks.
        width: of a row.
        predicted: positions of a row that predict; the logits of padded rows are computed where any of them does.
    """
    rows, cp = max(1, tokens // width), setting.layout.cp
    if is_packed:
        local = tokens // cp
        selected = min(local, rows * predicted + max(0, tokens - rows * width))
        return PassTokens(
            rows=1, width=local, predicted=selected, selected=selected, sequence=width, is_packed=rows > 1
        )
    # Shorter rows may use the cap better than those of full length.
    local = tokens // rows // cp
    count = min(local, predicted)
    return PassTokens(rows=rows, width=local, predicted=count, selected=rows * count, sequence=width, is_packed=False)


def passes_of(setting: PlanSetting) -> tuple[WorkerPass, ...]:
    """Return the worker passes that a step of this recipe has, in order."""
    chosen = [WorkerPass.TRAIN]
    if setting.config.loss_fn.reference_policy_kl_penalty > 0:
        chosen.insert(0, WorkerPass.REFERENCE_LOGPROBS)
    if setting.config.has_prev_logprobs_pass:
        chosen.insert(0, WorkerPass.PREV_LOGPROBS)
    return tuple(chosen)
