"""Stages in which workers look at the tokens of rows without the model, for advantages and weights of rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from nemo_rl.algorithms.row_measures import RowMeasures, decide_rows
from nemo_rl.algorithms.scored_rows import TOO_FAR
from nemo_rl.algorithms.stages.stage import UpdateStage
from nemo_rl.algorithms.stages.state import StepState
from nemo_rl.algorithms.token_work import ADVANTAGE, TokenWork, plan_groups, whitening_of
from nemo_rl.data_plane.row_work import RowWorkDone
from nemo_rl.distributed.calls import Pending
from nemo_rl.distributed.worker_pass import RowPass

__all__ = ["MeasureRows", "TokenAdvantages"]

logger = logging.getLogger(__name__)


class MeasureRows(UpdateStage):
    """Workers sum over the tokens of each row, and the driver decides by the sums."""

    def _submit(self, step: StepState) -> Pending[StepState]:
        chosen, measures = step.update, self._tools.measures
        assert measures is not None, "the stage is there because something is measured"
        done = self._tools.policy.submit_row_work(chosen.meta, chosen.plan, measures, stage=RowPass.MEASURE)
        return done.then(lambda found: self._decide(step, found, measures))

    def _decide(self, step: StepState, done: RowWorkDone, measures: RowMeasures) -> StepState:
        """The step with its rows' numbers; without chosen rows when none of them has kept its weight."""
        chosen = step.update
        scored, measured = decide_rows(
            step.scores,
            step.rows.carry,
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
            step.scores, step.rows.carry, self._tools.grpo, estimator=estimator, kl=kl, rows=chosen.rows
        )
        lengths, num_ranks = chosen.meta.sequence_lengths or (), self._tools.policy.layout.dp
        plan = plan_groups(work.groups.tolist(), lengths, dp_world=num_ranks)
        works = [work.of_rows(plan.rows_of_rank(rank)) for rank in range(num_ranks)]

        def submit(parts: Sequence[TokenWork]) -> Pending[RowWorkDone]:
            return self._tools.policy.submit_row_work(chosen.meta, plan, parts, stage=RowPass.ADVANTAGES)

        if not estimator.whitens:
            return submit(works).then(lambda done: _with_advantages(step, done))
        moments = submit([replace(part, only_moments=True) for part in works])

        def whiten(found: RowWorkDone) -> StepState:
            whitening = whitening_of(found.shards)
            return _with_advantages(step, submit([replace(part, whitening=whitening) for part in works]).result())

        return moments.then(whiten)


def _with_advantages(step: StepState, done: RowWorkDone) -> StepState:
    chosen, means = step.update, done.by_row()[ADVANTAGE]
    return replace(
        step,
        scored=step.scores.with_advantages(chosen.rows, means),
        chosen=replace(chosen, meta=done.meta, advantages=means.float()),
    )
