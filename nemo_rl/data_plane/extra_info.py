"""`KVBatchMeta.extra_info`: facts about a batch as a whole, for people and for code of the user's own.

JSON-like, copied, with finite numbers. A meta that was cut keeps them; one that was joined has those of all parts.
Invariant: nothing here decides what runs; a plan is `KVBatchMeta.pack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TypeAlias

from nemo_rl.errors import SchemaMismatch

__all__ = ["JsonLike", "checked_info", "join_info"]

JsonLike: TypeAlias = "bool | int | float | str | Sequence[JsonLike] | Mapping[str, JsonLike] | None"
_PLANS = frozenset(
    ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb", "pad_to_multiple", "global_forward_pad_seqlen")
)
"""Names under which NeMo-RL keeps a plan in its `extra_info`; here it has a typed field."""
_DEPTH = 32
"""Containers in one another: deeper ones are a loop, or no facts about a batch."""


def checked_info(given: Mapping[str, JsonLike], where: str) -> dict[str, JsonLike]:
    """A copy.

    Raises:
        SchemaMismatch: a value is not JSON-like, or an entry has the name of a plan.
    """
    where = f"{where}: extra_info"
    if not isinstance(given, Mapping):
        raise SchemaMismatch(f"{where}: expected a mapping, got {type(given).__name__}")
    for name in given.keys() & _PLANS:
        raise SchemaMismatch(f"{where}: {name!r} is a plan; it belongs in KVBatchMeta.pack")
    return {_text_key(name, where): _copied(value, f"{where}[{name!r}]") for name, value in given.items()}


def join_info(parts: Sequence[Mapping[str, JsonLike]]) -> dict[str, JsonLike]:
    """The entries of all parts.

    Raises:
        SchemaMismatch: two parts have other values under one name.
    """
    joined: dict[str, JsonLike] = {}
    for part in parts:
        for name, value in part.items():
            if joined.setdefault(name, value) != value:
                raise SchemaMismatch(
                    f"concat: extra_info[{name!r}] differs: {joined[name]!r} and {value!r}; give one value to all parts"
                )
    return joined


def _text_key(name: object, where: str) -> str:
    if not isinstance(name, str):
        raise SchemaMismatch(f"{where}: expected texts as names, got {name!r}")
    return name


def _copied(value: JsonLike, where: str, depth: int = 0) -> JsonLike:
    """A JSON-like value that shares nothing with the given one; tuples become lists, as JSON has them."""
    if depth > _DEPTH:
        raise SchemaMismatch(f"{where}: expected at most {_DEPTH} containers in one another")
    # Exact types: numbers of numpy are floats, too, and a pickle of them is not small.
    if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {_text_key(name, where): _copied(part, f"{where}[{name!r}]", depth + 1) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(part, f"{where}[{at}]", depth + 1) for at, part in enumerate(value)]
    shown = value if isinstance(value, float) else type(value).__name__
    raise SchemaMismatch(f"{where}: expected a JSON-like value (texts, finite numbers, lists, mappings), got {shown}")
