"""The forms in which models write calls of tools, read from the token ids of a turn.

Used by the loop of conversations; `env.tools.format` names one. Invariant: where a marker such as `<tool_call>` is one
token of the vocabulary, only that token is the marker, so that a text which merely spells it calls nothing. Calls
inside thoughts are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.conversation import ToolCall
from nemo_rl.data.thinking import THINK_END, THINK_START, with_thinking
from nemo_rl.errors import shorten

__all__ = ["CallFormat", "GptOssCalls", "HermesCalls", "Llama3Calls", "ParsedTurn"]

_SHOWN = 120
"""Characters of a call that cannot be read, in the reason."""
_DEPTH_LIMIT = 200
"""Most brackets within brackets of a call: more are no arguments of a tool."""


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


class CallFormat(Protocol):
    """A format of calls. A class of your own is made with the tokenizer."""

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Return the parts of a turn.

        Args:
            ids: the tokens that the engine sampled, the stop token included.
        """


class HermesCalls:
    """Qwen and Hermes: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, any number of them."""

    _START, _END = "<tool_call>", "</tool_call>"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pieces = _Pieces(tokenizer, (self._START, self._END, THINK_START, THINK_END))

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Return the parts of a turn."""
        pieces = self._pieces.of(ids)
        found = _CallCollector()
        body: list[str] | None = None
        for piece, thinks in _with_thoughts(pieces):
            if piece.is_marker and not thinks and piece.text == self._START:
                if body is not None:
                    found.refuse("no </tool_call> before the next <tool_call>", "".join(body))
                body = []
            elif piece.is_marker and not thinks and piece.text == self._END:
                if body is None:
                    found.refuse("</tool_call> without <tool_call>", "")
                else:
                    found.read("".join(body), keys=("arguments", "parameters"))
                body = None
            elif body is not None:
                body.append(piece.text)
            else:
                found.texts.append(piece.text)
        if body is not None:
            found.refuse("no </tool_call>", "".join(body))
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
    """Splits the tokens of a turn at markers.

    Args:
        drops_stop: a special token at the end of a turn is the stop token, which is no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markers: Sequence[str], *, drops_stop: bool = True) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._tokens = {vocabulary[marker]: marker for marker in markers if marker in vocabulary}
        spelt = [marker for marker in markers if marker not in vocabulary]
        self._spelt = re.compile("|".join(f"({re.escape(marker)})" for marker in spelt)) if spelt else None
        self._stops: Collection[int] = frozenset(tokenizer.all_special_ids) if drops_stop else ()

    def of(self, ids: Sequence[int]) -> list[_Piece]:
        """Return texts and markers in order."""
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
        """Return the text of some tokens."""
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
    """The parts of a turn that were found so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._invalid: list[str] = []

    def turn(self) -> ParsedTurn:
        """Return the turn. A text with calls loses the white space around them."""
        text = "".join(self.texts)
        if self._calls or self._invalid:
            text = text.strip()
        return ParsedTurn(text=text, calls=tuple(self._calls), invalid=tuple(self._invalid))

    def refuse(self, reason: str, body: str) -> None:
        """Add a call that cannot be read."""
        self._invalid.append(f"{reason}: {shorten(body.strip(), limit=_SHOWN)}" if body.strip() else reason)

    def read(self, body: str, *, keys: Sequence[str]) -> None:
        """Add the call of a JSON object; the first of `keys` that it has names its arguments."""
        try:
            call = _parse_json(body)
        except ValueError as error:
            self.refuse(f"expected a JSON object, {error}", body)
            return
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            self.refuse('expected a JSON object with a "name"', body)
            return
        key = next((key for key in keys if key in call), keys[0])
        self._add(call["name"], call.get(key, {}), body)

    def read_arguments(self, name: str, body: str) -> None:
        """Add a call whose body holds the arguments alone."""
        try:
            arguments = _parse_json(body) if body.strip() else {}
        except ValueError as error:
            self.refuse(f"{name}: expected a JSON object of arguments, {error}", body)
            return
        self._add(name, arguments, body)

    def _add(self, name: str, arguments: object, body: str) -> None:
        if isinstance(arguments, str):  # some models write the object as a string
            try:
                arguments = _parse_json(arguments)
            except ValueError as error:
                self.refuse(f"{name}: expected arguments as a JSON object, {error}", body)
                return
        if not isinstance(arguments, dict):
            self.refuse(f"{name}: expected arguments as a JSON object, got {type(arguments).__name__}", body)
            return
        self._calls.append(ToolCall(name=name, arguments=arguments))


def _parse_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, or is nested too deeply, or holds NaN.
    """
    depth = 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if depth > _DEPTH_LIMIT:
            raise ValueError(f"nested more than {_DEPTH_LIMIT} deep")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


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
