"""What workers of the run found in the tokens of its rows, made again from kept columns: weights and advantages.

The same functions as in the run, on the log-probabilities that were kept: they are the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.kept_steps.record import KeptRows, KeptStep, StepStatus
from nemo_rl.algorithms.row_measures import KlInReward, RowMeasures, decide_rows
from nemo_rl.algorithms.scored_rows import ScoredRows
from nemo_rl.algorithms.token_work import TokenEstimator, TokenWork, advantages_in_process, token_estimator
from nemo_rl.data_plane.chunks.ragged import materialize
from nemo_rl.diagnostics.step_replay.chain import ChainLink
from nemo_rl.diagnostics.step_replay.columns import KeptColumns
from nemo_rl.diagnostics.step_replay.request import ReplayProblem
from nemo_rl.diagnostics.step_replay.settings import ReplaySettings
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.models.policy.interfaces import TOKEN_ADVANTAGES

__all__ = ["RowNumbers", "TokenNeeds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenNeeds:
    """What the advantages and weights of a recipe need from tokens."""

    measures: RowMeasures | None
    estimator: TokenEstimator | None
    kl: KlInReward | None

    @classmethod
    def of(cls, settings: ReplaySettings) -> TokenNeeds:
        config = settings.config
        return cls(measures=RowMeasures.of(config), estimator=token_estimator(config), kl=KlInReward.of(config.loss_fn))

    @property
    def needs_whole_groups(self) -> bool:
        """As in the run."""
        return self.estimator is not None or self.kl is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNumbers:
    """Of a step."""

    scored: ScoredRows
    """Of all rows."""
    token_advantages: torch.Tensor | None = None
    """`[chosen, T]` float32; None where advantages are those of rows."""
    lacks_tokens: bool = False
    """The step ended before its log-probabilities were kept: nothing was measured."""
    trains: bool = True
    """False: no row has kept its weight."""

    @classmethod
    def made(
        cls, link: ChainLink, kept: KeptRows, scored: ScoredRows, chosen: Sequence[int], settings: ReplaySettings
    ) -> RowNumbers:
        """
        Args:
            chosen: rows of the update before anything was measured.

        Raises:
            ReplayProblem: advantages are of another kind than those of the run, or need what was not kept.
        """
        needs, step, config = TokenNeeds.of(settings), link.step, settings.config
        _check_kind(step, needs)
        if not chosen or (needs.measures is None and needs.estimator is None):
            return cls(scored=scored)
        columns, carry = KeptColumns.read(link.folder, step), kept.scalars
        lengths = [kept.lengths[row] for row in chosen]
        if needs.measures is not None:
            batch = _dense(columns, needs.measures.input_fields, chosen, width=max(lengths))
            if batch is None:
                return cls._without(step, scored, needs.measures.input_fields)
            scored, _ = decide_rows(
                scored,
                carry,
                config.grpo,
                measures=needs.measures,
                numbers=needs.measures(batch).numbers,
                rows=chosen,
                per_token=needs.estimator is not None,
            )
        has_weight = bool((scored.select(chosen).sample_mask > 0).any())
        if needs.estimator is None or not has_weight:
            return cls(scored=scored, trains=has_weight)
        work = TokenWork.of(scored, carry, config.grpo, estimator=needs.estimator, kl=needs.kl, rows=chosen)
        batch = _dense(columns, work.input_fields, chosen, width=max(lengths))
        if batch is None:
            return cls._without(step, scored, work.input_fields)
        found = advantages_in_process(work, batch, lengths, dp_world=settings.run_layout.dp)
        return cls(scored=scored, token_advantages=found)

    @classmethod
    def _without(cls, step: KeptStep, scored: ScoredRows, fields: Sequence[str]) -> RowNumbers:
        """Columns were not kept."""
        if step.status is StepStatus.COMPLETE and step.trained is None:
            # The run has measured its rows, and none of them was left to train on.
            return cls(scored=scored, trains=False)
        if step.status is StepStatus.COMPLETE:
            raise ReplayProblem(
                f"step {step.number}: advantages and weights need {', '.join(fields)}, and the run has not kept all of "
                "them; replay it without the override",
                verdict=Verdict.USAGE,
            )
        return cls(scored=scored, lacks_tokens=True)


def _check_kind(step: KeptStep, needs: TokenNeeds) -> None:
    if (needs.estimator is not None) != (TOKEN_ADVANTAGES in step.run.train_fields):
        raise ReplayProblem(
            f"step {step.number} was trained on advantages of {'rows' if needs.estimator else 'tokens'}: replay it "
            "without an override of grpo.adv_estimator or loss_fn.use_kl_in_reward",
            verdict=Verdict.USAGE,
        )


def _dense(
    columns: KeptColumns, names: Sequence[str], rows: Sequence[int], *, width: int
) -> dict[str, torch.Tensor] | None:
    """None where one was not kept."""
    if not all(columns.has(name, rows) for name in names):
        return None
    batch = materialize({name: columns.rows(name, rows) for name in names}, pad_values={}, pad_to=width)
    return {name: batch.tensor(name) for name in names}
