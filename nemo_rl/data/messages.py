"""Messages and token ids: a prompt through the chat template.

Called by the datasets. Invariant: text of a user never becomes a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat_template import ChatTemplate, placeholders
from nemo_rl.data.conversation import Message, Role
from nemo_rl.data.pictures import IMAGE, EncodesPictures, Picture
from nemo_rl.data.text_tokens import TextTokens
from nemo_rl.errors import DatasetError, ModelFolderError, boundary

__all__ = ["Message", "PromptEncoder", "encode_prompt", "messages_of", "prompt_messages"]

ANOTHER_DAY = datetime(1999, 12, 31, 23, 59, 58)


_ROLES: Mapping[object, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
"""Roles as OpenAI and ShareGPT name them."""


def messages_of(value: Sequence[object]) -> tuple[list[Message], list[tuple[int, object]]]:
    """Return the messages of a column: `{role, content}` as of OpenAI, or `{from, value}` as of ShareGPT.

    Contents may be lists of parts of type text and image: `IMAGE` in the text is the place of a picture, of which the
    number of its message and the part are returned, too.

    Raises:
        ValueError: one is no such message, or has calls of tools.
    """
    found, pictures = [], []
    for number, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise ValueError(f"message {number}: expected role and content, or from and value, got {item!r:.80}")
        role = _ROLES.get(item.get("role", item.get("from")))
        content = item.get("content", item.get("value"))
        if isinstance(content, list | tuple):
            pictures += [(number, part) for part in content if _is_picture(part)]
            content = "".join(map(_part_text, content))
        if role is None or not isinstance(content, str) or item.get("tool_calls"):
            raise ValueError(
                f"message {number}: expected a text of system, user or assistant, got {dict(item)!r:.80}; leave the "
                "row out, or write its prompt as one text"
            )
        found.append(Message(role=role, content=content))
    return found, pictures


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in {"image", "image_url"}


def _part_text(part: object) -> str:
    if _is_picture(part):
        return IMAGE
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise ValueError(f"expected parts of type text or image, got {part!r:.80}")
    return text


def prompt_messages(
    text: str,
    *,
    system_prompt: str | None = None,
    prompt_template: str = "{input}",
    history: Sequence[Message] = (),
) -> list[Message]:
    """Return the conversation that a prompt opens; `{input}` in the template is replaced by the text, once and
    literally. A system message of the history stands for the system prompt."""
    is_given = system_prompt is None or (bool(history) and history[0].role == "system")
    messages = [*([] if is_given else [Message(role="system", content=system_prompt or "")]), *history]
    return [*messages, Message(role="user", content=prompt_template.replace("{input}", text))]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, now: datetime | None = None
) -> tuple[int, ...]:
    """Return `PromptEncoder.encode` for a single prompt."""
    return PromptEncoder(tokenizer, now=now).encode(messages)


class PromptEncoder:
    """Makes conversations into the token ids that a response continues.

    Text of a message never becomes a control token: neither a special token, nor another added token that looks like a
    marker (`<think>`, `[INST]`) or that the template uses, nor a marker of the template that is a token of the
    vocabulary alone. Where a text holds one, template and texts are encoded apart; all other prompts get the ids of
    the rendered text.

    Args:
        now: the time that `strftime_now` in a template has; None takes the clock of the first prompt.
        with_template: False gives the model the plain texts, one per line, as a tokenizer without a chat template (that
            of a base model) does. Before them stands what the tokenizer puts there by itself (a first token); what it
            puts after a text (an end) is left out, since the response continues the prompt.
        tools: schemas of tools that the template prints, in the form of OpenAI.
        pictures: of the model, for prompts with images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        now: datetime | None = None,
        with_template: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
        pictures: EncodesPictures | None = None,
    ) -> None:
        self._tokenizer, self._tools, self._pictures = tokenizer, tuple(tools), pictures
        self._chat: ChatTemplate | None = None
        if with_template and tokenizer.chat_template is not None:
            self._chat = ChatTemplate(tokenizer, now=now or datetime.now(), tools=self._tools)
        self._plain = TextTokens(tokenizer)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids up to where the assistant begins.

        Raises:
            DatasetError: a text contains a control token and cannot be told from the template, or is lost in it.
            ModelFolderError: the chat template cannot render these messages or leaves out a whole message, or the
                tokenizer cannot read what it gives.
        """
        what = f"tokenizer {self._tokenizer.name_or_path!r}: a prompt cannot be made into tokens"
        with boundary(ModelFolderError, what):
            if self._chat is not None:
                return self._chat.encode(messages)
            text, prefix = "\n".join(message.content for message in messages), self._plain.prefix
            return (*prefix, *self._plain.foreign(text, is_first=not prefix))

    def encode_with(self, messages: Sequence[Message], *, num_pictures: int) -> tuple[int, ...]:
        """Return the token ids with one place for each picture: at each `IMAGE` in the text of the last message, or all
        before a text without one.

        Raises:
            DatasetError: a text holds a control token, or the template has another number of places.
            ModelFolderError: as `encode`.
        """
        encoder = self._needs_pictures()
        with boundary(ModelFolderError, f"tokenizer {self._tokenizer.name_or_path!r}: a prompt cannot be encoded"):
            if self._chat is not None:
                ids = self._chat.encode_with(messages, num_pictures=num_pictures)
            else:
                first, *pieces = "\n".join(message.content for message in messages).split(IMAGE)
                ids = self._plain.prefix
                if pieces and first:
                    ids = (*ids, *self._plain.foreign(first, is_first=not ids))
                place = self._plain.rendered(encoder.image_text * (1 if pieces else num_pictures))
                for piece in pieces or [first]:
                    ids = (*ids, *place, *(self._plain.foreign(piece, is_first=False) if piece else ()))
        if encoder.count(ids) != num_pictures:
            raise DatasetError(
                f"a prompt has {num_pictures} pictures, and its tokens {encoder.count(ids)} places for them; the chat "
                "template must print one for each part of type image (policy.tokenizer.chat_template replaces it), or "
                "set apply_chat_template=false"
            )
        return ids

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[int, ...]:
        return self._needs_pictures().expand(ids, [picture.decode() for picture in pictures])[0]

    def _needs_pictures(self) -> EncodesPictures:
        if self._pictures is None:
            raise DatasetError("a prompt has pictures, and the model (policy.model_name) takes none")
        return self._pictures

    def prints_the_date(self) -> bool:
        """Return whether the prompts that were encoded would be others on another day."""
        if self._chat is None:
            return False
        other = ChatTemplate(self._tokenizer, now=ANOTHER_DAY, tools=self._tools)
        return any(
            self._chat.render(placeholders(shape), form) != other.render(placeholders(shape), form)
            for shape, form in self._chat.known_shapes
        )
