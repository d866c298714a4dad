"""`PassObserver`: what runners tell about their passes, whoever listens.

Called by the runners of both engines. Invariant: an observer only looks; `NO_OBSERVER` costs a call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from nemo_rl.models.policy.interfaces import LossOutput
from nemo_rl.models.policy.microbatch import Microbatch

__all__ = ["NO_OBSERVER", "OnBackward", "PassObserver", "nothing_follows"]

OnBackward = Callable[[torch.Tensor], None]
"""Takes the output of a forward pass whose backward pass comes later, with other microbatches in between."""


class PassObserver(Protocol):
    """Looks on while the microbatches of one call run on one rank."""

    def parameters(self) -> None:
        """(collective) No weight has changed yet in this call."""

    def update(self, number: int) -> None:
        """The microbatches of the next optimizer step follow."""

    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> AbstractContextManager[OnBackward]:
        """Around a forward pass, or a forward and its backward pass where no other microbatch comes between.

        Args:
            backward_follows: the backward pass comes later and recomputes layers; what is yielded says when.
        """

    def logprobs(self, micro: Microbatch, logprobs_nt: torch.Tensor) -> None:
        """Log-probabilities of the selected tokens of a microbatch, the same on all ranks that have them."""

    def loss(self, micro: Microbatch, output: LossOutput) -> None:
        """What the loss says of a microbatch: its share of the global batch."""

    def gradients(self) -> None:
        """(collective) The gradients of a global batch are complete, and neither clipped nor used yet."""


def nothing_follows(output: torch.Tensor) -> None:
    """No instructions."""


class _NoObserver:
    def parameters(self) -> None:
        pass

    def update(self, number: int) -> None:
        pass

    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> AbstractContextManager[OnBackward]:
        return nullcontext(nothing_follows)

    def logprobs(self, micro: Microbatch, logprobs_nt: torch.Tensor) -> None:
        pass

    def loss(self, micro: Microbatch, output: LossOutput) -> None:
        pass

    def gradients(self) -> None:
        pass


NO_OBSERVER: PassObserver = _NoObserver()
"""Nobody looks on."""
