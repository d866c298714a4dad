"""`ForkServer`: imports once what all workers of a run on this machine import, and lets them begin from there.

torch and transformers cost a process seconds of a core, and a run has six processes and more. It is started before the
driver has imported anything itself; `OwnRay` has Ray start `fork_stub` in place of its workers. For CPU runs: a process
that has looked at a GPU must not be forked.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from nemo_rl.distributed import fork_stub
from nemo_rl.distributed.run_folder import RunFolder
from nemo_rl.utils.child_process import ChildProcess

__all__ = ["ForkServer"]

EXIT_S = 10.0
SETUP_SCRIPT = "_private/workers/setup_worker.py"
"""The script, in Ray's own package, that Ray starts in place of a worker."""


class ForkServer:
    """The server's process, and the run's folder, where its socket and its log lie. A context manager.

    Args:
        modules: what it imports; those that cannot be imported are left to the workers.
        environment: variables that count while modules are imported.
        deadline_s: how long a worker waits for it before it starts anew.
    """

    def __init__(self, modules: Sequence[str], *, environment: Mapping[str, str], deadline_s: float) -> None:
        self.folder = RunFolder()
        self._path, self._deadline_s = self.folder.path / "fork.sock", deadline_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self.folder.marking():
            # Bound here, so that stubs can wait in line while the modules are imported.
            listener.bind(str(self._path))
            listener.listen(128)
            self._process = ChildProcess(
                [sys.executable, "-m", "nemo_rl.distributed.fork_server_process", str(listener.fileno()), *modules],
                name="the fork server",
                log=self.folder.path / "fork_server.log",
                environment=environment,
                pass_fds=[listener.fileno()],
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for the processes that start `fork_stub`."""
        # Found without importing Ray, since this may run before anything else does.
        ray = find_spec("ray")
        assert ray is not None and ray.origin is not None, "Ray is installed with this package"
        return {
            fork_stub.ADDRESS: str(self._path),
            fork_stub.SETUP_SCRIPT: str(Path(ray.origin).parent / SETUP_SCRIPT),
            fork_stub.DEADLINE: str(self._deadline_s),
        }

    def close(self) -> None:
        """End it, and workers that are left, and remove the folder. Idempotent."""
        try:
            self._process.stop(timeout_s=EXIT_S)
        finally:
            self.folder.close()
