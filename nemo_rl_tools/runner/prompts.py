"""Rows of tokens for the runner: sums, a text, a file, token ids, or those of a kept step; the same ones everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.data.messages import encode_prompt, prompt_messages
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import UserError
from nemo_rl.utils.files import MOST_BYTES, read_plain

__all__ = ["PromptSpec", "RunnerRows", "batch_of", "make_rows"]

DEFAULT_LENGTH = 137
"""Odd, so that no layout divides it: padding is met in every run."""
SHORTER_BY = 17
"""Tokens that each further row lacks, with unequal lengths."""
SHORTEST = 2
SECOND_OPERANDS = 100
PromptKind: TypeAlias = Literal["math", "text", "file", "token-ids", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSpec:
    """The rows to run."""

    kind: PromptKind = "math"
    text: str | None = None
    path: Path | None = None
    """Path of a text (`file`), of a JSON list of rows (`token-ids`) or of a folder `steps/step_N` of a run (`step`)."""
    length: int | None = None
    """Tokens of a row; None: 137 of `math`, or as many as the model has positions for; all of the others."""
    num_rows: int = 1
    """Number of rows of `step`, from the first on; of `token-ids` all are taken."""
    is_unequal: bool = False
    """Each row is shorter than the one before it."""
    uses_chat_template: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerRows:
    """Rows and their names."""

    keys: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]


def make_rows(spec: PromptSpec, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, max_length: int) -> RunnerRows:
    """Raises:
    UserError: nothing to read, too few tokens for the length, ids outside the vocabulary, rows that are too long.
    """
    keys: Sequence[str] = ()
    if spec.kind == "math" and spec.length is None:
        spec = replace(spec, length=min(DEFAULT_LENGTH, max_length - 1 + max_length % 2))
    if spec.kind == "step":
        keys, rows = _of_step(spec)
    elif spec.kind == "token-ids":
        rows = _token_ids(spec)
    else:
        rows = [_cut(_tokens(spec, tokenizer, number), spec, number) for number in range(spec.num_rows)]
    for number, row in enumerate(rows):
        if not SHORTEST <= len(row) <= max_length:
            raise UserError(
                f"row {number}: expected {SHORTEST} to {max_length} tokens (positions of the model), got {len(row)}"
            )
        if bad := [token for token in row if not 0 <= token < vocab_size]:
            raise UserError(f"row {number}: expected token ids of 0 to {vocab_size - 1}, got {bad[0]}")
    return RunnerRows(keys=tuple(keys) or tuple(f"row_{number}" for number in range(len(rows))), ids=tuple(rows))


def batch_of(rows: RunnerRows) -> BatchedDataDict:
    """Return all rows padded on the right; every token but the first is scored, padding never."""
    lengths = torch.tensor([len(row) for row in rows.ids], dtype=torch.int64)
    ids_NT = torch.zeros(len(rows.ids), int(lengths.max()), dtype=torch.int64)
    for number, row in enumerate(rows.ids):
        ids_NT[number, : len(row)] = torch.tensor(row)
    columns_T = torch.arange(ids_NT.shape[1])
    return BatchedDataDict(
        {
            "input_ids": ids_NT,
            "input_lengths": lengths,
            "token_mask": (columns_T < lengths[:, None]) & (columns_T > 0),
            "sample_mask": torch.ones(len(rows.ids)),
            "keys": list(rows.keys),
        }
    )


def _tokens(spec: PromptSpec, tokenizer: PreTrainedTokenizerBase, number: int) -> tuple[int, ...]:
    if spec.kind == "math":
        # A token has a character at least.
        return _encoded(_sums(first=number + 1, num_chars=16 * (spec.length or 0)), spec, tokenizer)
    if spec.kind == "text":
        if not spec.text:
            raise UserError("prompt text: give a text")
        return _encoded(spec.text, spec, tokenizer)
    return _encoded(_read(spec), spec, tokenizer)


def _encoded(text: str, spec: PromptSpec, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if spec.uses_chat_template:
        return encode_prompt(tokenizer, prompt_messages(text))
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _sums(*, first: int, num_chars: int) -> str:
    """`1+1=2, 1+2=3, ...`: the second operand counts to 100, then the first one goes on."""
    numbers = ((a, b) for a in count(first) for b in range(1, SECOND_OPERANDS + 1))
    sums = (f"{a}+{b}={a + b}, " for a, b in numbers)
    # A sum has at least seven characters.
    return "".join(islice(sums, num_chars // 7 + 1))[:num_chars]


def _cut(tokens: Sequence[int], spec: PromptSpec, number: int) -> tuple[int, ...]:
    length = spec.length or len(tokens)
    if len(tokens) < length:
        raise UserError(f"prompt {spec.kind}: expected {length} tokens, the text has {len(tokens)}; lower --length")
    if spec.is_unequal:
        length = max(SHORTEST, length - SHORTER_BY * number)
    return tuple(tokens[:length])


def _token_ids(spec: PromptSpec) -> list[tuple[int, ...]]:
    text = _read(spec)
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise UserError(f"{spec.path}: expected a JSON list of rows of token ids: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise UserError(f"{spec.path}: expected a JSON list of rows such as [[5, 6, 7], [5, 8]]")
    if not all(isinstance(token, int) and not isinstance(token, bool) for row in rows for token in row):
        raise UserError(f"{spec.path}: expected whole numbers as token ids")
    return [tuple(row) for row in rows]


def _of_step(spec: PromptSpec) -> tuple[Sequence[str], list[tuple[int, ...]]]:
    """Return keys and tokens of the first rows of a kept step, as they were sampled."""
    path = spec.path or Path()
    found = [folder for folder in StepsFolder(path.parent.parent).all() if folder.path.name == path.name]
    if not found or not path.is_dir():
        raise UserError(f"prompt step: expected a kept step such as results/logs/steps/step_3, got {str(path)!r}")
    step, (rollout, _) = found[0].read(), found[0].columns()
    if step.rows is None or "input_ids" not in rollout:
        raise UserError(f"{path}: this step was kept before it had rows")
    rows = [tuple(row.tolist()) for row in rollout["input_ids"].unbind()[: spec.num_rows]]
    return step.rows.keys[: spec.num_rows], rows


def _read(spec: PromptSpec) -> str:
    if spec.path is None:
        raise UserError(f"prompt {spec.kind}: give a file")
    try:
        return read_plain(spec.path, most_bytes=MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{spec.path}: cannot be read: {error}") from error
