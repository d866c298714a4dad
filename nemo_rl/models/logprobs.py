"""Log-probabilities of given tokens from logits, and the top-k / top-p filter that sampling uses as well.

Called by the training worker and the embedded engine. Invariant: both sides use `filter_logits`, so a token that was
sampled under top-k or top-p has the same log-probability in the trainer. Shapes: M positions, N rows, T tokens,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from nemo_rl.models.support import KeptSets

__all__ = [
    "Extra",
    "Sampling",
    "VocabShard",
    "chunks_of",
    "filter_logits",
    "gathered",
    "js",
    "k3",
    "logprobs_with_entropy",
    "logprobs_with_squares",
    "negative_log_likelihood",
    "rows_per_chunk",
    "token_logprobs",
]


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return KL(sampler || other) of each token: exp(d) - 1 - d.

    Unbiased, for exp(d) has expectation 1 under the sampler; never negative, so tokens do not hide one another; of far
    less variance than -d (http://joschu.net/blog/kl-approx.html).
    """
    return log_ratio.exp() - 1 - log_ratio


def js(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence of each token, in expectation at most log 2.

    With m = (p_sampler + p_other) / 2: half of k3 of KL(sampler || m), and half of k3 of KL(other || m), whose samples
    are weighed by exp(d).
    """
    to_middle = torch.logaddexp(torch.zeros_like(log_ratio), log_ratio) - torch.log(torch.full_like(log_ratio, 2.0))
    return 0.5 * (k3(to_middle) + log_ratio.exp() * k3(to_middle - log_ratio))


Extra: TypeAlias = Literal["entropy", "squared_probs"]
"""Names of what may be computed of a token's whole distribution, besides the token's log-probability."""
CHUNK_ELEMENTS = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Type of a device -> elements of one chunk of logits, which bound what the softmax holds at one time. A CPU's fit its
caches; on a GPU fewer chunks are fewer launches, and 256 Mi float32 numbers are 1 GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
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

    @property
    def unfiltered(self) -> Sampling:
        return Sampling(temperature=self.temperature)


def filter_logits(
    logits_MV: torch.Tensor, *, top_k: int | None, top_p: float, keep_M: torch.Tensor | None = None
) -> torch.Tensor:
    """Set logits outside the top-k and then the top-p set to -inf; ties with the last one kept are kept.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """Logits that are split over the vocabulary: each rank of a group holds as many columns."""

    group: dist.ProcessGroup
    first: int
    """Token of this rank's first column."""


def token_logprobs(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    sampling: Sampling,
    shard: VocabShard | None = None,
    kept: KeptSets | None = None,
) -> torch.Tensor:
    """Return `[M]` float32 log-probabilities of `targets_M`, differentiable.

    Works through chunks of positions in both passes: besides the logits themselves only one chunk in float32 is held.
    With a `shard`, V are this rank's columns, and the call is collective over its group, in both passes when `sampling`
    has a filter: that needs a chunk's whole vocabulary. `kept` are the sets that were sampled from; they replace the
    filter, which would find its own.
    """
    arguments = (logits_MV, targets_M.long(), _Distribution(sampling=sampling, shard=shard, kept=kept), None)
    result: torch.Tensor = _ChunkedLogprobs.apply(*arguments)[0]  # type: ignore[no-untyped-call]
    return result


def logprobs_with_entropy(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    sampling: Sampling,
    shard: VocabShard | None = None,
    kept: KeptSets | None = None,
) -> torch.Tensor:
    """Return `[2, M]` float32, differentiable: what `token_logprobs` gives, and the entropy of each distribution.

    H = -sum p log p over the vocabulary, or over what a filter has left of it, in nats.
    """
    return _with_extra("entropy", logits_MV, targets_M, _Distribution(sampling=sampling, shard=shard, kept=kept))


def logprobs_with_squares(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    sampling: Sampling,
    shard: VocabShard | None = None,
    kept: KeptSets | None = None,
) -> torch.Tensor:
    """Return `[2, M]` float32: what `token_logprobs` gives, and the sum of p^2 of each distribution, without gradient.

    That sum is the probability that two draws are the same token.
    """
    return _with_extra("squared_probs", logits_MV, targets_M, _Distribution(sampling=sampling, shard=shard, kept=kept))


def negative_log_likelihood(logprobs: torch.Tensor, weights: torch.Tensor, *, total: float) -> torch.Tensor:
    """Return -sum of w log pi / `total`; tokens of weight 0 have no part in it, whatever their log-probability is.

    Args:
        logprobs: float32, of any shape.
        weights: of the same shape.
        total: sum of all weights, of which these may be a part.
    """
    kept = torch.where(weights > 0, logprobs, 0.0)
    return -(kept * weights).sum() / total


@dataclass(frozen=True, kw_only=True, slots=True)
class _Distribution:
    """The distribution that tokens were sampled from, and the columns of it that this rank has."""

    sampling: Sampling
    shard: VocabShard | None
    """The part of the vocabulary that this rank has, or None for all of it."""
    kept: KeptSets | None
    """The sets that were sampled from; None where a filter finds its own."""

    @property
    def needs_all(self) -> bool:
        """Return whether a filter must see the whole vocabulary of a position."""
        return self.sampling.has_filter and self.kept is None


def _with_extra(
    extra: Extra, logits_MV: torch.Tensor, targets_M: torch.Tensor, distribution: _Distribution
) -> torch.Tensor:
    arguments = (logits_MV, targets_M.long(), distribution, extra)
    return torch.stack(_ChunkedLogprobs.apply(*arguments))  # type: ignore[no-untyped-call]


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps the logits in their own dtype and recomputes each chunk's probabilities in the backward pass.

    Returns log-probabilities and, where they are asked for, entropies or sums of squares, of which only the former have
    a gradient; else None.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        logits_MV: torch.Tensor,
        targets_M: torch.Tensor,
        distribution: _Distribution,
        extra: Extra | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shard = distribution.shard
        picked_M = logits_MV.new_zeros(targets_M.shape, dtype=torch.float32)
        norm_M = torch.zeros_like(picked_M)
        entropy_M = torch.zeros_like(picked_M) if extra == "entropy" else None
        log_squares_M = torch.zeros_like(picked_M) if extra == "squared_probs" else None
        for rows in chunks_of(logits_MV):
            scores, first = _scores(logits_MV, targets_M, rows, distribution)
            column, is_here = _columns(targets_M[rows], first, scores.shape[-1])
            picked_M[rows] = torch.where(is_here, scores.gather(-1, column[:, None]).squeeze(-1), 0.0)
            norm_M[rows] = scores.logsumexp(-1)
            if log_squares_M is not None:
                log_squares_M[rows] = (2 * scores).logsumexp(-1)
            if entropy_M is not None:
                logprobs = scores.sub_(norm_M[rows, None])
                entropy_M[rows] = -_weighed(logprobs, logprobs).sum(-1)
        if shard is not None and not distribution.needs_all and len(targets_M):
            if log_squares_M is not None:
                log_squares_M = gathered(log_squares_M, shard).logsumexp(0)
            picked_M, norm_M, entropy_M = _merge(picked_M, norm_M, entropy_M, shard)
        ctx.save_for_backward(logits_MV, targets_M, norm_M, entropy_M)  # type: ignore[arg-type]
        ctx.distribution = distribution  # type: ignore[attr-defined]
        if log_squares_M is not None:
            squares_M = (log_squares_M - 2 * norm_M).exp()
            ctx.mark_non_differentiable(squares_M)
            return picked_M - norm_M, squares_M
        return picked_M - norm_M, None if entropy_M is None else entropy_M.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_M: torch.Tensor, grad_entropy_M: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        logits_MV, targets_M, norm_M, entropy_M = ctx.saved_tensors  # type: ignore[attr-defined]
        distribution: _Distribution = ctx.distribution  # type: ignore[attr-defined]
        temperature, shard = distribution.sampling.temperature, distribution.shard
        own = logits_MV.shape[-1]
        grad_MV = torch.empty_like(logits_MV)
        for rows in chunks_of(logits_MV):
            scale = grad_M[rows, None] / temperature
            scores, first = _scores(logits_MV, targets_M, rows, distribution)
            logprobs = scores.sub_(norm_M[rows, None])
            through_entropy = None
            if entropy_M is not None and grad_entropy_M is not None:
                # dH / dz = -p (log p + H)
                pull = -grad_entropy_M[rows, None] / temperature
                through_entropy = _weighed(logprobs, logprobs + entropy_M[rows, None]).mul_(pull)
            chunk = logprobs.exp_().mul_(-scale)
            column, is_here = _columns(targets_M[rows], first, scores.shape[-1])
            chunk.scatter_add_(-1, column[:, None], scale * is_here[:, None])
            if through_entropy is not None:
                chunk += through_entropy
            start = shard.first - first if shard is not None else 0
            grad_MV[rows] = chunk[:, start : start + own].to(grad_MV.dtype)
        return grad_MV, None, None, None


def _weighed(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return p times the values; 0 where a filter has left no probability, whatever the value is."""
    return torch.where(logprobs.isneginf(), 0.0, logprobs.exp() * values)


def _merge(
    picked_M: torch.Tensor, norm_M: torch.Tensor, entropy_M: torch.Tensor | None, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return numbers of the whole vocabulary from those of each rank's columns (collective)."""
    mine = torch.stack([picked_M, norm_M] if entropy_M is None else [picked_M, norm_M, entropy_M])
    everywhere = gathered(mine, shard)
    norm = everywhere[:, 1].logsumexp(0)
    if entropy_M is not None:
        # A rank has H_r of its own columns alone, which have the share s_r: H = sum s_r (H_r - log s_r). Without a
        # column of a sampling mask its share is 0 and its H_r is NaN, which counts as nothing.
        log_share = everywhere[:, 1] - norm
        entropy_M = _weighed(log_share, everywhere[:, 2] - log_share).sum(0)
    return everywhere[:, 0].sum(0), norm, entropy_M


def gathered(mine: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Return `[ranks, ...]` (collective)."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, mine, group=shard.group)
    return torch.stack(parts)


def _columns(targets_M: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return column of each target, 0 where it is elsewhere, and whether it is here."""
    is_here = (targets_M >= first) & (targets_M < first + width)
    return torch.where(is_here, targets_M - first, 0), is_here


def rows_per_chunk(device_type: str, vocab: int) -> int:
    """Return the positions whose logits make one chunk.

    Example:
        >>> rows_per_chunk("cpu", 151_936), rows_per_chunk("cuda", 151_936)
        (27, 1766)
    """
    return max(1, CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS["cpu"]) // vocab)


def chunks_of(logits_MV: torch.Tensor) -> list[slice]:
    """Return the rows of each chunk of logits."""
    count, vocab = logits_MV.shape
    step = rows_per_chunk(logits_MV.device.type, vocab)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _scores(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, rows: slice, distribution: _Distribution
) -> tuple[torch.Tensor, int]:
    """Score of `rows` in float32 and the token of their first column; a filter needs those of the whole vocabulary."""
    sampling, shard, kept = distribution.sampling, distribution.shard, distribution.kept
    scores = logits_MV[rows].float() / sampling.temperature
    if not distribution.needs_all:
        first = shard.first if shard is not None else 0
        return scores if kept is None else kept.fill(scores, rows, first=first), first
    if shard is not None:
        parts = [torch.empty_like(scores) for _ in range(dist.get_world_size(shard.group))]
        dist.all_gather(parts, scores, group=shard.group)
        scores = torch.cat(parts, dim=-1)
    return filter_logits(scores, top_k=sampling.top_k, top_p=sampling.top_p, keep_M=targets_M[rows]), 0
