"""The rows of a request, one by one: what every built-in engine makes of it before it samples.

Called by the engines. Invariant: rows come prompt by prompt, and each has room for at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl.models.generation.requests import GenerationRequest
from nemo_rl.models.vision import PromptImages, VisionFamily

__all__ = ["RowRequest", "check_images", "rows_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRequest:
    """One response to sample."""

    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int
    """Most tokens to sample, at least 1; already cut to what the total length leaves."""
    number: int = 0
    """Number of the row in its request; named in errors."""
    group: str = ""
    adapter: int | None = None
    """Version of its adapter, or `BASE`; None: the one in use."""
    images: PromptImages | None = None
    forced: tuple[int, ...] | None = None
    """The response, as long as `max_new_tokens`; None: it is drawn."""


def rows_of(request: GenerationRequest, *, max_total_length: int) -> list[RowRequest]:
    """Return all rows, prompt by prompt.

    Args:
        max_total_length: prompt and response together, in tokens.

    Raises:
        ValueError: seeds do not divide by prompts, or a prompt is empty or leaves no room for a token, or for what is
            forced.
    """
    num_prompts, num_rows = len(request.prompt_ids), len(request.seeds)
    if (num_prompts == 0) != (num_rows == 0) or (num_prompts and num_rows % num_prompts):
        raise ValueError(f"expected as many seeds for every prompt, got {num_prompts} prompts and {num_rows} seeds")
    if request.names and len(request.names) != num_prompts:
        raise ValueError(f"expected a name for each of {num_prompts} prompts, got {len(request.names)}")
    if request.limits and len(request.limits) != num_prompts:
        raise ValueError(f"expected a limit for each of {num_prompts} prompts, got {len(request.limits)}")
    if request.adapters and len(request.adapters) != num_prompts:
        raise ValueError(f"expected an adapter for each of {num_prompts} prompts, got {len(request.adapters)}")
    if request.images and len(request.images) != num_prompts:
        raise ValueError(f"expected images or None for each of {num_prompts} prompts, got {len(request.images)}")
    rows: list[RowRequest] = []
    for p, prompt in enumerate(request.prompt_ids):
        limit = min((request.sampling.max_new_tokens, *request.limits[p : p + 1]))
        room = min(limit, max_total_length - len(prompt))
        if not prompt or room < 1:
            raise ValueError(
                f"prompt {p}: expected 1 to {max_total_length - 1} tokens (max_total_length "
                f"{max_total_length} less one response token), got {len(prompt)}"
            )
        name = request.names[p] if request.names else ""
        adapter = request.adapters[p] if request.adapters else None
        seeds = request.seeds[p * request.group_size : (p + 1) * request.group_size]
        rows += [
            RowRequest(
                prompt=tuple(prompt),
                seed=seed,
                max_new_tokens=room,
                number=number,
                group=name,
                adapter=adapter,
                images=request.images[p] if request.images else None,
            )
            for number, seed in enumerate(seeds, start=len(rows))
        ]
    return rows if request.forced is None else _forced(rows, request.forced)


def check_images(request: GenerationRequest, family: VisionFamily | None) -> None:
    """Compare placeholders and images of each prompt.

    Args:
        family: of the model; None: it takes no images.

    Raises:
        ValueError: they do not fit, or the model takes no images.
    """
    for number, (prompt, images) in enumerate(zip(request.prompt_ids, request.images, strict=False)):
        if images is None:
            continue
        if family is None:
            raise ValueError(f"prompt {number} has images, and the model of this engine takes none")
        problem = family.row_problem(torch.tensor(prompt), images.tensors)
        if problem is not None:
            raise ValueError(f"prompt {number}: {problem}")


def _forced(rows: Sequence[RowRequest], responses: Sequence[tuple[int, ...]]) -> list[RowRequest]:
    if len(responses) != len(rows):
        raise ValueError(f"expected a forced response for each of {len(rows)} rows, got {len(responses)}")
    for row, response in zip(rows, responses, strict=True):
        if not 1 <= len(response) <= row.max_new_tokens:
            raise ValueError(
                f"row {row.number}: expected 1 to {row.max_new_tokens} forced tokens, got {len(response)}; give fewer, "
                "or raise max_new_tokens"
            )
    return [
        replace(row, forced=response, max_new_tokens=len(response))
        for row, response in zip(rows, responses, strict=True)
    ]
