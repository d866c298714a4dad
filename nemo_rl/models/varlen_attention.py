"""Causal attention over whole sequences that lie in one row, on one rank or zigzag-split over context-parallel ranks.

Registered with Hugging Face models as `nrl_varlen`; a forward pass hands its `Segments` to every layer as the keyword
`segments`. Invariant: a token attends to itself and to earlier tokens of its own sequence only, by construction: each
sequence is one call, and no mask over the whole row exists. Shapes: n rows, S positions of the pass, s = S / ranks
local ones, H query heads, G key heads, D head dimension.

Zigzag: a sequence of length L is cut into 2 x ranks chunks; rank r holds chunks r and 2 x ranks - 1 - r, so that every
rank has the same causal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True, slots=True)
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

    def __post_init__(self) -> None:
        pieces = 2 * self.cp_size if self.cp_size > 1 else 1
        uneven = [length for length in self.lengths if length % pieces]
        if uneven:
            raise ValueError(f"a sequence of {uneven[0]} tokens does not divide into {pieces} chunks; pad it")

    def chunk(self, length: int) -> int:
        """Tokens of one chunk of a sequence."""
        return length // (2 * self.cp_size)

    def local_positions(self, rank: int | None = None) -> torch.Tensor:
        """`[s]` int64: positions of the row that a rank holds, in its order."""
        rank = self.cp_rank if rank is None else rank
        if self.cp_size == 1:
            return torch.arange(sum(self.lengths))
        parts, start = [], 0
        for length in self.lengths:
            chunk = self.chunk(length)
            for place in (rank, 2 * self.cp_size - 1 - rank):
                parts.append(torch.arange(start + place * chunk, start + (place + 1) * chunk))
            start += length
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def restore_order(self) -> torch.Tensor:
        """`[S]` int64: index into all ranks' positions side by side that puts them in the row's order."""
        return torch.cat([self.local_positions(rank) for rank in range(self.cp_size)]).argsort()


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of a Hugging Face layer (collective over the context group).

    Args:
        query: `[n, H, s, D]`; key and value `[n, G, s, D]`, H a multiple of G.
        segments: of this pass; None treats each row as one sequence.

    Returns:
        `[n, s, H, D]` and no weights.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask: expected None; sequences are told apart by `segments`")
    segments = segments or Segments(lengths=(query.shape[2],))
    if segments.group is not None:
        order = segments.restore_order().to(key.device)
        key = gather_along(key, segments.group, dim=2).index_select(2, order)
        value = gather_along(value, segments.group, dim=2).index_select(2, order)
    if _has_flash(query, dropout) and segments.cp_size == 1:
        return _flash(query, key, value, segments.lengths, scaling), None
    outputs: list[torch.Tensor] = []
    q_from = k_from = 0
    for length in segments.lengths:
        for q_count, k_count in _pieces(segments, length):
            q = query[:, :, q_from : q_from + q_count]
            k, v = key[:, :, k_from : k_from + k_count], value[:, :, k_from : k_from + k_count]
            outputs.append(_attend(q, k, v, scaling=scaling, dropout=dropout))
            q_from += q_count
        k_from += length
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return whole.transpose(1, 2).contiguous(), None


def _pieces(segments: Segments, length: int) -> Sequence[tuple[int, int]]:
    """For each run of local queries of a sequence: how many there are, and how many keys they see at most."""
    if segments.cp_size == 1:
        return [(length, length)]
    chunk = segments.chunk(length)
    return [(chunk, (place + 1) * chunk) for place in (segments.cp_rank, 2 * segments.cp_size - 1 - segments.cp_rank)]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scaling: float | None, dropout: float
) -> torch.Tensor:
    """The last query sees every key, each earlier one a key less."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    if q.shape[2] == k.shape[2]:
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling)
    bias = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scaling)


def _has_flash(query: torch.Tensor, dropout: float) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return flash_attn_varlen_func is not None and query.is_cuda and half and dropout == 0.0


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scaling: float | None
) -> torch.Tensor:
    """All sequences of all rows in one kernel."""
    rows = query.shape[0]
    counts = torch.tensor([0, *(list(lengths) * rows)], device=query.device)
    starts = counts.cumsum(0, dtype=torch.int32)
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    longest = max(lengths)
    result: torch.Tensor = flash_attn_varlen_func(
        *flat, starts, starts, longest, longest, softmax_scale=scaling, causal=True
    )
    return result.view(rows, -1, *result.shape[1:])


AttentionInterface.register(ATTENTION_NAME, varlen_attention)
# No mask is built: the segments are what separates sequences.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lambda *args, **kwargs: None)
