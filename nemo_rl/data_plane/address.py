"""The addresses by which other processes find a data plane: plain, picklable records, and `data_plane.json`.

The driver's client makes a `DataPlaneAddress`; it travels to workers in actor arguments or through a job store.
`factory` writes the attach file of a running job, or a ledger that can be started again does so each time; the command
line reads it: it holds the token of the ledger's socket,
so only its owner may read it (mode 0600), and it is gone after the run.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.errors import UserError
from nemo_rl.utils.files import replace_file

__all__ = [
    "ATTACH_FILE",
    "AttachPoint",
    "DataPlaneAddress",
    "Handles",
    "HostKind",
    "LedgerAddress",
    "read_attach_file",
    "write_attach_file",
]

HostKind: TypeAlias = Literal["in_process", "ray_actor", "socket"]
"""The kind of process in which a ledger lives."""

Handles: TypeAlias = Mapping[str, object]
"""Chunk id -> plain values that a reader needs to reach the chunk; the ledger's host keeps them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerAddress:
    """The address at which the ledger of a run answers."""

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
    """Id of the process that the ledger is in, for people; 0 for a ledger of this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlaneAddress:
    """Everything `factory.attach_data_plane` needs."""

    run_id: str
    config: DataPlaneConfig
    ledger: LedgerAddress
    process_id: int
    """The owner's process; the `noop` store can only be reached inside it."""
    start_timeout_s: float = START_TIMEOUT_S
    """Seconds that a process may take to join."""
    store: str = ""
    """The address of the payload store, in its own form; empty for stores that are found by the run id."""


ATTACH_FILE = "data_plane.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachPoint:
    """The address at which the ledger of a run answers to the command line."""

    run_id: str
    ledger: LedgerAddress
    process_id: int = 0
    host_name: str = ""
    """Machine of the owner; the ledger's socket is on its loopback interface."""
    metrics_port: int = 0
    """Port of the metrics on the same interface; 0 when none are served."""


def write_attach_file(log_dir: Path, *, ledger: LedgerAddress, process_id: int, metrics_port: int = 0) -> Path:
    """Write the file for the run of the process `process_id` on this machine."""
    point = AttachPoint(
        run_id=ledger.run_id,
        ledger=ledger,
        process_id=process_id,
        host_name=socket.gethostname(),
        metrics_port=metrics_port,
    )
    return replace_file(log_dir / ATTACH_FILE, lambda path: _write_private(path, json.dumps(asdict(point), indent=1)))


def read_attach_file(log_dir: Path) -> AttachPoint | None:
    """Return the point of a running job; None when there is no file.

    Raises:
        UserError: the file is not what a run writes, or may not be read.
    """
    path = log_dir / ATTACH_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return AttachPoint(**{**record, "ledger": LedgerAddress(**record["ledger"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected the file that a running job writes, got {error!r}") from error


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
