"""The distillation term by its definition, token by token over the whole vocabulary, and a random teacher."""

from __future__ import annotations

from math import exp, log

import torch

from nemo_rl.config.distillation import DistillationConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import TOPK_IDS, TOPK_LOGPROBS


def with_teacher(batch: BatchedDataDict, *, vocab: int, k: int, seed: int = 3) -> BatchedDataDict:
    """Return the batch with the columns of a teacher that knows nothing: random logits in the place of each token."""
    shape = (*batch.tensor("input_ids").shape, vocab)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    ids, taught = teacher_columns(logits.log_softmax(-1), k)
    return BatchedDataDict({**batch, TOPK_IDS: ids.int(), TOPK_LOGPROBS: taught.float()})


def teacher_columns(every: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids `[..., k]` of the most likely tokens, and `[..., k + 1]` log-probabilities of these and of all others
    together, of log-probabilities `[..., V]`."""
    top = every.topk(k)
    rest = every.scatter(-1, top.indices, float("-inf")).logsumexp(-1)
    return top.indices, torch.cat([top.values, rest[..., None]], -1)


def slow_kl(every_V: torch.Tensor, ids: list[int], taught: list[float], config: DistillationConfig) -> torch.Tensor:
    """Return the term of one token.

    Args:
        every_V: the policy's log-probabilities of the whole vocabulary, float64, with gradient.
        taught: the teacher's, of the tokens `ids` and of all others together.
    """
    own = [every_V[i].exp() for i in ids]
    is_other = torch.ones(len(every_V), dtype=torch.bool)
    is_other[ids] = False
    *q, rest = [exp(value) for value in taught]
    if config.tail == "renormalize":
        p, q = [value / sum(own) for value in own], [value / sum(q) for value in q]
    else:
        p, q = list(own), list(q)
        if bool(is_other.any()):
            p.append(every_V[is_other].exp().sum())
            q.append(rest)
    forward = sum(b * (log(b) - a.log()) for a, b in zip(p, q, strict=True))
    reverse = sum(a * (a.log() - log(b)) for a, b in zip(p, q, strict=True))
    share = {"forward": 1.0, "reverse": 0.0}.get(config.kl, config.mixed_weight)
    return share * forward + (1 - share) * reverse


def slow_distillation(
    model: torch.nn.Module, batch: BatchedDataDict, config: DistillationConfig, *, valid_tokens: float
) -> torch.Tensor:
    """Return the weighted mean of the term over the trained tokens, times its coefficient; one row at a time."""
    total = torch.zeros((), dtype=torch.float64)
    ids, lengths = batch.tensor("input_ids").long(), batch.tensor("input_lengths").tolist()
    for row, length in enumerate(lengths):
        every = model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0].log_softmax(-1)
        weight = float(batch.tensor("sample_mask")[row])
        for at in range(1, length):
            if weight > 0 and bool(batch.tensor("token_mask")[row, at]):
                tokens = batch.tensor(TOPK_IDS)[row, at].tolist()
                taught = batch.tensor(TOPK_LOGPROBS)[row, at].double().tolist()
                total = total + weight * slow_kl(every[at - 1], tokens, taught, config)
    return config.coefficient * total / valid_tokens
