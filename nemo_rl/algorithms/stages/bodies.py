"""What each stage of a GRPO step does with rows that are in the data plane, in the order in which a step runs them.

    build_stages
      |- score               RowScalars -> advantages, weights, tags        (Score, score_rows)
      |                      lengths -> rows of each rank and microbatch    (select_train_rows, plan_train)
      |- prev_logprobs       workers write log-probs of the policy          (PrevLogprobs, plan_logprobs)
      |- reference_logprobs  workers write those of the reference           (ReferenceLogprobs)
      |- measure_rows        workers sum over tokens of each row            (MeasureRows)
      |- token_advantages    workers write one for each token                (TokenAdvantages)
      |- advantages          row scalars -> data plane                      (Advantages, write_columns)
      |- train               workers fetch and train                        (Train, TQPolicy.submit_train_from_meta)
      `- log                 readable samples                               (LogRollouts)

The driver holds keys, lengths, tags and per-row scalars, never a per-token tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nemo_rl.algorithms.grpo import plan_logprobs, plan_train, score_rows, select_train_rows
from nemo_rl.algorithms.scored_rows import ScoredRows
from nemo_rl.algorithms.stages.columns import ROLLOUT, StageColumns, fetched_fields
from nemo_rl.algorithms.stages.log_rollouts import NOT_TRAINED, LogRollouts
from nemo_rl.algorithms.stages.row_stages import MeasureRows, TokenAdvantages
from nemo_rl.algorithms.stages.stage import Stage, StageTools, UpdateStage
from nemo_rl.algorithms.stages.state import ChosenRows, StepState
from nemo_rl.data_plane.chunks.wire import message_bytes
from nemo_rl.data_plane.client.link import CLEAR, working_for
from nemo_rl.data_plane.client.meter import columns_bytes
from nemo_rl.data_plane.column_io import write_columns
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.distributed.calls import Pending
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.models.policy.interfaces import SQUARED_PROBS
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.r3_trace import trace_retired

__all__ = ["build_stages", "clear_untrained"]

logger = logging.getLogger(__name__)


class Score(Stage):
    """Rewards to advantages and weights; the rows that are trained, and where."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        per_token = self._tools.token_estimator is not None
        scored = score_rows(step.rows.carry, step.rows.group_uids, self._tools.grpo, per_token=per_token)
        return Pending.done(replace(step, scored=scored, chosen=self._choose(step, scored)))

    def _choose(self, step: StepState, scored: ScoredRows) -> ChosenRows | None:
        """Rows with weight, tagged and planned; None when no row carries a gradient."""
        meta, policy, layout = step.rows.meta, self._tools.settings, self._tools.policy.layout
        chosen = select_train_rows(
            scored, meta.sequence_lengths or (), policy, layout=layout, whole_groups=self._tools.needs_whole_groups
        )
        if not chosen.rows:
            logger.warning("step %d: %s; no update", step.number, scored.why_no_update())
            return None
        tagged = meta.with_tags({"group_std": [round(value, 6) for value in scored.stats.row_std.tolist()]})
        kept, numbers = tagged.subset(chosen.rows), scored.select(chosen.rows)
        lengths = kept.sequence_lengths or ()
        return ChosenRows(
            rows=chosen.rows,
            meta=kept,
            plan=plan_train(lengths, chosen.batch_sizes, policy, layout=layout, cost=self._tools.cost),
            advantages=numbers.advantages,
            sample_mask=numbers.sample_mask,
        )


class PrevLogprobs(UpdateStage):
    """Workers write the log-probabilities of the policy before its update."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        step, plan = _with_logprob_plan(step, self._tools)
        with_squares = SQUARED_PROBS in self.writes
        written = self._tools.policy.submit_logprobs_from_meta(step.update.meta, plan, with_squares=with_squares)
        return written.then(step.with_chosen_meta)


class ReferenceLogprobs(UpdateStage):
    """Workers write the log-probabilities of the reference policy."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        step, plan = _with_logprob_plan(step, self._tools)
        written = self._tools.policy.submit_reference_policy_logprobs_from_meta(step.update.meta, plan)
        return written.then(step.with_chosen_meta)


class Advantages(UpdateStage):
    """The driver writes weights, and advantages unless each token has its own: one number per row."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        chosen = step.update
        numbers = {"advantages": chosen.advantages, "sample_mask": chosen.sample_mask}
        columns = {name: numbers[name] for name in self.writes}
        meta = write_columns(self._tools.client, chosen.meta, columns)
        self.driver_bytes += message_bytes(meta.keys) + columns_bytes(columns)
        return Pending.done(step.with_chosen_meta(meta))


class Train(UpdateStage):
    """Workers fetch and train, one optimizer step per global batch."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        policy: TQPolicy = self._tools.policy
        chosen, fields = step.update, fetched_fields(self.columns)
        trained = policy.submit_train_from_meta(chosen.meta, chosen.plan, self._tools.loss_fn, fields=fields)
        return trained.then(lambda summary: replace(step, train=summary))


BODIES: Mapping[str, type[Stage]] = {
    "score": Score,
    WorkerPass.PREV_LOGPROBS: PrevLogprobs,
    WorkerPass.REFERENCE_LOGPROBS: ReferenceLogprobs,
    RowPass.MEASURE: MeasureRows,
    RowPass.ADVANTAGES: TokenAdvantages,
    "advantages": Advantages,
    WorkerPass.TRAIN: Train,
    "log": LogRollouts,
}
"""By the names of `stage_columns`."""


def build_stages(columns: Sequence[StageColumns], tools: StageTools) -> tuple[Stage, ...]:
    """Return the stages of a run, in the order in which a step runs them; its rows come from a `BatchSource`."""
    return tuple(BODIES[each.name](each, tools) for each in columns if each.name != ROLLOUT)


def clear_untrained(client: DataPlaneClient, step: StepState) -> None:
    """Clears the rows that were not trained before those that were, so that their history says why."""
    untrained, keys_of = set(step.untrained_keys), dict[str, list[str]]()
    for row, key in enumerate(step.rows.meta.keys if untrained else ()):
        if key in untrained:
            keys_of.setdefault(NOT_TRAINED.format(why=step.scores.why_no_weight(row)), []).append(key)
    for reason, keys in keys_of.items():
        with working_for(CLEAR):
            client.kv_clear(keys, step.partition, reason=reason)
        trace_retired(keys=keys, reason=reason)


def _with_logprob_plan(step: StepState, tools: StageTools) -> tuple[StepState, PackPlan]:
    """The plan of the step's log-probability stages, made by the first of them."""
    chosen, policy = step.update, tools.settings
    plan = chosen.logprob_plan
    if plan is None:
        lengths, layout = chosen.meta.sequence_lengths or (), tools.policy.layout
        plan = plan_logprobs(chosen.plan, lengths, policy, layout=layout, cost=tools.cost)
    return replace(step, chosen=replace(chosen, logprob_plan=plan)), plan
