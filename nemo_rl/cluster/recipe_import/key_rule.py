"""`KeyRule`: what becomes of one key of a NeMo-RL recipe; the tables are made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "MANY",
    "OFF",
    "Fate",
    "KeyRule",
    "Outcome",
    "Table",
    "becomes",
    "lacks",
    "moved",
    "no_effect",
    "not_supported",
    "refused",
    "same",
    "with_others",
]

MANY = "*"
"""Ends a key of a table that stands for all keys that begin so."""
OFF: tuple[object, ...] = (None, False)
"""Values that ask for nothing."""


class Fate(StrEnum):
    """What becomes of a key."""

    SAME = "same"
    """The same key with the same value; or switched off there, and not here at all."""
    MAPPED = "mapped"
    """Another key, or another value."""
    NOT_SUPPORTED = "not supported"
    IGNORED = "without effect"
    """Nothing here depends on it."""
    UNKNOWN = "unknown"
    """Neither NeMo-RL's nor ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRule:
    """One key of NeMo-RL."""

    fate: Fate
    to: str = ""
    """Key here; empty for the same one."""
    why: str = ""
    """For people: the reason, or what the value means here."""
    off: tuple[object, ...] = ()
    """Of a key that is not supported: values that ask for nothing."""
    convert: Callable[[object], object] | None = None
    """Value there -> value here; None takes it as it is."""
    is_with_others: bool = False
    """Several keys are converted together, see `sections`."""
    must_decide: bool = False
    """Whether something else is trained without this unsupported key, so that the import ends with exit code 2."""


Table = Mapping[str, KeyRule]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one key of a recipe."""

    key: str
    """There; empty for one that was added here."""
    fate: Fate
    to: str = ""
    """Here."""
    value: object = None
    """Here, where there is a key for it."""
    why: str = ""
    must_decide: bool = False
    """Left out, the run would train something else: somebody has to decide."""


def same(*, convert: Callable[[object], object] | None = None, why: str = "") -> KeyRule:
    """The key is here as well."""
    return KeyRule(fate=Fate.SAME if convert is None else Fate.MAPPED, convert=convert, why=why)


def moved(to: str, *, convert: Callable[[object], object] | None = None, why: str = "") -> KeyRule:
    """The key has another name here."""
    return KeyRule(fate=Fate.MAPPED, to=to, convert=convert, why=why)


def not_supported(why: str, *, off: tuple[object, ...] = OFF) -> KeyRule:
    """There is nothing of the kind here."""
    return KeyRule(fate=Fate.NOT_SUPPORTED, why=why, off=off)


def refused(why: str, *, off: tuple[object, ...] = OFF) -> KeyRule:
    """There is nothing of the kind here, and a run without it trains another model, other data or another loss."""
    return KeyRule(fate=Fate.NOT_SUPPORTED, why=why, off=off, must_decide=True)


def no_effect(why: str) -> KeyRule:
    """It would change nothing here."""
    return KeyRule(fate=Fate.IGNORED, why=why)


def with_others(why: str) -> KeyRule:
    """It is converted together with others of its section."""
    return KeyRule(fate=Fate.MAPPED, why=why, is_with_others=True)


def becomes(key: str, here: str, value: object, why: str) -> Outcome:
    """A key of a recipe becomes one of ours; an empty one is added."""
    return Outcome(key=key, fate=Fate.MAPPED, to=here, value=value, why=why)


def lacks(key: str, why: str, *, must_decide: bool = False) -> Outcome:
    """A key of a recipe has nothing here."""
    return Outcome(key=key, fate=Fate.NOT_SUPPORTED, why=why, must_decide=must_decide)
