"""Cuts a request into parts that engines take one by one, and puts their outputs together again.

Used by `GenerationReplicas`. Invariant: the parts depend on the request, the number of engines and their batch size
alone, never on time, so a row is sampled in the same batch, to the last bit, whichever engine takes its part, also when
an engine was lost. A group of samples is never split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, RecordedRoutes
from nemo_rl.utils.metrics import merge_metrics

__all__ = ["cut_request", "join_outputs"]


def cut_request(request: GenerationRequest, *, num_engines: int, batch_rows: int) -> list[GenerationRequest]:
    """Consecutive blocks of prompts with their seeds, in the order in which they are to be taken; at least one.

    Every engine first gets half of its share of the expected work, then half of what is left, and so on, so that
    engines end together however unequal rows turn out; but no block is smaller than a batch that an engine decodes at
    once, which smaller ones would not make any faster. One engine gets all prompts at once.

    Args:
        batch_rows: rows that an engine decodes at once.
    """
    group = request.group_size
    ends = list(accumulate((expected_work(prompt, request) for prompt in request.prompt_ids), initial=0.0))
    least = max(1, batch_rows // max(1, group)) * ends[-1] / max(1, len(request.prompt_ids))
    cuts = _cuts(ends, _shares(ends[-1], num_engines=num_engines, least=least))
    return [
        replace(
            request,
            prompt_ids=request.prompt_ids[start:stop],
            seeds=request.seeds[start * group : stop * group],
            forced=None if request.forced is None else request.forced[start * group : stop * group],
        )
        for start, stop in pairwise(cuts)
    ] or [request]


def expected_work(prompt: Sequence[int], request: GenerationRequest) -> float:
    """Tokens of the forward passes of a prompt's group, if its responses get half as long as they may.

    A prompt is read once for its group; every token of a response is a pass of its own.
    """
    return len(prompt) + request.group_size * request.sampling.max_new_tokens / 2


def join_outputs(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """Outputs of the blocks, in order; engines may have sampled from different weight versions."""
    versions = tuple(version for output in outputs for version in output.row_versions)
    return GenerationOutput(
        token_ids=torch.cat([output.token_ids for output in outputs]),
        logprobs=torch.cat([output.logprobs for output in outputs]),
        lengths=torch.cat([output.lengths for output in outputs]),
        truncated=torch.cat([output.truncated for output in outputs]),
        weight_version=versions or outputs[0].weight_version,
        routes=_join_routes([output.routes for output in outputs if output.routes is not None]),
        support=_join_support(outputs),
        metrics=merge_metrics(output.metrics for output in outputs),
    )


def _shares(total: float, *, num_engines: int, least: float) -> list[float]:
    """Work of each block: rounds of one block per engine, of half of what is left."""
    shares: list[float] = []
    left = total
    while left > total * 1e-9:
        share = left / num_engines
        is_last = num_engines == 1 or share < 2 * least
        shares += [share if is_last else share / 2] * num_engines
        left = 0.0 if is_last else left / 2
    return shares


def _cuts(ends: Sequence[float], shares: Sequence[float]) -> list[int]:
    """First prompts of the blocks and the number of prompts: each cut at the prompt that comes next to its share.

    Args:
        ends: work up to each prompt, from 0 on.
    """
    cuts = [0]
    for target in accumulate(shares):
        cut = min(range(cuts[-1], len(ends)), key=lambda prompt: abs(ends[prompt] - target))
        if cut > cuts[-1]:
            cuts.append(cut)
    return cuts


def _join_support(outputs: Sequence[GenerationOutput]) -> tuple[torch.Tensor, ...] | None:
    parts = [output.support for output in outputs if output.support is not None]
    return tuple(row for part in parts for row in part) if parts else None


def _join_routes(routes: Sequence[RecordedRoutes]) -> RecordedRoutes | None:
    if not routes:
        return None
    return RecordedRoutes(
        ids=torch.cat([part.ids for part in routes]),
        starts=torch.cat([part.starts for part in routes]),
        lengths=torch.cat([part.lengths for part in routes]),
        shape=routes[0].shape,
    )
