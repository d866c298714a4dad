"""The tracer only looks on: ten steps with every site shown to a hub give the bits of ten steps without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nemo_rl.models.policy.tracing import SiteTracing, TraceSpec
from nemo_rl.tracer.link import HubAddress
from nemo_rl.tracer.process import HubProcess, HubSpec
from tests.helpers.gloo import run_ranks
from tests.helpers.megatron_layouts import forget_models
from tests.helpers.model_families import write_family
from tests.helpers.parallel_layouts import LOSS, Arrays, Case, Job, exported, start
from tests.helpers.tracer_recordings import num_frames

STEPS = 10
WATCHES = ("* | stats", "layer.out | tiles(2, rms); digest")
COMMON = {"family": "qwen3_moe", "batching": "fixed", "capacity": 4}
CASES = [
    Case(engine="dtensor", tp=2, sp=True, **COMMON),
    Case(engine="dtensor", cp=2, recompute=True, **COMMON),
    Case(engine="megatron", tp=2, sp=True, recompute=True, **COMMON),
    Case(engine="megatron", cp=2, **COMMON),
    Case(engine="megatron", pp=2, recompute=True, **COMMON),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What one rank computed."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    logprobs: np.ndarray
    weights: Arrays
    num_shown: int = 0
    """Messages that went to the hub."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The same case twice."""

    plain: Numbers
    traced: Numbers


def train_all(rank: int, folder: Path, spec: TraceSpec) -> list[Pair]:
    """(collective) Every case on this rank, with and without the tracer."""
    pairs = []
    for number, case in enumerate(CASES):
        pairs.append(
            Pair(
                plain=train(start(rank, 2, case, folder), lambda job, step: None),
                traced=train(
                    start(rank, 2, case, folder, trace=spec),
                    lambda job, step, first=number * STEPS + 1: job.worker.begin_tracing(
                        first + step, WATCHES, ["uid0_g0", "uid1_g1"]
                    ),
                ),
            )
        )
        forget_models()
    return pairs


def train(job: Job, before: Callable[[Job, int], None]) -> Numbers:
    losses, norms = [], []
    for step in range(STEPS):
        before(job, step)
        if step == STEPS - 1:
            logprobs = job.worker.get_logprobs(job.all_tokens, plan=job.plan)
        result = job.worker.train(job.shard, LOSS, plan=job.plan)
        job.worker.end_tracing()
        losses += result.loss
        norms += result.grad_norm
    weights = exported(job.worker)
    tracing = job.worker.tracing
    job.worker.shutdown()
    shown = tracing.link.sent if isinstance(tracing, SiteTracing) else 0
    return Numbers(
        losses=tuple(losses), norms=tuple(norms), logprobs=logprobs.numpy(), weights=weights, num_shown=shown
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tracing_changes_no_bit_of_ten_steps(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "qwen3_moe")
    with HubProcess(HubSpec(folder=tmp_path / "tracer", run="run", start_timeout_s=300, record=True)) as hub:
        address = HubAddress(host="127.0.0.1", port=hub.port, token=hub.tokens.job)
        spec = TraceSpec(address=address, run="run", memory_bytes=256 << 20)
        ranks = run_ranks(2, train_all, folder, spec, timeout_s=300)
    for pairs in ranks:
        for case, pair in zip(CASES, pairs, strict=True):
            plain, traced = pair.plain, pair.traced
            assert (plain.losses, plain.norms) == (traced.losses, traced.norms), case
            assert np.array_equal(plain.logprobs, traced.logprobs), case
            assert plain.weights.keys() == traced.weights.keys()
            assert all(np.array_equal(plain.weights[name], traced.weights[name]) for name in plain.weights), case
            assert traced.num_shown > STEPS and plain.num_shown == 0, case
    assert num_frames(tmp_path / "tracer") > STEPS, "the hub got nothing"
