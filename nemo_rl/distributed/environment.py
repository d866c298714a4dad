"""Environment variables and limits of every process of a run, and of Ray's own; imports neither torch nor Ray.

`WorkerLog`: what a worker process logs, in its own file, and its warnings for the driver.

The actor behind `RayWorkerGroup` opens one; without it a worker's records reach nobody. Warnings of this package travel
back with the reply of the call that caused them, so the driver shows them with rank and stage.
"""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

from nemo_rl.errors import ResourceError
from nemo_rl.utils.console import LOGGERS, printable

__all__ = [
    "FAIR_SHARE",
    "LEAST_OPEN_FILES",
    "NO_SPARE_WORKERS",
    "WORKER_LOGS",
    "WorkerLog",
    "raise_open_files",
    "ray_environment",
    "worker_environment",
]


KERNELS = "TORCHINDUCTOR_CACHE_DIR"
MOST_OPEN_FILES = 1 << 20
"""Programs exist that close every descriptor up to the limit when they start: some systems allow a billion."""
LEAST_OPEN_FILES = 1024
"""A run of one small worker needs some 300 in its driver."""


def raise_open_files(*, least: int = 0) -> None:
    """Allow this process, and those that it starts, as many open files and sockets as its hard limit does: a group of
    several hundred ranks needs a socket for each of its members.

    Raises:
        ResourceError: the hard limit is below `least`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if wanted < least:
        raise ResourceError(
            f"open files: a run needs at least {least:,} in a process, and the hard limit here is {hard:,} "
            "(`ulimit -Hn`). Raise it: in a container by --ulimit nofile=65536, else in /etc/security/limits.conf"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""glibc keeps the memory of tensors that were freed, up to 4 GiB each, for the next ones. It would return it to the
system and take a fault for each page of each large tensor, which was up to half of the time of a training pass."""


def worker_environment(threads: int, *, uses_gpu: bool) -> dict[str, str]:
    """Environment of every process of a run: thread counts, memory, and no look-ups on a model hub.

    More OpenMP threads than cores make CPU tensors many times slower. With GPUs tensors lie in host memory for a moment
    only, such as those of a checkpoint, and their memory is returned.
    """
    return {
        **({} if uses_gpu else KEPT_MEMORY),
        # Kernels of compiled layers; torch would put them where a restart of the machine removes them.
        KERNELS: os.environ.get(KERNELS) or str(Path("~/.cache/nemo_rl/inductor").expanduser()),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


FAIR_SHARE = {"RAY_worker_niceness": "0"}
"""Ray's default, 15, leaves workers 1.5% of a core that somebody else's process keeps busy, and no deadline holds."""
NO_SPARE_WORKERS = {"RAY_enable_worker_prestart": "false", "RAY_prestart_worker_first_driver": "false"}
"""Ray starts an idle worker per CPU in advance; ours bring their own environment and can use none of them."""
DEAF_S = 30.0
"""Seconds that Ctrl-C, or the death of one of Ray's servers, may go unnoticed while Ray starts."""


def ray_environment(timeout_s: float) -> dict[str, str]:
    """
    Args:
        timeout_s: of a start of ours, which counts in place of Ray's own deadlines.
    """
    return {
        "RAY_worker_register_timeout_seconds": str(round(timeout_s)),
        "RAY_agent_register_timeout_ms": str(round(timeout_s * 1000)),
        # One call of Ray's that no signal reaches; it is repeated until our own deadline.
        "RAY_raylet_start_wait_time_s": str(round(min(timeout_s, DEAF_S))),
        **FAIR_SHARE,
        **NO_SPARE_WORKERS,
    }


WORKER_LOGS = "workers"
"""Folder in `logger.log_dir`."""
KEPT_WARNINGS = 20
"""Warnings of one call that are kept; more of them say nothing new."""
WARNING_LENGTH = 500


class WorkerLog(logging.Handler):
    """Records of this process: those of this package from a level on, of others from WARNING on.

    Args:
        path: the file, appended to; its folder is made. None writes none.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(logging.NOTSET)
        self.stage = ""
        self._warnings: list[str] = []
        self._file: logging.FileHandler | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
            self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(stage)s: %(message)s"))

    @classmethod
    def open(cls, path: Path | None, *, level: str = "INFO") -> WorkerLog:
        """Return the handler of everything that this process logs.

        Args:
            level: of this package's records.
        """
        handler = cls(path)
        logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
        for name in LOGGERS:
            logging.getLogger(name).setLevel(level)
        logging.captureWarnings(True)
        return handler

    def emit(self, record: logging.LogRecord) -> None:
        record.stage = self.stage or "-"
        if self._file is not None:
            self._file.handle(record)
        is_ours = record.name.partition(".")[0] in LOGGERS
        if is_ours and record.levelno >= logging.WARNING and len(self._warnings) < KEPT_WARNINGS:
            self._warnings.append(printable(record.getMessage(), limit=WARNING_LENGTH))

    def take_warnings(self) -> list[str]:
        """Since the last call."""
        taken, self._warnings = self._warnings, []
        return taken

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()
