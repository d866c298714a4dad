"""Builds what a trainer drives from a config, and ends everything that it started.

`open_parts` names the processes and parts of a run in the order in which they start; `open_trainer` puts the trainer
over them. Invariant: whatever was started is ended in reverse order when its block ends, also after an error or an
interrupt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console

from nemo_rl.algorithms.async_account import build_account
from nemo_rl.algorithms.grpo_sync import GRPOTrainer, RowParts, TrainerParts
from nemo_rl.algorithms.kept_steps.recorder import build_recorders
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.algorithms.observers import StepObservers, build_observers
from nemo_rl.algorithms.preflight.checks import preflight
from nemo_rl.algorithms.run_folder import (
    date_line,
    first_start,
    identity_of,
    identity_state,
    model_dtype,
    open_run_folders,
    write_config,
)
from nemo_rl.algorithms.saver import build_checkpoints, checkpoint_to_resume
from nemo_rl.algorithms.sources import FollowedSchedule, build_source, loss_weights
from nemo_rl.algorithms.stages.bodies import build_stages
from nemo_rl.algorithms.stages.columns import StageColumns, extras_of, stage_columns
from nemo_rl.algorithms.stages.stage import Stage, StageTools
from nemo_rl.algorithms.start import RunProcesses, open_cluster, open_processes, what_starts
from nemo_rl.algorithms.step_tracing import TracedRun, build_tracing, open_tracing
from nemo_rl.algorithms.teacher import build_teacher
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.yaml_text import masked, to_yaml
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollouts import RolloutSpec
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.weight_sync.factory import weight_sync_of
from nemo_rl.utils.checkpoint import Checkpoint, CheckpointManager
from nemo_rl.utils.deadlines import StartUp
from nemo_rl.utils.logger import Logger, build_logger
from nemo_rl.utils.panel import Panel

__all__ = ["open_parts", "open_trainer"]


@contextmanager
def open_trainer(
    given: MasterConfig,
    *,
    console: Console,
    forks: ForkServer | None = None,
    follows: FollowedSchedule | None = None,
) -> Iterator[GRPOTrainer]:
    """`open_parts` under the trainer."""
    with open_parts(given, console=console, forks=forks, follows=follows) as parts:
        yield GRPOTrainer(parts)


@contextmanager
def open_parts(
    given: MasterConfig,
    *,
    console: Console,
    forks: ForkServer | None = None,
    follows: FollowedSchedule | None = None,
) -> Iterator[TrainerParts]:
    """Starts everything a run needs.

    Args:
        forks: as `worker_forks` opens it for this config; None: every worker starts by itself.
        follows: the schedule of a run that is done again; None: the run makes its own.

    Raises:
        UserError: what `preflight` finds, or nothing to resume from.
    """
    # Folders in place of names on the hub; what is written down keeps the names.
    config = preflight(given)
    columns = stage_columns(config, build_loss(config.loss_fn, config.grpo))
    with ExitStack() as stack:
        durable = config.data_plane.durable.path
        stack.enter_context(open_run_folders(config.logger, config.checkpointing, durable=durable))
        shown, log_dir = config.logger, config.logger.log_dir
        panel = stack.enter_context(Panel(console, live=shown.live_panel, is_full=shown.console == "full"))
        checkpoints = build_checkpoints(
            config.checkpointing,
            log_dir=log_dir,
            metric_name=config.checkpoint_metric,
            timeout_s=config.cluster.stage_timeout_s,
        )
        resume_from = checkpoint_to_resume(config.checkpointing, checkpoints, log_dir=log_dir, note=panel.note)
        write_config(log_dir, to_yaml(given))
        began = first_start(resume_from)
        recipe = masked(config.model_dump(mode="json"))
        run_logger = build_logger(shown, run_config=recipe, resume_step=resume_from.step if resume_from else None)
        stack.callback(run_logger.close)
        panel.note(what_starts(config))
        start = StartUp(timeout_s=config.cluster.worker_start_timeout_s, report=panel.note)
        cluster = stack.enter_context(open_cluster(config, start, forks))
        layout = ParallelLayout.of_policy(config.policy, world_size=config.cluster.num_workers)
        traced = stack.enter_context(
            open_tracing(
                config.diagnostics.tracer,
                config.policy,
                layout=layout,
                log_dir=log_dir,
                start_timeout_s=start.timeout_s,
                note=panel.note,
            )
        )
        processes, client = stack.enter_context(
            open_processes(
                config,
                cluster,
                start,
                rollout=RolloutSpec.of(config, now=began),
                stages=[stage.name for stage in columns],
                trace=None if traced is None else traced.spec,
                schedule=None if follows is None else follows.schedule,
            )
        )
        yield _parts(
            _Opened(
                config=config,
                processes=processes,
                client=client,
                columns=columns,
                panel=panel,
                checkpoints=checkpoints,
                resume_from=resume_from,
                began=began,
                recipe=recipe,
                logger=run_logger,
                traced=traced,
                follows=follows,
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """What `open_parts` has opened by the time the driver's own parts are built."""

    config: MasterConfig
    processes: RunProcesses
    client: DataPlaneClient
    columns: tuple[StageColumns, ...]
    panel: Panel
    checkpoints: CheckpointManager | None
    resume_from: Checkpoint | None
    began: datetime
    recipe: Mapping[str, object]
    logger: Logger
    traced: TracedRun | None
    follows: FollowedSchedule | None

    @property
    def timeout_s(self) -> float:
        return self.config.cluster.stage_timeout_s

    @property
    def resume_step(self) -> int | None:
        return None if self.resume_from is None else self.resume_from.step


def _parts(opened: _Opened) -> TrainerParts:
    config, columns, processes, client = opened.config, opened.columns, opened.processes, opened.client
    settings, timeout_s, address = config.policy, opened.timeout_s, client.address
    layout = ParallelLayout.of_policy(settings, world_size=config.cluster.num_workers)
    policy = TQPolicy(processes.policy, address=address, timeout_s=timeout_s, layout=layout, extras=extras_of(columns))
    teacher = build_teacher(
        config.loss_fn.distillation, settings, processes.teacher, address=address, timeout_s=timeout_s
    )
    rows = _rows(opened, policy)
    info = rows.rollout.describe()
    allowed = config.checkpointing.allow_changed
    identity = identity_of(info, opened.resume_from, model_name=settings.model_name, allowed=allowed)
    began = date_line(opened.began, opened.resume_from)
    for line in (*info.remarks, *([began] if info.prints_the_date else [])):
        opened.panel.note(line)
    tools = StageTools.of(
        config.scoring,
        config.loss_fn,
        settings=settings,
        logger=config.logger,
        loss_weights=loss_weights(config.data),
        client=client,
        policy=policy,
        rollout=rows.rollout,
        loss_fn=build_loss(config.loss_fn, config.grpo),
        teacher=teacher,
    )
    stages = build_stages(columns, tools)
    return TrainerParts(
        config=config,
        source=build_source(
            config.grpo,
            config.data,
            settings,
            info,
            client=client,
            rollout=rows.rollout,
            weight_sync=rows.weight_sync,
            rows_per_conversation=config.rows_per_conversation,
            follows=opened.follows,
            log_dir=config.logger.log_dir,
            resume_step=opened.resume_step or 0,
            timeout_s=timeout_s,
            note=opened.panel.note,
            durable=config.data_plane.durable,
            saves=config.checkpointing.enabled,
        ),
        columns=columns,
        stages=stages,
        client=client,
        policy=policy,
        teacher=None if teacher is None else teacher.policy,
        weight_sync=rows.weight_sync,
        rollout=rows.rollout,
        checkpoints=opened.checkpoints,
        logger=opened.logger,
        panel=opened.panel,
        resume_from=opened.resume_from,
        run_state=identity_state(opened.began, identity, dtype=model_dtype(settings.model_name)),
        step_metrics=rows.step_metrics,
        observers=_observers(opened, rows, tools, stages, identity),
    )


def _rows(opened: _Opened, policy: TQPolicy) -> RowParts:
    """Return the parts by which the run comes to its rows: rollouts of engines, or finished conversations."""
    config, processes, timeout_s = opened.config, opened.processes, opened.timeout_s
    if config.sft.enabled:
        from nemo_rl.algorithms.supervised import finished_rows  # noqa: PLC0415 - a run of GRPO does without

        return finished_rows(config, processes, policy, opened.client, opened.columns, report=opened.panel.note)
    rollout = RolloutHandle(
        processes.rollout, timeout_s=timeout_s, report=opened.panel.note, waits=not config.grpo.samples_ahead
    )
    rollout.setup_data_plane(opened.client.address)
    weight_sync = weight_sync_of(
        config.policy,
        config.refit_transport,
        policy=processes.policy,
        engines=processes.engines,
        address=processes.address,
        timeout_s=timeout_s,
        on_new_engines=rollout.use_engines,
        one_by_one=config.grpo.samples_ahead,
        sleep_level=config.sleep_level,
    )
    return RowParts(rollout=rollout, weight_sync=weight_sync)


def _observers(
    opened: _Opened, rows: RowParts, tools: StageTools, stages: tuple[Stage, ...], identity: Mapping[str, str]
) -> StepObservers:
    config, engines, timeout_s = opened.config, opened.processes.engines, opened.timeout_s
    generation = config.policy.generation
    return StepObservers(
        *build_observers(config.diagnostics, tools, engines, stages, panel=opened.panel, timeout_s=timeout_s),
        *build_recorders(
            config.diagnostics.keep_steps,
            tools,
            opened.columns,
            recipe=opened.recipe,
            started_from=opened.resume_step,
            with_optimizer=config.checkpointing.load_optimizer,
            identity=identity,
            keeps_replies=config.experience.conversation.keep_replies,
        ),
        *build_tracing(opened.traced, tools.policy, engines, generation, timeout_s=timeout_s),
        *build_account(config.grpo, generation, rows.weight_sync),
    )
