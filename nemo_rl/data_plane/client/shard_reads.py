"""`ShardReads`: what one rank has read of its shard in this step, so that bulk crosses the wire once.

Used by `TQWorkerMixin`, and by the benchmark that times it. A rank that reads for itself gets dense columns straight
from the chunks; a leader gets ragged ones, which it sends on without their padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nemo_rl.data_plane.batch_meta import KVBatchMeta, Version
from nemo_rl.data_plane.chunks.ragged import object_rows
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.distributed.collectives import Fields
from nemo_rl.jagged import values_of

__all__ = ["ShardReads"]

Column = torch.Tensor | list[object]
Key = tuple[str, tuple[str, ...], Version, int | None]
"""Name, rows, family version and width (None: ragged) of a column."""


class ShardReads:
    """Reads of one rank through its client.

    Args:
        client: of this process.
        cache_bytes: most bytes of columns that are kept until `clear`; 0 keeps nothing.
    """

    def __init__(self, client: DataPlaneClient, *, cache_bytes: int) -> None:
        self.client, self._cache_bytes = client, cache_bytes
        self._cached: dict[Key, Column] = {}
        self._num_bytes = 0

    def ragged(self, meta: KVBatchMeta, names: Sequence[str]) -> Fields:
        """Return the columns as they are stored: per-token ones jagged, objects as lists."""
        keys = self._keys(meta, names, width=None)
        columns = self._kept(keys)
        if missing := [name for name in names if name not in columns]:
            found = self.client.get_data(meta, missing)
            for name in missing:
                column = found.get(name)
                columns[name] = column if isinstance(column, torch.Tensor) else object_rows(column)
                self._keep(keys, name, columns[name])
        return {name: columns[name] for name in names}

    def padded(
        self,
        meta: KVBatchMeta,
        names: Sequence[str],
        *,
        pad_values: Mapping[str, float],
        width: int,
        jagged: Sequence[str] = (),
    ) -> Fields:
        """Return the columns dense, per-token ones `[N, width, ...]`, but for those in `jagged`, which stay as they are
        stored; do not change them in place: they are kept."""
        dense = [name for name in names if name not in jagged]
        keys = self._keys(meta, dense, width=width) | self._keys(meta, jagged, width=None)
        columns = self._kept(keys)
        if missing := [name for name in names if name not in columns]:
            found = self.client.get_padded(meta, missing, pad_values=pad_values, pad_to=width, jagged=jagged)
            for name, column in found.items():
                columns[name] = column
                self._keep(keys, name, column)
        return {name: columns[name] for name in names}

    def clear(self) -> None:
        """Forget all columns."""
        self._cached.clear()
        self._num_bytes = 0

    def _keys(self, meta: KVBatchMeta, names: Sequence[str], *, width: int | None) -> dict[str, Key]:
        """Return the keys of columns with a version; without one nobody would notice that a column was rewritten."""
        families = {spec.name: spec.family for spec in self.client.partition_fields(meta.partition_id)}
        return {
            name: (name, meta.keys, meta.versions[families[name]], width)
            for name in names
            if families.get(name) in meta.versions
        }

    def _kept(self, keys: Mapping[str, Key]) -> Fields:
        return {name: self._cached[key] for name, key in keys.items() if key in self._cached}

    def _keep(self, keys: Mapping[str, Key], name: str, column: Column) -> None:
        size = _num_bytes(column)
        if name in keys and self._num_bytes + size <= self._cache_bytes:
            self._cached[keys[name]] = column
            self._num_bytes += size


def _num_bytes(column: Column) -> int:
    if not isinstance(column, torch.Tensor):
        return sum(len(str(row)) for row in column)
    values = values_of(column) if column.is_nested else column
    return values.numel() * values.element_size()
