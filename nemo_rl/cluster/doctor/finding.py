"""`Finding`: one thing that was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

__all__ = ["Finding", "State", "green", "red", "yellow"]


class State(StrEnum):
    """How something is."""

    GREEN = "green"
    """In order."""
    YELLOW = "yellow"
    """Some runs will not work, or will be slow."""
    RED = "red"
    """No run will work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    advice: str = ""
    """What to do; empty when all is in order."""

    def to_json(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def green(name: str, found: str) -> Finding:
    return Finding(name=name, state=State.GREEN, found=found)


def yellow(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, state=State.YELLOW, found=found, advice=advice)


def red(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, state=State.RED, found=found, advice=advice)
