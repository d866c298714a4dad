"""Adapters in vLLM: rows of several versions and of none side by side, and what it cannot serve is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.config.backends import LoraConfig
from nemo_rl.models.adapters.lora import adapted_layers, attach_adapters, named_adapters
from nemo_rl.models.generation.interfaces import BASE, EngineSpec, GenerationOutput, GenerationRequest
from tests.helpers.engine_process import NO_VLLM, EngineProcess, has_vllm, vllm_policy, vllm_process
from tests.helpers.model_families import dense_model, detached_weights, write_dense, write_moe
from tests.unit.models.test_vllm_continuous import PLACES, ContinuousVllm, _asked, _scores

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)]

LORA = LoraConfig(enabled=True, rank=3, alpha=6)
"""A rank for which vLLM makes larger slots."""


class AdapterVllm(ContinuousVllm):
    """Counts what vLLM has registered, and lets the slot be used that is to stay empty."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(replace(spec, adapter_slots=3))

    def registered(self) -> list[int]:
        [found] = self.worker._engine().collective_rpc(_registered)
        return found

    def fill_guard(self, version: int) -> None:
        self.worker._engine().collective_rpc(_fill_guard, args=(version + 1,))


def _registered(worker: object) -> list[int]:
    return sorted(worker.model_runner.lora_manager.list_adapters())  # type: ignore[attr-defined]


def _fill_guard(worker: object, number: int) -> None:
    manager = worker.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
    slot = manager.lora_index_to_id.index(number)
    for module in manager.modules.values():
        for stacked in (*module.lora_a_stacked, *module.lora_b_stacked):
            stacked[-1] = stacked[slot]


def adapter(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = [layer.shapes(LORA.rank) for layer in adapted_layers(dense_model(), LORA)]
    return {name: 0.1 * torch.randn(shape, generator=generator) for each in shapes for name, shape in each.items()}


def model_of(version: int) -> PreTrainedModel:
    """Return the trainer's model with this version, or without any."""
    model = dense_model()
    if version != BASE:
        given = adapter(version)
        attach_adapters(model, adapted_layers(model, LORA), LORA)
        for name, weight in named_adapters(model):
            weight.data.copy_(given[name] / LORA.scale if "lora_B" in name else given[name])
    return model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = write_dense(tmp_path_factory.mktemp("vllm") / "model")
    generation = {"max_batch_size": PLACES, "in_flight": "finish"}
    policy = vllm_policy(folder, generation=generation, max_total_sequence_length=128, lora=LORA)
    moe = write_moe(tmp_path_factory.mktemp("vllm") / "moe")
    refused = (
        vllm_policy(moe, lora=LORA),
        vllm_policy(folder, lora=LORA.model_copy(update={"rank": 513})),
        vllm_policy(folder, lora=LORA, generation={"vllm_cfg": {"kv_cache_gib": 0.05, "pipeline_parallel_size": 2}}),
    )
    with vllm_process(policy, build=AdapterVllm, refused=refused) as child:
        child("update_weights", weights=detached_weights(dense_model(seed=0)), version=BASE)
        yield child


def check(request: GenerationRequest, output: GenerationOutput, versions: list[int]) -> None:
    """Every log-probability is the trainer's under the version of its row."""
    lengths, size = output.lengths.tolist(), request.group_size
    rows = zip(output.token_ids.split(lengths), output.logprobs.split(lengths), versions, strict=True)
    models = {version: model_of(version) for version in set(versions)}
    for row, (tokens, values, version) in enumerate(rows):
        expected = _scores(models[version], request.prompt_ids[row // size], tokens.tolist())
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


def test_what_vllm_cannot_serve_is_refused(engine: EngineProcess) -> None:
    experts, rank, parts = engine.refusals
    assert experts.startswith("ConfigError: policy.lora.serve: native, but with adapters vLLM computes experts")
    assert rank.startswith("ConfigError: policy.lora.rank: vLLM serves ranks up to 512, got 513")
    assert parts.startswith("ConfigError: policy.lora.serve: native, but vLLM of several processes")


def test_rows_of_several_versions_and_of_none_share_a_batch(engine: EngineProcess) -> None:
    for version in (0, 1):
        assert engine("update_adapter", adapter=list(adapter(version).items()), version=version) == version
    engine("prepare_for_generation")
    request = _asked(0, 3, named=False)
    # Rows of one prompt share no cached block across versions.
    versions = (BASE, 0, 1)
    mixed = replace(
        request,
        prompt_ids=tuple(prompt for prompt in request.prompt_ids for _ in versions),
        seeds=tuple(range(27)),
        adapters=versions * 3,
    )
    of_rows = [version for _ in range(3) for version in versions for _ in range(3)]
    output = engine("generate", request=mixed)
    assert list(output.row_versions) == of_rows
    check(mixed, output, of_rows)
    # What stands in the last slot is given to rows without an adapter, when others are in their batch.
    engine("fill_guard", version=1)
    with pytest.raises(AssertionError):
        check(mixed, engine("generate", request=mixed), of_rows)


def test_adapters_stay_when_the_frozen_weights_come_again(engine: EngineProcess) -> None:
    engine("update_adapter", adapter=list(adapter(4).items()), version=4)
    engine("update_weights", weights=detached_weights(dense_model(seed=0)), version=BASE)
    assert engine("use_adapter", version=4) == 4
    engine("prepare_for_generation")
    request = _asked(0, 2, named=False)
    check(request, engine("generate", request=request), [4] * 6)


def test_rows_finish_under_their_adapter_and_versions_are_retired(engine: EngineProcess) -> None:
    engine("update_adapter", adapter=list(adapter(5).items()), version=5)
    engine("start", request=_asked(0, 2))
    engine("wait_for_turns", count=5)
    for version in (6, 7):
        engine("update_adapter", adapter=list(adapter(version).items()), version=version)
    engine("start", request=_asked(2, 2))
    found, schedule = engine("join")
    for first, version in ((0, 5), (2, 7)):
        for number in (first, first + 1):
            output = found[f"{number}.0"]
            assert output.row_versions == (version,) * 3
            check(_asked(number), output, [version] * 3)
    kinds = [(entry.kind, entry.version) for entry in schedule]
    join = ("join", None)
    # There is room for one group more beside the first two.
    assert kinds[-5:] == [join, ("swap", 6), ("swap", 7), join, join] and schedule[-2].turn < 40
    for version in range(8, 20):
        engine("update_adapter", adapter=list(adapter(version).items()), version=version)
        assert engine("registered") == [number + 1 for number in engine("adapter_versions")]
        assert len(engine("registered")) == 3


def test_names_that_vllm_would_drop_are_refused(engine: EngineProcess) -> None:
    held = engine("adapter_versions")
    given = adapter(30)
    unknown = given | {"model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(3, 64)}
    with pytest.raises(RuntimeError, match="does not fit this engine: model.layers.9.self_attn.q_proj.lora_A.weight"):
        engine("update_adapter", adapter=list(unknown.items()), version=30)
    assert engine("adapter_versions") == held and engine("weight_version") == held[-1]
