"""Refit on GPUs: CUDA-IPC between a policy worker and an engine's process on one GPU, NCCL between two GPUs."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.errors import WorkerError
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.workers.compose import compose_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.buckets import RefitPlan, bucket_bytes
from nemo_rl.models.weight_sync.target import RefitReceiver
from nemo_rl.models.weight_sync.transport import (
    BucketReader,
    ChannelOffer,
    ChannelRequest,
    RefitGroup,
    RefitGroupSpec,
    device_id,
    open_store,
)
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_model import tiny_batch, tiny_policy, write_tiny_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSS = PolicyLoss(config=LossConfig())
CALL_TIMEOUT_S = 120.0
ON_DEVICE = ChannelRequest(address="127.0.0.1", on_device=True, timeout_s=CALL_TIMEOUT_S)


class Engine:
    """The child's side: a receiver, and a look at what it holds."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cuda", 0)
        self.model = load_causal_lm(folder, dtype=torch.bfloat16).to(self.device)  # type: ignore[arg-type]
        self.receiver = RefitReceiver(self.model, self.device)

    def call(self, method: str, *args: object) -> object:
        return getattr(self.receiver, method)(*args)

    def walk(self, plan: RefitPlan, offer: ChannelOffer) -> None:
        """Read all buckets, as `RefitTarget.receive_buckets` does."""
        self.receiver.begin(plan, offer.handle)
        reader = BucketReader(offer.spec)
        while reader.num_missing:
            assert reader.next() is None, "the bytes are on the GPU"
            self.receiver.load()
            reader.done()
        reader.close()
        self.receiver.finish()

    def device_id(self) -> str:
        return device_id(self.device)

    def held(self) -> dict[str, object]:
        """Weights as numbers: tensors would travel as handles themselves."""
        return {name: weight.float().cpu().numpy() for name, weight in self.model.state_dict().items()}


def _serve(pipe: Connection, folder: Path) -> None:
    engine = Engine(folder)
    while True:
        method, args = pipe.recv()
        if method == "stop":
            return
        try:
            pipe.send((True, getattr(engine, method)(*args)))
        except Exception:  # noqa: BLE001 - the parent reports whatever it was
            pipe.send((False, traceback.format_exc()))


class Child:
    """The parent's end of the pipe; every call has a deadline."""

    def __init__(self, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, folder))
        self._process.start()

    def ask(self, method: str, *args: object) -> object:
        self.begin(method, *args)
        return self.answer(method)

    def begin(self, method: str, *args: object) -> None:
        self._pipe.send((method, args))

    def answer(self, method: str) -> object:
        assert self._pipe.poll(CALL_TIMEOUT_S), f"the engine did not answer {method} in {CALL_TIMEOUT_S:.0f} s"
        ok, value = self._pipe.recv()
        assert ok, value
        return value

    def stop(self) -> None:
        if self._process.is_alive():
            self._pipe.send(("stop", ()))
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Child]:
    child = Child(write_tiny_folder(tmp_path / "other", seed=1))
    yield child
    child.stop()


@pytest.fixture
def worker(folder: Path) -> Iterator[PolicyWorker]:
    made = compose_worker(
        tiny_policy(folder), rank=0, world_size=1, num_steps=10, collective_timeout_s=60.0, seed=0, device="cuda"
    )
    yield made
    made.shutdown()


def _refit(worker: PolicyWorker, engine: Child, *, most: int) -> int:
    """As `IpcWeightSync` does it; returns the number of buckets."""
    worker.offload_before_refit()
    offered = {name: info.shape for name, info in worker.prepare_refit_info().items()}
    slots = engine.ask("call", "match", offered)
    size = bucket_bytes(slots, free=worker.refit_free_bytes(on_device=True), ratio=0.3, most=most)  # type: ignore[arg-type]
    plan = RefitPlan(slots=slots, bucket_bytes=size)  # type: ignore[arg-type]
    offer = worker.open_refit_channel(plan, ON_DEVICE)
    engine.begin("walk", plan, offer)
    worker.send_buckets({0: 1})
    engine.answer("walk")
    worker.end_refit()
    return len(plan.buckets())


@pytest.mark.parametrize("most", [10_000, 1 << 30], ids=["many buckets", "one bucket"])
def test_the_engine_process_holds_the_policys_weights(worker: PolicyWorker, engine: Child, most: int) -> None:
    for _ in range(2):
        worker.prepare_for_training()
        worker.train(tiny_batch(8), LOSS)
        started = time.perf_counter()
        num_buckets = _refit(worker, engine, most=most)
        print(f"\nrefit by CUDA-IPC: {num_buckets} buckets in {(time.perf_counter() - started) * 1e3:.1f} ms")
        assert num_buckets == 1 if most > 1 << 20 else num_buckets > 3
        held = engine.ask("held")
        for name, weight in worker.export_weights():
            assert torch.equal(torch.from_numpy(held[name]), weight.bfloat16().float()), name  # type: ignore[index]


def test_the_buffer_is_freed_when_the_refit_ends(worker: PolicyWorker, engine: Child) -> None:
    _refit(worker, engine, most=1 << 30)
    before = torch.cuda.memory_allocated()
    _refit(worker, engine, most=1 << 30)
    assert torch.cuda.memory_allocated() <= before


def test_a_handle_of_another_gpu_is_refused(worker: PolicyWorker, engine: Child) -> None:
    worker.offload_before_refit()
    slots = engine.ask("call", "match", {name: info.shape for name, info in worker.prepare_refit_info().items()})
    offer = worker.open_refit_channel(RefitPlan(slots=slots, bucket_bytes=1000), ON_DEVICE)  # type: ignore[arg-type]
    assert offer is not None and offer.handle is not None
    handle = offer.handle
    assert handle.device_id == engine.ask("device_id") == worker.report_device_id()
    with pytest.raises(WorkerError, match="cannot be opened on GPU-"):
        replace(handle, device_id="GPU-another").open(worker.device)
    worker.end_refit()


def _broadcast(rank: int, world_size: int) -> list[int]:
    """One bucket from rank 0; what this rank has of it."""
    store = open_store("127.0.0.1", world_size, timeout_s=60.0) if rank == 0 else None
    port = torch.tensor([store.port if store is not None else 0])
    dist.broadcast(port, src=0)
    spec = RefitGroupSpec(
        address="127.0.0.1", port=int(port), rank=rank, world_size=world_size, backend="nccl", timeout_s=60.0
    )
    device = torch.device("cuda", rank)
    group = RefitGroup(spec, device=device, store=store)
    bucket = torch.arange(7, dtype=torch.uint8, device=device) * (1 if rank == 0 else 0)
    if rank == 0:
        group.send(bucket)
    else:
        bucket = group.receive(bucket)
    group.close()
    return bucket.tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bucket_goes_over_nccl(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    assert run_ranks(world_size, _broadcast, world_size, gpu_per_rank=True) == [list(range(7))] * world_size
