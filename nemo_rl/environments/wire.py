"""Rows, turns, replies and results of tools as JSON: what conversations and their hosts send each other.

Standard library only: both sides import it. Invariant: texts that come out hold no surrogate, so that they can be
encoded, and no more than `TEXT_LIMIT` characters in all; everything else that user code gives is refused with a reason.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, cast

from nemo_rl.data.conversation import Message, Role, ToolCall
from nemo_rl.environments.conversation import ConversationRow, Reply, Turn

__all__ = [
    "TEXT_LIMIT",
    "MalformedReply",
    "plain_reply",
    "plain_text",
    "plain_turn",
    "read_json",
    "read_reply",
    "read_row",
    "read_turn",
    "shorten_text",
    "sound_text",
]

_DEPTH_LIMIT = 200
"""Most lists and objects within each other."""
TEXT_LIMIT = 1 << 20
"""Most characters of the texts of one reply or result."""
_MARK_LENGTH = 60
"""Most characters of the mark of a cut."""
_ROLES = ("user", "tool", "system")
_REPLY_FIELDS = tuple(field.name for field in fields(Reply))


class MalformedReply(Exception):
    """An environment returned what is no reply; the text says what was expected and what was got."""


def read_json(text: str | bytes) -> object:
    """Return the value of a JSON text that a program or a model wrote.

    Raises:
        ValueError: it is none, or is nested too deeply, or holds NaN.
    """
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [value]
    for _ in range(_DEPTH_LIMIT):
        objects = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [inner for each in objects if isinstance(each, list) for inner in each]
    if level:
        raise ValueError(f"nested more than {_DEPTH_LIMIT} deep")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def sound_text(value: str | bytes) -> str:
    """Return a text that can be encoded: U+FFFD stands for what is no Unicode."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def shorten_text(text: str, *, limit: int = TEXT_LIMIT) -> str:
    """Return a text of at most `limit` characters; where some are cut, a mark in the middle counts them."""
    if len(text) <= limit:
        return text
    half = max(0, limit - _MARK_LENGTH) // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[len(text) - half :]}"


def plain_text(value: object) -> str:
    """Return the value of a tool as text: a string as it is, None as nothing, others as JSON or in Python's form."""
    if isinstance(value, (str, bytes)):
        return shorten_text(sound_text(value))
    if value is None:
        return ""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = str(value)
    return shorten_text(sound_text(text))


def plain_turn(turn: Turn) -> dict[str, object]:
    """Return the turn as JSON."""
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls]
    return {
        "number": turn.number,
        "text": turn.text,
        "num_tokens": turn.num_tokens,
        "truncated": turn.truncated,
        "calls": calls,
    }


def read_turn(given: Mapping[str, Any]) -> Turn:
    """Return the turn of `plain_turn`."""
    calls = tuple(ToolCall(name=call["name"], arguments=call["arguments"]) for call in given["calls"])
    return Turn(**{**given, "calls": calls})


def read_row(given: Mapping[str, Any]) -> ConversationRow:
    """Return the row whose fields are given."""
    return ConversationRow(**given)


def plain_reply(reply: object) -> dict[str, object]:
    """Return as JSON what an environment has returned: a `Reply`, or a dict of the same fields.

    Raises:
        MalformedReply: it is neither.
    """
    if isinstance(reply, Reply):
        given = {name: object.__getattribute__(reply, name) for name in _REPLY_FIELDS}
    elif isinstance(reply, Mapping):
        given = {str(name): value for name, value in reply.items()}
    else:
        raise MalformedReply(f"expected a Reply, got {type(reply).__name__} {repr(reply)[:200]}")
    if unknown := sorted(set(given) - set(_REPLY_FIELDS)):
        raise MalformedReply(
            f"expected the fields {', '.join(_REPLY_FIELDS)} of a Reply, got {', '.join(unknown)[:200]}"
        )
    messages = [_plain_message(message) for message in _items(given.get("messages", ()), "messages")]
    _share_limit(messages)
    parts = given.get("components") or {}
    if not isinstance(parts, Mapping):
        raise MalformedReply(f"components: expected numbers by name, got {repr(parts)[:200]}")
    stop, columns = given.get("stop"), given.get("columns") or {}
    return {
        "messages": messages,
        "done": bool(given.get("done", False)),
        "reward": _number(given.get("reward", 0.0), "reward"),
        "components": {str(name): _number(part, f"components {str(name)[:60]!r}") for name, part in parts.items()},
        "stop": None if stop is None else [_text(item, "stop") for item in _items(stop, "stop")],
        **({"columns": _columns(columns)} if columns else {}),
    }


def _columns(columns: object) -> dict[str, object]:
    if not isinstance(columns, Mapping):
        raise MalformedReply(f"columns: expected values by name, got {repr(columns)[:200]}")
    try:
        text = json.dumps({str(name): value for name, value in columns.items()}, default=_plain_value)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedReply(f"columns: expected numbers, lists of them, or JSON: {error}") from error
    if len(text) > TEXT_LIMIT:
        raise MalformedReply(f"columns: expected at most {TEXT_LIMIT} characters as JSON, got {len(text)}")
    return cast("dict[str, object]", json.loads(text))


def _plain_value(value: Any) -> object:
    """Return an array or a number of another library as lists and numbers."""
    for read in (list, operator.index, float):
        try:
            return read(value)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"got {type(value).__name__}")


def read_reply(given: Mapping[str, Any] | str) -> Reply:
    """Return the reply that a process sent: `plain_reply`, or why there is none.

    Raises:
        MalformedReply: it is no reply, or its values do not fit together.
    """
    if isinstance(given, str):
        raise MalformedReply(given)
    plain = plain_reply(given)
    messages = cast("list[dict[str, str | None]]", plain["messages"])
    done, stop = bool(plain["done"]), cast("list[str] | None", plain["stop"])
    if not messages and not done:
        raise MalformedReply("expected messages for the model to read, or done=True, got neither")
    if stop is not None and not all(stop):
        raise MalformedReply("stop: expected strings that are not empty")
    return Reply(
        messages=tuple(
            Message(role=cast("Role", m["role"]), content=str(m["content"]), name=m["name"]) for m in messages
        ),
        done=done,
        reward=cast("float", plain["reward"]),
        components=cast("dict[str, float]", plain["components"]),
        stop=None if stop is None else tuple(stop),
        columns=cast("dict[str, object]", plain.get("columns", {})),
    )


def _plain_message(message: object) -> dict[str, str | None]:
    given = asdict(message) if is_dataclass(message) and not isinstance(message, type) else message
    if not isinstance(given, Mapping) or "content" not in given:
        raise MalformedReply(f"messages: expected a Message, got {type(message).__name__} {repr(message)[:200]}")
    role, name = given.get("role"), given.get("name")
    if role not in _ROLES:
        raise MalformedReply(f"messages: expected a role of {', '.join(_ROLES)}, got {repr(role)[:60]}")
    return {
        "role": str(role),
        "content": _text(given["content"], "content of a message"),
        "name": None if name is None else _text(name, "name of a message"),
    }


def _share_limit(messages: list[dict[str, str | None]]) -> None:
    """Shorten messages, so that all of them together fit the limit."""
    for message in messages:
        message["content"] = shorten_text(str(message["content"]), limit=TEXT_LIMIT // max(1, len(messages)))


def _items(value: object, what: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise MalformedReply(f"{what}: expected a list, got {type(value).__name__} {repr(value)[:200]}")
    return list(value)


def _text(value: object, what: str) -> str:
    if not isinstance(value, (str, bytes)):
        raise MalformedReply(f"{what}: expected text, got {type(value).__name__} {repr(value)[:200]}")
    return sound_text(value)


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise MalformedReply(f"{what}: expected a finite number, got {repr(value)[:200]}")
    return number
