"""One rank of a run's policy: its process group, its worker over the data plane, the watch that ends it with others.

`setup` has every rank call `build_policy_worker`. Apart from `compose`, which needs no data plane. Invariant: an error
while a rank starts ends the start on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.config.generation import DeviceSharing
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.worker_mixin import ReplicaMember
from nemo_rl.distributed.abort import AbortWatch, NoWatch, StepWatch
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, init_process_group, job_store
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.errors import ConfigError
from nemo_rl.models.policy.recording import RecordSpec
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.policy.workers.compose import compose_parts
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.models.weight_sync.transport import device_id

__all__ = ["WorkerSpec", "build_policy_worker", "check_distinct_devices"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Everything one rank needs to start."""

    policy: PolicyConfig
    rank: RankSpec
    num_steps: int
    """GRPO steps of the run, for the learning-rate schedule."""
    keep_reference: bool
    """Keep a copy of the first weights for the KL penalty."""
    seed: int
    use_gpu: bool = False
    threads: int = 1
    collective_timeout_s: float = 120.0
    record: RecordSpec | None = None
    """Records that the passes write, in steps that the driver names; None for none."""
    trace: TraceSpec | None = None
    """Hub to which passes show what is watched; None: none."""
    start_timeout_s: float = START_TIMEOUT_S
    """Seconds that the ranks wait for one another before the first collective."""
    sharing: DeviceSharing = "crowded"
    """The other users of the worker's device."""
    planned: dict[str, int] = field(default_factory=dict)
    """Bytes on the device by stage, as `nemo-rl plan` counts them; empty on CPUs, and where it is not installed."""
    joins_process: bool = False
    """True for a second model in the process of another worker, which has made the process group of one rank."""

    @property
    def layout(self) -> ParallelLayout:
        """Return the layout: which part each rank holds."""
        return ParallelLayout.of_policy(self.policy, world_size=self.rank.world_size)


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
        parts = compose_parts(
            spec.policy,
            RankInfo(layout=spec.layout, rank=spec.rank.rank, device=device),
            num_steps=spec.num_steps,
            collective_timeout_s=spec.collective_timeout_s,
            seed=spec.seed,
            keep_reference=spec.keep_reference,
            owns_group=not spec.joins_process,
            record=spec.record,
            trace=spec.trace,
            sharing=spec.sharing,
            planned=spec.planned,
        )
        worker = TQWorker(parts, replica=ReplicaMember.build(spec.layout, rank=spec.rank.rank), watch=watch)
        dist.barrier()
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
                f"policy workers {first} and {rank} are both on {device}, and each needs a GPU of its own; set "
                "cluster.gpus_per_node to the GPUs that CUDA_VISIBLE_DEVICES shows, and look who else has set that"
            )


def _abort_watch(spec: WorkerSpec) -> tuple[StepWatch, AbstractContextManager[None]]:
    """Keep the watch, and what is around the start of the worker."""
    rank = spec.rank
    if spec.joins_process:
        return NoWatch(), nullcontext()
    if rank.world_size == 1:
        return NoWatch(), _group_ends_with_an_error()
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
