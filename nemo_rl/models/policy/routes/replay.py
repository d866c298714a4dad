"""Routers of one rank in a pass: they choose for themselves, choose as recorded, or are recorded.

Engine-neutral: megatron-core's routers and those of Hugging Face models ask `RouteReplayer.choose` for every pass of
every layer. Invariant: routes are found by microbatch and layer number, never by the order of calls, and belong to one
pass: `pass_of` ends them, also after an error, and a backward pass that recomputes layers names its own microbatch.
Shapes: T tokens in the order of the routers of a rank, K experts of a token, l layers of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from nemo_rl.errors import WorkerError
from nemo_rl.models.policy.routes.slices import RouteSlices
from nemo_rl.routes.digest import route_digests
from nemo_rl.routes.shape import MISSING, dummy_route
from nemo_rl.torch_private import after_backward
from nemo_rl.utils.metrics import Mean, Reduction
from nemo_rl.utils.r3_trace import (
    Runs,
    TracedRouter,
    TracedSlots,
    TraceStage,
    UsedRoutes,
    trace_cp_routed_experts,
    trace_router_replay_action,
    trace_router_replay_assignment,
    trace_router_replay_forward_verify,
)

__all__ = ["MicrobatchRoutes", "MicrobatchTokens", "ReplayAction", "RouteReplayer", "RouteTrace", "microbatch_routes"]

ReplayAction: TypeAlias = Literal["record", "replay_forward", "replay_backward"]
OwnChoice: TypeAlias = Callable[[], torch.Tensor]
"""`[T, K]` int64: what the router chooses by itself."""


@dataclass(kw_only=True, slots=True)
class MicrobatchRoutes:
    """State of one microbatch from its forward pass to the end of its backward pass."""

    number: int
    """Number of the microbatch within the stage, from 0."""
    rows: tuple[int, ...]
    row_T: torch.Tensor
    """`[T]` int64: row within the microbatch; -1 where no token lies."""
    column_T: torch.Tensor
    """`[T]` int64: position in the row; 0 where no token lies."""
    is_token_T: torch.Tensor
    """`[T]` bool: False for padding."""
    is_fed_T: torch.Tensor
    """`[T]` bool: tokens but the last of each row, which no rollout feeds: its route is a dummy."""
    ids_TlK: torch.Tensor | None = None
    """`[T, l, K]` uint8 or int16; a valid dummy in the padding; None while recording."""
    is_missing_T: torch.Tensor | None = None
    """`[T]` bool; None when no token lacks a route."""
    digests_Tl: torch.Tensor | None = None
    """`[T, l]` int64; None unless verified."""
    used: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> `[T, K]` int64: with missing routes the choice of the forward pass, which a recomputation repeats; when
    recording the recorded ids."""
    seen: set[int] = field(default_factory=set)
    """Layers that have run; one that runs again is being recomputed."""
    again: set[int] = field(default_factory=set)
    """Layers that have been recomputed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteTrace:
    """Traces the routes that the routers of one rank use in one stage."""

    stage: TraceStage
    keys: Sequence[str]
    """Keys of the shard's rows."""
    source_NT: torch.Tensor | None
    """`[N, T]` the tokens that the routes belong to; None in the middle of a pipeline, which sees none."""
    layers: tuple[int, ...]
    layer_index: tuple[int, ...]
    """Columns of `layers` among all layers with experts."""
    num_experts: int

    def placed(self, routes: MicrobatchRoutes, ids_T: torch.Tensor) -> None:
        """Check that the routes of a microbatch lie where its tokens lie.

        Args:
            ids_T: `[T]` tokens as the model gets them.
        """
        if routes.ids_TlK is None or not routes.rows:
            return
        trace_cp_routed_experts(
            self.stage,
            microbatch=routes.number,
            slots=TracedSlots(
                runs=self._runs(routes),
                input_ids=None if self.source_NT is None else ids_T,
                verified_count=None if self.source_NT is None else self._verified(routes, ids_T, self.source_NT),
            ),
            routes=_with_missing(routes, routes.ids_TlK),
            layers=self.layers,
        )
        for i, layer in enumerate(self.layers):
            trace_router_replay_assignment(
                self.stage,
                TracedRouter(microbatch=routes.number, layer_number=layer),
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
        pending: tuple[int, int],
    ) -> None:
        """Note the ids that a router has used.

        Args:
            pending: microbatches whose backward pass may still ask this router, before and after.
        """
        if not routes.rows:
            return
        router = TracedRouter(microbatch=routes.number, layer_number=layer)
        trace_router_replay_action(
            self.stage, router, action=action, ids=_with_missing(routes, ids_TK), pending=pending[1]
        )
        if routes.digests_Tl is None:
            return
        has_none_T = ~routes.is_token_T
        if routes.is_missing_T is not None:
            has_none_T = has_none_T | routes.is_missing_T
        used = UsedRoutes(
            actual=ids_TK,
            expected=routes.digests_Tl[:, self.layers.index(layer)],
            missing=has_none_T,
            num_experts=self.num_experts,
        )
        trace_router_replay_forward_verify(self.stage, router, used, action=action, pending=pending)

    def cleared(self, routes: MicrobatchRoutes, *, layer: int, pending: int) -> None:
        """Note that a router forgets a microbatch: nothing asks for its routes any more."""
        if routes.rows:
            router = TracedRouter(microbatch=routes.number, layer_number=layer)
            trace_router_replay_action(self.stage, router, action="clear", pending=pending)

    def _verified(self, routes: MicrobatchRoutes, ids_T: torch.Tensor, source_NT: torch.Tensor) -> int:
        """Return how many tokens are the source's where their routes were cut; raise ValueError for another one."""
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
        """Return neighbours in one row, as (key, first position, tokens)."""
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


class RouteReplayer:
    """Gives every router of one rank its routes.

    Args:
        layers: numbers of this rank's layers with experts, from 0 over the whole model.
        validates: ids are checked before a router gets them.
    """

    def __init__(self, layers: Sequence[int], *, top_k: int, num_experts: int, validates: bool = False) -> None:
        self.layers = tuple(layers)
        self.top_k, self._num_experts, self._validates = top_k, num_experts, validates
        self._column = {layer: i for i, layer in enumerate(self.layers)}
        self._current: MicrobatchRoutes | None = None
        self._stage = ""
        self._observer: RouteTrace | None = None
        self._waiting: dict[int, MicrobatchRoutes] = {}
        """Microbatches whose backward pass is not over, by identity."""
        self._counts: dict[str, torch.Tensor] = {}
        """Stage -> `[3]` float64 on the device: tokens times layers that were replayed, without a route, and where the
        router wanted others. Read once a step, for a read waits for the device."""

    @property
    def is_idle(self) -> bool:
        """End the routes of all passes: routers choose for themselves."""
        return self._current is None

    @contextmanager
    def stage(self, name: str, observer: RouteTrace | None = None) -> Iterator[None]:
        """Surround all passes of a stage: nothing of it is left afterwards, also after an error."""
        self._stage, self._observer = name, observer
        try:
            yield
        finally:
            self._stage, self._observer, self._current = "", None, None
            self._waiting.clear()

    @contextmanager
    def pass_of(self, routes: MicrobatchRoutes, *, backward_follows: bool = False) -> Iterator[None]:
        """Surround a forward pass, or a forward and its backward pass where no other microbatch comes between.

        Args:
            backward_follows: the microbatch is entered once more, for its backward pass.
        """
        self.enter(routes)
        try:
            yield
        finally:
            if backward_follows:
                self._current = None
            else:
                self.leave()

    def enter(self, routes: MicrobatchRoutes) -> None:
        """Enter a microbatch: routers belong to this microbatch from here on, until `leave`."""
        self._current = routes
        if torch.is_grad_enabled():
            self._waiting[id(routes)] = routes

    def leave(self) -> None:
        """Leave the microbatch: routers choose for themselves from here on."""
        routes, self._current = self._current, None
        if routes is None:
            return
        self._waiting.pop(id(routes), None)
        if self._observer is not None:
            for layer in sorted(routes.seen):
                self._observer.cleared(routes, layer=layer, pending=self._pending(layer))

    def on_backward(self, routes: MicrobatchRoutes, output: torch.Tensor) -> None:
        """Give layers that the backward pass of this output recomputes these routes, until it ends.

        With several microbatches in flight the output says which one it is. The hook may run on a thread of the
        autograd engine, as does the recomputation.
        """

        def begin(_: torch.Tensor) -> None:
            self.enter(routes)
            # The only way to know of the end: no tensor of a stage's input need have a gradient.
            after_backward(self.leave)

        if output.requires_grad:
            output.register_hook(begin)

    def choose(self, layer: int, own: OwnChoice) -> torch.Tensor | None:
        """Return the ids that a router uses, `[T, K]` int64; None for its own choice.

        Raises:
            WorkerError: the pass has other tokens than the routes, or its ids are not those of the rollout.
        """
        routes = self._current
        if routes is None:
            return None
        is_again, before = layer in routes.seen, self._pending(layer)
        (routes.again if is_again else routes.seen).add(layer)
        pending = before, self._pending(layer)
        if routes.ids_TlK is None:
            if not is_again:
                routes.used[layer] = own().detach()
            if self._observer is not None:
                self._observer.used(routes, layer=layer, action="record", ids_TK=routes.used[layer], pending=pending)
            return None
        ids_TK = routes.used.get(layer)
        if ids_TK is None:
            ids_TK = routes.ids_TlK[:, self._column[layer]].long()
        if not is_again:
            ids_TK = self._install(routes, layer, ids_TK, own().detach())
        action: ReplayAction = "replay_backward" if is_again else "replay_forward"
        matches = self._matches(routes, layer, ids_TK)
        if self._observer is not None:
            self._observer.used(routes, layer=layer, action=action, ids_TK=ids_TK, pending=pending)
        if matches is False:
            raise WorkerError(
                f"router replay, {action} of microbatch {routes.number}, layer {layer}: ids of shape "
                f"{list(ids_TK.shape)} are not those that the rollout recorded; see `nemo-rl inspect DIR routes`",
                stage=self._stage,
            )
        return ids_TK

    def metrics(self) -> dict[str, Reduction]:
        """Return the counts since the last call, by stage; a token counts once per layer of this rank."""
        found: dict[str, Reduction] = {}
        for stage, counts in self._counts.items():
            pairs, missing, differing = counts.tolist()
            found[f"{stage}_missing_share"] = Mean(missing, pairs)
            found[f"{stage}_live_routes_differ"] = Mean(differing, pairs)
        self._counts = {}
        return found

    # Private parts.

    def _install(
        self, routes: MicrobatchRoutes, layer: int, ids_TK: torch.Tensor, own_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the ids of a layer's first pass: the router's own where a route is missing."""
        if own_TK.shape != ids_TK.shape:
            raise WorkerError(
                f"router replay, microbatch {routes.number}, layer {layer}: the router chooses "
                f"{list(own_TK.shape)} experts, the routes are {list(ids_TK.shape)}",
                stage=self._stage,
            )
        if self._validates:
            self._validate(routes, layer, ids_TK)
        if routes.is_missing_T is not None:
            # Kept, for a recomputed layer must not choose anew.
            ids_TK = routes.used[layer] = torch.where(routes.is_missing_T[:, None], own_TK, ids_TK)
        self._count(routes, ids_TK, own_TK)
        return ids_TK

    def _validate(self, routes: MicrobatchRoutes, layer: int, ids_TK: torch.Tensor) -> None:
        ordered = ids_TK.sort(dim=1).values
        is_wrong_T = (ordered[:, 0] < 0) | (ordered[:, -1] >= self._num_experts) | (ordered.diff(dim=1) == 0).any(1)
        if routes.is_missing_T is not None:
            is_wrong_T &= ~routes.is_missing_T
        if bool(is_wrong_T.any()):
            token = int(is_wrong_T.nonzero()[0])
            raise WorkerError(
                f"router replay, microbatch {routes.number}, layer {layer}, token {token} of the pass: expected "
                f"{self.top_k} different ids of 0 to {self._num_experts - 1}, got {ids_TK[token].tolist()}",
                stage=self._stage,
            )

    def _count(self, routes: MicrobatchRoutes, ids_TK: torch.Tensor, own_TK: torch.Tensor) -> None:
        differs_T = ~(own_TK[:, :, None] == ids_TK[:, None, :]).any(dim=2).all(dim=1) & routes.is_fed_T
        is_missing_T = torch.zeros_like(differs_T) if routes.is_missing_T is None else routes.is_missing_T
        counts = torch.stack((routes.is_fed_T, is_missing_T, differs_T)).sum(dim=1, dtype=torch.float64)
        before = self._counts.get(self._stage)
        self._counts[self._stage] = counts if before is None else before + counts

    def _matches(self, routes: MicrobatchRoutes, layer: int, ids_TK: torch.Tensor) -> bool | None:
        if routes.digests_Tl is None:
            return None
        is_known_T = routes.is_token_T
        if routes.is_missing_T is not None:
            is_known_T = is_known_T & ~routes.is_missing_T
        found_T = route_digests(ids_TK[:, None], [layer])[:, 0]
        is_equal_T = found_T == routes.digests_Tl[:, self._column[layer]]
        return bool((is_equal_T | ~is_known_T).all())

    def _pending(self, layer: int) -> int:
        return sum(layer in routes.seen and layer not in routes.again for routes in self._waiting.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchTokens:
    """The tokens of one microbatch at this rank's positions."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    row_ns: torch.Tensor
    """`[n, s]` int64: row within the microbatch, -1 where no token lies."""
    column_ns: torch.Tensor
    """`[n, s]` int64: position in the row."""


def microbatch_routes(
    slices: RouteSlices | None, tokens: MicrobatchTokens, *, number: int, top_k: int, positions_first: bool
) -> MicrobatchRoutes:
    """Return the routes of a microbatch, spread over the positions of its pass.

    Args:
        slices: of this microbatch, row by row of the pass; None to record.
        positions_first: the routers see `[s, n]` flattened, not `[n, s]`.

    Raises:
        WorkerError: another number of tokens.
    """
    row_ns, column_ns = tokens.row_ns, tokens.column_ns
    order_T = torch.arange(row_ns.numel(), device=row_ns.device).view(row_ns.shape)
    order_T = (order_T.T if positions_first else order_T).flatten()
    row_T, column_T = row_ns.flatten()[order_T], column_ns.flatten()[order_T]
    is_token_T = row_T >= 0
    length_n = torch.tensor(tokens.lengths or (0,), device=row_T.device)
    is_fed_T = is_token_T & (column_T < length_n[row_T.clamp(min=0)] - 1)
    slot_T = ((row_ns >= 0).flatten().cumsum(0) - 1).clamp(min=0)[order_T]
    routes = MicrobatchRoutes(
        number=number, rows=tokens.rows, row_T=row_T, column_T=column_T, is_token_T=is_token_T, is_fed_T=is_fed_T
    )
    if slices is None:
        return routes
    num_tokens, device = int(is_token_T.sum()), is_token_T.device
    if num_tokens != len(slices.ids):
        raise WorkerError(
            f"router replay, microbatch {number}: {len(slices.ids)} tokens with routes, expected {num_tokens}",
            stage="replay",
        )
    dummy_lK = dummy_route(top_k).to(device=device, dtype=slices.ids.dtype).repeat(slices.ids.shape[1], 1)
    if not num_tokens:
        routes.ids_TlK = dummy_lK.repeat(len(is_token_T), 1, 1)
        return routes
    routes.ids_TlK = torch.where(is_token_T[:, None, None], slices.ids.to(device)[slot_T], dummy_lK)
    if bool(slices.is_missing.any()):
        routes.is_missing_T = slices.is_missing.to(device)[slot_T] & is_token_T
    if slices.digests is not None:
        routes.digests_Tl = slices.digests.to(device)[slot_T]
    return routes
