"""The other client of a run: in this process, in a child process, or in a Ray actor, with the same methods.

A test calls `peer.kv_batch_get(...)` as it would call its own client. A remote peer sends name and arguments, and gets
the result or the very error back. `serve` is the child's side.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Literal, TypeAlias

import psutil
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.nested import nested_tensor_from_jagged

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.errors import NemoRLError

EXIT_S = 90.0
"""A child that is told to end does so within this time."""
CALL_S = 300.0
"""More than any call of a test may take."""

Mode: TypeAlias = Literal["threads", "processes", "actors"]
Reply: TypeAlias = tuple[str, object]
Work: TypeAlias = Callable[..., object]


class PeerSide:
    """The side of a peer that runs where its client lives."""

    def __init__(self, where: DataPlaneAddress | DataPlaneConfig) -> None:
        """Args:
        where: the run to attach to; or the config of a run that this side owns.
        """
        torch.set_num_threads(1)
        if isinstance(where, DataPlaneConfig):
            self.client: DataPlaneClient = build_data_plane_client(where, run_id=f"run-{uuid.uuid4().hex[:8]}")
        else:
            self.client = attach_data_plane(where)
        self._address = self.client.address

    def address(self) -> Reply:
        """Return the address of the run."""
        return "ok", self._address

    def reopen(self) -> Reply:
        """Open a fresh client in place of one that was closed."""
        self.client.close()
        self.client = attach_data_plane(self._address)
        return "ok", None

    def call(self, name: str, args: tuple, kwargs: dict) -> Reply:
        """Call a method of the client."""
        return _answer(lambda: getattr(self.client, name)(*args, **kwargs))

    def work(self, function: Work, args: tuple) -> Reply:
        """Call a function of an importable module with this side's client first."""
        return _answer(lambda: function(self.client, *args))

    def pid(self) -> Reply:
        return "ok", os.getpid()


def _answer(action: Callable[[], object]) -> Reply:
    try:
        value = action()
    except NemoRLError as error:
        return "error", error
    return ("rows", _to_plain(value)) if isinstance(value, TensorDict) else ("ok", value)


def _to_plain(rows: TensorDict) -> dict[str, object]:
    """Bytes, shapes and offsets: torch cannot pickle tensors of every dtype."""
    plain: dict[str, object] = {}
    for name in rows.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        column = rows.get(name)
        if not isinstance(column, torch.Tensor):
            plain[name] = column.tolist()
            continue
        values = (column.values() if column.is_nested else column).contiguous()
        offsets = column.offsets().tolist() if column.is_nested else None
        content = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        plain[name] = _PlainColumn(values.dtype, content, tuple(values.shape), offsets)
    return {"num_rows": rows.batch_size[0], "columns": plain}


@dataclass(frozen=True)
class _PlainColumn:
    dtype: torch.dtype
    content: bytes
    shape: tuple[int, ...]
    offsets: list[int] | None

    def tensor(self) -> torch.Tensor:
        raw = torch.frombuffer(bytearray(self.content), dtype=torch.uint8) if self.content else torch.empty(0)
        values = (raw.view(self.dtype) if self.content else raw.to(self.dtype)).reshape(self.shape)
        return values if self.offsets is None else nested_tensor_from_jagged(values, torch.tensor(self.offsets))


def _from_plain(plain: dict) -> TensorDict:
    rows = TensorDict({}, batch_size=[plain["num_rows"]])
    for name, column in plain["columns"].items():
        is_tensor = isinstance(column, _PlainColumn)
        rows.set(name, column.tensor() if is_tensor else NonTensorStack(*[NonTensorData(value) for value in column]))
    return rows


class Peer:
    """A client elsewhere; calls are made one at a time."""

    _stopped_pid: int = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._read(self._send("call", (name, args, kwargs)))

    @property
    def address(self) -> DataPlaneAddress:
        address = self._read(self._send("address", ()))
        assert isinstance(address, DataPlaneAddress)
        return address

    @property
    def pid(self) -> int:
        pid = self._read(self._send("pid", ()))
        assert isinstance(pid, int)
        return pid

    def work(self, function: Work, *args: object) -> object:
        """Runs `function(client, *args)` at the peer."""
        return self._read(self._send("work", (function, args)))

    def reopen(self) -> None:
        """Open a fresh client in place of one that was closed."""
        self._read(self._send("reopen", ()))

    def kill(self) -> None:
        """Ends the peer's process at once: no client is closed."""
        os.kill(self._stopped_pid or self.pid, signal.SIGKILL)

    def stop_answering(self) -> None:
        """Stop the peer's process until `go_on`."""
        self._stopped_pid = self.pid
        os.kill(self._stopped_pid, signal.SIGSTOP)
        while psutil.Process(self._stopped_pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.005)

    def go_on(self) -> None:
        if self._stopped_pid:
            os.kill(self._stopped_pid, signal.SIGCONT)
            self._stopped_pid = 0

    def end(self) -> None:
        """Closes the client and ends its process."""
        raise NotImplementedError

    def _send(self, what: str, args: tuple) -> Reply:
        raise NotImplementedError

    def _read(self, reply: Reply) -> object:
        outcome, value = reply
        if outcome == "error":
            assert isinstance(value, Exception)
            raise value
        return _from_plain(value) if outcome == "rows" else value


class ThreadPeer(Peer):
    """A second client of this process."""

    def __init__(self, address: DataPlaneAddress) -> None:
        self._side = PeerSide(address)

    def end(self) -> None:
        self._side.client.close()

    def _send(self, what: str, args: tuple) -> Reply:
        return getattr(self._side, what)(*args)


class ProcessPeer(Peer):
    """A client in a child process, without Ray; given a config, the process owns the run."""

    def __init__(self, address: DataPlaneAddress | DataPlaneConfig) -> None:
        self._lock = threading.Lock()
        self._child, self._pipe = start_forked(serve)
        self._read(self._send("start", (address,)))

    def end(self) -> None:
        self._pipe.close()
        self._child.join(timeout=EXIT_S)
        self.kill()

    def kill(self) -> None:
        self._child.kill()
        self._child.join()
        self._pipe.close()

    def _send(self, what: str, args: tuple) -> Reply:
        with self._lock:
            self._pipe.send_bytes(pickle.dumps((what, args)))
            return pickle.loads(self._pipe.recv_bytes())


class ActorPeer(Peer):
    """A client in a Ray actor; several calls at a time."""

    def __init__(self, address: DataPlaneAddress) -> None:
        import ray

        self._actor = ray.remote(PeerSide).options(num_cpus=0, max_concurrency=4).remote(address)
        self.pid  # noqa: B018 - waits until it has attached

    def end(self) -> None:
        import ray

        self.go_on()
        self.close()
        ray.kill(self._actor)

    def _send(self, what: str, args: tuple) -> Reply:
        import ray

        return ray.get(getattr(self._actor, what).remote(*args), timeout=CALL_S)


PEERS: dict[Mode, type[Peer]] = {"threads": ThreadPeer, "processes": ProcessPeer, "actors": ActorPeer}


def forking() -> BaseContext:
    """Return the way to start children from a server that has imported torch, which would cost each of them seconds."""
    context = multiprocessing.get_context("forkserver")
    # Heard when the server starts.
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    return context


def start_forked(target: Callable[..., None], *args: object) -> tuple[BaseProcess, Connection]:
    """Start `target(pipe, *args)` in a child; return it with the other end of the pipe."""
    context = forking()
    pipe, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *args), daemon=True)  # type: ignore[attr-defined]
    child.start()
    theirs.close()
    return child, pipe


def serve(pipe: Connection) -> None:
    """Answer requests in the child process until the pipe ends."""
    what, (address,) = pickle.loads(pipe.recv_bytes())
    assert what == "start"
    side: list[PeerSide] = []
    pipe.send_bytes(pickle.dumps(_answer(lambda: side.append(PeerSide(address)))))
    while True:
        try:
            what, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        pipe.send_bytes(pickle.dumps(getattr(side[0], what)(*args)))
    side[0].client.close()
