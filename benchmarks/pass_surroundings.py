"""What a step costs around its passes: bytes that are moved, calls of a refit, and turns of the embedded engine.

Called by `train_pass.py`. Everything runs in this process on a CPU; engines and workers are called as if they had
processes of their own.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.pass_workload import SHAPES, ModelShape, Work, loss_of_recipe, make_worker
from nemo_rl.config.generation import DeviceSharing, GenerationConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.generation.requests import RowRequest
from nemo_rl.models.generation.torch_engine.decode import BatchRow, DecodeBatch, RowSettings
from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.weight_sync.base import RefitParties
from nemo_rl.models.weight_sync.factory import build_weight_sync

__all__ = ["around_the_pass"]

TIMEOUT_S = 120.0
DECODED = ModelShape(hidden=256, layers=4, heads=4, key_heads=2, mlp=1024, vocab=8192)
CACHED = (200, 2000)
TURNS = 12
REPEATS = 3


def around_the_pass(folder: Path, *, is_on: bool) -> dict[str, float]:
    """Return the figures.

    Args:
        folder: the model `tiny`.
        is_on: False moves the optimizer as where an engine shares the device.
    """
    calls = {most: refit_calls(folder, most) for most in (None, 4096)}
    figures: dict[str, float] = {
        "moved_bytes": moved_bytes(folder, "alone" if is_on else "crowded"),
        "refit_calls_by_buckets": calls[4096] - calls[None],
        "refit_calls": calls[None],
    }
    for kind, rows in (("", 1), ("_padded", 2)):
        seconds = turn_seconds(rows)
        figures[f"decode_ms{kind}"] = 1e3 * seconds[CACHED[0]]
        figures[f"decode_growth{kind}"] = seconds[CACHED[1]] / seconds[CACHED[0]]
    return figures


def moved_bytes(folder: Path, sharing: DeviceSharing) -> int:
    """Return the bytes of states that go to the host and back between training, log-probabilities and training."""
    work = Work(lengths=[20, 14], vocab=SHAPES["tiny"].vocab, tokens=40)
    worker = make_worker(folder, tokens=work.tokens, sharing=sharing)
    try:
        worker.train(work.batch, loss_of_recipe(), gbs=2, plan=work.plan)
        worker.prepare_for_lp_inference()
        worker.get_logprobs(work.batch, plan=work.plan)
        worker.prepare_for_training()
        return sum(worker.moved_bytes.values())
    finally:
        worker.shutdown()
        destroy_process_group()


class _Counted(LocalWorkerGroup):
    """A worker whose calls are counted, as if it had its own process."""

    num_calls = 0

    @property
    def is_local(self) -> bool:
        return False

    def submit(self, call: Any) -> Any:
        self.num_calls += 1
        return super().submit(call)


def refit_calls(folder: Path, bucket_bytes: int | None) -> int:
    """Return calls of the driver to one rank of the policy and one engine in a refit.

    Args:
        bucket_bytes: most of a bucket; None: all weights fit into one.
    """
    config = PolicyConfig(model_name=str(folder), generation=GenerationConfig(max_new_tokens=8))
    spec = WorkerSpec(policy=config, rank=RankSpec(rank=0, world_size=1), num_steps=9, keep_reference=False, seed=0)
    policy, engine = _Counted(lambda: build_policy_worker(spec)), _Counted(lambda: EngineWorker.from_config(config))
    parties = RefitParties(
        policy=policy, engines=WorkerFleet([engine]), timeout_s=TIMEOUT_S, max_bucket_bytes=bucket_bytes
    )
    sync = build_weight_sync("payload", parties, address="127.0.0.1")
    try:
        sync.sync(0)
        policy.num_calls = engine.num_calls = 0
        sync.sync(1)
        return policy.num_calls + engine.num_calls
    finally:
        parties.engines.shutdown()
        policy.shutdown()
        destroy_process_group()


def turn_seconds(num_rows: int) -> dict[int, float]:
    """Return the processor's seconds of one turn at so many cached tokens: the least of a few medians.

    Args:
        num_rows: the second row is a token shorter, so that the cache has padding.
    """
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(DECODED.config).eval()
    sampling = SamplingParams(temperature=1.0, max_new_tokens=TURNS + 2, stop_token_ids=())
    found: dict[int, list[float]] = {length: [] for length in CACHED}
    for length in CACHED * REPEATS:
        batch = DecodeBatch(model)
        draw = torch.Generator().manual_seed(1)
        rows = [
            RowRequest(
                prompt=tuple(torch.randint(50, 8000, (length - row,), generator=draw).tolist()),
                seed=row,
                max_new_tokens=TURNS + 2,
                number=row,
            )
            for row in range(num_rows)
        ]
        batch.join([BatchRow(key=row.number, request=row, settings=RowSettings(sampling=sampling)) for row in rows])
        batch.turn()
        samples = []
        for _ in range(TURNS):
            start = time.thread_time()
            batch.turn()
            samples.append(time.thread_time() - start)
        found[length].append(statistics.median(samples))
    return {length: min(samples) for length, samples in found.items()}
