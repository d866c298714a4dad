"""`policy.generation.batch_invariant`: the bits of a row are the same whatever is sampled beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.config.load import load_config
from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.generation.torch_engine.worker import build_engine_worker
from nemo_rl.models.generation.turn_batch import ContinuousSpec
from nemo_rl.models.hf.loading import named_weights
from tests.helpers.runs import ROOT
from tests.helpers.tiny_model import tiny_model, tiny_policy, write_tiny_folder
from tests.unit.models.test_continuous import Streams, asked, equal_bits, scores
from tests.unit.models.test_engine_routes import moe_model
from tests.unit.models.test_feeds import feed_of

NUM_ROWS = 21


def invariant(make: Callable[[], PreTrainedModel] = tiny_model, *, is_continuous: bool, on: bool = True) -> TorchEngine:
    engine = TorchEngine(make(), tokenizer=None, max_total_length=64, weight_version=0, batch_invariant=on)
    if is_continuous:
        engine.decode_continuously(ContinuousSpec(number=0, places=6))
    return engine


def rows(named: bool = False, **settings: bool) -> GenerationRequest:
    return asked(0, NUM_ROWS, 1, named=named, **settings)


def differing(engine: TorchEngine, alone: list[GenerationOutput], request: GenerationRequest) -> int:
    """Return the number of rows with other bits than alone, in their own order."""
    order = random.Random(5).sample(range(NUM_ROWS), NUM_ROWS)
    output = engine.generate(request.of_groups(order))
    return sum(not equal_bits(output.select([place]), alone[row]) for place, row in enumerate(order))


@pytest.mark.parametrize("make", [tiny_model, moe_model])
@pytest.mark.parametrize("named", [True, False])
def test_rows_have_the_same_bits_alone_and_among_others(make: Callable[[], PreTrainedModel], named: bool) -> None:
    request = rows(named, with_routes=make is moe_model)
    reference = invariant(make, is_continuous=False)
    alone = [reference.generate(request.of_groups([row])) for row in range(NUM_ROWS)]
    for is_continuous in (False, True):
        for engine in (invariant(make, is_continuous=is_continuous), invariant(make, is_continuous=is_continuous)):
            assert differing(engine, alone, request) == 0
    # The key is what does it.
    assert differing(invariant(make, is_continuous=False, on=False), alone, request) > 0


def test_groups_have_the_bits_of_their_rows() -> None:
    request = asked(0, 4, 3, named=False)
    output = invariant(is_continuous=True).generate(request)
    reference = invariant(is_continuous=False)
    assert equal_bits(output, reference.generate(request))
    single = replace(request.of_groups([2]), seeds=request.seeds[7:8])
    assert equal_bits(output.select([7]), reference.generate(single))


def test_streams_and_feeds_of_two_engines_have_the_same_bits() -> None:
    reference = invariant(is_continuous=False)
    alone = [reference.generate(rows().of_groups([row])) for row in range(NUM_ROWS)]
    streams = Streams(invariant(is_continuous=True))
    for first in range(0, NUM_ROWS, 3):
        streams.start(asked(first, 3, 1))
    streams.join()
    assert not streams.errors
    assert all(equal_bits(streams.found[f"{row}.0"], alone[row]) for row in range(NUM_ROWS))
    for named in (True, False):
        engine = invariant(is_continuous=True)
        with feed_of(engine) as reader:
            for row in random.Random(1).sample(range(NUM_ROWS), NUM_ROWS):
                engine.add_to_feed("turns", asked(row, 1, 1, named=named), row)
            reader.wait_for(NUM_ROWS)
        assert all(equal_bits(reader.found[row], alone[row]) for row in range(NUM_ROWS))
        assert not engine._decoding._batch._batch_of  # type: ignore[union-attr,attr-defined]


def test_the_key_reaches_the_engine_and_is_refused_for_others(tmp_path: Path) -> None:
    policy = tiny_policy(write_tiny_folder(tmp_path / "model"), generation={"batch_invariant": True})
    engine = build_engine_worker(EngineSpec(policy=policy, weight_version=0))
    assert engine.batch_invariant
    recipe, on = ROOT / "configs" / "grpo_sort_cpu.yaml", "policy.generation.batch_invariant=true"
    assert load_config(recipe, [on]).policy.generation.batch_invariant
    with pytest.raises(ConfigError, match=r"policy\.generation\.batch_invariant"):
        load_config(recipe, [on, "policy.generation.backend=vllm", "cluster.launcher=ray"])


def test_rows_that_a_refit_computes_anew_have_the_same_bits_beside_others() -> None:
    def after_a_refit(num: int) -> GenerationOutput:
        """Return the second of so many rows, which got new weights when the first one had ended with one token."""
        engine = invariant(is_continuous=True)
        forced = ((5,), *(tuple(range(7 + row, 27 + row)) for row in range(1, num)))
        stream = engine.stream(replace(asked(0, num, 1, stop_token_ids=()), forced=forced))
        assert next(stream).groups == (0,)
        engine.update_weights(named_weights(tiny_model(seed=9)), version=1)
        [found] = [samples.output.select([samples.groups.index(1)]) for samples in stream if 1 in samples.groups]
        assert found.version_spans == (((0, 0), (1, 1)),)
        return found

    found = after_a_refit(2)
    assert equal_bits(found, after_a_refit(5))
    expected = scores(tiny_model(seed=9), asked(1, 1, 1).prompt_ids[0], found.token_ids.tolist())
    torch.testing.assert_close(found.logprobs[1:], expected[1:], rtol=0, atol=1e-5)
