"""JSON messages: read without trust, written so that every browser can read them.

Invariant: what is written holds no NaN and no infinity; what is read is an object whose texts are valid Unicode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from nemo_rl.tracer.protocol import ErrorCode

__all__ = ["BadMessage", "dump", "error_text", "number", "parse", "text_field", "texts_field"]

MAX_ERROR_TEXT = 2000
"""Characters of an error that is sent."""


class BadMessage(ValueError):
    """A message that is none of the protocol, with its code."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.BAD_MESSAGE) -> None:
        super().__init__(text)
        self.code = code


def parse(text: str) -> dict[str, Any]:
    """Numbers that are not finite become None.

    Raises:
        BadMessage: it is no JSON object with a text `type`.
    """
    try:
        found = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        # Lone surrogates can be neither hashed nor stored.
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"expected JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise BadMessage("expected a JSON object with a text 'type'")
    return found


def dump(message: Mapping[str, object]) -> str:
    """The text of a message; numbers that are not finite become null."""
    try:
        return json.dumps(message, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_clean(message), allow_nan=False, separators=(",", ":"))


def error_text(code: ErrorCode, text: str) -> str:
    """An `error` message."""
    return dump({"type": "error", "code": code.value, "text": text[:MAX_ERROR_TEXT]})


def number(message: Mapping[str, Any], name: str, *, limit: int = 1 << 53) -> int:
    """Raises:
    BadMessage: it is no whole number from 0 to the limit, which is what JavaScript holds exactly.
    """
    value = message.get(name)
    if type(value) is not int or not 0 <= value <= limit:
        raise BadMessage(f"{name}: expected a whole number from 0 to {limit}, got {str(value)[:100]}")
    return value


def text_field(message: Mapping[str, Any], name: str, *, limit: int = 1000, default: str | None = None) -> str:
    """Raises:
    BadMessage: it is no text of at most `limit` characters.
    """
    value = message.get(name, default)
    if not isinstance(value, str) or len(value) > limit:
        raise BadMessage(f"{name}: expected a text of at most {limit} characters, got {str(value)[:100]!r}")
    return value


def texts_field(message: Mapping[str, Any], name: str) -> list[str]:
    """Raises:
    BadMessage: it is no list of texts.
    """
    value = message.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise BadMessage(f"{name}: expected a list of texts, got {str(value)[:100]!r}")
    return value


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _clean(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(each) for key, each in value.items()}
    return [_clean(each) for each in value] if isinstance(value, list | tuple) else value
