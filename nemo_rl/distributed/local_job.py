"""`run_job`: a function on several ranks of one job, each its own process on this machine; no Ray, no shell.

Ranks are forked off a server that has imported what they need once, and that ends with this process. Invariant: when
`run_job` returns or raises, no rank is left; ranks end by themselves when the process that asked for them dies.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from nemo_rl.distributed.collectives import RankSpec, destroy_process_group
from nemo_rl.distributed.job_store import adopt_listener
from nemo_rl.errors import NemoRLError, from_record, to_record
from nemo_rl.utils.exits import CHILD_FAILED, crash_line

__all__ = ["ChildFailed", "quiet_libraries", "run_job"]

Target = Callable[..., object]
LOOPBACK = "127.0.0.1"
IMPORTED = tuple(f"nemo_rl.models.policy.workers.{name}" for name in ("compose", "dtensor_engine", "megatron_engine"))
"""Modules that the server imports before it forks the first rank; it skips those that cannot be imported."""
GRACE_S = 2.0
"""Seconds that the other ranks have to end after one has failed: they mostly wait for it."""


class ChildFailed(NemoRLError):
    """A rank ended with an error that nobody foresaw, was killed, or did not end in time."""

    exit_code = CHILD_FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    process: BaseProcess
    answers: Connection
    alive: Connection
    """Held open as long as somebody waits for the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """The call of a rank, and the environment in which it is made."""

    target: Target
    args: Sequence[object]
    environment: dict[str, str]


def run_job(world_size: int, target: Target, *args: object, timeout_s: float, is_apart: bool = False) -> list[object]:
    """`target(spec, *args)` on every rank; results in rank order.

    A single rank runs in this process. Several are processes; rank 0 has bound the port of `spec` already, and the
    target makes the process group (`init_process_group`), which ends with the rank.

    Args:
        target: a function of a module; arguments and result can be pickled.
        timeout_s: of several ranks, from the start of the first one to the end of the last one. A single one waits for
            nobody, and has no deadline.
        is_apart: a single rank is a process, too, has the deadline, and may start processes of its own.

    Raises:
        NemoRLError: what the first failing rank raised, when it is one of ours.
        ChildFailed: any other end.
    """
    if world_size == 1 and not is_apart:
        with quiet_libraries():
            return [target(RankSpec(rank=0, world_size=1), *args)]
    deadline = time.monotonic() + timeout_s
    with socket.create_server((LOOPBACK, 0)) as listener:
        ranks = [
            _start(rank, listener, _Work(target=target, args=args, environment=dict(os.environ)), world_size, is_apart)
            for rank in range(world_size)
        ]
    try:
        return _collect(ranks, deadline)
    finally:
        for rank in ranks:
            _end(rank)


def _start(rank: int, listener: socket.socket, work: _Work, world_size: int, has_children: bool) -> _Rank:
    context = mp.get_context("forkserver")
    # Heard when the server starts, which is with the first rank of this process.
    context.set_forkserver_preload([*IMPORTED])
    answers, theirs = context.Pipe(duplex=False)
    watched, alive = context.Pipe(duplex=False)
    port = listener.getsockname()[1]
    spec = RankSpec(rank=rank, local_rank=rank, world_size=world_size, master_addr=LOOPBACK, master_port=port)
    process = context.Process(
        target=_main,
        args=(spec, listener if rank == 0 else None, theirs, watched, work),
        name=f"rank {rank}",
        daemon=not has_children,
    )
    process.start()
    for end in (theirs, watched):
        end.close()
    return _Rank(process=process, answers=answers, alive=alive)


def _collect(ranks: Sequence[_Rank], deadline: float) -> list[object]:
    results: dict[int, object] = {}
    open_ends = {rank.answers: number for number, rank in enumerate(ranks)}
    while open_ends:
        ready = wait(list(open_ends), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ChildFailed(f"ranks {sorted(open_ends.values())} did not end in time; raise the deadline")
        for end in ready:
            assert isinstance(end, Connection)
            number = open_ends.pop(end)
            results[number] = _answer_of(ranks[number], number, deadline)
    return [results[number] for number in range(len(ranks))]


def _answer_of(rank: _Rank, number: int, deadline: float) -> object:
    # A rank that is stopped amid its answer would be waited for: killed, its end of the pipe closes.
    late = threading.Timer(max(0.0, deadline - time.monotonic()), rank.process.kill)
    late.start()
    try:
        is_ok, value = rank.answers.recv()
    except (EOFError, OSError):
        rank.process.join(GRACE_S)
        if time.monotonic() >= deadline:
            raise ChildFailed(
                f"rank {number} did not end in time while it sent its result; raise the deadline"
            ) from None
        raise ChildFailed(f"rank {number} ended without a result, exit code {rank.process.exitcode}") from None
    finally:
        late.cancel()
        late.join()
    if is_ok:
        return value
    error = from_record(value)
    error.origin_rank = number
    raise error if value["kind"] != ChildFailed.__name__ else ChildFailed(f"rank {number}: {value['text']}")


def _end(rank: _Rank) -> None:
    rank.alive.close()
    rank.answers.close()
    rank.process.join(GRACE_S)
    if rank.process.is_alive():
        rank.process.kill()
        rank.process.join()


def _main(
    spec: RankSpec,
    listener: socket.socket | None,
    answers: Connection,
    watched: Connection,
    work: _Work,
) -> None:
    # The server has the environment of its own start.
    os.environ.clear()
    os.environ.update(work.environment)
    threading.Thread(target=_die_with_the_caller, args=(watched,), daemon=True).start()
    torch.set_num_threads(1)
    if listener is not None:
        adopt_listener(listener)
    try:
        with quiet_libraries():
            answers.send((True, work.target(spec, *work.args)))
    except NemoRLError as error:
        _tell(answers, to_record(error))
    except BaseException as error:  # noqa: BLE001  (the caller reports whatever it was)
        _tell(answers, {"kind": ChildFailed.__name__, "text": crash_line(error, folder=None)})
    finally:
        destroy_process_group()


def _tell(answers: Connection, failure: object) -> None:
    """Send why this rank has failed; a caller that heard another rank first no longer listens."""
    with suppress(OSError):
        answers.send((False, failure))


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Libraries warn of their own calls of one another, on every rank."""
    torch_log = logging.getLogger("torch")
    level = torch_log.level
    torch_log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch_log.setLevel(level)


def _die_with_the_caller(watched: Connection) -> None:
    """The other end closes when the caller has what it wants, or has died."""
    try:
        watched.recv()
    except (EOFError, OSError):
        # A rank that is done has a moment to leave by itself.
        time.sleep(GRACE_S)
        os._exit(1)
