"""`LazyLogits`: logits that are computed where they are read, out of hidden states and the weights of a head.

Read by `models.logprobs` and `models.top_k`, one tile of rows or columns at a time, and again in the backward pass.
Invariant: logits of more than one tile never exist at one time, unless they were given whole. Shapes: M positions, D
hidden size, V this rank's columns of the vocabulary, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

__all__ = ["CHUNK_ELEMENTS", "HeadGradients", "LazyLogits", "rows_per_chunk"]

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
