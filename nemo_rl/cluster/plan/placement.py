"""The placement of a run: policy ranks, engines, rollout, storage and listening ports, node by node.

Ranks lie in the order of the run's layout, as many on a node as it has workers; engines share the first GPUs, as many
as they have ranks, or stand apart on GPUs or nodes of their own; the driver's node has everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl.algorithms.cpu_needs import cpus_per_bundle, logical_cpus, num_engine_bundles, other_cpus
from nemo_rl.cluster.plan.setting import PlanSetting
from nemo_rl.config.distillation import num_teacher_workers
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.distributed.layout import engine_places

__all__ = ["Device", "PlannedNode", "Port", "plan_nodes", "plan_ports"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU, or the share of a CPU that one policy worker has."""

    number: int
    """Number of the device on its node."""
    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    engine: int | None
    """Number of the engine of which a rank takes turns with the policy's here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedNode:
    """One machine of the run, with the processes on it."""

    number: int
    devices: tuple[Device, ...]
    engines: tuple[int, ...]
    """Numbers of all engines here, those on GPUs of their own included."""
    others: tuple[str, ...]
    """Further processes."""
    cpus: int
    """Logical CPUs that its processes ask Ray for."""
    engine_ranks: int
    """Ranks of engines here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A port on which a process of the run listens."""

    who: str
    node: int
    port: int | None
    """The number of the port, or None for a free one that is taken at the start."""
    set_by: str
    """The key that fixes it; empty where there is none."""


def plan_nodes(setting: PlanSetting) -> list[PlannedNode]:
    """Return all machines of the run."""
    cluster, layout = setting.config.cluster, setting.layout
    per_node = cluster.num_workers // cluster.num_nodes
    engines, has_gpus = setting.policy.generation.num_replicas, cluster.gpus_per_node > 0
    apart = _non_colocated_engines(setting)
    ranks_each = setting.policy.generation.ranks_per_engine
    places = engine_places(engines, ranks=ranks_each, gpus_per_node=max(1, per_node)) if has_gpus and not apart else []
    engine_of = {rank: number for number, place in enumerate(places) for rank in place}
    apart_ranks = dict.fromkeys(apart, num_engine_bundles(setting.config) // max(1, len(apart)))
    nodes = []
    for number in range(cluster.num_nodes):
        devices = []
        for local in range(per_node):
            rank = number * per_node + local
            at = layout.coordinates(rank)
            engine = engine_of.get(rank)
            devices.append(Device(number=local, rank=rank, pp=at.pp, dp=at.dp, cp=at.cp, tp=at.tp, engine=engine))
        on_gpus = tuple(device.engine for device in devices if device.engine is not None)
        is_first = number == 0
        placed = tuple(dict.fromkeys(on_gpus)) if has_gpus else tuple(range(engines)) if is_first else ()
        nodes.append(
            PlannedNode(
                number=number,
                devices=tuple(devices),
                engines=apart.get(number, ()) if apart else placed,
                others=_others(setting) if is_first else (),
                cpus=_cpus(setting, is_first=is_first) + apart_ranks.get(number, 0),
                engine_ranks=apart_ranks.get(number, 0) if apart else len(on_gpus) or len(placed) * ranks_each,
            )
        )
    alone = (number for number in sorted(apart) if number >= cluster.num_nodes)
    nodes += [
        PlannedNode(
            number=number,
            devices=(),
            engines=apart[number],
            others=(),
            cpus=apart_ranks[number],
            engine_ranks=apart_ranks[number],
        )
        for number in alone
    ]
    return nodes


def _non_colocated_engines(setting: PlanSetting) -> dict[int, tuple[int, ...]]:
    """Return the numbers of the engines by node, where they share nothing with the policy workers; empty
    where they do."""
    config = setting.config
    count, colocated = num_engine_bundles(config), config.policy.generation.colocated
    if not count:
        return {}
    first = config.cluster.num_nodes if colocated.num_nodes else 0
    nodes = colocated.num_nodes or config.cluster.num_nodes
    each, ranks = count // nodes, count // config.policy.generation.num_replicas
    # An engine over several nodes is named on each of them.
    return {
        first + place: tuple(dict.fromkeys(bundle // ranks for bundle in range(place * each, (place + 1) * each)))
        for place in range(nodes)
    }


def _cpus(setting: PlanSetting, *, is_first: bool) -> int:
    config = setting.config
    if config.cluster.launcher == "local":
        return 0
    each = config.cluster.num_workers // config.cluster.num_nodes * cpus_per_bundle(config)
    if config.cluster.num_nodes == 1:
        return logical_cpus(config) - num_engine_bundles(config)
    return each + (other_cpus(config) if is_first else 0)


def _others(setting: PlanSetting) -> tuple[str, ...]:
    """Return the processes of the driver's node besides policy workers and engines."""
    config = setting.config
    if config.cluster.launcher == "local":
        return ("driver",)
    plane = config.active_data_plane
    kind = kind_named(plane.impl or "noop")
    found = ["driver", "rollout worker", *["teacher worker"] * num_teacher_workers(config)]
    host = plane.ledger_host or kind.ledger_host
    found += ["ledger"] if host == "ray_actor" else []
    found += ["references"] if plane.ledger.recovery == "journal" and kind.needs_ledger_actor(plane) else []
    if plane.impl == "transfer_queue" and not plane.is_guest_of_queue:
        found += ["TransferQueue controller", *["storage unit"] * plane.num_storage_units]
    if plane.starts_mooncake:
        found += ["Mooncake master"] if plane.mooncake.master_address is None else []
        found += ["Mooncake holder"] if plane.mooncake.segment_owner == "holder" else []
    if config.env.name != "sort":
        found += ["scoring process"] * config.env.num_workers
    return tuple(found)


def plan_ports(setting: PlanSetting) -> list[Port]:
    """List the listening ports; a port without a number is free whenever the machine has one."""
    config = setting.config
    if config.cluster.launcher == "local":
        return []
    plane, found = config.active_data_plane, []
    if config.cluster.address is None:
        found.append(Port(who="Ray (metadata, object store, workers)", node=0, port=None, set_by=""))
    found.append(Port(who="rendezvous of the policy ranks", node=0, port=None, set_by=""))
    if config.refit_transport == "broadcast":
        found.append(Port(who="rendezvous of the refit", node=0, port=None, set_by=""))
    if plane.impl == "transfer_queue" and not plane.is_guest_of_queue:
        found.append(Port(who="TransferQueue controller and storage units", node=0, port=None, set_by=""))
    if plane.starts_mooncake:
        given = plane.mooncake.master_address
        number = int(given.rpartition(":")[2]) if given else None
        key = "data_plane.mooncake.master_address" if given else ""
        found.append(Port(who="Mooncake master", node=0, port=number, set_by=key))
    if config.diagnostics.tracer.enabled:
        given_port = config.diagnostics.tracer.port
        found.append(Port(who="tracer hub", node=0, port=given_port or None, set_by="diagnostics.tracer.port"))
    return found
