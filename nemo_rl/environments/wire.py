"""Rows, turns, replies and results of tools as JSON: what conversations and their hosts send each other.

Standard library only: both sides import it. Invariant: texts that come out hold no surrogate, so that they can be
encoded, and no more than `TEXT_LIMIT` characters in all; numbers are finite and no larger than `NUMBER_LIMIT`;
everything else that user code gives is refused with a reason. Objects of user code may lie about what they are: none
of their methods is trusted.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from itertools import islice
from typing import Any, cast

from nemo_rl.data.conversation import Message, Role, ToolCall
from nemo_rl.environments.conversation import ConversationRow, Reply, Turn

__all__ = [
    "NUMBER_LIMIT",
    "TEXT_LIMIT",
    "MalformedReply",
    "finite",
    "plain_parts",
    "plain_reply",
    "plain_text",
    "plain_turn",
    "read_json",
    "read_reply",
    "read_row",
    "read_turn",
    "shorten_text",
    "shown",
    "sound_text",
]

_DEPTH_LIMIT = 200
"""Most lists and objects within each other."""
TEXT_LIMIT = 1 << 20
"""Most characters of the texts of one reply or result."""
NUMBER_LIMIT = 1e15
"""Largest reward, or part of one: squares of sums of such numbers are finite in float32."""
_PARTS_LIMIT, _NAME_LIMIT = 100, 64
"""Most parts of a reward, each a curve of the run, and characters of a name."""
_MESSAGES_LIMIT = 1000
"""Most messages of one reply."""
_STOPS_LIMIT, _STOP_LIMIT = 64, 1000
"""Most stop strings, and characters of one: they are searched for after each token."""
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
        value: object = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(_DEPTH_LIMIT):
        objects = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [inner for each in objects if isinstance(each, list) for inner in each]
    if level:
        raise ValueError(f"nested more than {_DEPTH_LIMIT} deep")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _finite_float(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits[:_NAME_LIMIT]} is too large for a number")
    return value


def sound_text(value: str | bytes) -> str:
    """Return a text that can be encoded: U+FFFD stands for what is no Unicode."""
    if isinstance(value, bytes):
        return bytes.decode(value, "utf-8", "replace")
    return str.encode(value, "utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def shown(value: object, *, limit: int = 200) -> str:
    """Return the beginning of a value in Python's form, also where its class cannot give one."""
    try:
        text = str.__getitem__(repr(value), slice(limit + 1))
    except Exception as error:  # noqa: BLE001 - user code
        text = f"an object whose __repr__ raises {type(error).__name__}"
    return text if len(text) <= limit else f"{text[:limit]} ..."


def finite(value: Any) -> float | None:
    """Return the float of a number that user code gave; None for what is none, or is beyond `NUMBER_LIMIT`."""
    try:
        number = math.nan if isinstance(value, (str, bytes, bytearray, memoryview)) else float(value)
    except Exception:  # noqa: BLE001 - user code
        return None
    return number if abs(number) <= NUMBER_LIMIT else None


def plain_parts(parts: Mapping[Any, Any], *, keeps_none: bool = False) -> dict[str, float]:
    """Return the parts of a reward by name; one that is None is NaN with `keeps_none`.

    Raises:
        MalformedReply: one is no finite number, a name is none, or there are too many.
    """
    found: dict[str, float] = {}
    for key, part in islice(parts.items(), _PARTS_LIMIT + 1):
        name, number = sound_text(str(key)), math.nan if part is None and keeps_none else finite(part)
        if number is None:
            raise MalformedReply(f"components {shown(name)}: expected a finite number, got {shown(part)}")
        if not 0 < len(name) <= _NAME_LIMIT or not name.isprintable():
            raise MalformedReply(
                f"components: expected names of 1 to {_NAME_LIMIT} printable characters, got {shown(name)}"
            )
        found[name] = number
    if len(found) > _PARTS_LIMIT:
        raise MalformedReply(f"components: expected at most {_PARTS_LIMIT} of them, got more")
    return found


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
        raise MalformedReply(f"expected a Reply, got {type(reply).__name__} {shown(reply)}")
    if unknown := sorted(set(given) - set(_REPLY_FIELDS)):
        raise MalformedReply(
            f"expected the fields {', '.join(_REPLY_FIELDS)} of a Reply, got {', '.join(unknown)[:200]}"
        )
    messages = [_plain_message(item) for item in _items(given.get("messages", ()), "messages", most=_MESSAGES_LIMIT)]
    _share_limit(messages)
    parts = given.get("components") or {}
    if not isinstance(parts, Mapping):
        raise MalformedReply(f"components: expected numbers by name, got {shown(parts)}")
    stop, columns = given.get("stop"), given.get("columns") or {}
    return {
        "messages": messages,
        "done": bool(given.get("done", False)),
        "reward": _number(given.get("reward", 0.0)),
        "components": plain_parts(parts),
        "stop": None if stop is None else _stops(stop),
        **({"columns": _columns(columns)} if columns else {}),
    }


def _columns(columns: object) -> dict[str, object]:
    if not isinstance(columns, Mapping):
        raise MalformedReply(f"columns: expected values by name, got {shown(columns)}")
    try:
        text = json.dumps({str(name): value for name, value in columns.items()}, default=_plain_value)
        plain = json.loads(text)
        _check_depth(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedReply(f"columns: expected numbers, lists of them, or JSON: {error}") from error
    if len(text) > TEXT_LIMIT:
        raise MalformedReply(f"columns: expected at most {TEXT_LIMIT} characters as JSON, got {len(text)}")
    return cast("dict[str, object]", plain)


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
        raise MalformedReply(f"messages: expected a Message, got {type(message).__name__} {shown(message)}")
    role, name = given.get("role"), given.get("name")
    if role not in _ROLES:
        raise MalformedReply(f"messages: expected a role of {', '.join(_ROLES)}, got {shown(role)}")
    return {
        "role": str(role),
        "content": _text(given["content"], "content of a message"),
        "name": None if name is None else _text(name, "name of a message", most=_NAME_LIMIT),
    }


def _share_limit(messages: list[dict[str, str | None]]) -> None:
    """Shorten messages, so that all of them together fit the limit."""
    for message in messages:
        message["content"] = shorten_text(str(message["content"]), limit=TEXT_LIMIT // max(1, len(messages)))


def _items(value: object, what: str, *, most: int) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise MalformedReply(f"{what}: expected a list, got {type(value).__name__} {shown(value)}")
    items = list(islice(value, most + 1))
    if len(items) > most:
        raise MalformedReply(f"{what}: expected at most {most} of them, got more")
    return items


def _text(value: object, what: str, *, most: int | None = None) -> str:
    if not isinstance(value, (str, bytes)):
        raise MalformedReply(f"{what}: expected text, got {type(value).__name__} {shown(value)}")
    text = sound_text(value)
    if most is not None and len(text) > most:
        raise MalformedReply(f"{what}: expected at most {most} characters, got {len(text)}")
    return text


def _stops(value: object) -> list[str]:
    return [_text(item, "stop", most=_STOP_LIMIT) for item in _items(value, "stop", most=_STOPS_LIMIT)]


def _number(value: Any) -> float:
    number = finite(value)
    if number is None:
        raise MalformedReply(f"reward: expected a finite number of at most {NUMBER_LIMIT:g}, got {shown(value)}")
    return number
