"""`DecodeBatch`: rows that are decoded together: each distinct prompt is read once, then a token of every row per turn.

Called by `TorchEngine`, which lets all rows join before the first turn, and by `TurnBatches`, where rows join and leave
between turns. Invariants: a row that has ended leaves the batch at once and nothing of it is computed again; the number
drawn for a row depends on its seed and the position in its response alone, never on the batch; a token is drawn from
logits that were computed in the same turn, so that its weights are those of the turn; a row has one route for every
token that was fed for it, in order: its prompt, then its response without the last token, each as it was when the token
was fed first. Shapes: P distinct sequences, W their width, B live rows, N rows of the batch, n rows of a call, S tokens
so far, V vocabulary, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.errors import NonFiniteError, name_some
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.generation.requests import RowRequest
from nemo_rl.models.generation.torch_engine.adapters import AdapterSlots
from nemo_rl.models.generation.torch_engine.cache import LiveCache, PrefillPass, RowStore
from nemo_rl.models.head.logits import SupportRecorder
from nemo_rl.models.head.logprobs import filter_logits
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.routes.shape import RouteShape, route_dtype

__all__ = [
    "NO_OBSERVER",
    "BatchRow",
    "DecodeBatch",
    "DecodeObserver",
    "DecodedRows",
    "RouteRecorder",
    "RowSettings",
    "StopStrings",
    "decode_rows",
    "distribution",
    "draw",
    "seeds_to_tensor",
    "uniforms",
]


class DecodeObserver:
    """Observes the decoding of one batch of rows; the base class ignores every event."""

    def prompts(self, ids_PW: torch.Tensor, mask_PW: torch.Tensor, row_slot_N: torch.Tensor) -> None:
        """Announce the forward pass over the distinct prompts, whose logits are computed at the last position alone.

        Args:
            ids_PW: int64, padded on the left.
            mask_PW: int64, 0 where padding lies.
            row_slot_N: which of the prompts a row has.
        """

    def turn(self, token_B: torch.Tensor, live_B: torch.Tensor) -> None:
        """Announce the forward pass over one more token of each live row.

        Args:
            token_B: int64, drawn in the turn before.
            live_B: number of each row in the batch.
        """


NO_OBSERVER = DecodeObserver()
"""The observer of batches of which nothing is kept."""


# splitmix64 (Steele, Lea, Flood 2014), written as signed 64-bit constants; integer products wrap.
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
# Bits of a uniform number: 52, so that adding a half stays exact in float64.
_UNIFORM_BITS = 52


def seeds_to_tensor(seeds: Iterable[int]) -> torch.Tensor:
    """Return any Python integers as int64, modulo 2**64."""
    wrapped = ((seed + 2**63) % 2**64 - 2**63 for seed in seeds)
    return torch.tensor(list(wrapped), dtype=torch.int64)


def uniforms(seeds_B: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
    """Return `[B]` float64 in (0, 1): one number per seed at this position of the response.

    Args:
        position: of all rows, or `[B]` int64.
    """
    # The seed is mixed before the position is added: neighbouring seeds must not share a shifted stream.
    position_B = torch.as_tensor(position, dtype=torch.int64, device=seeds_B.device)
    state_B = _mix(seeds_B + _GAMMA) + (position_B + 1) * _GAMMA
    bits_B = _shift_right(_mix(state_B), 64 - _UNIFORM_BITS)
    return (bits_B.double() + 0.5) * 2.0**-_UNIFORM_BITS


def draw(
    logprobs_BV: torch.Tensor, sampling: SamplingParams, seeds_B: torch.Tensor, position: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return next token of each row `[B]` int64 and its float32 log-probability.

    Args:
        logprobs_BV: what `distribution` gives.
        position: in the response, of all rows, or `[B]` int64.
    """
    if sampling.temperature == 0:
        token_B = logprobs_BV.argmax(-1)
    else:
        token_B = _invert_cdf(logprobs_BV, uniforms(seeds_B, position))
    return token_B, logprobs_BV.gather(-1, token_B[:, None]).squeeze(-1)


def distribution(logits_BV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return `[B, V]` float32 log-probabilities to draw by, -inf outside the sampling mask; greedy: as temperature
    1."""
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
    found_B = torch.searchsorted(cdf_BV, threshold_B[:, None], right=True).squeeze(-1)
    # Rows of NaN are behind the last one, until somebody looks.
    return found_B.clamp(max=cdf_BV.shape[1] - 1)


@lru_cache(maxsize=64)
def _stop_ids(ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    # Logical shift: torch shifts signed integers arithmetically.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


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
        """Record every forward pass inside the block; call `take` before the next one."""
        self._heard.clear()
        return self._routers.choosing(self._hear)

    def take(self) -> torch.Tensor:
        """Return `[tokens, L, K]` uint8 or int16: the routes of the last forward pass, tokens as the model flattens
        them."""
        heard, self._heard = self._heard, {}
        return torch.stack([heard[layer] for layer in self.shape.layers], dim=1)

    def _hear(self, layer: int, own_ids: torch.Tensor) -> None:
        assert layer not in self._heard, f"layer {layer} ran twice in one forward pass"
        self._heard[layer] = own_ids.to(self._dtype)


# Tokens looked at beyond a stop string's own bytes: the token that completes it may carry a few more characters.
STOP_WINDOW_SLACK = 4


class StopStrings:
    """Finds rows whose text has just completed one of the stop strings."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._texts = tuple(texts)
        self._tokenizer = tokenizer
        # Every token decodes to at least one byte, so older tokens cannot belong to a string that ends now.
        self.window = max(len(text.encode()) for text in texts) + STOP_WINDOW_SLACK

    def completed(self, tails: Sequence[list[int]]) -> torch.Tensor:
        """Return `[B]` bool for the last `window` response tokens of each row."""
        decoded = [str(self._tokenizer.decode(tail, skip_special_tokens=False)) for tail in tails]
        return torch.tensor([any(text in tail for text in self._texts) for tail in decoded], dtype=torch.bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """Settings of the rows of a request, which are drawn together with other rows of equal settings."""

    sampling: SamplingParams
    stop_strings: StopStrings | None = None
    routes: RouteRecorder | None = None
    """Recorder of the model's routes, one for all rows of a batch; None records none."""
    with_support: bool = False
    is_forced: bool = False
    """True where every row brings its response."""

    @property
    def looks_at_each_token(self) -> bool:
        """Return whether something happens on the CPU at each token."""
        return self.stop_strings is not None or self.routes is not None or self.with_support


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRow:
    """A row of a batch."""

    key: int
    """Number that no other row of the batch has or had."""
    request: RowRequest
    settings: RowSettings
    adapter: int | None = None
    """Version of the adapter that it has to its end; None: the one in use, also where that changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedRows:
    """Responses of n rows, padded on the right."""

    token_ids: torch.Tensor
    """`[n, S]` int64."""
    logprobs: torch.Tensor
    """`[n, S]` float32."""
    lengths: torch.Tensor
    """`[n]` int64."""
    truncated: torch.Tensor
    """`[n]` bool."""
    routes: tuple[torch.Tensor, ...] | None
    """`[tokens, L, K]` of each row; None where not all rows record them."""
    support: tuple[torch.Tensor, ...] | None
    """Sampling masks of each row, laid out by `nemo_rl.models.head.logits`; None where not all rows record them."""


TURNS_AT_ONCE = 8
"""Turns of a GPU between two looks at which rows have ended: at most so many tokens less one of each are computed in
vain."""


def decode_rows(
    model: PreTrainedModel,
    rows: Sequence[RowRequest],
    settings: RowSettings,
    *,
    observer: DecodeObserver,
    adapters: AdapterSlots | None = None,
) -> DecodedRows:
    """Sample every row, or decode what is forced, until a stop token, a stop string or its own token limit.

    Raises:
        NonFiniteError: logits are NaN or inf; nothing is drawn from them.
    """
    batch = DecodeBatch(model, observer=observer, adapters=adapters)
    batch.join([BatchRow(key=key, request=row, settings=settings, adapter=row.adapter) for key, row in enumerate(rows)])
    while batch.num_live:
        batch.turn(times=batch.turns_at_once)
    return batch.take(range(len(rows)))


class DecodeBatch:
    """Rows that are decoded together; they join and leave between turns.

    Args:
        observer: is told of every forward pass, of rows that all join before the first turn.
        adapters: of the model, whose versions rows have; None where it serves none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        observer: DecodeObserver = NO_OBSERVER,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._model, self._observer, self._adapters = model, observer, adapters
        self._rows: dict[int, BatchRow] = {}
        """Rows by key: live ones, and ended ones that were not taken."""
        self._kinds: list[RowSettings] = []
        self._num_live: Counter[int] = Counter()
        """Live rows by the place of their settings in `_kinds`."""
        self._store = RowStore.empty(model.device)
        self._place_B = torch.zeros(0, dtype=torch.int64, device=model.device)
        """Places of the live rows in the store."""
        self._live: LiveCache | None = None
        self._unread_B: torch.Tensor | None = None
        """Last token of each live row, which the model has not read; None where logits are at hand."""
        self._recorder: RouteRecorder | None = None
        self._prompt_routes: dict[int, torch.Tensor] = {}
        """`[tokens, L, K]` of each row's prompt, by key."""
        self._support = SupportRecorder()
        self._overshoots = False
        """True once rows were fed on behind their end."""

    @property
    def num_live(self) -> int:
        return len(self._place_B)

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def live_lengths(self) -> dict[int, int]:
        """Return key -> response tokens so far, of the live rows in their order."""
        lengths = self._store.length_N[self._place_B].tolist()
        return dict(zip(self._live_keys(), lengths, strict=True))

    @torch.inference_mode()
    def join(self, rows: Sequence[BatchRow]) -> None:
        """Take rows in; the next turn decodes their first token."""
        self._compact()
        first = len(self._store.keys)
        self._add(rows)
        if self._live is None:
            self._live = self._read(rows, again=False)
        elif self._live.can_grow:
            self._advance()
            self._live.grow(self._read(rows, again=False))
        else:
            # A cache that keeps a window or a state has no columns to pad: all rows are read anew.
            self._live = self._read(rows, again=True)
        self._unread_B = None
        new = torch.arange(first, first + len(rows), device=self._model.device)
        self._place_B = torch.cat([self._place_B, new])

    @property
    def turns_at_once(self) -> int:
        """Return the turns between two looks at which rows have ended: on a GPU each look waits for the device."""
        looks = any(self._kinds[kind].looks_at_each_token for kind in self._num_live)
        return 1 if self._model.device.type == "cpu" or looks or self._observer is not NO_OBSERVER else TURNS_AT_ONCE

    @torch.inference_mode()
    def turn(self, *, times: int = 1) -> tuple[int, ...]:
        """Draw a token of every live row, or take what is forced; return the keys of rows that end with it.

        Args:
            times: turns before the look at which rows have ended. A row that has ended before the last one is fed on,
                and nothing of that is kept.

        Raises:
            NonFiniteError: logits are NaN or inf; nothing is drawn from them.
        """
        self._overshoots |= times > 1
        is_over_B = torch.zeros(len(self._place_B), dtype=torch.bool, device=self._place_B.device)
        checks = list[tuple[torch.Tensor, torch.Tensor]]()
        for _ in range(times):
            self._advance()
            assert self._live is not None, "rows join first"
            position_B = self._store.length_N[self._place_B]
            # The largest logit of a row is NaN if any is, and inf if any is; single ones of -inf are a mask.
            checks.append((~self._live.logits_BV.amax(-1).isfinite() & ~is_over_B, position_B))
            if times == 1:
                self._check_finite(checks)
            is_over_B = self._draw_all(self._live.logits_BV, position_B, is_over_B)
        if times > 1:
            self._check_finite(checks)
        return self._leave(is_over_B)

    def _draw_all(self, logits_BV: torch.Tensor, position_B: torch.Tensor, was_over_B: torch.Tensor) -> torch.Tensor:
        """Draw a token of every live row; return which rows have ended, those that had before among them."""
        store, place_B = self._store, self._place_B
        if len(self._num_live) == 1:
            [kind] = self._num_live
            token_B, logprob_B, is_stopped_B = self._draw(self._kinds[kind], logits_BV, place_B, position_B)
        else:
            token_B, is_stopped_B = torch.empty_like(place_B), torch.empty_like(place_B, dtype=torch.bool)
            logprob_B = torch.empty(len(place_B), device=place_B.device)
            for kind in self._num_live:
                rows = (store.kind_N[place_B] == kind).nonzero().squeeze(-1)
                token_B[rows], logprob_B[rows], is_stopped_B[rows] = self._draw(
                    self._kinds[kind], logits_BV[rows], place_B[rows], position_B[rows]
                )
        # The column behind a row that has ended belongs to nobody.
        store.logprob_NS[place_B, position_B] = logprob_B
        store.length_N[place_B] += ~was_over_B
        store.is_stopped_N[place_B] |= is_stopped_B & ~was_over_B
        self._unread_B = token_B
        return was_over_B | is_stopped_B | (store.limit_N[place_B] == position_B + 1)

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute the caches of all live rows anew, with the weights as they are, from prompts and tokens so far."""
        if self._live is not None:
            self._live, self._unread_B = self._read((), again=True), None

    @torch.inference_mode()
    def drop(self, keys: Collection[int]) -> None:
        """Forget rows, live or ended."""
        is_gone = [key in keys for key in self._live_keys()]
        if any(is_gone):
            self._leave(torch.tensor(is_gone, device=self._place_B.device))
        self._support.forget(keys)
        for key in keys:
            self._rows.pop(key, None)

    @torch.inference_mode()
    def take(self, keys: Sequence[int]) -> DecodedRows:
        """Return rows that have ended, in this order; the batch forgets them."""
        store, rows = self._store, [self._rows.pop(key) for key in keys]
        places = store.places(keys)
        index = torch.tensor(places, device=self._model.device)
        length_n = store.length_N[index]
        lengths = length_n.tolist()
        width = max(lengths)
        routes = None
        if all(row.settings.routes is not None for row in rows):
            routes = tuple(
                torch.cat([self._prompt_routes.pop(key), *store.routes(place, length - 1)])
                for key, place, length in zip(keys, places, lengths, strict=True)
            )
        token_nS, logprob_nS = store.token_NS[index, :width], store.logprob_NS[index, :width]
        if self._overshoots:
            is_behind_nS = torch.arange(width, device=index.device) >= length_n[:, None]
            token_nS, logprob_nS = token_nS.masked_fill(is_behind_nS, 0), logprob_nS.masked_fill(is_behind_nS, 0.0)
        return DecodedRows(
            token_ids=token_nS,
            logprobs=logprob_nS,
            lengths=length_n,
            truncated=~store.is_stopped_N[index],
            routes=routes,
            support=self._support.take(keys) if all(row.settings.with_support for row in rows) else None,
        )

    def _add(self, rows: Sequence[BatchRow]) -> None:
        kinds = []
        for row in rows:
            if row.settings not in self._kinds:
                self._kinds.append(row.settings)
            kinds.append(self._kinds.index(row.settings))
            self._rows[row.key] = row
            self._recorder = self._recorder or row.settings.routes
        self._num_live.update(kinds)
        seed_n = seeds_to_tensor(row.request.seed for row in rows)
        self._store = self._store.with_rows({row.key: row.request for row in rows}, kinds, seed_n)

    def _compact(self) -> None:
        """Free the places of rows that were taken or dropped."""
        kept = [place for place, key in enumerate(self._store.keys) if key in self._rows]
        if len(kept) < len(self._store.keys):
            self._prompt_routes = {key: ids for key, ids in self._prompt_routes.items() if key in self._rows}
            new_places = torch.full((len(self._store.keys),), -1, device=self._model.device)
            new_places[kept] = torch.arange(len(kept), device=self._model.device)
            self._place_B, self._store = new_places[self._place_B], self._store.select(kept)

    def _live_keys(self) -> list[int]:
        return [self._store.keys[place] for place in self._place_B.tolist()]

    def _live_rows(self) -> list[BatchRow]:
        return [self._rows[key] for key in self._live_keys()]

    def _versions(self, rows: Sequence[BatchRow]) -> list[int]:
        """Return the version of the adapter of each row; none where the model serves none."""
        adapters = self._adapters
        return [] if adapters is None else [adapters.versions.resolved(row.adapter) for row in rows]

    def _serving(self, versions: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters is None else self._adapters.serving(versions)

    def _sequences(self) -> list[tuple[int, ...]]:
        """Return prompt and tokens so far of each live row."""
        lengths, tokens = self.live_lengths(), self._store.token_NS[self._place_B].tolist()
        return [
            (*self._rows[key].request.prompt, *row[:length])
            for (key, length), row in zip(lengths.items(), tokens, strict=True)
        ]

    def _read(self, new: Sequence[BatchRow], *, again: bool) -> LiveCache:
        """Read the prompts of new rows, with `again` after prompts and tokens so far of the live ones: every distinct
        sequence once, and keep its routes."""
        running = self.num_live if again else 0
        sequences = [*(self._sequences() if again else ()), *(row.request.prompt for row in new)]
        rows = [*(self._live_rows() if again else ()), *new]
        images = [row.request.images for row in rows]
        passed = PrefillPass.of(sequences, self._model.device, adapters=self._versions(rows), images=images)
        self._observer.prompts(passed.ids_PW, passed.mask_PW, passed.slot_B)
        if self._recorder is None:
            with self._serving(passed.adapters):
                return LiveCache.prefill(self._model, passed)
        with self._serving(passed.adapters), self._recorder.listening():
            cache = LiveCache.prefill(self._model, passed)
            routes_PWLK = self._recorder.take().unflatten(0, tuple(passed.mask_PW.shape))
        if running:
            self._keep_last_routes(routes_PWLK[passed.slot_B[:running], -1])
        is_token_PW, of_slot = passed.mask_PW.bool(), dict[int, torch.Tensor]()
        for row, slot in zip(new, passed.slot_B[running:].tolist(), strict=True):
            if slot not in of_slot:
                of_slot[slot] = routes_PWLK[slot][is_token_PW[slot]]
            self._prompt_routes[row.key] = of_slot[slot]
        return cache

    def _advance(self) -> None:
        """Read the last token of every live row, where that was not done."""
        token_B, live = self._unread_B, self._live
        if token_B is None or live is None:
            return
        self._unread_B = None
        self._observer.turn(token_B, self._place_B)
        room = max((self._rows[key].request.max_new_tokens for key in self._rows), default=1)
        versions = [] if self._adapters is None else self._versions(self._live_rows())
        if self._recorder is None:
            with self._serving(versions):
                live.advance(self._model, token_B, most_room=room)
            return
        with self._serving(versions), self._recorder.listening():
            live.advance(self._model, token_B, most_room=room)
            self._keep_last_routes(self._recorder.take())

    def _keep_last_routes(self, routes_BLK: torch.Tensor) -> None:
        """Keep the routes of the last token of each live row, which the model has read for the first time."""
        self._store = self._store.with_routes(routes_BLK, self._place_B)

    def _draw(
        self, settings: RowSettings, logits_BV: torch.Tensor, place_B: torch.Tensor, position_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return token, log-probability and whether it ends the row, of rows of equal settings."""
        store, sampling = self._store, settings.sampling
        logprobs_BV = distribution(logits_BV, sampling)
        if settings.is_forced:
            token_B = store.token_NS[place_B, position_B]
            logprob_B = logprobs_BV.gather(-1, token_B[:, None]).squeeze(-1)
        else:
            token_B, logprob_B = draw(logprobs_BV, sampling, store.seed_N[place_B], position_B)
            store.token_NS[place_B, position_B] = token_B
        if settings.with_support:
            self._support.add_turn(~logprobs_BV.isneginf(), token_B, store.key_N[place_B])
        is_stopped_B = torch.isin(token_B, _stop_ids(tuple(sampling.stop_token_ids), token_B.device))
        if settings.stop_strings is not None:
            tails = store.tails(place_B, position_B + 1, settings.stop_strings.window)
            is_stopped_B |= settings.stop_strings.completed(tails).to(is_stopped_B.device)
        return token_B, logprob_B, is_stopped_B

    def _leave(self, is_over_B: torch.Tensor) -> tuple[int, ...]:
        """Take rows out of the live ones; return their keys."""
        if not bool(is_over_B.any()):
            return ()
        keys = tuple(self._store.keys[place] for place in self._place_B[is_over_B].tolist())
        self._num_live.subtract(self._store.kind_N[self._place_B[is_over_B]].tolist())
        self._num_live = +self._num_live
        kept = (~is_over_B).nonzero().squeeze(-1)
        self._place_B = self._place_B[kept]
        if not len(kept) or self._live is None:
            self._live = self._unread_B = None
            return keys
        self._live.keep(kept)
        if self._unread_B is None:
            self._live.logits_BV = self._live.logits_BV[kept]
        else:
            self._unread_B = self._unread_B[kept]
        return keys

    def _check_finite(self, turns: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Raise for the first of some turns with logits that are not finite: which rows have them, and positions."""
        if not bool(torch.stack([is_bad_B for is_bad_B, _ in turns]).any()):
            return
        for is_bad_B, position_B in turns:
            if not bool(is_bad_B.any()):
                continue
            rows = [self._rows[self._store.keys[place]].request for place in self._place_B[is_bad_B].tolist()]
            names = [f"{row.number} of group {row.group}" if row.group else str(row.number) for row in rows]
            position = int(position_B[is_bad_B][0])
            raise NonFiniteError(
                f"NaN or inf in the logits for response token {position + 1} of row {name_some(names)}"
            )
