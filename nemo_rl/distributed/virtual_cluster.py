"""The Ray cluster of a run: logical resources, placement, ports, ordered teardown.

`setup` opens it with a `with` statement; Ray is gone when the block ends, also after an error. Invariant: enough
logical CPUs are checked before any actor is asked for, so that nothing waits for a resource that will never come.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from nemo_rl.config.schema import ClusterConfig
from nemo_rl.errors import ResourceError

__all__ = ["RayVirtualCluster", "free_port", "worker_environment"]

LOOPBACK = "127.0.0.1"
PLACEMENT_TIMEOUT_S = 60.0


def worker_environment(threads: int) -> dict[str, str]:
    """Environment of every process of a run: thread counts, and no look-ups on a model hub.

    More OpenMP threads than cores make CPU tensors many times slower.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class RayVirtualCluster:
    """Ray for one run, with a placement group of one bundle per policy worker.

    Args:
        config: the `cluster` section.
        other_cpus: logical CPUs of the actors outside the bundles (rollout, storage; on CPU also generation).
        cpus_per_bundle: logical CPUs of a bundle: 1 for the policy worker, 1 more for an engine that shares its GPU.
        environment: variables for every process, beside those of `worker_environment`.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        other_cpus: int,
        cpus_per_bundle: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._environment = {**worker_environment(config.threads_per_worker), **(environment or {})}
        self._other_cpus = other_cpus
        self._cpus_per_bundle = cpus_per_bundle
        self._group: PlacementGroup | None = None
        self._started = False

    @property
    def num_workers(self) -> int:
        """Policy workers of the whole job."""
        return self._config.num_workers

    @property
    def uses_gpu(self) -> bool:
        return self._config.gpus_per_node > 0

    @property
    def placement_group(self) -> PlacementGroup:
        if self._group is None:
            raise RuntimeError("the cluster is not open; use it in a with statement")
        return self._group

    def __enter__(self) -> RayVirtualCluster:
        try:
            self._start_ray()
            self._check_resources()
            self._place()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the placement group and, where we started it, Ray. Idempotent."""
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
            self._group = None
        if self._started:
            ray.shutdown()
            self._started = False

    def _start_ray(self) -> None:
        # ray.init puts a SIGTERM handler of its own in place, which leaves without our teardown.
        handler = signal.getsignal(signal.SIGTERM)
        logging.getLogger("ray").setLevel(logging.ERROR)
        if self._config.address is not None:
            ray.init(address=self._config.address, runtime_env={"env_vars": self._environment}, log_to_driver=False)
        else:
            os.environ.update(self._environment)
            ray.init(
                # Without it Ray joins whatever cluster somebody else has started on this machine.
                address="local",
                num_cpus=self._logical_cpus(),
                # None: Ray looks for them; a number would be believed, also where there are none.
                num_gpus=None if self.uses_gpu else 0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK if self._config.num_nodes == 1 else None,
            )
        self._started = True
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    def _logical_cpus(self) -> int:
        if self._config.num_cpus is not None:
            return self._config.num_cpus
        return max(self._cpus_needed(), os.cpu_count() or 1)

    def _cpus_needed(self) -> int:
        return self.num_workers * self._cpus_per_bundle + self._other_cpus

    def _check_resources(self) -> None:
        have: Mapping[str, float] = ray.available_resources()
        cpus, gpus = have.get("CPU", 0), have.get("GPU", 0)
        if cpus < self._cpus_needed():
            raise ResourceError(
                f"cluster: {self._cpus_needed()} logical CPUs are needed ({self.num_workers} policy workers and "
                f"{self._other_cpus} for rollout, generation and storage), Ray has {cpus:.0f} free; raise "
                "cluster.num_cpus (or set it to null), or use fewer workers, replicas or storage units"
            )
        if self.uses_gpu and gpus < self.num_workers:
            raise ResourceError(
                f"cluster: {self.num_workers} GPUs are needed, Ray has {gpus:.0f} free; lower cluster.gpus_per_node, "
                "or set it to 0 with cluster.cpu_workers_per_node to train on CPU"
            )

    def _place(self) -> None:
        bundle = {"CPU": float(self._cpus_per_bundle), **({"GPU": 1.0} if self.uses_gpu else {})}
        self._group = placement_group([dict(bundle) for _ in range(self.num_workers)], strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except GetTimeoutError as error:
            raise ResourceError(
                f"cluster: {self.num_workers} bundles of {bundle} could not be placed in {PLACEMENT_TIMEOUT_S:.0f} s; "
                f"Ray has {ray.available_resources()} free"
            ) from error
