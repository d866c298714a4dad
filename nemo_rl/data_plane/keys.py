"""Keys of rows: `<group uid>_g<index>`. The only place that puts keys together or takes them apart.

The driver mints the uids of a step, so it knows the keys of all rows that the step may put before any is there.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

__all__ = ["cut_key", "group_uid", "index_of", "key_of", "keys_of_groups", "mint_uids", "split_key"]

MARK = "_g"
MOST_DIGITS = 9
"""Of an index."""
UID_BYTES = 6
"""Random bytes of a group uid: with 2^48 values a collision among the live groups of all steps is out of reach."""


def mint_uids(num_groups: int) -> tuple[str, ...]:
    """Fresh uids: no group of another step or epoch has one of them."""
    return tuple(secrets.token_hex(UID_BYTES) for _ in range(num_groups))


def key_of(uid: str, index: int | str) -> str:
    """The key of one row of a group."""
    return f"{uid}{MARK}{index}"


def keys_of_groups(uids: Iterable[str], group_size: int) -> tuple[str, ...]:
    """Keys of whole groups, group by group.

    Example:
        >>> keys_of_groups(["a", "b"], 2)
        ('a_g0', 'a_g1', 'b_g0', 'b_g1')
    """
    return tuple(key_of(uid, i) for uid in uids for i in range(group_size))


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
