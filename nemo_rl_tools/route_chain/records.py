"""The records of a trace folder: read from the files of all processes, in the order of each, checked for their form.

Called by `chain`. A line that is no record is reported and left out, so a trace of killed
processes can be read.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl.errors import UnsupportedFormat
from nemo_rl.utils.files import FileFormat, check_format, read_plain

__all__ = ["RecordError", "Trace", "TraceRecord", "decode_array", "read_trace", "trace_folders"]

DTYPES = frozenset({"<i4", "<i8"})
FILES = "r3_trace_*_pid*.jsonl"
"""Names that `r3_trace_records.file_name` gives."""
STARTED = "trace_started"
"""The first record of a process."""

SAMPLE = {"key": str, "trace_step": int, "input_ids": dict}
PASS = {"stage": str, "trace_step": int}
SLOTS = {**PASS, "microbatch_idx": int}
FORMS: Mapping[str, Mapping[str, type]] = {
    STARTED: {"limits": dict},
    "trace_plan": {"stages": list},
    "retired": {"keys": list, "reason": str},
    "rollout_payload_sample": SAMPLE,
    "tq_fetch_sample": {**SAMPLE, "stage": str},
    "stage_started": PASS,
    "stage_ended": {**PASS, "microbatches": int, "is_complete": bool},
    "cp_routed_experts": {**SLOTS, "layers": list, "token_identity": list},
    "router_replay_assignment": {**SLOTS, "layer_number": int, "first_slot": int},
    "router_replay_action": {**SLOTS, "layer_number": int, "action": str},
    "router_replay_forward_verify": {**SLOTS, "layer_number": int, "action": str, "matches_expected": bool},
}
"""Event -> fields that its records must have. Other events are left alone."""
LISTS: Mapping[str, type] = {"stages": str, "keys": str, "layers": int}
"""Fields that are lists -> what they list."""


class RecordError(ValueError):
    """A record without what its event needs, or with values of another kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRecord:
    """One line of a trace file."""

    event: str
    fields: dict[str, Any]
    process: str
    where: str
    """File and line."""

    @property
    def rank(self) -> int | None:
        """Rank in the process group of its process; None without one."""
        return self.fields.get("rank")

    @property
    def time(self) -> float:
        """Seconds since 1970; 0 when the record does not say."""
        at = self.fields.get("time")
        return float(at) if isinstance(at, int | float) else 0.0

    def get(self, name: str, kind: type) -> Any:
        """Return a field of this kind.

        Raises:
            RecordError: it is absent or of another kind.
        """
        value = self.fields.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            got = "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]
            raise RecordError(f"{self.where}: {self.event}: expected {kind.__name__} as {name!r}, got {got}")
        return value


@dataclass(slots=True)
class Trace:
    """The records of a folder."""

    files: list[Path] = field(default_factory=list)
    records: list[TraceRecord] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    """Last lines that a killed process has not finished."""
    damaged: list[str] = field(default_factory=list)
    """Other lines that are no records."""

    def of(self, *events: str) -> Iterator[TraceRecord]:
        """Return records of these events, file by file, in the order in which they were written."""
        return (record for record in self.records if record.event in events)


def trace_folders(folder: Path, *, depth: int) -> Iterator[Path]:
    """Yield the folders that hold files of a trace: this one, and those up to `depth` levels below."""
    if next(folder.glob(FILES), None) is not None:
        yield folder
    if depth:
        try:
            below = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for name in below:
            yield from trace_folders(folder / name, depth=depth - 1)


def read_trace(folder: Path) -> Trace:
    """Return all records of the trace files in `folder`."""
    trace = Trace()
    for path in sorted(folder.glob(FILES)):
        trace.files.append(path)
        _read_file(path, trace)
    return trace


def decode_array(packed: object, where: str) -> np.ndarray:
    """Return the array that `r3_trace_records.encode` packed.

    Raises:
        RecordError: it is none.
    """
    try:
        assert isinstance(packed, dict)
        if packed["dtype"] not in DTYPES:
            raise RecordError(f"{where}: expected a dtype of {sorted(DTYPES)}, got {packed['dtype']!r}")
        flat = np.frombuffer(base64.b64decode(packed["b64"], validate=True), dtype=packed["dtype"])
        return flat.reshape([int(size) for size in packed["shape"]])
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{where}: an array that cannot be decoded ({error})") from error


def _read_file(path: Path, trace: Trace) -> None:
    lines = read_plain(path).split(b"\n")
    if not lines[-1]:
        lines.pop()
    num_started = 0
    for index, line in enumerate(lines):
        where = f"{path.name}:{index + 1}"
        fields = _parse(line)
        if fields is None:
            is_last = index + 1 == len(lines) or (_parse(lines[index + 1]) or {}).get("event") == STARTED
            (trace.torn if is_last else trace.damaged).append(where if is_last else f"{where}: no record")
            continue
        if fields["event"] == STARTED:
            num_started += 1
            try:
                check_format(FileFormat.ROUTE_TRACE, fields.get("format"), where=where)
            except UnsupportedFormat as error:
                trace.damaged.append(str(error))
        process = f"{fields.get('host')}/{fields.get('pid')}" + (f"#{num_started}" if num_started > 1 else "")
        record = TraceRecord(event=fields["event"], fields=fields, process=process, where=where)
        try:
            _check_form(record)
            trace.records.append(record)
        except RecordError as error:
            trace.damaged.append(str(error))


def _check_form(record: TraceRecord) -> None:
    for name, kind in FORMS.get(record.event, {}).items():
        record.get(name, kind)
    for name, kind in LISTS.items():
        for item in record.fields.get(name) or ():
            if not isinstance(item, kind):
                raise RecordError(f"{record.where}: {record.event}: expected {kind.__name__} in {name!r}, got {item!r}")
    if "rank" in record.fields:
        record.get("rank", int)
        record.get("world_size", int)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("event"), str) else None
