"""Variables of every process of a run; imports neither torch nor Ray."""

from __future__ import annotations

__all__ = ["worker_environment"]


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
