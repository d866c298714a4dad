"""The memory plan follows who holds the bytes, and is silent for stores that keep nothing."""

from __future__ import annotations

from nemo_rl.config.data_plane import DataPlaneConfig, MooncakeConfig
from nemo_rl.data_plane.store_kinds import memory_plan

SECTION = MooncakeConfig(segment_bytes=1 << 30, local_buffer_bytes=64 << 20)


def test_a_holder_keeps_one_segment_and_producers_keep_one_each() -> None:
    held = memory_plan(DataPlaneConfig(impl="mooncake", mooncake=SECTION), num_processes=4)
    assert "1024 MiB of segments (one holder)" in held and held.endswith("1280 MiB in all")
    own = SECTION.model_copy(update={"segment_owner": "producer"})
    queue = DataPlaneConfig(impl="transfer_queue", backend="mooncake_cpu", mooncake=own)
    plan = memory_plan(queue, num_processes=4)
    assert "4 x 1024 MiB of segments" in plan and plan.endswith("4352 MiB in all")
    assert "1024 MiB of segments per process, up to 64 MiB of transfer buffers per process" in memory_plan(queue)


def test_other_stores_have_no_plan() -> None:
    assert memory_plan(DataPlaneConfig(impl="noop"), num_processes=2) == ""
    assert memory_plan(DataPlaneConfig(impl="transfer_queue")) == ""
