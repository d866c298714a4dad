"""Keys of rows: `<group uid>_g<index>`. The only place that puts keys together or takes them apart."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["cut_key", "group_keys", "group_uid", "index_of", "key_of", "split_key"]

MARK = "_g"
MOST_DIGITS = 9
"""Of an index."""


def key_of(uid: str, index: int | str) -> str:
    """The key of one row of a group."""
    return f"{uid}{MARK}{index}"


def group_keys(uids: Iterable[str], group_size: int) -> list[str]:
    """Keys of whole groups, group by group.

    Example:
        >>> group_keys(["a", "b"], 2)
        ['a_g0', 'a_g1', 'b_g0', 'b_g1']
    """
    return [key_of(uid, i) for uid in uids for i in range(group_size)]


def group_uid(key: str) -> str:
    """The group a key belongs to: all before its last `_g`; a key without one is a group of its own."""
    uid, mark, _ = key.rpartition(MARK)
    return uid if mark else key


def cut_key(key: str) -> tuple[str, str]:
    """What is before the last `_g` and what is behind it; nothing, and the whole key, for a key without one."""
    uid, _, index = key.rpartition(MARK)
    return uid, index


def split_key(key: str) -> tuple[str, int] | None:
    """`<uid>_g<i>` as (uid, i), or None for a key that `key_of` would not give back exactly."""
    uid, mark, digits = key.rpartition(MARK)
    index = index_of(digits) if mark else None
    return None if index is None else (uid, index)


def index_of(digits: str) -> int | None:
    """A plain number, or None for any other text."""
    is_plain = digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS
    return int(digits) if is_plain and str(int(digits)) == digits else None
