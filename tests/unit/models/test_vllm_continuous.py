"""Continuous decoding by vLLM: rows join and leave between steps, and weights change under them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.errors import ConfigError
from nemo_rl.experience.turn_sampler import TurnRequest, TurnSample, TurnSampler
from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.models.generation.vllm.start import check_vllm_spec
from nemo_rl.models.generation.vllm.worker import build_vllm_worker
from nemo_rl.models.hf.loading import named_weights
from nemo_rl.models.weight_sync.receipt import Answer, make_probe
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints
from tests.helpers.engine_process import NO_VLLM, EngineProcess, has_vllm, vllm_policy, vllm_process
from tests.helpers.model_families import dense_model, detached_weights, write_dense, write_moe

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)]

PLACES = 9
LIMIT_S = 60.0


class ContinuousVllm:
    """A continuous vLLM worker whose streams are consumed by threads of its process."""

    def __init__(self, spec: EngineSpec) -> None:
        self.worker: Any = build_vllm_worker(replace(spec, continuous=True))
        self._threads: list[threading.Thread] = []
        self.forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def forget(self) -> None:
        self.found: dict[str, GenerationOutput] = {}
        self.schedule: list[ScheduleEntry] = []

    def use(self, in_flight: str) -> None:
        """Set what becomes of running rows."""
        self.worker._decoding._spec = replace(self.worker._decoding._spec, in_flight=in_flight)

    def start(self, request: GenerationRequest, *, delay_s: float = 0.0) -> None:
        self._threads.append(threading.Thread(target=self._consume, args=(request, delay_s)))
        self._threads[-1].start()

    def _consume(self, request: GenerationRequest, delay_s: float) -> None:
        time.sleep(delay_s)
        for samples in self.worker.stream(request):
            self.schedule += samples.schedule
            for place, group in enumerate(samples.groups):
                size = request.group_size
                self.found[request.names[group]] = samples.output.select(range(place * size, (place + 1) * size))

    def wait_for_turns(self, count: int) -> None:
        until = self.worker._decoding._turns + count
        give_up = time.monotonic() + LIMIT_S
        while self.worker._decoding._turns < until:
            assert time.monotonic() < give_up
            time.sleep(0.001)

    def close_early(self, request: GenerationRequest) -> None:
        """Consume a stream up to its first groups, and close it."""
        stream = self.worker.stream(request)
        self.schedule += next(stream).schedule
        stream.close()

    def converse(self, prompt: tuple[int, ...]) -> list[TurnSample]:
        """Return two turns of a conversation, and the first one of another."""
        sampling = SamplingParams(temperature=1.0, max_new_tokens=40, stop_token_ids=())

        async def turns() -> list[TurnSample]:
            first = await sampler.sample(TurnRequest(prompt_ids=prompt, seed=1, sampling=sampling))
            ids = (*prompt, *first.token_ids, 9, 8)
            again = TurnRequest(prompt_ids=ids, seed=2, sampling=sampling, engine=first.engine)
            other = TurnRequest(prompt_ids=prompt[::-1], seed=3, sampling=sampling)
            return [first, *await asyncio.gather(sampler.sample(again), sampler.sample(other))]

        sampler = TurnSampler(self.worker, with_routes=False, with_support=False)
        try:
            return asyncio.run(turns())
        finally:
            sampler.close()

    def num_unfinished(self) -> int:
        return self.worker._llm.llm_engine.get_num_unfinished_requests()

    def join(self) -> tuple[dict[str, GenerationOutput], list[ScheduleEntry]]:
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        found, schedule = self.found, sorted(self.schedule, key=lambda entry: entry.number)
        self._threads = []
        self.forget()
        return found, schedule


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = write_dense(tmp_path_factory.mktemp("vllm") / "model")
    policy = vllm_policy(folder, generation={"max_batch_size": PLACES}, max_total_sequence_length=128)
    with vllm_process(policy, build=ContinuousVllm) as child:
        child("update_weights", weights=detached_weights(dense_model(seed=0)), version=0)
        yield child


def _asked(first: int, num: int = 1, *, named: bool = True, **changes: object) -> GenerationRequest:
    """Return groups of three rows; some prompts are longer than a block."""
    values: dict[str, object] = {"temperature": 1.0, "max_new_tokens": 40, "stop_token_ids": ()}
    prompts = []
    for number in range(first, first + num):
        rng = random.Random(number)
        prompts.append(tuple(rng.randrange(7, 300) for _ in range(5 + 20 * (number % 3))))
    return GenerationRequest(
        prompt_ids=tuple(prompts),
        seeds=tuple(1000 * number + row for number in range(first, first + num) for row in range(3)),
        sampling=SamplingParams(**{**values, **changes}),
        names=tuple(f"{number}.0" for number in range(first, first + num)) if named else (),
    )


def _scores(model: PreTrainedModel, prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = model(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    return logprobs[len(prompt) - 1 :].gather(-1, ids[0, len(prompt) :, None])[:, 0]


def _check_all(found: dict[str, GenerationOutput]) -> tuple[float, int]:
    """Return the largest difference of tokens from the scores of their own versions, which are seeds as well, and the
    number of rows with several."""
    largest, mixed = 0.0, 0
    models = {seed: dense_model(seed=seed) for seed in range(3)}
    for name, output in found.items():
        [prompt] = _asked(int(name[:-2])).prompt_ids
        lengths = output.lengths.tolist()
        rows = zip(output.token_ids.split(lengths), output.logprobs.split(lengths), output.row_spans, strict=True)
        for tokens, values, spans in rows:
            ends = [*(start for start, _ in spans[1:]), len(tokens)]
            parts = [
                _scores(models[version], prompt, tokens.tolist())[start:end]
                for (start, version), end in zip(spans, ends, strict=True)
            ]
            largest = max(largest, float((values - torch.cat(parts)).abs().max()))
            mixed += len(spans) > 1
    return largest, mixed


def test_rows_that_join_while_others_run_are_what_they_are_alone(engine: EngineProcess) -> None:
    engine("update_weights", weights=detached_weights(dense_model(seed=0)), version=0)
    rng = random.Random(0)
    stops = tuple(range(0, 320, 15))
    for first in range(0, 16, 2):
        engine("start", request=_asked(first, 2, stop_token_ids=stops), delay_s=rng.random() * 0.1)
    found, schedule = engine("join")
    assert len(found) == 16 and len([entry for entry in schedule if entry.kind == "join"]) > 4
    for name, output in found.items():
        alone = engine("generate", request=_asked(int(name[:-2]), stop_token_ids=stops, named=False))
        assert torch.equal(output.token_ids, alone.token_ids) and output.weight_version == 0
        torch.testing.assert_close(output.logprobs, alone.logprobs, rtol=0, atol=1e-5)


def _swapped(engine: EngineProcess, in_flight: str) -> tuple[dict[str, GenerationOutput], list[ScheduleEntry]]:
    engine("update_weights", weights=detached_weights(dense_model(seed=0)), version=0)
    engine("use", in_flight=in_flight)
    engine("start", request=_asked(0, 7))
    for version in (1, 2):
        engine("wait_for_turns", count=25)
        engine("finish_generation")
        engine("update_weights", weights=detached_weights(dense_model(seed=version)), version=version)
        engine("prepare_for_generation")
    found, schedule = engine("join")
    engine("use", in_flight="recompute")
    assert len(found) == 7
    return found, schedule


@pytest.mark.parametrize("in_flight", ["drain", "recompute"])
def test_tokens_before_and_after_a_swap_score_as_their_own_versions(engine: EngineProcess, in_flight: str) -> None:
    found, schedule = _swapped(engine, in_flight)
    gap, mixed = _check_all(found)
    assert gap < 1e-5
    assert mixed >= 9 if in_flight == "recompute" else mixed == 0
    assert [entry.version for entry in schedule if entry.kind == "swap"][-2:] == [1, 2]
    assert {version for output in found.values() for row in output.row_spans for _, version in row} == {0, 1, 2}


@pytest.mark.full
def test_rows_of_an_engine_with_two_ranks_stand_still_for_new_weights_as_well(tmp_path: Path) -> None:
    sizes = {"kv_cache_gib": 0.05, "tensor_parallel_size": 2}
    policy = vllm_policy(
        write_dense(tmp_path / "model"),
        generation={"max_batch_size": PLACES, "vllm_cfg": sizes},
        max_total_sequence_length=128,
    )
    with vllm_process(policy, build=ContinuousVllm) as child:
        found, schedule = _swapped(child, "recompute")
    gap, mixed = _check_all(found)
    assert gap < 1e-5 and mixed >= 9
    assert [entry.version for entry in schedule if entry.kind == "swap"][-2:] == [1, 2]


def test_old_caches_under_new_weights_score_as_neither_version(engine: EngineProcess) -> None:
    gap, mixed = _check_all(_swapped(engine, "keep")[0])
    assert mixed >= 9 and gap > 1e-2


def test_a_stream_that_is_closed_takes_its_rows_out(engine: EngineProcess) -> None:
    asked = _asked(0, 2, max_new_tokens=60)
    engine("close_early", request=replace(asked, forced=((5,), (6,), (7,), (8,) * 60, (9,) * 60, (9,) * 60)))
    engine("start", request=_asked(5))
    _, schedule = engine("join")
    assert [(entry.kind, entry.groups) for entry in schedule[-3:]] == [
        ("join", ("0.0", "1.0")),
        ("leave", ("1.0",)),
        ("join", ("5.0",)),
    ]
    assert engine("num_unfinished") == 0


def test_validation_and_receipts_do_not_wait_behind_running_rows(engine: EngineProcess) -> None:
    engine("update_weights", weights=detached_weights(dense_model(seed=1)), version=1)
    engine("start", request=_asked(0, 30, max_new_tokens=60))
    engine("wait_for_turns", count=5)
    probe = make_probe(vocab_size=320, max_length=128, num_tokens=18)
    answer = engine("answer_receipt", probe=probe)
    assert isinstance(answer, Answer)
    validated = engine("generate", request=_asked(50, 2, named=False, max_new_tokens=10))
    busy = engine("num_unfinished")
    found, _ = engine("join")
    assert busy > 0 and len(found) == 30, "rows ran all the while"
    expected = [
        _scores(dense_model(seed=1), prompt, list(response))
        for prompt, response in zip(probe.prompts, probe.responses, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(answer.logprobs), torch.cat(expected), rtol=0, atol=1e-5)
    assert answer.version == 1 and answer.token_ids == probe.token_ids
    expected_prints = fingerprints(named_weights(dense_model(seed=1)))
    assert answer.fingerprints.items() >= expected_prints.items() and len(expected_prints) > 10
    assert validated.weight_version == 1


def test_a_prompt_that_was_cached_before_a_swap_is_computed_anew_without_a_reset(engine: EngineProcess) -> None:
    probe = make_probe(vocab_size=320, max_length=128, num_tokens=18)
    cached = []
    for version in (1, 2):
        engine("update_weights", weights=detached_weights(dense_model(seed=version)), version=version)
        cached += [engine("generate", request=probe.request()).cached_tokens.tolist() for _ in range(2)]
    assert cached[0] == cached[2] and cached[1] == cached[3]
    assert cached[0] != cached[1], "the cache works"


def test_what_vllm_cannot_do_in_continuous_mode_is_refused(tmp_path: Path) -> None:
    moe = vllm_policy(write_moe(tmp_path / "moe"), router_replay={"enabled": True})
    entry = ScheduleEntry(engine=0, number=0, turn=0, kind="swap", version=1)
    two = vllm_policy(moe.model_name, generation={"vllm_cfg": {"kv_cache_gib": 0.05, "pipeline_parallel_size": 2}})
    cases = {
        "forgets the routes of running rows": EngineSpec(policy=moe, continuous=True),
        "cannot follow a schedule": EngineSpec(policy=moe, script=(entry,)),
        "rows cannot stand still between two tokens": EngineSpec(policy=two, continuous=True),
    }
    for said, spec in cases.items():
        with pytest.raises(ConfigError, match=said):
            check_vllm_spec(spec)


def test_the_second_turn_of_a_conversation_finds_the_first_one_in_the_cache(engine: EngineProcess) -> None:
    engine("update_weights", weights=detached_weights(dense_model(seed=1)), version=1)
    [prompt] = _asked(2).prompt_ids
    first, second, other = engine("converse", prompt=prompt)
    # Whole blocks of 32 tokens; the prompt has 45, and the first turn 40.
    assert first.cached_tokens == 0 and second.cached_tokens == 64 and other.cached_tokens == 0
    assert first.version_spans == second.version_spans == ((0, 1),) and first.engine == second.engine == 0
    ids = (*prompt, *first.token_ids, 9, 8)
    expected = _scores(dense_model(seed=1), ids, list(second.token_ids))
    torch.testing.assert_close(second.logprobs, expected, rtol=0, atol=1e-5)
