"""Environment of the processes that carry payloads; launchers pass it to Ray before any actor starts.

TransferQueue and Mooncake read these variables when they are imported, so a process that starts or joins one of them
sets them for itself first.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.store_kinds import kind_named

__all__ = ["transport_environment"]


def transport_environment(config: DataPlaneConfig) -> Mapping[str, str]:
    """Variables for every process that uses the payload store; empty for stores that need none."""
    return kind_named(config.impl).environment(config) if config.enabled and config.impl is not None else {}
