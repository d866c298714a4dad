"""Slices of the routes of a shard: the part that each rank needs, cut out of the whole.

Called by the worker that reads a shard, for every rank of its replica group, and by a worker that is handed whole rows.
Invariant: places follow from lengths, plan and layout alone, by the same `PassPlaces` that lay the tokens out; a route
and its token cannot come apart. Shapes: N rows, M tokens of a rank's passes one after the other, L layers of the whole
model with experts, l of them on the rank, K experts of a token, n rows and s positions of one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import SchemaMismatch
from nemo_rl.models.policy.microbatch import PassPlaces, PassShape
from nemo_rl.routes.shape import MISSING, RouteShape, route_dtype

__all__ = ["RouteShard", "RouteSlices", "ShardRoutes", "TokenPlaces"]

Rows = tuple[int, ...]
NO_TOKENS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlaces:
    """The tokens of a rank's passes, one pass after the other; within a pass row by row, position by position."""

    row_M: torch.Tensor
    """`[M]` row of the shard."""
    column_M: torch.Tensor
    """`[M]` position in the row."""
    ranges: Mapping[Rows, tuple[int, int]]
    """Rows of a microbatch -> first and last + 1 of its tokens in M."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteShard:
    """The part that a rank needs: its context rank's positions, of these its chunk, and its layers."""

    cp_rank: int = 0
    chunk: int = 0
    num_chunks: int = 1
    """Equal parts of the positions over the tensor axis; 1 where every tensor rank routes all of them."""
    layer_index: tuple[int, ...]
    """Indices of the layers that this rank holds, among the L."""

    def tokens(self, plan: PackPlan, lengths: Sequence[int], shape: PassShape) -> TokenPlaces:
        """Return tokens of this rank in all passes of a plan.

        Args:
            plan: one rank's part.
            lengths: of the shard's rows.
        """
        rows_of_passes = [tuple(rows) for rows in plan.microbatches[0] if rows]
        row_parts, column_parts, ranges, count = [NO_TOKENS], [NO_TOKENS], {}, 0
        for rows in rows_of_passes:
            places = PassPlaces.of(
                [lengths[row] for row in rows], is_packed=plan.packed, shape=shape, device=torch.device("cpu")
            ).on_context_rank(self.cp_rank)
            row_ns = self.chunk_of(places.row_nS)
            is_token_ns = row_ns >= 0
            row_parts.append(torch.tensor(rows)[row_ns[is_token_ns]])
            column_parts.append(self.chunk_of(places.column_nS)[is_token_ns])
            ranges[rows] = (count, count + len(row_parts[-1]))
            count += len(row_parts[-1])
        return TokenPlaces(row_M=torch.cat(row_parts), column_M=torch.cat(column_parts), ranges=ranges)

    def chunk_of(self, values_ns: torch.Tensor) -> torch.Tensor:
        """Return `[n, s / num_chunks, ...]`: this rank's part of a pass along its positions."""
        return values_ns.chunk(self.num_chunks, dim=1)[self.chunk]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteSlices:
    """Routes of one rank for one stage, found by the rows of a microbatch."""

    ids: torch.Tensor
    """`[M, l, K]` uint8 or int16."""
    is_missing: torch.Tensor
    """`[M]` bool: tokens that take the model's own choice."""
    digests: torch.Tensor | None = None
    """`[M, l]` int64, made where the routes were recorded; None unless forward passes are verified."""
    ranges: Mapping[Rows, tuple[int, int]] = field(default_factory=dict)
    """Rows of a microbatch -> range of its tokens, like in `TokenPlaces`; rows lie in one microbatch of a stage."""

    @property
    def fields(self) -> dict[str, torch.Tensor]:
        """Return the fields that travel; the ranges follow from lengths and plan."""
        found = {"ids": self.ids, "is_missing": self.is_missing}
        return found if self.digests is None else {**found, "digests": self.digests}

    def of(self, rows: Rows) -> RouteSlices:
        """Return the part of one microbatch; no token for one without rows."""
        start, stop = self.ranges[rows] if rows else (0, 0)
        return RouteSlices(
            ids=self.ids[start:stop],
            is_missing=self.is_missing[start:stop],
            digests=None if self.digests is None else self.digests[start:stop],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRoutes:
    """Routes of all rows of a shard, as they come from the store."""

    values: torch.Tensor
    """`[S, L, K]` int16, decoded, row after row."""
    start_N: torch.Tensor
    """`[N]` first entry of each row."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    digests: torch.Tensor | None = None
    """`[S, L]` int64."""
    shape: RouteShape

    @classmethod
    def of_rows(
        cls, values: torch.Tensor, lengths: Sequence[int], shape: RouteShape, *, digests: torch.Tensor | None = None
    ) -> ShardRoutes:
        """Return the routes of rows that lie end to end: `[S, L, K]` int16, decoded, and digests `[S, L]`."""
        length_N = torch.tensor(lengths, dtype=torch.int64)
        start_N = length_N.cumsum(0) - length_N
        return cls(values=values, start_N=start_N, lengths=tuple(lengths), digests=digests, shape=shape)

    @classmethod
    def of_dense(cls, routes_NTLK: torch.Tensor, lengths: Sequence[int], shape: RouteShape) -> ShardRoutes:
        """Return the routes of a dense batch, `[N, T, L, K]`, decoded.

        Raises:
            SchemaMismatch: other dims, layers or experts per token than the model's.
        """
        expected = (len(shape.layers), shape.top_k)
        if routes_NTLK.dim() != 4 or tuple(routes_NTLK.shape[2:]) != expected:
            raise SchemaMismatch(
                f"routed_experts: expected [N, T, {expected[0]} layers with experts, {expected[1]} experts per token], "
                f"got {list(routes_NTLK.shape)}; record the routes with the model that is trained"
            )
        num_rows, width = routes_NTLK.shape[:2]
        return cls(
            values=routes_NTLK.to(torch.int16).flatten(0, 1),
            start_N=torch.arange(num_rows) * width,
            lengths=tuple(lengths),
            shape=shape,
        )

    def cut(self, shard: RouteShard, plan: PackPlan, shape: PassShape) -> RouteSlices:
        """Return the routes that one rank needs for the passes of its plan, in one rank's part of the plan.

        Raises:
            SchemaMismatch: a token has a route in some of its layers only.
        """
        layer_index = torch.tensor(shard.layer_index, dtype=torch.int64)
        tokens = shard.tokens(plan, self.lengths, shape)
        source_M = self.start_N[tokens.row_M] + tokens.column_M
        whole_M = self.values[source_M]
        is_missing = whole_M[:, 0, 0] == MISSING
        if bool(((whole_M == MISSING) != is_missing[:, None, None]).any()):
            raise SchemaMismatch(
                f"routed_experts: expected {MISSING} in every layer of a token without a route, got other ids in some"
            )
        return RouteSlices(
            ids=whole_M[:, layer_index]
            .masked_fill(is_missing[:, None, None], 0)
            .to(route_dtype(self.shape.num_experts)),
            is_missing=is_missing,
            digests=None if self.digests is None else self.digests[source_M][:, layer_index],
            ranges=tokens.ranges,
        )
