"""The decode loop over one batch of rows: prefill each prompt once, then one token per live row and turn.

Called by `TorchEngine`. Invariants: a finished row leaves the batch at once and nothing of it is computed again; the
number drawn for a row depends on its seed and the position in its response alone, never on the batch; a row has one
route for every token that was fed for it, in order: its prompt, then its response without the last token. Shapes:
P distinct prompts, W width of the prompts, B live rows, N rows of the batch, S tokens so far, V vocabulary, L layers
with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.errors import NonFiniteError, name_some
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.generation.rows import RowRequest
from nemo_rl.models.hf_modules import HFRouters
from nemo_rl.models.logprobs import filter_logits
from nemo_rl.models.support import SupportRecorder
from nemo_rl.routes.shape import RouteShape, route_dtype

__all__ = [
    "NO_OBSERVER",
    "DecodeObserver",
    "DecodeRecorders",
    "DecodedRows",
    "RouteRecorder",
    "RowRoutes",
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


def uniforms(seeds_B: torch.Tensor, position: int) -> torch.Tensor:
    """Return `[B]` float64 in (0, 1): one number per seed at this position of the response."""
    # The seed is mixed before the position is added: neighbouring seeds must not share a shifted stream.
    offset = seeds_to_tensor([(position + 1) * _GAMMA]).to(seeds_B.device)
    state_B = _mix(seeds_B + _GAMMA) + offset
    bits_B = _shift_right(_mix(state_B), 64 - _UNIFORM_BITS)
    return (bits_B.double() + 0.5) * 2.0**-_UNIFORM_BITS


def draw(
    logprobs_BV: torch.Tensor, sampling: SamplingParams, seeds_B: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return next token of each row `[B]` int64 and its float32 log-probability.

    Args:
        logprobs_BV: what `distribution` gives.
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
    return torch.searchsorted(cdf_BV, threshold_B[:, None], right=True).squeeze(-1)


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


class RowRoutes:
    """Routes of N rows as they grow."""

    def __init__(self, recorder: RouteRecorder) -> None:
        self._recorder = recorder
        self._prompts_NWLK = torch.empty(0)
        self._is_prompt_NW = torch.empty(0)
        self._turns: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_prompts(self, row_slot_N: torch.Tensor, mask_PW: torch.Tensor) -> None:
        """Add the forward pass over the distinct prompts; `row_slot_N` says which one a row has."""
        routes_PWLK = self._recorder.take().unflatten(0, tuple(mask_PW.shape))
        self._prompts_NWLK = routes_PWLK[row_slot_N]
        self._is_prompt_NW = mask_PW[row_slot_N].bool()

    def add_turn(self, live_B: torch.Tensor) -> None:
        """Add the forward pass over one token of each live row."""
        self._turns.append((live_B, self._recorder.take()))

    def end_to_end(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows: `[sum(lengths), L, K]`, and lengths `[N]` int64."""
        num_rows, width = self._is_prompt_NW.shape
        routes = self._prompts_NWLK.new_zeros(num_rows, width + len(self._turns), *self._prompts_NWLK.shape[2:])
        routes[:, :width] = self._prompts_NWLK
        is_fed = torch.nn.functional.pad(self._is_prompt_NW, (0, len(self._turns)))
        for turn, (live_B, ids_BLK) in enumerate(self._turns):
            routes[live_B, width + turn] = ids_BLK
            is_fed[live_B, width + turn] = True
        return routes[is_fed], is_fed.sum(1)


# Tokens looked at beyond a stop string's own bytes: the token that completes it may carry a few more characters.
STOP_WINDOW_SLACK = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedRows:
    """Responses of one batch, padded on the right."""

    token_ids: torch.Tensor
    """`[N, S]` int64."""
    logprobs: torch.Tensor
    """`[N, S]` float32."""
    lengths: torch.Tensor
    """`[N]` int64."""
    truncated: torch.Tensor
    """`[N]` bool."""


class StopStrings:
    """Finds rows whose text has just completed one of the stop strings."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._texts = tuple(texts)
        self._tokenizer = tokenizer
        # Every token decodes to at least one byte, so older tokens cannot belong to a string that ends now.
        self._window = max(len(text.encode()) for text in texts) + STOP_WINDOW_SLACK

    def completed(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return `[B]` bool for rows of response tokens."""
        tails = tokens_BS[:, -self._window :].tolist()
        decoded = [str(self._tokenizer.decode(tail, skip_special_tokens=False)) for tail in tails]
        return torch.tensor([any(text in tail for text in self._texts) for tail in decoded], dtype=torch.bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRecorders:
    """Recorders of one batch, still empty."""

    routes: RowRoutes | None = None
    """Routes of the rows, whose routers must be listened to; None records nothing."""
    support: SupportRecorder | None = None
    """The recorder of sampling masks, or None to record none."""
    observer: DecodeObserver = NO_OBSERVER
    """Is told of every forward pass."""


@torch.inference_mode()
def decode_rows(
    model: PreTrainedModel,
    rows: Sequence[RowRequest],
    sampling: SamplingParams,
    *,
    stop_strings: StopStrings | None,
    recorders: DecodeRecorders,
) -> DecodedRows:
    """Sample every row, or decodes what is forced, until a stop token, a stop string or its own token limit.

    Raises:
        NonFiniteError: logits are NaN or inf; nothing is drawn from them.
    """
    device, routes, support, observer = model.device, recorders.routes, recorders.support, recorders.observer
    limit_N = torch.tensor([row.max_new_tokens for row in rows], device=device)
    seeds_N = seeds_to_tensor(row.seed for row in rows).to(device)
    width = int(limit_N.max())
    tokens_NS = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
    logprobs_NS = torch.zeros(len(rows), width, dtype=torch.float32, device=device)
    length_N = torch.zeros(len(rows), dtype=torch.int64, device=device)
    stopped_N = torch.zeros(len(rows), dtype=torch.bool, device=device)
    stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
    forced_NS = _forced(rows, width, device)

    live_B = torch.arange(len(rows), device=device)
    batch = _LiveBatch.prefill(model, [row.prompt for row in rows], routes, observer)
    for turn in range(width):
        _check_finite(batch.logits_BV, rows, live_B, turn=turn)
        logprobs_BV = distribution(batch.logits_BV, sampling)
        if forced_NS is None:
            token_B, logprob_B = draw(logprobs_BV, sampling, seeds_N[live_B], turn)
        else:
            token_B = forced_NS[live_B, turn]
            logprob_B = logprobs_BV.gather(-1, token_B[:, None]).squeeze(-1)
        if support is not None:
            support.add_turn(~logprobs_BV.isneginf(), token_B, live_B)
        tokens_NS[live_B, turn] = token_B
        logprobs_NS[live_B, turn] = logprob_B
        length_N[live_B] += 1
        is_stopped_B = torch.isin(token_B, stop_ids)
        if stop_strings is not None:
            is_stopped_B |= stop_strings.completed(tokens_NS[live_B, : turn + 1]).to(device)
        stopped_N[live_B] = is_stopped_B
        going_on_B = ~(is_stopped_B | (limit_N[live_B] == turn + 1))
        if not bool(going_on_B.all()):
            kept = going_on_B.nonzero().squeeze(-1)
            if not len(kept):
                break
            live_B, token_B = live_B[kept], token_B[kept]
            batch.keep(kept)
        observer.turn(token_B, live_B)
        batch.advance(model, token_B)
        if routes is not None:
            routes.add_turn(live_B)
    return DecodedRows(token_ids=tokens_NS, logprobs=logprobs_NS, lengths=length_N, truncated=~stopped_N)


def _forced(rows: Sequence[RowRequest], width: int, device: torch.device) -> torch.Tensor | None:
    """Return `[N, S]` int64 of given responses; of a request either all rows have one, or none."""
    responses = [row.forced for row in rows if row.forced is not None]
    if not responses:
        return None
    return torch.tensor([[*response, *[0] * (width - len(response))] for response in responses], device=device)


def _check_finite(logits_BV: torch.Tensor, rows: Sequence[RowRequest], live_B: torch.Tensor, *, turn: int) -> None:
    # The largest logit of a row is NaN if any is, and inf if any is; single ones of -inf are a mask.
    is_bad_B = ~logits_BV.amax(-1).isfinite()
    if bool(is_bad_B.any()):
        numbers = [rows[row].number for row in live_B[is_bad_B].tolist()]
        raise NonFiniteError(f"NaN or inf in the logits for response token {turn + 1} of row {name_some(numbers)}")


class _LiveBatch:
    """Cache, mask and last logits of the rows still being decoded; prompts are padded on the left."""

    def __init__(
        self, *, cache: DynamicCache, mask_BS: torch.Tensor, position_B: torch.Tensor, logits_BV: torch.Tensor
    ) -> None:
        self._cache = cache
        self._mask_BS = mask_BS
        self._position_B = position_B
        self.logits_BV = logits_BV

    @classmethod
    def prefill(
        cls,
        model: PreTrainedModel,
        prompts: Sequence[tuple[int, ...]],
        routes: RowRoutes | None,
        observer: DecodeObserver,
    ) -> _LiveBatch:
        """Run every distinct prompt once and copy its cache to the rows that share it."""
        slots: dict[tuple[int, ...], int] = {}
        row_slot = torch.tensor([slots.setdefault(prompt, len(slots)) for prompt in prompts], device=model.device)
        width = max(len(prompt) for prompt in slots)
        ids_PS = torch.zeros(len(slots), width, dtype=torch.int64)
        mask_PS = torch.zeros(len(slots), width, dtype=torch.int64)
        for row, prompt in enumerate(slots):
            ids_PS[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_PS[row, width - len(prompt) :] = 1
        ids_PS, mask_PS = ids_PS.to(model.device), mask_PS.to(model.device)
        position_PS = (mask_PS.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        observer.prompts(ids_PS, mask_PS, row_slot)
        output = model(
            input_ids=ids_PS,
            attention_mask=mask_PS,
            position_ids=position_PS,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if routes is not None:
            routes.add_prompts(row_slot, mask_PS)
        cache.reorder_cache(row_slot)
        return cls(
            cache=cache,
            mask_BS=mask_PS[row_slot],
            position_B=position_PS[row_slot, -1],
            logits_BV=output.logits[row_slot, -1],
        )

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every other row."""
        self._cache.reorder_cache(rows)
        self._mask_BS, self._position_B = self._mask_BS[rows], self._position_B[rows]

    def advance(self, model: PreTrainedModel, token_B: torch.Tensor) -> None:
        """Feed one token per row."""
        self._mask_BS = torch.nn.functional.pad(self._mask_BS, (0, 1), value=1)
        self._position_B = self._position_B + 1
        output = model(
            input_ids=token_B[:, None],
            attention_mask=self._mask_BS,
            position_ids=self._position_B[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self.logits_BV = output.logits[:, -1]
