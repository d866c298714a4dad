"""Columns of rows in one safetensors file: jagged ones as their values and the length of each row.

The rollout worker writes the columns of kept steps with it, the replay reads them. Invariant: what comes back is what
went in, dtype and lengths included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import lengths_of, nest, values_of
from nemo_rl.utils.files import read_plain, replace_file

__all__ = ["read_column_file", "write_column_file"]

LENGTHS = "@lengths"
"""Behind the name of a jagged column: the length of each row."""


def write_column_file(path: Path, columns: Mapping[str, torch.Tensor]) -> int:
    """Replaces `path` at once; returns its bytes.

    Raises:
        OSError: it cannot be written.
    """
    flat: dict[str, torch.Tensor] = {}
    for name, column in columns.items():
        flat[name] = (values_of(column) if column.is_nested else column).contiguous()
        if column.is_nested:
            flat[name + LENGTHS] = lengths_of(column)
    content = save(flat)
    replace_file(path, lambda temporary: temporary.write_bytes(content))
    return len(content)


def read_column_file(path: Path) -> dict[str, torch.Tensor]:
    """The columns, jagged where they were.

    Raises:
        OSError: the file is missing or cannot be read.
        SchemaMismatch: it is torn, or no such file.
    """
    try:
        flat = load(read_plain(path))
    except SafetensorError as error:
        raise SchemaMismatch(f"{path}: expected columns in a safetensors file: {error}") from error
    columns: dict[str, torch.Tensor] = {}
    for name, values in flat.items():
        if name.endswith(LENGTHS):
            continue
        lengths = flat.get(name + LENGTHS)
        if lengths is not None and int(lengths.sum()) != len(values):
            raise SchemaMismatch(f"{path}: column {name!r}: expected {int(lengths.sum())} values, got {len(values)}")
        columns[name] = values if lengths is None else nest(values, lengths)
    return columns
