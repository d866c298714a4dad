"""`LazyLogits`: logits that are computed where they are read, out of hidden states and the weights of a head.

Read by `logprobs`, one tile of rows or columns at a time, and again in the backward pass.
Invariant: logits of more than one tile never exist at one time, unless they were given whole. Shapes: M positions, D
hidden size, V this rank's columns of the vocabulary, r rank of an adapter.

Sampling masks: the tokens that top-k and top-p left of the vocabulary, as the engine that sampled had them.

Recorded by the embedded engine, read by the policy worker's passes. Invariant: what is read is the recorded set,
whatever the trainer's own logits are.

On the wire a row is one run of uint8: numbers in LEB128 (seven bits to a byte, the lowest first, the eighth bit says
that more follow), the sets of its response tokens in order. A set lists ids in rising order, each as its distance to
the one before it, and ends with 1: these were kept, or with 2: these were dropped, where more than half was kept. The
token that was sampled is in its set and in no list. So a set of one token is one byte, and so is a whole vocabulary.
No byte of a number is 0, which is what fills a row up.

    Example: kept {3, 5, 200}, 5 sampled      3 - (-1) = 4, 200 - 3 = 197 -> numbers 6, 199, 1 -> bytes 6, 199, 1, 1

Shapes: E listed ids, B live rows, V vocabulary, N rows, n rows of a microbatch, S bytes of its longest row, Y bytes,
W numbers, Z sets, t tokens of its longest row, m scored tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl.errors import FieldNotProduced

__all__ = [
    "BEFORE_STEPS",
    "CHUNK_ELEMENTS",
    "SUPPORT",
    "HeadGradients",
    "KeptSets",
    "LazyLogits",
    "SupportRecorder",
    "decode_support",
    "rows_per_chunk",
]


SUPPORT = "sampling_support"
"""Name of the column."""
KEPT, DROPPED = 1, 2
"""Ends of a set: its list is of ids that were kept, or dropped."""
BEFORE_STEPS = 2
"""Added to a distance, which is at least 1."""
PAYLOAD, MORE = 0x7F, 0x80
"""Bits of a byte: seven of the number, and one for another byte that follows."""
MOST_BYTES = 5
"""Most bytes of a number of 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSets:
    """The sampling mask of each scored token, as pairs of its number and an id, in the order of the numbers."""

    place_E: torch.Tensor
    """int64, numbers of the scored tokens."""
    token_E: torch.Tensor
    """int64 ids."""
    is_dropped_m: torch.Tensor
    """bool: the token's ids are those that are not in its set."""

    def fill(self, scores: torch.Tensor, rows: slice, *, first: int) -> torch.Tensor:
        """Return the scores of `rows`, -inf outside their sets.

        Args:
            first: token of the first column; ids before it or behind the last one are another rank's.
        """
        count, width = scores.shape
        place, column = self.place_E - rows.start, self.token_E - first
        is_here = (place >= 0) & (place < count) & (column >= 0) & (column < width)
        # No number is read on the host: pairs of other rows and columns mark an element behind the last one.
        is_listed = torch.zeros(count * width + 1, dtype=torch.bool, device=scores.device)
        is_listed[torch.where(is_here, place * width + column, count * width)] = True
        is_outside = is_listed[:-1].view(count, width) == self.is_dropped_m[rows, None]
        return scores.masked_fill(is_outside, float("-inf"))


class SupportRecorder:
    """Records the sampling masks of one batch of rows, turn by turn."""

    def __init__(self) -> None:
        self._turns: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_turn(self, kept_BV: torch.Tensor, token_B: torch.Tensor, live_B: torch.Tensor) -> None:
        """Args:
        kept_BV: bool.
        token_B: what was sampled, counted as kept.
        live_B: numbers of the rows.
        """
        is_other_BV = kept_BV.scatter(1, token_B[:, None], False)
        is_dropped_B = 2 * is_other_BV.sum(1) >= kept_BV.shape[1]
        listed_BV = torch.where(is_dropped_B[:, None], ~kept_BV.scatter(1, token_B[:, None], True), is_other_BV)
        place_E, token_E = listed_BV.nonzero(as_tuple=True)
        before_E = torch.cat([token_E.new_full((1,), -1), token_E[:-1]])[: len(token_E)]
        before_E[1:][place_E[1:] != place_E[:-1]] = -1
        ends_B = torch.where(is_dropped_B, DROPPED, KEPT)
        number_W = torch.cat([token_E - before_E + BEFORE_STEPS, ends_B])
        place_W = torch.cat([place_E, torch.arange(len(live_B), device=place_E.device)])
        order_W = place_W.argsort(stable=True)
        self._turns.append((live_B[place_W[order_W]].cpu(), number_W[order_W].to(torch.int32).cpu()))

    def rows(self, count: int) -> tuple[torch.Tensor, ...]:
        return self.take(range(count))

    def forget(self, rows: Collection[int]) -> None:
        gone = torch.tensor(sorted(rows), dtype=torch.int64)
        kept = [~torch.isin(row_W, gone) for row_W, _ in self._turns]
        self._turns = [
            (row_W[is_kept], number_W[is_kept]) for (row_W, number_W), is_kept in zip(self._turns, kept, strict=True)
        ]

    def take(self, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return the sets of the rows with these numbers, each end to end, and forget them."""
        row_W = torch.cat([row for row, _ in self._turns])
        number_W = torch.cat([numbers for _, numbers in self._turns])
        place = torch.full((max(int(row_W.max()), *rows) + 1,), -1, dtype=torch.int64)
        place[torch.tensor(rows)] = torch.arange(len(rows))
        place_W = place[row_W]
        is_other_W = place_W < 0
        self._turns = [(row_W[is_other_W], number_W[is_other_W])]
        place_W, number_W = place_W[~is_other_W], number_W[~is_other_W]
        order_W = place_W.argsort(stable=True)
        byte_Y, size_W = _to_bytes(number_W[order_W])
        size_n = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, place_W[order_W], size_W)
        return byte_Y.split(size_n.tolist())


def decode_support(
    support_nS: torch.Tensor,
    ids_nt: torch.Tensor,
    is_response_nt: torch.Tensor,
    row_m: torch.Tensor,
    column_m: torch.Tensor,
) -> KeptSets:
    """Return the sets of the scored tokens of a microbatch.

    Args:
        support_nS: uint8, filled up with 0.
        ids_nt: tokens.
        is_response_nt: bool, tokens that were sampled.
        row_m: row of each scored token.
        column_m: its position in the row.

    Raises:
        FieldNotProduced: a row has not one set for each sampled token, or a scored token was not sampled.
    """
    number_W, row_W = _to_numbers(support_nS)
    is_end_W = number_W <= BEFORE_STEPS
    sets_n = torch.bincount(row_W[is_end_W], minlength=len(support_nS))
    sampled_n = is_response_nt.sum(1)
    if not torch.equal(sets_n, sampled_n) or not bool(is_response_nt[row_m, column_m].all()):
        raise FieldNotProduced(
            f"{SUPPORT}: expected one sampling mask for every sampled token, {sampled_n.tolist()} of them in the "
            f"rows of a microbatch, and no other tokens to be scored; got {sets_n.tolist()} masks. Rows and masks must "
            "come from the same rollout, and token_mask must mark the sampled tokens alone"
        )
    place_nt = torch.full_like(is_response_nt, -1, dtype=torch.int64)
    place_nt[row_m, column_m] = torch.arange(len(row_m), device=row_m.device)
    # Sets and sampled tokens are in the same order.
    place_Z, is_dropped_Z = place_nt[is_response_nt], number_W[is_end_W] == DROPPED
    set_W = is_end_W.cumsum(0) - is_end_W.long()
    total_W = torch.where(is_end_W, 0, number_W - BEFORE_STEPS).cumsum(0)
    before_Z = torch.cat([total_W.new_zeros(1), total_W[is_end_W]])
    set_E = set_W[~is_end_W]
    token_E = total_W[~is_end_W] - before_Z[set_E] - 1
    is_dropped_m = torch.zeros_like(row_m, dtype=torch.bool)
    is_scored_Z = place_Z >= 0
    is_dropped_m[place_Z[is_scored_Z]] = is_dropped_Z[is_scored_Z]
    # A sampled token is in its set: listed with the others, or not among those that were dropped.
    [alone] = (~is_dropped_m).nonzero(as_tuple=True)
    place_E = torch.cat([place_Z[set_E], alone])
    token_E = torch.cat([token_E, ids_nt[row_m, column_m].long()[alone]])
    is_scored_E = place_E >= 0
    place_E, token_E = place_E[is_scored_E], token_E[is_scored_E]
    order = place_E.argsort(stable=True)
    return KeptSets(place_E=place_E[order], token_E=token_E[order], is_dropped_m=is_dropped_m)


def _to_bytes(number_W: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return LEB128, and how many bytes each number takes."""
    number_W = number_W.long()
    size_W = torch.ones_like(number_W)
    for place in range(1, MOST_BYTES):
        size_W += number_W >= 1 << 7 * place
    start_W = size_W.cumsum(0) - size_W
    byte_Y = torch.empty(int(size_W.sum()), dtype=torch.uint8)
    for place in range(int(size_W.max()) if len(size_W) else 0):
        has_W = size_W > place
        follows_W = torch.where(size_W[has_W] > place + 1, MORE, 0)
        byte_Y[start_W[has_W] + place] = ((number_W[has_W] >> 7 * place & PAYLOAD) | follows_W).to(torch.uint8)
    return byte_Y, size_W


def _to_numbers(support_nS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row_Y, place_Y = support_nS.nonzero(as_tuple=True)
    byte_Y = support_nS[row_Y, place_Y].long()
    is_last_Y = byte_Y < MORE
    ends = is_last_Y.nonzero()[:, 0]
    start_W = torch.cat([ends.new_zeros(1), ends[:-1] + 1])[: len(ends)]
    # Bytes behind the last number, of a column that was cut off, belong to none.
    whole = int(ends[-1]) + 1 if len(ends) else 0
    byte_Y, number_Y = byte_Y[:whole], (is_last_Y.cumsum(0) - is_last_Y.long())[:whole]
    shift_Y = 7 * (torch.arange(whole, device=byte_Y.device) - start_W[number_Y])
    number_W = byte_Y.new_zeros(len(ends)).index_add_(0, number_Y, (byte_Y & PAYLOAD) << shift_Y)
    return number_W, row_Y[ends]


CHUNK_ELEMENTS = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Type of a device -> elements of one tile of logits, which bound what the softmax holds at one time. A CPU's fit its
caches; on a GPU fewer tiles are fewer launches, and 256 Mi float32 numbers are 1 GiB."""
ALL = slice(None)


def rows_per_chunk(device_type: str, vocab: int) -> int:
    """Return the positions whose logits make one tile.

    Example:
        >>> rows_per_chunk("cpu", 151_936), rows_per_chunk("cuda", 151_936)
        (27, 1766)
    """
    return max(1, CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS["cpu"]) // max(1, vocab))


def _slices(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LazyLogits:
    """z = h W^T + u B^T + b; the logits are cap * tanh(scale * z / cap), or scale * z without a cap.

    Example:
        >>> LazyLogits.given(torch.ones(2, 3)).shape
        (2, 3)
    """

    hidden_MD: torch.Tensor
    """Hidden states; without a weight the logits themselves."""
    weight_VD: torch.Tensor | None = None
    bias_V: torch.Tensor | None = None
    narrow_Mr: torch.Tensor | None = None
    """u, the hidden states times A^T of an adapter."""
    wide_Vr: torch.Tensor | None = None
    """B of that adapter, with its scale."""
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def given(cls, logits_MV: torch.Tensor) -> LazyLogits:
        return cls(hidden_MD=logits_MV)

    def of(self, tensors: Sequence[torch.Tensor | None]) -> LazyLogits:
        """Return the same function of other `tensors`."""
        hidden, weight, bias, narrow, wide = tensors
        assert hidden is not None
        return replace(self, hidden_MD=hidden, weight_VD=weight, bias_V=bias, narrow_Mr=narrow, wide_Vr=wide)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.hidden_MD, self.weight_VD, self.bias_V, self.narrow_Mr, self.wide_Vr

    @property
    def shape(self) -> tuple[int, int]:
        width = self.hidden_MD.shape[1] if self.weight_VD is None else self.weight_VD.shape[0]
        return len(self.hidden_MD), width

    @property
    def exact(self) -> torch.dtype:
        return torch.promote_types(self.hidden_MD.dtype, torch.float32)

    def row_chunks(self) -> list[slice]:
        count, vocab = self.shape
        return _slices(count, rows_per_chunk(self.hidden_MD.device.type, vocab))

    def tiles(self, *, by_rows: bool) -> Iterator[tuple[slice, slice]]:
        """Yield rows and columns of the backward pass's tiles: a tile of all rows finishes its part of the weight's
        gradient at once.

        Args:
            by_rows: each tile has all columns, as a filter needs.
        """
        count, vocab = self.shape
        if by_rows or self.weight_VD is None:
            yield from ((rows, slice(0, vocab)) for rows in self.row_chunks())
        elif count:
            step = rows_per_chunk(self.hidden_MD.device.type, count)
            yield from ((slice(0, count), columns) for columns in _slices(vocab, step))

    def scores(self, rows: slice, columns: slice = ALL, *, temperature: float) -> torch.Tensor:
        """Return a tile of logits / temperature: in `exact` and free to be changed, or, where nothing but the product
        is to be done, as the product gave it."""
        factor = self.scale / temperature
        if self.weight_VD is None:
            product = self.hidden_MD[rows, columns]
        else:
            weight = self.weight_VD[columns].t()
            hidden = self.hidden_MD[rows]
            product = hidden @ weight if self.bias_V is None else torch.addmm(self.bias_V[columns], hidden, weight)
            if self.narrow_Mr is not None and self.wide_Vr is not None:
                product.addmm_(self.narrow_Mr[rows], self.wide_Vr[columns].t())
        if self.cap is None:
            return product if factor == 1.0 else product.to(self.exact) * factor
        return (product.to(self.exact) * (self.scale / self.cap)).tanh_().mul_(self.cap / temperature)


class HeadGradients:
    """Sums up the gradients of the tensors of `LazyLogits` over the tiles of a backward pass.

    Args:
        needed: for each of the tensors whether it has a gradient.
        factor_M: what each row of the added gradients is still to be multiplied with; None: nothing. A factor of a
            position costs less where it meets its hidden state than in a whole row of logits.
    """

    def __init__(self, logits: LazyLogits, needed: Sequence[bool], factor_M: torch.Tensor | None) -> None:
        self._logits, self._needed = logits, tuple(needed)
        self._factor = None if factor_M is None else factor_M[:, None]
        self._left = [self._times(part) for part in (logits.hidden_MD, logits.narrow_Mr)]
        self._totals: list[torch.Tensor | None] = [None] * len(logits.tensors)

    def add(self, rows: slice, columns: slice, grad: torch.Tensor) -> None:
        """Take a tile's gradient with respect to z, in the dtype of the hidden states."""
        logits, (hidden, narrow) = self._logits, self._left
        if logits.weight_VD is None:
            grad = grad if self._factor is None else grad.mul_(self._factor[rows])
            total = self._totals[0] = torch.empty_like(logits.hidden_MD) if self._totals[0] is None else self._totals[0]
            total[rows, columns] = grad
            return
        assert hidden is not None
        self._put(0, rows, grad, logits.weight_VD[columns])
        self._put(1, columns, grad.t(), hidden[rows])
        if logits.bias_V is not None:
            ones = grad.new_ones(1, len(grad)) if self._factor is None else self._factor[rows].t().to(grad.dtype)
            self._put(2, columns, grad.t(), ones.t())
        if narrow is not None and logits.wide_Vr is not None:
            self._put(3, rows, grad, logits.wide_Vr[columns])
            self._put(4, columns, grad.t(), narrow[rows])

    def finish(self) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = []
        for which, (part, is_needed) in enumerate(zip(self._logits.tensors, self._needed, strict=True)):
            total = self._totals[which]
            if part is None or not is_needed:
                found.append(None)
            elif total is None:
                found.append(torch.zeros_like(part))
            else:
                is_by_position = which in (0, 3) and self._logits.weight_VD is not None
                total = total.mul_(self._factor) if is_by_position and self._factor is not None else total
                found.append(total.reshape(part.shape).to(part.dtype))
        return tuple(found)

    def _put(self, which: int, at: slice, left: torch.Tensor, right: torch.Tensor) -> None:
        """Take a product: some rows of a gradient, which are complete, or a part of the sum of all its rows."""
        part, total = self._logits.tensors[which], self._totals[which]
        if part is None or not self._needed[which]:
            return
        if len(left) < len(part):
            if total is None:
                total = self._totals[which] = right.new_empty(len(part), right.shape[1])
            torch.mm(left, right, out=total[at])
        elif total is None:
            self._totals[which] = left @ right
        else:
            # Products in half precision are added up in float32.
            self._totals[which] = total.to(self._logits.exact).add_(left @ right)

    def _times(self, part: torch.Tensor | None) -> torch.Tensor | None:
        if part is None or self._factor is None or self._logits.weight_VD is None:
            return part
        return (part * self._factor).to(part.dtype)
