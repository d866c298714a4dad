"""`QueueRows`: columns as TransferQueue's own fields, under the rows' keys, for every TransferQueue client.

The rows of partition `train` of a run are in TransferQueue's partition `keys.queue_partition(run, "train")`. Which
value is read and which row lives is the ledger's decision; this file keeps TransferQueue's silent faults out: reads
that come short, fields of another dtype, rows of length 0 and one-dimensional fields over Mooncake, clears that leave
objects behind. It uses the client of a session; nothing here imports the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from nemo_rl.data_plane.adapters.transfer_queue_session import QueueSession
from nemo_rl.data_plane.chunks.columns import FlatColumn, dtype_name
from nemo_rl.data_plane.chunks.tags import Tags
from nemo_rl.data_plane.interfaces import ColumnStore
from nemo_rl.data_plane.keys import queue_partition
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import CapacityExceeded, DataPlaneClosed, DataPlaneError, KeysNotFound, SchemaMismatch, name_some
from nemo_rl.jagged import lengths_of, nest, values_of

__all__ = ["QueueRows", "remove_partition"]

_T = TypeVar("_T")

TRY_AGAIN_S = 0.1
CLEAR_BATCH = 4096
"""Keys per clear: the controller answers all clients from one thread."""


class QueueRows(ColumnStore):
    """Columns of one run."""

    def __init__(self, session: QueueSession, *, run_id: str) -> None:
        self._session, self._run_id = session, run_id
        self._is_on_mooncake = session.mooncake is not None
        self.is_closed = False

    @property
    def others(self) -> str:
        return "a TransferQueue client"

    def takes(self, column: FlatColumn) -> bool:
        if column.values is None or not self._is_on_mooncake:
            return True
        return bool(prod(column.trailing)) and bool(column.lengths is None or len(column.lengths))

    def put(
        self,
        partition_id: str,
        keys: Sequence[str],
        columns: Mapping[str, FlatColumn],
        tags: Sequence[Tags] | None,
        *,
        timeout_s: float,
    ) -> None:
        partition, deadline = queue_partition(self._run_id, partition_id), time.monotonic() + timeout_s
        fields = {name: _as_field(column, fills_empty=self._is_on_mooncake) for name, column in columns.items()}
        rows = TensorDict(fields, batch_size=[len(keys)])
        while True:
            try:
                meta = self._run("put", lambda: self._send(partition, list(keys), rows, tags), deadline)
                break
            except CapacityExceeded:
                if time.monotonic() + TRY_AGAIN_S > deadline:
                    raise
                time.sleep(TRY_AGAIN_S)
        self._check_accepted(partition_id, meta, keys, columns)

    async def _send(self, partition: str, keys: list[str], rows: TensorDict, tags: Sequence[Tags] | None) -> Any:
        """Send data, then tags; return the controller's own record of the rows."""
        client, has_fields = self._session.client, bool(list(rows.keys()))
        meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=has_fields)
        if has_fields:
            # The client's own put would also write back the tags that it has read here, over newer ones.
            await client.storage_manager.put_data(rows, meta)
            meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
        if tags is not None and meta.size == len(keys):
            meta.update_custom_meta([dict(row) for row in tags])
            await client.async_set_custom_meta(meta)
        return meta

    def _check_accepted(
        self, partition_id: str, meta: Any, keys: Sequence[str], columns: Mapping[str, FlatColumn]
    ) -> None:
        """A put reports success even when the controller refused it; its own record of the rows says so."""
        missing = [name for name in columns if name not in meta.field_names]
        if columns and (meta.size != len(keys) or missing):
            raise DataPlaneError(
                f"TransferQueue's controller did not accept a put of {len(keys)} rows: {meta.size} known"
            )
        for name, column in columns.items():
            held = meta.field_schema[name]["dtype"]
            if column.values is not None and held != column.values.dtype:
                raise SchemaMismatch(
                    f"partition {partition_id!r}: field {name!r}: {self.others} has written rows of {held}, and "
                    f"TransferQueue keeps one dtype per field; expected {column.dtype}; make it write that"
                )

    def get(
        self,
        partition_id: str,
        keys: Sequence[str],
        specs: Sequence[FieldSpec],
        *,
        sizes: Mapping[str, Sequence[int]] | None,
        timeout_s: float,
    ) -> dict[str, torch.Tensor | list[object]]:
        partition, names = queue_partition(self._run_id, partition_id), [spec.name for spec in specs]
        deadline = time.monotonic() + timeout_s
        rows = self._run("get", lambda: self._fetch(partition, list(keys), names, sizes is None), deadline)
        return {
            spec.name: _as_column(rows[spec.name], spec, len(keys), None if sizes is None else sizes[spec.name])
            for spec in specs
        }

    async def _fetch(self, partition: str, keys: list[str], names: list[str], is_foreign: bool) -> TensorDict:
        """TransferQueue leaves out unknown keys, and fields that are not ready on every key, without an error."""
        client = self._session.client
        meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
        if meta.size != len(keys):
            raise KeysNotFound(f"{len(keys) - meta.size} of {len(keys)} rows are gone, of {name_some(keys)}")
        meta = meta.select_fields(names)
        missing = [name for name in names if name not in meta.field_names]
        if missing or not meta.is_ready:
            raise KeysNotFound(f"fields {name_some(missing)} are not there for every one of {name_some(keys)}")
        if self._is_on_mooncake and is_foreign:
            await asyncio.get_running_loop().run_in_executor(None, self._check_objects, meta)
        rows: TensorDict = await client.async_get_data(meta)
        if rows.batch_size[0] != len(keys):
            raise KeysNotFound(f"{len(keys) - rows.batch_size[0]} of {len(keys)} rows were not read back")
        return rows

    def _check_objects(self, meta: Any) -> None:
        """A row of a smaller dtype than the field's would be read with the bytes behind it."""
        native = self._session.client.storage_manager.storage_client._store
        for name in meta.field_names:
            dtype = meta.field_schema[name]["dtype"]
            if dtype is None:
                continue
            for index, shape in zip(meta.global_indexes, meta.get_shapes(name), strict=True):
                expected, found = dtype.itemsize * prod(shape), native.get_size(f"{index}@{name}")
                if found >= 0 and found != expected:
                    raise SchemaMismatch(
                        f"field {name!r}: {self.others} has written rows of several dtypes: a row has {found} bytes "
                        f"where {dtype_name(dtype)} takes {expected}"
                    )

    def written(
        self, partition_id: str, lacking: Mapping[str, Collection[str]], *, timeout_s: float
    ) -> dict[str, list[str]]:
        partition, client = queue_partition(self._run_id, partition_id), self._session.client

        async def ask() -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for name, keys in lacking.items():  # one by one: of several, TransferQueue does not keep the order
                indexes, status = await client.async_get_production_status([name], partition)
                if indexes is None or not status.any():
                    continue
                there = indexes[status[:, 0] == 1].tolist()
                known = set(await client.async_kv_retrieve_keys(there, partition))
                found[name] = [key for key in keys if key in known]
            return {name: keys for name, keys in found.items() if keys}

        return self._run("look-up of fields", ask, time.monotonic() + timeout_s)

    def keys(self, partition_id: str, *, timeout_s: float) -> list[str]:
        partition, client = queue_partition(self._run_id, partition_id), self._session.client
        listed = self._run("list of keys", lambda: client.async_kv_list(partition), time.monotonic() + timeout_s)
        return list(listed.get(partition, ()))

    def drop(self, partition_id: str, keys: Sequence[str], *, timeout_s: float) -> None:
        partition, deadline = queue_partition(self._run_id, partition_id), time.monotonic() + timeout_s
        for start in range(0, len(keys), CLEAR_BATCH):
            part = list(keys[start : start + CLEAR_BATCH])
            self._run("clear", lambda part=part: self._clear(partition, part), deadline)  # type: ignore[misc]

    async def _clear(self, partition: str, keys: list[str]) -> None:
        client = self._session.client
        meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
        await clear_rows(client, meta, partition)

    def _run(self, what: str, start: Callable[[], Coroutine[Any, Any, _T]], deadline: float) -> _T:
        if self.is_closed and not self._session.ended:
            raise DataPlaneClosed("TransferQueue cannot be used: this client is closed")
        return self._session.run(what, start, deadline)


async def clear_rows(client: Any, meta: Any, partition: str) -> None:
    """Free the rows of a meta with all of their fields.

    Over Mooncake TransferQueue's own clear frees only the fields that all of the rows have, and fails for rows that
    have none.
    """
    if meta.size == 0:
        return
    await client._mark_clearing_in_controller(meta)
    manager = client.storage_manager
    # Over Mooncake each field of each row is an object of its own.
    if "storage_client" in vars(manager):
        every = await client._get_partition_meta(partition)
        names = [f"{index}@{name}" for name in (every.field_names if every else ()) for index in meta.global_indexes]
        if names:
            await asyncio.get_running_loop().run_in_executor(None, manager.storage_client.clear, names)
    else:
        await manager.clear_data(meta)
    await client._clear_meta_in_controller(meta)


async def remove_partition(client: Any, partition: str) -> None:
    """Free all rows of a partition, those of other programs too, and the partition itself."""
    meta = await client._get_partition_meta(partition)
    if meta is not None:
        await clear_rows(client, meta, partition)
        await client._clear_partition_in_controller(partition)  # TransferQueue's own leaves empty partitions


def _as_field(column: FlatColumn, *, fills_empty: bool) -> torch.Tensor | NonTensorStack:
    """Return a column as TransferQueue takes it: `[N, ...]`, jagged, or a stack of objects.

    Args:
        fills_empty: a row without entries gets one, of zeros; the ledger knows that it has none.
    """
    if column.objects is not None:
        return NonTensorStack(*[NonTensorData(value) for value in column.objects])
    assert column.values is not None
    if column.lengths is None:
        return column.values
    values, lengths = column.values, torch.from_numpy(column.lengths)
    if fills_empty and bool((lengths == 0).any()):
        filled = lengths.clamp(min=1)
        shift = (filled.cumsum(0) - filled) - (lengths.cumsum(0) - lengths)
        places = torch.repeat_interleave(shift, lengths) + torch.arange(values.shape[0])
        room = torch.zeros(int(filled.sum()), *values.shape[1:], dtype=values.dtype)
        _entries(room)[places.numpy()] = _entries(values)
        values, lengths = room, filled
    return nest(values, lengths)


def _entries(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return `[entries, bytes]`: torch cannot index values of every dtype."""
    width = values.element_size() * prod(values.shape[1:])
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(values.shape[0], width)


def _as_column(field: Any, spec: FieldSpec, num_rows: int, sizes: Sequence[int] | None) -> torch.Tensor | list[object]:
    """Return a field as the checks of a put take it: scalars `[N]`, rows of one shape dense, others jagged."""
    if not isinstance(field, torch.Tensor):
        return list(field.tolist())
    if field.is_nested and field.layout is not torch.jagged:
        raise SchemaMismatch(f"field {spec.name!r}: rows of several dtypes, or that differ in more than one dim")
    if not field.is_nested:
        is_widened = not spec.dims and field.dim() == 2 and field.shape[1] == 1
        return field[:, 0] if is_widened else field
    values, lengths = values_of(field), lengths_of(field)
    if spec.is_ragged:
        return field if sizes is None else _without_fill(values, lengths, sizes)
    if bool((lengths != lengths[0]).any()):
        return field
    return values if not spec.dims and int(lengths[0]) == 1 else values.reshape(num_rows, -1, *values.shape[1:])


def _without_fill(values: torch.Tensor, lengths: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Take out what `_as_field` has put into rows without entries."""
    is_filled = (torch.from_numpy(np.asarray(sizes, dtype=np.int64)) == 0) & (lengths == 1)
    if not bool(is_filled.any()):
        return nest(values, lengths)
    kept = torch.repeat_interleave(~is_filled, lengths).numpy()
    entries = torch.from_numpy(_entries(values)[kept]).reshape(-1).view(values.dtype)
    return nest(entries.reshape(-1, *values.shape[1:]), torch.where(is_filled, 0, lengths))
