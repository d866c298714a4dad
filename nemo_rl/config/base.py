"""Base of every config section: frozen, and closed to unknown keys; a default that several layers share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

__all__ = ["START_TIMEOUT_S", "EnvVars", "FilePath", "Options", "Section", "Text"]

START_TIMEOUT_S = 600.0
"""A quiet machine takes 15 s for a whole start; one with twenty times the work of its cores takes minutes."""


def _not_empty(given: object) -> object:
    """An empty path would be the working directory, which nobody means."""
    if given == "":
        raise PydanticCustomError("empty_path", "a path that is not empty")
    return given


FilePath = Annotated[Path, BeforeValidator(_not_empty)]
Text = Annotated[str, Field(min_length=1)]
"""A text that says something: an empty one is a slip."""


Options = dict[str, str | int | float | bool | None]
"""Settings of a part whose keys are not known here."""


def _number_as_text(given: object) -> object:
    """YAML reads `NCCL_DEBUG_LEVEL: 1` as a number."""
    return str(given) if isinstance(given, int | float) and not isinstance(given, bool) else given


EnvVars = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
    Annotated[str, BeforeValidator(_number_as_text)],
]
"""Environment variables of processes: name -> value."""


class Section(BaseModel):
    """A frozen group of keys; a key that is not declared is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
