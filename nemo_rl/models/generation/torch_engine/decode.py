"""The decode loop over one batch of rows: prefill each prompt once, then one token per live row and turn.

Called by `TorchEngine`. Invariant: a finished row leaves the batch at once and nothing of it is computed again.
Shapes: P distinct prompts, B live rows, N rows of the batch, S tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.errors import NonFiniteError, name_some
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.generation.rows import RowRequest
from nemo_rl.models.generation.torch_engine.observer import NO_OBSERVER, DecodeObserver
from nemo_rl.models.generation.torch_engine.routes import RowRoutes
from nemo_rl.models.generation.torch_engine.sampling import distribution, draw, seeds_to_tensor
from nemo_rl.models.support import SupportRecorder

__all__ = ["DecodedRows", "StopStrings", "decode_rows"]

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
        """`[B]` bool for rows of response tokens."""
        tails = tokens_BS[:, -self._window :].tolist()
        decoded = [str(self._tokenizer.decode(tail, skip_special_tokens=False)) for tail in tails]
        return torch.tensor([any(text in tail for text in self._texts) for tail in decoded], dtype=torch.bool)


@torch.inference_mode()
def decode_rows(
    model: PreTrainedModel,
    rows: Sequence[RowRequest],
    sampling: SamplingParams,
    *,
    stop_strings: StopStrings | None,
    routes: RowRoutes | None = None,
    support: SupportRecorder | None = None,
    observer: DecodeObserver = NO_OBSERVER,
) -> DecodedRows:
    """Samples every row, or decodes what is forced, until a stop token, a stop string or its own token limit.

    Args:
        routes: of this batch, still empty, and the routers must be listened to; None records nothing.
        support: of this batch, still empty; None records nothing.
        observer: is told of every forward pass.

    Raises:
        NonFiniteError: logits are NaN or inf; nothing is drawn from them.
    """
    device = model.device
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
    """`[N, S]` int64 of given responses; of a request either all rows have one, or none."""
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
        """Runs every distinct prompt once and copies its cache to the rows that share it."""
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
        """Drops every other row."""
        self._cache.reorder_cache(rows)
        self._mask_BS, self._position_B = self._mask_BS[rows], self._position_B[rows]

    def advance(self, model: PreTrainedModel, token_B: torch.Tensor) -> None:
        """Feeds one token per row."""
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
