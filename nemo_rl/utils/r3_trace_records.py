"""The records of a route trace: how values are written, and the file of each process.

`r3_trace_<host>_pid<pid>.jsonl` holds one record a line. A record is one write, so that a killed process leaves at most
one torn line, and threads do not mix theirs. A folder that cannot be written ends the trace with one log line, never
the run. Imports neither torch nor numpy.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from nemo_rl.config.r3_trace_env import r3_trace_verify_forward_enabled, trace_folder, trace_limits
from nemo_rl.routes.digest import route_digests
from nemo_rl.utils.files import FileFormat

__all__ = [
    "TraceFile",
    "as_array",
    "describe",
    "describe_routes",
    "encode",
    "file_name",
    "token_digests",
]

logger = logging.getLogger(__name__)

PREVIEW_VALUES = 16
MAX_ID_VALUES = 1 << 16
"""Up to so many ids a record holds them with their digests, so that a report can show them."""


@runtime_checkable
class _Tensor(Protocol):
    """The methods that a torch tensor has and a numpy array has not."""

    dtype: Any

    def detach(self) -> Any: ...


def as_array(values: Any) -> Any:
    """Return a numpy array of a torch tensor on any device, or of a numpy array; bfloat16 becomes float32, without
    loss."""
    if not isinstance(values, _Tensor):
        return values
    tensor: Any = values.detach().cpu()
    return (tensor.float() if "bfloat16" in str(values.dtype) else tensor).numpy()


def encode(array: Any, dtype: str) -> dict[str, object]:
    """Return all values of a numpy array, little-endian as `dtype` says."""
    raw = base64.b64encode(array.astype(dtype).tobytes()).decode()
    return {"b64": raw, "dtype": dtype, "shape": list(array.shape)}


def describe(array: Any, *, with_preview: bool = True) -> dict[str, object]:
    """Return the shape, dtype, sha256 of the bytes, extremes; the first values on request. `array` is numpy,
    any shape."""
    fields: dict[str, object] = {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
    }
    if array.size and array.dtype.kind in "iu":
        fields |= {"min": int(array.min()), "max": int(array.max())}
    if with_preview:
        fields["preview"] = array.reshape(-1)[:PREVIEW_VALUES].tolist()
    return fields


def describe_routes(routes: Any) -> dict[str, object]:
    """Return the fields that every record of routes has besides its own.

    Args:
        routes: `[S, L, K]` of any integer dtype, numpy; -1 where a route is missing.

    Returns:
        `digests`, and `ids` where they are few.
    """
    fields: dict[str, object] = {"digests": encode(token_digests(routes), "<i8")}
    if routes.size <= MAX_ID_VALUES:
        fields["ids"] = encode(routes, "<i4")
    return fields


def token_digests(routes: Any) -> Any:
    """Return `[S, L]` int64 of `[S, L, K]` integers, numpy.

    The number of the layer stays out of the digest and next to it: so routes that a wrong layer map has put into
    another layer can be recognised there.
    """
    return route_digests(routes.astype("int64"), [0] * routes.shape[1])


def file_name(host: str, pid: int) -> str:
    return f"r3_trace_{host}_pid{pid}.jsonl"


class TraceFile:
    """Appends records; opened by the first of them, and anew after a fork or when the folder changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._owner: tuple[str, int] | None = None
        """Folder and process of the open file, or of the one that failed."""

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        owner = (trace_folder(), os.getpid())
        with self._lock:
            try:
                if self._owner != owner:
                    self._open(owner)
                if self._descriptor is not None:
                    self._append(event, fields)
            except OSError as error:
                self._shut()
                logger.warning("%s: routes are no longer traced by process %d: %s", owner[0], owner[1], error)

    def close(self) -> None:
        """Close the file; the next record opens one again."""
        with self._lock:
            self._shut()
            self._owner = None

    def _shut(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _open(self, owner: tuple[str, int]) -> None:
        if self._owner is not None and self._owner[1] == owner[1]:
            self._shut()
        # After a fork the descriptor is left to the parent.
        self._owner, self._descriptor = owner, None
        folder = Path(owner[0])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file_name(socket.gethostname(), owner[1])
        is_torn = _is_torn(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if is_torn:
            os.write(self._descriptor, b"\n")
        limits = trace_limits().as_record()
        verify = r3_trace_verify_forward_enabled()
        version = FileFormat.ROUTE_TRACE.version
        self._append("trace_started", {"format": version, "limits": limits, "verify_forward": verify})

    def _append(self, event: str, fields: Mapping[str, object]) -> None:
        assert self._descriptor is not None
        process = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid(), **_rank()}
        line = json.dumps({**process, **fields, "event": event}, sort_keys=True, separators=(",", ":")) + "\n"
        encoded = line.encode()
        if os.write(self._descriptor, encoded) < len(encoded):
            raise OSError("only a part of a record was written")


def _is_torn(path: Path) -> bool:
    """Return whether an earlier process of this number was killed inside a record."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _rank() -> dict[str, int]:
    """Return the rank and world size where this process has joined a process group."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return {}
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    except (AttributeError, RuntimeError, ValueError):  # a module half imported, a group being destroyed
        return {}
