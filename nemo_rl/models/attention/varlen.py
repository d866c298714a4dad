"""Causal attention over sequences packed in one row, on one rank or zigzag-split over context-parallel ranks.

Registered with Hugging Face models as `nrl_varlen`; a forward pass hands its `Segments` to every layer as the keyword
`segments`, and the mask that a model asks for arrives as a `Pattern`. Invariant: a token attends to itself and to
earlier tokens of its own sequence only, by construction: a call sees sequences as rows of a batch, and no mask over the
whole row exists. What one kernel can do is one operation (`segment_attention`); context-parallel passes, and models
with sinks, capped scores or dropout, take a call for each of a few groups of sequences. Shapes: n rows, S positions of
the pass, s = S / ranks local ones, g sequences of a group, H query heads, G key heads, D head dimension.

Zigzag: a sequence of length L is cut into 2 x ranks chunks; rank r holds chunks r and 2 x ranks - 1 - r, so that every
rank has the same causal work.

Causal attention of sequences that lie end to end in one row: one operation per layer, whatever their lengths are.

Called by `varlen_attention`. On a CPU it is an operation of this project, `nrl::segment_attention`, which runs torch's
fused kernel over one run of equal lengths after the other; on CUDA in half precision it is torch's `varlen_attn`. Both
are opaque to `torch.compile`, and lengths are tensors, so a compiled layer serves every packing. Invariant: neither
waits for the device. Shapes: n rows, s positions of a row, g sequences, H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from nemo_rl.distributed.collectives import gather_along
from nemo_rl.torch_private import is_dispatch_intercepted

__all__ = ["MOST_HEAD_DIM", "segment_attention", "varlen_on_device"]


MOST_HEAD_DIM = 256
"""Largest head dimension of the kernel behind `varlen_attn`."""
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.13 takes fewer key heads than query heads, 2.11 does not."""
_aten = torch.ops.aten


def varlen_on_device(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    *,
    most: int,
    window: int,
    scale: float | None,
) -> torch.Tensor:
    """Return `[1, s, H, D]` on CUDA, in bfloat16 or float16, differentiable.

    Args:
        query: `[1, H, s, D]`; key and value `[1, G, s, D]`.
        ends: `[g + 1]` int32: first position of each sequence, and s.
        most: a number that no length exceeds.
        window: tokens that a token sees, itself included; 0 means all earlier ones.
    """
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "window_size": (window - 1, 0)}
    if _TAKES_GROUPS:
        options["enable_gqa"] = True
    elif q.shape[1] != k.shape[1]:
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
    found: Any = varlen_attn(q, k, v, ends, ends, most, most, **options)
    return found[None]


@torch.library.custom_op("nrl::segment_attention", mutates_args=(), device_types="cpu")
def segment_attention(  # noqa: PLR0917 - the arguments of a kernel
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    window: int,
    is_chunked: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention `[n, s, H, D]`, and `[n, s, H]` float: the logarithm of the sum of each query's exponentiated
    scores, for the backward pass.

    Args:
        query: `[n, H, s, D]`; key and value `[n, G, s, D]`.
        ends: as in `varlen_on_device`; the same in each of the n rows.
        window: as there.
        is_chunked: sequences are cut into runs of `window` tokens, and a token sees its own run only.
    """
    outputs, sums = [], []
    for start, count, length in _runs(ends):
        q, k, v = (_sequences(heads, start, count, length, query.shape[1]) for heads in (query, key, value))
        mask = _mask(length, window, is_chunked, q)
        found, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        outputs.append(_to_row(found, query.shape))
        sums.append(_to_row(log_sum[..., None], query.shape)[..., 0])
    return torch.cat(outputs, dim=1), torch.cat(sums, dim=1)


@torch.library.custom_op("nrl::segment_attention_backward", mutates_args=(), device_types="cpu")
def _backward_op(  # noqa: PLR0917 - the arguments of a kernel
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    found: torch.Tensor,
    log_sum: torch.Tensor,
    ends: torch.Tensor,
    window: int,
    is_chunked: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, groups = query.shape[1], key.shape[1]
    parts: tuple[list[torch.Tensor], ...] = ([], [], [])
    for start, count, length in _runs(ends):
        q, k, v = (_sequences(each, start, count, length, heads) for each in (query, key, value))
        back, out = (_sequences(each.transpose(1, 2), start, count, length, heads) for each in (grad, found))
        sums = _sequences(log_sum.transpose(1, 2)[..., None], start, count, length, heads)[..., 0]
        mask = _mask(length, window, is_chunked, q)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            back, q, k, v, out, sums, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        parts[0].append(_to_row(grads[0], query.shape))
        for into, each in zip(parts[1:], grads[1:], strict=True):
            # Each key head has served H / G query heads.
            summed = each if groups == heads else each.unflatten(1, (groups, -1)).sum(2)
            into.append(_to_row(summed, key.shape))
    dq, dk, dv = (torch.cat(part, dim=1).transpose(1, 2) for part in parts)
    return dq, dk, dv


def _runs(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield first position, number and length of neighbouring sequences of one length."""
    places = ends.tolist()
    start = 0
    for length, same in groupby(stop - first for first, stop in pairwise(places)):
        count = len(list(same))
        yield start, count, length
        start += count * length


def _sequences(heads: torch.Tensor, start: int, count: int, length: int, num_heads: int) -> torch.Tensor:
    """Return `[n * count, H, length, D]` of `[n, H or G, s, D]`."""
    part = heads[:, :, start : start + count * length].unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1)
    repeat = num_heads // part.shape[1]
    return part if repeat == 1 else part.repeat_interleave(repeat, dim=1)


def _to_row(part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return `[n, count * length, H, D]` of `[n * count, H, length, D]`."""
    return part.transpose(1, 2).unflatten(0, (shape[0], -1)).flatten(1, 2)


def _mask(length: int, window: int, is_chunked: bool, query: torch.Tensor) -> torch.Tensor | None:
    """Return `[length, length]`: what is added to the scores; None where every earlier token is seen."""
    if not 0 < window < length:
        return None
    place = torch.arange(length)
    near = place[:, None] // window == place // window if is_chunked else place[:, None] - place < window
    is_seen = (place[:, None] >= place) & near
    return torch.zeros(length, length, dtype=query.dtype).masked_fill_(~is_seen, float("-inf"))


@segment_attention.register_fake
def _shapes(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: object) -> tuple[torch.Tensor, ...]:
    n, heads, s, _dim = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(n, s, heads, value.shape[3]), query.new_empty(n, s, heads, dtype=dtype)


@_backward_op.register_fake
def _shapes_of_gradients(_: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in inputs[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ends, ctx.window, ctx.is_chunked, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, ends)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    grads = _backward_op(grad, *ctx.saved_tensors, ctx.window, ctx.is_chunked, ctx.scale)
    return *grads, None, None, None, None


segment_attention.register_autograd(_backward, setup_context=_keep)


try:  # An optional kernel of its own package, for half precision on GPU.
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
except ImportError:
    flash_attn_varlen_func = None

__all__ = ["ATTENTION_NAME", "Pattern", "Segments", "segments_are_known", "varlen_attention"]

ATTENTION_NAME = "nrl_varlen"
MOST_GROUPS = 4
"""Most calls of attention in a pass of one rank where one operation cannot serve it."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
LEAST_CAPACITY = 2048
"""Least length that is announced to the kernel, so that it does not change with every microbatch."""


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Runs of queries of as many sequences, and the keys that they may see.

    A sequence that is shorter than the others is filled up with its last position; those queries are not looked at, and
    no earlier one sees those keys.
    """

    queries: torch.Tensor
    """`[g, q]` int64: local positions."""
    keys: torch.Tensor
    """`[g, k]` int64: positions of the row, k at least q; the last query sees all k."""


class Segments:
    """The beginnings and ends of sequences in the rows of a pass.

    No dataclass: FSDP would copy one for every layer, and with it all that is made once per microbatch.

    Example:
        Lengths 8 and 4 on rank 0 of 2: chunks of 2 and 1 tokens.
        >>> Segments(lengths=(8, 4), cp_size=2, cp_rank=0).local_positions().tolist()
        [0, 1, 6, 7, 8, 11]
    """

    def __init__(
        self,
        *,
        lengths: tuple[int, ...],
        cp_size: int = 1,
        cp_rank: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Args:
        lengths: tokens of each sequence over all context ranks, padding included; the same in each of the n rows.
        group: context-parallel ranks; None on one.
        device: of the pass and its positions; None means the CPU.
        """
        self.lengths, self.cp_size, self.cp_rank, self.group = lengths, cp_size, cp_rank, group
        self.device = device or torch.device("cpu")
        pieces = 2 * cp_size if cp_size > 1 else 1
        uneven = [length for length in lengths if length % pieces]
        if uneven:
            raise ValueError(f"a sequence of {uneven[0]} tokens does not divide into {pieces} chunks; pad it")
        ends = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
        self.ends = ends.to(self.device, non_blocking=True)
        """`[g + 1]` int32: first position of each sequence, and S."""
        self.capacity = max(LEAST_CAPACITY, 1 << (max(lengths, default=1) - 1).bit_length())
        """A power of two that no length exceeds, for kernels."""

    def local_positions(self, rank: int | None = None) -> torch.Tensor:
        """Return `[s]` int64 on the CPU: positions of the row that a rank holds, in its order."""
        rank = self.cp_rank if rank is None else rank
        parts = [
            np.arange(start + first, start + stop)
            for start, length in zip(self._starts, self.lengths, strict=True)
            for first, stop in self._pieces(rank, length)
        ]
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))

    @cached_property
    def row_order(self) -> torch.Tensor:
        """Return `[S]` int64: index into all ranks' positions side by side that puts them in the row's order."""
        order = torch.cat([self.local_positions(rank) for rank in range(self.cp_size)]).argsort()
        return order.to(self.device, non_blocking=True)

    @cached_property
    def runs(self) -> list[KeyRun]:
        """Return all attention of this rank: sequences of like lengths together, so that there are few calls."""
        longest_of: dict[int, int] = _grouped(self.lengths) if self.cp_size == 1 else {}
        together: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        local = 0
        for start, length in zip(self._starts, self.lengths, strict=True):
            for first, stop in self._pieces(self.cp_rank, length):
                filled = longest_of.get(length, length) - length
                last = length - 1 if self.cp_size == 1 else stop
                together.setdefault((stop - first + filled, stop + filled), []).append((local, start, last))
                local += stop - first
        runs = []
        for (queries, keys), places in together.items():
            local_g, start_g, last_g = np.array(places).T
            runs.append(KeyRun(self._ranges(local_g, queries, last_g), self._ranges(start_g, keys, last_g)))
        return runs

    @cached_property
    def local_order(self) -> torch.Tensor:
        """Return `[s]` int64: index into the queries of all runs, one after the other, that puts them in local
        order."""
        positions = torch.cat([run.queries.flatten() for run in self.runs]).cpu().numpy()
        # The first of several places is the query itself, the others fill its sequence up.
        return torch.from_numpy(np.unique(positions, return_index=True)[1]).to(self.device)

    @property
    def _starts(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))[:-1]

    def _pieces(self, rank: int, length: int) -> list[tuple[int, int]]:
        """Return first and last + 1 position of each run of a sequence that a rank holds."""
        if self.cp_size == 1:
            return [(0, length)]
        chunk = length // (2 * self.cp_size)
        return [(place * chunk, (place + 1) * chunk) for place in (rank, 2 * self.cp_size - 1 - rank)]

    def _ranges(self, start_g: np.ndarray, count: int, last_g: np.ndarray) -> torch.Tensor:
        places = start_g[:, None] + np.minimum(np.arange(count), last_g[:, None])
        return torch.from_numpy(places).to(self.device)


@lru_cache(maxsize=64)
def _grouped(lengths: tuple[int, ...]) -> dict[int, int]:
    """Return length -> longest of its group, of at most `MOST_GROUPS` groups with the least attention in all."""
    counts = Counter(lengths)
    length_d = np.array(sorted(counts))
    before_d = np.cumsum([0, *(counts[length] for length in length_d.tolist())])
    # cost[first, last]: attention of the lengths from first to last as one group.
    cost_dd = (before_d[None, 1:] - before_d[:-1, None]) * length_d.astype(float) ** 2
    cost_dd[np.tril_indices(len(length_d), -1)] = np.inf
    best_d, cuts = cost_dd[0], []
    for _ in range(min(MOST_GROUPS, len(length_d)) - 1):
        whole_dd = np.concatenate([[np.inf], best_d[:-1]])[:, None] + cost_dd
        cuts.append(whole_dd.argmin(0))
        best_d = whole_dd.min(0)
    longest_of: dict[int, int] = {}
    last = len(length_d) - 1
    for cut_d in reversed([np.zeros(len(length_d), dtype=int), *cuts]):
        first = int(cut_d[last])
        longest_of |= {int(length): int(length_d[last]) for length in length_d[first : last + 1]}
        last = first - 1
    return longest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """The earlier tokens of its sequence that a token sees, as the mask of its layer says."""

    window: int
    """Tokens that a token sees, itself included."""
    is_chunked: bool = False
    """The sequence is cut into runs of `window` tokens, and a token sees its own run only (Llama 4)."""

    @classmethod
    def of_mask(
        cls, *, local_size: int | None = None, use_vmap: bool = False, config: PretrainedConfig, **_: object
    ) -> Pattern | None:
        """Return what takes the place of a mask in a model; called by transformers as a mask function.

        Args:
            local_size: the window or chunk of the layers that the mask is for; None: all earlier tokens.
            use_vmap: the model joins another pattern to the usual one.
            config: of the text model.

        Raises:
            ValueError: a pattern of the model's own.
        """
        if use_vmap:
            raise ValueError(f"{config.model_type!r} masks attention by its own pattern")
        if local_size is None:
            return None
        given = config.to_dict()
        is_chunked = given.get("attention_chunk_size") == local_size
        if is_chunked and given.get("sliding_window") == local_size:
            raise ValueError(f"{config.model_type!r} has windows and chunks of {local_size} tokens, which look alike")
        return cls(window=local_size, is_chunked=is_chunked)

    def mask(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """Return `[q, k]` bool: True where a key is seen; the last query is at the place of the last key."""
        place_q1 = torch.arange(keys - queries, keys, device=device)[:, None]
        place_k = torch.arange(keys, device=device)
        near = place_q1 // self.window == place_k // self.window
        return (place_q1 >= place_k) & (near if self.is_chunked else place_q1 - place_k < self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    scaling: float | None
    dropout: float
    pattern: Pattern | None
    softcap: float | None = None
    """Scores are bent to lie between minus and plus this number."""
    sinks: torch.Tensor | None = None
    """`[H]`: a score of each head that takes part in the softmax, and has no value."""

    @property
    def has_own_scores(self) -> bool:
        """Return whether scores must be computed here, since no fused kernel has what they need."""
        return self.softcap is not None or self.sinks is not None

    @property
    def is_plain(self) -> bool:
        """Return whether one operation can serve all sequences of a pass."""
        return not self.has_own_scores and self.dropout == 0.0


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Pattern | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return attention of a Hugging Face layer (collective over the context group).

    Args:
        query: `[n, H, s, D]`; key and value `[n, G, s, D]`, H a multiple of G.
        attention_mask: None means that a token sees all earlier ones. Also where layers pass their `sliding_window`,
            the mask is what counts, as in the other implementations of Hugging Face.
        segments: of this pass; None treats each row as one sequence.
        softcap: largest magnitude of a score.
        s_aux: sinks, `[H]`.

    Returns:
        `[n, s, H, D]` and no weights.

    Raises:
        ValueError: a mask that the model has made by itself.
    """
    if attention_mask is not None and not isinstance(attention_mask, Pattern):
        raise ValueError(f"{type(module).__name__} makes its own mask, which attention over segments cannot follow")
    segments = segments or Segments(lengths=(query.shape[2],), device=query.device)
    options = _Options(scaling=scaling, dropout=dropout, pattern=attention_mask, softcap=softcap, sinks=s_aux)
    if segments.group is None and options.is_plain and query.shape[3] == value.shape[3]:
        window = 0 if options.pattern is None else options.pattern.window
        is_chunked = options.pattern is not None and options.pattern.is_chunked
        if query.device.type == "cpu":
            return segment_attention(query, key, value, segments.ends, window, is_chunked, scaling)[0], None
        if _has_varlen(query, is_chunked=is_chunked):
            if flash_attn_varlen_func is not None:
                return _flash(query, key, value, segments, options), None
            ends, most = segments.ends, segments.capacity
            found = varlen_on_device(query, key, value, ends, most=most, window=window, scale=scaling)
            return found, None
    if segments.group is not None:
        key = gather_along(key, segments.group, dim=2).index_select(2, segments.row_order)
        value = gather_along(value, segments.group, dim=2).index_select(2, segments.row_order)
    elif len(segments.lengths) == 1:
        return _attend(query, key, value, options).transpose(1, 2).contiguous(), None
    outputs = []
    for run in segments.runs:
        q = _take(query, run.queries)
        k, v = _take(key, run.keys), _take(value, run.keys)
        found = _attend(q, k, v, options)
        outputs.append(found.unflatten(0, (query.shape[0], -1)).transpose(2, 3).flatten(1, 2))
    return torch.cat(outputs, dim=1).index_select(1, segments.local_order), None


def _take(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return `[n, H, S, D]` -> `[n x g, H, q, D]`."""
    taken = heads.index_select(2, positions.flatten()).unflatten(2, tuple(positions.shape))
    return taken.transpose(1, 2).flatten(0, 1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: _Options) -> torch.Tensor:
    """The last query sees every key in its window, each earlier one a key less."""
    repeat = q.shape[1] // k.shape[1]
    # Fused kernels of half precision on CUDA take fewer key heads; others would fall back to whole scores.
    is_grouped = repeat > 1 and q.is_cuda and q.dtype in HALF_DTYPES and not options.has_own_scores
    if repeat > 1 and not is_grouped:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    queries, keys = q.shape[2], k.shape[2]
    pattern = options.pattern if options.pattern is not None and options.pattern.window < keys else None
    if options.has_own_scores:
        return _attend_by_scores(q, k, v, pattern, options)
    attend = partial(
        scaled_dot_product_attention, dropout_p=options.dropout, scale=options.scaling, enable_gqa=is_grouped
    )
    if pattern is not None:
        return attend(q, k, v, attn_mask=pattern.mask(queries, keys, q.device))
    if queries == keys:
        return attend(q, k, v, is_causal=True)
    if q.is_cuda and not is_dispatch_intercepted():
        return attend(q, k, v, attn_mask=causal_lower_right(queries, keys))
    # What intercepts operations, such as selective recomputation, does not know torch's own class of masks.
    return attend(q, k, v, attn_mask=Pattern(window=keys).mask(queries, keys, q.device))


def _attend_by_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern | None, options: _Options
) -> torch.Tensor:
    """Return attention written out, for scores that are capped (Gemma 2) and heads with sinks (gpt-oss)."""
    queries, keys = q.shape[2], k.shape[2]
    scores_nHqk = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if options.scaling is None else options.scaling)
    if options.softcap is not None:
        scores_nHqk = torch.tanh(scores_nHqk / options.softcap) * options.softcap
    is_seen_qk = (pattern or Pattern(window=keys)).mask(queries, keys, q.device)
    scores_nHqk = scores_nHqk.masked_fill(~is_seen_qk, torch.finfo(scores_nHqk.dtype).min)
    if options.sinks is not None:
        sinks_nHq1 = options.sinks.to(scores_nHqk.dtype).view(1, -1, 1, 1).expand(*scores_nHqk.shape[:3], 1)
        scores_nHqk = torch.cat([scores_nHqk, sinks_nHq1], dim=-1)
    weights_nHqk = scores_nHqk.softmax(-1, dtype=torch.float32).to(v.dtype)[..., :keys]
    return torch.nn.functional.dropout(weights_nHqk, options.dropout) @ v


def _has_varlen(query: torch.Tensor, *, is_chunked: bool) -> bool:
    """Return whether one kernel on CUDA serves all sequences of a packed row."""
    is_half = query.is_cuda and query.dtype in HALF_DTYPES
    return is_half and not is_chunked and query.shape[0] == 1 and query.shape[3] <= MOST_HEAD_DIM


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, options: _Options
) -> torch.Tensor:
    """Return all sequences of the row in one kernel of the package flash-attn."""
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    ends, most = segments.ends, segments.capacity
    back = -1 if options.pattern is None else options.pattern.window - 1
    result: torch.Tensor = flash_attn_varlen_func(
        *(*flat, ends, ends, most, most),
        softmax_scale=options.scaling,
        causal=True,
        window_size=(back, 0),
        # The package has a flag of its own, for its backward pass.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return result[None]


@contextmanager
def segments_are_known() -> Iterator[None]:
    """Keep transformers from looking for packed sequences among the positions meanwhile: it would wait for the device,
    and masks of this implementation do not use what it finds."""
    own = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _find_nothing
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = own


def _find_nothing(position_ids: torch.Tensor) -> None:
    """Take the place of `find_packed_sequence_indices`."""


AttentionInterface.register(ATTENTION_NAME, varlen_attention)
# No mask is built: segments separate sequences, and a layer learns its window.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, Pattern.of_mask)
