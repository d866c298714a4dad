"""Starts the generation engines and rollout workers of a config: in this process, or each as a group of one Ray worker.

Called by `setup` for a run and by `evaluate` for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypedDict

from nemo_rl.algorithms.cpu_needs import ROLLOUT_CPUS
from nemo_rl.config.parts import ENGINES
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_fleet import WorkerFleet
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, RayPlacement, RayWorkerGroup
from nemo_rl.distributed.worker_log import WORKER_LOGS
from nemo_rl.experience.rollout_worker import RolloutSpec, RolloutWorker
from nemo_rl.experience.scheduler import EngineScheduler
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.models.policy.tracing import TraceSpec

__all__ = [
    "STREAMS_PER_WORKER",
    "EngineStarts",
    "LogPlace",
    "RolloutStarts",
    "engine_scheduler",
    "engine_spec",
    "gpu_share",
    "local_engines",
    "log_place",
]

STREAMS_PER_WORKER = 64
"""Streams that a continuous engine or its rollout worker serves at a time; each has a thread."""
GPU_SHARE = 0.5
"""GPU share of a policy worker, and of the engine that takes turns with it on the same GPU."""


class LogPlace(TypedDict):
    """The place where the workers of a group log, as arguments of the group."""

    log_dir: Path
    log_level: str


def log_place(config: MasterConfig) -> LogPlace:
    """Return the place where every group of a run logs."""
    return LogPlace(log_dir=(config.logger.log_dir / WORKER_LOGS).absolute(), log_level=config.logger.worker_level)


def gpu_share(config: MasterConfig) -> float:
    """Return the share of a GPU for a policy worker or an engine; 0 on CPUs."""
    if config.cluster.gpus_per_node == 0:
        return 0.0
    return GPU_SHARE if config.policy.generation.colocated.enabled else 1.0


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
        weight_version=weight_version,
        continuous=config.has_continuous_engines,
        script=script,
        adapter_slots=2 + (config.grpo.async_.max_staleness if config.grpo.samples_ahead else 0),
    )


def engine_scheduler(config: MasterConfig, engines: WorkerFleet) -> EngineScheduler:
    """Return the scheduler through which the engines are asked for samples."""
    generation = config.policy.generation
    return EngineScheduler(
        engines.copy(),
        batch_rows=generation.max_batch_size,
        timeout_s=generation.engine_timeout_s or config.cluster.stage_timeout_s / 2,
        is_continuous=config.has_continuous_engines,
    )


def local_engines(config: MasterConfig, spec_of: Callable[[int], EngineSpec]) -> WorkerFleet:
    """The one engine of this process."""
    return WorkerFleet([LocalWorkerGroup(lambda: _builder(config)(spec=spec_of(0)))])


class EngineStarts:
    """Starts engines under Ray, each a group of its own.

    Args:
        spec_of: by the number of the engine.
    """

    def __init__(self, config: MasterConfig, spec_of: Callable[[int], EngineSpec], cluster: RayVirtualCluster) -> None:
        generation, is_shared = config.policy.generation, config.policy.generation.colocated.enabled
        self._config, self._spec_of, self._log = config, spec_of, log_place(config)
        self._placement = RayPlacement(
            num_gpus=gpu_share(config),
            placement_group=cluster.placement_group if cluster.uses_gpu or not is_shared else None,
            bundles=cluster.policy_bundles if is_shared else cluster.engine_bundles,
            environment=generation.env_vars,
        )
        self._members = [self._processes_of(number) for number in range(generation.num_replicas)]

    def fleet(self, *, timeout_s: float) -> WorkerFleet:
        """The processes of all engines; `begin_all` builds the engines in them.

        Args:
            timeout_s: for one that is started later in place of another.
        """
        return WorkerFleet(list(self._members), start=partial(self._replacement, timeout_s=timeout_s))

    def begin_all(self) -> None:
        """Builds every engine, without waiting."""
        for number, group in enumerate(self._members):
            self._begin(number, group)

    def _processes_of(self, number: int) -> RayWorkerGroup:
        streams = STREAMS_PER_WORKER if self._config.has_continuous_engines else 0
        return RayWorkerGroup(
            "generation", world_size=1, placement=self._placement, first=number, num_streams=streams, **self._log
        )

    def _begin(self, number: int, group: RayWorkerGroup) -> None:
        group.begin_start(_builder(self._config), [{"spec": self._spec_of(number)}])

    def _replacement(self, number: int, *, timeout_s: float) -> RayWorkerGroup:
        """An engine in place of one that was lost; its weights come with the refit that asked for it."""
        return _started(self._processes_of(number), partial(self._begin, number), timeout_s=timeout_s)


class RolloutStarts:
    """Starts rollout workers under Ray, each a group of its own.

    Args:
        engines: returns the scheduler of the engines for a worker that starts now.
    """

    def __init__(self, config: MasterConfig, spec: RolloutSpec, engines: Callable[[], EngineScheduler]) -> None:
        self._spec, self._engines, self._log = spec, engines, log_place(config)
        self._num_streams = STREAMS_PER_WORKER if config.has_continuous_engines else 1
        self._members = [self._processes_of(number) for number in range(config.experience.num_workers)]

    def fleet(self, *, timeout_s: float) -> WorkerFleet:
        """The processes of all workers; `begin_all` builds the workers in them.

        Args:
            timeout_s: for one that is started later in place of another.
        """
        return WorkerFleet(list(self._members), start=partial(self._replacement, timeout_s=timeout_s))

    def begin_all(self) -> None:
        """Builds every worker, without waiting."""
        for group in self._members:
            self._begin(group)

    def _processes_of(self, number: int) -> RayWorkerGroup:
        placement = RayPlacement(num_cpus=ROLLOUT_CPUS)
        return RayWorkerGroup(
            "rollout", world_size=1, placement=placement, first=number, num_streams=self._num_streams, **self._log
        )

    def _begin(self, group: RayWorkerGroup) -> None:
        group.begin_start(RolloutWorker, [{"spec": self._spec, "generation": self._engines()}])

    def _replacement(self, number: int, *, timeout_s: float) -> RayWorkerGroup:
        return _started(self._processes_of(number), self._begin, timeout_s=timeout_s)


def _started(group: RayWorkerGroup, begin: Callable[[RayWorkerGroup], None], *, timeout_s: float) -> RayWorkerGroup:
    """Return the group when its worker is built; it is ended where that fails."""
    try:
        begin(group)
        group.finish_start(timeout_s=timeout_s)
    except BaseException:
        group.shutdown()
        raise
    return group


def _builder(config: MasterConfig) -> Callable[..., object]:
    return ENGINES.load(config.policy.generation.backend, key="policy.generation.backend")
