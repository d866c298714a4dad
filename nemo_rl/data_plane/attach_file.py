"""`data_plane.json`: how the command line finds the ledger of a running job. Written by `factory`, read by the CLI.

The file holds the token of the ledger's socket, so only its owner may read it (mode 0600); it is gone after the run.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl.data_plane.address import LedgerAddress
from nemo_rl.errors import UserError
from nemo_rl.utils.files import replace_file

__all__ = ["ATTACH_FILE", "AttachPoint", "read_attach_file", "write_attach_file"]

ATTACH_FILE = "data_plane.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachPoint:
    """Where the ledger of a run answers to onlookers."""

    run_id: str
    ledger: LedgerAddress
    process_id: int = 0
    host_name: str = ""
    """Machine of the owner; the ledger's socket is on its loopback interface."""


def write_attach_file(log_dir: Path, *, ledger: LedgerAddress) -> Path:
    """Writes the file for this process's run."""
    point = AttachPoint(
        run_id=ledger.run_id,
        ledger=ledger,
        process_id=os.getpid(),
        host_name=socket.gethostname(),
    )
    return replace_file(log_dir / ATTACH_FILE, lambda path: _write_private(path, json.dumps(asdict(point), indent=1)))


def read_attach_file(log_dir: Path) -> AttachPoint | None:
    """The point of a running job; None when there is no file.

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
