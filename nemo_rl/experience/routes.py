"""Routes of experts and files of rows: between what the engines have recorded, columns of the data plane, and disk.

Called by the rollout worker, in whose process the columns are read. Invariant: the columns of routes that it writes are
whole, checked, and have no more missing routes than the config allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from nemo_rl.config.policy import RouterReplayConfig
from nemo_rl.config.r3_trace_env import router_replay_validate_enabled
from nemo_rl.data_plane.chunks.ragged import object_rows
from nemo_rl.data_plane.column_io import read_column_file, write_column_file
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta, Tags
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import ResourceError, WorkerError
from nemo_rl.experience.conversation_log import (
    ConversationFile,
)
from nemo_rl.experience.payload import logs_of_rows
from nemo_rl.experience.token_row import TokenRow, routes_of_rows
from nemo_rl.routes.columns import encode_routes, validate_routes, wire_bytes
from nemo_rl.routes.shape import RecordedRoutes, RouteCounts, bound_bits_per_token, count_routes, place_routes
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.metrics import Mean, Reduction, Sum
from nemo_rl.utils.r3_trace import trace_rollout_payload

__all__ = ["RouteWriter", "keep_columns", "keep_conversations", "restore_columns"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteColumns:
    """The columns that a rollout writes about its routes."""

    columns: dict[str, torch.Tensor]
    """Columns of the schema, jagged."""
    routes: torch.Tensor
    """The same decoded: jagged `[N, (tokens), L, K]` int16."""
    layers: tuple[int, ...]
    """Numbers of the L layers in the model."""
    metrics: dict[str, Reduction]


class RouteWriter:
    """Turns recorded routes into columns; checks those of its first rollout, all with NRL_ROUTER_REPLAY_VALIDATE."""

    def __init__(self, config: RouterReplayConfig) -> None:
        self._config = config
        self._is_validated = False

    def write(
        self,
        turns: Sequence[RecordedRoutes],
        *,
        lengths: torch.Tensor,
        token_mask: torch.Tensor,
        keys: Sequence[str],
        with_digests: bool,
    ) -> RouteColumns:
        """The columns of N rows.

        Args:
            turns: of each turn the routes of all rows; one of single-turn rollouts.
            lengths: `[N]` integers, tokens of a row.
            token_mask: `[N, T]` bool, tokens to train.
            with_digests: adds the column that later stages check their routes against.

        Raises:
            SchemaMismatch: routes that no router of this model would have chosen.
            WorkerError: too many routes of a row, or too few of all.
        """
        routes = place_routes(turns, lengths=lengths, keys=keys)
        shape = turns[0].shape
        if not self._is_validated or router_replay_validate_enabled():
            validate_routes(routes, shape, keys=keys)
            self._is_validated = True
        counts = count_routes(routes, token_mask)
        self._check_share(counts)
        columns = encode_routes(routes, shape, bit_packed=self._config.bit_packed, with_digests=with_digests)
        num_bytes, num_tokens = float(wire_bytes(columns)), float(lengths.sum())
        metrics: dict[str, Reduction] = {
            "routes_missing_share": Mean(counts.missing, counts.tokens),
            "routes_missing_trained_tokens": Sum(float(counts.trained_missing)),
            "routes_bytes_per_token": Mean(num_bytes, num_tokens),
            "routes_bytes_vs_bound": Mean(8 * num_bytes, bound_bits_per_token(shape) * num_tokens),
        }
        return RouteColumns(columns=columns, routes=routes, layers=shape.layers, metrics=metrics)

    def of_rows(self, rows: Sequence[TokenRow]) -> list[RecordedRoutes]:
        """Return of each turn the routes of all rows; none where the rollout's are not replayed."""
        return routes_of_rows(rows) if self._config.records_at_rollout else []

    def add(
        self,
        client: DataPlaneClient,
        columns: BatchedDataDict,
        turns: Sequence[RecordedRoutes],
        *,
        keys: Sequence[str],
        partition_id: str,
        is_first: bool,
    ) -> dict[str, Reduction]:
        """Add the columns with the routes of experts, where this run replays those of the rollout.

        Args:
            is_first: of the groups of one call of a rollout.
        """
        if not self._config.records_at_rollout:
            return {}
        if not turns:
            raise WorkerError("expected routes with the samples, the engines gave none", stage="rollout")
        declared = frozenset(spec.name for spec in client.partition_fields(partition_id))
        written = self.write(
            turns,
            lengths=columns.tensor("input_lengths"),
            token_mask=columns.tensor("token_mask"),
            keys=keys,
            with_digests="routed_experts_digests" in declared,
        )
        routes = list(written.routes.unbind())
        trace_rollout_payload(keys=keys, data=columns, layers=written.layers, routes=routes, continues=not is_first)
        columns.update(written.columns)
        return written.metrics

    def _check_share(self, counts: RouteCounts) -> None:
        limit, share = self._config.max_missing_share, counts.trained_missing / max(1, counts.trained)
        if share > limit:
            raise WorkerError(
                f"{counts.trained_missing} of {counts.trained} tokens to train ({share:.1%}) have no route of the "
                f"rollout, expected at most policy.router_replay.max_missing_share={limit}; see why the engine leaves "
                "them out (a prefix cache is the usual reason), or raise it",
                stage="rollout",
            )
