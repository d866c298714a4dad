"""Files of rows that are in the data plane: readable lines, columns as they are stored, conversations.

Called by the rollout worker, in whose process the columns are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.datasets import Prompt
from nemo_rl.data_plane.chunks.ragged import object_rows
from nemo_rl.data_plane.column_io import read_column_file, read_columns, write_column_file
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta, Tags
from nemo_rl.data_plane.keys import group_uid
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ResourceError
from nemo_rl.experience.conversation_log import (
    CONVERSATION,
    ConversationFile,
    ConversationLog,
    logs_of_column,
    turn_lines,
)
from nemo_rl.experience.payload import logged_extras
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.rollout_file import (
    PROMPT_NUMBER,
    TokenTexts,
    asked_texts,
    row_texts,
    token_record,
    write_rollouts,
)

__all__ = ["LineWriter", "keep_columns", "keep_conversations", "restore_columns"]

LOGGED_FIELDS = ("input_ids", "token_mask", "generation_logprobs")
"""Columns of readable rollouts that every row has."""


class LineWriter:
    """Writes rows as readable JSON lines.

    Args:
        prompts: of training, by their numbers.
        extras: columns of the run's own.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, prompts: Sequence[Prompt], extras: Sequence[FieldSpec]
    ) -> None:
        self._tokenizer, self._texts = tokenizer, TokenTexts(tokenizer)
        self._prompts, self._extras = prompts, extras

    def write(
        self,
        client: DataPlaneClient,
        meta: KVBatchMeta,
        *,
        scored: KVBatchMeta | None,
        path: Path,
        records: Sequence[Mapping[str, object]],
    ) -> None:
        """Write the rows as readable JSON lines: key, texts, what `records` say of each, and its tokens.

        Args:
            scored: those of the rows that have log-probabilities of the trainer, in any order; None: no row has.
        """
        prev = WorkerPass.PREV_LOGPROBS.column
        with client.stage("log"):
            batch = read_columns(client, meta, LOGGED_FIELDS, pad_values={"input_ids": 0})
            logs = _logs_of(client, meta)
            columns = logged_extras(client, meta, self._extras)
            prevs = None if scored is None else read_columns(client, scored, (prev,)).tensor(prev)
        ids, mask = batch.tensor("input_ids"), batch.tensor("token_mask").bool()
        row_of = {} if scored is None else {key: row for row, key in enumerate(scored.keys)}
        lines = []
        for row, (key, length, log) in enumerate(zip(meta.keys, meta.sequence_lengths or (), logs, strict=True)):
            tokens, is_response = ids[row, :length], mask[row, :length]
            line: dict[str, object] = {"key": key, "group": group_uid(key)}
            line |= row_texts(self._tokenizer, tokens, is_response)
            if isinstance(number := records[row].get(PROMPT_NUMBER), int):
                line |= asked_texts(self._prompts[number])
            shown = token_record(
                self._texts,
                tokens.tolist(),
                mask=is_response,
                generation_logprobs=batch.tensor("generation_logprobs")[row, :length],
                prev_logprobs=prevs[row_of[key], :length] if prevs is not None and key in row_of else None,
            )
            more = {} if log is None else turn_lines(log)
            lines.append({**line, **records[row], **more, **columns[row], **shown})
        write_rollouts(path, lines)


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
        logs = _logs_of(client, meta)
    kept = ConversationFile(
        schemas=tuple(schemas),
        now=now,
        logs={key: log for key, log in zip(meta.keys, logs, strict=True) if log is not None},
    )
    try:
        return kept.write(path)
    except OSError as error:
        raise ResourceError(f"replies cannot be kept in {path}: {machine_problem(error) or error}") from error


def _logs_of(client: DataPlaneClient, meta: KVBatchMeta) -> list[ConversationLog | None]:
    """Return the log of each row; None for a row of a single turn, and for further rows of a conversation."""
    if CONVERSATION not in meta.fields:
        return [None] * len(meta.keys)
    return logs_of_column(client.get_data(meta, [CONVERSATION]).get(CONVERSATION))


def restore_columns(
    client: DataPlaneClient, keys: Sequence[str], *, partition_id: str, tags: Sequence[Tags], path: Path
) -> KVBatchMeta:
    """Write rows of a file of `keep_columns` under new keys; see `read_column_file` for its errors."""
    columns = read_column_file(path)
    with client.stage("rollout"):
        return client.kv_batch_put(list(keys), partition_id, columns, tags)
