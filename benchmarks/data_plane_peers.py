"""The two processes of `data_plane.py`, a producer and a consumer, and every way to move a batch between them.

Both are Ray actors, so that all ways see the same processes. A method is timed inside the process that runs it: `put`
until it returns, `get` until the batch is built; then, with the clock stopped, every column is summed and compared, so
that nothing counts that did not arrive. Built means as its trainer takes it: over our clients that is what a policy
worker of ours reads, routes row after row; over a raw engine it is what the reference system makes of the same rows,
which pads the routes as well. The raw ways that end in `_ragged` leave the routes as ours do. Orders between the
processes are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import ray
import torch
from tensordict import TensorDict

from benchmarks.data_plane_batches import ROUTES, Batch, make_batch, pad_raw, padded_batch, sums
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.chunks import ragged
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.column_io import kv_first_write, write_columns
from nemo_rl.data_plane.factory import attach_data_plane
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import extra_field
from nemo_rl.data_plane.worker_mixin import ShardReads
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

__all__ = ["RAGGED", "BatchSpec", "Peer", "Timing"]

PADS = {"input_ids": 0.0}
RAGGED = "_ragged"
"""Ending of the raw ways that leave routes row after row, as ours do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """How to make the batch; both peers make the same one."""

    routes: bool
    num_rows: int
    longest: int
    is_cold: bool = False
    """Plant a fault: the processes take fresh memory for every result."""


@dataclass(kw_only=True, slots=True)
class Timing:
    """One call of one method."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part, for our own clients."""
    result: Any = None
    """What the consumer needs (a meta, a reference), or the sums that it found."""


class _Way(Protocol):
    """One way to move the batch."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """By part, since the start."""
        ...

    def put(self, batch: Batch, turn: int) -> Any: ...

    def get(self, batch: Batch, turn: int, given: Any) -> Mapping[str, torch.Tensor]: ...

    def clear(self, batch: Batch, turn: int) -> None: ...


class _Memcpy:
    """The floor: one copy between warm buffers, nothing else."""

    def __init__(self) -> None:
        self._target: list[torch.Tensor] = []
        self.seconds: Mapping[str, float] = {}

    def put(self, batch: Batch, turn: int) -> None:
        sources = [column.values() for column in batch.columns.values()]
        if not self._target:
            self._target = [torch.empty_like(source) for source in sources]
        for target, source in zip(self._target, sources, strict=True):
            target.copy_(source)

    def get(self, batch: Batch, turn: int, given: Any) -> Mapping[str, torch.Tensor]:
        return {}

    def clear(self, batch: Batch, turn: int) -> None:
        """Nothing was stored."""


class _RawWay:
    """What a raw engine lacks: columns as a trainer takes them."""

    def __init__(self, *, with_routes: bool) -> None:
        self._with_routes = with_routes
        self.seconds: Mapping[str, float] = {}

    def _padded(self, rows: TensorDict) -> Mapping[str, torch.Tensor]:
        return pad_raw(rows, with_routes=self._with_routes)


class _RawRay(_RawWay):
    """`ray.put` and `ray.get` of the TensorDict."""

    def put(self, batch: Batch, turn: int) -> Any:
        return [ray.put(batch.tensordict())]

    def get(self, batch: Batch, turn: int, given: Any) -> Mapping[str, torch.Tensor]:
        return self._padded(ray.get(given[0]))

    def clear(self, batch: Batch, turn: int) -> None:
        """The reference has gone out of scope."""


class _RawTransferQueue(_RawWay):
    """`kv_batch_put` and `kv_batch_get`, one jagged field per column, on the cluster's one TransferQueue."""

    def __init__(self, *, with_routes: bool) -> None:
        super().__init__(with_routes=with_routes)
        import transfer_queue  # noqa: PLC0415 - only where it is measured

        self._tq = transfer_queue
        self._tq.init()

    def _keys(self, batch: Batch, turn: int) -> list[str]:
        return [f"{turn}_{key}" for key in batch.keys]

    def put(self, batch: Batch, turn: int) -> None:
        self._tq.kv_batch_put(keys=self._keys(batch, turn), partition_id="raw", fields=batch.tensordict())

    def get(self, batch: Batch, turn: int, given: Any) -> Mapping[str, torch.Tensor]:
        rows = self._tq.kv_batch_get(
            keys=self._keys(batch, turn), partition_id="raw", select_fields=list(batch.columns)
        )
        return self._padded(rows)

    def clear(self, batch: Batch, turn: int) -> None:
        self._tq.kv_clear(keys=self._keys(batch, turn), partition_id="raw")


class _Ours:
    """A data plane client of a run, with what a policy worker and a rollout worker have around it."""

    def __init__(self, address: DataPlaneAddress) -> None:
        client = attach_data_plane(address)
        assert isinstance(client, LedgerClient)
        self.client = client
        self._reads = ShardReads(client, cache_bytes=address.config.worker_cache_bytes)

    @property
    def seconds(self) -> Mapping[str, float]:
        return self.client.seconds

    def put(self, batch: Batch, turn: int) -> KVBatchMeta:
        return self.client.kv_batch_put(batch.keys, "batch", batch.columns)

    def get(self, batch: Batch, turn: int, given: Any) -> Mapping[str, torch.Tensor]:
        """Read as a policy worker reads its shard, in its own step: the same keys come again in every turn."""
        self._reads.clear()
        jagged = [name for name in batch.columns if name == ROUTES]
        width = max(batch.lengths)
        found = self._reads.padded(given, list(batch.columns), pad_values=PADS, width=width, jagged=jagged)
        return {name: column for name, column in found.items() if isinstance(column, torch.Tensor)}

    def put_padded(self, padded: BatchedDataDict, keys: list[str]) -> KVBatchMeta:
        """Write as a rollout worker does: per-token columns are padded, routes are not."""
        return kv_first_write(self.client, padded, keys, partition_id="batch")

    def write_back(self, meta: KVBatchMeta, logprobs: torch.Tensor) -> None:
        """Write as a policy worker does that has scored its shard."""
        write_columns(self.client, meta, {"prev_logprobs": logprobs})

    def clear(self, batch: Batch, turn: int) -> None:
        self.client.kv_clear(None, "batch")


class Peer:
    """Producer or consumer; the same class, so that both can do everything."""

    def __init__(self, spec: BatchSpec) -> None:
        torch.set_num_threads(1)
        if spec.is_cold:
            ragged.WARM_MEMORY = ragged.WarmMemory(keep_bytes=0)
        self._batch = make_batch(routes=spec.routes, num_rows=spec.num_rows, longest=spec.longest)
        self._padded = padded_batch(self._batch)
        self._logprobs = torch.randn(spec.num_rows, max(self._batch.lengths))
        self._ways: dict[str, _Way] = {}

    def describe(self) -> dict[str, object]:
        """Bytes and sums of the batch, as the consumer must find them."""
        padded = pad_raw(self._batch.tensordict(), with_routes=False)
        return {"num_bytes": self._batch.num_bytes, "sums": sums(padded), "lengths": self._batch.lengths}

    def setup(self, name: str, address: DataPlaneAddress | None) -> None:
        """Makes a way usable; `address` for our own."""
        if address is not None:
            self._ways[name] = _Ours(address)
        elif name == "memcpy":
            self._ways[name] = _Memcpy()
        else:
            kind = _RawRay if name.startswith("raw_ray") else _RawTransferQueue
            self._ways[name] = kind(with_routes=not name.endswith(RAGGED))

    def put(self, name: str, turn: int) -> Timing:
        return self._time(name, lambda way: way.put(self._batch, turn))

    def get(self, name: str, turn: int, given: Any) -> Timing:
        timing = self._time(name, lambda way: way.get(self._batch, turn, given))
        timing.result = sums(timing.result)
        return timing

    def put_padded(self, name: str) -> Timing:
        """Time the first write of a rollout worker."""
        way = self._ours(name)
        return self._time(name, lambda _: way.put_padded(self._padded, self._batch.keys))

    def read_and_write_back(self, name: str, turn: int, meta: KVBatchMeta) -> Timing:
        """Time what a policy worker does around a pass: its shard in, log-probabilities out."""
        way = self._ours(name)

        def run(_: _Way) -> Mapping[str, torch.Tensor]:
            found = way.get(self._batch, turn, meta)
            way.write_back(meta, self._logprobs)
            return found

        timing = self._time(name, run)
        timing.result = sums(timing.result)
        return timing

    def clear(self, name: str, turn: int) -> None:
        self._ways[name].clear(self._batch, turn)

    def _time(self, name: str, action: Any) -> Timing:
        way = self._ways[name]
        before = dict(way.seconds)
        started = time.perf_counter()
        result = action(way)
        seconds = time.perf_counter() - started
        after = way.seconds
        parts = {part: value - before.get(part, 0.0) for part, value in after.items() if value != before.get(part)}
        return Timing(seconds=seconds, parts=parts, result=result)

    # ---- single questions, asked of our own clients

    def read_shards(self, name: str, meta: KVBatchMeta, shards: list[list[int]]) -> dict[str, float]:
        """Every data-parallel rank's shard, one read each: seconds, bytes asked for, bytes moved too much."""
        client = self._ours(name).client
        before, started = client.counters, time.perf_counter()
        for shard in shards:
            client.get_padded(meta.subset(shard), list(self._batch.columns), pad_values=PADS)
        seconds, after = time.perf_counter() - started, client.counters
        moved = after["get_bytes"] - before["get_bytes"]
        asked = moved - (after["over_read_bytes"] - before["over_read_bytes"])
        return {"seconds": seconds, "moved_bytes": moved, "asked_bytes": asked}

    def time_fields(self, name: str, num_fields: int, num_rows: int, row_bytes: int, turn: int) -> float:
        """Seconds of put and get of `num_fields` columns of `row_bytes` in all."""
        client = self._ours(name).client
        width = row_bytes // 4 // num_fields
        specs = [extra_field(f"f{i}", dtypes=["float32"], dims=(width,)) for i in range(num_fields)]
        partition = f"fields{num_fields}-{turn}"
        client.register_partition(partition, specs, num_rows, [])
        columns = {spec.name: torch.rand(num_rows, width) for spec in specs}
        keys = [f"k{i}" for i in range(num_rows)]
        started = time.perf_counter()
        client.kv_batch_put(keys, partition, columns)
        rows = client.kv_batch_get(keys, partition, list(columns))
        seconds = time.perf_counter() - started
        total = sum(float(rows[field_name].sum()) for field_name in columns)
        assert np.isclose(total, sum(float(column.sum()) for column in columns.values()), rtol=1e-3)
        client.kv_clear(None, partition)
        return seconds

    def time_tags(self, name: str, num_keys: int, turn: int) -> float:
        """Seconds of a put that brings tags only, to rows that exist."""
        client = self._ours(name).client
        partition = f"tags{num_keys}-{turn}"
        client.register_partition(partition, ["sample_mask"], num_keys, [])
        keys = [f"u{i // 8}_g{i % 8}" for i in range(num_keys)]
        client.kv_batch_put(keys, partition, {"sample_mask": torch.ones(num_keys)})
        tags = [{"std": 0.5, "reward": float(i)} for i in range(num_keys)]
        started = time.perf_counter()
        client.kv_batch_put(keys, partition, {}, tags)
        seconds = time.perf_counter() - started
        client.kv_clear(None, partition)
        return seconds

    def with_settings(self, name: str, new_name: str, config: DataPlaneConfig) -> None:
        """Open a client of the same run with other settings."""
        self._ways[new_name] = _Ours(replace(self._ours(name).client.address, config=config))

    def _ours(self, name: str) -> _Ours:
        way = self._ways[name]
        assert isinstance(way, _Ours), f"{name} is not one of ours"
        return way
