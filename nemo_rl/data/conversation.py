"""Messages of a conversation, and calls of tools in them.

Standard library only: the processes in which environments run import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Message", "Role", "ToolCall"]

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool that an assistant turn asks for.

    Example:
        `ToolCall(name="calculator", arguments={"expression": "2*21"})`
    """

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    """JSON-like values by the names of the tool's parameters."""
    id: str = field(default="", compare=False)
    """Nine letters and digits that the model gave the call, as models of Mistral do; templates repeat it beside the
    result. Empty: calls are numbered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message as text."""

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant message; its content is the text without them."""
    name: str | None = None
    """Name of the tool that a tool message is the result of."""
