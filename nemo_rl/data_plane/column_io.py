"""Converts dense batches to columns of the data plane and back: first write, read, write back, file.

The rollout actor calls `kv_first_write`; workers call `read_columns` and `write_columns`. Padding exists on this side
only: it is cut before a put and made at a read. The rollout worker writes the columns of kept steps with
`write_columns_file`, and the replay reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from nemo_rl.data_plane.chunks.ragged import pack_per_token_field
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta, Tags
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, Column
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import lengths_of, nest, values_of
from nemo_rl.utils.files import read_plain, replace_file

__all__ = [
    "columns_of_bytes",
    "columns_to_bytes",
    "cut_columns",
    "kv_first_write",
    "read_column_file",
    "read_columns",
    "write_column_file",
    "write_columns",
]


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
