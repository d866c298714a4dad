"""What the passes of a stage do with their routes, as records of the route trace.

Made per stage by `WorkerReplay` where the trace is on. Invariant: it only looks. Shapes: T tokens in the order of a
rank's routers, l layers of the rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.models.policy.routes.replay import MicrobatchRoutes, ReplayAction
from nemo_rl.routes.shape import MISSING
from nemo_rl.utils.r3_trace import (
    Runs,
    TraceStage,
    trace_cp_routed_experts,
    trace_router_replay_action,
    trace_router_replay_assignment,
    trace_router_replay_forward_verify,
)

__all__ = ["RouteTrace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteTrace:
    """`PassObserver` of one stage on one rank."""

    stage: TraceStage
    keys: Sequence[str]
    """Of the shard's rows."""
    source_NT: torch.Tensor | None
    """`[N, T]` the tokens that the routes belong to; None in the middle of a pipeline, which sees none."""
    layers: tuple[int, ...]
    layer_index: tuple[int, ...]
    """Columns of `layers` among all layers with experts."""
    num_experts: int

    def placed(self, routes: MicrobatchRoutes, ids_T: torch.Tensor) -> None:
        """The routes of a microbatch lie where its tokens lie.

        Args:
            ids_T: `[T]` tokens as the model gets them.
        """
        if routes.ids_TlK is None or not routes.rows:
            return
        trace_cp_routed_experts(
            self.stage,
            microbatch=routes.number,
            runs=self._runs(routes),
            routes=_with_missing(routes, routes.ids_TlK),
            layers=self.layers,
            input_ids=None if self.source_NT is None else ids_T,
            verified_count=None if self.source_NT is None else self._verified(routes, ids_T, self.source_NT),
        )
        for i, layer in enumerate(self.layers):
            trace_router_replay_assignment(
                self.stage,
                microbatch=routes.number,
                layer_number=layer,
                payload_idx=self.layer_index[i],
                ids=_with_missing(routes, routes.ids_TlK[:, i]),
            )

    def used(
        self,
        routes: MicrobatchRoutes,
        *,
        layer: int,
        action: ReplayAction,
        ids_TK: torch.Tensor,
        matches: bool | None,
        pending: tuple[int, int],
    ) -> None:
        """As in `PassObserver`."""
        if not routes.rows:
            return
        trace_router_replay_action(
            self.stage,
            action=action,
            layer_number=layer,
            microbatch=routes.number,
            ids=_with_missing(routes, ids_TK),
            pending=pending[1],
        )
        if matches is None or routes.digests_Tl is None:
            return
        has_none_T = ~routes.is_token_T
        if routes.is_missing_T is not None:
            has_none_T = has_none_T | routes.is_missing_T
        trace_router_replay_forward_verify(
            self.stage,
            action=action,
            layer_number=layer,
            microbatch=routes.number,
            topk=ids_TK.shape[1],
            scores_shape=(len(ids_TK), self.num_experts),
            actual=ids_TK,
            expected=routes.digests_Tl[:, self.layers.index(layer)],
            missing=has_none_T,
            pending=pending,
        )

    def cleared(self, routes: MicrobatchRoutes, *, layer: int, pending: int) -> None:
        """As in `PassObserver`."""
        if routes.rows:
            trace_router_replay_action(
                self.stage, action="clear", layer_number=layer, microbatch=routes.number, pending=pending
            )

    def _verified(self, routes: MicrobatchRoutes, ids_T: torch.Tensor, source_NT: torch.Tensor) -> int:
        """Tokens that are the source's at the row and position from which their routes were cut.

        Raises:
            ValueError: a token is another one.
        """
        row_n = torch.tensor(routes.rows, dtype=torch.int64)
        is_token_T = routes.is_token_T.cpu()
        row_R = row_n[routes.row_T.cpu()[is_token_T]]
        source_R = source_NT.cpu()[row_R, routes.column_T.cpu()[is_token_T]]
        differs = (source_R != ids_T.cpu()[is_token_T]).nonzero()
        if len(differs):
            at = int(differs[0])
            raise ValueError(
                f"router replay, {self.stage.stage}, microbatch {routes.number}: sample {self.keys[int(row_R[at])]!r}: "
                f"the model gets token {int(ids_T.cpu()[is_token_T][at])} where the sample has {int(source_R[at])}"
            )
        return len(source_R)

    def _runs(self, routes: MicrobatchRoutes) -> Runs:
        """Neighbours in one row, as (key, first position, tokens)."""
        row_T, column_T = routes.row_T.cpu(), routes.column_T.cpu()
        is_padding = row_T < 0
        goes_on = (row_T[1:] == row_T[:-1]) & (is_padding[1:] | (column_T[1:] == column_T[:-1] + 1))
        starts = [0, *((~goes_on).nonzero()[:, 0] + 1).tolist()] if len(row_T) else []
        ends = [*starts[1:], len(row_T)]
        return [
            (None if is_padding[a] else self.keys[routes.rows[int(row_T[a])]], int(column_T[a]), b - a)
            for a, b in zip(starts, ends, strict=True)
        ]


def _with_missing(routes: MicrobatchRoutes, ids: torch.Tensor) -> torch.Tensor:
    if routes.is_missing_T is None:
        return ids
    return ids.long().masked_fill(routes.is_missing_T.view(-1, *[1] * (ids.dim() - 1)), MISSING)
