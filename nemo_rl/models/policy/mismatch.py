"""How far the trainer's log-probabilities are from those that the rollout sampled with.

With r = p_trainer / p_rollout of a sampled token: k3 = mean(r - 1 - log r), an estimate of KL(rollout || trainer)
(Schulman 2020), and the shares of tokens with max(r, 1 / r) beyond a bound. Shapes: N rows, T tokens.
"""

from __future__ import annotations

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.divergence import k3
from nemo_rl.utils.metrics import Max, Mean, Reduction

__all__ = ["logprob_mismatch"]

RATIOS = {"f128": 1.28, "f2": 2.0}
"""Metric -> bound: beyond the first clipping sets in, beyond the second a token has another weight altogether."""


def logprob_mismatch(batch: BatchedDataDict, logprobs_NT: torch.Tensor, name: str) -> dict[str, Reduction]:
    """Metrics over the tokens of `token_mask` with their rows' weights (`sample_mask`), as `k3_<name>` and so on.

    Args:
        batch: with `generation_logprobs` `[N, T]`.
        logprobs_NT: of the trainer.
    """
    row_weight_N = batch.tensor("sample_mask").double().cpu()
    is_used_NT = batch.tensor("token_mask").bool().cpu() & (row_weight_N > 0)[:, None]
    weight_M = row_weight_N[:, None].expand_as(is_used_NT)[is_used_NT]
    log_ratio_M = (logprobs_NT.cpu() - batch.tensor("generation_logprobs").cpu())[is_used_NT].double()
    count = float(weight_M.sum())
    if not count:
        return {}
    kl = float((k3(log_ratio_M) * weight_M).sum())
    extreme_M = log_ratio_M.abs().exp()
    found: dict[str, Reduction] = {
        f"{metric}_{name}": Mean(float(weight_M[extreme_M > bound].sum()), count) for metric, bound in RATIOS.items()
    }
    return {f"k3_{name}": Mean(kl, count), **found, f"max_ratio_{name}": Max(float(extreme_M.max()))}
