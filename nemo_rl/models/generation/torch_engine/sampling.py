"""Drawing tokens: counter-based uniforms and inverse-CDF sampling.

Called by the decode loop. Invariant: the number drawn for a row depends on its seed and the position in its response
alone, never on the batch. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.logprobs import filter_logits

__all__ = ["distribution", "draw", "seeds_to_tensor", "uniforms"]

# splitmix64 (Steele, Lea, Flood 2014), written as signed 64-bit constants; integer products wrap.
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
# Bits of a uniform number: 52, so that adding a half stays exact in float64.
_UNIFORM_BITS = 52


def seeds_to_tensor(seeds: Iterable[int]) -> torch.Tensor:
    """Any Python integers as int64, modulo 2**64."""
    wrapped = ((seed + 2**63) % 2**64 - 2**63 for seed in seeds)
    return torch.tensor(list(wrapped), dtype=torch.int64)


def uniforms(seeds_B: torch.Tensor, position: int) -> torch.Tensor:
    """`[B]` float64 in (0, 1): one number per seed at this position of the response."""
    # The seed is mixed before the position is added: neighbouring seeds must not share a shifted stream.
    offset = seeds_to_tensor([(position + 1) * _GAMMA]).to(seeds_B.device)
    state_B = _mix(seeds_B + _GAMMA) + offset
    bits_B = _shift_right(_mix(state_B), 64 - _UNIFORM_BITS)
    return (bits_B.double() + 0.5) * 2.0**-_UNIFORM_BITS


def draw(
    logprobs_BV: torch.Tensor, sampling: SamplingParams, seeds_B: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next token of each row `[B]` int64 and its float32 log-probability.

    Args:
        logprobs_BV: what `distribution` gives.
    """
    if sampling.temperature == 0:
        token_B = logprobs_BV.argmax(-1)
    else:
        token_B = _invert_cdf(logprobs_BV, uniforms(seeds_B, position))
    return token_B, logprobs_BV.gather(-1, token_B[:, None]).squeeze(-1)


def distribution(logits_BV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """`[B, V]` float32 log-probabilities to draw by, -inf outside the kept set; greedy: as temperature 1."""
    if sampling.temperature == 0:
        return logits_BV.float().log_softmax(-1)
    scores_BV = logits_BV.float() / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1.0:
        scores_BV = filter_logits(scores_BV, top_k=sampling.top_k, top_p=sampling.top_p)
    return scores_BV.log_softmax(-1)


def _invert_cdf(logprobs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    cdf_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    total_B = cdf_BV[:, -1]
    # Strictly below the total, so the first entry above it exists and has a positive probability of its own.
    threshold_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cdf_BV, threshold_B[:, None], right=True).squeeze(-1)


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    # Logical shift: torch shifts signed integers arithmetically.
    return (value >> bits) & ((1 << (64 - bits)) - 1)
