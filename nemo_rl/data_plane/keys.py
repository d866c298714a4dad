"""Keys of rows, `<group uid>_g<i>`: minted uids, the keys of groups, and the group of a key.

The driver mints the uids of a step, so it knows the keys of all rows that the step may put before any is there. Used by
the trainer, the rollout worker and the ledger.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

__all__ = ["group_uid", "keys_of_groups", "mint_uids"]

UID_BYTES = 6
"""Random bytes of a group uid: with 2^48 values a collision among the live groups of all steps is out of reach."""


def mint_uids(num_groups: int) -> tuple[str, ...]:
    """Fresh uids: no group of another step or epoch has one of them."""
    return tuple(secrets.token_hex(UID_BYTES) for _ in range(num_groups))


def keys_of_groups(uids: Iterable[str], group_size: int) -> tuple[str, ...]:
    """The keys of whole groups, group by group.

    Example:
        >>> keys_of_groups(["a", "b"], 2)
        ('a_g0', 'a_g1', 'b_g0', 'b_g1')
    """
    return tuple(f"{uid}_g{i}" for uid in uids for i in range(group_size))


def group_uid(key: str) -> str:
    """The group a key belongs to: all before its last `_g`; a key without one is a group of its own."""
    uid, mark, _ = key.rpartition("_g")
    return uid if mark else key
