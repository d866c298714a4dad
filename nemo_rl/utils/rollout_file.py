"""The files of the readable rollouts of a run, the form of their numbers, and the tokens of a row in them.

The trainer and the rollout worker write them; `nemo_rl_tools.rollouts` reads them without torch. Invariant: the
texts of a row's tokens, joined, are its text, at most with another space in front of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_rl.errors import ResourceError, shorten
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import write_text

if TYPE_CHECKING:
    import torch

    from nemo_rl.data.datasets import Prompt

__all__ = [
    "PROMPT_NUMBER",
    "PROMPT_SOURCE",
    "ROLLOUTS",
    "TokenTexts",
    "asked_texts",
    "rollout_path",
    "rounded",
    "row_texts",
    "steps_with_rollouts",
    "token_record",
    "write_rollouts",
]

ROLLOUTS = "rollouts"
"""Folder of the readable rollouts in the folder of a run."""
DIGITS = 5
"""Significant ones of a number: float32 has two more, and a person reads none of them."""
_NAME = re.compile(r"step_([0-9]{1,18})\.jsonl", re.ASCII)


def rollout_path(log_dir: Path, step: int) -> Path:
    return log_dir / ROLLOUTS / f"step_{step}.jsonl"


def steps_with_rollouts(log_dir: Path) -> tuple[int, ...]:
    """Return the training steps whose rollouts are there, in order; empty without the folder."""
    names = (_NAME.fullmatch(path.name) for path in (log_dir / ROLLOUTS).glob("step_*.jsonl"))
    return tuple(sorted(int(name[1]) for name in names if name is not None))


def write_rollouts(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Write one JSON object per line.

    Raises:
        ResourceError: the file cannot be written. (An actor's OSError would be a failure of the actor.)
    """
    try:
        write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    except OSError as error:
        raise ResourceError(f"rollouts cannot be written to {path}: {machine_problem(error) or error}") from error


def rounded(value: float) -> float | str:
    """Return a number for JSON, which has no numbers that are not finite: `float` reads both forms.

    Example:
        >>> rounded(-0.123456789), rounded(12345678.0), rounded(float("-inf"))
        (-0.12346, 12346000.0, '-inf')
    """
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(float(value))


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


PROMPT_NUMBER = "number"
"""Key of the number of a row's prompt in the training set."""
PROMPT_SOURCE = "source"
"""Key of the name of its source, where there are several."""
MOST_ANSWER = 2000
"""Characters of a gold answer; the tests of a program can be long."""


def asked_texts(prompt: Prompt) -> dict[str, object]:
    """Return what a row was asked, for people: the gold answer as text, and the messages of the prompt."""
    text = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer, default=str)
    messages = [{"role": said.role, "content": said.content} for said in prompt.messages]
    return {"answer": None if prompt.answer is None else shorten(text, limit=MOST_ANSWER), "messages": messages}


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
