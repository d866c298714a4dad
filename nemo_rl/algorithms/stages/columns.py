"""The columns that each stage of a step reads and writes, and the partition that holds them.

The declarations come from the FieldSpec table and the config, and are checked before anything runs: reading a column
that no earlier stage writes is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from nemo_rl.algorithms.token_work import KlInReward, TokenEstimator, TokenStatistics, token_estimator
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.column_io import extra_names
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.schema import (
    DP_TRAIN_FIELDS,
    FIELDS,
    LP_SEED_FIELDS,
    ROUTE_FIELDS,
    FieldSpec,
    reads_of,
    route_fields,
    writes_of,
)
from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.errors import ConfigError
from nemo_rl.experience.payload import run_extras
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl.models.policy.interfaces import (
    ADVANTAGES,
    COMPUTED_FIELDS,
    SQUARED_PROBS,
    STALENESS,
    TOKEN_ADVANTAGES,
    TOPK_IDS,
    TOPK_LOGPROBS,
    LossFunction,
)
from nemo_rl.routes.columns import route_conditions

__all__ = [
    "PARTITION",
    "REWRITTEN",
    "ROLLOUT",
    "TRAIN_TASK",
    "StageColumns",
    "check_stages",
    "declare_partition",
    "extras_of",
    "fetched_fields",
    "stage_columns",
    "written_fields",
]

ROLLOUT = "rollout"
"""The first stage, which a `BatchSource` runs."""
PARTITION = "train"
"""Partition with the rows of all training steps."""
TRAIN_TASK = "train"
"""The task under which the trainer of an asynchronous run claims groups."""
REWRITTEN = tuple(spec.name for spec in FIELDS.values() if spec.rewritten_by)
"""Columns that a later stage of the step writes again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageColumns:
    """The columns that one stage of a step reads and writes in the data plane."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    extras: tuple[FieldSpec, ...] = ()
    """Columns among `writes` that the table of fields does not know."""


def stage_columns(config: MasterConfig, loss_fn: LossFunction) -> tuple[StageColumns, ...]:
    """The stages this config runs, in order; their columns come from the FieldSpec table.

    Raises:
        ConfigError: a column is read before it is written.
    """
    replay, estimator = config.policy.router_replay, token_estimator(config.grpo, config.loss_fn)
    conditions = (*route_conditions(replay), "row_advantages" if estimator is None else "token_advantages")
    if estimator is not None and SQUARED_PROBS in estimator.reads:
        conditions += (SQUARED_PROBS,)
    if config.experience.conversation.enabled:
        conditions += ("turns",)
    support = (SUPPORT,) if config.policy.generation.record_support else ()
    conditions += support
    if config.grpo.samples_ahead:
        conditions += ("async",)
    if STALENESS in loss_fn.input_fields:
        conditions += (STALENESS,)
    names = [ROLLOUT, "score"]
    if config.has_prev_logprobs_pass:
        names.append(WorkerPass.PREV_LOGPROBS.value)
    if config.loss_fn.reference_policy_kl_penalty > 0:
        names.append(WorkerPass.REFERENCE_LOGPROBS.value)
        conditions += ("reference_kl",)
    if config.loss_fn.distillation.enabled:
        names.append(WorkerPass.TOPK_LOGITS.value)
        conditions += ("distillation",)
    stages = [
        StageColumns(
            name=name, reads=reads_of(name, conditions=conditions), writes=writes_of(name, conditions=conditions)
        )
        for name in names
    ]
    stages += _row_stages(config, estimator)
    stages.append(StageColumns(name="advantages", writes=writes_of("advantages", conditions=conditions)))
    routes = route_fields(conditions)
    if routes and not replay.records_at_rollout:
        stages = [_with_routes(stage, routes, recorder=replay.source) for stage in stages]
    stages.append(
        StageColumns(name=WorkerPass.TRAIN.value, reads=(*_train_fields(config, loss_fn, estimator), *support, *routes))
    )
    # Readable rollouts say why a column is not there.
    written = written_fields(stages)
    extras = run_extras(config.data, config.policy)
    if extras:
        stages = [_with_extras(stage, extras) for stage in stages]
    logged = (*(name for name in reads_of("log") if name in written), *extra_names(extras, "log"))
    stages.append(StageColumns(name="log", reads=logged))
    check_stages(stages)
    return tuple(stages)


def fetched_fields(stage: StageColumns) -> tuple[str, ...]:
    """Return the columns that a worker fetches whole for this stage; routes come apart, each rank its own part of
    them."""
    return tuple(name for name in stage.reads if name not in ROUTE_FIELDS)


def check_stages(stages: Sequence[StageColumns]) -> None:
    """Every column must be written before it is read.

    Raises:
        ConfigError: one line per column that is read too early or never written.
    """
    written: set[str] = set()
    problems = []
    for stage in stages:
        for name in stage.reads:
            if name not in written:
                writer = next((other.name for other in stages if name in other.writes), None)
                cause = f"is written only later, by {writer!r}" if writer else "is written by no stage"
                problems.append(f"stage {stage.name!r} reads column {name!r}, which {cause}")
        written.update(stage.writes)
    if problems:
        raise ConfigError(problems)


def written_fields(stages: Sequence[StageColumns]) -> tuple[str, ...]:
    """Every column of the step, in order of its first write."""
    return tuple(dict.fromkeys(name for stage in stages for name in stage.writes))


def extras_of(stages: Sequence[StageColumns]) -> tuple[FieldSpec, ...]:
    """Return the columns of the step that the table of fields does not know."""
    return tuple(spec for stage in stages for spec in stage.extras)


def declare_partition(
    client: DataPlaneClient,
    stages: Sequence[StageColumns],
    config: GRPOConfig,
    *,
    steps_in_flight: int = 1,
    rows_per_conversation: int = 1,
    smallest_group: int | None = None,
) -> None:
    """Registers `PARTITION` with the columns of the stages, and capacity for so many steps at one time.

    Without consumer tasks, unless groups are claimed: stages are handed the keys of their rows, and a cursor that
    nobody claims with costs every put and every write-back.

    Args:
        smallest_group: fewest rows of a group, all of which are put at once; None: groups are of one size.
    """
    is_async = config.samples_ahead
    # Rows of a step that is being cleared, and of groups that are sampled again, may still be there.
    ahead = 1 + config.async_.steps_ahead if is_async else 0
    extras = {spec.name: spec for spec in extras_of(stages)}
    client.register_partition(
        PARTITION,
        [extras.get(name, name) for name in written_fields(stages)],
        config.rows_alive * (steps_in_flight + ahead) * rows_per_conversation,
        (TRAIN_TASK,) if is_async else (),
        grpo_group_size=smallest_group or config.num_generations_per_prompt,
    )


def _with_extras(stage: StageColumns, extras: Sequence[FieldSpec]) -> StageColumns:
    if stage.name == ROLLOUT:
        return replace(stage, writes=(*stage.writes, *(spec.name for spec in extras)), extras=tuple(extras))
    return replace(stage, reads=tuple(dict.fromkeys((*stage.reads, *extra_names(extras, stage.name)))))


def _with_routes(stage: StageColumns, routes: Sequence[str], *, recorder: str) -> StageColumns:
    """The stage when `recorder`, rather than the rollout, records the routes."""
    reads = tuple(name for name in stage.reads if name not in routes)
    writes = tuple(name for name in stage.writes if name not in routes)
    return StageColumns(name=stage.name, reads=reads, writes=(*writes, *routes) if stage.name == recorder else writes)


def _row_stages(config: MasterConfig, estimator: TokenEstimator | None) -> list[StageColumns]:
    """Work of the workers without the model."""
    stages, measures = [], TokenStatistics.of(config.grpo, config.loss_fn)
    if measures is not None:
        stages.append(StageColumns(name=RowPass.MEASURE.value, reads=_in_table_order(measures.input_fields)))
    if estimator is not None:
        kl = KlInReward.of(config.loss_fn)
        fields = {"token_mask", *estimator.reads, *(() if kl is None else kl.input_fields)}
        unknown = sorted(fields - set(reads_of(RowPass.ADVANTAGES)))
        if unknown:
            known = ", ".join(reads_of(RowPass.ADVANTAGES))
            raise ConfigError(f"grpo.adv_estimator.name: reads {', '.join(unknown)}; expected some of {known}")
        stages.append(
            StageColumns(name=RowPass.ADVANTAGES.value, reads=_in_table_order(fields), writes=(TOKEN_ADVANTAGES,))
        )
    return stages


def _in_table_order(names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in FIELDS if name in names)


def _train_fields(config: MasterConfig, loss_fn: LossFunction, estimator: TokenEstimator | None) -> tuple[str, ...]:
    """Seed columns and what the loss reads, in the order of the table; extra columns come by their declaration."""
    extras = {name for name, column in config.data.extra_columns.items() if WorkerPass.TRAIN.value in column.read_by}
    needed = {*LP_SEED_FIELDS, *loss_fn.input_fields} - set(COMPUTED_FIELDS) - extras
    unknown = needed - {*DP_TRAIN_FIELDS, STALENESS, TOPK_IDS, TOPK_LOGPROBS}
    if unknown:
        raise ConfigError(
            f"the loss reads {', '.join(sorted(unknown))}: expected training columns of the FieldSpec table, or names "
            "of data.extra_columns with 'train' in read_by"
        )
    if estimator is not None and ADVANTAGES in needed:
        # Workers give it to the loss under the other name.
        needed = needed - {ADVANTAGES} | {TOKEN_ADVANTAGES}
    return _in_table_order(needed)
