"""Names of rows, clients and chunks: the only place that puts them together or takes them apart.

The key of a row is `<group uid>_g<index>`; the driver mints the uids of a step, so it knows the keys of all rows that
the step may put before any is there. A client is `<place>:<process id>.<6 hex digits>` and a chunk `<run
id>/<client>/<number>`, so an error message can say who made what.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import uuid
from collections.abc import Iterable

__all__ = [
    "QUEUE_PREFIX",
    "chunk_id",
    "chunk_tag",
    "client_label",
    "cut_key",
    "group_uid",
    "group_uids",
    "index_of",
    "key_of",
    "keys_of_groups",
    "new_group_ids",
    "owner_of",
    "place_of",
    "process_of",
    "queue_partition",
    "split_key",
]

MARK = "_g"
MOST_DIGITS = 9
"""Most digits of an index."""
QUEUE_PREFIX = "nemo_rl-"
"""First letters of all partitions that runs have in TransferQueue."""
UID_BYTES = 6
"""Random bytes of a group uid: with 2^48 values a collision among the live groups of all steps is out of reach."""


def new_group_ids(num_groups: int) -> tuple[str, ...]:
    """Return fresh uids: no group of another step or epoch has one of them."""
    return tuple(secrets.token_hex(UID_BYTES) for _ in range(num_groups))


def key_of(uid: str, index: int | str) -> str:
    return f"{uid}{MARK}{index}"


def keys_of_groups(uids: Iterable[str], group_size: int) -> tuple[str, ...]:
    """Return keys of whole groups, group by group.

    Example:
        >>> keys_of_groups(["a", "b"], 2)
        ('a_g0', 'a_g1', 'b_g0', 'b_g1')
    """
    return tuple(key_of(uid, i) for uid in uids for i in range(group_size))


def group_uid(key: str) -> str:
    """Return the group a key belongs to: all before its last `_g`; a key without its own is a group."""
    uid, mark, _ = key.rpartition(MARK)
    return uid if mark else key


def group_uids(keys: Iterable[str]) -> tuple[str, ...]:
    """Return `group_uid` of each key: the last part of one without a mark is all of it."""
    return tuple([uid if mark else rest for uid, mark, rest in [key.rpartition(MARK) for key in keys]])


def cut_key(key: str) -> tuple[str, str]:
    """Return the parts before and behind the last `_g`; nothing, and the whole key, for a key without one."""
    uid, _, index = key.rpartition(MARK)
    return uid, index


def split_key(key: str) -> tuple[str, int] | None:
    """`<uid>_g<i>` as (uid, i), or None for a key that `key_of` would not give back exactly."""
    uid, mark, digits = key.rpartition(MARK)
    index = index_of(digits) if mark else None
    return None if index is None else (uid, index)


def index_of(digits: str) -> int | None:
    """Return a plain number, or None for any other text."""
    is_plain = digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS
    return int(digits) if is_plain and str(int(digits)) == digits else None


def client_label(place: str) -> str:
    """Return a new client of this process at `place` (host name, or what the store calls its node)."""
    return f"{place}:{os.getpid()}.{uuid.uuid4().hex[:6]}"


def chunk_id(run_id: str, client: str, number: int) -> str:
    return f"{run_id}/{client}/{number}"


def chunk_in_blocks(chunk: str, num_blocks: int) -> str:
    return f"{chunk}*{num_blocks}"


def block_ids(chunk: str) -> list[str]:
    """Return the ids under which a chunk lies in a store: those of its blocks, or its own where it is stored whole."""
    name, mark, count = chunk.rpartition("*")
    return [f"{name}#{block}" for block in range(int(count))] if mark else [chunk]


def chunk_tag(chunk: str) -> int:
    """64 bits, never 0, that distinguish a chunk's bytes from those of another one where a store reuses places."""
    digest = hashlib.blake2b(chunk.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def queue_partition(run_id: str, partition_id: str | None = None) -> str:
    """Return the TransferQueue partition of a run's partition; without one, that of what the run keeps for itself.

    Example:
        >>> queue_partition("r1", "train"), queue_partition("r1")
        ('nemo_rl-r1/train', 'nemo_rl-r1')
    """
    own = f"{QUEUE_PREFIX}{run_id}"
    return own if partition_id is None else f"{own}/{partition_id}"


def owner_of(chunk: str) -> str:
    return chunk.rsplit("/", 2)[1]


def process_of(client: str) -> int:
    return int(client.rpartition(":")[2].partition(".")[0])


def place_of(client: str) -> str:
    return client.rpartition(":")[0]
