"""Routes that the embedded engine records: those of every token that was fed, in the rows' own order."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.errors import ConfigError
from nemo_rl.experience.scheduler import split_request
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.head.logprobs import Sampling
from nemo_rl.models.hf.modules import HFRouters
from tests.helpers.hf_reference import logprobs_from_logits
from tests.helpers.model_families import config_of
from tests.helpers.tiny_model import tiny_model

# A third of the vocabulary, so that rows end at very different times.
STOPS = tuple(range(0, 320, 9))


def moe_model() -> PreTrainedModel:
    """Layer 0 is dense, layers 1 and 2 choose 2 of 4 experts by clearly different scores."""
    torch.manual_seed(4)
    config = config_of("qwen3_moe")
    config.num_hidden_layers = 3
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "experts" in name or "gate.weight" in name:
                weight.normal_(0, 0.4)
    return model.eval()


def request(num_prompts: int = 6, group: int = 3, **changes: object) -> GenerationRequest:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(7, 300) for _ in range(rng.randint(2, 9))) for _ in range(num_prompts)]
    if prompts:
        prompts[-1] = prompts[0]
    values = {"temperature": 1.0, "max_new_tokens": 10, "stop_token_ids": STOPS}
    return GenerationRequest(
        prompt_ids=tuple(prompts),
        seeds=tuple(range(100, 100 + num_prompts * group)),
        sampling=SamplingParams(**{**values, **changes}),
        with_routes=True,
    )


def generate(asked: GenerationRequest, **changes: object) -> GenerationOutput:
    engine = TorchEngine(
        moe_model(), **{"tokenizer": None, "max_total_length": 64, "weight_version": 0, "max_batch_size": 5, **changes}
    )
    return engine.generate(asked)


def rows(asked: GenerationRequest, output: GenerationOutput) -> list[tuple[list[int], int, torch.Tensor, torch.Tensor]]:
    """Prompt and response tokens, prompt length, log-probabilities, routes of each row."""
    assert output.routes is not None
    lengths = output.lengths.tolist()
    parts = zip(
        output.token_ids.split(lengths),
        output.logprobs.split(lengths),
        output.routes.ids.split(output.routes.lengths.tolist()),
        strict=True,
    )
    found = []
    for i, (tokens, values, routes) in enumerate(parts):
        prompt = asked.prompt_ids[i // asked.group_size]
        found.append(([*prompt, *tokens.tolist()], len(prompt), values, routes))
    return found


def test_there_is_a_route_for_every_token_but_the_last():
    asked = request()
    output = generate(asked)
    assert output.routes is not None and output.routes.shape.layers == (1, 2)
    assert output.routes.ids.dtype == torch.uint8 and output.routes.ids.shape[1:] == (2, 2)
    assert output.routes.starts.tolist() == [0] * 18
    expected = [len(ids) - 1 for ids, *_ in rows(asked, output)]
    assert output.routes.lengths.tolist() == expected
    assert len(set(output.lengths.tolist())) > 3 and len(set(expected)) > 4


@pytest.mark.parametrize("batch", [5, 1024])
def test_recorded_routes_replayed_in_one_forward_give_the_log_probabilities_of_the_rollout(batch: int):
    asked, model = request(), moe_model()
    routers, sampling = HFRouters(model), Sampling(temperature=1.0, top_k=None, top_p=1.0)
    for ids, num_prompt, values, routes in rows(asked, generate(asked, max_batch_size=batch)):
        own: dict[int, torch.Tensor] = {}
        with torch.no_grad(), routers.choosing(own.__setitem__):
            model(torch.tensor([ids[:-1]]), use_cache=False)
        recomputed = torch.stack([own[layer] for layer in routers.layers], dim=1)
        assert torch.equal(recomputed, routes.long())

        forced = {layer: routes[:, i].long() for i, layer in enumerate(routers.layers)}
        with torch.no_grad(), routers.choosing(lambda layer, _, forced=forced: forced[layer]):
            logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits
        padded = torch.nn.functional.pad(logits, (0, 0, 0, 1))
        replayed = logprobs_from_logits(padded, torch.tensor([ids]), sampling=sampling)[0, num_prompt:]
        torch.testing.assert_close(replayed, values, rtol=0, atol=1e-5)


def test_recording_changes_no_sample_and_what_is_not_asked_for_is_not_recorded():
    asked = request()
    recorded = generate(asked)
    engine = TorchEngine(moe_model(), tokenizer=None, max_total_length=64, weight_version=0, max_batch_size=5)
    silent = GenerationRequest(prompt_ids=asked.prompt_ids, seeds=asked.seeds, sampling=asked.sampling)
    plain = engine.generate(silent)
    assert plain.routes is None
    assert torch.equal(plain.token_ids, recorded.token_ids) and torch.equal(plain.logprobs, recorded.logprobs)
    assert not any(module._forward_hooks for module in engine._loaded_model().modules())
    engine.generate(asked)
    again = engine.generate(silent)
    assert again.routes is None and torch.equal(again.token_ids, plain.token_ids)


def test_routes_follow_their_rows_through_several_engines():
    asked = request()
    whole = generate(asked).routes
    parts = [generate(part) for part in split_request(asked, num_engines=4, batch_rows=1024)]
    joined = GenerationOutput.joined([*parts, generate(request(0, 0))]).routes
    assert whole is not None and joined is not None and joined.shape == whole.shape
    assert torch.equal(joined.ids, whole.ids) and torch.equal(joined.lengths, whole.lengths)
    assert torch.equal(joined.starts, whole.starts)


def test_a_row_of_one_response_token_has_the_routes_of_its_prompt():
    asked = request(max_new_tokens=1)
    output = generate(asked)
    assert output.routes is not None
    assert output.routes.lengths.tolist() == [len(prompt) for prompt in asked.prompt_ids for _ in range(3)]


def test_a_dense_model_has_no_routes_to_record():
    engine = TorchEngine(tiny_model(), tokenizer=None, max_total_length=64, weight_version=0)
    with pytest.raises(ConfigError, match="'qwen3' has no routed experts"):
        engine.generate(request())
