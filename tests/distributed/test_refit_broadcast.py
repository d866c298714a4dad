"""Broadcast of weights between real processes: bytes arrive, errors arrive, and nobody waits longer than the deadline.

Two policy ranks shard a model; the engine lives in a thread of the second one, so that its bytes cross a socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_rl.config.backends import DTensorConfig
from nemo_rl.errors import CollectiveTimeout, ConfigError, WorkerError
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.workers.launch import check_distinct_devices
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.buckets import RefitPlan
from nemo_rl.models.weight_sync.factory import _both, choose_backend
from nemo_rl.models.weight_sync.target import RefitReceiver
from nemo_rl.models.weight_sync.transport import RefitGroupSpec
from tests.helpers.gloo import run_ranks
from tests.helpers.model_families import write_family
from tests.helpers.tiny_model import tiny_policy, tiny_worker, write_tiny_folder

BUCKET_BYTES = 10_000
DEADLINE_S = 20.0
SHORT_S = 2.0


def _refits(rank: int, policy_folder: Path, engine_folder: Path, experts_folder: Path) -> dict[str, object]:
    worker = tiny_worker(tiny_policy(policy_folder), rank=rank, world_size=2)
    receiver = RefitReceiver(load_causal_lm(engine_folder, dtype=torch.bfloat16), torch.device("cpu"))
    offered = {name: info.shape for name, info in worker.prepare_refit_info().items()}
    plan = RefitPlan(slots=receiver.match(offered), bucket_bytes=BUCKET_BYTES)
    worker.offload_before_refit()
    seen: dict[str, object] = {}
    with ThreadPoolExecutor(max_workers=1) as engine:
        _join(rank, worker, receiver, engine, timeout_s=DEADLINE_S)
        seen["loads"] = _whole_refit(rank, worker, receiver, plan, engine)
        seen["failure"] = _refit_of_a_failing_sender(rank, worker, receiver, plan, offered, engine)
        sockets = len(os.listdir("/proc/self/fd"))
        _join(rank, worker, receiver, engine, timeout_s=SHORT_S)
        seen["sockets"] = len(os.listdir("/proc/self/fd")) - sockets
        with pytest.raises(ConfigError, match="policy workers 0 and 1 are both on GPU-a, and each needs"):
            check_distinct_devices("GPU-a")
        check_distinct_devices(f"GPU-{rank}")
        seen["silence"] = _refit_of_a_silent_sender(rank, receiver, plan, offered, engine)
    receiver.close()
    worker.shutdown()
    seen["experts"] = _refit_of_split_experts(rank, experts_folder)
    return seen


def _refit_of_split_experts(rank: int, folder: Path) -> bool:
    """Tensor ranks split matrices and experts; rank 0's buckets hold them whole."""
    policy = tiny_policy(folder, dtensor_cfg=DTensorConfig(tensor_parallel_size=2))
    worker = tiny_worker(policy, rank=rank, world_size=2)
    engine = load_causal_lm(folder)
    original = {name: weight.clone() for name, weight in engine.state_dict().items()}
    for weight in engine.parameters():
        weight.data.zero_()
    receiver = RefitReceiver(engine, torch.device("cpu"))
    offered = {name: info.shape for name, info in worker.prepare_refit_info().items()}
    plan = RefitPlan(slots=receiver.match(offered), bucket_bytes=BUCKET_BYTES)
    receiver.begin(plan)
    for _ in range(worker.begin_refit(plan, on_device=False)):
        bucket = worker.next_bucket()
        assert (bucket is not None) == (rank == 0)
        if bucket is not None:
            receiver.load(bucket)
    worker.end_refit()
    worker.shutdown()
    if rank == 0:
        receiver.finish()
    return rank == 1 or all(torch.equal(original[name], weight) for name, weight in engine.state_dict().items())


def _join(
    rank: int, worker: PolicyWorker, receiver: RefitReceiver, engine: ThreadPoolExecutor, *, timeout_s: float
) -> None:
    port = worker.open_refit_store(address="127.0.0.1", world_size=2, timeout_s=timeout_s) if rank == 0 else 0
    word = torch.tensor([port])
    dist.broadcast(word, src=0)
    spec = RefitGroupSpec(
        address="127.0.0.1", port=int(word.item()), rank=0, world_size=2, backend="gloo", timeout_s=timeout_s
    )
    if rank == 0:
        worker.join_refit_group(spec)
    else:
        engine.submit(receiver.join, replace(spec, rank=1)).result(timeout=DEADLINE_S)


def _whole_refit(
    rank: int, worker: PolicyWorker, receiver: RefitReceiver, plan: RefitPlan, engine: ThreadPoolExecutor
) -> bool:
    worker.begin_refit(plan, on_device=False)
    receiver.begin(plan)
    heard = engine.submit(receiver.receive) if rank == 1 else None
    worker.broadcast_weights()
    exported = dict(worker.export_weights())
    worker.end_refit()
    if heard is None:
        return True
    heard.result(timeout=DEADLINE_S)
    receiver.finish()
    held = receiver._model.state_dict()
    return all(torch.equal(held[name], weight.bfloat16()) for name, weight in exported.items())


def _refit_of_a_failing_sender(
    rank: int,
    worker: PolicyWorker,
    receiver: RefitReceiver,
    plan: RefitPlan,
    offered: dict[str, tuple[int, ...]],
    engine: ThreadPoolExecutor,
) -> str:
    """The plan names a weight that the policy does not have."""
    wrong = replace(plan, slots=(replace(plan.slots[0], name="ghost"), *plan.slots[1:]))
    receiver.match(offered)
    receiver.begin(plan)
    worker.begin_refit(wrong, on_device=False)
    heard = engine.submit(receiver.receive) if rank == 1 else None
    with pytest.raises(RuntimeError, match="expected ghost"):
        worker.broadcast_weights()
    worker.end_refit()
    return _error_of(heard)


def _refit_of_a_silent_sender(
    rank: int, receiver: RefitReceiver, plan: RefitPlan, offered: dict[str, tuple[int, ...]], engine: ThreadPoolExecutor
) -> tuple[str, bool]:
    receiver.match(offered)
    receiver.begin(plan)
    started = time.monotonic()
    text = _error_of(engine.submit(receiver.receive) if rank == 1 else None)
    took = time.monotonic() - started
    dist.barrier()
    return text, took < SHORT_S + 5.0


def _error_of(heard: Future[None] | None) -> str:
    error = heard.exception(timeout=DEADLINE_S) if heard is not None else None
    return f"{type(error).__name__}: {error}" if error is not None else ""


@pytest.fixture(scope="module")
def engine_side(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folders = [write_tiny_folder(tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in (0, 1)]
    folders.append(write_family(tmp_path_factory.mktemp("experts"), "qwen3_moe"))
    sender, engine = run_ranks(2, _refits, *folders)
    assert isinstance(sender, dict) and isinstance(engine, dict)
    return {**engine, "experts": sender["experts"]}


@pytest.mark.slow
def test_the_engine_holds_the_sharded_policys_weights_in_its_own_dtype(engine_side: dict[str, object]) -> None:
    assert engine_side["loads"] is True
    assert engine_side["sockets"] == 0, "the group that was replaced has left its connections"


@pytest.mark.slow
def test_buckets_hold_split_matrices_and_experts_whole(engine_side: dict[str, object]) -> None:
    assert engine_side["experts"] is True


@pytest.mark.slow
def test_an_error_of_the_policy_reaches_the_engine_as_text(engine_side: dict[str, object]) -> None:
    text = str(engine_side["failure"])
    assert text.startswith(WorkerError.__name__) and "the policy could not send weights: RuntimeError" in text
    assert "expected ghost" in text


@pytest.mark.slow
def test_a_silent_policy_is_given_up_at_the_deadline(engine_side: dict[str, object]) -> None:
    text, was_in_time = engine_side["silence"]  # type: ignore[misc]
    assert text.startswith(CollectiveTimeout.__name__) and "refit: rank 1 of 2" in text
    assert was_in_time


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (("host-cpu", "host-cpu"), "gloo"),
        (("GPU-1", "GPU-1"), "gloo"),
        (("GPU-1", "GPU-2"), "nccl"),
        (("GPU-1", "host-cpu"), "gloo"),
    ],
)
def test_nccl_needs_a_gpu_for_each_member(devices: tuple[str, ...], backend: str) -> None:
    assert choose_backend(devices) == backend


def _fails(text: str) -> Callable[[], object]:
    def fail() -> object:
        raise WorkerError(text, stage="refit")

    return fail


def test_of_two_failures_the_cause_is_raised_not_its_consequence() -> None:
    lost, cause = _fails("CollectiveTimeout: refit: rank 0 of 2 lost the other members"), _fails("OSError: no memory")
    for sides in ((lost, cause), (cause, lost)):
        with pytest.raises(WorkerError, match="no memory"):
            _both(*sides)
