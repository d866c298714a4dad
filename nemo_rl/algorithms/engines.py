"""Starts the generation engines and rollout workers of a config: in this process, or each as a group of one Ray worker.

Called by `start` for a run and by `evaluate` for a checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from nemo_rl.algorithms.kept_steps.folder import RECORDS
from nemo_rl.algorithms.processes import ROLLOUT_CPUS
from nemo_rl.algorithms.run_folder import STEPS
from nemo_rl.config.parts import ENGINES
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.environment import WORKER_LOGS
from nemo_rl.distributed.layout import engine_places
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet
from nemo_rl.experience.rollout_worker import RolloutSpec, RolloutWorker
from nemo_rl.experience.scheduler import EngineScheduler
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.models.policy.recording import RecordSpec, recorded_model
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.tracer.watch import GENERATION

__all__ = [
    "EngineStarts",
    "RolloutStarts",
    "engine_bundles",
    "engine_scheduler",
    "engine_spec",
    "gpu_share",
    "local_engines",
    "log_place",
    "rollout_worker",
]

STREAMS_PER_WORKER = 64
"""Streams that a continuous engine or its rollout worker serves at a time; each has a thread."""
GPU_SHARES = (1.0, 0.5, 0.33)
"""GPU share of a policy worker, and of each other process that takes turns with it on the same GPU: by their number."""


class LogPlace(TypedDict):
    """The place where the workers of a group log, as arguments of the group."""

    log_dir: Path
    log_level: str


def log_place(config: MasterConfig) -> LogPlace:
    return LogPlace(log_dir=(config.logger.log_dir / WORKER_LOGS).absolute(), log_level=config.logger.worker_level)


def gpu_share(config: MasterConfig) -> float:
    """Return the share of a GPU for each of the processes that are on one with a policy worker: that worker, an engine,
    unless it is not colocated, and a teacher's worker; 0 on CPUs."""
    if config.cluster.gpus_per_node == 0:
        return 0.0
    others = int(config.policy.generation.colocated.enabled) + int(config.loss_fn.distillation.enabled)
    return GPU_SHARES[others]


def _engine_share(config: MasterConfig) -> float:
    """Return the share of a GPU for a rank of an engine: a whole one where engines have their own GPUs."""
    has_its_own = config.cluster.gpus_per_node > 0 and not config.policy.generation.colocated.enabled
    return 1.0 if has_its_own else gpu_share(config)


def engine_spec(
    config: MasterConfig,
    number: int,
    *,
    trace: TraceSpec | None = None,
    weight_version: int = -1,
    script: tuple[ScheduleEntry, ...] = (),
) -> EngineSpec:
    """Return the spec that an engine starts with; the arguments are those of `EngineSpec`."""
    return EngineSpec(
        policy=config.policy,
        use_gpu=config.cluster.gpus_per_node > 0,
        threads=config.cluster.threads_per_worker,
        number=number,
        num_engines=config.policy.generation.num_replicas,
        trace=trace,
        record=_record_spec(config),
        weight_version=weight_version,
        continuous=config.has_continuous_engines,
        script=script,
        sleep_level=config.sleep_level,
        adapter_slots=2 + (config.grpo.async_.max_staleness if config.grpo.samples_ahead else 0),
    )


def _record_spec(config: MasterConfig) -> RecordSpec | None:
    """Return the recording of the engines, beside that of the workers."""
    section, generation = config.diagnostics.record, config.policy.generation
    if not section.has_generation:
        return None
    model = recorded_model(config.policy)
    return RecordSpec(
        folder=(config.logger.log_dir / STEPS / "step_{step}" / RECORDS / GENERATION).absolute(),
        sites=section.sites,
        phases=(GENERATION,),
        model=replace(model, engine=generation.backend, precision=generation.precision or config.policy.precision),
        weights=f"run {config.logger.log_dir}",
        must_succeed=False,
    )


def engine_scheduler(config: MasterConfig, engines: WorkerFleet) -> EngineScheduler:
    generation = config.policy.generation
    # A block waits in the engine for those of the other workers, but for one that takes several at a time.
    callers = 1 if config.has_continuous_engines else config.experience.num_workers
    return EngineScheduler(
        engines.copy(),
        batch_rows=generation.max_batch_size,
        timeout_s=callers * (generation.engine_timeout_s or config.cluster.stage_timeout_s / 2),
        is_continuous=config.has_continuous_engines,
    )


def local_engines(config: MasterConfig, spec_of: Callable[[int], EngineSpec]) -> WorkerFleet:
    return WorkerFleet([LocalWorkerGroup(lambda: _builder(config)(spec=spec_of(0)))])


def engine_bundles(config: MasterConfig, cluster: RayVirtualCluster) -> dict[int, range]:
    """Return number of each engine -> the bundles of its ranks; empty on CPUs, where Ray places engines that are not
    apart."""
    generation = config.policy.generation
    numbers, colocated = range(generation.num_replicas), generation.colocated
    if not cluster.uses_gpu:
        return {} if colocated.enabled else {number: cluster.engine_bundles[number : number + 1] for number in numbers}
    places = engine_places(
        generation.num_replicas,
        ranks=generation.ranks_per_engine,
        gpus_per_node=config.cluster.gpus_per_node if colocated.enabled else colocated.gpus_per_node,
    )
    of_kind = cluster.policy_bundles if colocated.enabled else cluster.engine_bundles
    return {number: of_kind[place.start : place.stop] for number, place in zip(numbers, places, strict=True)}


class WorkerStarts(ABC):
    """Starts workers under Ray, each its own group."""

    _members: list[RayWorkerGroup]

    def fleet(self, *, timeout_s: float) -> WorkerFleet:
        """The processes of all workers; `begin_all` builds the workers in them.

        Args:
            timeout_s: for one that is started later in place of another.
        """
        return WorkerFleet(list(self._members), start=partial(self._replacement, timeout_s=timeout_s))

    def begin_all(self) -> None:
        """Builds every worker, without waiting."""
        for number, group in enumerate(self._members):
            self._begin(number, group)

    def finish_all(self, *, timeout_s: float) -> None:
        """Wait until every worker is built."""
        for group in self._members:
            group.finish_start(timeout_s=timeout_s)

    @abstractmethod
    def _processes_of(self, number: int) -> RayWorkerGroup: ...

    @abstractmethod
    def _begin(self, number: int, group: RayWorkerGroup) -> None: ...

    def _replacement(self, number: int, *, timeout_s: float) -> RayWorkerGroup:
        """Return a worker in place of one that was lost, when it is built; its group is ended where that fails. The
        weights of an engine come with the refit that asked for it."""
        group = self._processes_of(number)
        try:
            self._begin(number, group)
            group.finish_start(timeout_s=timeout_s)
        except BaseException:
            group.shutdown()
            raise
        return group


class EngineStarts(WorkerStarts):
    """Starts engines under Ray.

    Args:
        spec_of: by the number of the engine.
    """

    def __init__(self, config: MasterConfig, spec_of: Callable[[int], EngineSpec], cluster: RayVirtualCluster) -> None:
        self._config, self._spec_of, self._log, self._cluster = config, spec_of, log_place(config), cluster
        self._bundles = engine_bundles(config, cluster)
        self._members = [self._processes_of(number) for number in range(config.policy.generation.num_replicas)]

    def _processes_of(self, number: int) -> RayWorkerGroup:
        streams = STREAMS_PER_WORKER if self._config.has_continuous_engines else 0
        bundles = self._bundles.get(number, ())
        # Ranks in several bundles are actors of their own, which the engine's process starts without its own GPU.
        placement = RayPlacement(
            num_gpus=0.0 if len(bundles) > 1 else _engine_share(self._config),
            placement_group=self._cluster.placement_group if bundles else None,
            bundles=bundles[:1],
            environment=self._config.policy.generation.env_vars,
        )
        return RayWorkerGroup(
            "generation", world_size=1, placement=placement, first=number, num_streams=streams, **self._log
        )

    def _begin(self, number: int, group: RayWorkerGroup) -> None:
        spec, bundles = self._spec_of(number), self._bundles.get(number, ())
        if len(bundles) > 1:
            spec = replace(spec, bundles=tuple(bundles), gpu_share=_engine_share(self._config))
        group.begin_start(_builder(self._config), [{"spec": spec}])


class RolloutStarts(WorkerStarts):
    """Starts rollout workers under Ray.

    Args:
        engines: returns the scheduler of the engines for a worker that starts now.
    """

    def __init__(self, config: MasterConfig, spec: RolloutSpec, engines: Callable[[], EngineScheduler]) -> None:
        self._build = rollout_worker(config)
        self._spec, self._engines, self._log = spec, engines, log_place(config)
        self._num_streams = STREAMS_PER_WORKER if config.has_continuous_engines else 1
        self._members = [self._processes_of(number) for number in range(config.experience.num_workers)]

    def _processes_of(self, number: int) -> RayWorkerGroup:
        placement = RayPlacement(num_cpus=ROLLOUT_CPUS)
        return RayWorkerGroup(
            "rollout", world_size=1, placement=placement, first=number, num_streams=self._num_streams, **self._log
        )

    def _begin(self, number: int, group: RayWorkerGroup) -> None:
        group.begin_start(self._build, [{"spec": self._spec, "generation": self._engines()}])


def rollout_worker(config: MasterConfig) -> type[RolloutWorker]:
    """Return the class of the workers that give rows."""
    if not config.sft.enabled:
        return RolloutWorker
    from nemo_rl.experience.finished_worker import FinishedWorker  # noqa: PLC0415 - a run of GRPO does without

    return FinishedWorker


def _builder(config: MasterConfig) -> Callable[..., object]:
    return ENGINES.load(config.policy.generation.backend, key="policy.generation.backend")
