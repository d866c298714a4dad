"""Names of clients and chunks: who made what, readable in an error message.

A client is `<place>:<process id>.<6 hex digits>`; a chunk is `<run id>/<client>/<number>`.
"""

from __future__ import annotations

import hashlib
import os
import uuid

__all__ = ["chunk_id", "chunk_tag", "client_label", "owner_of", "place_of", "process_of"]


def client_label(place: str) -> str:
    """A new client of this process at `place` (host name, or what the store calls its node)."""
    return f"{place}:{os.getpid()}.{uuid.uuid4().hex[:6]}"


def chunk_id(run_id: str, client: str, number: int) -> str:
    """The id of a client's chunk."""
    return f"{run_id}/{client}/{number}"


def chunk_tag(chunk: str) -> int:
    """64 bits, never 0, that distinguish a chunk's bytes from those of another one where a store reuses places."""
    digest = hashlib.blake2b(chunk.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def owner_of(chunk: str) -> str:
    """The client that made a chunk."""
    return chunk.rsplit("/", 2)[1]


def process_of(client: str) -> int:
    """The number of a client's process, at its place."""
    return int(client.rpartition(":")[2].partition(".")[0])


def place_of(client: str) -> str:
    """Where a client runs."""
    return client.rpartition(":")[0]
