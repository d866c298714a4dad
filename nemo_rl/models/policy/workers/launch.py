"""One rank of a run's policy: its process group, its worker over the data plane, the watch that ends it with others.

`start` has every rank call `build_policy_worker`. Apart from `compose`, which needs no data plane. Invariant: an error
while a rank starts ends the start on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from nemo_rl.distributed.abort import AbortWatch, StepWatch
from nemo_rl.distributed.collectives import destroy_process_group, init_process_group, job_store, meet
from nemo_rl.errors import ConfigError
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.workers.policy_worker import WorkerSpec
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.models.weight_sync.transport import device_id

__all__ = ["WorkerSpec", "build_policy_worker", "check_distinct_devices"]


def build_policy_worker(spec: WorkerSpec) -> TQWorker:
    """(collective) Start one rank. Every rank of the job must call it; an error on one ends it on all."""
    torch.set_num_threads(spec.threads)
    device = torch.device("cuda", spec.rank.local_rank) if spec.use_gpu else torch.device("cpu")
    if spec.use_gpu:
        torch.cuda.set_device(device)
    if not spec.joins_process:
        init_process_group(
            spec.rank, device=device, timeout_s=spec.collective_timeout_s, start_timeout_s=spec.start_timeout_s
        )
    watch, start = _abort_watch(spec)
    with start:
        if spec.use_gpu and not spec.joins_process:
            check_distinct_devices(device_id(device))
        worker = TQWorker(
            spec,
            RankInfo(layout=spec.layout, rank=spec.rank.rank, device=device),
            owns_group=not spec.joins_process,
            watch=watch,
        )
        meet()
    return worker


def check_distinct_devices(own: str) -> None:
    """(collective) Compare the GPUs of all ranks, which NCCL would refuse without saying whose they are.

    Raises:
        ConfigError: two ranks are on one GPU.
    """
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for rank, device in enumerate(found):
        if (first := found.index(device)) != rank:
            raise ConfigError(
                f"policy workers {first} and {rank} are both on {device}, and each needs its own GPU; set "
                "cluster.gpus_per_node to the GPUs that CUDA_VISIBLE_DEVICES shows, and look who else has set that"
            )


def _abort_watch(spec: WorkerSpec) -> tuple[StepWatch, AbstractContextManager[None]]:
    rank = spec.rank
    if spec.joins_process:
        return StepWatch(), nullcontext()
    if rank.world_size == 1:
        return StepWatch(), _group_ends_with_an_error()
    watch = AbortWatch(job_store(), rank=rank.rank, world_size=rank.world_size, timeout_s=spec.collective_timeout_s)
    return watch, watch.stage("start")


@contextmanager
def _group_ends_with_an_error() -> Iterator[None]:
    """One rank may live in the driver's process, which goes on."""
    try:
        yield
    except BaseException:
        destroy_process_group()
        raise
