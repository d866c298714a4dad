"""Messages and token ids: a prompt through the chat template.

Called by the datasets. Invariant: text of a user never becomes a control token.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from nemo_rl.errors import DatasetError, ModelFolderError, boundary, shorten
from nemo_rl.utils.deadlines import time_limit

__all__ = ["Message", "PromptEncoder", "encode_prompt", "prompt_messages"]

Role = Literal["system", "user", "assistant", "tool"]

RENDER_S = 5.0
"""A template takes less than a millisecond; one with nested loops may take a lifetime."""
MARKER_LENGTH = 64
"""Characters of the longest marker, such as `[INST]`, that is looked for in a template."""
_MARKERS = re.compile(rf"<[^<>\s]{{1,{MARKER_LENGTH}}}>|\[[^\[\]\s]{{1,{MARKER_LENGTH}}}\]")
# Stands for one message's text while the template is looked at; holds nothing that a template would trim or escape.
_PLACEHOLDER = "NEMORLCONTENT{}END"
ANOTHER_DAY = datetime(1999, 12, 31, 23, 59, 58)
# Before a piece of a text, so that a tokenizer that begins every text with a blank does not put one into its middle.
_ANCHORS = ("\n", "x", ".")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn as text."""

    role: Role
    content: str


def prompt_messages(text: str, *, system_prompt: str | None = None, prompt_template: str = "{input}") -> list[Message]:
    """Return the conversation that a prompt opens; `{input}` in the template is replaced by the text, once and
    literally."""
    messages = [Message(role="system", content=system_prompt)] if system_prompt is not None else []
    return [*messages, Message(role="user", content=prompt_template.replace("{input}", text))]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, now: datetime | None = None
) -> tuple[int, ...]:
    """Return `PromptEncoder.encode` for a single prompt."""
    return PromptEncoder(tokenizer, now=now).encode(messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TemplateForm:
    """The form in which the template takes conversations of some roles."""

    in_parts: frozenset[Role]
    """Roles whose content is given as `[{"type": "text", "text": ...}]`."""
    controls: tuple[int, ...]
    """Control tokens of a prompt whose texts hold none, in order."""


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
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, now: datetime | None = None, with_template: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._now = now or datetime.now()
        self._with_template = with_template and tokenizer.chat_template is not None
        self._forms: dict[tuple[Role, ...], _TemplateForm] = {}

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids up to where the assistant begins.

        Raises:
            DatasetError: a text contains a control token and cannot be told from the template, or is lost in it.
            ModelFolderError: the chat template cannot render these messages or leaves out a whole message, or the
                tokenizer cannot read what it gives.
        """
        what = f"tokenizer {self._tokenizer.name_or_path!r}: a prompt cannot be made into tokens"
        with boundary(ModelFolderError, what):
            if not self._with_template:
                text = "\n".join(message.content for message in messages)
                return (*self._prefix, *self._text_ids(text, is_first=not self._prefix))
            return self._encode_chat(messages)

    def prints_the_date(self) -> bool:
        """Return whether the prompts that were encoded would be others on another day."""
        other = PromptEncoder(self._tokenizer, now=ANOTHER_DAY)
        return any(
            self._render(_placeholders(roles), form.in_parts) != other._render(_placeholders(roles), form.in_parts)
            for roles, form in self._forms.items()
        )

    # ---- through the chat template

    def _encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        form = self._form(tuple(message.role for message in messages))
        rendered = self._render([(m.role, m.content) for m in messages], form.in_parts)
        for message in messages:
            lost = _lost_text(message.content, rendered)
            if lost is not None:
                raise DatasetError(
                    f"prompt {message.content[:80]!r}: the chat template loses {lost[:80]!r} of the {message.role} "
                    "message; change the text, or set policy.tokenizer.chat_template"
                )
        ids = self._rendered_ids(rendered)
        controls, unknown = self._controls_in(ids), self._tokenizer.unk_token
        if controls == form.controls and not (unknown and any(unknown in message.content for message in messages)):
            return tuple(ids)
        apart = self._encode_apart(messages, form)
        # A template may print control tokens of its own for some texts, such as `/no_think`.
        return tuple(apart if self._controls_in(apart) != controls else ids)

    def _encode_apart(self, messages: Sequence[Message], form: _TemplateForm) -> list[int]:
        """Encode the template with control tokens, texts without: a literal `<|im_end|>` in a text stays text.

        The texts are rendered between two characters that occur nowhere else, so that a template may look at them and
        trim them.
        """
        begin, end = _unused_characters([self._template_text, *(message.content for message in messages)])
        marked = [(message.role, _between(begin, message.content, end)) for message in messages]
        pieces = re.split(f"{begin}([^{begin}{end}]*){end}", self._render(marked, form.in_parts))
        texts = {message.content.strip() for message in messages}
        if any(begin in piece or end in piece for piece in pieces) or not texts.issuperset(pieces[1::2]):
            longest = max((message.content for message in messages), key=len)
            raise DatasetError(
                f"prompt {longest[:80]!r}: contains a control token, and the chat template does not keep the "
                "text as it is; remove the control token or set policy.tokenizer.chat_template"
            )
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                ids += self._text_ids(piece, is_first=not ids)
            else:
                ids += self._piece_ids(piece, is_first=not ids, as_text=False)
        return ids

    def _form(self, roles: tuple[Role, ...]) -> _TemplateForm:
        if roles not in self._forms:
            in_parts = self._roles_in_parts(roles)
            ids = self._rendered_ids(self._render(_placeholders(roles), in_parts))
            self._forms[roles] = _TemplateForm(in_parts=in_parts, controls=self._controls_in(ids))
        return self._forms[roles]

    def _roles_in_parts(self, roles: tuple[Role, ...]) -> frozenset[Role]:
        """Return the roles whose content the template wants in parts; most templates want plain texts.

        Raises:
            ModelFolderError: a message is lost either way.
        """
        lost, error = self._lost(roles, frozenset())
        if not lost:
            return frozenset()
        if error is not None and isinstance(error.__cause__, TimeoutError):
            raise error
        for in_parts in (frozenset(lost), frozenset(roles)):
            still_lost, _ = self._lost(roles, in_parts)
            if not still_lost:
                return in_parts
        where = f"tokenizer {self._tokenizer.name_or_path!r}: the chat template"
        way_out = "; set policy.tokenizer.chat_template to one that prints it"
        if "system" in roles and not self._lost(tuple(role for role in roles if role != "system"), frozenset())[0]:
            why = f": {shorten(str(error))}" if error is not None else ""
            raise ModelFolderError(
                f"{where} {'takes no system message' if error is not None else 'leaves out the system prompt'}{why}; "
                "put system_prompt of the dataset into its prompt_template, or set policy.tokenizer.chat_template"
            ) from error
        if error is not None:
            raise error
        raise ModelFolderError(f"{where} leaves out the text of the {' and of the '.join(lost)} message{way_out}")

    def _lost(self, roles: tuple[Role, ...], in_parts: frozenset[Role]) -> tuple[list[Role], ModelFolderError | None]:
        """Return the roles of which a text is not rendered; all of them, with the error, where rendering fails."""
        turns = _placeholders(roles)
        try:
            rendered = self._render(turns, in_parts).casefold()
        except ModelFolderError as error:
            return list(dict.fromkeys(roles)), error
        lost = [role for role, mark in turns if mark.casefold() not in rendered or f"'text': '{mark}" in rendered]
        return list(dict.fromkeys(lost)), None

    def _render(self, turns: Sequence[tuple[Role, str]], in_parts: frozenset[Role]) -> str:
        conversation = [
            {"role": role, "content": [{"type": "text", "text": text}] if role in in_parts else text}
            for role, text in turns
        ]
        # The template is a program in the model folder or in the recipe.
        what = f"tokenizer {self._tokenizer.name_or_path!r}: the chat template fails"
        with boundary(ModelFolderError, f"{what} (policy.tokenizer.chat_template replaces it)"), time_limit(RENDER_S):
            # As `apply_chat_template` renders it, which has no parameter for the time.
            return str(
                _compile_jinja_template(self._template_text).render(
                    messages=conversation,
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **{**self._tokenizer.special_tokens_map, "strftime_now": self._now.strftime},
                )
            )

    @cached_property
    def _template_text(self) -> str:
        return str(self._tokenizer.get_chat_template())

    # ---- control tokens

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """Return the tokens that no text of a message may become."""
        tokenizer = self._tokenizer
        template = self._template_text if self._with_template else ""
        found = set(tokenizer.all_special_ids)
        for token, added in tokenizer.added_tokens_decoder.items():
            is_used = added.content in template and not added.content.isspace()
            if added.special or is_used or _is_marker(added.content):
                found.add(token)
        for marker in set(_MARKERS.findall(template)):
            # A token of the vocabulary alone, perhaps one that holds the blank before it.
            ids = {*self._rendered_ids(marker), *self._rendered_ids(f"x {marker}")}
            found |= {token for token in ids if tokenizer.decode([token]).strip() == marker}
        # An unknown character is no control token, unless the tokenizer says it with one.
        if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            found.discard(tokenizer.unk_token_id)
        return frozenset(found)

    def _controls_in(self, ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(token for token in ids if token in self._control_ids)

    # ---- texts

    @cached_property
    def _prefix(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer puts before a text by itself."""
        probe = "a"
        bare, whole = self._rendered_ids(probe), list(self._tokenizer(probe)["input_ids"])
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start])
        raise ModelFolderError(
            f"tokenizer {self._tokenizer.name_or_path!r}: expected tokens before and after a text alone, got {whole} "
            f"for {probe!r}, whose own tokens are {bare}"
        )

    def _rendered_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text_ids(self, text: str, *, is_first: bool) -> list[int]:
        """Return the tokens of a text, none of which is a control token.

        Raises:
            DatasetError: the tokenizer has no other tokens for it.
        """
        ids = self._piece_ids(text, is_first=is_first, as_text=True)
        if not self._controls_in(ids):
            return ids
        cuts = self._cuts(text)
        if not cuts:
            raise DatasetError(
                f"prompt {text[:80]!r}: the tokenizer can write it as a control token only; remove it from the prompt"
            )
        found: list[int] = []
        for start, end in pairwise((0, *cuts, len(text))):
            found += self._text_ids(text[start:end], is_first=is_first and start == 0)
        return found

    def _cuts(self, text: str) -> list[int]:
        """Return the positions at which the text is cut so that none of its control tokens stays whole."""
        given = self._encoded(text, as_text=True, return_offsets_mapping=self._tokenizer.is_fast)
        if not self._tokenizer.is_fast:
            return [len(text) // 2] if len(text) > 1 else []
        spans = zip(given["input_ids"], given["offset_mapping"], strict=True)
        cuts = {start + 1 for token, (start, _) in spans if token in self._control_ids}
        return sorted(cut for cut in cuts if 0 < cut < len(text))

    def _piece_ids(self, text: str, *, is_first: bool, as_text: bool) -> list[int]:
        """Return the tokens of a piece of a prompt."""
        if not text:
            return []
        for anchor in () if is_first else _ANCHORS:
            before = list(self._encoded(anchor, as_text=as_text)["input_ids"])
            if self._tokenizer.unk_token_id in before:
                continue
            ids = list(self._encoded(anchor + text, as_text=as_text)["input_ids"])
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return list(self._encoded(text, as_text=as_text)["input_ids"])

    def _encoded(self, text: str, *, as_text: bool, **options: bool) -> Any:
        """Encode as text: special tokens in it are no tokens; other added ones still are."""
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=as_text, **options)


def _placeholders(roles: Sequence[Role]) -> list[tuple[Role, str]]:
    return [(role, _PLACEHOLDER.format(number)) for number, role in enumerate(roles)]


def _is_marker(text: str) -> bool:
    """Return whether a token is written like a control token: `<think>`, `[INST]`, `<|im_end|>`, and no word or white
    space."""
    core = text.strip()
    has_signs = len(core) > 2 and not core[0].isalnum() and not core[-1].isalnum()
    return has_signs and any(map(str.isalnum, core))


def _between(begin: str, text: str, end: str) -> str:
    """Put marks within the white space around a text, which a template may trim."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{begin}{core}{end}{text[start + len(core) :]}"


def _unused_characters(texts: Sequence[str]) -> tuple[str, str]:
    """Return two characters of Unicode's private use that are in none of the texts."""
    used = frozenset().union(*texts)
    free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
    return next(free), next(free)


def _lost_text(text: str, rendered: str) -> str | None:
    """Return the first word of `text` that is not rendered; None where all are. White space and case may change."""
    core = text.strip()
    if core in rendered:
        return None
    shown = html.unescape(rendered).casefold()
    place = 0
    for word in core.split():
        found = shown.find(word.casefold(), place)
        if found < 0:
            return word
        place = found + len(word.casefold())
    return None
