"""The most likely tokens of a distribution, and the log-probabilities of given sets of tokens.

Called by the policy workers for distillation: a teacher writes its top-k tokens with their log-probabilities, a student
computes its own at these tokens. Both are those of the whole vocabulary, whatever part of it a rank holds; of the
sampling only the temperature counts. Shapes: M positions, V columns of logits on this rank, K tokens of a set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx

from nemo_rl.models.logprobs import VocabShard, chunks_of, gathered

__all__ = ["TopTokens", "logprobs_at", "top_k_logprobs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopTokens:
    """A request for the most likely tokens of distributions."""

    k: int
    """Tokens of each distribution."""
    vocab_size: int | None = None
    """Tokens from this id on have no probability: the model that learns has no logits for them. None: all count."""


def top_k_logprobs(
    logits_MV: torch.Tensor, wanted: TopTokens, *, temperature: float, shard: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities `[M, K]` float32, largest first, and their ids `[M, K]` int64; without gradient.

    With a `shard` the call is collective over its group: each rank sends its own k largest and its part of the sum.
    """
    num_rows, width = logits_MV.shape
    first = 0 if shard is None else shard.first
    kept = min(wanted.k, width)
    values_MK = torch.empty(num_rows, kept, dtype=torch.float32, device=logits_MV.device)
    ids_MK = torch.empty(num_rows, kept, dtype=torch.int64, device=logits_MV.device)
    norm_M = torch.empty(num_rows, dtype=torch.float32, device=logits_MV.device)
    for rows in chunks_of(logits_MV):
        scores = logits_MV[rows].float() / temperature
        if wanted.vocab_size is not None:
            scores[:, max(0, wanted.vocab_size - first) :] = float("-inf")
        norm_M[rows] = scores.logsumexp(-1)
        values_MK[rows], ids_MK[rows] = scores.topk(kept, dim=-1)
    ids_MK += first
    if shard is not None and num_rows:
        norm_M = gathered(norm_M, shard).logsumexp(0)
        every_value = gathered(values_MK, shard).transpose(0, 1).flatten(1)
        every_id = gathered(ids_MK, shard).transpose(0, 1).flatten(1)
        values_MK, place_MK = every_value.topk(wanted.k, dim=-1)
        ids_MK = every_id.gather(-1, place_MK)
    if values_MK.shape[1] != wanted.k:
        raise ValueError(f"expected k of at most the vocabulary, got {wanted.k} of {values_MK.shape[1]} tokens")
    return values_MK - norm_M[:, None], ids_MK


def logprobs_at(
    logits_MV: torch.Tensor, ids_MK: torch.Tensor, *, temperature: float, shard: VocabShard | None
) -> torch.Tensor:
    """Return `[K + 1, M]` float32, differentiable: log-probabilities of the tokens of each position's set, and last of
    all tokens outside it together; -inf where there are none.

    Works through chunks of positions in both passes, as `token_logprobs` does. Collective over the group of `shard`.

    Args:
        ids_MK: distinct tokens of each position.
    """
    arguments = (logits_MV, ids_MK.long(), temperature, shard)
    result: torch.Tensor = _LogprobsAt.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _LogprobsAt(torch.autograd.Function):
    """Keeps the logits in their own dtype and recomputes each chunk's probabilities in the backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        logits_MV: torch.Tensor,
        ids_MK: torch.Tensor,
        temperature: float,
        shard: VocabShard | None,
    ) -> torch.Tensor:
        first = 0 if shard is None else shard.first
        num_rows, num_ids = ids_MK.shape
        # Scores of the set, log of the sum over the rest, log of the sum over everything.
        sums_cM = torch.zeros(num_ids + 2, num_rows, dtype=torch.float32, device=logits_MV.device)
        for rows in chunks_of(logits_MV):
            scores = logits_MV[rows].float() / temperature
            column, is_here, is_in_set = _places(ids_MK[rows], first, scores.shape[-1])
            sums_cM[:-2, rows] = torch.where(is_here, scores.gather(-1, column), 0.0).T
            sums_cM[-1, rows] = scores.logsumexp(-1)
            sums_cM[-2, rows] = scores.masked_fill_(is_in_set, float("-inf")).logsumexp(-1)
        if shard is not None and num_rows:
            everywhere = gathered(sums_cM, shard)
            sums_cM = torch.cat([everywhere[:, :-2].sum(0), everywhere[:, -2:].logsumexp(0)])
        ctx.save_for_backward(logits_MV, ids_MK, sums_cM[-2:])
        ctx.temperature, ctx.first = temperature, first  # type: ignore[attr-defined]
        return sums_cM[:-1] - sums_cM[-1]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_cM: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits_MV, ids_MK, sums_cM = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        first: int = ctx.first  # type: ignore[attr-defined]
        rest_M, norm_M = sums_cM
        # Where no token is outside the set, its share of the gradient is 0.
        rest_M = torch.where(rest_M.isneginf(), float("inf"), rest_M)
        grad_MV = torch.empty_like(logits_MV)
        for rows in chunks_of(logits_MV):
            scores = logits_MV[rows].float() / temperature
            column, is_here, is_in_set = _places(ids_MK[rows], first, scores.shape[-1])
            pull_cm = grad_cM[:, rows] / temperature
            chunk = (scores - norm_M[rows, None]).exp_().mul_(-pull_cm.sum(0)[:, None])
            outside = scores.sub_(rest_M[rows, None]).exp_().mul_(pull_cm[-1, :, None])
            chunk += outside.masked_fill_(is_in_set, 0.0)
            chunk.scatter_add_(-1, column, pull_cm[:-1].T * is_here)
            grad_MV[rows] = chunk.to(grad_MV.dtype)
        return grad_MV, None, None, None


def _places(ids_mK: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the column of each token, 0 where it is elsewhere; whether it is here; and `[m, V]` bool: columns that
    are in the set."""
    is_here = (ids_mK >= first) & (ids_mK < first + width)
    column = torch.where(is_here, ids_mK - first, 0)
    is_in_set = torch.zeros(len(ids_mK), width + 1, dtype=torch.bool, device=ids_mK.device)
    is_in_set.scatter_(-1, torch.where(is_here, column, width), True)
    return column, is_here, is_in_set[:, :width]
