"""How other processes find a data plane: plain, picklable records.

The driver's client makes a `DataPlaneAddress`; it travels to workers in actor arguments or through a job store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.config.data_plane import DataPlaneConfig

__all__ = ["DataPlaneAddress", "Handles", "HostKind", "LedgerAddress"]

HostKind: TypeAlias = Literal["in_process", "ray_actor", "socket"]
"""Where a ledger lives."""

Handles: TypeAlias = Mapping[str, object]
"""Chunk id -> plain values that a reader needs to reach the chunk; the ledger's host keeps them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerAddress:
    """Where the ledger of a run answers."""

    kind: HostKind
    run_id: str
    actor_name: str = ""
    """Name of the Ray actor, for `ray_actor`."""
    node: str = ""
    """Ray id of the actor's node, for `ray_actor`: processes there may use its port."""
    port: int = 0
    """TCP port on 127.0.0.1, for `socket`, and next to a Ray actor."""
    token: str = ""
    """Secret that a caller must show, for `socket`."""
    process_id: int = 0
    """Of the process that the ledger is in, for people; 0 for a ledger of this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlaneAddress:
    """Everything `factory.attach_data_plane` needs."""

    run_id: str
    config: DataPlaneConfig
    ledger: LedgerAddress
    process_id: int
    """The owner's process; the `noop` store can only be reached inside it."""
    start_timeout_s: float = START_TIMEOUT_S
    """How long a process may take to join."""
    store: str = ""
    """Where the payload store answers, in its own form; empty for stores that are found by the run id."""
