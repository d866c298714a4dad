"""`RowTurn`: one turn of a conversation in readable rollouts, and where the time of a conversation goes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RowTime", "RowTurn", "SaidText"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidText:
    """A text that the model said or read."""

    who: str
    """`assistant`, `call`, `result of NAME`, or the role of a message."""
    text: str
    is_error: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTime:
    """Seconds of a turn or of a whole conversation."""

    engine: float = 0.0
    tool: float = 0.0
    """Tools and environment."""
    waiting: float = 0.0
    """Waiting for a place in an engine; of a conversation also what nothing else accounts for."""

    @property
    def total(self) -> float:
        return self.engine + self.tool + self.waiting

    @property
    def parts(self) -> Mapping[str, float]:
        """Return the seconds by the names that people see."""
        return {"engine": self.engine, "tool": self.tool, "waiting": self.waiting}

    def text(self) -> str:
        """Return the seconds for people."""
        return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.parts.items() if seconds > 0) or "0 s"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTurn:
    """One turn of the model, and what it was told next."""

    number: int
    num_tokens: int
    truncated: bool
    said: tuple[SaidText, ...]
    """The model's text and calls, then results and messages, in this order."""
    reward: float = 0.0
    engine: int = 0
    cached_tokens: int | None = None
    time: RowTime = field(default_factory=RowTime)

    def facts(self) -> list[str]:
        """Return what is known of the turn, for people."""
        return [
            f"{self.num_tokens} tokens",
            *(["cut"] if self.truncated else []),
            f"reward {self.reward:.4g}",
            f"engine {self.engine}",
            *([] if self.cached_tokens is None else [f"{self.cached_tokens} cached tokens"]),
            self.time.text(),
        ]

    @classmethod
    def from_record(cls, number: int, record: Mapping[str, Any]) -> RowTurn:
        """Parse a turn of a line of the file.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is none.
        """
        return cls(
            number=number,
            num_tokens=int(record["num_tokens"]),
            truncated=bool(record["truncated"]),
            said=tuple(_said(record)),
            reward=float(record.get("reward", 0.0)),
            engine=int(record.get("engine", 0)),
            cached_tokens=None if record.get("cached_tokens") is None else int(record["cached_tokens"]),
            time=RowTime(
                engine=float(record.get("sampled_s", 0.0)),
                tool=float(record.get("tool_s", 0.0)),
                waiting=float(record.get("waited_s", 0.0)),
            ),
        )


def _said(record: Mapping[str, Any]) -> Iterator[SaidText]:
    yield SaidText(who="assistant", text=str(record.get("text", "")))
    calls, results = record.get("calls", ()), record.get("results", ())
    for call in calls:
        yield SaidText(who="call", text=f"{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}")
    for number, result in enumerate(results):
        name = calls[number]["name"] if number < len(calls) else "an unreadable call"
        error = result.get("error")
        who = f"result of {name} ({error})" if error else f"result of {name}"
        yield SaidText(who=who, text=str(result["text"]), is_error=error is not None)
    # A tool's message is its result, which was said.
    for message in record.get("messages", ()):
        if message["role"] != "tool":
            yield SaidText(who=str(message["role"]), text=str(message["content"]))
