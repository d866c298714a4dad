"""Engines that sleep while the policy trains: memory is free, refits go into sleeping engines, the same tokens come."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.errors import WorkerError
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
    SleepReport,
)
from nemo_rl.models.generation.torch_engine.worker import EngineWorker, build_engine_worker
from nemo_rl.models.weight_sync.buckets import BucketFiller, RefitPlan
from nemo_rl.models.weight_sync.receipt import Answer, make_probe
from tests.helpers.case_selection import num_examples
from tests.helpers.engine_process import NO_VLLM, EngineProcess, has_vllm, names_left, vllm_policy, vllm_process
from tests.helpers.model_families import detached_weights, moe_model, write_moe
from tests.helpers.tiny_model import tiny_policy

needs_vllm = pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)
CYCLES = num_examples(50)
MIB = 2**20
GROWTH = 8 * MIB
"""Growth of a process over all cycles that is noise of its allocator."""
CACHE_GIB = 0.05
PROBE = make_probe(vocab_size=320, max_length=128, num_tokens=18)
ASKED = GenerationRequest(
    prompt_ids=((9, 8, 7, 6), tuple(range(10, 90))),
    seeds=(1, 2, 3, 4),
    sampling=SamplingParams(temperature=1.0, max_new_tokens=16, stop_token_ids=()),
    with_routes=True,
)


class InProcess:
    """The embedded engine, called as an `EngineProcess` is."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker = worker

    def __call__(self, method: str, **arguments: object) -> object:
        found = getattr(self.worker, method)
        return found(**arguments) if callable(found) else found


def _refit(engine: EngineProcess | InProcess, model: PreTrainedModel, *, version: int) -> None:
    weights = dict(detached_weights(model))
    slots = engine("match_refit", offered={name: tuple(weight.shape) for name, weight in weights.items()})
    plan = RefitPlan(slots=slots, bucket_bytes=50_000)  # type: ignore[arg-type]
    engine("begin_refit", plan=plan)
    buffer, filler = np.empty(plan.buffer_bytes, dtype=np.uint8), BucketFiller(plan, iter(weights.items()))
    for _ in plan.buckets():
        engine("load_bucket", bucket=buffer[: filler.fill(torch.from_numpy(buffer))].copy())
    assert engine("finish_refit", version=version) == version


def _sampled(engine: EngineProcess | InProcess) -> GenerationOutput:
    engine("prepare_for_generation")
    found = engine("generate", request=ASKED)
    assert isinstance(found, GenerationOutput)
    return found


def _same(found: GenerationOutput, expected: GenerationOutput, *, exact: bool = True) -> None:
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=0 if exact else 1e-5)
    assert found.routes is not None and expected.routes is not None
    assert torch.equal(found.routes.ids, expected.routes.ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("sleep") / "moe")


@pytest.fixture
def embedded(folder: Path) -> Iterator[InProcess]:
    policy = tiny_policy(folder, max_total_sequence_length=128, router_replay={"enabled": True})
    worker = build_engine_worker(EngineSpec(policy=policy))
    yield InProcess(worker)
    worker.shutdown()


@pytest.fixture(scope="module")
def vllm_ranks(folder: Path) -> Iterator[EngineProcess]:
    """An engine of two tensor ranks, which starts asleep."""
    sizes = {"kv_cache_gib": CACHE_GIB, "tensor_parallel_size": 2}
    policy = vllm_policy(
        folder, generation={"vllm_cfg": sizes}, max_total_sequence_length=128, router_replay={"enabled": True}
    )
    with vllm_process(policy, build=_asleep) as child:
        yield child


def _asleep(spec: EngineSpec) -> object:
    from nemo_rl.models.generation.vllm.worker import build_vllm_worker

    return build_vllm_worker(replace(spec, sleep_level=2))


def _check_cycle(engine: EngineProcess | InProcess, expected: GenerationOutput, *, version: int) -> None:
    """Go through one step of a run: sleep, a refit into the sleeping engine, receipt, samples."""
    report = engine("sleep", level=2)
    assert isinstance(report, SleepReport) and report.freed_bytes > 0
    with pytest.raises((WorkerError, RuntimeError), match="dropped|asleep"):
        engine("generate", request=ASKED)
    with pytest.raises((WorkerError, RuntimeError), match="no refit has brought others"):
        engine("prepare_for_generation")
    _refit(engine, moe_model(seed=1), version=version)
    answer = engine("answer_receipt", probe=PROBE)
    assert isinstance(answer, Answer) and answer.version == version
    found = _sampled(engine)
    _same(found, expected)
    assert found.weight_version == version


def test_the_embedded_engine_drops_its_weights_and_samples_the_same_after_a_refit(embedded: InProcess) -> None:
    _refit(embedded, moe_model(seed=1), version=0)
    expected, digests = _sampled(embedded), embedded("fingerprints")
    parameters = list(embedded.worker.refit_module.parameters())
    report = embedded("sleep", level=2)
    assert isinstance(report, SleepReport)
    freed = sum(weight.numel() * weight.element_size() for weight in parameters)
    assert freed - 1000 < report.freed_bytes < freed
    assert sum(weight.untyped_storage().nbytes() for weight in parameters) < 1000
    assert embedded("sleep", level=1).ranks == (), "it sleeps deeper already"  # type: ignore[attr-defined]
    assert embedded("weight_version") == -1 and embedded("delta_base") == -1
    _refit(embedded, moe_model(seed=1), version=1)
    assert embedded("fingerprints") == digests
    _check_cycle(embedded, expected, version=2)


def test_at_level_1_the_same_weights_are_there_without_a_refit(embedded: InProcess) -> None:
    _refit(embedded, moe_model(seed=1), version=4)
    expected = _sampled(embedded)
    report = embedded("sleep", level=1)
    assert isinstance(report, SleepReport) and report.ranks[0].note == "weights stay, they are on the CPU"
    with pytest.raises(WorkerError, match="it is asleep; call prepare_for_generation"):
        embedded("generate", request=ASKED)
    found = _sampled(embedded)
    _same(found, expected)
    assert found.weight_version == 4


def test_many_cycles_of_the_embedded_engine_leave_no_memory_behind(embedded: InProcess) -> None:
    _refit(embedded, moe_model(seed=1), version=0)
    expected = _sampled(embedded)
    _check_cycle(embedded, expected, version=1)
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    for version in range(2, CYCLES + 2):
        _check_cycle(embedded, expected, version=version)
    gc.collect()
    assert process.memory_info().rss - before < GROWTH


@needs_vllm
@pytest.mark.slow
def test_two_ranks_that_sleep_sample_and_prove_what_one_does(vllm_ranks: EngineProcess, embedded: InProcess) -> None:
    assert vllm_ranks("weight_version") == -1
    assert names_left(vllm_ranks.pid) == []
    _refit(vllm_ranks, moe_model(seed=1), version=0)
    first = vllm_ranks("answer_receipt", probe=PROBE)
    expected, digests = _sampled(vllm_ranks), vllm_ranks("fingerprints")
    report = vllm_ranks("sleep", level=2)
    assert isinstance(report, SleepReport) and len(report.ranks) == 2
    cache = int(CACHE_GIB * 2**30)
    for rank in report.ranks:
        assert rank.after < 0.1 * rank.before and rank.before - rank.after > 0.8 * cache
    _refit(vllm_ranks, moe_model(seed=1), version=1)
    assert vllm_ranks("fingerprints") == digests
    # One rank of the embedded engine, which decodes the same tokens.
    _refit(embedded, moe_model(seed=1), version=0)
    answer = embedded("answer_receipt", probe=PROBE)
    assert isinstance(answer, Answer) and isinstance(first, Answer)
    torch.testing.assert_close(torch.tensor(first.logprobs), torch.tensor(answer.logprobs), rtol=0, atol=1e-5)
    rows = expected.token_ids.split(expected.lengths.tolist())
    forced = replace(ASKED, forced=tuple(tuple(row.tolist()) for row in rows))
    found = embedded("generate", request=forced)
    assert isinstance(found, GenerationOutput) and embedded("fingerprints") == digests
    _same(found, expected, exact=False)
    _same(_sampled(vllm_ranks), expected)


@needs_vllm
@pytest.mark.slow
def test_prompts_that_were_cached_before_a_sleep_are_computed_again(vllm_ranks: EngineProcess) -> None:
    _refit(vllm_ranks, moe_model(seed=1), version=5)
    expected = _sampled(vllm_ranks)
    assert int(_sampled(vllm_ranks).cached_tokens.max()) > 0  # type: ignore[union-attr]
    vllm_ranks("sleep", level=1)
    after = _sampled(vllm_ranks)
    _same(after, expected)
    assert after.cached_tokens is not None
    # Rows of one prompt share what the first of them has computed since.
    assert after.cached_tokens[2] == 0 and after.weight_version == 5


@needs_vllm
@pytest.mark.slow
def test_many_cycles_of_vllms_ranks_leave_no_memory_behind(vllm_ranks: EngineProcess) -> None:
    _refit(vllm_ranks, moe_model(seed=1), version=0)
    expected = _sampled(vllm_ranks)
    for version in (1, 2, 3):
        _check_cycle(vllm_ranks, expected, version=version)
    processes = [child for child in psutil.Process().children(recursive=True) if "python" in child.name()]
    before = {child.pid: child.memory_info().rss for child in processes}
    for version in range(4, CYCLES + 4):
        _check_cycle(vllm_ranks, expected, version=version)
    growth = {child.pid: child.memory_info().rss - before[child.pid] for child in processes}
    assert max(growth.values()) < 4 * GROWTH, growth
