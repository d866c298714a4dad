"""State of a `DecodeBatch`: the model's cache of its live rows, and the tokens of all rows.

Invariant: the last token of every row stands in the last column of the cache; what is short is padded on the left.
Shapes: P distinct sequences, W their width, B live rows, N rows of the store, S tokens so far, V vocabulary, L layers
with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from nemo_rl.models.generation.requests import BASE, RowRequest
from nemo_rl.models.vision import PromptImages, family_of

__all__ = ["LiveCache", "PrefillPass", "RowStore"]

LEAST_ROOM, ROOM_SHARE = 256, 4
"""Tokens that a cache gets room for when it is full, or a share of those that it has: room for the longest response of
all rows would take many times the memory of what most of them need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPass:
    """The distinct sequences of some rows, padded on the left."""

    ids_PW: torch.Tensor
    """int64."""
    mask_PW: torch.Tensor
    """int64, 0 where padding lies."""
    slot_B: torch.Tensor
    """int64: which of the sequences a row has."""
    adapters: tuple[int, ...] = ()
    """Version of the adapter of each sequence; empty where there are none."""
    images: tuple[PromptImages | None, ...] = ()
    """Images of each sequence; empty where no sequence has any."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple[int, ...]],
        device: torch.device,
        *,
        adapters: Sequence[int] = (),
        images: Sequence[PromptImages | None] = (),
    ) -> PrefillPass:
        """Return the pass over the sequences of rows.

        Args:
            adapters: version of the adapter of each row, where there are adapters: rows of two versions share nothing.
            images: of each row.
        """
        slots: dict[tuple[tuple[int, ...], int, PromptImages | None], int] = {}
        count = len(sequences)
        owners = zip(sequences, adapters or [BASE] * count, images or [None] * count, strict=True)
        slot_B = torch.tensor([slots.setdefault(owner, len(slots)) for owner in owners], device=device)
        width = max(len(sequence) for sequence, _, _ in slots)
        ids_PW = torch.zeros(len(slots), width, dtype=torch.int64)
        mask_PW = torch.zeros(len(slots), width, dtype=torch.int64)
        for row, (sequence, _, _) in enumerate(slots):
            ids_PW[row, width - len(sequence) :] = torch.tensor(sequence)
            mask_PW[row, width - len(sequence) :] = 1
        return cls(
            ids_PW=ids_PW.to(device),
            mask_PW=mask_PW.to(device),
            slot_B=slot_B,
            adapters=tuple(adapter for _, adapter, _ in slots) if adapters else (),
            images=tuple(found for *_, found in slots) if any(found is not None for *_, found in slots) else (),
        )


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, in memory with room for tokens that come: none is copied when one is added.

    `keys` and `values` are the filled part.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[torch.Tensor] = []
        self.most_room = LEAST_ROOM
        """Most tokens that still come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; return keys and values of all."""
        if not self.is_initialized:
            # The cache of prompts, whose rows are copied to the samples that share them.
            return super().update(key_states, value_states, *args, **kwargs)
        length, added = self.keys.shape[-2], key_states.shape[-2]
        # Rows that leave or join make other tensors of the filled part.
        is_room = bool(self._rooms) and self._rooms[0].data_ptr() == self.keys.data_ptr()
        if not is_room or self._rooms[0].shape[-2] < length + added:
            room = added + min(self.most_room, max(LEAST_ROOM, length // ROOM_SHARE))
            self._rooms = [_with_room(old, room) for old in (self.keys, self.values)]
        for place, new in zip(self._rooms, (key_states, value_states), strict=True):
            place[..., length : length + added, :].copy_(new)
        self.keys, self.values = (place[..., : length + added, :] for place in self._rooms)
        return self.keys, self.values


def _with_room(old: torch.Tensor, room: int) -> torch.Tensor:
    shape = [*old.shape]
    shape[-2] += room
    new = old.new_empty(shape)
    new[..., : old.shape[-2], :].copy_(old)
    return new


class LiveCache:
    """Cache, mask and last logits of the live rows."""

    def __init__(
        self,
        *,
        cache: DynamicCache,
        mask_BS: torch.Tensor,
        position_B: torch.Tensor,
        logits_BV: torch.Tensor,
        makes_masks: bool,
    ) -> None:
        self._cache = cache
        self._mask_BS = mask_BS
        self._position_B = position_B
        self.logits_BV = logits_BV
        self._makes_masks = makes_masks
        """True where the model takes the mask that is made here, and need not look at it at each token."""
        self._note_padding()

    @classmethod
    def prefill(cls, model: PreTrainedModel, passed: PrefillPass) -> LiveCache:
        """Run every distinct sequence once and copy its cache to the rows that share it."""
        position_PW = (passed.mask_PW.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        is_plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        if is_plain:
            cache.layers = [RoomyLayer() for _ in cache.layers]
        tokens = {"input_ids": passed.ids_PW}
        if passed.images:
            tokens, position_PW = _with_images(model, passed, position_PW)
        output = model(
            **tokens,
            attention_mask=passed.mask_PW,
            position_ids=position_PW,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.reorder_cache(passed.slot_B)
        return cls(
            cache=cache,
            mask_BS=passed.mask_PW[passed.slot_B].bool(),
            # What follows an image goes on after the largest of its positions, on every axis.
            position_B=(position_PW.amax((0, 2)) if position_PW.dim() > 2 else position_PW[:, -1])[passed.slot_B],
            logits_BV=output.logits[passed.slot_B, -1],
            makes_masks=is_plain and not passed.images and model.config._attn_implementation == "sdpa",
        )

    @property
    def can_grow(self) -> bool:
        """Return whether rows can be added: every layer keeps keys and values of all tokens, and nothing else."""
        return all(type(layer) is RoomyLayer for layer in self._cache.layers)

    def grow(self, other: LiveCache) -> None:
        """Add the rows of `other` behind these; columns that pad every row are cut off."""
        masks = [self._mask_BS, other._mask_BS]
        needed = max(int(mask.shape[1] - mask.any(0).int().argmax()) for mask in masks)
        self._mask_BS = torch.cat([_to_width(mask, needed, dim=1) for mask in masks])
        for layer, added in zip(self._cache.layers, other._cache.layers, strict=True):
            layer.keys = torch.cat([_to_width(keys, needed, dim=2) for keys in (layer.keys, added.keys)])
            layer.values = torch.cat([_to_width(values, needed, dim=2) for values in (layer.values, added.values)])
        self._position_B = torch.cat([self._position_B, other._position_B])
        self.logits_BV = torch.cat([self.logits_BV, other.logits_BV])
        self._note_padding()

    def keep(self, rows: torch.Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._mask_BS, self._position_B = self._mask_BS[rows], self._position_B[rows]
        self._note_padding()

    def advance(self, model: PreTrainedModel, token_B: torch.Tensor, *, most_room: int) -> None:
        """Feed one token per row.

        Args:
            most_room: most tokens that a row may still get.
        """
        for layer in self._cache.layers:
            if isinstance(layer, RoomyLayer):
                layer.most_room = most_room
        self._mask_BS = torch.nn.functional.pad(self._mask_BS, (0, 1), value=True)
        self._position_B = self._position_B + 1
        output = model(
            input_ids=token_B[:, None],
            attention_mask=self._mask(),
            position_ids=self._position_B[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self.logits_BV = output.logits[:, -1]

    def _mask(self) -> torch.Tensor | None:
        """Return what transformers would make of the mask, which takes a wait for the device at each token."""
        if not self._makes_masks:
            return self._mask_BS.long()
        return self._mask_BS[:, None, None] if self._has_padding else None

    def _note_padding(self) -> None:
        self._has_padding = not bool(self._mask_BS.all())


def _with_images(
    model: PreTrainedModel, passed: PrefillPass, position_PW: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return embeddings with the features of images, and positions: `[3, P, W]` with M-RoPE."""
    family = family_of(model.config)
    assert family is not None, "the request is checked before"
    rows = [
        {name: tensor.to(passed.ids_PW.device) for name, tensor in tensors.items()}
        for tensors in (family.empty_row() if images is None else images.tensors for images in passed.images)
    ]
    spans = [slice(-length, None) for length in passed.mask_PW.sum(1).tolist()]
    ids = [slot_ids[span] for slot_ids, span in zip(passed.ids_PW, spans, strict=True)]
    feature_PW, position_3PW = family.places_of_rows(rows, ids, spans, position_PW)
    embeds = family.embed(model, passed.ids_PW, feature_PW, rows)
    return {"inputs_embeds": embeds}, position_PW if position_3PW is None else position_3PW


def _to_width(value: torch.Tensor, width: int, *, dim: int) -> torch.Tensor:
    length = value.shape[dim]
    if length >= width:
        return value.narrow(dim, length - width, width)
    shape = [*value.shape]
    shape[dim] = width - length
    return torch.cat([value.new_zeros(shape), value], dim=dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStore:
    """Tokens and settings of N rows, live and ended; the tensors are written in place."""

    keys: tuple[int, ...]
    key_N: torch.Tensor
    """int64, the same."""
    kind_N: torch.Tensor
    """int64: number of the row's settings."""
    seed_N: torch.Tensor
    """int64."""
    limit_N: torch.Tensor
    """int64: most tokens."""
    length_N: torch.Tensor
    """int64: tokens so far."""
    is_stopped_N: torch.Tensor
    token_NS: torch.Tensor
    """int64; forced tokens lie here from the start. A column more than the longest row has, which nobody reads."""
    logprob_NS: torch.Tensor
    """float32."""
    route_NSLK: torch.Tensor | None = None
    """Routes of response tokens, as wide as needed so far."""

    @classmethod
    def empty(cls, device: torch.device) -> RowStore:
        """Return a store without rows."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(
            keys=(),
            key_N=none,
            kind_N=none,
            seed_N=none,
            limit_N=none,
            length_N=none,
            is_stopped_N=none.bool(),
            token_NS=none[:, None],
            logprob_NS=none[:, None].float(),
        )

    def with_rows(self, rows: Mapping[int, RowRequest], kinds: Sequence[int], seed_n: torch.Tensor) -> RowStore:
        device = self.key_N.device
        limits = [row.max_new_tokens for row in rows.values()]
        width = max(self.token_NS.shape[1], 1 + max(limits, default=0))
        forced = torch.zeros(len(rows), width, dtype=torch.int64)
        for place, row in enumerate(rows.values()):
            if row.forced is not None:
                forced[place, : len(row.forced)] = torch.tensor(row.forced)

        def more(old: torch.Tensor, new: Sequence[int] | torch.Tensor) -> torch.Tensor:
            return torch.cat([old, torch.as_tensor(new, dtype=old.dtype).to(device)])

        pad = (0, width - self.token_NS.shape[1])
        zeros, routes = torch.zeros(len(rows), dtype=torch.int64), self.route_NSLK
        return RowStore(
            keys=(*self.keys, *rows),
            key_N=more(self.key_N, list(rows)),
            kind_N=more(self.kind_N, kinds),
            seed_N=more(self.seed_N, seed_n),
            limit_N=more(self.limit_N, limits),
            length_N=more(self.length_N, zeros),
            is_stopped_N=more(self.is_stopped_N, zeros),
            token_NS=more(torch.nn.functional.pad(self.token_NS, pad), forced),
            logprob_NS=more(torch.nn.functional.pad(self.logprob_NS, pad), torch.zeros(len(rows), width)),
            route_NSLK=None if routes is None else torch.cat([routes, routes.new_zeros(len(rows), *routes.shape[1:])]),
        )

    def select(self, places: Sequence[int]) -> RowStore:
        index = torch.tensor(places, dtype=torch.int64, device=self.key_N.device)
        width = 1 + max(self.limit_N[index].tolist(), default=0)
        routes = self.route_NSLK
        return RowStore(
            keys=tuple(self.keys[place] for place in places),
            key_N=self.key_N[index],
            kind_N=self.kind_N[index],
            seed_N=self.seed_N[index],
            limit_N=self.limit_N[index],
            length_N=self.length_N[index],
            is_stopped_N=self.is_stopped_N[index],
            token_NS=self.token_NS[index, :width],
            logprob_NS=self.logprob_NS[index, :width],
            route_NSLK=None if routes is None else routes[index, :width],
        )

    def places(self, keys: Sequence[int]) -> list[int]:
        found = {key: place for place, key in enumerate(self.keys)}
        return [found[key] for key in keys]

    def tails(self, place_B: torch.Tensor, length_B: torch.Tensor, window: int) -> list[list[int]]:
        """Return the last `window` of the first `length_B` tokens of each row."""
        columns_BW = length_B[:, None] + torch.arange(-window, 0, device=length_B.device)
        found = self.token_NS[place_B[:, None], columns_BW.clamp(min=0)].tolist()
        return [row[max(0, window - length) :] for row, length in zip(found, length_B.tolist(), strict=True)]

    def routes(self, place: int, length: int) -> Sequence[torch.Tensor]:
        """Return the routes of the first tokens of a row's response, if any were kept."""
        return [] if self.route_NSLK is None else [self.route_NSLK[place, :length]]

    def with_routes(self, routes_BLK: torch.Tensor, place_B: torch.Tensor) -> RowStore:
        """Return the store with the routes of the last token of rows."""
        routes, column_B = self.route_NSLK, self.length_N[place_B] - 1
        needed = int(column_B.max()) + 1
        if routes is None:
            routes = routes_BLK.new_zeros(len(self.keys), 0, *routes_BLK.shape[1:])
        if routes.shape[1] < needed:
            # In steps that double, so that it is not copied at every turn.
            width = min(max(needed, 2 * routes.shape[1], FIRST_ROUTES), self.token_NS.shape[1])
            routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, width - routes.shape[1]))
        routes[place_B, column_B] = routes_BLK
        return self if routes is self.route_NSLK else replace(self, route_NSLK=routes)


FIRST_ROUTES = 16
"""Columns that routes begin with."""
