"""The most likely tokens of a distribution.

Called by the policy workers for distillation: a teacher writes its top-k tokens with their log-probabilities. They are
those of the whole vocabulary, whatever part of it a rank holds; of the sampling only the temperature counts. Shapes: M
positions, V columns of logits on this rank, K tokens of a set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.models.head.lazy_logits import LazyLogits
from nemo_rl.models.head.logprobs import VocabShard, gathered

__all__ = ["TopTokens", "top_k_logprobs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopTokens:
    """A request for the most likely tokens of distributions."""

    k: int
    vocab_size: int | None = None
    """Tokens from this id on have no probability: the model that learns has no logits for them. None: all count."""


def top_k_logprobs(
    logits: LazyLogits, wanted: TopTokens, *, temperature: float, shard: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities `[M, K + 1]` float32, largest first and last that of all other tokens together (-inf
    where there are none), and the ids of the K `[M, K]` int64; without gradient.

    With a `shard` the call is collective over its group: each rank sends its own k largest and its parts of the sums.
    """
    num_rows, width = logits.shape
    first, device = 0 if shard is None else shard.first, logits.hidden_MD.device
    kept = min(wanted.k, width)
    values_MK = torch.empty(num_rows, kept, dtype=torch.float32, device=device)
    ids_MK = torch.empty(num_rows, kept, dtype=torch.int64, device=device)
    norm_M, rest_M = torch.empty(2, num_rows, dtype=torch.float32, device=device)
    for rows in logits.row_chunks():
        scores = logits.scores(rows, temperature=temperature).float()
        if wanted.vocab_size is not None:
            outside = torch.arange(width, device=device) >= wanted.vocab_size - first
            scores = scores.masked_fill(outside, float("-inf"))
        norm_M[rows] = scores.logsumexp(-1)
        values_MK[rows], ids_MK[rows] = top = scores.topk(kept, dim=-1)
        # One minus the sum of the others would have the rounding of that sum, far more than what a sure teacher leaves.
        rest_M[rows] = scores.scatter(-1, top.indices, float("-inf")).logsumexp(-1)
    ids_MK += first
    if shard is not None and num_rows:
        norm_M, rests = gathered(norm_M, shard).logsumexp(0), gathered(rest_M, shard)
        every_value = gathered(values_MK, shard).transpose(0, 1).flatten(1)
        every_id = gathered(ids_MK, shard).transpose(0, 1).flatten(1)
        values_MK, place_MK = every_value.topk(wanted.k, dim=-1)
        ids_MK = every_id.gather(-1, place_MK)
        left = every_value.scatter(-1, place_MK, float("-inf"))
        rest_M = torch.cat([rests.T, left], dim=-1).logsumexp(-1)
    if values_MK.shape[1] != wanted.k:
        raise ValueError(f"expected k of at most the vocabulary, got {wanted.k} of {values_MK.shape[1]} tokens")
    return torch.cat([values_MK, rest_M[:, None]], dim=-1) - norm_M[:, None], ids_MK
