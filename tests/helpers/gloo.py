"""Runs a function on several ranks, each its own process, with a deadline: gloo, or NCCL with a GPU each.

Ranks on the CPU are forked off a server that has imported torch and transformers, which would cost each of them
seconds; a process that has a GPU starts anew.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import BaseContext
from queue import Empty

import torch
import torch.distributed as dist

from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, init_process_group
from nemo_rl.distributed.job_store import adopt_listener

JOB_S = 900.0
"""Longest job with many cases on a machine that does much else; it takes half a minute to three on an idle one."""
COLLECTIVE_TIMEOUT_S = 180.0
IMPORTED = ("tests.helpers.rank_preload",)
"""Modules that the server imports before ranks are forked off it."""
SLACK = 3
"""Deadlines are those of a machine that does little else."""


def run_ranks(
    world_size: int,
    target: Callable[..., object],
    *args: object,
    timeout_s: float = 120.0,
    gpu_per_rank: bool = False,
    further_jobs: int = 0,
) -> list[object]:
    """Run `target(rank, *args)` on every rank of a fresh gloo job; return the results in rank order.

    `target` must be a module-level function. A rank that raises fails the caller with its traceback. With
    `gpu_per_rank` rank r has GPU r and the job NCCL besides gloo. With `further_jobs` it gets as many ports as its last
    argument, one for each job that the same ranks make later; rank 0 has bound them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Where there is a GPU the server of forks has asked for it when it imported, and none of its forks may use it.
    context = mp.get_context("spawn") if gpu_per_rank or torch.cuda.is_available() else _forking()
    queue = context.Queue()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + further_jobs)]
    port, *later = [listener.getsockname()[1] for listener in listeners]
    arguments = (*args, later) if further_jobs else args
    processes = [
        context.Process(
            target=_main,
            args=(
                *(rank, world_size, port, queue, target, arguments, gpu_per_rank, listeners if rank == 0 else []),
                dict(os.environ),
            ),
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for listener in listeners:
        listener.close()
    try:
        return _collect(queue, processes, SLACK * timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _forking() -> BaseContext:
    context = mp.get_context("forkserver")
    # Heard when the server starts, which is with the first job.
    context.set_forkserver_preload([*IMPORTED])
    return context


def _collect(queue: mp.Queue, processes: list[mp.Process], timeout_s: float) -> list[object]:
    results: dict[int, object] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(processes):
        missing = sorted(set(range(len(processes))) - set(results))
        # A rank that has ended says nothing any more, but what it said last may still be on its way.
        have_ended = all(processes[rank].exitcode is not None for rank in missing)
        try:
            rank, ok, value = queue.get(timeout=1.0)
        except Empty:
            if have_ended:
                codes = {rank: processes[rank].exitcode for rank in missing}
                raise AssertionError(f"ranks ended without a result (rank: exit code): {codes}") from None
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks {missing} did not finish in {timeout_s:.0f} s") from None
            continue
        if not ok:
            raise AssertionError(f"rank {rank} failed:\n{value}")
        results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _main(
    rank: int,
    world_size: int,
    port: int,
    queue: mp.Queue,
    target: Callable[..., object],
    args: tuple,
    gpu_per_rank: bool,
    listeners: list[socket.socket],
    environment: dict[str, str],
) -> None:
    # The server has that of its own start.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    for listener in listeners:
        adopt_listener(listener)
    try:
        spec = RankSpec(rank=rank, world_size=world_size, master_port=port)
        device = torch.device("cuda", rank) if gpu_per_rank else torch.device("cpu")
        if gpu_per_rank:
            torch.cuda.set_device(device)
        init_process_group(spec, device=device, timeout_s=COLLECTIVE_TIMEOUT_S)
        # Some jobs leave this group at once, which would end the start of a rank that still connects.
        dist.barrier()
        value = target(rank, *args)
        if dist.is_initialized():
            dist.barrier()
        queue.put((rank, True, value))
    except BaseException:  # noqa: BLE001 - the parent reports whatever it was
        queue.put((rank, False, traceback.format_exc()))
    finally:
        destroy_process_group()
