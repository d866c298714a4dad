"""The route trace: what became of the routes of a sample between the rollout and the routers, as JSON lines.

    trace_rollout_payload -> trace_tq_fetch_payload -> trace_cp_routed_experts -> trace_router_replay_assignment
    -> trace_router_replay_action -> trace_router_replay_forward_verify       (the last three inside `r3_trace_stage`)

Off unless NRL_R3_TRACE says so. `nemo-rl inspect DIR routes` joins the files of all processes by sample, position,
layer and stage, and names the first hop at which routes changed. The stage is an object that callers hand along:
recomputation runs on other threads, where a context variable would be empty. Imports neither torch nor numpy. Shapes: N
samples, T tokens, S slots (tokens that this rank holds, padding included), L layers, K chosen experts. Layers are
numbered in the model, from 0.

The records of a route trace: how values are written, and the file of each process.

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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from nemo_rl.config.r3_trace_env import (
    r3_trace_enabled,
    r3_trace_verify_forward_enabled,
    router_replay_validate_enabled,
    trace_folder,
    trace_limits,
)
from nemo_rl.routes.digest import route_digests
from nemo_rl.utils.files import FileFormat

__all__ = [
    "ReplayAction",
    "Runs",
    "TraceFile",
    "TraceStage",
    "TracedRouter",
    "TracedSlots",
    "UsedRoutes",
    "as_array",
    "describe",
    "describe_routes",
    "encode",
    "file_name",
    "r3_trace_enabled",
    "r3_trace_stage",
    "r3_trace_verify_forward_enabled",
    "reset_r3_trace",
    "router_replay_validate_enabled",
    "token_digests",
    "trace_cp_routed_experts",
    "trace_plan",
    "trace_retired",
    "trace_rollout_payload",
    "trace_router_replay_action",
    "trace_router_replay_assignment",
    "trace_router_replay_forward_verify",
    "trace_tq_fetch_payload",
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


Runs: TypeAlias = Sequence[tuple[str | None, int, int]]
"""Slots in local order as (key, first position in the sample, number of tokens); key None for padding."""
ReplayAction: TypeAlias = Literal["replay_forward", "replay_backward", "record", "clear"]


@dataclass(kw_only=True, slots=True)
class TraceStage:
    """One pass of one stage on one rank; handed to everything that traces inside it."""

    stage: str
    trace_step: int
    """Number of passes of this stage that the process had before."""
    coords: Mapping[str, int]
    """Coordinates of the rank: `{"dp": 0, "cp": 1, "tp": 0, "pp": 0}`."""
    sizes: Mapping[str, int]
    num_microbatches: int
    seen: set[int] = field(default_factory=set)
    """Microbatches that ran, traced or not."""

    def traces(self, microbatch: int) -> bool:
        """Return whether a microbatch, counted from 0 in its pass, is traced."""
        self.seen.add(microbatch)
        return microbatch < self.num_microbatches

    def as_record(self, microbatch: int) -> dict[str, object]:
        return {**self.head(), "microbatch_idx": microbatch}

    def head(self) -> dict[str, object]:
        """Return the fields that all records of the pass share."""
        return {"stage": self.stage, "trace_step": self.trace_step, "coords": dict(self.coords)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSlots:
    """The slots of a microbatch that this rank holds after packing and the cut over context ranks."""

    runs: Runs
    input_ids: Any = None
    """`[S]` integers, the tokens as the model gets them; None leaves them unchecked."""
    verified_count: int | None = None
    """Slots whose token and route the caller has compared with their source; None when it has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRouter:
    """The router of one layer in one microbatch."""

    microbatch: int
    layer_number: int
    first_slot: int = 0
    """The first slot of the microbatch that the router sees, of those of `trace_cp_routed_experts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedRoutes:
    """The routes that a forward pass used, beside those of the rollout."""

    actual: Any
    """torch `[S, K]` integers, the choice that the forward used."""
    expected: Any
    """torch `[S]` int64, `route_digests` of the rollout for this layer."""
    missing: Any
    """torch `[S]` bool: no route of the rollout belongs here (it is missing, or the slot is padding)."""
    num_experts: int
    """Experts that the router chooses among."""


_FILE = TraceFile()
_CALLS: Counter[str] = Counter()
_CALLS_LOCK = threading.Lock()


def reset_r3_trace() -> None:
    """Forget the counters and close the file, as if the process were new."""
    _FILE.close()
    with _CALLS_LOCK:
        _CALLS.clear()


def trace_plan(*, stages: Sequence[str]) -> None:
    """Say which stages of the run replay routes, so that a stage without a trace is found missing. By the driver."""
    if r3_trace_enabled():
        _FILE.write("trace_plan", {"stages": list(stages)})


def trace_retired(*, keys: Sequence[str], reason: str) -> None:
    """Say that these samples are left out of training on purpose: `reason` is for people."""
    if r3_trace_enabled() and keys:
        _FILE.write("retired", {"keys": list(keys), "reason": reason})


def trace_rollout_payload(
    *,
    keys: Sequence[str],
    data: Mapping[str, Any],
    layers: Sequence[int] | None = None,
    routes: Any = None,
    continues: bool = False,
) -> None:
    """Trace the routes of a rollout as they are about to be written, one record per sample.

    Args:
        keys: N.
        data: `input_ids` `[N, T]` integers, `input_lengths` `[N]`; `routed_experts` as `routes` when that is None and
            no bitmap of missing routes comes with it.
        layers: numbers of the L layers; None means the layers that the workers name, in ascending order.
        routes: `[N, T, L, K]` integers, or N arrays `[T, L, K]`; a token without a route has -1 in all places.
        continues: the samples belong to the same step as those of the call before.
    """
    if r3_trace_enabled() and (step := _next_call("rollout", continues=continues)) is not None:
        _trace_samples("rollout_payload_sample", {"trace_step": step}, keys, data, layers, routes)


def trace_tq_fetch_payload(
    *,
    stage: str,
    keys: Sequence[str],
    data: Mapping[str, Any],
    layers: Sequence[int] | None = None,
    routes: Any = None,
) -> None:
    """Trace the routes of whole samples as a worker got them from the data plane; arguments as
    `trace_rollout_payload`."""
    if r3_trace_enabled() and (step := _next_call(f"fetch/{stage}")) is not None:
        head = {"stage": stage, "trace_step": step}
        _trace_samples("tq_fetch_sample", head, keys, data, layers, routes)


@contextmanager
def r3_trace_stage(
    stage: str,
    *,
    coords: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
    layers: Sequence[int] | None = None,
    replays: bool = True,
) -> Iterator[TraceStage | None]:
    """Trace one pass of a stage on this rank; the first passes of the process are traced.

    Args:
        stage: prev_logprobs or train.
        coords: of this rank on each parallel axis.
        sizes: of these axes.
        layers: numbers of the layers with routers that this rank holds; None when it is not known.
        replays: False where routes are recorded: there is nothing yet that they could be compared with, and the pass
            is not announced to the verifier.

    Yields:
        What to hand along; None when this pass is not traced.
    """
    if not r3_trace_enabled() or (step := _next_call(f"stage/{stage}")) is None:
        yield None
        return
    limit = trace_limits().microbatches
    traced = TraceStage(
        stage=stage, trace_step=step, coords=dict(coords or {}), sizes=dict(sizes or {}), num_microbatches=limit
    )
    if not replays:
        yield traced
        return
    held = None if layers is None else list(layers)
    _FILE.write("stage_started", {**traced.head(), "sizes": dict(sizes or {}), "layers": held})
    is_complete = False
    try:
        yield traced
        is_complete = True
    finally:
        _FILE.write("stage_ended", {**traced.head(), "is_complete": is_complete, "microbatches": len(traced.seen)})


def trace_cp_routed_experts(
    stage: TraceStage | None,
    *,
    microbatch: int,
    slots: TracedSlots,
    routes: Any,
    layers: Sequence[int],
) -> None:
    """Trace the part of a microbatch that a rank holds after packing and the cut over context ranks.

    Args:
        routes: `[S, L, K]` integers, -1 where a route is missing.
        layers: numbers of the L layers.
    """
    if stage is None or not stage.traces(microbatch):
        return
    local = as_array(routes)
    fields: dict[str, object] = {
        "cp_rank": stage.coords.get("cp", 0),
        "cp_size": stage.sizes.get("cp", 1),
        "layers": list(layers),
        "token_identity": [[key, int(start), int(length)] for key, start, length in slots.runs],
        "cp_token_identity_verified_count": slots.verified_count,
        "tensor": describe(local),
        **describe_routes(local),
    }
    if slots.input_ids is not None:
        tokens = as_array(slots.input_ids).reshape(-1)
        fields["input_ids"] = {**describe(tokens), "values": encode(tokens, "<i4")}
    _FILE.write("cp_routed_experts", {**stage.as_record(microbatch), **fields})


def trace_router_replay_assignment(
    stage: TraceStage | None, router: TracedRouter, *, payload_idx: int, ids: Any
) -> None:
    """Trace the routes that the router of one layer was given.

    Args:
        payload_idx: column of the payload that they were taken from.
        ids: `[S, K]` integers.
    """
    if stage is None or not stage.traces(router.microbatch):
        return
    installed = as_array(ids)
    fields = {
        "layer_number": router.layer_number,
        "payload_idx": payload_idx,
        "tensor": describe(installed),
        **_slots_record(router),
        **describe_routes(installed[:, None]),
    }
    _FILE.write("router_replay_assignment", {**stage.as_record(router.microbatch), **fields})


def trace_router_replay_action(
    stage: TraceStage | None, router: TracedRouter, *, action: ReplayAction, ids: Any = None, pending: int = 0
) -> None:
    """Trace the instruction of a router about its routes.

    Args:
        ids: `[S, K]` integers that the action uses, None when it uses none. Of `record` only their shape is
            written: they are where routes begin.
        pending: microbatches whose backward pass may still ask the router, afterwards.
    """
    if stage is None or not stage.traces(router.microbatch):
        return
    fields: dict[str, object] = {
        "action": action,
        "layer_number": router.layer_number,
        "replay_backward_list_len": pending,
        **_slots_record(router),
    }
    if ids is not None:
        used = as_array(ids)
        fields |= {"tensor": describe(used)} | ({} if action == "record" else describe_routes(used[:, None]))
    _FILE.write("router_replay_action", {**stage.as_record(router.microbatch), **fields})


def trace_router_replay_forward_verify(
    stage: TraceStage | None,
    router: TracedRouter,
    routes: UsedRoutes,
    *,
    action: ReplayAction,
    pending: tuple[int, int] | None = None,
) -> bool:
    """Check that a forward pass used the routes whose digests came from the rollout, in every pass, traced or not.

    Args:
        action: replay_forward, or replay_backward where it is recomputed.
        pending: microbatches whose backward pass may still ask the router, before and after.

    Returns:
        False when a token used other experts; the caller raises.
    """
    found = route_digests(routes.actual.detach().long()[:, None], [router.layer_number])[:, 0]
    differs = (found != routes.expected.to(found.device)) & ~routes.missing.to(found.device)
    matches = not bool(differs.any())
    if stage is None or not stage.traces(router.microbatch):
        return matches
    used, before_after = as_array(routes.actual), pending or (None, None)
    fields = {
        "action": action,
        "layer_number": router.layer_number,
        "topk": used.shape[1],
        "scores_shape": [len(used), routes.num_experts],
        "actual": describe(used),
        "expected": describe(as_array(routes.expected)),
        "matches_expected": matches,
        "num_differing": int(differs.sum()),
        "fallback_rows": int(routes.missing.sum()),
        "replay_backward_list_len_before": before_after[0],
        "replay_backward_list_len_after": before_after[1],
        **_slots_record(router),
        **describe_routes(used[:, None]),
    }
    _FILE.write("router_replay_forward_verify", {**stage.as_record(router.microbatch), **fields})
    return matches


def _next_call(name: str, *, continues: bool = False) -> int | None:
    """Return the number of this call among those of its name, with `continues` that of the call before; None when it is
    beyond the limit."""
    with _CALLS_LOCK:
        number = _CALLS[name] - continues
        _CALLS[name] = number + 1
    return number if number < trace_limits().steps else None


def _trace_samples(
    event: str,
    head: Mapping[str, object],
    keys: Sequence[str],
    data: Mapping[str, Any],
    layers: Sequence[int] | None,
    routes: Any,
) -> None:
    if routes is None and "routed_experts" in data and "routed_experts_missing" not in data:
        routes = data["routed_experts"]
    num_previews = trace_limits().samples
    for index, key in enumerate(keys):
        tokens = as_array(data["input_ids"][index])
        row = None if routes is None else as_array(routes[index])
        longest = len(tokens) if row is None else min(len(tokens), len(row))
        length = int(data["input_lengths"][index]) if "input_lengths" in data else longest
        with_preview = index < num_previews
        described = {**_valid(tokens, length, with_preview=with_preview), "values": encode(tokens[:length], "<i4")}
        fields: dict[str, object] = {"sample_idx": index, "key": key, "valid_length": length, "input_ids": described}
        if row is not None:
            fields["routed_experts"] = _valid(row, length, with_preview=with_preview)
            fields["layers"] = None if layers is None else list(layers)
            fields |= describe_routes(row[:length])
        _FILE.write(event, {**head, **fields})


def _valid(row: Any, length: int, *, with_preview: bool) -> dict[str, object]:
    """Return the region of a row that holds a sample; names as in the records of other tools."""
    described = describe(row[:length], with_preview=with_preview)
    named = {f"valid_{name}": described.pop(name) for name in ("shape", "sha256", "preview") if name in described}
    return {"full_shape": list(row.shape), **named, **described}


def _slots_record(router: TracedRouter) -> dict[str, object]:
    # A reader takes the slots of `cp_routed_experts`; other tools name them here.
    return {"token_identity": None, "first_slot": router.first_slot}
