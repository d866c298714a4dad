"""`LogRollouts`: the stage that has rows of a step written for people to read."""

from __future__ import annotations

from nemo_rl.algorithms.stages.stage import Stage
from nemo_rl.algorithms.stages.state import StepState
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.distributed.calls import Pending
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.experience.payload import row_record
from nemo_rl.utils.rollout_file import rollout_path, rounded

__all__ = ["NOT_TRAINED", "LogRollouts"]

NOT_TRAINED = "not trained: no weight ({why})"
NO_PASS = "the run has no such pass (grpo.use_generation_logprobs_as_prev or loss_fn.force_on_policy_ratio)"
"""Why readable rollouts lack log-probabilities of the trainer."""


class LogRollouts(Stage):
    """The rollout worker writes the first rows for people to read."""

    def applies_to(self, step: StepState) -> bool:
        return self._tools.logger.num_rollouts_to_log > 0

    def _submit(self, step: StepState) -> Pending[StepState]:
        config, carry, versions = self._tools.logger, step.rows.carry, step.rows.weight_versions
        rows = range(min(config.num_rollouts_to_log, len(step.rows.meta)))
        meta = step.rows.meta.subset(rows)
        scored = self._scored(step, meta)
        known = set(scored.keys) if scored is not None else set()
        records = [
            row_record(
                reward=carry.rewards[row],
                components={name: part[row] for name, part in carry.components.items()},
                response_tokens=carry.response_lengths[row],
                truncated=carry.truncated[row],
            )
            | {
                "advantage": rounded(float(step.scores.advantages[row])),
                "sample_mask": rounded(float(step.scores.sample_mask[row])),
                "no_weight": step.scores.why_no_weight(row),
                "weight_version": int(versions[row]),
                "no_prev_logprobs": None if meta.keys[row] in known else self._why_not_scored(step, row),
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
        """Those of the rows that the trainer has scored before its update; None where there are none."""
        if step.chosen is None or not self._has_prev_logprobs:
            return None
        wanted, chosen = set(shown.keys), step.chosen.meta
        found = [row for row, key in enumerate(chosen.keys) if key in wanted]
        return chosen.subset(found) if found else None
