"""vLLM itself, with experts: routes under chunks, prefix hits and preemption; refits by buckets; refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.weight_sync.buckets import BucketFiller, DeltaRefit, RefitPlan
from nemo_rl.models.weight_sync.delta_buckets import DeltaFiller, HeldWeights
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints
from tests.helpers.engine_process import NO_VLLM, EngineProcess, has_vllm, names_left, vllm_policy, vllm_process
from tests.helpers.model_families import (
    biased_model,
    dense_model,
    detached_weights,
    moe_model,
    routes_of,
    write_family,
    write_moe,
    write_with_tokenizer,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)]

TIGHT = {
    "vllm_cfg": {"kv_cache_gib": 0.05, "max_num_batched_tokens": 64, "max_num_seqs": 24, "block_size": 32},
    # So few that rows are preempted.
    "vllm_kwargs": {"num_gpu_blocks_override": 40, "disable_log_stats": False},
}
LONGEST = 256


@contextmanager
def _started(folder: Path) -> Iterator[EngineProcess]:
    replay = {"enabled": True}
    policy = vllm_policy(folder, generation=TIGHT, max_total_sequence_length=LONGEST, router_replay=replay)
    with vllm_process(policy) as child:
        yield child


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with _started(write_moe(tmp_path_factory.mktemp("vllm") / "moe")) as child:
        yield child


def _load(engine: EngineProcess, seed: int) -> PreTrainedModel:
    model = moe_model(seed=seed)
    engine("update_weights", weights=detached_weights(model), version=seed)
    return model


def _request(prompts: list[list[int]], **changes: object) -> GenerationRequest:
    values: dict[str, object] = {"temperature": 1.0, "max_new_tokens": 40, "stop_token_ids": ()}
    return GenerationRequest(
        prompt_ids=tuple(map(tuple, prompts)),
        seeds=tuple(range(100, 100 + len(prompts))),
        sampling=SamplingParams(**{**values, **changes}),
        with_routes=True,
    )


def _prompts(count: int, shared: int) -> list[list[int]]:
    rng = random.Random(4)
    head = [rng.randrange(7, 300) for _ in range(shared)]
    return [[*head, *(rng.randrange(7, 300) for _ in range(5 + i))] for i in range(count)]


def _check(asked: GenerationRequest, output: GenerationOutput, model: PreTrainedModel) -> None:
    """Every log-probability and every route is Hugging Face's."""
    assert output.routes is not None
    lengths = output.lengths.tolist()
    rows = zip(
        output.token_ids.split(lengths),
        output.logprobs.split(lengths),
        output.routes.ids.split(output.routes.lengths.tolist()),
        strict=True,
    )
    for prompt, (tokens, values, routes) in zip(asked.prompt_ids, rows, strict=True):
        ids = [*prompt, *tokens.tolist()]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
        expected = logprobs[len(prompt) - 1 :].gather(-1, tokens.long()[:, None])[:, 0]
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
        assert torch.equal(routes.long(), routes_of(model, ids[:-1]))


@pytest.mark.full
def test_what_vllm_cannot_serve_is_refused_before_it_is_used(tmp_path: Path) -> None:
    moe = write_moe(tmp_path / "moe")
    # vLLM's process groups outlive an engine: all have experts.
    refused = (
        vllm_policy(write_family(tmp_path / "heads_of_8", "qwen3_moe")),
        vllm_policy(moe, generation={"vllm_cfg": {"kv_cache_gib": 0.00001}}),
        vllm_policy(moe, generation={"vllm_kwargs": {"load_format": "nonsense"}}),
    )
    with vllm_process(vllm_policy(moe), refused=refused) as child:
        model, cache, option = child.refusals
    assert model.startswith("ConfigError: policy.generation.backend: vLLM cannot start with ") and "head_dim" in model
    assert cache.startswith("ResourceError: policy.generation.vllm_cfg.kv_cache_gib: vLLM's cache of keys")
    assert option.startswith("ConfigError: policy.generation.backend: vLLM cannot start with ") and "nonsense" in option


def test_routes_are_the_models_own_under_chunks_prefix_hits_and_preemption(engine: EngineProcess) -> None:
    model = _load(engine, 0)
    asked = _request(_prompts(24, shared=91), max_new_tokens=80)
    output = engine("generate", request=asked)
    assert output.routes.shape.layers == (1, 2) and output.routes.ids.dtype == torch.uint8
    assert output.routes.starts.tolist() == [0] * 24
    assert output.routes.lengths.tolist() == [len(prompt) + 79 for prompt in asked.prompt_ids]
    _check(asked, output, model)
    counters = engine("counters")
    assert counters["vllm:num_preemptions"] > 0 and counters["vllm:prefix_cache_hits"] > 0
    # Neither has changed what was sampled.
    for row in (0, 11, 23):
        alone = replace(asked, prompt_ids=asked.prompt_ids[row : row + 1], seeds=asked.seeds[row : row + 1])
        expected = output.token_ids.split(output.lengths.tolist())[row]
        assert torch.equal(engine("generate", request=alone).token_ids, expected)


def test_after_new_weights_and_the_old_ones_again_everything_is_as_before(engine: EngineProcess) -> None:
    asked, outputs = _request(_prompts(6, shared=40)), []
    for seed in (0, 1, 0):
        model = _load(engine, seed)
        outputs.append(engine("generate", request=asked))
        assert outputs[-1].weight_version == seed
        _check(asked, outputs[-1], model)
    assert torch.equal(outputs[0].logprobs, outputs[2].logprobs)
    assert not torch.equal(outputs[0].token_ids, outputs[1].token_ids)


@pytest.mark.full
def test_after_other_weights_and_the_old_ones_again_outputs_are_those_of_a_fresh_engine(engine, tmp_path):
    asked = _request(_prompts(6, shared=40))
    for seed in (0, 1, 0):
        _refit(engine, moe_model(seed=seed), bucket_bytes=50_000)
        engine("finish_refit", version=seed)
    output = engine("generate", request=asked)
    with _started(write_moe(tmp_path / "moe")) as fresh:
        _load(fresh, 0)
        expected = fresh("generate", request=asked)
    assert torch.equal(output.token_ids, expected.token_ids) and torch.equal(output.logprobs, expected.logprobs)
    assert torch.equal(output.routes.ids, expected.routes.ids)


def test_a_cached_prompt_of_old_weights_is_forgotten(engine: EngineProcess) -> None:
    prompt = _prompts(1, shared=128)
    _load(engine, 0)
    asked = _request(prompt, max_new_tokens=2)
    engine("generate", request=asked)
    model = _load(engine, 1)
    _check(asked, engine("generate", request=asked), model)


def _refit(
    engine: EngineProcess,
    model: PreTrainedModel,
    *,
    bucket_bytes: int,
    stop_after: int | None = None,
    delta: DeltaRefit | None = None,
    held: HeldWeights | None = None,
) -> RefitPlan:
    """As `PayloadWeightSync` does it.

    Args:
        held: of the policy, for a delta.
    """
    weights = dict(detached_weights(model))
    slots = engine("match_refit", offered={name: tuple(weight.shape) for name, weight in weights.items()})
    plan = RefitPlan(slots=slots, bucket_bytes=bucket_bytes, delta=delta)
    engine("begin_refit", plan=plan)
    stream, buffer = iter(weights.items()), np.empty(plan.buffer_bytes, dtype=np.uint8)
    filler = BucketFiller(plan, stream) if held is None else DeltaFiller(plan, stream, held)
    for _ in plan.buckets()[:stop_after]:
        size = filler.fill(torch.from_numpy(buffer))
        engine("load_bucket", bucket=buffer[:size].copy())
    return plan


def test_buckets_that_cut_weights_anywhere_bring_the_same_weights(engine: EngineProcess) -> None:
    asked = _request(_prompts(4, shared=10))
    model = _load(engine, 1)
    expected = engine("generate", request=asked)
    digests = engine("fingerprints")
    _load(engine, 0)
    assert engine("fingerprints") != digests and engine("fingerprints").keys() == digests.keys()
    plan = _refit(engine, model, bucket_bytes=10_007)
    assert len(plan.buckets()) > 10
    assert engine("finish_refit", version=9) == 9
    output = engine("generate", request=asked)
    assert torch.equal(output.logprobs, expected.logprobs) and output.weight_version == 9
    assert engine("fingerprints") == digests


def test_what_has_changed_makes_the_weights_that_a_whole_refit_makes(engine: EngineProcess) -> None:
    asked, held = _request(_prompts(4, shared=10)), HeldWeights()
    first, second = moe_model(seed=0), moe_model(seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in second.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator) * (weight.abs() > 0.3))
    _load(engine, 1)
    assert engine("delta_base") == -1, "nobody knows what came by another way"
    for version, model in enumerate((first, second, first)):
        _refit(engine, model, bucket_bytes=10_007, delta=DeltaRefit(base=version - 1, version=version), held=held)
        assert engine("finish_refit", version=version) == version == engine("delta_base")
        _check(asked, engine("generate", request=asked), model)
    digests = engine("fingerprints")
    engine("update_weights", weights=detached_weights(first), version=3)
    assert engine("fingerprints") == digests


def test_a_refit_that_breaks_off_leaves_an_engine_that_says_so_until_the_next_one(engine: EngineProcess) -> None:
    asked, model = _request(_prompts(2, shared=10)), _load(engine, 0)
    _refit(engine, moe_model(seed=1), bucket_bytes=10_007, stop_after=7)
    with pytest.raises(RuntimeError, match="no complete weights to sample from: a weight update was interrupted"):
        engine("generate", request=asked)
    with pytest.raises(RuntimeError, match="were not received"):
        engine("finish_refit", version=3)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine("generate", request=asked)
    assert engine("weight_version") == -1
    _refit(engine, model, bucket_bytes=50_000)
    engine("finish_refit", version=4)
    _check(asked, engine("generate", request=asked), model)


def test_weights_that_do_not_fit_are_refused_before_a_byte_is_sent(engine: EngineProcess) -> None:
    _load(engine, 0)
    offered = {name: tuple(weight.shape) for name, weight in detached_weights(dense_model())}
    with pytest.raises((ValueError, RuntimeError), match="the policy's weights do not fit this engine"):
        engine("match_refit", offered=offered)
    assert engine("weight_version") == 0


def _check_without_routes(engine: EngineProcess, model: PreTrainedModel) -> None:
    asked = replace(_request(_prompts(4, shared=10), max_new_tokens=8), with_routes=False)
    output = engine("generate", request=asked)
    for prompt, tokens, values in zip(
        asked.prompt_ids, output.token_ids.long().split(8), output.logprobs.split(8), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()][:-1]]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 :].gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


@pytest.mark.full
def test_refits_reach_biases_as_well(tmp_path: Path) -> None:
    folder = write_with_tokenizer(tmp_path / "model", biased_model())
    with vllm_process(vllm_policy(folder)) as child:
        for seed in (0, 1, 0):
            model = biased_model(seed=seed)
            child("update_weights", weights=detached_weights(model), version=seed)
            _check_without_routes(child, model)


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_of_one_engine_receive_every_refit_and_a_lost_one_is_the_loss_of_the_engine(axis, tmp_path):
    sizes = {"kv_cache_gib": 0.05, f"{axis}_parallel_size": 2}
    with vllm_process(vllm_policy(write_moe(tmp_path / "moe"), generation={"vllm_cfg": sizes})) as child:
        assert len(child("report_device_ids")) == 2
        held = HeldWeights()
        for version, seed in enumerate((0, 1, 0)):
            model = moe_model(seed=seed)
            delta = DeltaRefit(base=version - 1, version=version)
            _refit(child, model, bucket_bytes=50_000, delta=delta, held=held)
            child("finish_refit", version=version)
            assert child("delta_base") == version
            _check_without_routes(child, model)
        expected = fingerprints((name, weight.float()) for name, weight in detached_weights(model))
        assert child("fingerprints") == expected
        assert names_left(child.pid) == []
        victim = next(each for each in psutil.Process(child.pid).children() if each.memory_info().rss > 200 << 20)
        victim.kill()
        with pytest.raises(RuntimeError, match="WorkerLost: .* a rank of generation engine 0 has died"):
            _check_without_routes(child, model)


@pytest.mark.full
def test_a_bfloat16_engine_gives_finite_float32_log_probabilities(tmp_path: Path) -> None:
    policy = vllm_policy(write_moe(tmp_path / "moe"), generation={"precision": "bfloat16"})
    with vllm_process(policy) as child:
        with pytest.raises(RuntimeError, match="no weights were received yet"):
            child("generate", request=replace(_request(_prompts(2, shared=4)), with_routes=False))
        model = moe_model()
        child("update_weights", weights=detached_weights(model), version=0)
        asked = replace(_request(_prompts(8, shared=4), max_new_tokens=16), with_routes=False)
        output = child("generate", request=asked)
    assert output.logprobs.dtype == torch.float32 and bool(output.logprobs.isfinite().all())
    ids = [*asked.prompt_ids[0], *output.token_ids[:16].tolist()]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0, len(asked.prompt_ids[0]) - 1 :]
    expected = logits.log_softmax(-1).gather(-1, output.token_ids[:16].long()[:, None])[:, 0]
    assert 1e-5 < float((output.logprobs[:16] - expected).abs().max()) < 0.5
