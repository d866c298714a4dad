"""Settings of the loop (`grpo` section): batches, asynchronous sampling, rewards before they become advantages."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt

from nemo_rl.config.base import Options, Section
from nemo_rl.config.parts import ADVANTAGE_ESTIMATORS, SELECTIONS, TOKEN_ESTIMATORS

__all__ = [
    "ESTIMATORS_BY_STEP",
    "AdvantageEstimatorConfig",
    "AsyncConfig",
    "GRPOConfig",
    "OverduePolicy",
    "RewardScalingConfig",
    "RewardShapingConfig",
]

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


class RewardScalingConfig(Section):
    """Rewards are clamped to one interval and mapped linearly to another."""

    enabled: bool = False
    """Scale rewards before shaping; groups are still chosen by the rewards as they were scored."""
    source_min: FiniteFloat = 0.0
    """Rewards below this count as it."""
    source_max: FiniteFloat = 1.0
    """Rewards above this count as it."""
    target_min: FiniteFloat = 0.0
    """The reward that `source_min` is mapped to."""
    target_max: FiniteFloat = 1.0
    """The reward that `source_max` is mapped to."""


class RewardShapingConfig(Section):
    """The penalties of long and truncated responses."""

    enabled: bool = False
    """Shape rewards."""
    overlong_buffer_length: PositiveInt = 128
    """Last tokens before `max_response_length` in which the penalty grows from 0."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Penalty of a response of `max_response_length` tokens or more."""
    max_response_length: PositiveInt | None = None
    """Length in tokens, as a rule `${policy.generation.max_new_tokens}`; must be set for the buffer."""
    stop_properly_penalty_coef: Annotated[float, Field(ge=0, le=1)] | None = None
    """Instead of the buffer: rewards of truncated responses are multiplied by this, which raises negative ones; null
    takes the buffer."""


ESTIMATORS_BY_STEP = ("reinforce_plus_plus", "gdpo")
"""Built-in estimators that give advantages to groups whose rewards are all equal."""


class AdvantageEstimatorConfig(Section):
    """The estimator that turns rewards into advantages."""

    name: Annotated[str, ADVANTAGE_ESTIMATORS] = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gdpo`, `maxrl`,
    `optimal_token_baseline`, `outcome_plus_turn`, `discounted_return` (see docs/algorithms.md), or `module:Class` of
    your own, see docs/extending.md."""
    options: Options = Field(default_factory=dict)
    """Settings of your own estimator."""
    component_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weight of the advantages of each component of the reward, for `gdpo`; 1 where none is named."""
    turn_weight: NonNegativeFloat = 0.5
    """lambda of `outcome_plus_turn`: weight of the advantage of a turn beside that of its row."""
    turn_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """gamma of `discounted_return`: discount of the next turn's reward."""

    def is_builtin_per_token(self, *, kl_in_reward: bool) -> bool:
        """Return whether the estimator is a built-in one that gives every token its own advantage.

        Args:
            kl_in_reward: `loss_fn.use_kl_in_reward`, by which every token has a reward of its own.
        """
        return TOKEN_ESTIMATORS.is_builtin(self.name) and (
            kl_in_reward or TOKEN_ESTIMATORS.builtin[self.name] == ADVANTAGE_ESTIMATORS.builtin[self.name]
        )


class GRPOConfig(Section):
    """The loop: how many prompts, how many samples of each, when to validate, when to stop."""

    num_prompts_per_step: PositiveInt = 32
    """Prompts drawn from the dataset per step."""
    num_generations_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Samples rolled out per prompt (the group size); a leave-one-out baseline needs at least 2."""
    max_num_steps: PositiveInt = 1000
    """Steps to run; a resumed run counts from its first step."""
    max_num_epochs: PositiveInt | None = None
    """Passes over the training prompts; null repeats them until `max_num_steps`."""
    val_period: NonNegativeInt = 10
    """Steps between validations; 0 turns periodic validation off."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = True
    """Validate after the last step."""
    max_val_samples: PositiveInt = 256
    """Most prompts of each validation set in a validation during training; `nemo-rl eval` takes all."""
    stop_at_validation_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop early when a validation reaches this accuracy; needs rewards that are right or wrong."""
    adv_estimator: AdvantageEstimatorConfig = Field(default_factory=AdvantageEstimatorConfig)
    normalize_rewards: bool = True
    """Divide the advantage by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    """Baseline of a sample is the mean reward of its siblings; false: mean of the whole group."""
    use_leave_one_out_std: bool = False
    """Divide by the siblings' standard deviation (NeMo-RL): then the one right answer of a group is not divided."""
    reward_scaling: RewardScalingConfig = Field(default_factory=RewardScalingConfig)
    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    advantage_clip_low: float | None = None
    """Advantages below this are raised to it; null: no limit."""
    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it; null: no limit."""
    drop_zero_advantage_groups: bool | Literal["auto"] = "auto"
    """Leave groups whose rewards are all equal out of the update; dynamic sampling does so itself. auto: where they
    carry no gradient, which KL, an entropy bonus, distillation and estimators that compare a step's rows give them."""
    use_dynamic_sampling: bool = False
    """Sample others in place of the groups that are left out (DAPO): more prompts are drawn until
    `num_prompts_per_step` groups are left; what is beyond is trained in the next step."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Rounds of a step in which prompts are drawn; a step that still has too few groups ends the run."""
    batch_multiplier: Annotated[float, Field(ge=1, le=100)] = 1.0
    """Prompts of such a round in units of `num_prompts_per_step`, rounded up."""
    overlong_filtering: bool = False
    """Give truncated samples no weight in the loss; they still count for the baseline. Of conversations these are the
    endings `token_limit` and `context_full`."""
    seq_logprob_error_threshold: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Give rows no weight in the loss whose mean of exp(|log pi_old - log pi_gen|) over their response is above this:
    sampler and trainer disagree about them. They still count for the baseline; null: no limit."""
    use_generation_logprobs_as_prev: bool = False
    """Take the sampler's log-probabilities as pi_old instead of recomputing them in the trainer."""
    seed: int = 42
    """Seed of the prompt order and of sampling."""
    async_: AsyncConfig = Field(default_factory=AsyncConfig, alias="async")

    @property
    def samples_ahead(self) -> bool:
        """Return whether groups come from the asynchronous schedule. Dynamic sampling at a bound of 0 is that of the
        synchronous trainer, round by round."""
        section = self.async_
        return section.enabled and not (section.max_staleness == 0 and self.use_dynamic_sampling)

    @property
    def prompts_per_round(self) -> int:
        """Return the number of prompts of one sampling round with dynamic sampling."""
        return math.ceil(self.num_prompts_per_step * self.batch_multiplier)

    @property
    def prompts_at_once(self) -> int:
        """Return the number of prompts of one rollout."""
        return self.prompts_per_round if self.use_dynamic_sampling else self.num_prompts_per_step

    @property
    def leaves_equal_groups_out(self) -> bool:
        """Return whether the update is without groups of equal rewards; `MasterConfig.scoring` has decided auto."""
        return bool(self.drop_zero_advantage_groups) or self.use_dynamic_sampling

    @property
    def rows_alive(self) -> int:
        """Return the most rows of a step at one time: with dynamic sampling a round comes to nearly a batch that is
        there."""
        rounds = self.prompts_per_round if self.use_dynamic_sampling else 0
        return (self.num_prompts_per_step + rounds) * self.num_generations_per_prompt
