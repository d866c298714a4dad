"""The embedded engine: exact log-probabilities, seeds, stops, limits and weight updates."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.dispatched_ops import DispatchedOps
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.errors import NonFiniteError
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.requests import RowRequest
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.generation.torch_engine.decode import (
    BatchRow,
    DecodeBatch,
    RowSettings,
    draw,
    seeds_to_tensor,
    uniforms,
)
from nemo_rl.models.head.logprobs import Sampling
from nemo_rl.models.hf.loading import named_weights
from tests.helpers.hf_reference import logprobs_from_logits
from tests.helpers.tiny_model import tiny_model

STOP = 2


def _params(**changes: object) -> SamplingParams:
    values: dict[str, object] = {"temperature": 1.0, "max_new_tokens": 12, "stop_token_ids": (STOP,)}
    return SamplingParams(**{**values, **changes})


def _prompts(count: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(3)
    return tuple(tuple(rng.randrange(7, 300) for _ in range(rng.randint(3, 9))) for _ in range(count))


def _request(num_prompts: int = 5, group: int = 3, **changes: object) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=_prompts(num_prompts),
        seeds=tuple(range(100, 100 + num_prompts * group)),
        sampling=_params(**changes),
    )


def _engine(**changes: object) -> TorchEngine:
    return TorchEngine(tiny_model(), **{"tokenizer": None, "max_total_length": 64, "weight_version": 0, **changes})


def _rows(output: GenerationOutput) -> Iterator[tuple[list[int], torch.Tensor]]:
    lengths = output.lengths.tolist()
    for tokens, values in zip(output.token_ids.split(lengths), output.logprobs.split(lengths), strict=True):
        yield tokens.tolist(), values


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.2}])
def test_logprobs_equal_a_recomputation_without_cache(changes: dict[str, object]) -> None:
    request = _request(**changes)
    output = _engine().generate(request)
    model = tiny_model()
    sampling = request.sampling
    drawn_from = Sampling(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    for i, (tokens, values) in enumerate(_rows(output)):
        prompt = list(request.prompt_ids[i // request.group_size])
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            expected = logprobs_from_logits(model(ids, use_cache=False).logits, ids, sampling=drawn_from)[
                0, len(prompt) :
            ]
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_k": 20}], ids=["plain", "filtered"])
def test_given_responses_have_the_log_probabilities_of_drawn_ones(changes: dict[str, object]) -> None:
    request = _request(**changes)
    drawn = _engine().generate(request)
    responses = tuple(tuple(tokens) for tokens, _ in _rows(drawn))
    given = _engine().generate(replace(request, seeds=tuple(reversed(request.seeds)), forced=responses))
    assert torch.equal(given.token_ids, drawn.token_ids) and torch.equal(given.logprobs, drawn.logprobs)


def test_given_responses_must_fit_their_rows() -> None:
    request = _request()
    with pytest.raises(ValueError, match="expected a forced response for each"):
        _engine().generate(replace(request, forced=((1,),)))
    with pytest.raises(ValueError, match="forced tokens, got 0"):
        _engine().generate(replace(request, forced=((),) * len(request.seeds)))


def test_a_row_depends_on_its_seed_and_prompt_and_not_on_the_batch() -> None:
    request = _request(6, 4)
    together = list(_rows(_engine().generate(request)))
    in_parts = list(_rows(_engine(max_batch_size=5).generate(request)))
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in in_parts]
    for p, prompt in enumerate(request.prompt_ids):
        row = 4 * p + 1
        alone = GenerationRequest(prompt_ids=(prompt,), seeds=request.seeds[row : row + 1], sampling=request.sampling)
        assert next(_rows(_engine().generate(alone)))[0] == together[row][0]


def test_equal_seeds_give_equal_rows_and_other_seeds_other_rows() -> None:
    request = GenerationRequest(prompt_ids=_prompts(1), seeds=(5, 5, 6, -5, 2**70 + 5), sampling=_params())
    rows = [tokens for tokens, _ in _rows(_engine().generate(request))]
    assert rows[0] == rows[1]
    assert len({tuple(tokens) for tokens in rows}) >= 3


def test_greedy_takes_the_largest_logit_whatever_the_seed() -> None:
    request = _request(2, 2, temperature=0.0)
    model = tiny_model()
    for i, (tokens, _) in enumerate(_rows(_engine().generate(request))):
        ids = list(request.prompt_ids[i // 2])
        for token in tokens:
            with torch.no_grad():
                assert token == int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            ids.append(token)


def test_rows_end_at_a_stop_token_or_are_marked_truncated() -> None:
    stops = tuple(range(0, 320, 7))
    output = _engine().generate(_request(8, 4, stop_token_ids=stops))
    ended = []
    for (tokens, _), is_truncated in zip(_rows(output), output.truncated.tolist(), strict=True):
        assert all(token not in stops for token in tokens[:-1])
        assert is_truncated == (tokens[-1] not in stops)
        assert is_truncated is False or len(tokens) == 12
        ended.append(is_truncated)
    assert len(set(ended)) == 2


def test_the_total_length_limits_rows_one_by_one() -> None:
    request = _request(6, 2, stop_token_ids=())
    output = _engine(max_total_length=12).generate(request)
    expected = [12 - len(request.prompt_ids[i // 2]) for i in range(12)]
    assert output.lengths.tolist() == expected
    assert output.truncated.all()


def test_stop_strings_end_a_row_at_the_token_that_completes_them() -> None:
    tokenizer = build_tokenizer(["sort 123 -> 456"] * 20)
    engine = _engine(tokenizer=tokenizer)
    plain = list(_rows(engine.generate(_request(4, 4, stop_token_ids=()))))
    text = tokenizer.decode(plain[0][0][3:5])
    output = engine.generate(_request(4, 4, stop_token_ids=(), stop_strings=(text,)))
    tokens, _ = next(_rows(output))
    assert text in tokenizer.decode(tokens)
    assert text not in tokenizer.decode(tokens[:-1])
    assert not output.truncated[0]
    assert tokens == plain[0][0][: len(tokens)]


def test_an_empty_request_gives_an_empty_output() -> None:
    output = _engine().generate(GenerationRequest(prompt_ids=(), seeds=(), sampling=_params()))
    assert (len(output.token_ids), len(output.lengths), output.weight_version) == (0, 0, 0)


def test_a_prompt_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 0: expected 1 to 3 tokens"):
        _engine(max_total_length=4).generate(_request())


def test_weights_are_replaced_as_a_whole_and_the_version_follows() -> None:
    engine, other = _engine(weight_version=-1), tiny_model(seed=9)
    assert engine.update_weights(named_weights(other), version=4) == 4
    expected = list(_rows(TorchEngine(other, tokenizer=None, max_total_length=64).generate(_request())))
    output = engine.generate(_request())
    assert output.weight_version == 4
    assert [tokens for tokens, _ in _rows(output)] == [tokens for tokens, _ in expected]


def test_tied_weights_may_come_under_both_names() -> None:
    other = tiny_model(seed=9)
    assert _engine().update_weights(other.state_dict().items(), version=1) == 1


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_a_faulty_update_changes_nothing(fault: str) -> None:
    engine = _engine(weight_version=3)
    before = list(_rows(engine.generate(_request())))
    weights = dict(named_weights(tiny_model(seed=9)))
    name = "model.norm.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["model.extra.weight"] = torch.zeros(1)
    else:
        weights[name] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"refused, version 3 stays in use: model\.(norm|extra)\.weight"):
        engine.update_weights(weights.items(), version=4)
    after = engine.generate(_request())
    assert after.weight_version == 3
    assert [t for t, _ in _rows(after)] == [t for t, _ in before]


def test_sampled_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05])
    count = 20_000
    seeds = seeds_to_tensor(range(count))
    tokens, values = draw(probabilities.log().expand(count, -1), _params(), seeds, position=3)
    frequency = torch.bincount(tokens, minlength=5) / count
    # Five standard errors.
    assert (frequency - probabilities).abs().max() < 5 * 0.5 / count**0.5
    assert frequency[2] == 0
    torch.testing.assert_close(values, probabilities[tokens].log(), rtol=0, atol=1e-6)


def test_uniforms_of_neighbouring_seeds_and_positions_are_unrelated() -> None:
    table = torch.stack([uniforms(seeds_to_tensor(range(2000)), position) for position in range(8)])
    assert table.min() > 0 and table.max() < 1
    # Correlation of 2000 pairs: standard error 0.022.
    correlation = torch.corrcoef(torch.cat([table, table.roll(1, dims=1)])) - torch.eye(16)
    assert correlation.abs().max() < 0.12


def test_a_closed_engine_says_so() -> None:
    engine = _engine()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate(_request())


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_told_before_anything_is_drawn(value: float, changes: dict[str, object]) -> None:
    model = tiny_model()

    def spoil(module: torch.nn.Module, args: object, logits: torch.Tensor) -> torch.Tensor:
        # Prompts are run shortest first: the second of the request is the first of the batch.
        return logits.index_put((torch.tensor(0), torch.tensor(-1), torch.tensor(3)), torch.tensor(value))

    model.get_output_embeddings().register_forward_hook(spoil)
    engine = TorchEngine(model, tokenizer=None, max_total_length=20, weight_version=7, number=1)
    request = GenerationRequest(prompt_ids=((1, 2), (3,), (5, 2)), seeds=tuple(range(6)), sampling=_params(**changes))
    with pytest.raises(NonFiniteError, match=r"engine 1, weight version 7: NaN or inf .* token 1 of row 2, 3;"):
        engine.generate(request)


def test_logits_of_minus_infinity_are_a_mask() -> None:
    model = tiny_model()

    def mask(module: torch.nn.Module, args: object, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([0]), float("-inf"))

    model.get_output_embeddings().register_forward_hook(mask)
    output = TorchEngine(model, tokenizer=None, max_total_length=20, weight_version=0).generate(_request())
    assert bool(output.logprobs.isfinite().all()) and 0 not in output.token_ids


def _batch(*, stop: tuple[int, ...] = (STOP,), limit: int = 12) -> DecodeBatch:
    """Return a batch of rows of unequal prompts."""
    batch = DecodeBatch(tiny_model())
    settings = RowSettings(sampling=_params(stop_token_ids=stop, max_new_tokens=limit))
    rows = [
        RowRequest(prompt=prompt, seed=number, max_new_tokens=limit - number % 3, number=number)
        for number, prompt in enumerate(_prompts(6))
    ]
    batch.join([BatchRow(key=row.number, request=row, settings=settings) for row in rows])
    return batch


@pytest.mark.parametrize("times", [3, 8, 40])
def test_rows_that_are_fed_behind_their_end_keep_nothing_of_it(times: int) -> None:
    # Many stop tokens: some rows end in the middle of the turns, others at their limit.
    each, some = _batch(stop=tuple(range(2, 40))), _batch(stop=tuple(range(2, 40)))
    while each.num_live:
        each.turn()
    while some.num_live:
        some.turn(times=times)
    expected, found = each.take(range(6)), some.take(range(6))
    assert torch.equal(found.lengths, expected.lengths) and torch.equal(found.truncated, expected.truncated)
    assert expected.truncated.any() and not expected.truncated.all()
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_logits_that_are_not_finite_end_several_turns_with_their_token() -> None:
    batch = _batch(stop=())
    batch.turn(times=2)
    weight = batch._model.model.norm.weight
    with torch.no_grad():
        weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match="response token 3 of row"):
        batch.turn(times=4)


def test_a_turn_neither_copies_the_cache_nor_waits_for_the_device() -> None:
    batch = _batch(stop=(), limit=60)
    batch.turn(times=2)
    layer = batch._live._cache.layers[0]
    place, seen = layer.keys.data_ptr(), []
    for times in (1, 6):
        with DispatchedOps() as counter:
            batch.turn(times=times)
        seen.append(counter.num_syncs)
    assert layer.keys.data_ptr() == place and layer.keys.shape[-2] == 8 + max(map(len, _prompts(6)))
    assert seen[1] <= seen[0] <= 3, "looks at the device do not grow with the turns"
