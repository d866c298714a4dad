"""A generation engine in its own process, and a policy that refits it with a receipt.

vLLM changes the threads and random numbers of the process it is in.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.worker_groups import Call, LocalWorkerGroup, Request, WorkerFleet, WorkerGroup, ask
from nemo_rl.errors import from_record, to_record
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.vllm.start import prepare_process
from nemo_rl.models.generation.vllm.worker import build_vllm_worker
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.factory import receipt_spec
from tests.helpers.tiny_model import tiny_batch, tiny_policy

ANSWER_S = 120.0
"""Longest call, the start included."""
NO_VLLM = "vLLM is not installed; run `make vllm`"


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def vllm_policy(folder: Path, *, generation: dict[str, object] | None = None, **changes: object) -> PolicyConfig:
    """Return a float32 policy whose engine is vLLM with a small cache."""
    given = {"backend": "vllm", "vllm_cfg": {"kv_cache_gib": 0.05}, "max_batch_size": 64, **(generation or {})}
    return tiny_policy(folder, generation=given, **changes)


class EngineProcess:
    """A worker in a child process: a call runs one of its methods.

    Errors come back as ours, or as `RuntimeError` with their kind.
    """

    def __init__(self, line: Connection, pid: int) -> None:
        self._line, self.pid = line, pid
        self.refusals: list[str] = []
        """Errors of the policies that were tried first, with their kind in front."""

    def __call__(self, method: str, **arguments: object) -> object:
        self._line.send((method, arguments))
        return self.answer()

    def answer(self) -> object:
        assert self._line.poll(ANSWER_S), f"no answer in {ANSWER_S:.0f} s"
        is_ok, found = self._line.recv()
        if is_ok:
            return found
        error = from_record(found)
        raise error if type(error).__name__ == found["kind"] else RuntimeError(f"{found['kind']}: {found['text']}")


def names_left(*pids: int) -> list[str]:
    """Return the files of shared memory and sockets that would be left if processes and their descendants died now."""
    below = [
        process for process in map(psutil.Process, pids) for process in (process, *process.children(recursive=True))
    ]
    memory = {
        line.split(maxsplit=5)[5]
        for each in below
        for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    }
    sockets = {bound.laddr for each in below for bound in each.net_connections(kind="unix") if bound.laddr}
    assert memory and sockets, "the ranks of an engine share memory, and have sockets"
    # Of Ray and of the pipe to this process.
    others = ("/ray/", "/pymp-")
    return sorted(name for name in memory | sockets if Path(name).exists() and not any(map(name.count, others)))


@contextmanager
def vllm_process(
    policy: PolicyConfig,
    *,
    refused: Sequence[PolicyConfig] = (),
    build: Callable[[EngineSpec], object] = build_vllm_worker,
) -> Iterator[EngineProcess]:
    """Start one vLLM worker and end it at the exit.

    Args:
        build: makes the worker in the child process.
        refused: tried first in the same process, which has imported vLLM only once then.
    """
    line, pid = _fork(policy, tuple(refused), build)
    child = EngineProcess(line, pid)
    try:
        child.refusals = [str(child.answer()) for _ in refused]
        child.answer()
        yield child
    finally:
        with suppress(EOFError, OSError):
            line.send(None)
            while line.poll(10):
                line.recv()
        line.close()
        # It may have ended meanwhile.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _fork(*request: object) -> tuple[Connection, int]:
    """Return the line to a new engine, and its process id."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen()
        # It imports what the first engine needs, too.
        listener.settimeout(3 * ANSWER_S)
        stdin = _server().stdin
        assert stdin is not None
        # Tensors are handed over by files that ask for it.
        key = bytes(multiprocessing.current_process().authkey)
        pickle.dump((listener.getsockname(), key, dict(os.environ), request), stdin)
        stdin.flush()
        accepted, _ = listener.accept()
    line = Connection(accepted.detach())
    return line, line.recv()


@cache
def _server() -> subprocess.Popen[bytes]:
    """Start the process that engines are forked off: importing vLLM and torch takes a core 15 seconds."""
    command = [sys.executable, "-c", f"from {__name__} import fork_engines; fork_engines()"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    atexit.register(server.communicate)
    return server


IMPORTED = (
    "nemo_rl.models.generation.vllm.engine",
    "nemo_rl.models.generation.vllm.extension",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
)


def fork_engines() -> None:
    """Fork an engine for each request on the standard input, until that ends."""
    # Variables count when vLLM is imported.
    prepare_process(EngineSpec(policy=PolicyConfig(model_name="any")))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    while True:
        while not select.select([0], [], [], 0.2)[0]:
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
        try:
            address, key, environment, request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            multiprocessing.current_process().authkey = key
            os.environ.clear()
            os.environ.update({**environment, "OMP_NUM_THREADS": "1"})
            with socket.socket(socket.AF_UNIX) as own:
                own.connect(address)
                line = Connection(own.detach())
            line.send(os.getpid())
            _serve(line, *request)
            # The end of the interpreter takes vLLM seconds; Ray ends its workers as suddenly.
            os._exit(0)


def _serve(
    line: Connection, policy: PolicyConfig, refused: Sequence[PolicyConfig], build: Callable[[EngineSpec], object]
) -> None:
    for each in refused:
        line.send((True, _refusal(each)))
    try:
        worker = build(EngineSpec(policy=policy))
        line.send((True, None))
    except Exception as error:  # noqa: BLE001 - raised on the other side
        line.send((False, to_record(error)))
        return
    while True:
        try:
            call = line.recv()
        except EOFError:
            break
        if call is None:
            break
        method, arguments = call
        try:
            found = getattr(worker, method)
            line.send((True, found(**arguments) if callable(found) else found))
        except Exception as error:  # noqa: BLE001 - raised on the other side
            line.send((False, to_record(error)))
    worker.shutdown()


def _refusal(policy: PolicyConfig) -> str:
    try:
        build_vllm_worker(EngineSpec(policy=policy)).shutdown()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "started"


STEPS = 400
"""Length of the learning-rate schedule."""


@contextmanager
def policy_of(config: PolicyConfig) -> Iterator[WorkerGroup]:
    """Start a policy of one worker in this process."""
    spec = WorkerSpec(policy=config, rank=RankSpec(rank=0, world_size=1), num_steps=STEPS, keep_reference=False, seed=0)
    group = LocalWorkerGroup(lambda: build_policy_worker(spec))
    yield group
    group.shutdown()


class EngineProxy:
    """A worker whose methods are called in another process."""

    def __init__(self, child: EngineProcess) -> None:
        self._child = child

    def __getattr__(self, name: str) -> Callable[..., object]:
        return partial(self._child, name)


@dataclass(kw_only=True)
class RefitPair:
    """A policy and one engine with faults."""

    parties: RefitParties
    sync: WeightSync
    plant: Callable[..., object]
    version: int = 0

    def step(self) -> None:
        """Take one optimizer step and refit the engine."""
        train(self.parties.policy, seed=self.version)
        self.version += 1
        self.sync.sync(self.version)


def train(policy: WorkerGroup, *, seed: int = 0) -> None:
    """Take one optimizer step."""

    def run(request: Request[object]) -> None:
        policy.run(Call(request=request, stage="train", timeout_s=60))

    run(ask(PolicyWorker.prepare_for_training))
    run(ask(PolicyWorker.train, batch=tiny_batch(8, seed=seed), loss_fn=PolicyLoss(config=LossConfig())))


def parties_of(config: PolicyConfig, engines: list[object], policy: WorkerGroup) -> RefitParties:
    """Return the parties of refits that each have a receipt."""
    fleet = WorkerFleet([LocalWorkerGroup(lambda engine=engine: engine) for engine in engines])
    spec = receipt_spec(config, load_model_config(config.model_name).to_dict())
    assert spec is not None, "receipts are on by default"
    # Refits of a test follow each other at once, without the time of a step.
    spec = replace(spec, every=1)
    return RefitParties(policy=policy, engines=fleet, timeout_s=60, max_bucket_bytes=50_000, receipt=spec)
