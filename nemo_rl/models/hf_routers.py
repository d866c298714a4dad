"""The routers of a Hugging Face mixture of experts: where they are, and one place to record or force their choice.

Used by the embedded engine, which records, and by the DTensor worker, which replays. Invariant: only the choice of
experts is replaced; their weights come from the scores of this forward pass, so gradients reach the router. Shapes:
T tokens in the order in which the model flattens them, E experts, K chosen ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from nemo_rl.errors import ConfigError

__all__ = ["ROUTER_KINDS", "Choose", "HFRouters"]

Choose: TypeAlias = Callable[[int, torch.Tensor], torch.Tensor | None]
"""(number of the layer in the model, from 0; `[T, K]` ids of the model's own choice) -> the ids to use, None to keep
them."""
Weigh: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(router, `[T, E]` its logits, `[T, K]` ids) -> `[T, K]` weights, in the dtype that the router gives them."""

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _softmax_weights(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, ids)
    if router.norm_topk_prob:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return chosen.to(logits.dtype)


def _mixtral_weights(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = torch.softmax(logits.float(), dim=-1).gather(1, ids)
    return chosen / chosen.sum(dim=-1, keepdim=True)


def _sigmoid_weights(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    # The bias of the experts counts in the choice alone.
    chosen = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen * router.routed_scaling_factor


ROUTER_KINDS: Mapping[str, Weigh] = {
    "Qwen3MoeTopKRouter": _softmax_weights,
    "Qwen2MoeTopKRouter": _softmax_weights,
    "OlmoeTopKRouter": _softmax_weights,
    "MixtralTopKRouter": _mixtral_weights,
    "Glm4MoeTopkRouter": _sigmoid_weights,
    "DeepseekV3TopkRouter": _sigmoid_weights,
}
"""Class name of a router that gives (logits, weights, ids) -> how its weights follow from its logits."""


class HFRouters:
    """Routers of one model.

    Example:
        >>> routers = HFRouters(model)                                     # doctest: +SKIP
        >>> with routers.choosing(lambda layer, own: forced[layer]):       # doctest: +SKIP
        ...     logits = model(ids).logits
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises:
        ConfigError: the model has no experts, or routers of a kind that is not known here.
        """
        found = _routers(model)
        if not found:
            raise ConfigError(
                f"policy.router_replay.enabled: {model.config.model_type!r} has no routed experts; set it to false"
            )
        self.layers: tuple[int, ...] = tuple(found)
        """Numbers of the layers with routed experts, counted from 0."""
        first: Any = next(iter(found.values()))
        self.num_experts, self.top_k = int(first.num_experts), int(first.top_k)
        self._choose: Choose | None = None
        for layer, router in found.items():
            router.register_forward_hook(self._hook(layer, ROUTER_KINDS[type(router).__name__]))

    @contextmanager
    def choosing(self, choose: Choose) -> Iterator[None]:
        """Inside it every router asks `choose`; a backward pass that recomputes layers must run inside as well."""
        assert self._choose is None, "the routers of this model are in use already"
        self._choose = choose
        try:
            yield
        finally:
            self._choose = None

    def _hook(self, layer: int, weigh: Weigh) -> Callable[..., object]:
        def after_forward(router: Any, _: object, output: tuple[torch.Tensor, ...]) -> object:
            if self._choose is None:
                return None
            logits, _weights, own = output
            ids = self._choose(layer, own)
            return None if ids is None else (logits, weigh(router, logits, ids), ids)

        return after_forward


def _routers(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    found: dict[int, torch.nn.Module] = {}
    with_experts: set[int] = set()
    for name, module in model.named_modules():
        match = LAYER.search(name)
        if match is not None and type(module).__name__ in ROUTER_KINDS:
            found[int(match[1])] = module
        if match is not None and name.endswith(".experts"):
            with_experts.add(int(match[1]))
    if with_experts - found.keys():
        raise ConfigError(
            f"policy.router_replay.enabled: the routers of {model.config.model_type!r} are not known, only "
            f"{', '.join(ROUTER_KINDS)}; set it to false"
        )
    return dict(sorted(found.items()))
