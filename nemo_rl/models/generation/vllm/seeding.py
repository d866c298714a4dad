"""Random numbers of a row by its seed and the position in its response, whatever vLLM has drawn before.

Put into vLLM's workers by `RefitExtension`. vLLM draws once too often for a row whose prompt runs in chunks or again
after it was preempted, and winds its generator back, which on CPUs raises an error. Invariant: what is drawn for a row
depends on its seed and the position alone, never on chunks, preemption or the batch.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RowGenerator", "draw_by_position"]

# splitmix64 (Steele, Lea, Flood 2014).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS_64 = 2**64 - 1
_SEED_BITS = 63


class RowGenerator(torch.Generator):
    """Is seeded for every token, so that winding it back means nothing."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """vLLM takes back what it has drawn for a token that it discards."""
        return self


def draw_by_position(runner: Any) -> None:
    """From here on `runner`, a model runner of vLLM with a generator per request, seeds it anew for every token."""
    sample = runner._sample

    def seeded(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        for row, given in batch.generators.items():
            request = runner.requests[batch.req_ids[row]]
            generator = given if isinstance(given, RowGenerator) else RowGenerator(device=given.device)
            batch.generators[row] = generator
            generator.manual_seed(_mixed(request.sampling_params.seed, len(request.output_token_ids)))
        return sample(*args, **kwargs)

    runner._sample = seeded


def _mixed(seed: int, position: int) -> int:
    # The seed is mixed before the position is added: neighbouring seeds must not share a shifted stream. Of the result
    # torch's generator of CPUs reads 32 bits alone.
    return _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA) >> (64 - _SEED_BITS)


def _mix(state: int) -> int:
    state &= _BITS_64
    state = ((state ^ (state >> 30)) * _MIX_1) & _BITS_64
    state = ((state ^ (state >> 27)) * _MIX_2) & _BITS_64
    return state ^ (state >> 31)
