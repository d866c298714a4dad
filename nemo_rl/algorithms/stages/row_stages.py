"""Stages in which workers look at the tokens of rows without the model, for advantages and weights of rows."""

from __future__ import annotations

import logging
from dataclasses import replace

from nemo_rl.algorithms.row_measures import LOGPROB_ERROR, MeasuredRows, RowMeasures
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
        errors = None if threshold is None else done.of_rows(LOGPROB_ERROR)
        measured = MeasuredRows.of(chosen.sample_mask, errors, threshold=threshold)
        weights = chosen.sample_mask.masked_fill(measured.is_masked, 0.0)
        step = replace(step, measured=measured, scored=step.scores.with_weights(chosen.rows, weights))
        if not bool((weights > 0).any()):
            logger.warning("step %d: no update: of every row the %s", step.number, TOO_FAR)
            return replace(step, chosen=None)
        return replace(step, chosen=replace(chosen, sample_mask=weights))
