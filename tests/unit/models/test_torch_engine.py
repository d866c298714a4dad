"""The embedded engine beyond the contract of all engines (`test_engine_contract`): its draws, batches and errors."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.dispatched_ops import DispatchedOps
from nemo_rl.errors import NonFiniteError
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
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
from tests.helpers.tiny_model import tiny_model
from tests.unit.models.test_continuous import rows_of

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


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_k": 20}], ids=["plain", "filtered"])
def test_given_responses_have_the_log_probabilities_of_drawn_ones(changes: dict[str, object]) -> None:
    request = _request(**changes)
    drawn = _engine().generate(request)
    responses = tuple(tuple(tokens) for tokens, _ in rows_of(drawn))
    given = _engine().generate(replace(request, seeds=tuple(reversed(request.seeds)), forced=responses))
    assert torch.equal(given.token_ids, drawn.token_ids) and torch.equal(given.logprobs, drawn.logprobs)


def test_given_responses_must_fit_their_rows() -> None:
    request = _request()
    with pytest.raises(ValueError, match="expected a forced response for each"):
        _engine().generate(replace(request, forced=((1,),)))
    with pytest.raises(ValueError, match="forced tokens, got 0"):
        _engine().generate(replace(request, forced=((),) * len(request.seeds)))


def test_batches_of_few_rows_give_the_rows_of_one_batch() -> None:
    request = _request(6, 4)
    together, in_parts = _engine().generate(request), _engine(max_batch_size=5).generate(request)
    assert torch.equal(together.token_ids, in_parts.token_ids) and torch.equal(together.lengths, in_parts.lengths)


def test_tied_weights_may_come_under_both_names() -> None:
    other = tiny_model(seed=9)
    assert _engine().update_weights(other.state_dict().items(), version=1) == 1


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
