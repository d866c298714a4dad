"""Files of rows that are in the data plane: columns as they are stored, conversations.

Called by the rollout worker, in whose process the columns are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from nemo_rl.data_plane.chunks.ragged import object_rows
from nemo_rl.data_plane.column_io import read_column_file, write_column_file
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta, Tags
from nemo_rl.errors import ResourceError
from nemo_rl.experience.conversation_log import (
    ConversationFile,
)
from nemo_rl.experience.payload import logs_of_rows
from nemo_rl.utils.exits import machine_problem

__all__ = ["keep_columns", "keep_conversations", "restore_columns"]


def keep_columns(client: DataPlaneClient, meta: KVBatchMeta, *, fields: Sequence[str], path: Path) -> int:
    """Write columns of the rows to a file, as they are stored; return its bytes."""
    with client.stage("keep"):
        found = client.get_data(meta, fields)
    columns = {
        name: column if isinstance(column := found.get(name), torch.Tensor) else object_rows(column) for name in fields
    }
    try:
        return write_column_file(path, columns)
    except OSError as error:
        raise ResourceError(f"columns cannot be kept in {path}: {machine_problem(error) or error}") from error


def keep_conversations(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    *,
    schemas: Sequence[Mapping[str, Any]],
    now: datetime,
    path: Path,
) -> int:
    """Write the conversations of the rows to a file of `ConversationFile`; return its bytes."""
    with client.stage("keep"):
        logs = logs_of_rows(client, meta)
    kept = ConversationFile(
        schemas=tuple(schemas),
        now=now,
        logs={key: log for key, log in zip(meta.keys, logs, strict=True) if log is not None},
    )
    try:
        return kept.write(path)
    except OSError as error:
        raise ResourceError(f"replies cannot be kept in {path}: {machine_problem(error) or error}") from error


def restore_columns(
    client: DataPlaneClient, keys: Sequence[str], *, partition_id: str, tags: Sequence[Tags], path: Path
) -> KVBatchMeta:
    """Write rows of a file of `keep_columns` under new keys; see `read_column_file` for its errors."""
    columns = read_column_file(path)
    with client.stage("rollout"):
        return client.kv_batch_put(list(keys), partition_id, columns, tags)
