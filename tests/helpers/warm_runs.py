"""Runs over Ray, in the tests' process, whose workers begin where those of the run before began.

A run of a few small steps takes most of its time for the imports of its workers, which `ForkServer` does once per run.
Here one server, for all tests of a process, serves run after run. Commands that tests start have servers of their own.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from nemo_rl.algorithms.processes import forked_modules, worker_forks
from nemo_rl.algorithms.run import run
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.environment import worker_environment
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.run_folder import RunFolder

START_S = 600.0
MODULES = (
    "tensordict",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "nemo_rl.models.policy.workers.launch",
    "nemo_rl.models.policy.workers.dtensor_engine",
    "nemo_rl.models.policy.workers.megatron_engine",
    "nemo_rl.models.generation.torch_engine.worker",
)
"""What workers of usual tests import; a run that needs another module has its own server."""


class _Lent(ForkServer):
    """The server of several runs, as one of them sees it: with a folder of its own."""

    def __init__(self, server: ForkServer) -> None:
        self.folder = RunFolder()
        self._server = server

    @property
    def environment(self) -> Mapping[str, str]:
        return self._server.environment

    def close(self) -> None:
        """Remove the folder; the server stays."""
        self.folder.close()


class WarmRuns:
    """Runs recipes. A context manager."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    def __enter__(self) -> WarmRuns:
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.close()

    def run(self, config: MasterConfig, *, shown: io.StringIO | None = None) -> None:
        """Run a recipe to its end, in this process or over Ray."""
        with self._forks(config) as forks:
            run(config, console=Console(file=io.StringIO() if shown is None else shown, width=300), forks=forks)

    @contextmanager
    def _forks(self, config: MasterConfig) -> Iterator[ForkServer | None]:
        if config.cluster.launcher != "ray" or not set(forked_modules(config)) <= set(MODULES):
            with worker_forks(config) as own:
                yield own
            return
        if self._server is None:
            environment = worker_environment(config.cluster.threads_per_worker, uses_gpu=False)
            self._server = ForkServer(MODULES, environment=environment, deadline_s=START_S)
        with _Lent(self._server) as lent:
            yield lent
