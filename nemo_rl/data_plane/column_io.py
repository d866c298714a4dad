"""Converts dense batches to columns of the data plane and back: first write, read, write back, file.

The rollout actor calls `kv_first_write`; workers call `read_columns` and `write_columns`. Padding exists on this side
only: it is cut before a put and made at a read. The rollout worker writes the columns of kept steps with
`write_columns_file`, and the replay reads them.

Extra columns of a run: their specs, their values as columns of a put, and their rows in a worker's batch.

`data.extra_columns` declares them. The rollout worker writes them once, with its own columns; the passes that name them
fetch them. Invariant: in a batch a tensor of two or more dims has a token axis, so an extra column that has other dims
is a list there, with one tensor per row and without padding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from nemo_rl.config.data import ExtraColumn
from nemo_rl.data_plane.chunks.ragged import object_rows, pack_per_token_field
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta, Tags
from nemo_rl.data_plane.schema import FIELDS, FieldSpec, extra_field
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, Column
from nemo_rl.errors import ConfigError, SchemaMismatch
from nemo_rl.jagged import lengths_of, nest, values_of
from nemo_rl.utils.files import read_plain, replace_file

__all__ = [
    "columns_of_bytes",
    "columns_to_bytes",
    "cut_columns",
    "extra_names",
    "extra_specs",
    "extra_values",
    "is_listed",
    "kv_first_write",
    "read_column_file",
    "read_columns",
    "rows_as_list",
    "write_column_file",
    "write_columns",
]


OBJECT = "object"


def extra_specs(declared: Mapping[str, ExtraColumn]) -> tuple[FieldSpec, ...]:
    """Return the specs of `data.extra_columns`.

    Raises:
        ConfigError: a name is that of a field of the library.
    """
    if taken := [name for name in declared if name in FIELDS]:
        raise ConfigError([f"data.extra_columns.{name}: a field of the library has this name" for name in taken])
    return tuple(
        extra_field(
            name,
            dtypes=() if column.dtype == OBJECT else (column.dtype,),
            dims=column.dims,
            is_object=column.dtype == OBJECT,
            read_by=column.read_by,
        )
        for name, column in declared.items()
    )


def extra_names(specs: Sequence[FieldSpec], stage: str) -> tuple[str, ...]:
    return tuple(spec.name for spec in specs if stage in spec.read_by)


def is_listed(spec: FieldSpec) -> bool:
    """Return whether a batch holds the column as a list of one tensor per row."""
    return not spec.is_object and bool(spec.dims) and not spec.is_token_aligned


def rows_as_list(column: object) -> list[object]:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else object_rows(column)


def extra_values(spec: FieldSpec, values: Sequence[object], *, lengths: Sequence[int], where: str) -> Column:
    """Return the values of all rows as a column of a put.

    Args:
        values: one per row: a tensor, an array, or numbers in nested lists; anything JSON-like for an object column.
        lengths: tokens of the rows, which a column with a token axis must match.
        where: the values' origin, for messages.

    Raises:
        ConfigError: a value has another dtype or other dims than declared; names row, expected and got.
    """
    if spec.is_object:
        return list(values)
    dtype: torch.dtype = vars(torch)[spec.dtypes[0]]
    rows = [_row(value, spec, dtype, f"{where}, row {number}") for number, value in enumerate(values)]
    if spec.is_ragged:
        # An empty list does not say what its entries would look like.
        trailing = next((row.shape[1:] for row in rows if row.numel()), rows[0].shape[1:] if rows else ())
        rows = [row if row.numel() else row.reshape(0, *trailing) for row in rows]
    shapes = {tuple(row.shape[1:] if spec.is_ragged else row.shape) for row in rows}
    if len(shapes) > 1:
        raise ConfigError(f"{where}: expected rows of one shape for dims {list(spec.dims)}, got {sorted(shapes)}")
    if spec.is_token_aligned:
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if len(row) != length:
                raise ConfigError(
                    f"{where}, row {number}: expected a value for each of {length} tokens, got {len(row)}"
                )
    if not spec.is_ragged:
        return torch.stack(rows)
    return nest(torch.cat(rows), torch.tensor([len(row) for row in rows], dtype=torch.int64))


def _row(value: object, spec: FieldSpec, dtype: torch.dtype, where: str) -> torch.Tensor:
    if value is None:
        raise ConfigError(f"{where}: expected a value of dtype {spec.dtypes[0]} and dims {list(spec.dims)}, got none")
    try:
        row = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value).copy())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected numbers of dims {list(spec.dims)}, got {repr(value)[:80]}") from error
    if row.numel() and row.is_floating_point() and not dtype.is_floating_point:
        raise ConfigError(f"{where}: expected whole numbers ({spec.dtypes[0]}), got {row.dtype}")
    fits = row.dim() == len(spec.dims) or (row.numel() == 0 and spec.is_ragged)
    if fits and row.dim() != len(spec.dims):
        row = row.reshape(0, *(size if isinstance(size, int) else 0 for size in spec.dims[1:]))
    sizes = zip(spec.dims, row.shape, strict=False)
    if not fits or any(isinstance(size, int) and size != found for size, found in sizes):
        raise ConfigError(f"{where}: expected dims {list(spec.dims)}, got shape {list(row.shape)}")
    made = row.to(dtype)
    if not dtype.is_floating_point and dtype is not torch.bool and not bool((made.to(row.dtype) == row).all()):
        raise ConfigError(f"{where}: expected numbers that {spec.dtypes[0]} can hold, got {row.flatten().tolist()[:5]}")
    return made


def kv_first_write(
    client: DataPlaneClient,
    batch: BatchedDataDict,
    keys: Sequence[str],
    *,
    partition_id: str,
    tags: Sequence[Tags] | None = None,
    task_name: str | None = None,
) -> KVBatchMeta:
    """Write the columns of fresh rollouts; padded `[N, T]` columns are cut by `input_lengths`.

    Args:
        batch: must have `input_lengths` and `sample_mask`; every column goes out.
        task_name: recorded in the meta.

    Raises:
        SchemaMismatch: a required column is missing, no rows, or the errors of `kv_batch_put`.
    """
    missing = [name for name in ("input_lengths", "sample_mask") if name not in batch]
    if missing or batch.size == 0:
        raise SchemaMismatch(
            f"first write to partition {partition_id!r}: expected at least one row with input_lengths and sample_mask, "
            f"got {batch.size} rows, missing: {', '.join(missing) or 'none'}"
        )
    lengths, columns = batch.tensor("input_lengths"), cut_columns(client, batch, partition_id=partition_id)
    meta = client.kv_batch_put(keys, partition_id, columns, tags)
    return replace(meta, task_name=task_name, sequence_lengths=tuple(lengths.tolist()))


def cut_columns(client: DataPlaneClient, batch: BatchedDataDict, *, partition_id: str) -> dict[str, Column]:
    """Return the columns of a batch without padding, as `kv_first_write` puts them."""
    return _cut(batch, batch.tensor("input_lengths"), client.partition_fields(partition_id), partition_id)


def read_columns(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    pad_values: Mapping[str, float] | None = None,
    pad_to: int | None = None,
) -> BatchedDataDict:
    """Return the rows of `meta` as a dense batch.

    Args:
        pad_values: field -> padding, besides the defaults of the schema; `input_ids` needs the tokenizer's pad id here.
        pad_to: width of token-aligned columns; None takes the pack plan's, or else the longest row.
    """
    specs = {spec.name: spec for spec in client.partition_fields(meta.partition_id)}
    wanted = [specs[name] for name in select_fields if name in specs]
    pads = _pads(wanted, pad_values or {}, meta.partition_id)
    width = meta.pack.pad_to if pad_to is None and meta.pack is not None else pad_to
    return client.get_padded(meta, select_fields, pad_values=pads, pad_to=width)


def write_columns(client: DataPlaneClient, meta: KVBatchMeta, columns: Mapping[str, Column]) -> KVBatchMeta:
    """Write columns of existing rows; per-token ones are cut by `meta.sequence_lengths`. No columns: nothing happens.

    A meta that was claimed is written under its claim, whichever client claimed it.

    Returns:
        The meta with the new fields and family versions.
    """
    if not columns:
        return meta
    specs = client.partition_fields(meta.partition_id)
    lengths = None if meta.sequence_lengths is None else torch.tensor(meta.sequence_lengths, dtype=torch.int64)
    cut = _cut(columns, lengths, specs, meta.partition_id)
    put = client.kv_batch_put(meta.keys, meta.partition_id, cut, claimed=meta)
    return meta.with_fields(put.fields, versions=put.versions)


def _cut(
    columns: Mapping[str, Column], lengths: torch.Tensor | None, specs: Sequence[FieldSpec], partition_id: str
) -> dict[str, Column]:
    aligned = {spec.name for spec in specs if spec.is_token_aligned}
    cut: dict[str, Column] = {}
    for name, column in columns.items():
        if name in aligned and isinstance(column, torch.Tensor):
            if lengths is None:
                raise SchemaMismatch(f"partition {partition_id!r}: field {name!r}: the meta has no sequence lengths")
            cut[name] = pack_per_token_field(column, lengths)
        else:
            cut[name] = column
    return cut


def _pads(specs: Sequence[FieldSpec], given: Mapping[str, float], partition_id: str) -> dict[str, float]:
    pads: dict[str, float] = {}
    for spec in specs:
        if spec.name in given:
            pads[spec.name] = given[spec.name]
        elif spec.pad == "token":
            raise SchemaMismatch(
                f"partition {partition_id!r}: field {spec.name!r} is padded with the tokenizer's pad id; "
                f"pass pad_values={{{spec.name!r}: tokenizer.pad_token_id}}"
            )
        else:
            pads[spec.name] = spec.pad
    return pads


LENGTHS = "@lengths"
"""Suffix of a jagged column's name, for the column of its row lengths."""


OBJECTS = "@objects"
"""Suffix of a column of objects, whose rows are kept as one JSON list."""


def columns_to_bytes(columns: Mapping[str, Column]) -> bytes:
    flat: dict[str, torch.Tensor] = {}
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor):
            flat[name + OBJECTS] = torch.frombuffer(bytearray(json.dumps(column).encode()), dtype=torch.uint8)
            continue
        flat[name] = (values_of(column) if column.is_nested else column).contiguous()
        if column.is_nested:
            flat[name + LENGTHS] = lengths_of(column)
    content: bytes = save(flat)
    return content


def columns_of_bytes(content: bytes, where: str) -> dict[str, Column]:
    """Return the columns of `columns_to_bytes`, jagged where they were; those of objects as lists.

    Args:
        where: the file, for errors.

    Raises:
        SchemaMismatch: the bytes are torn, or none of `columns_to_bytes`.
    """
    try:
        flat = load(content)
    except SafetensorError as error:
        raise SchemaMismatch(f"{where}: expected columns in the safetensors format: {error}") from error
    columns: dict[str, Column] = {}
    for name, values in flat.items():
        if name.endswith(LENGTHS):
            continue
        if name.endswith(OBJECTS):
            columns[name.removesuffix(OBJECTS)] = json.loads(values.numpy().tobytes())
            continue
        lengths = flat.get(name + LENGTHS)
        if lengths is not None and int(lengths.sum()) != len(values):
            raise SchemaMismatch(f"{where}: column {name!r}: expected {int(lengths.sum())} values, got {len(values)}")
        columns[name] = values if lengths is None else nest(values, lengths)
    return columns


def write_column_file(path: Path, columns: Mapping[str, Column]) -> int:
    """Replace `path` at once; return its bytes.

    Raises:
        OSError: it cannot be written.
    """
    content = columns_to_bytes(columns)
    replace_file(path, lambda temporary: temporary.write_bytes(content))
    return len(content)


def read_column_file(path: Path) -> dict[str, Column]:
    """Return the columns of a file of `write_column_file`.

    Raises:
        OSError: the file is missing or cannot be read.
        SchemaMismatch: it is torn, or no such file.
    """
    return columns_of_bytes(read_plain(path), str(path))
