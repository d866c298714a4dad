"""Passes that give the same bits in every run on one kind of GPU: `policy.deterministic`.

Called by `Passes` around each pass. Invariant: between two passes torch's flags are as they were, since they belong to
the process, which with `cluster.launcher: local` holds the engine as well. On a CPU the flags change no number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

from nemo_rl.config.policy import CUBLAS_VARIABLE, REPEATABLE_WORKSPACES
from nemo_rl.errors import ConfigError

__all__ = ["check_workspace", "deterministic_algorithms", "repeatable_cumsum"]


def check_workspace(device: torch.device) -> None:
    """Refuse a process on CUDA in which products may not repeat: cuBLAS reads the variable with the first of them."""
    found = os.environ.get(CUBLAS_VARIABLE)
    if device.type == "cuda" and found not in REPEATABLE_WORKSPACES:
        raise ConfigError(
            f"policy.deterministic: expected {CUBLAS_VARIABLE} to be {' or '.join(REPEATABLE_WORKSPACES)} in the "
            f"environment of the worker, got {found!r}; export it before the process starts"
        )


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Let torch choose deterministic algorithms inside, and raise where it has none."""
    memory: Any = deterministic
    before, fills = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that was not written, and filling it costs a kernel for each tensor.
    memory.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fills, benchmark


def repeatable_cumsum(values_MV: torch.Tensor) -> torch.Tensor:
    """Return the sums of floats along the last dim, which torch refuses on CUDA among deterministic algorithms: its
    kernel for a single row adds in an order that depends on timing (pytorch#75240), that for several rows does not."""
    if not torch.are_deterministic_algorithms_enabled():
        return values_MV.cumsum(-1)
    torch.use_deterministic_algorithms(False)
    try:
        return (values_MV.expand(2, -1) if len(values_MV) == 1 else values_MV).cumsum(-1)[: len(values_MV)]
    finally:
        torch.use_deterministic_algorithms(True)
