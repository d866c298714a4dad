"""Two gloo ranks and a data plane between them, for real: what a run does first, within seconds."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_rl.cluster.doctor.checks import DoctorFinding, green, red
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client
from nemo_rl.distributed.collectives import RankSpec, init_process_group
from nemo_rl.distributed.local_job import run_job
from nemo_rl.errors import NemoRLError

__all__ = ["look_at_self_test"]

RANKS, ROWS = 2, 64
PARTITION, FIELD = "train", "advantages"
STORE = DataPlaneConfig(impl="shm")
TIMEOUT_S = 60.0
"""Three times what it takes on two busy cores."""


def look_at_self_test(config: DataPlaneConfig = STORE) -> Iterator[DoctorFinding]:
    """Let ranks put, meet and read: each reads what the other one has written."""
    started = time.monotonic()
    name = "self-test"
    try:
        client = build_data_plane_client(config, run_id=f"doctor_{uuid.uuid4().hex[:8]}")
        try:
            client.register_partition(PARTITION, ["input_lengths", FIELD], RANKS * ROWS, ["train"])
            sums = run_job(RANKS, _rank, client.address, timeout_s=TIMEOUT_S)
        finally:
            client.close()
    except (NemoRLError, OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        yield red(name, first, "the lines above may say why; else run it again with one other program less")
        return
    if sums != [_expected(rank) for rank in range(RANKS)]:
        yield red(name, f"ranks read other numbers than were written: {sums}", "look for defective memory or storage")
        return
    yield green(name, f"2 gloo ranks and a data plane in shared memory, {time.monotonic() - started:.0f} s")


def _rank(spec: RankSpec, address: DataPlaneAddress) -> float:
    torch.set_num_threads(1)
    init_process_group(spec, device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    client = attach_data_plane(address)
    try:
        columns = {
            "input_lengths": torch.ones(ROWS, dtype=torch.int32),
            FIELD: torch.full((ROWS,), float(spec.rank + 1)),
        }
        client.kv_batch_put(_keys(spec.rank), PARTITION, columns)
        everybody = torch.ones(1)
        dist.all_reduce(everybody)
        other = client.kv_batch_get(_keys(1 - spec.rank), PARTITION, [FIELD])
        dist.monitored_barrier(timeout=timedelta(seconds=TIMEOUT_S))
        return float(other[FIELD].sum() * everybody)
    finally:
        client.close()


def _keys(rank: int) -> list[str]:
    return [f"{rank}_{row}_g0" for row in range(ROWS)]


def _expected(rank: int) -> float:
    """Return the sum that a rank expects: the value of the other rank, times the number of ranks."""
    return float(ROWS * (2 - rank) * RANKS)
