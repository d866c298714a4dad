"""Process groups with deadlines, and the status-first broadcast inside a replica group.

Policy workers call `init_process_group` once, then build their groups eagerly. Invariant: a leader always sends a
status word before anything else, so that its error reaches the followers as text and nobody waits for data that
will never come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.errors import WorkerError, from_record, to_record

__all__ = ["RankSpec", "broadcast_from_leader", "destroy_process_group", "init_process_group", "replica_group_of"]

_STATUS_OK, _STATUS_ERROR = 0, 1
LOOPBACK_INTERFACE = "lo"

Fields = dict[str, torch.Tensor | list[object]]
Json = dict[str, Any]
"""A decoded header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """One rank of a job."""

    rank: int
    world_size: int
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Port of the store that rank 0 opens; not read when `world_size` is 1."""


def init_process_group(spec: RankSpec, *, device: torch.device, timeout_s: float) -> None:
    """(collective) Joins the job's default group: NCCL on GPU (gloo beside it for CPU tensors), gloo on CPU.

    Every rank calls it first. A single rank needs no port.
    """
    timeout = timedelta(seconds=timeout_s)
    if spec.world_size == 1:
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if spec.master_addr.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    store = dist.TCPStore(
        spec.master_addr, spec.master_port, spec.world_size, is_master=spec.rank == 0, timeout=timeout
    )
    dist.init_process_group(_backend(device), store=store, rank=spec.rank, world_size=spec.world_size, timeout=timeout)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def destroy_process_group() -> None:
    """Leaves the default group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def replica_group_of(rank: int, buckets: list[list[int]]) -> dist.ProcessGroup | None:
    """(collective) Builds one group per bucket of ranks and returns the one that `rank` is in.

    Every rank of the job calls it with the same buckets. A bucket of one rank gets no group.
    """
    mine: dist.ProcessGroup | None = None
    for ranks in buckets:
        if len(ranks) < 2:
            continue
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine


def broadcast_from_leader(fetch: Callable[[], Fields], *, group: dist.ProcessGroup | None, leader: int) -> Fields:
    """(collective over `group`) The leader runs `fetch`; every rank gets its columns, or its error.

    Order of calls on each rank: status word, header, then one broadcast per tensor. Tensors may be jagged nested
    (`[N, *]`); their values travel unpadded. Lists must be JSON-like.

    Args:
        fetch: called on the leader only.
        group: replica group; None means this rank is alone.
        leader: global rank of the leader.

    Raises:
        the leader's own error on the leader; on followers the same kind when it is one of ours, else WorkerError.
    """
    if group is None:
        return fetch()
    if dist.get_rank() == leader:
        return _lead(fetch, group, leader)
    return _follow(group, leader)


def _lead(fetch: Callable[[], Fields], group: dist.ProcessGroup, leader: int) -> Fields:
    try:
        fields = fetch()
    except BaseException as error:
        _send_header(_STATUS_ERROR, to_record(error), group, leader)
        raise
    header = {name: _describe(column) for name, column in fields.items()}
    _send_header(_STATUS_OK, header, group, leader)
    for column in fields.values():
        if isinstance(column, torch.Tensor):
            dist.broadcast(_on_wire(_values(column), group), src=leader, group=group)
    return fields


def _follow(group: dist.ProcessGroup, leader: int) -> Fields:
    status, header = _receive_header(group, leader)
    if status == _STATUS_ERROR:
        error = from_record(header)
        error.add_note(f"raised on the leader (rank {leader}) of this replica group")
        raise error
    fields: Fields = {}
    for name, described in header.items():
        if "rows" in described:
            fields[name] = described["rows"]
            continue
        buffer = torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]))
        wire = _on_wire(buffer, group)
        dist.broadcast(wire, src=leader, group=group)
        fields[name] = _rebuild(wire.view(buffer.dtype).view(buffer.shape).cpu(), described.get("offsets"))
    return fields


def _describe(column: torch.Tensor | list[object]) -> Json:
    if not isinstance(column, torch.Tensor):
        return {"rows": column}
    described: Json = {"dtype": str(column.dtype).removeprefix("torch."), "shape": list(_values(column).shape)}
    if column.is_nested:
        described["offsets"] = column.offsets().tolist()  # type: ignore[attr-defined]
    return described


def _values(column: torch.Tensor) -> torch.Tensor:
    return column.values() if column.is_nested else column


def _rebuild(values: torch.Tensor, offsets: list[int] | None) -> torch.Tensor:
    if offsets is None:
        return values
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets))


def _on_wire(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Raw bytes on the group's device: gloo does not know every dtype, bytes work for all."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return raw.to(_group_device(group))


def _group_device(group: dist.ProcessGroup) -> torch.device:
    is_nccl = "nccl" in str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _send_header(status: int, header: Mapping[str, Any], group: dist.ProcessGroup, leader: int) -> None:
    text = json.dumps(header).encode()
    device = _group_device(group)
    dist.broadcast(torch.tensor([status, len(text)], device=device), src=leader, group=group)
    dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), src=leader, group=group)


def _receive_header(group: dist.ProcessGroup, leader: int) -> tuple[int, Json]:
    device = _group_device(group)
    word = torch.zeros(2, dtype=torch.int64, device=device)
    dist.broadcast(word, src=leader, group=group)
    status, size = (int(x) for x in word.tolist())
    text = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(text, src=leader, group=group)
    header = json.loads(bytes(text.cpu().tolist()))
    if not isinstance(header, dict):
        raise WorkerError(f"leader header: expected an object, got {type(header).__name__}", stage="fetch")
    return status, header
