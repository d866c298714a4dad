"""What a payload store pins or reserves, as text; logged by the owner and printed when a run starts.

Used by `algorithms.setup` and `stores`. The invariant: these are upper bounds, of memory that the data plane keeps.
"""

from __future__ import annotations

from nemo_rl.config.data_plane import DataPlaneConfig

__all__ = ["memory_plan"]

MIB = 1 << 20


def memory_plan(config: DataPlaneConfig, *, num_processes: int | None = None) -> str:
    """One line; empty for a store that reserves nothing.

    Args:
        num_processes: clients of the data plane in all, None where that is not known.

    Example:
        >>> memory_plan(DataPlaneConfig(impl="mooncake"), num_processes=3)
        'Mooncake memory: 512 MiB of segments (one holder), up to 3 x 256 MiB of transfer buffers, 1280 MiB in all'
    """
    under_queue = config.impl == "transfer_queue" and config.backend == "mooncake_cpu"
    if config.impl != "mooncake" and not under_queue:
        return ""
    section = config.mooncake
    segment, buffers = section.segment_bytes // MIB, section.local_buffer_bytes // MIB
    is_held = section.segment_owner == "holder"
    each = f"{buffers} MiB of transfer buffers"
    if num_processes is None:
        held = f"{segment} MiB of segments (one holder)" if is_held else f"{segment} MiB of segments per process"
        return f"Mooncake memory: {held}, up to {each} per process"
    num_segments = 1 if is_held else num_processes
    held = f"{segment} MiB of segments (one holder)" if is_held else f"{num_processes} x {segment} MiB of segments"
    total = num_segments * segment + num_processes * buffers
    return f"Mooncake memory: {held}, up to {num_processes} x {each}, {total} MiB in all"
