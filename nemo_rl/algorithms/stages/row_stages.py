"""Stages in which workers look at the tokens of rows without the model, for advantages and weights of rows."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from nemo_rl.algorithms.grpo import less_penalties
from nemo_rl.algorithms.row_measures import MeasuredRows, RowMeasures
from nemo_rl.algorithms.stages.stage import UpdateStage
from nemo_rl.algorithms.stages.state import TOO_FAR, StepState
from nemo_rl.distributed.calls import Pending
from nemo_rl.distributed.worker_pass import RowPass
from nemo_rl.models.policy.tq_policy import RowWorkDone

__all__ = ["MeasureRows"]

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
        chosen, threshold = step.update, measures.error_threshold
        measured = MeasuredRows.of(chosen.sample_mask, done.by_row(), threshold=threshold)
        weights = chosen.sample_mask.masked_fill(measured.is_masked, 0.0)
        scored = step.scores.with_weights(chosen.rows, weights)
        if measured.kl is not None and measures.kl is not None:
            penalties = measures.kl.weight * measured.kl
            scored = less_penalties(scored, step.rows.carry, self._tools.grpo, rows=chosen.rows, penalties=penalties)
        step = replace(step, measured=measured, scored=scored)
        if not bool((weights > 0).any()):
            logger.warning("step %d: no update: of every row the %s", step.number, TOO_FAR)
            return replace(step, chosen=None)
        advantages = scored.advantages[torch.tensor(chosen.rows)]
        return replace(step, chosen=replace(chosen, sample_mask=weights, advantages=advantages))
