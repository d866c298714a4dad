"""Policy workers without a data plane.

`compose_worker` makes a worker without a data plane, also where none is installed, `worker_of_job` that of a rank of a
job on this machine; `launch` makes those of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.config.generation import DeviceSharing
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, init_process_group
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.models.policy.observer import HookObserver
from nemo_rl.models.policy.recording import RecordSpec
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker, WorkerSpec

__all__ = ["compose_worker", "ensure_process_group", "worker_of_job"]


@contextmanager
def worker_of_job(
    spec: RankSpec, config: PolicyConfig, *, uses_gpu: bool, num_threads: int, timeout_s: float, **parts: Any
) -> Iterator[PolicyWorker]:
    """(collective) Make the worker of one rank of `run_job`, which is shut down at the end of the block.

    Args:
        uses_gpu: the rank takes the GPU of its number.
        num_threads: of torch, within the block.
        timeout_s: deadline of each collective.
        parts: what else `compose_worker` takes.
    """
    device = torch.device("cuda", spec.local_rank) if uses_gpu else torch.device("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        if uses_gpu:
            torch.cuda.set_device(device)
        if spec.world_size > 1:
            init_process_group(spec, device=device, timeout_s=timeout_s)
        worker = compose_worker(
            config,
            rank=spec.rank,
            world_size=spec.world_size,
            device=str(device),
            collective_timeout_s=timeout_s,
            sharing="alone",
            **parts,
        )
        try:
            yield worker
        finally:
            worker.shutdown()
    finally:
        torch.set_num_threads(before)


def compose_worker(
    config: PolicyConfig,
    *,
    rank: int,
    world_size: int,
    num_steps: int,
    collective_timeout_s: float,
    seed: int,
    keep_reference: bool = False,
    device: str | None = None,
    layout: ParallelLayout | None = None,
    record: RecordSpec | None = None,
    trace: TraceSpec | None = None,
    hook_observers: Sequence[HookObserver] = (),
    sharing: DeviceSharing = "crowded",
) -> PolicyWorker:
    """(collective) Make one rank of the policy, without a data plane; a single rank makes its own process group.

    Args:
        num_steps: training calls of the whole run, for the learning-rate schedule.
        collective_timeout_s: deadline of a collective in a process group made here; the caller's keeps its own.
        keep_reference: keep the initial weights on the CPU, for `use_reference_model`.
        device: None takes the current CUDA device where there is one.
        layout: of the ranks; None takes what the config says of so many.
        record: what the passes of the worker write; None: nothing.
        trace: the hub to which they show what is watched; None: none.
        hook_observers: who else sees the sites of its passes.
        sharing: the other users of the device.

    Raises:
        ModelFolderError: model or tokenizer folder is missing or incomplete.
        ConfigError: the model cannot run in this layout.
    """
    chosen = pick_device(device)
    owns_group = ensure_process_group(rank, world_size, collective_timeout_s, chosen)
    with ExitStack() as undo:
        if owns_group:
            # The next worker of this process makes its own.
            undo.callback(destroy_process_group)
        spec = WorkerSpec(
            policy=config,
            rank=RankSpec(rank=rank, world_size=world_size),
            num_steps=num_steps,
            collective_timeout_s=collective_timeout_s,
            seed=seed,
            keep_reference=keep_reference,
            record=record,
            trace=trace,
            sharing=sharing,
        )
        here = RankInfo(layout=layout or spec.layout, rank=rank, device=chosen)
        worker = PolicyWorker(spec, here, owns_group=owns_group, hook_observers=hook_observers)
        undo.pop_all()
    return worker


def ensure_process_group(rank: int, world_size: int, timeout_s: float, device: torch.device) -> bool:
    """Make a one-rank group where none exists; True if it did.

    Raises:
        ValueError: the group that exists says otherwise.
        RuntimeError: several ranks and no group.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(
                f"expected rank {rank} of {world_size} as in the process group, which says "
                f"{dist.get_rank()} of {dist.get_world_size()}"
            )
        return False
    if world_size != 1:
        raise RuntimeError(f"rank {rank} of {world_size}: initialise the default process group before the worker")
    init_process_group(RankSpec(rank=0, world_size=1), device=device, timeout_s=timeout_s)
    return True


def pick_device(name: str | None) -> torch.device:
    """Return the device by name; None takes the current CUDA device where there is one."""
    if name is not None:
        return torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
