"""Rotary frequencies that depend on how long a row is: each row gets those that it would get alone.

Called by `parallelize` and `check_model_fits`. Hugging Face takes such frequencies from the longest row of a pass, so
that the numbers of a row would depend on the rows next to it. Shapes: n rows and s positions of the pass on this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl.models.policy.microbatch import ForwardInputs

__all__ = ["RowFrequencies", "long_rope_start", "rope_problem"]

LONG_ROPE = "longrope"
DYNAMIC = "dynamic"
OWN_RULE = ("phimoe",)
"""Families whose module scales by the longest row in its own way."""


def rope_problem(config: PretrainedConfig) -> str | None:
    """Return why rows of this model would depend on each other, or None where they do not."""
    kinds, model_type = _kinds(config), config.model_type
    # As Hugging Face asks: `dynamic` and what contains it.
    dynamic = sorted(kind for kind in kinds.values() if DYNAMIC in kind)
    if dynamic:
        return f"has positions of rope_type {dynamic[0]!r}, whose frequencies grow with the longest row seen so far"
    own = sorted(kind for kind in kinds.values() if model_type in OWN_RULE and kind != "default")
    if own or (LONG_ROPE in kinds.values() and "" not in kinds):
        return f"has positions of rope_type {(own or [LONG_ROPE])[0]!r} with its own rule for the longest row"
    return None


def long_rope_start(config: PretrainedConfig) -> int | None:
    """Return the length beyond which rows get the long frequencies; None where there is one kind only."""
    if LONG_ROPE not in _kinds(config).values():
        return None
    return int(config.get_text_config().rope_parameters["original_max_position_embeddings"])


class RowFrequencies:
    """Chooses between the two sets of frequencies of `longrope` for every row by its own length."""

    def __init__(self, model: PreTrainedModel, *, start: int) -> None:
        """Args:
        start: rows of more tokens get the long ones.
        """
        self._start = start
        self._is_long_ns: torch.Tensor | None = None
        for module in model.modules():
            if vars(module).get("rope_type") == LONG_ROPE:
                module.forward = partial(self._rotate, module)  # type: ignore[method-assign]

    @contextmanager
    def of(self, inputs: ForwardInputs) -> Iterator[None]:
        # Positions without a token have row -1, which indexes the last row here.
        length_r = torch.tensor([*inputs.lengths, 0], device=inputs.row_ns.device)
        self._is_long_ns = length_r[inputs.row_ns] > self._start
        try:
            yield
        finally:
            self._is_long_ns = None

    @torch.no_grad()
    def _rotate(
        self, module: Any, x: torch.Tensor, position_ids: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine `[n, s, D]`."""
        assert self._is_long_ns is not None, "the pass has no lengths"
        # Below the decorator that looks at the longest row.
        rotate = inspect.unwrap(type(module).forward)
        short = module.original_inv_freq.to(x.device)
        long, _scaling = ROPE_INIT_FUNCTIONS[LONG_ROPE](module.config, x.device, seq_len=self._start + 1)
        pairs = []
        for frequencies in (long, short):
            module.inv_freq = frequencies
            pairs.append(rotate(module, x, position_ids))
        is_long = self._is_long_ns[..., None]
        cosine, sine = (torch.where(is_long, of_long, of_short) for of_long, of_short in zip(*pairs, strict=True))
        return cosine, sine


def _kinds(config: PretrainedConfig) -> dict[str, str]:
    """Return `rope_type` by kind of layer, "" for all; empty without rotary positions."""
    rope: Mapping[str, Any] = config.get_text_config().to_dict().get("rope_parameters") or {}
    if "rope_type" in rope:
        return {"": str(rope["rope_type"])}
    return {
        layer: str(part.get("rope_type", "default")) for layer, part in rope.items() if isinstance(part, dict) and part
    }
