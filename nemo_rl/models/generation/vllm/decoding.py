"""Decoding of rows by vLLM: random numbers by seed and position, given responses, and routes.

`RefitExtension` puts the first two into vLLM's workers; `VllmEngine` reads the routes. Imports no vLLM. Invariants:

- What is drawn for a row depends on its seed and the position in its response alone, never on chunks, preemption or the
  batch. vLLM draws once too often for a row whose prompt runs in chunks or again after it was preempted, and winds its
  generator back, which on CPUs raises an error.
- A row with a given response is scheduled, cached and computed like any other; only what its sampler drew is replaced.
  vLLM's second model runner replays responses by itself.
- A row of routes that no router can have chosen is marked as missing, and never read as expert 0. vLLM returns one row
  of ids for every token that was fed, over all layers, out of a store that is zero where nothing was written.

Shapes: T tokens with a route, L layers with experts, A all layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_rl.routes.shape import MISSING, RecordedRoutes, RouteShape, route_dtype

__all__ = ["draw_by_position", "force_rows", "join_routes"]

# splitmix64 (Steele, Lea, Flood 2014).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS_64 = 2**64 - 1
_SEED_BITS = 63


class RowGenerator(torch.Generator):
    """A generator that is seeded for every token, so that winding it back means nothing."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """vLLM takes back what it has drawn for a token that it discards."""
        return self


def draw_by_position(runner: Any) -> None:
    """Seed the generators of `runner`, a model runner of vLLM with one per request, anew for every token."""
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


def force_rows(runner: Any, *, name: str) -> None:
    """Let `runner`, a model runner of vLLM, take the tokens of rows that bring theirs.

    Args:
        name: of the extra argument of a request that holds them.
    """
    sample = runner._sample

    def forcing(logits: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        given = {} if logits is None else _given(runner, name)
        if logits is None or not given:
            return sample(logits, *args, **kwargs)
        rows = torch.tensor(list(given), device=logits.device)
        tokens = torch.tensor(list(given.values()), device=logits.device)
        # Before the sampler, which changes the logits in place.
        logprobs = logits[rows].float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        output = sample(logits, *args, **kwargs)
        output.sampled_token_ids[rows, 0] = tokens.to(output.sampled_token_ids.dtype)
        found = output.logprobs_tensors
        found.logprob_token_ids[rows, 0] = tokens.to(found.logprob_token_ids.dtype)
        found.logprobs[rows, 0] = logprobs.to(found.logprobs.dtype)
        return output

    runner._sample = forcing


def _given(runner: Any, name: str) -> dict[int, int]:
    """Return row of the batch -> its next token, for the rows that bring theirs."""
    batch, found = runner.input_batch, dict[int, int]()
    for row, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        request = runner.requests[request_id]
        response = (request.sampling_params.extra_args or {}).get(name)
        position = len(request.output_token_ids)
        if response is not None and position < len(response):
            found[row] = response[position]
    return found


def join_routes(rows_TAK: Sequence[np.ndarray], shape: RouteShape) -> RecordedRoutes:
    """Return all rows of a request.

    Args:
        rows_TAK: of each row, from its first prompt token on.
    """
    lengths = torch.tensor([len(row) for row in rows_TAK], dtype=torch.int64)
    layers, dtype = list(shape.layers), route_dtype(shape.num_experts)
    # Signed, because few operations support unsigned ids of 16 bits.
    parts = [torch.from_numpy(row[:, layers].astype(np.int32)) for row in rows_TAK]
    ids = torch.cat(parts) if parts else torch.zeros(0, len(layers), shape.top_k, dtype=torch.int32)
    is_missing = _impossible(ids, shape)
    if bool(is_missing.any()):
        ids[is_missing] = MISSING
        dtype = torch.int16
    return RecordedRoutes(ids=ids.to(dtype), starts=torch.zeros_like(lengths), lengths=lengths, shape=shape)


def _impossible(ids_TLK: torch.Tensor, shape: RouteShape) -> torch.Tensor:
    """Return `[T]` bool: the experts of a token differ from each other, in every layer."""
    ranked = ids_TLK.sort(dim=-1).values
    is_double = (ranked[..., 1:] == ranked[..., :-1]).any(-1)
    is_unknown = (ids_TLK >= shape.num_experts).any(-1)
    return (is_double | is_unknown).any(-1)
