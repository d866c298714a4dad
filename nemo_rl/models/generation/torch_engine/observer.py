"""`DecodeObserver`: what the decode loop tells about the forward passes of a batch of rows, whoever listens.

Called by `decode_rows`. Invariant: an observer only looks; `NO_OBSERVER` costs a call. Shapes: P distinct prompts,
W width of the prompts, N rows of the batch, B live rows.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["NO_OBSERVER", "DecodeObserver"]


class DecodeObserver(Protocol):
    """Looks on while the rows of one batch are decoded."""

    def prompts(self, ids_PW: torch.Tensor, mask_PW: torch.Tensor, row_slot_N: torch.Tensor) -> None:
        """The forward pass over the distinct prompts follows; logits are computed at the last position alone.

        Args:
            ids_PW: int64, padded on the left.
            mask_PW: int64, 0 where padding lies.
            row_slot_N: which of the prompts a row has.
        """

    def turn(self, token_B: torch.Tensor, live_B: torch.Tensor) -> None:
        """The forward pass over one more token of each live row follows.

        Args:
            token_B: int64, drawn in the turn before.
            live_B: number of each row in the batch.
        """


class _NoObserver:
    def prompts(self, ids_PW: torch.Tensor, mask_PW: torch.Tensor, row_slot_N: torch.Tensor) -> None:
        pass

    def turn(self, token_B: torch.Tensor, live_B: torch.Tensor) -> None:
        pass


NO_OBSERVER: DecodeObserver = _NoObserver()
"""Nobody looks on."""
