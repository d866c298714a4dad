"""The Ray cluster of a run: which machines it uses, logical resources, placement, ordered teardown.

`setup` opens it with a `with` statement; Ray is gone when the block ends, also after an error. Invariants: enough nodes
and logical CPUs are checked before any actor is asked for, so that nothing waits for what will never come; the choice
of machines depends on the cluster alone, so a run that is started again on the same machines has the same ranks on
each.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from nemo_rl.config.run import ClusterConfig
from nemo_rl.distributed.environment import worker_environment
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.own_ray import OwnRay, keep_sigterm_handler, shut_down_ray
from nemo_rl.errors import DataPlaneError, NodeLost, ResourceError, UserError, WorkerError, shorten
from nemo_rl.utils import interrupt
from nemo_rl.utils.deadlines import StartUp

__all__ = [
    "ClusterNode",
    "NodeShare",
    "RayVirtualCluster",
    "choose_nodes",
    "node_resource",
]

A_LITTLE = 0.001
"""Share of the resource that each node has under its own address: asking for it means asking for that node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """One machine of a Ray cluster."""

    id: str
    """Ray's."""
    address: str
    """Under which the other machines reach it."""
    name: str
    """The node's own name."""
    num_cpus: float
    num_gpus: float
    port: int = 0
    """Port of Ray's server there."""

    def __str__(self) -> str:
        return self.address if self.name == self.address else f"{self.name} ({self.address})"

    def answers(self) -> bool:
        """Return whether Ray's server there takes a connection."""
        try:
            socket.create_connection((self.address, self.port), timeout=CONNECT_S).close()
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeShare:
    """The resources that a run needs on each of some nodes."""

    num_nodes: int
    num_cpus: int
    num_gpus: int
    what: str
    """The purpose of the nodes, for messages."""


def alive_nodes() -> list[ClusterNode]:
    return [
        ClusterNode(
            id=str(found["NodeID"]),
            address=str(found["NodeManagerAddress"]),
            name=str(found["NodeManagerHostname"]),
            num_cpus=float(found["Resources"].get("CPU", 0)),
            num_gpus=float(found["Resources"].get("GPU", 0)),
            port=int(found["NodeManagerPort"]),
        )
        for found in ray.nodes()
        if found["Alive"]
    ]


def choose_nodes(nodes: Sequence[ClusterNode], shares: Sequence[NodeShare], *, first: str) -> list[list[ClusterNode]]:
    """Return nodes for each share, no node for two of them.

    Args:
        first: Ray's id of the node that is taken before others where it has enough: the driver's, so that what the
            driver reads most is near.

    Raises:
        ResourceError: fewer nodes have enough than are asked for.
    """
    free = sorted(nodes, key=lambda node: (node.id != first, _order(node.address), node.id))
    chosen: list[list[ClusterNode]] = []
    for share in shares:
        fit = [node for node in free if node.num_cpus >= share.num_cpus and node.num_gpus >= share.num_gpus]
        if len(fit) < share.num_nodes:
            raise ResourceError(_too_few(share, fit, free))
        chosen.append(fit[: share.num_nodes])
        free = [node for node in free if node not in chosen[-1]]
    return chosen


def node_resource(node: ClusterNode) -> dict[str, float]:
    """Return the resource that pins a bundle of a placement group to a node."""
    return {f"node:{node.address}": A_LITTLE}


def _order(address: str) -> tuple[int, int, str]:
    """10.0.0.9 before 10.0.0.10."""
    try:
        number = ip_address(address)
    except ValueError:
        return (99, 0, address)
    return (number.version, int(number), "")


def _too_few(share: NodeShare, fit: Sequence[ClusterNode], free: Sequence[ClusterNode]) -> str:
    needed = f"{share.num_cpus} CPUs" + (f" and {share.num_gpus} GPUs" if share.num_gpus else "")
    have = "; ".join(f"{node}: {node.num_cpus:.0f} CPUs, {node.num_gpus:.0f} GPUs" for node in free) or "none"
    return (
        f"{share.what}: expected {share.num_nodes} nodes of the Ray cluster with {needed} each, got {len(fit)} (not "
        f"taken yet: {have}); let more nodes join, start Ray there with more, or ask for less"
    )


logger = logging.getLogger(__name__)

POLL_S = 0.1
CONNECT_S = 2.0
LOOK_S = 5.0
"""Seconds after a failure in which the machine of a worker that was lost may turn out to be dead: its processes do not
end in the same moment."""
DEATH_S = 90.0
"""Seconds until Ray calls a machine dead that does not answer: five checks of 3 s, or of 13 s where nothing comes back
from it."""


class RayVirtualCluster:
    """Ray for one run, with a placement group of one bundle per policy worker, and further ones for engines that are
    not colocated.

    Policy rank r is on node r // (workers per node), in bundle r; the engines' bundles follow.

    Args:
        config: the `cluster` section.
        other_cpus: logical CPUs of the actors outside the bundles (rollout, storage; on CPU also generation).
        cpus_per_bundle: 1 for the policy worker, 1 more for each process that shares its GPU.
        num_engine_bundles: of all engines that are not colocated: one for each rank of an engine on GPUs, one for each
            engine on CPUs.
        engine_nodes: nodes with engines alone; with 0 the engines run on the nodes of the policy, beside its workers.
        gpus_per_engine_node: of each of these nodes, one in a bundle.
        environment: variables for every process, besides those of `worker_environment`.
        start: how long Ray and the placement may take; None: `cluster.worker_start_timeout_s`, without a word.
        forks: where the workers of a Ray that is started here begin; None: each by itself.
        logs_to: gets Ray's logs when a block ends with an error that is not the user's; None: they are not kept.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        other_cpus: int,
        cpus_per_bundle: int = 1,
        num_engine_bundles: int = 0,
        engine_nodes: int = 0,
        gpus_per_engine_node: int = 0,
        environment: Mapping[str, str] | None = None,
        start: StartUp | None = None,
        forks: ForkServer | None = None,
        logs_to: Path | None = None,
    ) -> None:
        self._config, self._forks, self._logs_to = config, forks, logs_to
        self._start = start or StartUp(timeout_s=config.worker_start_timeout_s)
        self._environment = {
            **worker_environment(config.threads_per_worker, uses_gpu=self.uses_gpu),
            **(environment or {}),
        }
        self._other_cpus, self._cpus_per_bundle = other_cpus, cpus_per_bundle
        self._num_engine_bundles, self._engine_nodes = num_engine_bundles, engine_nodes
        self._gpus_per_engine_node = gpus_per_engine_node
        self._nodes: list[list[ClusterNode]] = []
        self._spare: list[ClusterNode] = []
        self._group: PlacementGroup | None = None
        self._own: OwnRay | None = None
        self._joined = False

    @property
    def num_workers(self) -> int:
        """Policy workers of the whole job."""
        return self._config.num_workers

    @property
    def uses_gpu(self) -> bool:
        return self._config.gpus_per_node > 0

    @property
    def policy_bundles(self) -> range:
        """The policy's bundles of the placement group, in the order of the ranks."""
        return range(self.num_workers)

    @property
    def engine_bundles(self) -> range:
        """The bundles of engines on nodes of their own; empty without such engines."""
        return range(self.num_workers, self.num_workers + self._num_engine_bundles)

    @property
    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    @property
    def placement_group(self) -> PlacementGroup:
        if self._group is None:
            raise RuntimeError("the cluster is not open; use it in a with statement")
        return self._group

    def __enter__(self) -> RayVirtualCluster:
        try:
            self._start_ray()
            self._check_resources()
            *self._nodes, self._spare = self._choose(self._config.spare_nodes)
            self._place()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, UserError):
                self._keep_logs()
                self._raise_if_lost(error)
        finally:
            self.close()

    def close(self) -> None:
        """Free the placement group and, where we started it, Ray. Idempotent."""
        group, self._group = self._group, None
        own, self._own = self._own, None
        if group is not None and own is None:
            with suppress(RayError):
                remove_placement_group(group)
        if own is not None:
            own.close()
        elif self._joined:
            shut_down_ray()
            self._joined = False

    def _raise_if_lost(self, error: Exception) -> None:
        """Raise NodeLost in place of an error of a run whose machines have died; where others may take their place,
        once Ray knows it, too."""
        if not self._joined or interrupt.received():
            return
        nodes = [*(node for share in self._nodes for node in share), *self._spare]
        give_up = time.monotonic() + (LOOK_S if isinstance(error, WorkerError | DataPlaneError) else 0.0)
        while not (lost := self._lost_of(nodes)) and time.monotonic() < give_up:
            time.sleep(POLL_S)
        if not lost:
            return
        named = "; ".join(
            f"{node} of the Ray cluster is lost (Ray id {node.id}; policy ranks {self._ranks_on(node) or 'none'})"
            for node in lost
        )
        if self._config.spare_nodes and not self._is_given_up(lost):
            error.add_note(f"no answer for {DEATH_S:.0f} s, and Ray takes it for alive: {named}")
            return
        cause = " ".join(str(error).split())
        raised = NodeLost(f"{named}: {shorten(cause)}", num_lost=len(lost), num_spare=self._num_spare())
        for note in error.__notes__ if hasattr(error, "__notes__") else ():
            raised.add_note(note)
        raise raised from error

    def _is_given_up(self, lost: Sequence[ClusterNode]) -> bool:
        """Return whether Ray calls these machines dead within `DEATH_S`: until then it would place workers on them."""
        give_up, gone = time.monotonic() + DEATH_S, {node.id for node in lost}
        with self._start.waiting_for(f"Ray to notice the end of {', '.join(map(str, lost))}"):
            while gone & {node.id for node in alive_nodes()}:
                if time.monotonic() > give_up:
                    return False
                time.sleep(POLL_S)
        return True

    def _lost_of(self, nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
        alive = {node.id for node in alive_nodes()}
        return [node for node in nodes if node.id not in alive or not node.answers()]

    def _ranks_on(self, node: ClusterNode) -> list[int]:
        return [rank for rank, each in enumerate(_in_turn(self._nodes[0], self.num_workers)) if each == node]

    def _num_spare(self) -> int:
        """Return how many spare machines a run would have that starts now, at most as many as this one; -1: too few
        are left for the run itself."""
        for count in range(self._config.spare_nodes, -1, -1):
            with suppress(ResourceError):
                self._choose(count)
                return count
        return -1

    def _keep_logs(self) -> None:
        if self._own is None or self._logs_to is None:
            return
        try:
            kept = self._own.keep_logs(self._logs_to)
        except OSError as error:
            logger.warning("Ray's logs could not be kept in %s: %s", self._logs_to, error)
        else:
            if kept is not None:
                self._start.report(f"Ray's logs of this run are in {kept}")

    def _start_ray(self) -> None:
        if self._config.address is None:
            os.environ.update(self._environment)
            self._own = OwnRay(
                num_cpus=self._logical_cpus(),
                # None: Ray looks for them; a number would be believed, also where there are none.
                num_gpus=None if self.uses_gpu else 0,
                environment=self._environment,
                start=self._start,
                forks=self._forks,
            ).__enter__()
            return
        logging.getLogger("ray").setLevel(logging.ERROR)
        with keep_sigterm_handler(), self._start.waiting_for(f"the Ray cluster at {self._config.address}"):
            ray.init(
                address=self._config.address,
                runtime_env={"env_vars": self._environment},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        self._joined = True

    def _logical_cpus(self) -> int:
        if self._config.num_cpus is not None:
            return self._config.num_cpus
        return max(self._cpus_needed(), os.cpu_count() or 1)

    def _cpus_needed(self) -> int:
        return self.num_workers * self._cpus_per_bundle + self._num_engine_bundles + self._other_cpus

    def _gpus_needed(self) -> int:
        return self.num_workers + self._num_engine_bundles if self.uses_gpu else 0

    def _shares(self) -> list[NodeShare]:
        """Return the needs of the policy's nodes, and of those that hold engines alone."""
        config = self._config
        workers = self.num_workers // config.num_nodes
        beside = 0 if self._engine_nodes else -(-self._num_engine_bundles // config.num_nodes)
        gpus_beside = 0 if self._engine_nodes else self._gpus_per_engine_node
        policy = NodeShare(
            num_nodes=config.num_nodes,
            num_cpus=workers * self._cpus_per_bundle + beside,
            num_gpus=workers + gpus_beside if self.uses_gpu else 0,
            what="cluster.num_nodes",
        )
        if not self._engine_nodes:
            return [policy]
        return [
            policy,
            NodeShare(
                num_nodes=self._engine_nodes,
                num_cpus=self._num_engine_bundles // self._engine_nodes,
                num_gpus=self._gpus_per_engine_node,
                what="policy.generation.colocated.num_nodes",
            ),
        ]

    def _choose(self, num_spare: int) -> list[list[ClusterNode]]:
        """Return the nodes of each share, and behind them the spare ones, each of which could take any place.

        Raises:
            ResourceError: too few nodes are alive.
        """
        shares = self._shares()
        spare = NodeShare(
            num_nodes=num_spare,
            num_cpus=max(share.num_cpus for share in shares),
            num_gpus=max(share.num_gpus for share in shares),
            what="cluster.spare_nodes",
        )
        return choose_nodes(alive_nodes(), [*shares, spare], first=ray.get_runtime_context().get_node_id())

    def _check_resources(self) -> None:
        """Wait for what others are about to give back, but not for what the cluster does not have at all."""
        needed = {"CPU": self._cpus_needed(), "GPU": self._gpus_needed()}
        give_up = time.monotonic() + self._start.timeout_s
        with self._start.waiting_for(f"{needed['CPU']} free CPUs and {needed['GPU']} free GPUs of Ray"):
            while True:
                have: Mapping[str, float] = ray.available_resources()
                lacking = {what: have.get(what, 0) for what, count in needed.items() if have.get(what, 0) < count}
                if not lacking:
                    return
                total: Mapping[str, float] = ray.cluster_resources()
                is_hopeless = bool(total) and any(total.get(what, 0) < needed[what] for what in lacking)
                if is_hopeless or time.monotonic() > give_up:
                    raise ResourceError(self._too_few(lacking))
                time.sleep(POLL_S)

    def _too_few(self, lacking: Mapping[str, float]) -> str:
        if "CPU" in lacking:
            return (
                f"cluster: {self._cpus_needed()} logical CPUs are needed ({self.num_workers} policy workers and "
                f"{self._other_cpus} for rollout, generation and storage), Ray has {lacking['CPU']:.0f} free; raise "
                "cluster.num_cpus (or set it to null), or use fewer workers, replicas or storage units"
            )
        return (
            f"cluster: {self._gpus_needed()} GPUs are needed, Ray has {lacking['GPU']:.0f} free; lower "
            "cluster.gpus_per_node, or set it to 0 with cluster.cpu_workers_per_node to train on CPU"
        )

    def _place(self) -> None:
        bundles = self._bundles()
        self._group = placement_group(bundles, strategy="PACK")
        try:
            with self._start.waiting_for("Ray's placement group"):
                ray.get(self._group.ready(), timeout=self._start.timeout_s)
        except GetTimeoutError as error:
            raise ResourceError(
                f"{self._start.too_late(f'cluster: {len(bundles)} bundles such as {bundles[0]} could not be placed')}; "
                f"Ray has {ray.available_resources()} free"
            ) from error

    def _bundles(self) -> list[dict[str, float]]:
        device = {"GPU": 1.0} if self.uses_gpu else {}
        policy_nodes = self._nodes[0]
        of_workers = _in_turn(policy_nodes, self.num_workers)
        of_engines = _in_turn(self._nodes[-1], self._num_engine_bundles)
        return [
            *({"CPU": float(self._cpus_per_bundle), **device, **self._pinned(node)} for node in of_workers),
            *({"CPU": 1.0, **device, **self._pinned(node)} for node in of_engines),
        ]

    def _pinned(self, node: ClusterNode) -> dict[str, float]:
        """Return the resource that pins to a node; a Ray that was started here has one node and needs none."""
        return node_resource(node) if self._joined else {}


def _in_turn(nodes: Sequence[ClusterNode], count: int) -> list[ClusterNode]:
    """Return equal numbers of each node, one node after the other; the first ones get what is left over."""
    each, more = divmod(count, len(nodes))
    return [node for number, node in enumerate(nodes) for _ in range(each + (number < more))]
