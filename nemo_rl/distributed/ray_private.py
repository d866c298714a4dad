"""Changes inside Ray for which Ray has no option: the address where it listens, and the processes that it starts.

`OwnRay` enters both around `ray.init`. Written for Ray 2.60; `tests/unit/distributed/test_virtual_cluster.py` asks the
running cluster whether they hold.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services
from ray._private.node import Node
from ray._private.parameter import RayParams

from nemo_rl.distributed import fork_stub
from nemo_rl.utils.process_guard import leave_notices_to_driver

__all__ = ["apart_from_signals", "on_loopback", "started_by", "without_what_nobody_asks"]

NOT_STARTED = ("start_api_server", "start_monitor", "start_log_monitor", "start_ray_client_server")
"""Python processes with imports of their own: dashboard (which is waited for), autoscaler, logs, remote clients."""
WITHOUT_HUGE_PAGES = ("env", "-u", "GLIBC_TUNABLES")
"""Words before a command whose process takes small pages."""


@contextmanager
def on_loopback() -> Iterator[None]:
    """Ray 2.60 replaces a loopback address by the one that others reach, unless it may not form clusters.

    That is its rule on macOS and Windows. The variable behind it is read when Ray is imported, so it is set where Ray
    keeps it. A node on loopback makes all of Ray's servers, and TransferQueue's, listen there only.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def without_what_nobody_asks() -> Iterator[None]:
    """Ray without the processes of `NOT_STARTED`, and with an idle agent in place of the dashboard's.

    A run's logs are in files, and its cluster never grows.
    """
    before = {name: getattr(Node, name) for name in NOT_STARTED}
    python_of = services._build_python_executable_command_memory_profileable

    def command(component: str, *given: Any, **named: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", fork_stub.__file__, fork_stub.IDLE_AGENT]
        words = list(python_of(component, *given, **named))
        # Huge pages are for payloads, which this agent never sees, and take it 30 MiB more.
        is_other = component == ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT
        return [*WITHOUT_HUGE_PAGES, *words] if is_other and shutil.which(WITHOUT_HUGE_PAGES[0]) else words

    for name in NOT_STARTED:
        setattr(Node, name, _start_nothing)
    services._build_python_executable_command_memory_profileable = command
    try:
        yield
    finally:
        services._build_python_executable_command_memory_profileable = python_of
        for name, method in before.items():
            setattr(Node, name, method)


@contextmanager
def started_by(script: Path) -> Iterator[None]:
    """A Ray whose workers are started as `python <script> ...` in place of its own set-up script."""
    update = RayParams.update_if_absent

    def with_script(self: RayParams, **given: object) -> None:
        update(self, **{**given, "setup_worker_path": str(script)} if "setup_worker_path" in given else given)

    RayParams.update_if_absent = with_script
    try:
        yield
    finally:
        RayParams.update_if_absent = update


@contextmanager
def apart_from_signals() -> Iterator[None]:
    """A Ray whose processes leave to the driver what is sent to its process group, and SIGUSR1 and SIGUSR2."""
    before = services.ConsolePopen

    def start(*words: object, preexec_fn: Callable[[], None], **given: object) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            preexec_fn()
            leave_notices_to_driver()

        return before(*words, preexec_fn=prepare, process_group=0, **given)

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = before


def _start_nothing(node: Node, **given: object) -> None:
    """Do nothing, in place of a method of `Node` that starts a process."""
