"""Routes of experts: from what the engines have recorded to columns of the data plane.

Called by the rollout worker. Invariant: afterwards every token has a route, a dummy one (the last of a row, from which
nothing is predicted) or the mark of a missing one, and it is known how many tokens to train are predicted from a token
without a route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.config.router_replay import RouterReplayConfig
from nemo_rl.data_plane.chunks.ragged import lengths_of, nest, values_of
from nemo_rl.data_plane.route_shape import MISSING, bound_bits_per_token, dummy_route
from nemo_rl.data_plane.routed_experts import encode_routes, validate_routes, wire_bytes
from nemo_rl.errors import WorkerError, name_some
from nemo_rl.models.generation.interfaces import RecordedRoutes
from nemo_rl.utils.metrics import Mean, Reduction, Sum
from nemo_rl.utils.r3_trace_env import router_replay_validate_enabled

__all__ = ["RouteColumns", "RouteCounts", "RouteWriter", "count_routes", "place_routes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteCounts:
    """Tokens with and without a route."""

    tokens: int
    """That could have one: all but the last of each row."""
    missing: int
    """Of these."""
    trained: int
    """Tokens to train."""
    trained_missing: int
    """Of these, predicted from a token without a route."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteColumns:
    """What a rollout writes about its routes."""

    columns: dict[str, torch.Tensor]
    """Columns of the schema, jagged."""
    routes: torch.Tensor
    """The same in install form: jagged `[N, (tokens), L, K]` int16."""
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

    def _check_share(self, counts: RouteCounts) -> None:
        limit, share = self._config.max_missing_share, counts.trained_missing / max(1, counts.trained)
        if share > limit:
            raise WorkerError(
                f"{counts.trained_missing} of {counts.trained} tokens to train ({share:.1%}) have no route of the "
                f"rollout, expected at most policy.router_replay.max_missing_share={limit}; see why the engine leaves "
                "them out (a prefix cache is the usual reason), or raise it",
                stage="rollout",
            )


def place_routes(turns: Sequence[RecordedRoutes], *, lengths: torch.Tensor, keys: Sequence[str]) -> torch.Tensor:
    """Routes of all turns at the positions of their tokens, in install form.

    A token keeps the route of the first turn that has one: its log-probability was made with it. Later turns add what
    that turn could not have: the last token of its response, what the environment has said since, and gaps.

    Args:
        turns: of each turn the routes of all N rows; `lengths` 0 where a row had ended before.
        lengths: `[N]` integers, tokens of a row after its last turn.
        keys: of the rows, for messages.

    Returns:
        Jagged `[N, (tokens), L, K]` int16; -1 where no turn has a route, `dummy_route` at the last token of a row.

    Raises:
        WorkerError: no turn, turns of different models, or routes beyond the end of a row.
    """
    if not turns or any(turn.shape != turns[0].shape for turn in turns):
        shapes = name_some(repr(turn.shape) for turn in turns)
        raise WorkerError(f"expected the routes of one model, got {shapes or 'none'}", stage="rollout")
    shape, lengths = turns[0].shape, lengths.long()
    first = lengths.cumsum(0) - lengths
    values = torch.full((int(lengths.sum()), len(shape.layers), shape.top_k), MISSING, dtype=torch.int16)
    for turn in turns:
        _check_ends(turn, lengths, keys)
        before = turn.lengths.cumsum(0) - turn.lengths
        shift = (first + turn.starts - before).repeat_interleave(turn.lengths)
        at = torch.arange(len(shift)) + shift
        is_free = values[at, 0, 0] == MISSING
        values[at[is_free]] = turn.ids[is_free].to(torch.int16)
    values[(first + lengths - 1)[lengths > 0]] = dummy_route(shape.top_k)
    return nest(values, lengths)


def count_routes(routes: torch.Tensor, token_mask: torch.Tensor) -> RouteCounts:
    """Counts of jagged `[N, (tokens), L, K]` routes in install form, and `[N, T]` bool tokens to train."""
    is_missing, lengths = values_of(routes)[:, 0, 0] == MISSING, lengths_of(routes)
    is_trained = token_mask.bool()[torch.arange(token_mask.shape[1]) < lengths[:, None]]
    # A token is predicted from the one before it; the last one of a row, before the next row's first, is never missing.
    is_blind = is_trained[1:] & is_missing[:-1]
    return RouteCounts(
        tokens=int((lengths - 1).clamp(min=0).sum()),
        missing=int(is_missing.sum()),
        trained=int(is_trained.sum()),
        trained_missing=int(is_blind.sum()),
    )


def _check_ends(turn: RecordedRoutes, lengths: torch.Tensor, keys: Sequence[str]) -> None:
    """The last token of a row may have a route as well; some backends feed it once more."""
    ends = turn.starts + turn.lengths
    is_beyond = (ends > lengths) | (turn.starts < 0)
    if bool(is_beyond.any()):
        row = int(is_beyond.nonzero()[0])
        raise WorkerError(
            f"routes of {keys[row]!r}: expected them within its {int(lengths[row])} tokens, got positions "
            f"{int(turn.starts[row])} to {int(ends[row]) - 1}; the engine counts its tokens otherwise",
            stage="rollout",
        )
