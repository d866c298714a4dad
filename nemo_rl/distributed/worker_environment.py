"""Variables of every process of a run; imports neither torch nor Ray."""

from __future__ import annotations

__all__ = ["worker_environment"]


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
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
