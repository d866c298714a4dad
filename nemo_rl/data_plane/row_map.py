"""`RowFunction`: what the driver has workers do with rows of a step without the model, and what comes back.

The driver sends the work, as it sends a loss, and `TQWorkerMixin.map_rows` runs it next to the data plane: tokens go
no further than a worker, the driver gets a few numbers per row. Invariant: of each shard one rank reads, works and
writes, the one that writes every result of the shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nemo_rl.data_plane.batch_meta import KVBatchMeta
from nemo_rl.distributed.pack_plan import PackPlan

__all__ = ["RowFunction", "RowMapOutput", "RowMapResult", "RowResults"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMapOutput:
    """The result of the work on the rows of one shard."""

    numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Numbers per row for the driver; nothing per token."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Columns for the data plane, `[N, T]`."""


class RowFunction(Protocol):
    """Sent by the driver to the workers; must be picklable."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        """Columns that it reads."""

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> RowMapOutput:
        """
        Args:
            batch: `input_fields` of the shard's rows, on the CPU, `[N, T]` with padding on the right, or `[N]`.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMapResult:
    """The result that one rank returns."""

    meta: KVBatchMeta
    """Its rows, with the columns that were written."""
    numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Empty on a rank that does not write, and for a shard without rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowResults:
    """The result of `RowFunction` over all data-parallel shards."""

    meta: KVBatchMeta
    """The meta of all rows, with the columns that were written."""
    shards: tuple[Mapping[str, torch.Tensor], ...]
    """Numbers of each shard, its rows in the order of the plan."""
    plan: PackPlan

    def by_row(self) -> dict[str, torch.Tensor]:
        """Return numbers of which every shard has one per row, `[N]` in the order of the meta."""
        rows = [row for rank in range(self.plan.num_ranks) for row in self.plan.rows_of_rank(rank)]
        index = torch.tensor(rows, dtype=torch.int64)
        parts = [numbers for numbers in self.shards if numbers]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {name: torch.empty_like(found).index_copy_(0, index, found) for name, found in joined.items()}
