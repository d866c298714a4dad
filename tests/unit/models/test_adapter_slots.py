"""Versions of an adapter in the embedded engine: rows of several side by side, and rows that finish under theirs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.config.backends import LoraConfig
from nemo_rl.errors import WorkerError
from nemo_rl.models.adapters.lora import adapted_layers, attach_adapters, folded, named_adapters, without_adapters
from nemo_rl.models.generation.adapter_versions import AdapterVersions
from nemo_rl.models.generation.interfaces import BASE, GenerationOutput, GenerationRequest
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.models.generation.torch_engine.adapters import AdapterSlots
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.generation.turn_batch import ContinuousSpec
from tests.helpers.faulty_engines import receipt_model
from tests.helpers.tiny_model import tiny_model
from tests.unit.models.test_continuous import DEADLINE_S, Slow, Streams, asked, assert_near, equal_bits

LORA = LoraConfig(enabled=True, rank=4, alpha=8)


def adapter(version: int, model: PreTrainedModel | None = None) -> dict[str, torch.Tensor]:
    """Return A and s B of a version: large enough to change what is sampled."""
    generator = torch.Generator().manual_seed(version)
    shapes = [layer.shapes(LORA.rank) for layer in adapted_layers(model or tiny_model(), LORA)]
    return {name: 0.1 * torch.randn(shape, generator=generator) for each in shapes for name, shape in each.items()}


def engine_of(*versions: int, slots: int = 3, batch_invariant: bool = False, **spec: Any) -> TorchEngine:
    """Return an engine that holds these versions and uses the last one."""
    model = tiny_model()
    engine = TorchEngine(
        model,
        tokenizer=None,
        max_total_length=64,
        batch_invariant=batch_invariant,
        weight_version=0,
        adapters=AdapterSlots(model, LORA, most=slots),
    )
    for version in versions:
        engine.update_adapter(adapter(version).items(), version=version)
    if spec:
        engine.decode_continuously(ContinuousSpec(number=0, deadline_s=DEADLINE_S, **spec))
    return engine


def alone(request: GenerationRequest, version: int, **changes: Any) -> GenerationOutput:
    """Return the rows of an engine that holds one version, or none."""
    engine = engine_of(max(version, 0), **changes)
    plain = replace(request, names=(), adapters=(version,) * len(request.prompt_ids))
    return engine.generate(plain)


def test_one_version_has_the_bits_of_the_trainers_forward() -> None:
    trained = tiny_model()
    attach_adapters(trained, adapted_layers(trained, LORA), LORA)
    given = adapter(3)
    for name, weight in named_adapters(trained):
        weight.data.copy_(given[name] / LORA.scale if "lora_B" in name else given[name])
    sent = dict(folded(((name, weight.detach()) for name, weight in named_adapters(trained)), LORA.scale))
    served = tiny_model()
    slots = AdapterSlots(served, LORA, most=1)
    slots.add(3, sent.items())
    ids = torch.arange(40).reshape(4, 10) + 7
    with torch.no_grad():
        with slots.serving([3] * 4):
            assert torch.equal(served(ids).logits, trained(ids).logits)
        with slots.serving([BASE] * 4), without_adapters(trained):
            assert torch.equal(served(ids).logits, trained(ids).logits)
        with slots.serving([3, BASE, BASE, 3]):
            mixed = served(ids).logits
        torch.testing.assert_close(mixed[[0, 3]], trained(ids).logits[[0, 3]], rtol=0, atol=1e-5)
        assert (mixed[1] - trained(ids).logits[1]).abs().max() > 0.1


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_of_one_prompt_and_several_versions_are_what_each_is_alone(batch_invariant: bool) -> None:
    engine = engine_of(1, 2, batch_invariant=batch_invariant)
    request = asked(0, 4, named=False)
    versions = (BASE, 1, 2)
    # Equal prompts with different versions stand side by side, and must share no cache.
    mixed = replace(
        request,
        prompt_ids=tuple(prompt for prompt in request.prompt_ids for _ in versions),
        seeds=tuple(seed for group in range(4) for _ in versions for seed in request.seeds[3 * group : 3 * group + 3]),
        adapters=versions * 4,
    )
    output = engine.generate(mixed)
    found = []
    for place, version in enumerate(versions):
        rows = [9 * group + 3 * place + row for group in range(4) for row in range(3)]
        expected = alone(request, version, batch_invariant=batch_invariant)
        found.append(expected.token_ids.tolist())
        if batch_invariant:
            assert equal_bits(output.select(rows), expected)
        else:
            assert_near(output.select(rows), expected)
    assert found[0] != found[1] != found[2] != found[0], "the adapters change what is sampled"


def test_tensors_that_do_not_fit_are_refused_and_the_version_before_stays() -> None:
    engine = engine_of(1)
    before = engine.generate(asked(0, named=False))
    given = adapter(2)
    name, *others = given
    for wrong in (
        {each: given[each] for each in others},
        given | {"model.layers.7.q.lora_A.weight": given[name]},
        given | {name: given[name].T},
    ):
        with pytest.raises(ValueError, match="does not fit this engine: .*(missing|unknown|expected shape)"):
            engine.update_adapter(wrong.items(), version=2)
    assert engine.weight_version == 1 and equal_bits(engine.generate(asked(0, named=False)), before)


def test_no_row_is_sampled_without_an_adapter_or_with_one_that_has_gone() -> None:
    with pytest.raises(WorkerError, match="expected an adapter, none was received yet"):
        engine_of().generate(asked(0, named=False))
    engine = engine_of(1, 2, 3, slots=2)
    assert engine.adapter_slots.versions.held == (2, 3)
    with pytest.raises(WorkerError, match="expected version 1 of the adapter among those that are held, got 2, 3"):
        engine.generate(replace(asked(0, named=False), adapters=(1,)))
    plain = TorchEngine(tiny_model(), tokenizer=None, max_total_length=64, weight_version=0)
    with pytest.raises(NotImplementedError, match="serves no adapters"):
        plain.generate(replace(asked(0, named=False), adapters=(1,)))


def test_versions_that_rows_have_are_never_retired() -> None:
    versions = AdapterVersions(most=3)
    for version in (1, 2, 3):
        assert versions.begin(version) == ()
        versions.hold(version)
        versions.use(version)
    assert not versions.has_room(4, {1, 2}) and versions.has_room(4, {2})
    with pytest.raises(WorkerError, match="expected a free slot for version 4 of the adapter, got 3 versions in use"):
        versions.begin(4, live={1, 2})
    assert versions.begin(4, live={1}) == (2,) and versions.held == (1, 3)
    # Sent again, to engines of which some were lost in the refit before.
    assert versions.begin(3) == () and versions.held == (1, 3)


def _finishing(*, batch_invariant: bool = False) -> tuple[Streams, TorchEngine]:
    """Return rows of which some run when another adapter comes, and others join after it."""
    engine = engine_of(0, places=24, in_flight="finish", batch_invariant=batch_invariant)
    slow, streams = Slow(engine._loaded_model()), Streams(engine)
    slow.stop_after = 6
    streams.start(asked(0, 4, stop_token_ids=()))
    assert slow.reached.wait(20)
    refit = threading.Thread(target=lambda: engine.update_adapter(adapter(1).items(), version=1))
    refit.start()
    # The engine is in the middle of a turn, so that the change waits for its end.
    time.sleep(0.05)
    assert engine.weight_version == 0
    slow.gate.set()
    refit.join(20)
    assert engine.weight_version == 1 and not engine._decoding.is_frozen
    streams.start(asked(4, 4, stop_token_ids=()))
    streams.join()
    assert not streams.errors, streams.errors
    return streams, engine


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_finish_under_their_adapter_beside_rows_of_the_next(batch_invariant: bool) -> None:
    streams, engine = _finishing(batch_invariant=batch_invariant)
    old, new = asked(0, 4, stop_token_ids=()), asked(4, 4, stop_token_ids=())
    for first, version in ((old, 0), (new, 1)):
        expected = alone(first, version, batch_invariant=batch_invariant)
        for place, name in enumerate(first.names):
            found, rows = streams.found[name], expected.select(range(3 * place, 3 * place + 3))
            assert found.row_versions == (version,) * 3 and found.version_spans is None
            if batch_invariant:
                assert equal_bits(found, rows)
            else:
                assert_near(found, rows)
    swap = next(entry for entry in streams.schedule if entry.kind == "swap")
    joins = [entry for entry in streams.schedule if entry.kind == "join"]
    ended = max(entry.turn for entry in joins) + 24
    assert swap.version == 1 and joins[0].turn < swap.turn <= joins[-1].turn < 24 < ended, "both were in one batch"
    assert engine.adapter_slots.versions.held == (0, 1)


def test_a_refit_waits_for_a_slot_while_rows_have_all_versions() -> None:
    engine = engine_of(0, 1, slots=2, places=24, in_flight="finish")
    slow, streams = Slow(engine._loaded_model()), Streams(engine)
    slow.stop_after = 4
    streams.start(replace(asked(0, 1, stop_token_ids=()), adapters=(0,)))
    assert slow.reached.wait(20)
    refit = threading.Thread(target=lambda: engine.update_adapter(adapter(2).items(), version=2))
    refit.start()
    slow.stop_after = None
    slow.gate.set()
    refit.join(20)
    streams.join()
    # Version 0 went when its last row had ended.
    assert engine.adapter_slots.versions.held == (1, 2) and streams.found["0.0"].row_versions == (0,) * 3


def test_rows_of_a_call_without_names_have_one_version() -> None:
    engine = engine_of(0, places=2, in_flight="finish")
    slow, found = Slow(engine._loaded_model()), list[GenerationOutput]()
    slow.stop_after = 3
    request = asked(0, 3, named=False)
    call = threading.Thread(target=lambda: found.append(engine.generate(request)))
    call.start()
    assert slow.reached.wait(20)
    slow.stop_after = None
    slow.gate.set()
    engine.update_adapter(adapter(1).items(), version=1)
    call.join(20)
    assert found[0].row_versions == (0,) * 9
    assert_near(found[0], alone(request, 0))
    assert engine.generate(request).row_versions == (1,) * 9


def _run(script: Sequence[ScheduleEntry] = (), *, order: int) -> Streams:
    """Run groups in several streams, with two adapters that come in between."""
    engine = engine_of(0, places=14, in_flight="finish", script=tuple(script))
    streams, rng = Streams(engine), random.Random(order)
    requests = [asked(number, 2, group=4, max_new_tokens=40) for number in range(0, 12, 2)]
    for request in rng.sample(requests, len(requests)):
        streams.start(request, delay_s=rng.random() * 0.05)
    for version in (1, 2):
        time.sleep(rng.random() * 0.05)
        engine.update_adapter(adapter(version).items(), version=version)
    streams.join()
    assert not streams.errors, streams.errors
    streams.schedule += [entry for samples in engine.stream(asked(40, 1)) for entry in samples.schedule]
    streams.schedule.sort(key=lambda entry: entry.number)
    return streams


def test_a_script_makes_batches_of_several_versions_again() -> None:
    first = _run(order=0)
    assert [entry.version for entry in first.schedule if entry.kind == "swap"] == [1, 2]
    assert len({output.row_versions for output in first.found.values()}) > 1, "rows have several versions"
    for order in (1, 2):
        again = _run(first.schedule, order=order)
        assert again.schedule == first.schedule
        for name, output in first.found.items():
            assert equal_bits(again.found[name], output) and again.found[name].row_spans == output.row_spans


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "drain"])
def test_rows_that_do_not_finish_go_on_with_the_next_adapter(in_flight: str) -> None:
    engine = engine_of(0, places=24, in_flight=in_flight)
    slow, streams = Slow(engine._loaded_model()), Streams(engine)
    slow.stop_after = 6
    request = asked(0, 2, stop_token_ids=())
    streams.start(request)
    assert slow.reached.wait(20)
    slow.stop_after = None
    slow.gate.set()
    engine.finish_generation()
    engine.update_adapter(adapter(1).items(), version=1)
    engine.prepare_for_generation()
    streams.join()
    assert not streams.errors, streams.errors
    for name in request.names:
        for spans in streams.found[name].row_spans:
            assert [version for _, version in spans] == ([0] if in_flight == "drain" else [0, 1])


def test_experts_of_rows_with_several_versions_are_what_each_is_alone() -> None:
    model = receipt_model()
    lora = LORA.model_copy(update={"targets": ["o_proj", "experts.gate_up_proj", "experts.down_proj"]})
    slots = AdapterSlots(model, lora, most=2)
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        shapes = {name: slot.shape for name, slot in slots.known.items()}
        slots.add(
            version, {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}.items()
        )
    ids, versions, found = torch.arange(40).reshape(4, 10) + 7, [2, BASE, 1, 2], {}
    with torch.no_grad():
        for version in {*versions}:
            with slots.serving([version] * 4):
                found[version] = model(ids).logits
        with slots.serving(versions):
            mixed = model(ids).logits
        torch.testing.assert_close(found[BASE], receipt_model()(ids).logits, rtol=0, atol=0)
    for row, version in enumerate(versions):
        torch.testing.assert_close(mixed[row], found[version][row], rtol=0, atol=1e-5)
    assert min((found[one] - found[other]).abs().max() for one, other in ((1, 2), (1, BASE), (2, BASE))) > 0.1
