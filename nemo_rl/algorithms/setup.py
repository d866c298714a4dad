"""Builds what a trainer drives from a config, and ends everything that it started.

`open_parts` is the only place that starts processes; `open_trainer` puts the trainer over them. Invariant:
whatever was started is ended in reverse order when its block ends, also after an error or an interrupt.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.async_account import RunAccount
from nemo_rl.algorithms.async_batches import AsyncBatches, build_schedule, limits_of
from nemo_rl.algorithms.batches import BatchSource, DynamicBatches, RolloutParts, SyncBatches
from nemo_rl.algorithms.cpu_needs import (
    cpus_per_bundle,
    num_clients,
    num_engine_bundles,
    other_cpus,
)
from nemo_rl.algorithms.engines import (
    EngineStarts,
    RolloutStarts,
    engine_scheduler,
    engine_spec,
    gpu_share,
    local_engines,
    log_place,
)
from nemo_rl.algorithms.grpo_sync import GRPOTrainer, TrainerParts
from nemo_rl.algorithms.identity import date_line, first_start, identity_of, identity_state, model_dtype
from nemo_rl.algorithms.kept_groups import open_durable_groups
from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.algorithms.kept_steps.record import RunFacts
from nemo_rl.algorithms.kept_steps.recorder import StepRecorder
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.algorithms.observers import (
    JumpWarning,
    MismatchWarning,
    RouteTracePlan,
    StageDisplay,
    StepObserver,
    StepObservers,
    StepProfile,
    TensorRecording,
    record_spec,
)
from nemo_rl.algorithms.preflight.checks import preflight
from nemo_rl.algorithms.preflight.inputs import too_few_prompts
from nemo_rl.algorithms.processes import run_environment
from nemo_rl.algorithms.run_folder import CONFIG_FILE, open_run_folders, truncate_rollouts
from nemo_rl.algorithms.schedule_file import RunSchedule, ScheduleFile
from nemo_rl.algorithms.scheduled_batches import ScheduledBatches
from nemo_rl.algorithms.stages.bodies import build_stages
from nemo_rl.algorithms.stages.columns import StageColumns, extras_of, fetched_fields, stage_columns
from nemo_rl.algorithms.stages.stage import Stage, StageTools, Teacher
from nemo_rl.algorithms.step_tracing import LiveTracing, TracedEngines, TracedRun, open_tracing
from nemo_rl.algorithms.teacher import local_teacher, rank_specs, ray_teacher, teacher_of, worker_spec
from nemo_rl.algorithms.token_statistics import TokenStatistics
from nemo_rl.algorithms.token_work import token_estimator
from nemo_rl.config.parts import ENGINE_CAPABILITIES, EngineCapabilities
from nemo_rl.config.render import masked, to_yaml
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.sampler import PromptSampler
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.store_kinds import memory_plan
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.job_store import reserve_port
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import ClusterNeeds, EngineNodes, RayVirtualCluster
from nemo_rl.distributed.worker_fleet import WorkerFleet
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerGroup
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import DatasetError
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollout_records import RolloutInfo
from nemo_rl.experience.rollout_worker import RolloutSpec, RolloutWorker
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.hf.loading import decoder_sizes, load_model_config
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.out_of_memory import planned_stages
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.factory import build_weight_sync, receipt_spec
from nemo_rl.models.weight_sync.receipt import ReceiptSpec
from nemo_rl.utils.checkpoint import Checkpoint, CheckpointManager
from nemo_rl.utils.deadlines import StartUp
from nemo_rl.utils.files import write_text
from nemo_rl.utils.flops import TransformerShape, sequence_cost
from nemo_rl.utils.logger import Logger, build_logger
from nemo_rl.utils.memory import package_versions
from nemo_rl.utils.panel import Panel

__all__ = ["FollowedSchedule", "open_parts", "open_trainer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunProcesses:
    policy: WorkerGroup
    engines: WorkerFleet
    rollout: WorkerFleet
    teacher: WorkerGroup | None = None
    """The workers of a teacher; None without distillation."""
    address: str = "127.0.0.1"
    """Address of policy rank 0, as the other processes reach it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Specs:
    worker: Callable[[RankSpec], WorkerSpec]
    engine: Callable[[int], EngineSpec]
    """Spec of an engine by its number."""
    rollout: RolloutSpec

    @classmethod
    def of(
        cls, config: MasterConfig, traced: TracedRun | None, began: datetime, *, schedule: RunSchedule | None
    ) -> _Specs:
        trace = None if traced is None else traced.spec

        def engine(number: int) -> EngineSpec:
            script = () if schedule is None else tuple(schedule.scripts.get(number, ()))
            return engine_spec(config, number, trace=trace, script=script)

        return cls(
            worker=partial(_worker_spec, config, trace, planned_stages(config)),
            engine=engine,
            rollout=RolloutSpec.of(config, now=began),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedSchedule:
    """The schedule that a run follows, in place of one of its own."""

    schedule: RunSchedule
    last_step: int
    """The last step that is done again."""


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
    model_config = load_model_config(config.policy.model_name)
    loss_fn = build_loss(config)
    columns = stage_columns(config, loss_fn)
    with ExitStack() as stack:
        stack.enter_context(open_run_folders(config))
        shown = config.logger
        panel = stack.enter_context(Panel(console, live=shown.live_panel, is_full=shown.console == "full"))
        checkpoints = _checkpoint_manager(config)
        resume_from = _checkpoint_to_resume(config, checkpoints, panel)
        write_resolved_config(given)
        began = first_start(resume_from)
        run_logger = _logger(config, resume_from)
        stack.callback(run_logger.close)
        panel.note(_what_starts(config))
        start = StartUp(timeout_s=config.cluster.worker_start_timeout_s, report=panel.note)
        cluster = stack.enter_context(_cluster(config, start, forks)) if config.cluster.launcher == "ray" else None
        layout = ParallelLayout.of_policy(config.policy, world_size=config.cluster.num_workers)
        traced = stack.enter_context(open_tracing(config, layout=layout))
        if traced is not None:
            panel.note(traced.job.note)
        groups, client = _start(
            config,
            cluster,
            stack,
            start,
            _Specs.of(config, traced, began, schedule=None if follows is None else follows.schedule),
        )
        rollout = RolloutHandle(
            groups.rollout,
            timeout_s=config.cluster.stage_timeout_s,
            report=panel.note,
            waits=not config.grpo.samples_ahead,
        )
        rollout.setup_data_plane(client.address)
        info = rollout.describe()
        identity = identity_of(config, info, resume_from)
        open_durable_groups(config, info, rollout)
        for line in (*info.remarks, *([date_line(began, resume_from)] if info.prints_the_date else [])):
            panel.note(line)
        policy, teacher = _policies(config, groups, client, columns)
        tools = StageTools(
            grpo=config.scoring,
            settings=config.policy,
            logger=config.logger,
            client=client,
            policy=policy,
            rollout=rollout,
            loss_fn=loss_fn,
            measures=TokenStatistics.of(config),
            token_estimator=token_estimator(config),
            teacher=teacher,
            cost=sequence_cost(TransformerShape.from_config(decoder_sizes(model_config))),
            weighs_by_row=config.loss_fn.normalization == "sequence",
        )
        weight_sync = _weight_sync(config, groups, rollout, receipt=receipt_spec(config.policy, model_config.to_dict()))
        batch_parts = _rollout_parts(config, client, rollout, info, weight_sync)
        source = _source(config, batch_parts, panel, resume_from, follows, weight_sync.restart_engines)
        stages = build_stages(columns, tools)
        recorders = _recorders(tools, columns, config, resume_from, identity)
        tracing = [] if traced is None else [LiveTracing(traced, policy, _traced_engines(config, groups))]
        yield TrainerParts(
            config=config,
            source=source,
            columns=columns,
            stages=stages,
            client=client,
            policy=policy,
            teacher=None if teacher is None else teacher.policy,
            weight_sync=weight_sync,
            rollout=rollout,
            checkpoints=checkpoints,
            logger=run_logger,
            panel=panel,
            resume_from=resume_from,
            run_state=identity_state(began, identity, dtype=model_dtype(config.policy.model_name)),
            observers=StepObservers(
                *_observers(config, policy, groups.engines, stages, panel),
                *recorders,
                *tracing,
                *_account(config, weight_sync),
            ),
        )


def _policies(
    config: MasterConfig, groups: _RunProcesses, client: DataPlaneClient, columns: Sequence[StageColumns]
) -> tuple[TQPolicy, Teacher | None]:
    """Return the policy, and the teacher of a distillation, whose workers have started."""
    policy = TQPolicy(
        groups.policy,
        address=client.address,
        timeout_s=config.cluster.stage_timeout_s,
        layout=ParallelLayout.of_policy(config.policy, world_size=config.cluster.num_workers),
        extras=extras_of(columns),
    )
    return policy, teacher_of(config, groups.teacher, address=client.address)


def _rollout_parts(
    config: MasterConfig, client: DataPlaneClient, rollout: RolloutHandle, info: RolloutInfo, weight_sync: WeightSync
) -> RolloutParts:
    return RolloutParts(
        config=config.grpo,
        client=client,
        rollout=rollout,
        sampler=_sampler(config, info),
        weight_version=partial(attrgetter("version"), weight_sync),
        rows_per_conversation=config.rows_per_conversation,
    )


def _observers(
    config: MasterConfig, policy: TQPolicy, engines: WorkerFleet, stages: Sequence[Stage], panel: Panel
) -> list[StepObserver]:
    """Return the observers of every run, besides the step recorder and the tracer."""
    return [
        StageDisplay(panel),
        RouteTracePlan(stages),
        TensorRecording.of(config, policy=policy, engines=engines),
        StepProfile(policy, config.policy.profile, log_dir=config.logger.log_dir),
        MismatchWarning(config, note=panel.note),
        JumpWarning(note=panel.note),
    ]


def _weight_sync(
    config: MasterConfig, groups: _RunProcesses, rollout: RolloutHandle, *, receipt: ReceiptSpec | None
) -> WeightSync:
    generation = config.policy.generation
    parties = RefitParties(
        policy=groups.policy,
        engines=groups.engines,
        timeout_s=config.cluster.stage_timeout_s,
        buffer_ratio=generation.refit_buffer_ratio,
        delta_full_every=generation.refit_delta.period,
        on_new_engines=rollout.use_engines,
        one_by_one=config.grpo.samples_ahead,
        receipt=receipt,
        sends_adapters=config.policy.lora.is_native,
        rows_finish=generation.in_flight == "finish",
        sleep_level=config.sleep_level,
    )
    return build_weight_sync(config.refit_transport, parties, address=groups.address)


def _account(config: MasterConfig, weight_sync: WeightSync) -> list[RunAccount]:
    """Return the observer that says who waits, of an asynchronous run."""
    if not config.grpo.samples_ahead:
        return []
    generation, size = config.policy.generation, config.grpo.num_generations_per_prompt
    return [
        RunAccount(
            limits_of(config.grpo),
            group_places=generation.num_replicas * (generation.max_batch_size // size),
            loads=weight_sync.take_loads,
            refit_s=lambda: 0.0 if weight_sync.report is None else weight_sync.report.ms / 1e3,
        )
    ]


def _source(
    config: MasterConfig,
    parts: RolloutParts,
    panel: Panel,
    resume_from: Checkpoint | None,
    follows: FollowedSchedule | None,
    restart_engines: Callable[[], None],
) -> BatchSource:
    if follows is not None:
        return ScheduledBatches(parts, follows.schedule, last_step=follows.last_step)
    if not config.grpo.samples_ahead:
        return DynamicBatches(parts) if config.grpo.use_dynamic_sampling else SyncBatches(parts)
    step = 0 if resume_from is None else resume_from.step
    return AsyncBatches(
        parts,
        build_schedule(config.grpo),
        record=ScheduleFile(config.logger.log_dir, step=step),
        timeout_s=config.cluster.stage_timeout_s,
        note=panel.note,
        restart_engines=restart_engines,
    )


def _traced_engines(config: MasterConfig, groups: _RunProcesses) -> TracedEngines:
    """Return the engines that the tracer may ask: those that are known to be a `TracedEngine`."""
    capabilities = ENGINE_CAPABILITIES.get(config.policy.generation.backend, EngineCapabilities())
    return TracedEngines(
        groups.engines if capabilities.shows_decoding else None, timeout_s=config.cluster.stage_timeout_s
    )


def _recorders(
    tools: StageTools,
    columns: Sequence[StageColumns],
    config: MasterConfig,
    resume_from: Checkpoint | None,
    identity: Mapping[str, str],
) -> tuple[StepRecorder, ...]:
    if not config.diagnostics.keep_steps.enabled:
        return ()
    train = next(stage for stage in columns if stage.name == WorkerPass.TRAIN)
    facts = RunFacts(
        config=masked(config.model_dump(mode="json")),
        world_size=tools.policy.layout.world_size,
        stages=tuple(stage.name for stage in columns),
        train_fields=fetched_fields(train),
        cost=tools.cost,
        started_from=None if resume_from is None else resume_from.step,
        with_optimizer=config.checkpointing.load_optimizer,
        packages=package_versions(),
        identity=identity,
    )
    recorder = StepRecorder(
        config.diagnostics.keep_steps,
        run=facts,
        seed=config.grpo.seed,
        log_dir=config.logger.log_dir,
        rollout=tools.rollout,
        policy=tools.policy,
        keeps_replies=config.experience.conversation.keep_replies,
    )
    return (recorder,)


def _what_starts(config: MasterConfig) -> str:
    plan = memory_plan(config.active_data_plane, num_processes=num_clients(config))
    if config.cluster.launcher == "local":
        parts = "policy, teacher, engine" if config.num_teacher_workers else "policy, engine"
        return "; ".join(filter(None, (f"starting {parts} and rollout worker in this process", plan)))
    count = config.num_teacher_workers
    teacher = f"{count} teacher worker{'s' if count > 1 else ''}, " if count else ""
    ray = "starting Ray" if config.cluster.address is None else f"joining Ray at {config.cluster.address}"
    what = (
        f"{ray}, {config.cluster.num_workers} policy workers, {teacher}"
        f"{config.policy.generation.num_replicas} engines, 1 rollout worker, data plane {config.active_data_plane.impl}"
    )
    return "; ".join(filter(None, (what, plan)))


def write_resolved_config(config: MasterConfig) -> Path:
    """`config.yaml` next to the logs of the run."""
    return write_text(config.logger.log_dir / CONFIG_FILE, to_yaml(config))


def _logger(config: MasterConfig, resume_from: Checkpoint | None) -> Logger:
    return build_logger(
        config.logger,
        run_config=masked(config.model_dump(mode="json")),
        resume_step=resume_from.step if resume_from is not None else None,
    )


def _cluster(config: MasterConfig, start: StartUp, forks: ForkServer | None) -> RayVirtualCluster:
    """Return the cluster. On GPU an engine shares its GPU and its bundle with a policy worker, unless it stands
    apart."""
    colocated = config.policy.generation.colocated
    return RayVirtualCluster(
        config.cluster,
        ClusterNeeds(
            other_cpus=other_cpus(config),
            cpus_per_bundle=cpus_per_bundle(config),
            engines=EngineNodes(
                num_bundles=num_engine_bundles(config),
                num_nodes=colocated.num_nodes,
                gpus_per_node=colocated.gpus_per_node,
            ),
        ),
        environment=run_environment(config),
        start=start,
        forks=forks,
        logs_to=config.logger.log_dir / "ray_logs",
    )


def _start(
    config: MasterConfig, cluster: RayVirtualCluster | None, stack: ExitStack, start: StartUp, specs: _Specs
) -> tuple[_RunProcesses, DataPlaneClient]:
    run_id = uuid.uuid4().hex[:12]
    groups = (
        _local_groups(config, specs, stack) if cluster is None else _ray_groups(config, specs, cluster, stack, start)
    )
    plane = config.active_data_plane
    if plane.mooncake.host == "node" and cluster is not None:
        plane = plane.model_copy(update={"mooncake": plane.mooncake.model_copy(update={"host": cluster.address})})
    # The workers build while the storage actors of the data plane start.
    client = build_data_plane_client(plane, run_id=run_id, role="owner", log_dir=config.logger.log_dir, start=start)
    stack.callback(client.close)
    for group in (*groups.rollout.members, *groups.engines.members, groups.policy, groups.teacher):
        if isinstance(group, RayWorkerGroup):
            with start.waiting_for(f"the {group.name} workers"):
                group.finish_start(timeout_s=start.timeout_s)
    return groups, client


def _local_groups(config: MasterConfig, specs: _Specs, stack: ExitStack) -> _RunProcesses:
    spec = specs.worker(RankSpec(rank=0, world_size=1))
    policy = LocalWorkerGroup(lambda: build_policy_worker(spec))
    stack.callback(policy.shutdown)
    teacher = local_teacher(config, stack)
    engines = local_engines(config, specs.engine)
    stack.callback(engines.shutdown)
    replicas = engine_scheduler(config, engines)
    rollout = WorkerFleet([LocalWorkerGroup(lambda: RolloutWorker(specs.rollout, generation=replicas))])
    stack.callback(rollout.shutdown)
    return _RunProcesses(policy=policy, engines=engines, rollout=rollout, teacher=teacher)


def _ray_groups(
    config: MasterConfig,
    specs: _Specs,
    cluster: RayVirtualCluster,
    stack: ExitStack,
    start: StartUp,
) -> _RunProcesses:
    log = log_place(config)
    policy = RayWorkerGroup(
        "policy",
        world_size=cluster.num_workers,
        placement=RayPlacement(
            num_gpus=gpu_share(config),
            placement_group=cluster.placement_group,
            bundles=cluster.policy_bundles,
            environment=config.policy.worker_env_vars,
        ),
        **log,
    )
    stack.callback(policy.shutdown)
    starts = EngineStarts(config, specs.engine, cluster)
    engines = starts.fleet(timeout_s=start.timeout_s)
    stack.callback(engines.shutdown)
    starting = RolloutStarts(config, specs.rollout, lambda: engine_scheduler(config, engines))
    rollout = starting.fleet(timeout_s=start.timeout_s)
    stack.callback(rollout.shutdown)
    with start.waiting_for("the first policy worker"):
        address, port = policy.rendezvous(reserve_port, timeout_s=start.timeout_s)
    ranks = rank_specs(cluster.num_workers, address, port)
    if config.sleep_level:
        # They look at free memory when they start, and sleep when the policy comes.
        starts.begin_all()
        with start.waiting_for("the generation workers"):
            starts.finish_all(timeout_s=start.timeout_s)
    policy.begin_start(build_policy_worker, [{"spec": specs.worker(rank)} for rank in ranks])
    teacher = ray_teacher(config, cluster, stack, start)
    if not config.sleep_level:
        starts.begin_all()
    starting.begin_all()
    return _RunProcesses(policy=policy, engines=engines, rollout=rollout, teacher=teacher, address=address)


def _worker_spec(config: MasterConfig, trace: TraceSpec | None, planned: dict[str, int], rank: RankSpec) -> WorkerSpec:
    spec = worker_spec(config, rank)
    keeps_reference = config.loss_fn.reference_policy_kl_penalty > 0
    return replace(spec, keep_reference=keeps_reference, record=record_spec(config), trace=trace, planned=planned)


def _sampler(config: MasterConfig, info: RolloutInfo) -> PromptSampler:
    if info.num_skipped_prompts:
        logger.warning(
            "%d prompts are longer than data.max_input_seq_length=%d and were skipped: %s",
            info.num_skipped_prompts,
            config.data.max_input_seq_length,
            "; ".join(info.skipped),
        )
    if info.num_train_prompts < config.grpo.prompts_at_once:
        raise DatasetError(too_few_prompts(config.grpo, info.num_train_prompts))
    return PromptSampler(
        info.num_train_prompts,
        seed=config.grpo.seed,
        shuffle=config.data.shuffle,
        max_num_epochs=config.grpo.max_num_epochs,
    )


def _checkpoint_manager(config: MasterConfig) -> CheckpointManager | None:
    section = config.checkpointing
    if not section.enabled:
        return None
    return CheckpointManager(
        config.checkpoint_dir,
        keep_top_k=section.keep_top_k,
        metric_name=config.checkpoint_metric.replace(":", "/", 1),
        higher_is_better=section.higher_is_better,
    )


def _checkpoint_to_resume(
    config: MasterConfig, checkpoints: CheckpointManager | None, panel: Panel
) -> Checkpoint | None:
    """Leaves the folders as if the run had ended with the checkpoint that it takes."""
    if checkpoints is None:
        return None
    checkpoints.clean()
    if not config.checkpointing.resume:
        return None
    choice = checkpoints.choose(with_optimizer=config.checkpointing.load_optimizer)
    chosen = choice.checkpoint
    panel.note(f"resuming after step {chosen.step} from {chosen.path}: {choice.reason}")
    truncate_rollouts(config.logger.log_dir, resume_step=chosen.step)
    StepsFolder(config.logger.log_dir).cut(resume_step=chosen.step)
    return chosen
