"""The tokens of a row in readable rollouts: ids, texts, mask, log-probabilities.

Called by the rollout worker. Invariant: the texts of a row's tokens, joined, are its
text, at most with another space in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from nemo_rl.utils.rollout_file import rounded

__all__ = ["TokenTexts", "row_texts", "token_record"]

PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""The sign that a tokenizer shows for a part of a character."""
MOST_PARTS = 4
"""Tokens of one character: UTF-8 has no more bytes."""


class Decoder(Protocol):
    """The side of a tokenizer that is used here."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens."""
        ...


class TokenTexts:
    """Texts of single tokens, each decoded once.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """A text for each token; where several make up one character, the last has it, and the others are empty."""
        texts = [self._single(token) for token in ids]
        start = 0
        while start < len(texts):
            end = self._end_of_character(ids, start) if PARTIAL in texts[start] else start + 1
            if end > start + 1:
                texts[start:end] = [""] * (end - start - 1) + [self._tokenizer.decode(list(ids[start:end]))]
            start = end
        return texts

    def _single(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            # Behind another token: alone, some tokenizers leave out the space in front of a word.
            once, twice = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
            text = self._known[token] = twice[len(once) :] if twice.startswith(once) else once
        return text

    def _end_of_character(self, ids: Sequence[int], start: int) -> int:
        """Return the place behind the tokens that are readable together; the next one where there are none."""
        for end in range(start + 2, min(start + MOST_PARTS, len(ids)) + 1):
            if PARTIAL not in self._tokenizer.decode(list(ids[start:end])):
                return end
        return start + 1


def row_texts(tokenizer: Decoder, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, str]:
    """Return the texts of a row: the prompt, and the response from the first sampled token on, with the replies of a
    conversation in it.

    Args:
        ids: `[T]` tokens of the row.
        mask: `[T]` bool, sampled tokens.
    """
    start = int(mask.int().argmax()) if bool(mask.any()) else len(ids)
    return {"prompt": tokenizer.decode(ids[:start].tolist()), "response": tokenizer.decode(ids[start:].tolist())}


def token_record(
    texts: TokenTexts,
    ids: Sequence[int],
    *,
    mask: torch.Tensor,
    generation_logprobs: torch.Tensor,
    prev_logprobs: torch.Tensor | None,
) -> dict[str, object]:
    """Columns of one row as JSON.

    Args:
        mask: `[T]` bool, tokens that are trained; log-probabilities of others are written as null.
        generation_logprobs: `[T]` of the rollout.
        prev_logprobs: `[T]` of the trainer before its update; None where it made none.
    """
    is_trained = mask.tolist()
    return {
        "token_ids": list(ids),
        "token_texts": texts.of(ids),
        "token_mask": [int(kept) for kept in is_trained],
        "generation_logprobs": _numbers(generation_logprobs, is_trained),
        "prev_logprobs": None if prev_logprobs is None else _numbers(prev_logprobs, is_trained),
    }


def _numbers(column: torch.Tensor, is_shown: Sequence[bool]) -> list[float | str | None]:
    return [rounded(value) if shown else None for value, shown in zip(column.tolist(), is_shown, strict=True)]
