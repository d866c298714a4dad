"""What every built-in generation engine promises, on the same small model: the embedded one and vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine.worker import build_engine_worker
from nemo_rl.models.head.logprobs import Sampling
from tests.helpers.engine_process import NO_VLLM, has_vllm, vllm_policy, vllm_process
from tests.helpers.hf_reference import logprobs_from_logits
from tests.helpers.model_families import dense_model, detached_weights, write_dense
from tests.helpers.tiny_model import tiny_policy

STOP, LONGEST = 2, 64
Call = Callable[..., object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("engines") / "model")


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=pytest.mark.slow)])
def call(request: pytest.FixtureRequest, folder: Path) -> Iterator[Call]:
    """Calls a method of the engine, which has version 0: the weights of seed 0."""
    if request.param == "torch":
        worker = build_engine_worker(EngineSpec(policy=tiny_policy(folder)))
        worker.update_weights(detached_weights(dense_model(seed=0)), version=0)

        def local(method: str, **arguments: object) -> object:
            found = getattr(worker, method)
            return found(**arguments) if callable(found) else found

        yield local
        worker.shutdown()
        return
    if not has_vllm():
        pytest.skip(NO_VLLM)
    with vllm_process(vllm_policy(folder)) as child:
        child("update_weights", weights=detached_weights(dense_model(seed=0)), version=0)
        yield child


def _request(num_prompts: int = 5, group: int = 3, **changes: object) -> GenerationRequest:
    rng = random.Random(3)
    values: dict[str, object] = {"temperature": 1.0, "max_new_tokens": 12, "stop_token_ids": (STOP,)}
    return GenerationRequest(
        prompt_ids=tuple(tuple(rng.randrange(7, 300) for _ in range(rng.randint(3, 9))) for _ in range(num_prompts)),
        seeds=tuple(range(100, 100 + num_prompts * group)),
        sampling=SamplingParams(**{**values, **changes}),
    )


def _rows(output: GenerationOutput) -> list[tuple[list[int], torch.Tensor]]:
    lengths = output.lengths.tolist()
    parts = zip(output.token_ids.split(lengths), output.logprobs.split(lengths), strict=True)
    return [(tokens.tolist(), values) for tokens, values in parts]


def _expected(model: PreTrainedModel, prompt: list[int], tokens: list[int], sampling: SamplingParams) -> torch.Tensor:
    ids = torch.tensor([prompt + tokens])
    drawn_from = Sampling(temperature=sampling.temperature or 1.0, top_k=sampling.top_k, top_p=sampling.top_p)
    with torch.no_grad():
        return logprobs_from_logits(model(ids, use_cache=False).logits, ids, sampling=drawn_from)[0, len(prompt) :]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.7, "temperature": 1.2},
        {"top_k": 20, "top_p": 0.9},
        {"temperature": 0.0},
    ],
)
def test_log_probabilities_are_those_of_the_distribution_sampled_from(call: Call, changes: dict[str, object]) -> None:
    asked, model = _request(**changes), dense_model()
    output = call("generate", request=asked)
    assert output.logprobs.dtype == torch.float32
    for i, (tokens, values) in enumerate(_rows(output)):
        expected = _expected(model, list(asked.prompt_ids[i // asked.group_size]), tokens, asked.sampling)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


def test_a_row_depends_on_its_seed_and_prompt_and_not_on_the_batch(call: Call) -> None:
    asked = _request(6, 4)
    together = [tokens for tokens, _ in _rows(call("generate", request=asked))]
    assert [tokens for tokens, _ in _rows(call("generate", request=asked))] == together
    assert len({tuple(tokens) for tokens in together}) > 12
    for p, prompt in enumerate(asked.prompt_ids):
        row = 4 * p + 1
        alone = replace(asked, prompt_ids=(prompt,), seeds=asked.seeds[row : row + 1])
        assert _rows(call("generate", request=alone))[0][0] == together[row]


def test_equal_seeds_give_equal_rows_and_other_seeds_other_rows(call: Call) -> None:
    asked = replace(_request(1, 1), seeds=(5, 5, 6, -5, -1, 2**70 + 5, 5 + 2**32))
    rows = [tuple(tokens) for tokens, _ in _rows(call("generate", request=asked))]
    assert rows[0] == rows[1]
    assert len({rows[0], *rows[2:5], rows[6]}) == 5
    assert rows == [tuple(tokens) for tokens, _ in _rows(call("generate", request=asked))]


def test_tokens_are_drawn_as_often_as_their_probability_says(call: Call) -> None:
    asked = replace(_request(1, 1, max_new_tokens=1, stop_token_ids=()), seeds=tuple(range(2000)))
    first = call("generate", request=asked).token_ids.long()
    with torch.no_grad():
        expected = dense_model()(torch.tensor([asked.prompt_ids[0]])).logits[0, -1].softmax(-1)
    found = torch.bincount(first, minlength=len(expected)) / len(first)
    # Of 2000 draws a share lies within 0.05 of its probability, but for one of 10^5 cases.
    assert float((found - expected).abs().max()) < 0.05


def test_greedy_takes_the_largest_logit_whatever_the_seed(call: Call) -> None:
    asked, model = _request(2, 2, temperature=0.0), dense_model()
    for i, (tokens, _) in enumerate(_rows(call("generate", request=asked))):
        ids = list(asked.prompt_ids[i // 2])
        for token in tokens:
            with torch.no_grad():
                assert token == int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            ids.append(token)


def test_rows_end_at_a_stop_token_or_are_marked_truncated(call: Call) -> None:
    stops = tuple(range(0, 320, 7))
    output = call("generate", request=_request(8, 4, stop_token_ids=stops))
    ended = []
    for (tokens, _), is_truncated in zip(_rows(output), output.truncated.tolist(), strict=True):
        assert all(token not in stops for token in tokens[:-1])
        assert is_truncated == (tokens[-1] not in stops)
        assert is_truncated is False or len(tokens) == 12
        ended.append(is_truncated)
    assert len(set(ended)) == 2


def test_only_the_stops_of_the_request_end_a_row(call: Call) -> None:
    output = call("generate", request=_request(20, 10, stop_token_ids=()))
    assert (output.lengths == 12).all() and output.truncated.all()
    assert bool((output.token_ids == STOP).any()), "the model's own end of sequence was drawn and passed over"


def test_the_total_length_limits_rows_one_by_one(call: Call) -> None:
    asked = _request(6, 2, stop_token_ids=(), max_new_tokens=60)
    output = call("generate", request=asked)
    assert output.lengths.tolist() == [min(60, LONGEST - len(asked.prompt_ids[i // 2])) for i in range(12)]
    assert output.truncated.all()


def test_stop_strings_end_a_row_at_the_token_that_completes_them(call: Call, folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    plain = _rows(call("generate", request=_request(4, 4, stop_token_ids=())))
    # Bytes of a character that is not whole are no text.
    texts = {row: tokenizer.decode(tokens[3:5]) for row, (tokens, _) in enumerate(plain)}
    row, text = next((row, text) for row, text in texts.items() if text.isascii() and text.strip())
    output = call("generate", request=_request(4, 4, stop_token_ids=(), stop_strings=(text,)))
    tokens, _ = _rows(output)[row]
    assert text in tokenizer.decode(tokens)
    assert text not in tokenizer.decode(tokens[:-1])
    assert not output.truncated[row]
    assert tokens == plain[row][0][: len(tokens)]


def test_an_empty_request_gives_an_empty_output(call: Call) -> None:
    output = call("generate", request=replace(_request(), prompt_ids=(), seeds=()))
    assert (len(output.token_ids), len(output.logprobs), len(output.lengths)) == (0, 0, 0)
    assert output.weight_version == call("weight_version")


def test_a_prompt_without_room_for_a_token_is_refused(call: Call) -> None:
    longest = replace(_request(1, 1), prompt_ids=((7,) * LONGEST,))
    with pytest.raises((ValueError, RuntimeError), match="prompt 0: expected 1 to 63 tokens"):
        call("generate", request=longest)


def test_weights_are_replaced_as_a_whole_and_back_again(call: Call) -> None:
    before = call("generate", request=_request())
    for version, seed in ((1, 1), (2, 0)):
        assert call("update_weights", weights=detached_weights(dense_model(seed=seed)), version=version) == version
        output, model = call("generate", request=_request()), dense_model(seed=seed)
        assert output.weight_version == call("weight_version") == version
        for i, (tokens, values) in enumerate(_rows(output)):
            expected = _expected(model, list(_request().prompt_ids[i // 3]), tokens, _request().sampling)
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    assert torch.equal(output.token_ids, before.token_ids) and torch.equal(output.logprobs, before.logprobs)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(call: Call) -> None:
    before, version = call("generate", request=_request()), call("weight_version")
    good = detached_weights(dense_model(seed=1))
    cases = {
        "unknown": [*good, ("model.other.weight", torch.zeros(2))],
        "missing": good[1:],
        "expected shape": [(name, weight[:1] if name == "model.norm.weight" else weight) for name, weight in good],
    }
    for said, weights in cases.items():
        with pytest.raises((ValueError, RuntimeError), match=said):
            call("update_weights", weights=weights, version=7)
    after = call("generate", request=_request())
    assert call("weight_version") == version and torch.equal(after.token_ids, before.token_ids)
