"""Routes of a token: their shape (layers, experts, dtypes), and places in a row. Needs nothing but torch.

Read wherever routes are recorded, carried or replayed; `columns` makes columns of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.errors import WorkerError, name_some
from nemo_rl.jagged import lengths_of, nest, values_of

__all__ = [
    "MAX_EXPERTS",
    "MISSING",
    "RecordedRoutes",
    "RouteCounts",
    "RouteShape",
    "bits_per_id",
    "bound_bits_per_token",
    "count_routes",
    "dummy_route",
    "place_routes",
    "route_dtype",
]


MISSING = -1
"""Every id of a token without a route, in decoded routes."""
MAX_EXPERTS = 32767
"""Most experts of a layer: their ids fit int16."""
UINT8_EXPERTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteShape:
    """The shape of the routes of one token of a model.

    Example:
        >>> shape = RouteShape(layers=(1, 2), top_k=2, num_experts=8)
        >>> bound_bits_per_token(shape)
        12
    """

    layers: tuple[int, ...]
    """Numbers of the layers with routed experts, ascending, counted from 0 over all layers of the model."""
    top_k: int
    num_experts: int


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of ids on the wire: uint8 up to 256 experts, int16 above."""
    return torch.uint8 if num_experts <= UINT8_EXPERTS else torch.int16


def dummy_route(top_k: int) -> torch.Tensor:
    """Return `[K]` int16: a valid route for tokens whose route is never used (the last of a row, padding)."""
    return torch.arange(top_k, dtype=torch.int16)


def bits_per_id(num_experts: int) -> int:
    """Return ceil(log2 E), at least 1."""
    return max(1, (num_experts - 1).bit_length())


def bound_bits_per_token(shape: RouteShape) -> int:
    """Return ceil(log2 E) * L * K."""
    return bits_per_id(shape.num_experts) * len(shape.layers) * shape.top_k


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRoutes:
    """Routes of N rows laid end to end, as an engine has recorded them.

    Example:
        A row of 3 prompt and 2 response tokens has 4 routes: nothing is predicted from the last token, so it is never
        fed.
    """

    ids: torch.Tensor
    """`[sum(lengths), L, K]` uint8 or int16: ids of experts in the order of the router, layers with experts only."""
    starts: torch.Tensor
    """`[N]` int64, position of the first token with a route, counted over prompt and response; 0 unless a backend
    leaves out a prefix that an earlier turn has recorded."""
    lengths: torch.Tensor
    """`[N]` int64, tokens with a route: from `starts` on, without gaps."""
    shape: RouteShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteCounts:
    """Tokens with and without a route."""

    tokens: int
    """Tokens that could have a route: all but the last of each row."""
    missing: int
    """Tokens of these without a route."""
    trained: int
    trained_missing: int
    """Trained tokens of these, predicted from a token without a route."""


def place_routes(turns: Sequence[RecordedRoutes], *, lengths: torch.Tensor, keys: Sequence[str]) -> torch.Tensor:
    """Return the routes of all turns at the positions of their tokens, decoded.

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
    """Count the routes of jagged `[N, (tokens), L, K]` decoded routes, and `[N, T]` bool tokens to train."""
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
    """Check the ends of rows. The last token of a row may have a route as well; some backends feed it once more."""
    ends = turn.starts + turn.lengths
    is_beyond = (ends > lengths) | (turn.starts < 0)
    if bool(is_beyond.any()):
        row = int(is_beyond.nonzero()[0])
        raise WorkerError(
            f"routes of {keys[row]!r}: expected them within its {int(lengths[row])} tokens, got positions "
            f"{int(turn.starts[row])} to {int(ends[row]) - 1}; the engine counts its tokens otherwise",
            stage="rollout",
        )
