"""Causal attention over sequences packed in one row, on one rank or zigzag-split over context-parallel ranks.

Registered with Hugging Face models as `nrl_varlen`; a forward pass hands its `Segments` to every layer as the keyword
`segments`. Invariant: a token attends to itself and to earlier tokens of its own sequence only, by construction: a
call sees sequences as rows of a batch, and no mask over the whole row exists. Shapes: n rows, S positions of the pass,
s = S / ranks local ones, g sequences of one length, H query heads, G key heads, D head dimension.

Zigzag: a sequence of length L is cut into 2 x ranks chunks; rank r holds chunks r and 2 x ranks - 1 - r, so that every
rank has the same causal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from nemo_rl.distributed.differentiable import gather_along

try:  # An optional kernel of its own package, for half precision on GPU.
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
except ImportError:
    flash_attn_varlen_func = None

__all__ = ["ATTENTION_NAME", "Segments", "varlen_attention"]

ATTENTION_NAME = "nrl_varlen"


@dataclass(frozen=True, slots=True)
class Run:
    """Runs of queries of as many sequences of one length, and the keys that they may see."""

    queries: torch.Tensor
    """`[g, q]` int64: local positions."""
    keys: torch.Tensor
    """`[g, k]` int64: positions of the row, k at least q; the last query sees all k."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Where sequences begin and end in the rows of a pass.

    Example:
        Lengths 8 and 4 on rank 0 of 2: chunks of 2 and 1 tokens.
        >>> Segments(lengths=(8, 4), cp_size=2, cp_rank=0).local_positions().tolist()
        [0, 1, 6, 7, 8, 11]
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence over all context ranks, padding included; the same in each of the n rows."""
    cp_size: int = 1
    cp_rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    """Context-parallel ranks; None on one."""
    device: torch.device = field(default=torch.device("cpu"), compare=False)
    """Of the pass; positions lie there."""

    def __post_init__(self) -> None:
        pieces = 2 * self.cp_size if self.cp_size > 1 else 1
        uneven = [length for length in self.lengths if length % pieces]
        if uneven:
            raise ValueError(f"a sequence of {uneven[0]} tokens does not divide into {pieces} chunks; pad it")

    def local_positions(self, rank: int | None = None) -> torch.Tensor:
        """`[s]` int64: positions of the row that a rank holds, in its order."""
        rank = self.cp_rank if rank is None else rank
        parts = [
            torch.arange(start + first, start + stop, device=self.device)
            for start, length in zip(self._starts, self.lengths, strict=True)
            for first, stop in self._pieces(rank, length)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=self.device)

    @cached_property
    def row_order(self) -> torch.Tensor:
        """`[S]` int64: index into all ranks' positions side by side that puts them in the row's order."""
        return torch.cat([self.local_positions(rank) for rank in range(self.cp_size)]).argsort()

    @cached_property
    def runs(self) -> list[Run]:
        """All attention of this rank: sequences of one length together, so that there are few calls."""
        together: dict[tuple[int, int], list[tuple[int, int]]] = {}
        local = 0
        for start, length in zip(self._starts, self.lengths, strict=True):
            for first, stop in self._pieces(self.cp_rank, length):
                together.setdefault((stop - first, stop), []).append((local, start))
                local += stop - first
        return [
            Run(self._ranges([at for at, _ in places], queries), self._ranges([start for _, start in places], keys))
            for (queries, keys), places in together.items()
        ]

    @cached_property
    def local_order(self) -> torch.Tensor:
        """`[s]` int64: index into the queries of all runs, one after the other, that puts them in local order."""
        return torch.cat([run.queries.flatten() for run in self.runs]).argsort()

    @property
    def _starts(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))[:-1]

    def _pieces(self, rank: int, length: int) -> list[tuple[int, int]]:
        """First and last + 1 position of each run of a sequence that a rank holds."""
        if self.cp_size == 1:
            return [(0, length)]
        chunk = length // (2 * self.cp_size)
        return [(place * chunk, (place + 1) * chunk) for place in (rank, 2 * self.cp_size - 1 - rank)]

    def _ranges(self, starts: list[int], count: int) -> torch.Tensor:
        return torch.tensor(starts, device=self.device)[:, None] + torch.arange(count, device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    scaling: float | None
    dropout: float
    window: int | None


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of a Hugging Face layer (collective over the context group).

    Args:
        query: `[n, H, s, D]`; key and value `[n, G, s, D]`, H a multiple of G.
        sliding_window: tokens that a token sees, itself included; None means all.
        segments: of this pass; None treats each row as one sequence.

    Returns:
        `[n, s, H, D]` and no weights.

    Raises:
        ValueError: a mask, a cap of the scores or sinks, none of which this attention has.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask: expected None; sequences are distinguished by `segments`")
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__} caps its scores or has sinks, which {ATTENTION_NAME} does not know")
    segments = segments or Segments(lengths=(query.shape[2],), device=query.device)
    options = _Options(scaling=scaling, dropout=dropout, window=sliding_window)
    if segments.group is not None:
        key = gather_along(key, segments.group, dim=2).index_select(2, segments.row_order)
        value = gather_along(value, segments.group, dim=2).index_select(2, segments.row_order)
    if len(segments.lengths) == 1 and segments.cp_size == 1:
        return _attend(query, key, value, options).transpose(1, 2).contiguous(), None
    if _has_flash(query, dropout) and segments.cp_size == 1:
        return _flash(query, key, value, segments.lengths, options), None
    outputs = []
    for run in segments.runs:
        q = _take(query, run.queries)
        k, v = _take(key, run.keys), _take(value, run.keys)
        found = _attend(q, k, v, options)
        outputs.append(found.unflatten(0, (query.shape[0], -1)).transpose(2, 3).flatten(1, 2))
    return torch.cat(outputs, dim=1).index_select(1, segments.local_order), None


def _take(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`[n, H, S, D]` -> `[n x g, H, q, D]`."""
    taken = heads.index_select(2, positions.flatten()).unflatten(2, tuple(positions.shape))
    return taken.transpose(1, 2).flatten(0, 1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: _Options) -> torch.Tensor:
    """The last query sees every key in its window, each earlier one a key less."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    attend = partial(scaled_dot_product_attention, dropout_p=options.dropout, scale=options.scaling)
    queries, keys = q.shape[2], k.shape[2]
    if options.window is not None and options.window < keys:
        return attend(q, k, v, attn_mask=_window_mask(queries, keys, options.window, q.device))
    if queries == keys:
        return attend(q, k, v, is_causal=True)
    return attend(q, k, v, attn_mask=causal_lower_right(queries, keys))


def _window_mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """`[q, k]` bool: causal, and no further back than the window."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window)


def _has_flash(query: torch.Tensor, dropout: float) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return flash_attn_varlen_func is not None and query.is_cuda and half and dropout == 0.0


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], options: _Options
) -> torch.Tensor:
    """All sequences of all rows in one kernel."""
    rows = query.shape[0]
    counts = torch.tensor([0, *(list(lengths) * rows)], device=query.device)
    starts = counts.cumsum(0, dtype=torch.int32)
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    longest = max(lengths)
    back = -1 if options.window is None else options.window - 1
    result: torch.Tensor = flash_attn_varlen_func(
        *flat, starts, starts, longest, longest, softmax_scale=options.scaling, causal=True, window_size=(back, 0)
    )
    return result.view(rows, -1, *result.shape[1:])


AttentionInterface.register(ATTENTION_NAME, varlen_attention)
# No mask is built: the segments are what separates sequences.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lambda *args, **kwargs: None)
