"""A chat template: renders conversations and makes what it renders into token ids.

    messages -- render --> text -- encode, control tokens of the texts off --> ids
                                                      encode_after: the same for what follows an assistant turn

Called by the encoders of prompts and of turns. Invariant: text of a user, a tool or a system message never becomes a
control token, and text of an assistant never becomes one that begins or ends a turn.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from nemo_rl.data.conversation import Message, Role, ToolCall
from nemo_rl.data.pictures import IMAGE
from nemo_rl.data.text_tokens import TextTokens
from nemo_rl.errors import DatasetError, ModelFolderError, boundary, shorten
from nemo_rl.utils.deadlines import time_limit

__all__ = ["ChatTemplate", "Form", "Shape", "placeholders", "shape_of", "template_text"]

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of chat templates, as transformers knows them."""
RENDER_S = 5.0
"""A template takes less than a millisecond; one with nested loops may take a lifetime."""
# Stands for one message's text while the template is looked at; holds nothing that a template would trim or escape.
_PLACEHOLDER = "NEMORLCONTENT{}END"
_CALLED = "NEMORLTOOL"
Shape = tuple[tuple[Role, tuple[str, ...]], ...]
"""Roles and names of called tools of a conversation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The form in which the template takes conversations of some roles."""

    in_parts: frozenset[Role] = frozenset()
    """Roles whose content is given as `[{"type": "text", "text": ...}]`."""
    num_pictures: int = 0
    """Parts of type image in the last message, which is then given in parts."""
    arguments_as_text: bool = False
    """True where the arguments of a call are given as a JSON text."""
    first_call: int = 0
    """Number of the first call, from which the ids of calls are counted."""
    controls: tuple[int, ...] = ()
    """Control tokens of a conversation whose texts hold none, in order."""


def placeholders(shape: Shape, *, prefix: str = "") -> list[Message]:
    """Return messages of these roles and calls, each with its own text that stands for its content."""
    found = []
    for number, (role, names) in enumerate(shape):
        marks = [_PLACEHOLDER.format(f"{prefix}{number}C{call}") for call in range(len(names))]
        calls = tuple(ToolCall(name=name, arguments={"value": m}) for name, m in zip(names, marks, strict=True))
        found.append(Message(role=role, content=_PLACEHOLDER.format(f"{prefix}{number}"), calls=calls))
    return found


def shape_of(messages: Sequence[Message]) -> Shape:
    """Return roles and names of called tools."""
    return tuple((message.role, tuple(call.name for call in message.calls)) for message in messages)


def template_text(tokenizer: PreTrainedTokenizerBase, *, has_tools: bool = False) -> str:
    """Return the chat template; of several named ones `tool_use` where there are tools, else `default`.

    Raises:
        ModelFolderError: neither is there.
    """
    named = tokenizer.chat_template
    if not isinstance(named, dict):
        return str(tokenizer.get_chat_template())
    for name in (TOOL_USE, DEFAULT) if has_tools else (DEFAULT,):
        if name in named:
            return str(named[name])
    raise ModelFolderError(
        f"tokenizer {tokenizer.name_or_path!r}: expected a chat template named {DEFAULT!r}"
        f"{f' or {TOOL_USE!r}' if has_tools else ''}, got {', '.join(map(repr, named))}; set "
        "policy.tokenizer.chat_template to the one that is meant"
    )


class ChatTemplate:
    """The chat template of a tokenizer, at one time and with one set of tools.

    Args:
        now: the time that `strftime_now` in the template has.
        tools: schemas that the template prints, in the form of OpenAI.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, now: datetime, tools: Sequence[Mapping[str, object]] = ()
    ) -> None:
        self.tokenizer, self._now, self._tools = tokenizer, now, [dict(tool) for tool in tools]
        self._forms: dict[tuple[Shape, bool], Form] = {}

    @cached_property
    def tokens(self) -> TextTokens:
        return TextTokens(self.tokenizer, template=self._text)

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> tuple[int, ...]:
        """Return the ids of a conversation, up to where the assistant begins.

        Raises:
            DatasetError: a text contains a control token and cannot be told from the template, or is lost in it.
            ModelFolderError: the template cannot render these messages, or leaves out a whole message.
        """
        form = self.form(shape_of(messages), generation_prompt=generation_prompt)
        return self.encode_part(messages, form, generation_prompt=generation_prompt)

    def encode_with(self, messages: Sequence[Message], *, num_pictures: int) -> tuple[int, ...]:
        """Return the ids of a conversation with pictures in its last message: at each `IMAGE` in its text, which are
        as many, or before a text without one.

        Raises:
            DatasetError: a text contains a control token, or is lost in the template.
            ModelFolderError: the template cannot render these messages.
        """
        form = replace(self._form_of(shape_of(messages)), num_pictures=num_pictures)
        rendered = self.render(messages, form)
        pieces = [replace(messages[-1], content=piece) for piece in messages[-1].content.split(IMAGE)]
        for message in (*messages[:-1], *pieces):
            _check_kept(message, rendered)
        ids = self.tokens.rendered(rendered)
        neutral = self.tokens.rendered(self.render(placeholders(shape_of(messages)), form))
        if self.tokens.controls_in(ids) != self.tokens.controls_in(neutral):
            longest = max((message.content for message in messages), key=len)
            raise DatasetError(f"prompt {longest[:80]!r}: contains a control token beside pictures; remove it")
        return tuple(ids)

    def encode_part(
        self,
        messages: Sequence[Message],
        form: Form,
        *,
        generation_prompt: bool = True,
        part: Callable[[str], str] = str,
        after: int = 0,
        keeps_turns: bool = False,
    ) -> tuple[int, ...]:
        """Return the ids of a part of what the template renders.

        Args:
            form: its control tokens are those of the part.
            part: returns the part of a rendered text.
            after: messages before this one are in no part, so that what becomes of their texts is not looked at.
            keeps_turns: texts of the assistant must be in the part, too.
        """
        rendered = part(self.render(messages, form, generation_prompt=generation_prompt))
        foreign = [message for message in messages[after:] if message.role != "assistant"]
        for message in messages[after:] if keeps_turns else foreign:
            _check_kept(message, rendered)
        ids = self.tokens.rendered(rendered)
        controls, unknown = self.tokens.controls_in(ids), self.tokenizer.unk_token
        is_unknown = bool(unknown) and any(unknown in message.content for message in foreign)
        if controls == form.controls and not is_unknown:
            return tuple(ids)
        apart = self._encode_apart(messages, form, generation_prompt=generation_prompt, part=part)
        # A template may print control tokens of its own for some texts, such as `/no_think`.
        return tuple(apart if self.tokens.controls_in(apart) != controls else ids)

    def _encode_apart(
        self, messages: Sequence[Message], form: Form, *, generation_prompt: bool, part: Callable[[str], str]
    ) -> list[int]:
        """Encode the template with control tokens, texts without: a literal `<|im_end|>` in a text stays text.

        The texts are rendered between two characters that occur nowhere else, so that a template may look at them and
        trim them.
        """
        begin, end = _unused_characters([self._text, *_texts(messages)])
        marked = [self._marked(message, begin, end) for message in messages]
        rendered = part(self.render(marked, form, generation_prompt=generation_prompt))
        pieces = re.split(f"{begin}([^{begin}{end}]*){end}", rendered)
        known = {form for message in messages for form in _spellings(message.content.strip())} | self._turn_markers
        if any(begin in piece or end in piece for piece in pieces) or not known.issuperset(pieces[1::2]):
            longest = max((message.content for message in messages), key=len)
            raise DatasetError(
                f"prompt {longest[:80]!r}: contains a control token, and the chat template does not keep the "
                "text as it is; remove the control token or set policy.tokenizer.chat_template"
            )
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                ids += self.tokens.foreign(piece, is_first=not ids)
            else:
                ids += self.tokens.piece(piece, is_first=not ids, as_text=False)
        return ids

    def _marked(self, message: Message, begin: str, end: str) -> Message:
        if message.role != "assistant":
            return replace(message, content=_between(begin, message.content, end))
        # What a model wrote may hold markers of thoughts and calls; those of turns it can only have spelled.
        if not any(marker in text for marker in self._turn_markers for text in _texts([message])):
            return message
        spelled = re.compile("|".join(map(re.escape, sorted(self._turn_markers, key=len, reverse=True))))

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                return spelled.sub(lambda found: f"{begin}{found[0]}{end}", value)
            if isinstance(value, Mapping):
                return {key: marked(item) for key, item in value.items()}
            return [marked(item) for item in value] if isinstance(value, list | tuple) else value

        calls = tuple(replace(call, arguments=marked(call.arguments)) for call in message.calls)
        return replace(message, content=marked(message.content), calls=calls)

    @cached_property
    def turn_ids(self) -> frozenset[int]:
        """Control tokens that begin and end turns: those that the template prints around a user's text and after an
        assistant's."""
        found: set[int] = set()
        alone: Shape = (("user", ()),)
        for shape in (alone, (*alone, ("assistant", ()), *alone)):
            try:
                found |= set(self.form(shape, generation_prompt=False).controls)
            except ModelFolderError:
                continue
        return frozenset(found)

    @cached_property
    def _turn_markers(self) -> frozenset[str]:
        return frozenset(self.tokenizer.decode([token]).strip() for token in self.turn_ids) - {""}

    # ---- forms

    def form(self, shape: Shape, *, generation_prompt: bool = True) -> Form:
        """Return the form of conversations of these roles and calls, with the controls of the whole text.

        Raises:
            ModelFolderError: a message is lost in every form.
        """
        key = (shape, generation_prompt)
        if key not in self._forms:
            form = self._form_of(shape)
            rendered = self.render(placeholders(shape), form, generation_prompt=generation_prompt)
            controls = self.tokens.controls_in(self.tokens.rendered(rendered))
            self._forms[key] = replace(form, controls=controls)
        return self._forms[key]

    @property
    def known_shapes(self) -> tuple[tuple[Shape, Form], ...]:
        return tuple((shape, form) for (shape, _), form in self._forms.items())

    def _form_of(self, shape: Shape) -> Form:
        """Return how the template wants contents and arguments; most templates want plain texts and dictionaries."""
        lost, error = self._lost(shape, Form())
        if not lost:
            return Form()
        if error is not None and isinstance(error.__cause__, TimeoutError):
            raise error
        roles = [role for role, _ in shape]
        has_calls = any(names for _, names in shape)
        for as_text in (False, True)[: 1 + has_calls]:
            for in_parts in (frozenset[Role](), frozenset(lost), frozenset(roles)):
                form = Form(in_parts=in_parts, arguments_as_text=as_text)
                still_lost, _ = self._lost(shape, form)
                if not still_lost:
                    return form
        where = f"tokenizer {self.tokenizer.name_or_path!r}: the chat template"
        way_out = "; set policy.tokenizer.chat_template to one that prints it"
        without_system = tuple(turn for turn in shape if turn[0] != "system")
        if "system" in roles and not self._lost(without_system, Form())[0]:
            why = f": {shorten(str(error))}" if error is not None else ""
            raise ModelFolderError(
                f"{where} {'takes no system message' if error is not None else 'leaves out the system prompt'}{why}; "
                "put system_prompt of the dataset into its prompt_template, or set policy.tokenizer.chat_template"
            ) from error
        if error is not None:
            raise error
        raise ModelFolderError(f"{where} leaves out the text of the {' and of the '.join(lost)} message{way_out}")

    def _lost(self, shape: Shape, form: Form) -> tuple[list[Role], ModelFolderError | None]:
        """Return the roles of which a text is not rendered; all of them, with the error, where rendering fails.

        Text of an assistant that calls tools may be left out.
        """
        messages = placeholders(shape)
        try:
            rendered = self.render(messages, form).casefold()
        except ModelFolderError as error:
            return list(dict.fromkeys(role for role, _ in shape)), error
        lost = [
            message.role
            for message in messages
            # Parts and arguments as Python shows them: the template wants them as text.
            if any(f"'value': '{call.arguments['value']}".casefold() in rendered for call in message.calls)
            or not (message.calls or message.content.casefold() in rendered)
            or f"'text': '{message.content}".casefold() in rendered
        ]
        return list(dict.fromkeys(lost)), None

    # ---- rendering

    def render(
        self,
        messages: Sequence[Message],
        form: Form,
        *,
        generation_prompt: bool = True,
        thoughts: Mapping[int, str] | None = None,
    ) -> str:
        """Return the text that the template makes of a conversation.

        Args:
            thoughts: texts of the key `thinking` by numbers of messages.

        Raises:
            ModelFolderError: the template fails, or takes too long.
        """
        has_calls = any(message.calls for message in messages)
        as_dicts = _as_dicts(messages, form, thoughts or {}, names_in_ids=has_calls and self._names_in_ids)
        return self._rendered(as_dicts, generation_prompt=generation_prompt)

    @cached_property
    def _names_in_ids(self) -> bool:
        """True for a template such as Kimi's, which prints the id of a call in place of its name."""
        messages = placeholders((("user", ()), ("assistant", (_CALLED,))))
        for as_text in (False, True):
            try:
                as_dicts = _as_dicts(messages, Form(arguments_as_text=as_text), {}, names_in_ids=False)
                rendered = self._rendered(as_dicts, generation_prompt=False)
            except ModelFolderError:
                continue
            return _CALLED not in rendered and _call_id(0) in rendered
        return False

    def _rendered(self, as_dicts: Sequence[Mapping[str, object]], *, generation_prompt: bool) -> str:
        # The template is a program in the model folder or in the recipe.
        what = f"tokenizer {self.tokenizer.name_or_path!r}: the chat template fails"
        with boundary(ModelFolderError, f"{what} (policy.tokenizer.chat_template replaces it)"), time_limit(RENDER_S):
            # As `apply_chat_template` renders it, which has no parameter for the time.
            return str(
                _compile_jinja_template(self._text).render(
                    messages=as_dicts,
                    tools=self._tools or None,
                    documents=None,
                    add_generation_prompt=generation_prompt,
                    **{**self.tokenizer.special_tokens_map, "strftime_now": self._now.strftime},
                )
            )

    @cached_property
    def _text(self) -> str:
        return template_text(self.tokenizer, has_tools=bool(self._tools))


def _split_at_pictures(text: str, num_pictures: int) -> list[str | None]:
    """Return the pieces of a text with None for each picture."""
    first, *pieces = text.split(IMAGE)
    if not pieces:
        return [*[None] * num_pictures, text]
    return [*([first] if first else []), *(part for piece in pieces for part in (None, piece) if part != "")]


def _as_dicts(
    messages: Sequence[Message], form: Form, thoughts: Mapping[int, str], *, names_in_ids: bool
) -> list[dict[str, object]]:
    """Return messages as templates take them, calls numbered over the conversation and results in their order."""
    found: list[dict[str, object]] = []
    ids: list[str] = []
    answered = 0
    for place, message in enumerate(messages):
        text = message.content
        content: object = [{"type": "text", "text": text}] if message.role in form.in_parts else text
        if form.num_pictures and place == len(messages) - 1:
            parts = _split_at_pictures(text, form.num_pictures)
            content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
        as_dict: dict[str, object] = {"role": message.role, "content": content}
        if message.calls:
            answered = len(ids)
            for call in message.calls:
                ids.append(call.id or _call_id(form.first_call + len(ids), call.name if names_in_ids else None))
            as_dict["tool_calls"] = [
                _call(call, ids[answered + number], form) for number, call in enumerate(message.calls)
            ]
        if message.role == "tool":
            call_id = ids[answered] if answered < len(ids) else _call_id(form.first_call + answered)
            as_dict |= {"tool_call_id": call_id, **({"name": message.name} if message.name else {})}
            answered += 1
        if place in thoughts:
            as_dict["thinking"] = thoughts[place]
        found.append(as_dict)
    return found


def _call(call: ToolCall, call_id: str, form: Form) -> dict[str, object]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False) if form.arguments_as_text else dict(call.arguments)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _call_id(number: int, name: str | None = None) -> str:
    """Return nine letters and digits, as some templates demand; with a name, the form that Kimi's templates take."""
    return f"call{number:05d}" if name is None else f"functions.{name}:{number}"


def _texts(messages: Iterable[Message]) -> list[str]:
    """Return contents, and arguments of calls as JSON."""
    found = []
    for message in messages:
        found.append(message.content)
        found += [json.dumps(dict(call.arguments), ensure_ascii=False, default=str) for call in message.calls]
    return found


def _between(begin: str, text: str, end: str) -> str:
    """Put marks within the white space around a text, which a template may trim."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{begin}{core}{end}{text[start + len(core) :]}"


def _spellings(text: str) -> tuple[str, str]:
    return text, json.dumps(text, ensure_ascii=False)[1:-1]


def _unused_characters(texts: Sequence[str]) -> tuple[str, str]:
    """Return two characters of Unicode's private use that are in none of the texts."""
    used = frozenset().union(*texts)
    free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
    return next(free), next(free)


def _check_kept(message: Message, rendered: str) -> None:
    lost = [_lost_text(text, rendered) for text in _spellings(message.content)]
    if None not in lost:
        raise DatasetError(
            f"prompt {message.content[:80]!r}: the chat template loses {str(lost[0])[:80]!r} of the {message.role} "
            "message; change the text, or set policy.tokenizer.chat_template"
        )


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
