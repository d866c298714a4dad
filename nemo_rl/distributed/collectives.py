"""Process groups with deadlines, the status-first broadcast in a replica group, and the comparison of plan digests.

Policy workers call `init_process_group` once, then build their groups eagerly. Invariant: a leader always sends a
status word before anything else, so that its error reaches the followers as text and nobody waits for data that will
never come. A worker never plans, so `check_plans` compares digests before any row is touched: ranks with different
plans would wait for each other in different microbatches.

Collectives with gradients, for tensor, sequence and context parallel models.

All functions are collective over their group: every rank calls them in the same order, in the forward and in the
backward pass, with tensors of the same shape. Invariant: each is the adjoint of the way its result is used, so that a
gradient is summed over a group exactly once. A group of None means one rank, and nothing is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from nemo_rl.distributed.job_store import choose_interface, few_connections, open_client, open_server
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import DIGEST_BYTES, PackPlan
from nemo_rl.errors import SchemaMismatch, WorkerError, from_record, to_record
from nemo_rl.jagged import offsets_of, values_of
from nemo_rl.torch_private import default_store, jagged_view, timeout_of

__all__ = [
    "MESSAGE_BYTES",
    "Fields",
    "ParallelGroups",
    "RankSpec",
    "broadcast_from_leader",
    "check_plans",
    "copy_to",
    "destroy_process_group",
    "gather_along",
    "init_process_group",
    "job_store",
    "meet",
    "new_group",
    "reduce_from",
    "replica_group_of",
    "scatter_along",
    "scatter_from_leader",
]


Group = dist.ProcessGroup | None

# torch 2.13 renames the two, and warns of the old names.
_NAMES = vars(dist)
_all_gather: Callable[..., object] = _NAMES.get("all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., object] = _NAMES.get("reduce_scatter_single", dist.reduce_scatter_tensor)


def copy_to(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the value itself, which every rank holds, before each rank uses it for its part: gradients are summed."""
    if group is None:
        return value
    return _CopyTo.apply(value, group)  # type: ignore[no-untyped-call]


def reduce_from(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of every rank's part, which every rank then uses alike: its gradient is each part's gradient."""
    if group is None:
        return value
    return _ReduceFrom.apply(value, group)  # type: ignore[no-untyped-call]


def gather_along(value: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
    """Return all ranks' values side by side, before each rank uses the whole for its part: gradients are summed per
    value.
    """
    if group is None:
        return value
    return _GatherAlong.apply(value, group, dim)  # type: ignore[no-untyped-call]


def scatter_along(value: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
    """Return this rank's slice of the sum of every rank's part."""
    if group is None:
        return value
    return _ScatterAlong.apply(value, group, dim)  # type: ignore[no-untyped-call]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group  # type: ignore[attr-defined]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.group), None  # type: ignore[attr-defined]


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        return _sum(value, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherAlong(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup, dim: int
    ) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim  # type: ignore[attr-defined]
        return _gather_dim(value, group, dim)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _scatter(grad, ctx.group, ctx.dim), None, None  # type: ignore[attr-defined]


class _ScatterAlong(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup, dim: int
    ) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim  # type: ignore[attr-defined]
        return _scatter(value, group, dim)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _gather_dim(grad, ctx.group, ctx.dim), None, None  # type: ignore[attr-defined]


def _sum(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather_dim(value: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    # The collective works along the first dimension.
    first = value.movedim(dim, 0).contiguous()
    whole = first.new_empty(first.shape[0] * dist.get_world_size(group), *first.shape[1:])
    _all_gather(whole, first, group=group)
    return whole.movedim(0, dim).contiguous()


def _scatter(value: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    first = value.movedim(dim, 0).contiguous()
    size = dist.get_world_size(group)
    if first.shape[0] % size:
        raise ValueError(f"dimension {dim} of {tuple(value.shape)} does not divide by {size} ranks")
    mine = first.new_empty(first.shape[0] // size, *first.shape[1:])
    _reduce_scatter(mine, first, group=group)
    return mine.movedim(0, dim).contiguous()


_STATUS_OK, _STATUS_ERROR = 0, 1
MESSAGE_BYTES = 256 << 20
"""Most bytes of one broadcast: large enough that its start costs nothing, small enough for a GPU to stage."""
OWN_BUFFER_BYTES = 4 << 20
"""A tensor from this size on is sent from where it lies: copying it costs more than one more message."""
ALIGNMENT = 16
"""Columns start at a multiple of this in the broadcast bytes, so that any dtype can be viewed in place."""

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
    """Port of the job's store; not read when `world_size` is 1."""
    is_store_running: bool = False
    """The launcher (torchrun) keeps the store; else rank 0 opens it."""
    attempt: int = 0
    """Number of times that the launcher has restarted the job on the same store."""

    @classmethod
    def of_torchrun(cls, environment: Mapping[str, str]) -> RankSpec:
        """Read what `torchrun` set for this process; called by launchers, which are allowed to read the environment."""
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            master_addr=environment["MASTER_ADDR"],
            master_port=int(environment["MASTER_PORT"]),
            is_store_running=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


def init_process_group(
    spec: RankSpec, *, device: torch.device, timeout_s: float, start_timeout_s: float | None = None
) -> None:
    """(collective) Join the job's default group: NCCL on GPU (and gloo for CPU tensors), gloo on CPU.

    Every rank calls it first. A single rank needs no port.

    Args:
        timeout_s: deadline of each collective.
        start_timeout_s: how long the other ranks may take to come here; None: as a collective.
    """
    timeout = timedelta(seconds=timeout_s)
    if spec.world_size == 1:
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    choose_interface(spec.master_addr)
    store = _open_store(spec, timeout if start_timeout_s is None else timedelta(seconds=start_timeout_s))
    store.set_timeout(timeout)
    job = dist.PrefixStore(f"attempt_{spec.attempt}", store)
    with few_connections(spec.world_size) as connects_late:
        dist.init_process_group(
            _backend(device), store=job, rank=spec.rank, world_size=spec.world_size, timeout=timeout
        )
    if connects_late:
        meet()


def meet(group: dist.ProcessGroup | None = None) -> None:
    """(collective over the group) Wait for all ranks, along the connections that sums and gathers of a step take."""
    dist.all_reduce(torch.zeros(1), group=group)


def _open_store(spec: RankSpec, timeout: timedelta) -> dist.TCPStore:
    is_master = spec.rank == 0 and not spec.is_store_running
    return (open_server if is_master else open_client)(
        spec.master_addr,
        spec.master_port,
        world_size=spec.world_size,
        timeout=timeout,
        waits=not spec.is_store_running,
    )


def job_store() -> dist.Store:
    """Return the store that the default process group was made with."""
    return default_store()


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def destroy_process_group() -> None:
    """Leaves the default group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def replica_group_of(rank: int, buckets: list[list[int]]) -> dist.ProcessGroup | None:
    """(collective) Build one group per bucket of ranks and return the one that `rank` is in.

    Every rank of the job calls it with the same buckets. A bucket of one rank gets no group.
    """
    mine: dist.ProcessGroup | None = None
    for ranks in buckets:
        if len(ranks) < 2:
            continue
        group = new_group(ranks)
        if rank in ranks:
            mine = group
    return mine


def new_group(ranks: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup | None:
    """(collective over all ranks of the job) Return a group with the deadline of the default one; None for ranks
    outside.

    torch would give it half an hour, whatever the default group has.

    Args:
        backend: None: that of the default group.
    """
    world = dist.group.WORLD
    assert world is not None, "initialise the default process group first"
    with few_connections(len(ranks)) as connects_late:
        made = dist.new_group(list(ranks), timeout=timeout_of(world, torch.device("cpu")), backend=backend)
    group = made if isinstance(made, dist.ProcessGroup) else None
    if group is not None and backend is None and connects_late:
        meet(group)
        # Of the leader's tree.
        dist.broadcast(torch.zeros(1), group_src=0, group=group)
    return group


def broadcast_from_leader(fetch: Callable[[], Fields], *, group: dist.ProcessGroup | None, leader: int) -> Fields:
    """(collective over `group`) Run `fetch` on the leader; every rank gets its columns, or its error.

    Order of calls on each rank: status word, descriptor, then the bytes: small tensors together in one buffer, each
    of at least `OWN_BUFFER_BYTES` by itself, in messages of at most `MESSAGE_BYTES`. Tensors may be jagged nested
    (`[N, *]`); their values travel unpadded, their offsets as bytes. Lists must be JSON-like.

    Args:
        fetch: called on the leader only.
        group: replica group; None means this rank is alone.
        leader: global rank of the leader.

    Raises:
        the leader's own error on the leader; on followers the same kind when it is one of ours, else NemoRLError,
        with `origin_rank` of the leader.
    """
    if group is None:
        return fetch()
    if dist.get_rank() == leader:
        return _lead(fetch, group, leader)
    return _follow(group, leader)


def scatter_from_leader(
    cut: Callable[[], Mapping[int, Fields]], *, group: dist.ProcessGroup, leader: int, ranks: Sequence[int]
) -> Fields:
    """(collective over `group`) Run `cut` on the leader; every rank gets its own columns, or the leader's error.

    Order of calls on each rank: status word, descriptors of all ranks, then on the leader the bytes of one rank after
    the other, on a follower its own; messages as in `broadcast_from_leader`.

    Args:
        cut: called on the leader only; columns of every rank, as in `broadcast_from_leader`.
        leader: global rank of the leader.
        ranks: global ranks of the group.

    Raises:
        as `broadcast_from_leader`.
    """
    if dist.get_rank() != leader:
        header = _follow_header(group, leader)[str(dist.get_rank())]
        return _received(header, lambda wire: dist.recv(wire, src=leader, group=group), group)
    try:
        fields = cut()
        described = {rank: _describe(fields[rank]) for rank in ranks if rank != leader}
    except BaseException as error:
        _send_header(_STATUS_ERROR, to_record(error), group, leader)
        raise
    _send_header(_STATUS_OK, {str(rank): header for rank, (header, _) in described.items()}, group, leader)
    for rank, (_, buffers) in described.items():
        for message in _messages(buffers):
            dist.send(message.to(_group_device(group)), dst=rank, group=group)
    return fields[leader]


def _lead(fetch: Callable[[], Fields], group: dist.ProcessGroup, leader: int) -> Fields:
    try:
        fields = fetch()
        described, buffers = _describe(fields)
    except BaseException as error:
        _send_header(_STATUS_ERROR, to_record(error), group, leader)
        raise
    _send_header(_STATUS_OK, described, group, leader)
    for message in _messages(buffers):
        dist.broadcast(message.to(_group_device(group)), src=leader, group=group)
    return fields


def _follow_header(group: dist.ProcessGroup, leader: int) -> Json:
    status, header = _receive_header(group, leader)
    if status == _STATUS_ERROR:
        error = from_record(header)
        error.origin_rank = leader
        error.add_note(f"raised on the leader (rank {leader}) of this replica group")
        raise error
    return header


def _follow(group: dist.ProcessGroup, leader: int) -> Fields:
    header = _follow_header(group, leader)
    return _received(header, lambda wire: dist.broadcast(wire, src=leader, group=group), group)


def _received(header: Json, receive: Callable[[torch.Tensor], object], group: dist.ProcessGroup) -> Fields:
    """Return the columns that a descriptor names, once `receive` has filled every message."""
    buffers = [torch.empty(num_bytes, dtype=torch.uint8) for num_bytes in header["buffers"]]
    for message in _messages(buffers):
        wire = message.to(_group_device(group))
        receive(wire)
        if wire.device != message.device:
            message.copy_(wire)
    return {name: _column(described, buffers) for name, described in header["columns"].items()}


def _describe(fields: Fields) -> tuple[Json, list[torch.Tensor]]:
    """Return the descriptor and the bytes to send: first all small tensors, then each large one by itself."""
    columns: Json = {}
    small: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    end = 0

    def place(tensor: torch.Tensor) -> Json:
        nonlocal end
        # Gloo does not know every dtype, bytes work for all.
        raw = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        placed = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if raw.numel() >= OWN_BUFFER_BYTES:
            large.append(raw)
            return {**placed, "buffer": len(large), "start": 0}
        padding = -raw.numel() % ALIGNMENT
        small.extend((raw, raw.new_zeros(padding)))
        start, end = end, end + raw.numel() + padding
        return {**placed, "buffer": 0, "start": start}

    for name, column in fields.items():
        if not isinstance(column, torch.Tensor):
            columns[name] = {"rows": column}
        elif column.is_nested:
            values, offsets = values_of(column), offsets_of(column)
            columns[name] = {"values": place(values), "offsets": place(offsets)}
        else:
            columns[name] = {"values": place(column)}
    buffers = [torch.cat(small) if small else torch.empty(0, dtype=torch.uint8), *large]
    return {"columns": columns, "buffers": [buffer.numel() for buffer in buffers]}, buffers


def _column(described: Json, buffers: Sequence[torch.Tensor]) -> torch.Tensor | list[object]:
    if "rows" in described:
        return described["rows"]
    values = _view(described["values"], buffers)
    if "offsets" not in described:
        return values
    return jagged_view(values, _view(described["offsets"], buffers))


def _view(placed: Json, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype, shape = getattr(torch, placed["dtype"]), placed["shape"]
    num_bytes = math.prod(shape) * dtype.itemsize
    return buffers[placed["buffer"]][placed["start"] : placed["start"] + num_bytes].view(dtype).view(shape)


def _messages(buffers: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for buffer in buffers:
        for start in range(0, buffer.numel(), MESSAGE_BYTES):
            yield buffer[start : start + MESSAGE_BYTES]


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


@dataclass(frozen=True, slots=True)
class _Digests:
    found: str
    """Digest of the plan as it arrived."""
    sealed: str
    """Digest of the plan as the driver sent it."""
    whole: str
    """Digest of the plan of all ranks."""


def check_plans(plan: PackPlan | None, *, rank: int, replica: Sequence[int]) -> None:
    """(collective over the default group, if there is one) Compare this rank's view with everybody's.

    Args:
        plan: this rank's part, sealed by `PackPlan.for_rank`; None on every rank where there is no plan.
        replica: ranks that share this rank's shard, itself included.

    Raises:
        SchemaMismatch: names the rank whose plan changed on its way, or that follows another plan than its peers. A
            changed plan, or one of another step, is an error on every rank.
    """
    mine = _Digests(plan.digest(), plan.sealed_digest, plan.whole_digest) if plan is not None else _Digests("", "", "")
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    everybody = {rank: mine} if is_alone else dict(enumerate(_gather(mine)))
    first = min(everybody)
    for other, digests in everybody.items():
        if digests.found != digests.sealed:
            _refuse(other, f"its part changed since the driver sealed it with {_name(digests.sealed)}", digests.found)
        if digests.whole != everybody[first].whole:
            _refuse(other, f"rank {first} follows the plan {_name(everybody[first].whole)}", digests.whole)
    for other in replica:
        if everybody.get(other, mine).sealed != everybody[replica[0]].sealed:
            _refuse(
                other,
                f"rank {replica[0]} of its replica group follows the view {_name(everybody[replica[0]].sealed)}",
                everybody[other].sealed,
            )


def _refuse(rank: int, expected: str, got: str) -> None:
    raise SchemaMismatch(
        f"pack plan of rank {rank}: {expected}, got {_name(got)}; workers follow the driver's plan (PackPlan.for_rank "
        "of one plan for all ranks) and never make their own"
    )


def _name(digest: str) -> str:
    return f"digest {digest}" if digest.strip("0") else "no digest"


def _gather(mine: _Digests) -> list[_Digests]:
    raw = b"".join(_bytes(digest) for digest in (mine.found, mine.sealed, mine.whole))
    row = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [_Digests(*(_text(part) for part in row.split(DIGEST_BYTES))) for row in rows]


def _bytes(digest: str) -> bytes:
    return bytes.fromhex(digest).ljust(DIGEST_BYTES, b"\0")


def _text(part: torch.Tensor) -> str:
    return bytes(part.tolist()).hex()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """The groups with which this rank communicates. A group of one rank is None."""

    context: dist.ProcessGroup | None
    fsdp_mesh: DeviceMesh
    """Data x context ranks, over which gradients are averaged: the ranks that share one copy of the weights, or copies
    by such ranks."""
    shard_group: dist.ProcessGroup
    """Data x context ranks that share this rank's copy of the weights."""
    tensor_mesh: DeviceMesh | None
    """The mesh of the tensor axis, or None without tensor parallelism."""

    @classmethod
    def build(cls, layout: ParallelLayout, *, rank: int, device: torch.device) -> ParallelGroups:
        """(collective: every rank of the job, with the same layout) Make all groups at once."""
        shape = torch.arange(layout.world_size).view(layout.copies, layout.weight_shards, layout.tp)
        sizes = dict(zip(("copy", "fsdp", "tp"), shape.shape, strict=True))
        kept = [name for name, size in sizes.items() if size > 1 or name == "fsdp"]
        groups = [_group(rank, _along(shape, list(sizes).index(name))) for name in kept]
        if len(kept) == 1:
            mesh = DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=("fsdp",))
        else:
            grid = shape.view([sizes[name] for name in kept])
            mesh = DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=tuple(kept))
        return cls(
            context=_group(rank, layout.context_groups()) if layout.cp > 1 else None,
            fsdp_mesh=mesh["copy", "fsdp"] if "copy" in kept else mesh["fsdp"],
            shard_group=groups[kept.index("fsdp")],
            tensor_mesh=mesh["tp"] if "tp" in kept else None,
        )


def _along(shape: torch.Tensor, axis: int) -> list[list[int]]:
    """Return the ranks that differ in one axis only."""
    return [list(map(int, ranks)) for ranks in shape.movedim(axis, -1).flatten(0, -2).tolist()]


def _group(rank: int, buckets: list[list[int]]) -> dist.ProcessGroup:
    """Return this rank's bucket as a group; meshes want one even where a rank is alone."""
    if len(buckets) == 1:
        return _world()
    mine = [group for ranks in buckets if (group := new_group(ranks)) is not None]
    assert len(mine) == 1, f"rank {rank} is in {len(mine)} of {buckets}"
    return mine[0]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "initialise the default process group first"
    return group
