"""`StepWork`: what the driver decides about a step before its ranks run it, made again from what was kept.

The same functions as in the run, on the kept rewards and lengths; `RowNumbers` are the weights and advantages that
workers of the run found in the tokens of its rows, made again from the log-probabilities that were kept: they are the
facts. Invariant: rows are counted in the rollout's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl.algorithms.grpo import ScoredRows, TrainRows, plan_logprobs, plan_train, score_rows, select_train_rows
from nemo_rl.algorithms.kept_steps.folder import (
    ROLLOUT_FILE,
    SnapshotFolder,
    SnapshotRows,
    StepError,
    StepSnapshot,
    StepStatus,
)
from nemo_rl.algorithms.token_work import (
    KlInReward,
    TokenEstimator,
    TokenStatistics,
    TokenWork,
    advantages_in_process,
    decide_rows,
    token_estimator,
)
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.chunks.ragged import materialize
from nemo_rl.data_plane.keys import group_uid
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import ConfigError, NonFiniteError
from nemo_rl.models.policy.interfaces import TOKEN_ADVANTAGES
from nemo_rl_tools.step_replay.chain import ChainLink, ReplayProblem, SnapshotColumns, rows_named
from nemo_rl_tools.step_replay.settings import ReplaySettings
from nemo_rl_tools.verdict import Verdict

__all__ = ["StepWork", "make_work"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenNeeds:
    """The token columns that the advantages and weights of a recipe need."""

    measures: TokenStatistics | None
    estimator: TokenEstimator | None
    kl: KlInReward | None

    @classmethod
    def of(cls, settings: ReplaySettings) -> TokenNeeds:
        config = settings.config
        return cls(
            measures=TokenStatistics.of(config.grpo, config.loss_fn),
            estimator=token_estimator(config.grpo, config.loss_fn),
            kl=KlInReward.of(config.loss_fn),
        )

    @property
    def needs_whole_groups(self) -> bool:
        """True where advantages need whole groups, as in the run."""
        return self.estimator is not None or self.kl is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNumbers:
    """Weights and advantages of the rows of a step."""

    scored: ScoredRows
    token_advantages: torch.Tensor | None = None
    """`[chosen, T]` float32; None where advantages are those of rows."""
    lacks_tokens: bool = False
    """The step ended before its log-probabilities were kept: nothing was measured."""
    trains: bool = True
    """False: no row has kept its weight."""

    @classmethod
    def made(
        cls, link: ChainLink, kept: SnapshotRows, scored: ScoredRows, chosen: Sequence[int], settings: ReplaySettings
    ) -> RowNumbers:
        """
        Args:
            chosen: rows of the update before anything was measured.

        Raises:
            ReplayProblem: advantages are of another kind than those of the run, or need what was not kept.
        """
        needs, step, config = TokenNeeds.of(settings), link.step, settings.config
        if (needs.estimator is not None) != (TOKEN_ADVANTAGES in step.run.train_fields):
            raise ReplayProblem(
                f"step {step.number} was trained on advantages of {'rows' if needs.estimator else 'tokens'}: replay it "
                "without an override of grpo.adv_estimator or loss_fn.use_kl_in_reward",
                verdict=Verdict.USAGE,
            )
        if not chosen or (needs.measures is None and needs.estimator is None):
            return cls(scored=scored)
        columns, sample_stats = SnapshotColumns.read(link.folder, step), kept.scalars
        lengths = [kept.lengths[row] for row in chosen]
        if needs.measures is not None:
            batch = _dense(columns, needs.measures.input_fields, chosen, width=max(lengths))
            if batch is None:
                return cls._without(step, scored, needs.measures.input_fields)
            scored, _ = decide_rows(
                scored,
                sample_stats,
                config.grpo,
                measures=needs.measures,
                numbers=needs.measures(batch).numbers,
                rows=chosen,
                per_token=needs.estimator is not None,
            )
        has_weight = bool((scored.select(chosen).sample_mask > 0).any())
        if needs.estimator is None or not has_weight:
            return cls(scored=scored, trains=has_weight)
        work = TokenWork.of(scored, sample_stats, config.grpo, estimator=needs.estimator, kl=needs.kl, rows=chosen)
        batch = _dense(columns, work.input_fields, chosen, width=max(lengths))
        if batch is None:
            return cls._without(step, scored, work.input_fields)
        found = advantages_in_process(work, batch, lengths, dp_world=settings.run_layout.dp)
        return cls(scored=scored, token_advantages=found)

    @classmethod
    def _without(cls, step: StepSnapshot, scored: ScoredRows, fields: Sequence[str]) -> RowNumbers:
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


def _dense(
    columns: SnapshotColumns, names: Sequence[str], rows: Sequence[int], *, width: int
) -> dict[str, torch.Tensor] | None:
    """Return dense columns, or None where one was not kept."""
    if not all(columns.has(name, rows) for name in names):
        return None
    batch = materialize({name: columns.rows(name, rows) for name in names}, pad_values={}, pad_to=width)
    return {name: batch.tensor(name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """One step for the ranks."""

    folder: SnapshotFolder
    step: StepSnapshot
    trained: tuple[int, ...] = ()
    """Empty: no row has a gradient, nothing is run."""
    advantages: torch.Tensor
    """`[trained]` float32."""
    sample_mask: torch.Tensor
    token_advantages: torch.Tensor | None = None
    """`[trained, T]` float32, in place of the others; None where advantages are those of rows."""
    lacks_tokens: bool = False
    """True where the step ended before its tokens were kept, so that nothing is made of them."""
    run_plan: PackPlan | None = None
    run_logprob_plan: PackPlan | None = None
    plan: PackPlan | None = None
    """The plan for the layout of the replay."""
    logprob_plan: PackPlan | None = None
    error: StepError | None = None
    """The driver already fails."""
    is_subset: bool = False
    """True for the log-probabilities and the loss alone, without an update."""


def make_work(link: ChainLink, settings: ReplaySettings, *, only: Sequence[str] = ()) -> StepWork:
    """
    Args:
        only: keys of rows; empty takes all that the run would have trained.

    Raises:
        ReplayProblem: the rows were not kept, or have no such key.
    """
    step = link.step
    rows = step.rows
    if rows is None:
        raise ReplayProblem(
            f"step {step.number} ended before its rows were written"
            + (f": {step.error.text}" if step.error is not None else "; nothing of them was kept"),
            verdict=Verdict.INCOMPLETE,
        )
    if not (link.folder.path / ROLLOUT_FILE).is_file():
        raise ReplayProblem(
            f"step {step.number} ended before its columns were written to {link.folder.path}",
            verdict=Verdict.INCOMPLETE,
        )
    nothing = StepWork(folder=link.folder, step=step, advantages=torch.zeros(0), sample_mask=torch.zeros(0))
    try:
        needs, uids = TokenNeeds.of(settings), [group_uid(key) for key in rows.keys]
        scored = score_rows(
            rows.scalars,
            uids,
            settings.config.scoring,
            per_token=needs.estimator is not None,
            by_conversation=settings.config.loss_fn.normalization == "sequence",
        )
    except NonFiniteError as error:
        return replace(nothing, error=StepError(kind=type(error).__name__, text=str(error), stage="score"))
    chosen = select_train_rows(
        scored,
        rows.lengths,
        settings.config.policy,
        layout=settings.run_layout,
        whole_groups=needs.needs_whole_groups,
    )
    made = RowNumbers.made(link, rows, scored, chosen.rows, settings)
    if only:
        return _subset(nothing, chosen, made, settings, only)
    if not chosen.rows or not made.trains:
        return nothing
    work = _planned(nothing, chosen, made, settings.config.policy, layout=settings.run_layout)
    assert work.plan is not None and work.logprob_plan is not None, "there are rows"
    return replace(
        work,
        run_plan=work.plan,
        run_logprob_plan=work.logprob_plan,
        plan=_fitted(work.plan, settings),
        logprob_plan=_fitted(work.logprob_plan, settings),
    )


def _subset(
    nothing: StepWork, chosen: TrainRows, made: RowNumbers, settings: ReplaySettings, only: Sequence[str]
) -> StepWork:
    trained = TrainRows(rows=tuple(rows_named(nothing.step, only)), batch_sizes=(len(only),))
    advantages = made.token_advantages
    if advantages is not None:
        # A row that the run has left out has no advantage.
        at = {row: place for place, row in enumerate(chosen.rows)}
        none_T = torch.zeros(advantages.shape[1])
        advantages = torch.stack([advantages[at[row]] if row in at else none_T for row in trained.rows])
    try:
        work = _planned(nothing, trained, made, settings.policy, layout=settings.layout)
    except ConfigError as error:
        raise ReplayProblem(
            f"{len(only)} rows do not fit the run's layout: {error}; add --layout one", verdict=Verdict.USAGE
        ) from error
    return replace(work, token_advantages=advantages, is_subset=True)


def _planned(
    nothing: StepWork, trained: TrainRows, made: RowNumbers, policy: PolicyConfig, *, layout: ParallelLayout
) -> StepWork:
    step, numbers = nothing.step, made.scored.select(trained.rows)
    assert step.rows is not None, "the rows were kept"
    lengths, cost = [step.rows.lengths[row] for row in trained.rows], step.run.cost
    plan = plan_train(lengths, trained.batch_sizes, policy, layout=layout, cost=cost)
    return replace(
        nothing,
        trained=trained.rows,
        advantages=numbers.advantages,
        sample_mask=numbers.sample_mask,
        token_advantages=made.token_advantages,
        lacks_tokens=made.lacks_tokens,
        plan=plan,
        logprob_plan=plan_logprobs(plan, lengths, policy, layout=layout, cost=cost),
    )


def _fitted(plan: PackPlan, settings: ReplaySettings) -> PackPlan:
    """Return the plan for the data-parallel shards of the replay: as it is, or all microbatches on one of them."""
    if settings.layout.dp == plan.num_ranks:
        return plan
    assert settings.layout.dp == 1, f"a plan of {plan.num_ranks} shards for {settings.layout}"
    microbatches: list[tuple[int, ...]] = []
    by_rank = [list(plan.iter_steps(rank)) for rank in range(plan.num_ranks)]
    for number in range(len(plan.steps)):
        for steps in by_rank:
            microbatches += steps[number]
    return PackPlan(
        microbatches=(tuple(microbatches),),
        steps=tuple(count * plan.num_ranks for count in plan.steps),
        pad_to=plan.pad_to,
        packed=plan.packed,
    )
