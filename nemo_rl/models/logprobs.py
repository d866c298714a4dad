"""Log-probabilities of given tokens from logits, and the top-k / top-p filter that sampling uses as well.

Called by the training worker and the embedded engine. Invariant: both sides use `filter_logits`, so a token that was
sampled under top-k or top-p has the same log-probability in the trainer. Shapes: M positions, N rows, T tokens,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx

__all__ = ["SamplingView", "filter_logits", "logprobs_from_logits", "token_logprobs"]

# Float32 numbers of one chunk of logits (16 MiB): bounds what the softmax holds at one time.
CHUNK_ELEMENTS = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingView:
    """The distribution that tokens were drawn from, as a transformation of the model's logits."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected a positive number, got {self.temperature!r}")

    @property
    def has_filter(self) -> bool:
        return self.top_k is not None or self.top_p < 1.0


def filter_logits(
    logits_MV: torch.Tensor, *, top_k: int | None, top_p: float, keep_M: torch.Tensor | None = None
) -> torch.Tensor:
    """Sets logits outside the top-k and then the top-p set to -inf; ties with the last one kept are kept.

    `keep_M` names one token per position that is never removed: a token that was sampled may fall outside the set
    under other weights, and its log-probability must stay finite.
    """
    vocab = logits_MV.shape[-1]
    kept = torch.ones_like(logits_MV, dtype=torch.bool)
    if top_k is not None and top_k < vocab:
        kept &= logits_MV >= logits_MV.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1.0:
        ranked = logits_MV.masked_fill(~kept, float("-inf")).sort(dim=-1, descending=True).values
        mass = ranked.softmax(-1)
        inside = mass.cumsum(-1) - mass < top_p
        last = ranked.gather(-1, inside.sum(-1, keepdim=True).sub_(1).clamp_(min=0))
        kept &= logits_MV >= last
    if keep_M is not None:
        kept.scatter_(-1, keep_M[:, None], True)
    return logits_MV.masked_fill(~kept, float("-inf"))


def token_logprobs(logits_MV: torch.Tensor, targets_M: torch.Tensor, *, view: SamplingView) -> torch.Tensor:
    """`[M]` float32 log-probabilities of `targets_M`, differentiable.

    Works through chunks of positions in both passes: beside the logits themselves only one chunk in float32 is held.
    """
    result: torch.Tensor = _ChunkedLogprobs.apply(logits_MV, targets_M.long(), view)  # type: ignore[no-untyped-call]
    return result


def logprobs_from_logits(logits_NTV: torch.Tensor, input_ids_NT: torch.Tensor, *, view: SamplingView) -> torch.Tensor:
    """`[N, T]` float32: log pi(token t | tokens < t) at position t; position 0 is 0."""
    rows, width = input_ids_NT.shape
    flat = token_logprobs(logits_NTV[:, :-1].flatten(0, 1), input_ids_NT[:, 1:].flatten(), view=view)
    return torch.nn.functional.pad(flat.view(rows, width - 1), (1, 0))


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps the logits in their own dtype and recomputes each chunk's softmax in the backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, logits_MV: torch.Tensor, targets_M: torch.Tensor, view: SamplingView
    ) -> torch.Tensor:
        logprobs_M = logits_MV.new_empty(targets_M.shape, dtype=torch.float32)
        for rows in _chunks(logits_MV):
            scores = _scores(logits_MV[rows], targets_M[rows], view)
            picked = scores.gather(-1, targets_M[rows, None]).squeeze(-1)
            logprobs_M[rows] = picked - scores.logsumexp(-1)
        ctx.save_for_backward(logits_MV, targets_M)
        ctx.view = view  # type: ignore[attr-defined]
        return logprobs_M

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_M: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        logits_MV, targets_M = ctx.saved_tensors  # type: ignore[attr-defined]
        view: SamplingView = ctx.view  # type: ignore[attr-defined]
        grad_MV = torch.empty_like(logits_MV)
        for rows in _chunks(logits_MV):
            scale = grad_M[rows, None] / view.temperature
            chunk = _scores(logits_MV[rows], targets_M[rows], view).softmax(-1).mul_(-scale)
            chunk.scatter_add_(-1, targets_M[rows, None], scale)
            grad_MV[rows] = chunk.to(grad_MV.dtype)
        return grad_MV, None, None


def _chunks(logits_MV: torch.Tensor) -> list[slice]:
    count, vocab = logits_MV.shape
    step = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _scores(logits_MV: torch.Tensor, targets_M: torch.Tensor, view: SamplingView) -> torch.Tensor:
    scores = logits_MV.float() / view.temperature
    if view.has_filter:
        scores = filter_logits(scores, top_k=view.top_k, top_p=view.top_p, keep_M=targets_M)
    return scores
