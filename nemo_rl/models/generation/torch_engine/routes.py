"""Routes of the rows of one batch, recorded while they are decoded.

Used by the decode loop when a request asks for routes. Invariant: a row has one route for every token that was fed for
it, in order: its prompt, then its response without the last token. Shapes: P distinct prompts, B live rows, N rows of
the batch, W width of the prompts, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from nemo_rl.models.hf_routers import HFRouters
from nemo_rl.routes.shape import RouteShape, route_dtype

__all__ = ["RouteRecorder", "RowRoutes"]


class RouteRecorder:
    """The routers of one model, listened to forward pass by forward pass.

    Raises:
        ConfigError: the model has no experts, or routers of a kind that is not known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._routers = HFRouters(model)
        self.shape = RouteShape(
            layers=self._routers.layers, top_k=self._routers.top_k, num_experts=self._routers.num_experts
        )
        self._dtype = route_dtype(self.shape.num_experts)
        self._heard: dict[int, torch.Tensor] = {}

    def listening(self) -> AbstractContextManager[None]:
        """Inside it every forward pass is recorded; `take` before the next one."""
        self._heard.clear()
        return self._routers.choosing(self._hear)

    def take(self) -> torch.Tensor:
        """`[tokens, L, K]` uint8 or int16: the routes of the last forward pass, tokens as the model flattens them."""
        heard, self._heard = self._heard, {}
        return torch.stack([heard[layer] for layer in self.shape.layers], dim=1)

    def _hear(self, layer: int, own_ids: torch.Tensor) -> None:
        assert layer not in self._heard, f"layer {layer} ran twice in one forward pass"
        self._heard[layer] = own_ids.to(self._dtype)


class RowRoutes:
    """Routes of N rows as they grow."""

    def __init__(self, recorder: RouteRecorder) -> None:
        self._recorder = recorder
        self._prompts_NWLK = torch.empty(0)
        self._is_prompt_NW = torch.empty(0)
        self._turns: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_prompts(self, row_slot_N: torch.Tensor, mask_PW: torch.Tensor) -> None:
        """The forward pass over the distinct prompts; `row_slot_N` says which one a row has."""
        routes_PWLK = self._recorder.take().unflatten(0, tuple(mask_PW.shape))
        self._prompts_NWLK = routes_PWLK[row_slot_N]
        self._is_prompt_NW = mask_PW[row_slot_N].bool()

    def add_turn(self, live_B: torch.Tensor) -> None:
        """The forward pass over one token of each live row."""
        self._turns.append((live_B, self._recorder.take()))

    def end_to_end(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows: `[sum(lengths), L, K]`, and lengths `[N]` int64."""
        num_rows, width = self._is_prompt_NW.shape
        routes = self._prompts_NWLK.new_zeros(num_rows, width + len(self._turns), *self._prompts_NWLK.shape[2:])
        routes[:, :width] = self._prompts_NWLK
        is_fed = torch.nn.functional.pad(self._is_prompt_NW, (0, len(self._turns)))
        for turn, (live_B, ids_BLK) in enumerate(self._turns):
            routes[live_B, width + turn] = ids_BLK
            is_fed[live_B, width + turn] = True
        return routes[is_fed], is_fed.sum(1)
