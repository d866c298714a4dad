"""Durations as Slurm writes them: `HH:MM:SS` or `DD:HH:MM:SS`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

__all__ = ["AUTO", "TimeLimit", "seconds_of"]

AUTO = "auto"
_PATTERN = re.compile(r"(?:(\d{1,4}):)?(\d{1,4}):([0-5]?\d):([0-5]?\d)")


def seconds_of(text: str) -> float:
    """
    Example:
        >>> seconds_of("3:30:00"), seconds_of("01:00:00:00")
        (12600.0, 86400.0)

    Raises:
        ValueError: it is no duration above 0.
    """
    found = _PATTERN.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError(f"expected HH:MM:SS or DD:HH:MM:SS above 0, got {text!r}")
    return float(total)


def _is_limit(given: object) -> object:
    if given is None or given == AUTO:
        return given
    try:
        seconds_of(given if isinstance(given, str) else str(given))
    except ValueError as error:
        raise PydanticCustomError("duration", "auto, or HH:MM:SS or DD:HH:MM:SS above 0") from error
    return given


TimeLimit = Annotated[str, BeforeValidator(_is_limit)]
"""`auto`, or a duration."""
