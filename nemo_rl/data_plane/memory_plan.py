"""What a payload store pins or reserves, as text; logged by the owner and printed when a run starts.

Used by `algorithms.setup` and `stores`. The invariant: these are upper bounds, of memory that the data plane keeps.
"""

from __future__ import annotations

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.store_kinds import kind_named

__all__ = ["memory_plan"]


def memory_plan(config: DataPlaneConfig, *, num_processes: int | None = None) -> str:
    """One line; empty for a store that reserves nothing.

    Args:
        num_processes: clients of the data plane in all, None where that is not known.

    Example:
        >>> memory_plan(DataPlaneConfig(impl="mooncake"), num_processes=3)
        'Mooncake memory: 512 MiB of segments (one holder), up to 3 x 256 MiB of transfer buffers, 1280 MiB in all'
    """
    return kind_named(config.impl or "noop").memory_plan(config, num_processes)
