"""Memory of a policy worker against its plan: an error of ours where it runs out, and gradients whole where they fit.

Called around the passes of a worker, its moves and its refits, and when it is put together. The error says what was
done, how much was planned, and what lowers it. The plan's sums are those of `nemo-rl plan`; the driver sends them where
that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import ResourceError
from nemo_rl.utils.console import bytes_text

__all__ = ["gradients_decided", "largest_microbatch", "lowering_keys", "out_of_memory_of"]

USABLE = 0.96
"""Usable share of a GPU's memory: the rest is lost between blocks of torch's allocator."""


@contextmanager
def out_of_memory_of(
    stage: str,
    device: torch.device,
    *,
    keys: Sequence[str],
    planned: Mapping[str, int],
    microbatch: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Surround what a stage does.

    Args:
        keys: what lowers the memory of the stage.
        planned: bytes by stage; empty where nothing was planned.
        microbatch: says how large the microbatches are; called after an error only.

    Raises:
        ResourceError: torch has found no memory on the device.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = " ".join(part for part in (stage, microbatch()) if part)
        raise ResourceError(
            f"{what}: the memory of {device} is used up: {_measured(device)}, {_planned(stage, planned)}. What lowers "
            f"it: {', '.join(keys)}. torch says: {' '.join(str(error).split())}"
        ) from error


def _measured(device: torch.device) -> str:
    if device.type != "cuda":
        return "nothing is measured on this device"
    counts = {
        "allocated": torch.cuda.memory_allocated(device),
        "at the peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "on the device": torch.cuda.get_device_properties(device).total_memory,
    }
    return ", ".join(f"{bytes_text(count)} {what}" for what, count in counts.items())


def _planned(stage: str, planned: Mapping[str, int]) -> str:
    if stage not in planned:
        return "`nemo-rl plan` says what the stage should need"
    return f"`nemo-rl plan` counts {bytes_text(planned[stage])}"


def largest_microbatch(batch: BatchedDataDict, plan: PackPlan) -> str:
    """Return how many tokens the largest microbatch of a call has."""
    lengths = batch.tensor("input_lengths").tolist()
    parts = [[int(lengths[row]) for row in rows] for part in plan.microbatches for rows in part if rows]
    most = max((sum(part) if plan.packed else len(part) * max(part) for part in parts), default=0)
    return f"with microbatches of up to {most:,} tokens"


def lowering_keys(policy: PolicyConfig, *, is_training: bool) -> list[str]:
    kind = "train" if is_training else "logprob"
    found = [
        f"policy.{name}.{kind}_mb_tokens ({getattr(section, f'{kind}_mb_tokens'):,})"
        for name, section in (
            ("sequence_packing", policy.sequence_packing),
            ("dynamic_batching", policy.dynamic_batching),
        )
        if section.is_on
    ]
    if not found:
        rows = (
            policy.train_micro_batch_size if is_training else policy.logprob_batch_size or policy.train_micro_batch_size
        )
        found = [f"policy.{'train_micro_batch_size' if is_training else 'logprob_batch_size'} ({rows})"]
    sizes, section = policy.parallel_sizes, policy.parallel_section
    if is_training:
        mode = (policy.megatron_cfg if policy.megatron_cfg.enabled else policy.dtensor_cfg).activation_checkpointing
        found.append(f"{section}.activation_checkpointing ({str(mode).lower()})")
        if policy.dtensor_cfg.enabled and policy.dtensor_cfg.gradient_accumulation == "whole":
            found.append(f"{section}.gradient_accumulation (whole)")
    axis = "tensor_model_parallel_size" if policy.megatron_cfg.enabled else "tensor_parallel_size"
    return [*found, f"{section}.{axis} ({sizes.tensor})"]


def gradients_decided(
    config: PolicyConfig, planned: Mapping[str, int], *, room: int, device: torch.device
) -> PolicyConfig:
    """Return the policy with `whole` or `sharded` in place of `gradient_accumulation: auto`, the same on every rank.

    Collective over all ranks where it is `auto`.

    Args:
        planned: bytes by stage with whole gradients; empty where nothing was planned.
        room: bytes of this rank's device; 0 on a CPU.
    """
    sizes = config.dtensor_cfg
    if sizes.gradient_accumulation != "auto":
        return config
    fits = bool(planned) and max(planned.values()) <= USABLE * room
    agreed = torch.tensor(int(fits), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    chosen = "whole" if agreed else "sharded"
    return config.model_copy(update={"dtensor_cfg": sizes.model_copy(update={"gradient_accumulation": chosen})})
