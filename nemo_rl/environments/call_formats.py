"""The forms in which models write calls of tools, read from the token ids of a turn.

Used by the loop of conversations; `env.tools.format` names one. Invariant: where a marker such as `<tool_call>` is one
token of the vocabulary, only that token is the marker, so that a text which merely spells it calls nothing. Calls
inside thoughts are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.conversation import ToolCall
from nemo_rl.data.thinking import THINK_END, THINK_START, with_thinking
from nemo_rl.environments.wire import read_json
from nemo_rl.errors import shorten

__all__ = [
    "CallFormat",
    "DeepSeekCalls",
    "Gemma4Calls",
    "GemmaCalls",
    "GlmCalls",
    "GptOssCalls",
    "HermesCalls",
    "KimiCalls",
    "Llama3Calls",
    "MistralCalls",
    "ParsedTurn",
    "Qwen3CoderCalls",
    "typed",
]

_SHOWN = 120
"""Characters of a call that cannot be read, in the reason."""
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Ids that Mistral's templates take; others, which could be anything, are not repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """A turn, with its calls told apart from its text.

    Example:
        `ParsedTurn(text="Let me see.", calls=(ToolCall(name="calculator", arguments={"expression": "2*21"}),))`
    """

    text: str
    """The text without calls and without the stop token; thoughts stay."""
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[str, ...] = ()
    """A reason for each call that cannot be read, as the model may be told."""
    has_untyped: bool = False
    """True where arguments are texts as the model wrote them: `typed` gives them the types of the tool's schema."""


def typed(turn: ParsedTurn, schemas: Sequence[Mapping[str, Any]]) -> ParsedTurn:
    """Return the turn with arguments that were written without quotes as values of the types that the tools take.

    A text stays one where the schema takes a text, or where it is no value.

    Example:
        `<parameter=a>1</parameter>` is `{"a": 1}` for a tool whose `a` is an integer, `{"a": "1"}` for a string.
    """
    if not turn.has_untyped:
        return turn
    forms = {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in schemas}

    def valued(call: ToolCall) -> ToolCall:
        known = forms.get(call.name, {}).get("properties") or {}
        values = {key: _valued(value, known.get(key, {})) for key, value in call.arguments.items()}
        return replace(call, arguments=values)

    return replace(turn, calls=tuple(map(valued, turn.calls)), has_untyped=False)


_WORDS = {"True": True, "False": False, "None": None}
"""Values as templates print them that do not make them JSON."""


def _valued(text: object, form: Mapping[str, Any]) -> object:
    # The schemas of a program may hold anything.
    one_of, choices = form.get("anyOf"), form.get("enum")
    forms = [one for one in (one_of if isinstance(one_of, list) else [form]) if isinstance(one, dict)]
    kinds = [one.get("type") for one in forms]
    takes_text = not kinds or any(kind in (None, "string") or "string" in kind for kind in kinds)
    if not isinstance(text, str) or (takes_text and not choices):
        return text
    try:
        value = _WORDS[text] if text in _WORDS else read_json(text)
    except ValueError:
        return text
    return text if isinstance(choices, list) and value not in choices else value


class CallFormat(Protocol):
    """A format of calls. A class of your own is made with the tokenizer."""

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Return the parts of a turn.

        Args:
            ids: the tokens that the engine sampled, the stop token included.
        """


class _BlockCalls:
    """Formats in which each call stands between two markers; `_read` reads what is between them."""

    _START: str
    _END: str
    _INNER: tuple[str, ...] = ()
    """Markers within a call; in a body each has `_MARK` before it."""
    _AROUND: tuple[str, ...] = ()
    """Markers around all calls of a turn, which are no text."""
    _UNTYPED = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        markers = (self._START, self._END, *self._INNER, *self._AROUND, THINK_START, THINK_END)
        self._pieces = _Pieces(tokenizer, markers)

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        pieces = self._pieces.of(ids)
        found = _CallCollector(has_untyped=self._UNTYPED)
        body: list[str] | None = None
        for piece, thinks in _with_thoughts(pieces):
            if piece.is_marker and not thinks and piece.text == self._START:
                if body is not None:
                    found.refuse(f"no {self._END} before the next {self._START}", "".join(body))
                body = []
            elif piece.is_marker and not thinks and piece.text == self._END:
                if body is None:
                    found.refuse(f"{self._END} without {self._START}", "")
                else:
                    self._read(found, "".join(body))
                body = None
            elif body is not None:
                is_inner = piece.is_marker and piece.text in self._INNER
                body.append(f"{_MARK}{piece.text}" if is_inner else piece.text.replace(_MARK, "\ufffd"))
            elif not (piece.is_marker and not thinks and piece.text in self._AROUND):
                found.texts.append(piece.text)
        if body is not None:
            found.refuse(f"no {self._END}", "".join(body))
        return found.turn()

    def _read(self, found: _CallCollector, body: str) -> None:
        raise NotImplementedError


_MARK = "\0"
"""Stands before a marker in the body of a call; no JSON holds it."""


class HermesCalls(_BlockCalls):
    """Qwen and Hermes: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, any number of them; SmolLM writes
    a list of such objects."""

    _START, _END = "<tool_call>", "</tool_call>"

    def _read(self, found: _CallCollector, body: str) -> None:
        found.read(body, keys=("arguments", "parameters"))


class Qwen3CoderCalls(_BlockCalls):
    """Qwen3-Coder and Qwen3.5: a function with a parameter in each element.

    `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, a line break around each value.
    """

    _START, _END, _UNTYPED = "<tool_call>", "</tool_call>", True
    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=[^>\n]+>|$)", re.DOTALL)

    def _read(self, found: _CallCollector, body: str) -> None:
        function = self._FUNCTION.fullmatch(body)
        if function is None:
            found.refuse("expected <function=NAME>..</function>", body)
        else:
            found.read_pairs(
                function[1].strip(), function[2], self._PARAMETER, expected="<parameter=KEY>..</parameter>"
            )


class GlmCalls(_BlockCalls):
    """GLM: `<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`, with or without line breaks."""

    _START, _END, _UNTYPED = "<tool_call>", "</tool_call>", True
    _INNER = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    _PAIR = re.compile(
        r"\s*\0<arg_key>([^\0]*)\0</arg_key>\s*\0<arg_value>([^\0]*)\0</arg_value>\s*",
    )

    def _read(self, found: _CallCollector, body: str) -> None:
        name, mark, pairs = body.partition(_MARK)
        expected = "<arg_key>KEY</arg_key><arg_value>..</arg_value>"
        found.read_pairs(name.strip(), mark + pairs, self._PAIR, expected=expected)


class KimiCalls(_BlockCalls):
    """Kimi: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>` in a section."""

    _START, _END = "<|tool_call_begin|>", "<|tool_call_end|>"
    _INNER = ("<|tool_call_argument_begin|>",)
    _AROUND = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    _ID = re.compile(r"\s*(?:functions\.)?([^\s:]+)(?::\d+)?\s*")

    def _read(self, found: _CallCollector, body: str) -> None:
        head, _, arguments = body.partition(_MARK + self._INNER[0])
        named = self._ID.fullmatch(head)
        if named is None or head == body:
            found.refuse(f"expected functions.NAME:NUMBER{self._INNER[0]}" + "{..}", body)
        else:
            found.read_arguments(named[1], arguments)


class DeepSeekCalls(_BlockCalls):
    """DeepSeek: a name, a separator and the arguments, which V3 and R1 write as a block of JSON behind `function`."""

    _START, _END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    _INNER = ("<\uff5ctool\u2581sep\uff5c>",)
    _AROUND = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
    _FENCED = re.compile(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)

    def _read(self, found: _CallCollector, body: str) -> None:
        name, _, arguments = body.partition(_MARK + self._INNER[0])
        fenced = self._FENCED.fullmatch(arguments)
        if name == body or not name.strip():
            found.refuse(f"expected NAME{self._INNER[0]}" + "{..}", body)
        elif fenced is not None:
            found.read_arguments(fenced[1], fenced[2])
        else:
            found.read_arguments(name.strip(), arguments)


class GemmaCalls(_BlockCalls):
    """FunctionGemma: `<start_function_call>call:f{x:1,y:<escape>a text<escape>}<end_function_call>`."""

    _START, _END, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
    _INNER: tuple[str, ...] = (_QUOTE,)
    _CALL = re.compile(r"\s*call:([^\s{]+)(\{.*\})\s*", re.DOTALL)
    _KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")

    def _read(self, found: _CallCollector, body: str) -> None:
        call = self._CALL.fullmatch(body)
        if call is None:
            found.refuse("expected call:NAME{..}", body)
            return
        # Texts become those of JSON, and so do keys, which have no quotes; the rest is JSON as it stands.
        parts = call[2].split(_MARK + self._QUOTE)
        written = [
            json.dumps(part) if number % 2 else self._KEY.sub(r'\1"\2":', part) for number, part in enumerate(parts)
        ]
        found.read_arguments(call[1], "".join(written))


class Gemma4Calls(GemmaCalls):
    """Gemma 4: `<|tool_call>call:f{x:1,y:<|"|>a text<|"|>}<tool_call|>`."""

    _START, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    _INNER = (_QUOTE,)


class MistralCalls:
    """Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]`, or `[TOOL_CALLS]f[ARGS]{"x": 1}` per call."""

    _START, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pieces = _Pieces(tokenizer, (self._START, self._ARGUMENTS, self._ID, THINK_START, THINK_END))

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Return the parts of a turn."""
        found, bodies = _CallCollector(), list[list[str]]()
        for piece, thinks in _with_thoughts(self._pieces.of(ids)):
            if piece.is_marker and not thinks and piece.text == self._START:
                bodies.append([])
            elif bodies and not thinks:
                bodies[-1].append(f"{_MARK}{piece.text}" if piece.is_marker else piece.text)
            else:
                found.texts.append(piece.text)
        for body in map("".join, bodies):
            head, mark, arguments = body.partition(_MARK + self._ARGUMENTS)
            if mark:
                name, _, call_id = head.partition(_MARK + self._ID)
                found.read_arguments(name.strip(), arguments, call_id=call_id.strip())
            else:
                found.read(body.strip(), keys=("arguments", "parameters"))
        return found.turn()


class Llama3Calls:
    """Llama 3: the whole turn is `{"name": "f", "parameters": {"x": 1}}`, several separated by `;`.

    `<|python_tag|>` may stand before them. A turn that is another JSON object is an answer, unless that token stands
    before it.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pieces = _Pieces(tokenizer, (self._TAG, THINK_START, THINK_END))

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Return the parts of a turn."""
        pieces = list(_with_thoughts(self._pieces.of(ids)))
        thoughts = "".join(piece.text for piece, thinks in pieces if thinks)
        spoken = [piece for piece, thinks in pieces if not thinks]
        is_tagged = any(piece.is_marker and piece.text == self._TAG for piece in spoken)
        before, text = "", "".join(piece.text for piece in spoken)
        if is_tagged:
            before, _, text = text.partition(self._TAG)
        found = _CallCollector()
        found.texts += [thoughts, before]
        if not is_tagged and not _CALL_LIKE.match(text):
            found.texts.append(text)
            return found.turn()
        for part in _split_objects(text.strip()):
            found.read(part, keys=("parameters", "arguments"))
        return found.turn()


_CALL_LIKE = re.compile(r'\s*\{\s*"(name|type|function|parameters|arguments)"\s*:')


class GptOssCalls:
    """gpt-oss (harmony): `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>`.

    The analysis channel becomes thoughts of the text, `<think>..</think>`; the text after them is that of the other
    channels. Only the end token `<|call|>` makes a message a call.
    """

    _MARKERS = (
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|call|>",
        "<|return|>",
    )
    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    _RECIPIENT = re.compile(r"to=([^\s<]+)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pieces = _Pieces(tokenizer, self._MARKERS, drops_stop=False)

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Return the parts of a turn."""
        found, thoughts = _CallCollector(), list[str]()
        for header, body, end in self._messages(self._pieces.of(ids)):
            named = self._CHANNEL.search(header)
            channel = named[1] if named else "final"
            recipient = self._RECIPIENT.search(header)
            if channel == "analysis":
                thoughts.append(body)
            elif recipient is None:
                found.texts.append(body)
            elif end != "<|call|>":
                found.refuse("no <|call|> at its end", body)
            elif not recipient[1].startswith("functions."):
                found.refuse(f"expected a recipient functions.NAME, got {shorten(recipient[1], limit=_SHOWN)}", body)
            else:
                found.read_arguments(recipient[1].removeprefix("functions."), body)
        if thoughts:
            found.texts.insert(0, with_thinking("\n".join(thoughts), ""))
        return found.turn()

    def _messages(self, pieces: Sequence[_Piece]) -> Iterator[tuple[str, str, str]]:
        """Yield header, body and end token of each message; the first header lacks `<|start|>assistant`."""
        header, body, in_body = "", "", False
        for piece in pieces:
            if piece.is_marker and piece.text in self._ENDS:
                if in_body:
                    yield header, body, piece.text
                header, body, in_body = "", "", False
            elif piece.is_marker and piece.text == "<|message|>" and not in_body:
                in_body = True
            elif in_body:
                body += piece.text
            else:
                header += piece.text
        if in_body:
            yield header, body, ""
        elif header.strip():
            yield "", header, ""  # a turn without any marker is an answer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    text: str
    is_marker: bool


class _Pieces:
    """Splits the tokens of a turn at markers; with `drops_stop` a special token at its end is no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markers: Sequence[str], *, drops_stop: bool = True) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._tokens = {vocabulary[marker]: marker for marker in markers if marker in vocabulary}
        spelt = [marker for marker in markers if marker not in vocabulary]
        self._spelt = re.compile("|".join(f"({re.escape(marker)})" for marker in spelt)) if spelt else None
        self._stops: Collection[int] = frozenset(tokenizer.all_special_ids) if drops_stop else ()

    def of(self, ids: Sequence[int]) -> list[_Piece]:
        if ids and ids[-1] in self._stops and ids[-1] not in self._tokens:
            ids = ids[:-1]
        pieces: list[_Piece] = []
        begin = 0
        for place, token in enumerate(ids):
            if token in self._tokens:
                pieces += self._texts(ids[begin:place])
                pieces.append(_Piece(text=self._tokens[token], is_marker=True))
                begin = place + 1
        return [*pieces, *self._texts(ids[begin:])]

    def _texts(self, ids: Sequence[int]) -> Iterator[_Piece]:
        text = self.decode(ids)
        for piece in self._spelt.split(text) if self._spelt else [text]:
            if piece:
                is_marker = self._spelt is not None and self._spelt.fullmatch(piece) is not None
                yield _Piece(text=piece, is_marker=is_marker)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""


def _with_thoughts(pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, bool]]:
    """Yield each piece and whether it is a part of thoughts; the markers of thoughts are.

    A turn whose first such marker is the end began inside thoughts: the prompt has opened them.
    """
    first = next((piece.text for piece in pieces if piece.is_marker and piece.text in (THINK_START, THINK_END)), None)
    thinks = first == THINK_END
    for piece in pieces:
        if piece.is_marker and piece.text == THINK_START:
            thinks = True
        yield piece, thinks
        if piece.is_marker and piece.text == THINK_END:
            thinks = False


class _CallCollector:
    def __init__(self, *, has_untyped: bool = False) -> None:
        self._has_untyped = has_untyped
        self.texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._invalid: list[str] = []

    def turn(self) -> ParsedTurn:
        """Return the turn. A text with calls loses the white space around them."""
        text = "".join(self.texts)
        if self._calls or self._invalid:
            text = text.strip()
        is_untyped = self._has_untyped and bool(self._calls)
        return ParsedTurn(text=text, calls=tuple(self._calls), invalid=tuple(self._invalid), has_untyped=is_untyped)

    def refuse(self, reason: str, body: str) -> None:
        body = body.replace(_MARK, "").strip()
        self._invalid.append(f"{reason}: {shorten(body, limit=_SHOWN)}" if body else reason)

    def read(self, body: str, *, keys: Sequence[str]) -> None:
        """Add the call of a JSON object, or those of a list of them; the first of `keys` that it has names its
        arguments."""
        try:
            given = read_json(body)
        except ValueError as error:
            self.refuse(f"expected a JSON object, {error}", body)
            return
        for call in given if isinstance(given, list) and given else [given]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
                self.refuse('expected a JSON object with a "name"', body)
                return
            key = next((key for key in keys if key in call), keys[0])
            self._add(call["name"], call.get(key, {}), body, call_id=call.get("id"))

    def read_pairs(self, name: str, body: str, pair: re.Pattern[str], *, expected: str) -> None:
        """Add a call whose arguments are pairs of a key and a text, one after the other."""
        arguments, place = dict[str, object](), 0
        while place < len(body) and (match := pair.match(body, place)) is not None:
            arguments[match[1].strip()], place = match[2], match.end()
        if not name:
            self.refuse("expected the name of a tool", body)
        elif body[place:].strip():
            self.refuse(f"{name}: expected {expected}", body)
        else:
            self._add(name, arguments, body)

    def read_arguments(self, name: str, body: str, *, call_id: object = None) -> None:
        """Add a call whose body holds the arguments alone."""
        try:
            arguments = read_json(body) if body.strip() else {}
        except ValueError as error:
            self.refuse(f"{name}: expected a JSON object of arguments, {error}", body)
            return
        self._add(name, arguments, body, call_id=call_id)

    def _add(self, name: str, arguments: object, body: str, *, call_id: object = None) -> None:
        if isinstance(arguments, str):  # some models write the object as a string
            try:
                arguments = read_json(arguments)
            except ValueError as error:
                self.refuse(f"{name}: expected arguments as a JSON object, {error}", body)
                return
        if not isinstance(arguments, dict):
            self.refuse(f"{name}: expected arguments as a JSON object, got {type(arguments).__name__}", body)
            return
        is_id = isinstance(call_id, str) and _CALL_ID.fullmatch(call_id) is not None
        self._calls.append(ToolCall(name=name, arguments=arguments, id=str(call_id) if is_id else ""))


def _split_objects(text: str) -> Iterator[str]:
    """Yield the objects of `{..}; {..}`, and what is no object as it stands."""
    decoder = json.JSONDecoder()
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            yield text
            return
        yield text[:end]
        rest = text[end:].lstrip()
        if rest and not rest.startswith(";"):
            yield rest
            return
        text = rest[1:].lstrip()
