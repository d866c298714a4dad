"""The base of every config section, frozen and closed to unknown keys, and the types of values that sections share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

__all__ = [
    "AUTO",
    "START_TIMEOUT_S",
    "EnvVars",
    "FilePath",
    "ListOptions",
    "Options",
    "Section",
    "StoragePlace",
    "Text",
    "TimeLimit",
    "is_url",
    "keys_of",
    "seconds_of",
    "url_problem",
]

START_TIMEOUT_S = 600.0
"""A quiet machine takes 15 s for a whole start; one with twenty times the work of its cores takes minutes."""


def _not_empty(given: object) -> object:
    """Refuse an empty path: it would be the working directory, which nobody means."""
    if given == "":
        raise PydanticCustomError("empty_path", "a path that is not empty")
    return given


FilePath = Annotated[Path, BeforeValidator(_not_empty)]


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:://|::)")


def is_url(place: object) -> bool:
    """Return whether a place of files is a URL that fsspec opens, not a path.

    Example:
        >>> is_url("s3://bucket/run"), is_url("results/run")
        (True, False)
    """
    return isinstance(place, str) and _URL.match(place) is not None


def url_problem(url: str) -> str | None:
    """Return why files cannot be kept at a URL, without its text, which may hold a secret; None where they can."""
    protocol, _, rest = url.partition("://")
    example = "expected one such as s3://bucket/run"
    if "::" in url:
        return f"a chain of protocols is not written to; {example}"
    if protocol == "memory":
        return f"memory:// ends with its process; {example}"
    if not rest.strip("/"):
        return f"{protocol}:// names no place; {example}"
    if ":" in rest.partition("/")[0].rpartition("@")[0] or "?" in rest or "#" in rest:
        return (
            f"a URL of {protocol} with a password or a query; leave them out, and give credentials as fsspec takes "
            "them: in the environment, or in ~/.config/fsspec"
        )
    return None


def _path_or_url(given: object) -> Path | str:
    if isinstance(given, str) and is_url(given):
        # Without the slashes at its end: names are put behind one.
        return given.rstrip("/") if not given.endswith("://") else given
    if isinstance(given, Path) or (isinstance(given, str) and given):
        return Path(given)
    raise PydanticCustomError("path_or_url", "a path, or a URL such as s3://bucket/run")


StoragePlace = Annotated[Path | str, PlainValidator(_path_or_url)]
"""A path, or the text of a URL."""
Text = Annotated[str, Field(min_length=1)]
"""A text that says something: an empty one is a slip."""


Options = dict[str, str | int | float | bool | None]
"""Settings of a part whose keys are not known here."""


ListOptions = dict[str, str | int | float | bool | tuple[str, ...] | None]
"""Options some of which are lists of texts."""


def _number_as_text(given: object) -> object:
    """Return a number as a text: YAML reads `NCCL_DEBUG_LEVEL: 1` as a number."""
    return str(given) if isinstance(given, int | float) and not isinstance(given, bool) else given


EnvVars = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
    Annotated[str, BeforeValidator(_number_as_text)],
]
"""Environment variables of processes: name -> value."""


class Section(BaseModel):
    """A frozen group of keys; a key that is not declared is an error.

    A key that Python reserves has an attribute with another name, and the key as its alias: `grpo.async` is
    `config.grpo.async_`.
    """

    NAMED: ClassVar[type[Section] | None] = None
    """Class of sections that stand in this one under names of the user's; None: there are none."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys in a recipe."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


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
