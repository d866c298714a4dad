"""Requests of programs for turns of the model, and their answers, whatever protocol they came by.

a dialect, such as chat_completions.py, reads -> ChatRequest -> the callback of a session
and writes                                    <- ChatAnswer  <-
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.data.conversation import Message, ToolCall

__all__ = ["Answer", "ChatAnswer", "ChatRequest", "RefusedRequest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """One request of a program: sample the next turn of an assistant."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the program's own tools, which the program runs itself."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    streams: bool = False
    """True: the answer comes as chunks."""
    wants_usage: bool = False
    """True: a last chunk without choices counts the tokens."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Other fields of the request, such as `temperature`: the recipe's are used, so that training knows them."""
    digest: str = ""
    """Digest of its body, by which a client's retry is known; empty: it is no retry of another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """A sampled turn."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    prompt_tokens: int = 0
    sampled_tokens: int = 0


Answer = Callable[[ChatRequest], Awaitable[ChatAnswer]]
"""The callback of a conversation. The program is told of a `RefusedRequest` and of an `EnvironmentFailure`; any other
exception is an error of status 500 and closes its connection."""


class RefusedRequest(Exception):
    """A request that cannot be answered, for a reason that the program is told.

    Args:
        status: HTTP status; not 408, 409, 429 or 500 and above, after which clients try again.
        code: the `code` of the error, such as `context_length_exceeded`.
        param: the field of the request that is wrong.
    """

    def __init__(
        self, text: str, *, status: int = 400, code: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param
