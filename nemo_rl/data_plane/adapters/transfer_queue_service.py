"""TransferQueue's actors: finding, starting and ending controller and storage units. Used by `transfer_queue` only.

There is one TransferQueue per Ray cluster, so a controller that another run made is refused, and what a failed start
has half made is ended: a controller without a configuration would make every later call wait for ever.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from omegaconf import OmegaConf
from ray import exceptions as ray_errors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transfer_queue import interface as tq_interface

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.distributed.liveness import ProcessIdentity
from nemo_rl.errors import DataPlaneClosed, DataPlaneTimeout, ResourceError
from nemo_rl.utils.deadlines import StartUp

__all__ = [
    "CONTROLLER",
    "CONTROLLER_NAMESPACE",
    "CPU_WAIT_S",
    "actor_processes",
    "await_controller",
    "bounded",
    "dead_actors",
    "end_actors",
    "find_controller",
    "forget_module_state",
    "has_client",
    "is_controller",
    "read_settings",
    "refuse_other_controller",
    "service_config",
    "stopped_actors",
    "wait_for_cpus",
]

_T = TypeVar("_T")

CONTROLLER = "TransferQueueController"
CONTROLLER_NAMESPACE = "transfer_queue"
CPU_WAIT_S = 5.0
"""The name of an actor that has just ended is free a moment later."""
GIVE_UP_S = 5.0
"""Seconds that a function that was made to fail may take to notice."""
RAY_LINES = 2
"""Lines of Ray's text about a dead actor that are kept: that it died, and its class."""


def service_config(config: DataPlaneConfig, *, run_id: str, namespace: str, mooncake: str) -> Any:
    """Build the config that `tq.init` takes; `nemo_rl` in it is ours, and informs those that join.

    Args:
        mooncake: address of the run's Mooncake servers; empty for backend `simple`.
    """
    units = config.num_storage_units
    is_spread = config.simple.placement == "spread"
    backend: dict[str, object] = {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {
            "num_data_storage_units": units,
            "total_storage_size": None,
            # What each node has under its own address.
            "required_node_resource": None if is_spread else f"node:{ray.util.get_node_ip_address()}",
        },
    }
    if mooncake:
        section = config.mooncake
        backend = {
            "storage_backend": "MooncakeStore",
            "MooncakeStore": {
                "auto_init": False,  # it would kill every master of this machine, and leave its own running
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": mooncake.partition(",")[0],
                "local_hostname": "",  # each process: its own node's address
                "protocol": section.protocol,
                "device_name": section.device_name,
                "global_segment_size": section.segment_bytes if section.segment_owner == "producer" else 0,
                "local_buffer_size": section.local_buffer_bytes,
                "hard_pin": True,
            },
        }
    return OmegaConf.create(
        {
            "nemo_rl": {"run_id": run_id, "namespace": namespace, "units": units, "mooncake": mooncake},
            # Without polling mode an unsatisfied fetch of anybody blocks the controller's only thread for seconds.
            "controller": {"polling_mode": True},
            "backend": backend,
        }
    )


def find_controller() -> Any:
    """Return the cluster's controller actor, or None."""
    try:
        return ray.get_actor(CONTROLLER, namespace=CONTROLLER_NAMESPACE)
    except ValueError:
        return None


def is_controller(actor_id: str) -> bool:
    """Return whether the cluster's controller is still the actor of this id."""
    controller = find_controller()
    return controller is not None and controller._actor_id.hex() == actor_id


def has_client() -> bool:
    """Return whether this process has a TransferQueue client already."""
    return tq_interface._TQ_CLIENT is not None


def read_settings(controller: Any, timeout_s: float) -> Mapping[str, Any] | None:
    """Return a controller's configuration, None while it starts.

    Raises:
        RayActorError: the controller has died.
    """
    try:
        config: Mapping[str, Any] | None = ray.get(controller.get_config.remote(), timeout=timeout_s)
    except ray_errors.GetTimeoutError:
        return None
    return config


def _read_config(controller: Any, timeout_s: float) -> Mapping[str, Any] | None:
    """Return our part of a controller's configuration; empty for one that another program made, None while it starts.

    Raises:
        RayActorError: the controller has died.
    """
    config = read_settings(controller, timeout_s)
    return None if config is None else dict(config.get("nemo_rl", {}))


def refuse_other_controller(run_id: str) -> None:
    """Refuse a controller of another run: each Ray cluster has one, and a second `init` would silently join it.

    Raises:
        ResourceError: a controller exists already.
    """
    give_up = time.monotonic() + CPU_WAIT_S
    while (controller := find_controller()) is not None:
        try:
            ours = _read_config(controller, CPU_WAIT_S)
        except ray_errors.RayActorError:
            ours = None  # it is ending; its name is free in a moment
        else:
            other = "half made" if ours is None else f"of run {ours.get('run_id', 'another program')!r}"
            raise ResourceError(
                f"this Ray cluster has a TransferQueue controller already ({other}), run {run_id!r} needs its own; "
                "set data_plane.transfer_queue.connect=true to use that one, or start this run on another cluster"
            )
        if time.monotonic() > give_up:
            raise ResourceError("a TransferQueue controller that has ended keeps its name; restart the Ray cluster")
        time.sleep(0.1)


def await_controller(run_id: str, timeout_s: float) -> Mapping[str, Any]:
    """Return our part of the configuration of the run's controller.

    Raises:
        DataPlaneClosed: another run's controller, or this process is not connected to Ray.
        DataPlaneTimeout: no controller, or one that was never finished, within `timeout_s`.
    """
    if not ray.is_initialized():
        raise DataPlaneClosed(f"run {run_id!r}: this process is not connected to Ray; call ray.init first")
    give_up = time.monotonic() + timeout_s
    state = "there is no controller"
    while True:
        controller = find_controller()
        try:
            ours = None if controller is None else _read_config(controller, max(give_up - time.monotonic(), 0.1))
        except ray_errors.RayActorError:
            controller = ours = None
        if ours is not None:
            if ours.get("run_id") != run_id:
                raise DataPlaneClosed(
                    f"the TransferQueue controller serves run {ours.get('run_id')!r}, not {run_id!r}, which has ended"
                )
            return ours
        state = "its controller is not finished" if controller is not None else "there is no controller"
        if time.monotonic() > give_up:
            raise DataPlaneTimeout(f"attach to TransferQueue of run {run_id!r}: {state} after {timeout_s:.1f} s")
        time.sleep(0.1)


def wait_for_cpus(needed: int, start: StartUp) -> None:
    """Wait for CPUs for TransferQueue's actors; without them its start never returns."""
    give_up = time.monotonic() + start.timeout_s
    with start.waiting_for(f"{needed} free CPUs of Ray for TransferQueue"):
        while (free := ray.available_resources().get("CPU", 0.0)) < needed:
            if time.monotonic() > give_up or 0 < ray.cluster_resources().get("CPU", 0.0) < needed:
                raise ResourceError(
                    f"TransferQueue needs {needed} free CPUs in Ray (controller and storage units, one each), there "
                    f"are {free:g}; raise cluster.num_cpus, or lower data_plane.simple.num_storage_units"
                )
            time.sleep(0.1)


def _actor_names(namespace: str, units: int) -> list[tuple[str, str]]:
    return [(CONTROLLER, CONTROLLER_NAMESPACE), *((f"TransferQueueStorageUnit#{i}", namespace) for i in range(units))]


def actor_processes(namespace: str, units: int, *, timeout_s: float) -> dict[str, ProcessIdentity]:
    """Processes by actor name: their death is seen at once on this machine, and can be found in the system's log."""
    pending = {
        name: ray.get_actor(name, namespace=where).__ray_call__.remote(_process)
        for name, where in _actor_names(namespace, units)
    }
    try:
        return dict(zip(pending, ray.get(list(pending.values()), timeout=timeout_s), strict=True))
    except ray_errors.GetTimeoutError as error:
        raise DataPlaneTimeout(f"TransferQueue's actors did not answer within {timeout_s:.1f} s") from error
    except ray_errors.RayActorError as error:
        raise died_in_start(error) from error


def start_actors(settings: Any) -> None:
    """Start controller and units. It has no deadline; run it in `bounded`.

    Raises:
        DataPlaneClosed: one of them died meanwhile.
    """
    try:
        with _controller_near():
            tq_interface.init(settings)
    except ray_errors.RayActorError as error:
        raise died_in_start(error) from error


class _Near:
    """An actor class whose actors stand on this process's node, where they have room."""

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class

    def options(self, **given: object) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        return self._actor_class.options(scheduling_strategy=here, **given)


@contextmanager
def _controller_near() -> Iterator[None]:
    """TransferQueue leaves its controller to Ray: on a node that is lost, the run could not even be cleaned up."""
    before = tq_interface.TransferQueueController
    tq_interface.TransferQueueController = _Near(before)
    try:
        yield
    finally:
        tq_interface.TransferQueueController = before


def died_in_start(error: ray_errors.RayActorError) -> DataPlaneClosed:
    said = " ".join(" ".join(str(error).splitlines()[:RAY_LINES]).split())
    return DataPlaneClosed(
        f"an actor of TransferQueue died while it started; look for a kill or an out-of-memory: {said}"
    )


def _process(actor: object) -> ProcessIdentity:
    return ProcessIdentity.of_this_process()


def dead_actors(namespace: str, units: int, processes: Mapping[str, ProcessIdentity]) -> list[str]:
    """Return the service's actors that do not live."""
    me = ProcessIdentity.of_this_process()
    dead: list[str] = []
    for name, where in _actor_names(namespace, units):
        process = processes[name]
        try:
            ray.get_actor(name, namespace=where)
            # Ray hears of a death a moment later than the system.
            is_dead = process.is_visible_from(me) and not process.is_alive()
        except ValueError:
            is_dead = True
        if is_dead:
            dead.append(f"{name} (process {process.pid})")
    return dead


def stopped_actors(processes: Mapping[str, ProcessIdentity]) -> list[str]:
    """Return the service's actors on this machine that somebody has stopped."""
    me = ProcessIdentity.of_this_process()
    return [f"{n} (process {p.pid})" for n, p in processes.items() if p.is_visible_from(me) and p.is_stopped()]


def bounded(
    too_late: str, action: Callable[[], _T], *, timeout_s: float, give_up: Callable[[], None] = lambda: None
) -> _T:
    """Run a blocking TransferQueue function that has no deadline of its own.

    Args:
        too_late: text of the DataPlaneTimeout past the deadline.
        give_up: called past the deadline, to make the function fail; it gets a moment to end.
    """
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="transfer-queue-call", daemon=True)
    thread.start()
    try:
        return outcome.result(timeout=timeout_s)
    except concurrent.futures.TimeoutError as error:
        give_up()
        thread.join(GIVE_UP_S)
        raise DataPlaneTimeout(too_late) from error


def end_actors(namespace: str, units: int) -> None:
    """End what is left of controller and units, and free TransferQueue's module state for a new start."""
    for name, where in _actor_names(namespace, units):
        try:
            ray.kill(ray.get_actor(name, namespace=where))
        except ValueError:
            continue
    give_up = time.monotonic() + CPU_WAIT_S
    while find_controller() is not None and time.monotonic() < give_up:
        time.sleep(0.05)
    forget_module_state()


def forget_module_state() -> None:
    """Free TransferQueue's module globals, so that this process can join or start another service."""
    tq_interface._TQ_CLIENT = None
    tq_interface._TQ_STORAGE = None
    tq_interface._TQ_CONTROLLER = None
