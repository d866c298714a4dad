"""Log-probabilities of given tokens from logits, and the top-k / top-p filter that sampling uses as well.

Called by the training worker and the embedded engine. Invariant: both sides use `filter_logits`, so a token that was
sampled under top-k or top-p has the same log-probability in the trainer. Shapes: M positions, N rows, T tokens,
V vocabulary.

`TopTokens`, for distillation, are those of the whole vocabulary, whatever part of it a rank holds; of the sampling only
the temperature counts. K tokens of a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from nemo_rl.models.head.logits import HeadGradients, KeptSets, LazyLogits

__all__ = [
    "NO_MORE",
    "Sampling",
    "TopTokens",
    "VocabShard",
    "WantedLines",
    "filter_logits",
    "gathered",
    "js",
    "k3",
    "negative_log_likelihood",
    "repeatable_cumsum",
    "token_lines",
    "token_logprobs",
    "top_k_logprobs",
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
        inside = repeatable_cumsum(mass) - mass < top_p
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WantedLines:
    """Numbers that are wanted of each position's distribution besides the log-probability of its target.

    A call gives a line for each, in the order of the fields, after that of the log-probabilities. A line without a
    filter is of the whole vocabulary, with temperature.
    """

    entropy: bool = False
    """H = -sum p log p over the vocabulary, or over what a filter has left of it, in nats."""
    squares: bool = False
    """The sum of p^2, without gradient: the probability that two draws are the same token."""
    unfiltered: bool = False
    """Log-probability of the target without a filter."""
    ids_MK: torch.Tensor | None = None
    """Distinct tokens of each position: K lines of their log-probabilities without a filter, and one of all other
    tokens together; -inf where there are none."""


NO_MORE = WantedLines()
"""The log-probability of the target alone."""


def token_lines(
    logits: LazyLogits | torch.Tensor,
    targets_M: torch.Tensor,
    *,
    sampling: Sampling,
    shard: VocabShard | None = None,
    kept: KeptSets | None = None,
    lines: WantedLines = NO_MORE,
) -> torch.Tensor:
    """Return `[C, M]`, float32 or better, differentiable: log-probabilities of `targets_M`, then the other lines.

    Works through tiles of logits in both passes, which are computed anew in the backward pass: besides hidden states
    and weights, or logits that were given whole, one tile is held. With a `shard`, V are this rank's columns, and the
    call is collective over its group, in both passes when `sampling` has a filter: that needs a whole vocabulary. The
    gradient of hidden states is then of this rank's columns alone. `kept` are the sets that were sampled from; they
    replace the filter, which would find its own.
    """
    lazy = logits if isinstance(logits, LazyLogits) else LazyLogits.given(logits)
    empty = lazy.of((lazy.hidden_MD.new_empty(0), None, None, None, None))
    call = _LineCall(targets_M=targets_M.long(), sampling=sampling, shard=shard, kept=kept, lines=lines)
    return _TokenLines.apply(call, empty, *lazy.tensors)  # type: ignore[no-untyped-call]


def token_logprobs(
    logits: LazyLogits | torch.Tensor,
    targets_M: torch.Tensor,
    *,
    sampling: Sampling,
    shard: VocabShard | None = None,
    kept: KeptSets | None = None,
) -> torch.Tensor:
    """Return the first of `token_lines`, `[M]`: log-probabilities of `targets_M`."""
    return token_lines(logits, targets_M, sampling=sampling, shard=shard, kept=kept)[0]


def negative_log_likelihood(logprobs: torch.Tensor, weights: torch.Tensor, *, total: float) -> torch.Tensor:
    """Return -sum of w log pi / `total`; tokens of weight 0 have no part in it, whatever their log-probability is.

    Args:
        logprobs: float32, of any shape.
        weights: of the same shape.
        total: sum of all weights, of which these may be a part.
    """
    kept = torch.where(weights > 0, logprobs, 0.0)
    return -(kept * weights).sum() / total


def repeatable_cumsum(values_MV: torch.Tensor) -> torch.Tensor:
    """Return the sums of floats along the last dim, which torch refuses on CUDA among deterministic algorithms: its
    kernel for a single row adds in an order that depends on timing (pytorch#75240), that for several rows does not."""
    if not torch.are_deterministic_algorithms_enabled():
        return values_MV.cumsum(-1)
    torch.use_deterministic_algorithms(False)
    try:
        return (values_MV.expand(2, -1) if len(values_MV) == 1 else values_MV).cumsum(-1)[: len(values_MV)]
    finally:
        torch.use_deterministic_algorithms(True)


def gathered(mine: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Return `[ranks, ...]` (collective)."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, mine, group=shard.group)
    return torch.stack(parts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _LineCall:
    """One call of `token_lines`, without the logits."""

    targets_M: torch.Tensor
    sampling: Sampling
    shard: VocabShard | None
    """The part of the vocabulary that this rank has, or None for all of it."""
    kept: KeptSets | None
    """The sets that were sampled from; None where a filter finds its own."""
    lines: WantedLines

    @property
    def needs_all(self) -> bool:
        """Return whether a filter must see the whole vocabulary of a position."""
        return self.sampling.has_filter and self.kept is None

    @property
    def is_split(self) -> bool:
        """Return whether sums over the columns are parts of sums over the ranks."""
        return self.shard is not None and not self.needs_all

    @property
    def has_two(self) -> bool:
        """Return whether lines are of two distributions: one that leaves tokens out, and the whole one."""
        return (self.needs_all or self.kept is not None) and (self.lines.unfiltered or self.lines.ids_MK is not None)

    def scores(self, logits: LazyLogits, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return scores of a tile, the same with -inf for the tokens left out, and the token of the first column."""
        sampling, first = self.sampling, columns.start + (0 if self.shard is None else self.shard.first)
        whole = logits.scores(rows, columns, temperature=sampling.temperature)
        if self.kept is not None:
            whole = whole.to(logits.exact)
            return whole, self.kept.fill(whole, rows, first=first), first
        if not self.needs_all:
            return whole, whole, first
        whole = whole.to(logits.exact)
        if self.shard is not None:
            parts = [torch.empty_like(whole) for _ in range(dist.get_world_size(self.shard.group))]
            dist.all_gather(parts, whole.contiguous(), group=self.shard.group)
            whole = torch.cat(parts, dim=-1)
        cut = filter_logits(whole, top_k=sampling.top_k, top_p=sampling.top_p, keep_M=self.targets_M[rows])
        return whole, cut, 0


class _TokenLines(torch.autograd.Function):
    """Keeps no logits but those that were given: each tile is computed again in the backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, call: _LineCall, empty: LazyLogits, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        lines_cM, sums_cM = _lines_and_sums(call, empty.of(tensors))
        ctx.save_for_backward(sums_cM, *tensors)  # type: ignore[arg-type]
        ctx.call, ctx.empty = call, empty  # type: ignore[attr-defined]
        return lines_cM

    @staticmethod
    def backward(ctx: FunctionCtx, grad_cM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        sums_cM, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]
        logits, call = ctx.empty.of(tensors), ctx.call  # type: ignore[attr-defined]
        needed = ctx.needs_input_grad[2:]  # type: ignore[attr-defined]
        return None, None, *_gradients(call, logits, _Sums(*sums_cM), grad_cM, needed)


class _Sums(NamedTuple):
    """`[M]` each, saved for the backward pass; those without a line repeat `norm`."""

    norm: torch.Tensor
    """log sum exp of the scores that the distribution has left."""
    norm_whole: torch.Tensor
    rest: torch.Tensor
    """The same of the scores outside the set of `WantedLines.ids_MK`."""
    logprob: torch.Tensor
    entropy: torch.Tensor


def _lines_and_sums(call: _LineCall, logits: LazyLogits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lines `[C, M]`, and `_Sums` stacked."""
    lines = call.lines
    found = [_sums_of_chunk(call, logits, rows) for rows in logits.row_chunks()]
    if not found:
        num_ids = 0 if lines.ids_MK is None else lines.ids_MK.shape[1] + 1
        count = 1 + lines.entropy + lines.squares + lines.unfiltered + num_ids
        return tuple(logits.hidden_MD.new_zeros(some, 0, dtype=logits.exact) for some in (count, 5))  # type: ignore[return-value]
    parts = iter(found[0] if len(found) == 1 else torch.cat(found, dim=1))
    if call.shard is not None and call.is_split:
        parts = iter(_merged(gathered(torch.stack(list(parts)), call.shard), call))
    picked, norm, logprob = next(parts), next(parts), next(parts)
    entropy = next(parts) if lines.entropy else norm
    squares = [next(parts)] if lines.squares else []
    norm_whole = next(parts) if call.has_two else norm
    rest = next(parts) if lines.ids_MK is not None else norm
    result = [logprob, *([entropy] if lines.entropy else []), *squares]
    if lines.unfiltered:
        result.append(picked - norm_whole)
    if lines.ids_MK is not None:
        result += [part - norm_whole for part in (*parts, rest)]
    return torch.stack(result), torch.stack(_Sums(norm, norm_whole, rest, logprob, entropy))


def _sums_of_chunk(call: _LineCall, logits: LazyLogits, rows: slice) -> torch.Tensor:
    """Return `[c, m]` of this rank's columns: score of the target, norm, log-probability, then as far as wanted
    entropy, sum of squares, norm of all scores, that of the scores outside a set, and the scores of the set."""
    lines = call.lines
    whole, cut, first = call.scores(logits, rows, slice(0, logits.shape[1]))
    column, is_here = _columns(call.targets_M[rows, None], first, cut.shape[-1])
    picked = cut.gather(-1, column).to(logits.exact)
    if call.is_split:
        norm, picked = cut.to(logits.exact).logsumexp(-1), torch.where(is_here, picked, 0.0)[:, 0]
        found = [picked, norm, picked - norm]
        logprobs = cut - norm[:, None] if lines.entropy or lines.squares else cut
    else:
        logprobs = cut.log_softmax(-1, dtype=logits.exact)
        logprob = logprobs.gather(-1, column)[:, 0]
        found = [picked[:, 0], picked[:, 0] - logprob, logprob]
    if lines.entropy or lines.squares:
        probs = logprobs.exp()
        found += [torch.special.entr(probs).sum(-1)] if lines.entropy else []
        found += [probs.square().sum(-1)] if lines.squares else []
    if call.has_two:
        found.append(whole.logsumexp(-1))
    if lines.ids_MK is not None:
        whole = whole.to(logits.exact)
        column, is_here = _columns(lines.ids_MK[rows], first, whole.shape[-1])
        is_in_set = _is_in_set(column, is_here, whole.shape[-1])
        found.append(whole.masked_fill(is_in_set, float("-inf")).logsumexp(-1))
        found += torch.where(is_here, whole.gather(-1, column), 0.0).unbind(-1)
    return torch.stack(found)


def _merged(everywhere: torch.Tensor, call: _LineCall) -> list[torch.Tensor]:
    """Return sums over the whole vocabulary out of those of each rank's columns, `[ranks, c, M]`."""
    norm = everywhere[:, 1].logsumexp(0)
    picked = everywhere[:, 0].sum(0)
    found, at = [picked, norm, picked - norm], 3
    # A rank has H_r of its own columns alone, which have the share s_r: H = sum s_r (H_r - log s_r). Without a column
    # of a sampling mask its share is 0 and its H_r is NaN, which counts as nothing.
    log_share = everywhere[:, 1] - norm
    if call.lines.entropy:
        found.append(_weighed(log_share, everywhere[:, at] - log_share).sum(0))
        at += 1
    if call.lines.squares:
        found.append(_weighed(2 * log_share, everywhere[:, at]).sum(0))
        at += 1
    num_norms = call.has_two + (call.lines.ids_MK is not None)
    return [*found, *everywhere[:, at : at + num_norms].logsumexp(0), *everywhere[:, at + num_norms :].sum(0)]


def _weighed(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return p times the values; 0 where no probability is left, whatever the value is."""
    return torch.where(logprobs.isneginf(), 0.0, logprobs.exp() * values)


def _gradients(
    call: _LineCall, logits: LazyLogits, sums: _Sums, grad_cM: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    lines, factor = call.lines, logits.scale / call.sampling.temperature
    grad_cM = grad_cM if factor == 1.0 else grad_cM * factor
    is_plain = not (lines.entropy or lines.unfiltered or lines.ids_MK is not None)
    totals = HeadGradients(logits, needed, -grad_cM[0] if is_plain else None)
    for rows, columns in logits.tiles(by_rows=call.needs_all):
        # Nothing of a tile outlives the call that takes its gradient.
        totals.add(rows, columns, _through_head(call, logits, sums, None if is_plain else grad_cM, rows, columns))
    return totals.finish()


def _through_head(
    call: _LineCall, logits: LazyLogits, sums: _Sums, grad_cM: torch.Tensor | None, rows: slice, columns: slice
) -> torch.Tensor:
    """Return the gradient of a tile with respect to the head's product, but for the factor of its row where `grad_cM`
    is None, and for that of the scores."""
    whole, cut, first = call.scores(logits, rows, columns)
    if grad_cM is None:
        grad = _plain_tile(call, logits, sums, cut, rows, first)
    else:
        grad = _tile(call, sums, grad_cM, (whole, cut), rows, first)
    if logits.cap is not None:
        grad = grad * (1 - (whole * (call.sampling.temperature / logits.cap)).square_())
    if call.shard is not None and call.needs_all:
        grad = grad[:, call.shard.first :][:, : columns.stop]
    return grad.to(logits.hidden_MD.dtype)


def _plain_tile(
    call: _LineCall, logits: LazyLogits, sums: _Sums, cut: torch.Tensor, rows: slice, first: int
) -> torch.Tensor:
    """Return p, at the target p - 1: the gradient of -log p with respect to the scores."""
    grad = cut - sums.norm[rows, None]
    if logits.weight_VD is not None and cut.dtype != grad.dtype:
        # The tile in half precision is ours, and is not needed any more.
        grad = torch.exp(grad, out=cut)
    else:
        grad.exp_()
    column, is_here = _columns(call.targets_M[rows, None], first, cut.shape[-1])
    # Not p - 1, which is nothing in half precision where p is near 1.
    at_target = torch.expm1(sums.logprob[rows, None]).to(grad.dtype)
    return grad.scatter_(-1, column, torch.where(is_here, at_target, grad.gather(-1, column)))


def _tile(
    call: _LineCall,
    sums: _Sums,
    grad_cM: torch.Tensor,
    scores: tuple[torch.Tensor, torch.Tensor],
    rows: slice,
    first: int,
) -> torch.Tensor:
    """Return the gradient of the loss with respect to the scores.

    With p of the distribution, P of the whole one, q of what is outside a set, and pulls g of each line: at every
    column -(g + g_H H) p - g_H p log p - (g_unfiltered + all of the set) P + g_rest q; at tokens their pulls.
    """
    lines, (whole, cut) = call.lines, scores
    pull, others = grad_cM[0, rows, None], iter(grad_cM[1:, rows, None])
    pull_entropy = next(others) if lines.entropy else None
    if lines.squares:
        next(others)
    pull_whole = next(others) if lines.unfiltered else torch.zeros_like(pull)
    column, is_here = _columns(call.targets_M[rows, None], first, cut.shape[-1])
    pull_target = (pull + pull_whole) * is_here
    probs = (cut - sums.norm[rows, None]).exp_()
    weight = pull if pull_entropy is None else pull + pull_entropy * sums.entropy[rows, None]
    if lines.ids_MK is not None:
        pull_mK = torch.cat(list(others), dim=-1)
        pull_whole = pull_whole + pull_mK.sum(-1, keepdim=True)
    grad = probs * -(weight if call.has_two else weight + pull_whole)
    if pull_entropy is not None:
        grad -= torch.xlogy(probs, probs) * pull_entropy
    if call.has_two:
        grad -= (whole - sums.norm_whole[rows, None]).exp_() * pull_whole
    if lines.ids_MK is not None:
        id_column, id_is_here = _columns(lines.ids_MK[rows], first, cut.shape[-1])
        outside = (whole - sums.rest[rows, None]).exp_().mul_(pull_mK[:, -1:])
        grad += outside.masked_fill_(_is_in_set(id_column, id_is_here, cut.shape[-1]), 0.0)
        grad.scatter_add_(-1, id_column, pull_mK[:, :-1] * id_is_here)
    return grad.scatter_add_(-1, column, pull_target)


def _columns(tokens: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each token, some column where it is elsewhere, and whether it is here."""
    place = tokens - first
    column = place.clamp(0, width - 1)
    return column, place == column


def _is_in_set(column_mK: torch.Tensor, is_here_mK: torch.Tensor, width: int) -> torch.Tensor:
    """Return `[m, V]` bool: columns that are in the set."""
    is_in_set = torch.zeros(len(column_mK), width + 1, dtype=torch.bool, device=column_mK.device)
    return is_in_set.scatter_(-1, torch.where(is_here_mK, column_mK, width), True)[:, :width]


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
