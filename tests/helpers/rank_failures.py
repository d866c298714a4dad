"""Planted failures in a job of three ranks, for the tests of the abort: what each rank sees of them, and how fast."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl.distributed import job_store as job_store_module
from nemo_rl.distributed.abort import AbortWatch
from nemo_rl.distributed.collectives import (
    RankSpec,
    broadcast_from_leader,
    destroy_process_group,
    init_process_group,
    job_store,
)
from nemo_rl.distributed.job_store import adopt_listener
from nemo_rl.errors import KeysNotFound, NonFiniteError, WorkerError

CPU = torch.device("cpu")
STUCK_S = 60.0
LISTENER = "NEMO_RL_TEST_LISTENER"
"""Variable with the descriptor of the socket that rank 0 inherits for the job's store."""
GROUPS: dict[str, dist.ProcessGroup] = {}
"""Groups of the current job: `outer` joins ranks 0 and 1, `inner` 0 and 2. Made before the stage, as workers do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFailure:
    """The end of a stage on one rank after a failure."""

    kind: str
    text: str
    seconds: float
    """Time from the failure's planned moment."""
    rank: int | None
    stage: str | None


def join(rank: int, world_size: int, port: int) -> AbortWatch:
    spec = RankSpec(rank=rank, world_size=world_size, master_port=port)
    init_process_group(spec, device=CPU, timeout_s=STUCK_S)
    return AbortWatch(job_store(), rank=rank, world_size=world_size, timeout_s=STUCK_S)


def leave(watch: AbortWatch) -> None:
    watch.close()
    destroy_process_group()


def all_reduce(group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(4), group=group)


# Each case is run by every rank inside a stage; rank 1 fails.


def before_a_collective(rank: int) -> None:
    if rank == 1:
        raise ValueError("planted before a collective")
    all_reduce()


def a_peer_waits_for_a_third(rank: int) -> None:
    """Rank 2 waits for rank 0, which waits for rank 1."""
    if rank == 1:
        raise ValueError("planted behind another rank")
    if rank == 0:
        all_reduce(GROUPS["outer"])
    all_reduce(GROUPS["inner"])


def peers_compute_meanwhile(rank: int) -> None:
    if rank == 1:
        raise ValueError("planted while peers compute")
    time.sleep(1.0)
    all_reduce()


def a_peer_needs_nobody(rank: int) -> None:
    """Rank 2 has no collective left: its stage ends with the cause all the same."""
    if rank == 1:
        raise ValueError("planted besides an independent peer")
    if rank == 2:
        time.sleep(2.0)
    else:
        all_reduce()


def user_error(rank: int) -> None:
    if rank == 1:
        raise NonFiniteError("loss is NaN in rows k1, k2")
    all_reduce()


def leader_of_a_broadcast(rank: int) -> None:
    def fetch() -> dict[str, torch.Tensor | list[object]]:
        raise KeysNotFound("partition 'train': keys a, b")

    broadcast_from_leader(fetch, group=dist.group.WORLD, leader=1)


CASES: dict[str, Callable[[int], None]] = {
    case.__name__: case
    for case in (
        before_a_collective,
        a_peer_waits_for_a_third,
        peers_compute_meanwhile,
        a_peer_needs_nobody,
        user_error,
        leader_of_a_broadcast,
    )
}


def run_case(watch: AbortWatch, case: Callable[[int], None]) -> StageFailure:
    """Run a case inside a stage, on all ranks at the same time."""
    dist.barrier()
    started = time.monotonic()
    try:
        with watch.stage("train"):
            case(watch.rank)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        seconds = time.monotonic() - started
        is_worker_error = isinstance(error, WorkerError)
        return StageFailure(
            kind=type(error).__name__,
            text=str(error),
            seconds=seconds,
            rank=error.rank if is_worker_error else None,
            stage=error.stage if is_worker_error else None,
        )
    raise AssertionError(f"rank {watch.rank}: the stage went on")


def run_every_case(rank: int, fully_connected: int, ports: list[int]) -> dict[str, StageFailure]:
    """Run one fresh job per case, in the same three processes."""
    job_store_module.FULLY_CONNECTED = fully_connected
    destroy_process_group()
    seen: dict[str, StageFailure] = {}
    for port, (name, case) in zip(ports, CASES.items(), strict=True):
        watch = join(rank, 3, port)
        GROUPS.update(outer=dist.new_group([0, 1]), inner=dist.new_group([0, 2]))
        seen[name] = run_case(watch, case)
        leave(watch)
    return seen


# Failures that end processes: each rank is a process of `tests/helpers/rank_failures.py`, which writes what it saw.


def killed(rank: int, victim: int) -> None:
    # Both are in the stage.
    all_reduce()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce()


def deaf(rank: int) -> None:
    """Rank 1 is not in a collective, and not in Python either."""
    if rank == 0:
        raise ValueError("planted besides a deaf peer")
    time.sleep(STUCK_S)


DEADLY: dict[str, Callable[[int], None]] = {
    "kill_1": lambda rank: killed(rank, 1),
    "kill_0": lambda rank: killed(rank, 0),
    "deaf": deaf,
    "raise": before_a_collective,
}


def main(name: str, folder: Path) -> None:
    """Run one rank under `torchrun`, or with its variables set."""
    if os.environ.get(LISTENER):
        adopt_listener(socket.socket(fileno=int(os.environ[LISTENER])))
    spec = RankSpec.of_torchrun(os.environ)
    init_process_group(spec, device=CPU, timeout_s=STUCK_S)
    watch = AbortWatch(job_store(), rank=spec.rank, world_size=spec.world_size, timeout_s=STUCK_S)
    (folder / f"{spec.rank}.pid").write_text(str(os.getpid()))
    seen = run_case(watch, DEADLY[name])
    target = folder / f"{spec.rank}.json"
    target.with_suffix(".tmp").write_text(json.dumps(asdict(seen)))
    target.with_suffix(".tmp").rename(target)
    leave(watch)
    # The launcher ends the others when the first one fails: they may finish their files.
    deadline = time.monotonic() + 5.0
    while len(list(folder.glob("*.json"))) < spec.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
