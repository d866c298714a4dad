"""Counts what the host of a GPU pays for: dispatched operations, and those that wait for the device."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchedOps", "is_in_optimizer"]

VIEWS = frozenset(
    "alias as_strided chunk detach expand lift_fresh narrow permute select slice split split_with_sizes squeeze t "  # noqa: SIM905
    "transpose unbind unfold unsqueeze view _unsafe_view _reshape_alias".split()
)
"""Operations that launch nothing."""
SYNCS = frozenset(
    ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten._unique2.default", "aten.masked_select.default")
)
"""Operations that read from the device or whose result has a size that the device knows."""


class DispatchedOps(TorchDispatchMode):
    """Counts operations by name while it is entered; those of an optimizer, one fused operation on a GPU, are not.

    Example:
        >>> with DispatchedOps() as counter:
        ...     float(torch.ones(3).sum())
        3.0
        >>> counter.total, counter.num_syncs
        (3, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        """Operation and the line of this project that asked for it -> how often."""

    @property
    def total(self) -> int:
        return sum(self.ops.values())

    @property
    def num_syncs(self) -> int:
        return sum(self.syncs.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        name = str(function)
        if not is_in_optimizer(frame):
            is_mask = name == "aten.index.Tensor" and any(
                at is not None and at.dtype == torch.bool for at in args[1] if isinstance(at, torch.Tensor)
            )
            if name in SYNCS or is_mask:
                self.syncs[f"{name} at {_own_line(frame)}"] += 1
            if name.split(".")[1].rstrip("_") not in VIEWS and not name.startswith("profiler."):
                self.ops[name] += 1
        return function(*args, **(kwargs or {}))


def is_in_optimizer(frame: FrameType | None) -> bool:
    """Return whether a call comes from an optimizer of torch."""
    while frame is not None:
        if "/torch/optim/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _own_line(frame: FrameType | None) -> str:
    while frame is not None:
        if "nemo_rl/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.rpartition('nemo_rl/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
