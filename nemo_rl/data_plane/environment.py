"""Environment of the processes that carry payloads; launchers pass it to Ray before any actor starts.

TransferQueue reads these variables when it is imported, so `factory` sets them in this process first.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.config.data_plane import DataPlaneConfig

__all__ = ["transport_environment"]


def transport_environment(config: DataPlaneConfig) -> Mapping[str, str]:
    """Variables for every process that uses the payload store; empty for stores that need none."""
    if not config.enabled or config.impl != "transfer_queue":
        return {}
    return {
        # One thread per process: with the default of 8, reads are several times slower on few cores.
        "TQ_NUM_THREADS": "1",
        "TQ_CLIENT_ZMQ_IO_THREADS": "1",
        # Fresh tensors of many MB cost mostly page faults; huge pages halve the time of a transfer.
        "THP_MEM_ALLOC_ENABLE": "1",
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": str(config.simple.send_recv_timeout_s),
        "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "2",
        "TQ_LOGGING_LEVEL": "ERROR",
    }
