"""The bodies of the stages of a GRPO step, which work on rows that are in the data plane, in the order in which a step
runs them.

    build_stages
      |- score               SampleStats -> advantages, weights, tags        (Score, score_rows)
      |                      lengths -> rows of each rank and microbatch    (select_train_rows, plan_train)
      |- prev_logprobs       workers write log-probs of the policy          (PrevLogprobs, plan_logprobs)
      |- reference_logprobs  workers write those of the reference           (ReferenceLogprobs)
      |- topk_logits         workers of a teacher write its top-k         (TeacherTopK, plan_rows)
      |- measure_rows        workers sum over tokens of each row            (MeasureRows)
      |- token_advantages    workers write one for each token                (TokenAdvantages)
      |- advantages          row scalars -> data plane                      (Advantages, write_columns)
      |- train               workers fetch and train                        (Train, TQWorker.train_presharded)
      `- log                 readable samples                               (LogRollouts)

The driver holds keys, lengths, tags and per-row scalars, never a per-token tensor.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from nemo_rl.algorithms.grpo import (
    TOO_FAR,
    ScoredRows,
    plan_logprobs,
    plan_rows,
    plan_train,
    score_rows,
    select_train_rows,
)
from nemo_rl.algorithms.stages.columns import ROLLOUT, StageColumns, fetched_fields
from nemo_rl.algorithms.stages.stage import (
    ChosenRows,
    Stage,
    StageTools,
    StepState,
    UpdateStage,
    weights_of_rows,
)
from nemo_rl.algorithms.token_work import ADVANTAGE, TokenStatistics, TokenWork, decide_rows, plan_groups, whitening_of
from nemo_rl.data_plane.batch_meta import RowResults
from nemo_rl.data_plane.chunks.wire import message_bytes
from nemo_rl.data_plane.client.link import CLEAR, stage_context
from nemo_rl.data_plane.client.meter import columns_bytes
from nemo_rl.data_plane.column_io import write_columns
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.keys import group_uid
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_groups import Pending, ask
from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.experience.payload import row_record
from nemo_rl.models.policy.interfaces import SQUARED_PROBS, STALENESS
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.utils.r3_trace import trace_retired
from nemo_rl.utils.rollout_file import PROMPT_NUMBER, PROMPT_SOURCE, rollout_path, rounded

__all__ = ["NOT_TRAINED", "LogRollouts", "MeasureRows", "TokenAdvantages", "build_stages", "clear_untrained"]

logger = logging.getLogger(__name__)

NOT_TRAINED = "not trained: no weight ({why})"
NO_PASS = "the run has no such pass (grpo.use_generation_logprobs_as_prev or loss_fn.force_on_policy_ratio)"
"""Reasons why readable rollouts lack log-probabilities of the trainer."""


class Score(Stage):
    """Rewards to advantages and weights; the rows that are trained, and where."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        scored = score_rows(
            step.rows.sample_stats,
            step.rows.group_uids,
            self._tools.grpo,
            per_token=self._tools.token_estimator is not None,
            by_conversation=self._tools.weighs_by_row,
        )
        if self._tools.loss_weights:
            scored = scored.weighed(weights_of_rows(step, self._tools.loss_weights))
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
        written = self._tools.policy.get_logprobs_from_meta.submit(step.update.meta, plan, with_squares=with_squares)
        return written.then(step.with_chosen_meta)


class ReferenceLogprobs(UpdateStage):
    """Workers write the log-probabilities of the reference policy."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        step, plan = _with_logprob_plan(step, self._tools)
        written = self._tools.policy.get_reference_policy_logprobs_from_meta.submit(step.update.meta, plan)
        return written.then(step.with_chosen_meta)


class TeacherTopK(UpdateStage):
    """The teacher's workers write its most likely tokens with their log-probabilities, and rest until the next step."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        teacher, meta = self._tools.teacher, step.update.meta
        assert teacher is not None, "the stage is there because the loss distils"
        plan = plan_rows(meta.sequence_lengths or (), teacher.settings, layout=teacher.policy.layout)
        written = teacher.policy.get_topk_logits_from_meta.submit(
            meta, plan, k=teacher.top_k, vocab_size=teacher.vocab_size
        )

        def rest(found: KVBatchMeta) -> StepState:
            teacher.policy.run(ask(TQWorker.rest), self.name)
            self.driver_bytes = teacher.policy.driver_bytes
            return step.with_chosen_meta(found)

        return written.then(rest)


class Advantages(UpdateStage):
    """The driver writes weights, and advantages unless each token has its own: one number per row."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        chosen = step.update
        ages = step.policy_version - torch.from_numpy(step.rows.weight_versions)[list(chosen.rows)]
        numbers = {
            "advantages": chosen.advantages,
            "sample_mask": chosen.sample_mask,
            STALENESS: ages.to(torch.int32),
        }
        columns = {name: numbers[name] for name in self.writes}
        meta = write_columns(self._tools.client, chosen.meta, columns)
        self.driver_bytes += message_bytes(meta.keys) + columns_bytes(columns)
        return Pending.done(step.with_chosen_meta(meta))


class Train(UpdateStage):
    """Workers fetch and train, one optimizer step per global batch."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        policy: TQPolicy = self._tools.policy
        chosen, fields = step.update, fetched_fields(self.columns)
        trained = policy.train_from_meta.submit(chosen.meta, chosen.plan, self._tools.loss_fn, fields=fields)
        return trained.then(lambda summary: replace(step, train=summary))


class MeasureRows(UpdateStage):
    """Workers sum over the tokens of each row, and the driver decides by the sums."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        chosen, measures = step.update, self._tools.measures
        assert measures is not None, "the stage is there because something is measured"
        done = self._tools.policy.submit_map_rows(chosen.meta, chosen.plan, measures, stage=RowPass.MEASURE)
        return done.then(lambda found: self._decide(step, found, measures))

    def _decide(self, step: StepState, done: RowResults, measures: TokenStatistics) -> StepState:
        """The step with its rows' numbers; without chosen rows when none of them has kept its weight."""
        chosen = step.update
        scored, measured = decide_rows(
            step.scores,
            step.rows.sample_stats,
            self._tools.grpo,
            measures=measures,
            numbers=done.by_row(),
            rows=chosen.rows,
            per_token=self._tools.token_estimator is not None,
        )
        step, numbers = replace(step, measured=measured, scored=scored), scored.select(chosen.rows)
        if not bool((numbers.sample_mask > 0).any()):
            logger.warning("step %d: no update: of every row the %s", step.number, TOO_FAR)
            return replace(step, chosen=None)
        return replace(step, chosen=replace(chosen, sample_mask=numbers.sample_mask, advantages=numbers.advantages))


class TokenAdvantages(UpdateStage):
    """Workers compute an advantage for each token and write them; the driver gets the mean of each row."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        chosen, estimator = step.update, self._tools.token_estimator
        assert estimator is not None, "the stage is there because advantages are those of tokens"
        kl = None if self._tools.measures is None else self._tools.measures.kl
        work = TokenWork.of(
            step.scores, step.rows.sample_stats, self._tools.grpo, estimator=estimator, kl=kl, rows=chosen.rows
        )
        lengths, num_ranks = chosen.meta.sequence_lengths or (), self._tools.policy.layout.dp
        plan = plan_groups(work.groups.tolist(), lengths, dp_world=num_ranks)
        works = [work.of_rows(plan.rows_of_rank(rank)) for rank in range(num_ranks)]

        def submit(parts: Sequence[TokenWork]) -> Pending[RowResults]:
            return self._tools.policy.submit_map_rows(chosen.meta, plan, parts, stage=RowPass.ADVANTAGES)

        if not estimator.whitens:
            return submit(works).then(lambda done: _with_advantages(step, done))
        moments = submit([replace(part, only_moments=True) for part in works])

        def whiten(found: RowResults) -> StepState:
            whitening = whitening_of(found.shards)
            return _with_advantages(step, submit([replace(part, whitening=whitening) for part in works]).result())

        return moments.then(whiten)


def _with_advantages(step: StepState, done: RowResults) -> StepState:
    chosen, means = step.update, done.by_row()[ADVANTAGE]
    return replace(
        step,
        scored=step.scores.with_advantages(chosen.rows, means),
        chosen=replace(chosen, meta=done.meta, advantages=means.float()),
    )


class LogRollouts(Stage):
    """The rollout worker writes the first rows for people to read; as many of each source, where there are several."""

    def applies_to(self, step: StepState) -> bool:
        return self._tools.logger.num_rollouts_to_log > 0

    def _submit(self, step: StepState) -> Pending[StepState]:
        config, sample_stats, versions = self._tools.logger, step.rows.sample_stats, step.rows.weight_versions
        about = sample_stats.conversations
        count = min(config.num_rollouts_to_log, len(step.rows.meta))
        rows = _first_of_sources(step, count) if step.drawn[0].source else range(count)
        meta = step.rows.meta.subset(rows)
        scored = self._scored(step, meta)
        known = set(scored.keys) if scored is not None else set()
        draws = dict(zip(step.uids, step.drawn, strict=False))
        records = [
            row_record(
                reward=sample_stats.rewards[row],
                components={name: part[row] for name, part in sample_stats.components.items()},
                response_tokens=sample_stats.response_lengths[row],
                truncated=sample_stats.truncated[row],
                ending=about.ending_of(row).value if about is not None else None,
            )
            | {
                "advantage": rounded(float(step.scores.advantages[row])),
                "sample_mask": rounded(float(step.scores.sample_mask[row])),
                "no_weight": step.scores.why_no_weight(row),
                "weight_version": int(versions[row]),
                PROMPT_NUMBER: draw.prompt if (draw := draws.get(group_uid(step.rows.meta.keys[row]))) else None,
                **({PROMPT_SOURCE: draw.source} if draw and draw.source else {}),
                "no_prev_logprobs": None if step.rows.meta.keys[row] in known else self._why_not_scored(step, row),
            }
            for row in rows
        ]
        path = rollout_path(config.log_dir, step.number)
        written = self._tools.rollout.submit_log_rollouts(meta, scored=scored, path=path, records=records)
        return written.then(lambda _: step)

    @property
    def _has_prev_logprobs(self) -> bool:
        return WorkerPass.PREV_LOGPROBS.column in self.reads

    def _why_not_scored(self, step: StepState, row: int) -> str:
        return NOT_TRAINED.format(why=step.scores.why_no_weight(row)) if self._has_prev_logprobs else NO_PASS

    def _scored(self, step: StepState, shown: KVBatchMeta) -> KVBatchMeta | None:
        """Return the rows that the trainer has scored before its update; None where there are none."""
        if step.chosen is None or not self._has_prev_logprobs:
            return None
        wanted, chosen = set(shown.keys), step.chosen.meta
        found = [row for row, key in enumerate(chosen.keys) if key in wanted]
        return chosen.subset(found) if found else None


def _first_of_sources(step: StepState, count: int) -> list[int]:
    """Return so many of the first rows, the same number of each source as far as there are enough."""
    keys, draws = step.rows.meta.keys, dict(zip(step.uids, step.drawn, strict=True))
    seen, places = Counter[str](), list[int]()
    for key in keys:
        source = draws[group_uid(key)].source
        places.append(seen[source])
        seen[source] += 1
    return sorted(sorted(range(len(keys)), key=places.__getitem__)[:count])


BODIES: Mapping[str, type[Stage]] = {
    "score": Score,
    WorkerPass.PREV_LOGPROBS: PrevLogprobs,
    WorkerPass.REFERENCE_LOGPROBS: ReferenceLogprobs,
    WorkerPass.TOPK_LOGITS: TeacherTopK,
    RowPass.MEASURE: MeasureRows,
    RowPass.ADVANTAGES: TokenAdvantages,
    "advantages": Advantages,
    WorkerPass.TRAIN: Train,
    "log": LogRollouts,
}
"""Bodies by the names of `stage_columns`."""


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
        with stage_context(CLEAR):
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
