"""One meta per data-parallel rank, from a pack plan made by the driver. No I/O and no tensors."""

from __future__ import annotations

from collections import Counter

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import SchemaMismatch, name_some

__all__ = ["shard_meta_for_dp"]


def shard_meta_for_dp(meta: KVBatchMeta, plan: PackPlan) -> list[KVBatchMeta]:
    """Rank r's rows in the order in which its microbatches meet them, with its sealed part of the plan.

    Tags, lengths and versions are kept. Rows that the plan leaves out go to no rank.

    Raises:
        SchemaMismatch: the plan names a row twice, or one that the meta does not have.
    """
    rows = [plan.rows_of_rank(rank) for rank in range(plan.num_ranks)]
    counts = Counter(row for mine in rows for row in mine)
    outside = sorted(row for row in counts if not 0 <= row < meta.size)
    twice = sorted(row for row, count in counts.items() if count > 1)
    if outside or twice:
        raise SchemaMismatch(
            f"pack plan for partition {meta.partition_id!r} with {meta.size} rows: rows that do not exist: "
            f"{name_some(outside) or 'none'}; rows named more than once: {name_some(twice) or 'none'}"
        )
    return [meta.subset(mine).with_pack(view) for mine, view in zip(rows, plan.rank_plans(), strict=True)]
