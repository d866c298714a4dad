"""Batch arithmetic of a step: rows, global batches, microbatches and the sizes of passes; and how long both sides of an
asynchronous run take for them.

Planned by the run's own planners, with every row as long as it may be: then there are the most microbatches, and none
is larger. Invariant: `PassTokens` are upper bounds for the rank that has most of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from nemo_rl.algorithms.grpo import plan_logprobs, plan_train
from nemo_rl.cluster.plan.activations import PassTokens
from nemo_rl.cluster.plan.setting import PlanSetting
from nemo_rl.distributed.packing import round_up
from nemo_rl.distributed.worker_pass import WorkerPass

__all__ = ["Balance", "Batches", "balance_of", "pass_tokens", "plan_batches"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Seconds of both sides of an asynchronous run for the rows of one step, and tokens in a second, of full rows.

    Engines and trainer work at the same time, so a step takes as long as the slower side, and then the refit. Both
    sides are taken at the bounds of `plan`: peak arithmetic, memory and links. Invariant: engines are as full as the
    lookahead L allows, that is with the rows of 1 + L steps, since the run starts groups as fast as it trains them.
    """

    engines: int
    """Engines of the recipe."""
    generation_s: float
    training_s: float
    """Seconds of all passes of the policy workers and of the data plane."""
    refit_s: float
    engine_tokens_s: float
    """Response tokens in a second of one engine."""
    training_tokens_s: float
    """Tokens of rows, prompts included, in a second of all policy workers."""
    balanced_engines: int | None
    """Fewest engines that keep up with the trainer; None where no number of them does."""
    least_generation_s: float
    """Seconds of sampling with one group on each engine, which more engines do not shorten."""

    @property
    def binding(self) -> str:
        """Return the side that a step waits for."""
        return "engines" if self.generation_s > self.training_s else "trainer"

    @property
    def idle_share(self) -> float:
        """Return the share of a step, without its refit, in which the other side waits."""
        slower = max(self.generation_s, self.training_s)
        return 1 - min(self.generation_s, self.training_s) / slower if slower else 0.0

    @property
    def step_s(self) -> float:
        return max(self.generation_s, self.training_s) + self.refit_s

    @property
    def advice(self) -> str:
        """Return what would balance the sides."""
        if self.balanced_engines is None:
            return (
                f"no number of engines keeps up: the turns of a row take {self.least_generation_s:.2f} s, the trainer "
                f"{self.training_s:.2f} s; raise grpo.async.lookahead (and max_staleness), or take fewer policy workers"
            )
        if self.balanced_engines == self.engines:
            return f"{self.engines} engines keep up with the trainer, and fewer would not"
        other = "policy.generation.num_replicas, or give GPUs to the other side"
        return f"{self.balanced_engines} engines would keep up with the trainer, got {self.engines}; change {other}"

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "binding": self.binding,
            "idle_share": self.idle_share,
            "step_s": self.step_s,
            "advice": self.advice,
        }


def balance_of(
    batches: Batches,
    generation_s: Callable[[int], float],
    *,
    engines: int,
    most_engines: int,
    training_s: float,
    refit_s: float,
) -> Balance:
    """Return the balance of a layout.

    Args:
        generation_s: seconds in which so many engines sample the rows of one step.
        engines: of the recipe.
        most_engines: that can have a group at one time.
    """
    seconds = generation_s(min(engines, most_engines))
    keeps_up = (count for count in range(1, most_engines + 1) if generation_s(count) <= training_s)
    return Balance(
        engines=engines,
        generation_s=seconds,
        training_s=training_s,
        refit_s=refit_s,
        engine_tokens_s=batches.rows * min(batches.response_tokens, batches.row_tokens) / seconds / engines,
        training_tokens_s=batches.tokens / training_s,
        balanced_engines=next(keeps_up, None),
        least_generation_s=generation_s(most_engines),
    )
