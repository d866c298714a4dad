"""Environment of the processes that carry payloads; launchers pass it to Ray before any actor starts.

TransferQueue and Mooncake read these variables when they are imported, so `factory` sets them in this process first.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.config.data_plane import DataPlaneConfig

__all__ = ["transport_environment"]

MOONCAKE_WAIT_S = 5.0
"""Longest wait of Mooncake for one answer, in seconds."""


def transport_environment(config: DataPlaneConfig) -> Mapping[str, str]:
    """Variables for every process that uses the payload store; empty for stores that need none."""
    if not config.enabled or config.impl in (None, "noop"):
        return {}
    # Fresh memory of many MB costs mostly page faults; huge pages halve the time of a transfer.
    environment = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    if config.impl == "ray":
        # Ray gives freed objects back once a second; sooner, the next put finds memory that is warm.
        environment["RAY_free_objects_period_milliseconds"] = "20"
    if config.impl == "transfer_queue":
        environment |= _transfer_queue(config)
    if config.impl == "mooncake" or (config.impl == "transfer_queue" and config.backend == "mooncake_cpu"):
        environment |= _mooncake(config)
    return environment


def _transfer_queue(config: DataPlaneConfig) -> Mapping[str, str]:
    return {
        # One thread per process: with the default of 8, reads are several times slower on few cores.
        "TQ_NUM_THREADS": "1",
        "TQ_CLIENT_ZMQ_IO_THREADS": "1",
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": str(config.simple.send_recv_timeout_s),
        "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "2",
        "TQ_LOGGING_LEVEL": "ERROR",
    }


def _mooncake(config: DataPlaneConfig) -> Mapping[str, str]:
    """Mooncake's own waits end before ours do, so that its errors are seen and its calls are not left behind."""
    wait_s = min(max(config.timeout_s / 4, 1.0), MOONCAKE_WAIT_S)
    wait_ms = str(round(wait_s * 1000))
    return {
        "MC_LOG_LEVEL": "ERROR",
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "MC_RPC_CONNECT_TIMEOUT_MS": wait_ms,
        "MC_RPC_TIMEOUT_MS": wait_ms,
        "MC_TCP_ADMISSION_TIMEOUT_MS": wait_ms,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(round(wait_s)),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(round(wait_s)),
    }
