"""Messages, token ids and masks: a prompt through the chat template, a message log as token columns and back.

Called by the datasets for prompts, and by whatever reads or writes whole conversations. Invariant: text of a user
never becomes a control token, and a message log survives the way to columns and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from nemo_rl.errors import DatasetError, ModelFolderError, boundary
from nemo_rl.utils.time_limit import time_limit

__all__ = ["Message", "TokenMessage", "TokenRow", "encode_prompt", "from_row", "prompt_messages", "to_row"]

Role = Literal["system", "user", "assistant", "tool"]

RENDER_S = 5.0
"""A template takes less than a millisecond; one with nested loops may take a lifetime."""

# Stands for one message's text while the template is rendered; holds nothing that a template would trim or escape.
_PLACEHOLDER = "NEMORLCONTENT{}END"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn as text."""

    role: Role
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMessage:
    """One turn as tokens; template tokens belong to the turn they introduce."""

    role: Role
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A message log as aligned columns.

    Example:
        A prompt of two tokens and a response of one: `input_ids=(5, 6, 7)`, `token_mask=(0, 0, 1)`,
        `boundaries=(0, 2, 3)`, `roles=("user", "assistant")`.
    """

    input_ids: tuple[int, ...]
    token_mask: tuple[int, ...]
    """1 on assistant tokens, which are trained, 0 elsewhere."""
    boundaries: tuple[int, ...]
    """Start of each turn, then the length of the row."""
    roles: tuple[Role, ...]


def prompt_messages(text: str, *, system_prompt: str | None = None, prompt_template: str = "{input}") -> list[Message]:
    """The conversation that a prompt opens; `{input}` in the template is replaced by the text, once and literally."""
    messages = [Message(role="system", content=system_prompt)] if system_prompt is not None else []
    return [*messages, Message(role="user", content=prompt_template.replace("{input}", text))]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids up to where the assistant begins.

    A tokenizer without a chat template (a base model) gets the plain texts, one per line.

    Raises:
        DatasetError: a text contains a control token and the template changes texts, so they cannot be distinguished.
        ModelFolderError: the chat template cannot render these messages, or the tokenizer cannot read what it gives.
    """
    with boundary(ModelFolderError, f"tokenizer {tokenizer.name_or_path!r}: a prompt cannot be made into tokens"):
        return _encode(tokenizer, messages)


def _encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        return _plain(tokenizer, "\n".join(message.content for message in messages))
    controls = tokenizer.all_special_tokens
    if any(control in message.content for message in messages for control in controls):
        return _encode_apart(tokenizer, messages)
    return _with_controls(tokenizer, _render(tokenizer, [(m.role, m.content) for m in messages]))


def to_row(log: Sequence[TokenMessage]) -> TokenRow:
    """Lays the turns of one conversation end to end."""
    boundaries = [0]
    for message in log:
        boundaries.append(boundaries[-1] + len(message.token_ids))
    return TokenRow(
        input_ids=tuple(token for message in log for token in message.token_ids),
        token_mask=tuple(int(message.role == "assistant") for message in log for _ in message.token_ids),
        boundaries=tuple(boundaries),
        roles=tuple(message.role for message in log),
    )


def from_row(row: TokenRow) -> list[TokenMessage]:
    """The turns that `to_row` laid out."""
    ends = row.boundaries[1:]
    return [
        TokenMessage(role=role, token_ids=row.input_ids[start:end])
        for role, start, end in zip(row.roles, row.boundaries, ends, strict=False)
    ]


def _render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]]) -> str:
    conversation = [{"role": role, "content": content} for role, content in turns]
    # The template is a program in the model folder or in the recipe.
    what = f"tokenizer {tokenizer.name_or_path!r}: the chat template fails (policy.tokenizer.chat_template replaces it)"
    with boundary(ModelFolderError, what), time_limit(RENDER_S):
        return str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))


def _with_controls(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _encode_apart(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[int, ...]:
    """Template with control tokens, texts without: a literal `<|im_end|>` in a text stays text."""
    marks = [_PLACEHOLDER.format(number) for number in range(len(messages))]
    rest = _render(tokenizer, [(message.role, mark) for message, mark in zip(messages, marks, strict=True)])
    ids: list[int] = []
    for mark, message in zip(marks, messages, strict=True):
        before, found, rest = rest.partition(mark)
        if not found:
            raise DatasetError(
                f"prompt {message.content[:80]!r}: contains a control token, and the chat template does not keep the "
                "text as it is; remove the control token or set policy.tokenizer.chat_template"
            )
        ids += [*_with_controls(tokenizer, before), *_plain(tokenizer, message.content)]
    return (*ids, *_with_controls(tokenizer, rest))
