"""Refits of policies with adapters: what is sent to whom, and how near to the policy engines sample then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl.config.backends import LoraConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.worker_groups import Call, LocalWorkerGroup, WorkerFleet, WorkerGroup, ask
from nemo_rl.errors import RefitMismatch, WorkerLost
from nemo_rl.models.adapters.lora import named_adapters
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.torch_engine.worker import EngineWorker, build_engine_worker
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.hf.loading import named_weights
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.factory import BroadcastWeightSync, PayloadWeightSync
from nemo_rl.models.weight_sync.target import RefitTarget
from tests.helpers.engine_process import parties_of, train
from tests.helpers.faulty_engines import write_receipt_model
from tests.helpers.tiny_model import tiny_policy

LORA = LoraConfig(enabled=True, rank=4, alpha=8)
MERGED = LORA.model_copy(update={"serve": "merged"})
KINDS = {"payload": PayloadWeightSync, "broadcast": lambda parties: BroadcastWeightSync(parties, address="127.0.0.1")}
ENGINES = {"payload": 2, "broadcast": 1}
"""Engines of one process cannot receive at once."""


class Counting(EngineWorker):
    """An engine that counts the kinds of refits that it gets."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.kinds: list[str] = []

    def begin_refit(self, plan, *, handles=()):  # type: ignore[no-untyped-def]
        self.kinds.append(plan.kind)
        super().begin_refit(plan, handles=handles)


class Side:
    """The worker of a policy, and parties of which it is one."""

    def __init__(self, config: PolicyConfig) -> None:
        rank = RankSpec(rank=0, world_size=1)
        self.worker = build_policy_worker(
            WorkerSpec(policy=config, rank=rank, num_steps=400, keep_reference=False, seed=0)
        )
        self.config, self.group = config, LocalWorkerGroup(lambda: self.worker)

    def parties(self, engines: list[EngineWorker], **changes: object) -> RefitParties:
        parties = parties_of(self.config, engines, self.group)
        return replace(parties, sends_adapters=self.config.lora.is_native, max_bucket_bytes=10_000, **changes)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.worker.engine.full_weights()}

    def move(self, generator: torch.Generator, size: float) -> None:
        """Change the adapter without a step, which takes longer."""
        for _, weight in named_adapters(self.worker.engine.model.hf):
            with torch.no_grad():
                local_shard(weight).add_(torch.randn(weight.shape, generator=generator), alpha=size)


@pytest.fixture
def native(folder: Path) -> Iterator[Side]:
    side = Side(tiny_policy(folder, lora=LORA))
    yield side
    side.group.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_engines_get_the_frozen_weights_once_and_then_adapters_alone(native, kind):
    engines = [Counting.from_config(native.config) for _ in range(ENGINES[kind])]
    sync: WeightSync = KINDS[kind](native.parties(engines))
    frozen = native.weights()
    adapter_bytes = sum(4 * weight.numel() for _, weight in native.worker.engine.full_adapter())
    for version in range(4):
        sync.sync(version)
        report = sync.report
        assert report.receipt.gap < 2e-5 and {engine.weight_version for engine in engines} == {version}
        assert report.num_adapters == min(2, version + 1)
        assert adapter_bytes <= report.bytes_sent - (version == 0) * sum(4 * w.numel() for w in frozen.values())
        if version:
            assert report.bytes_sent <= 1.1 * adapter_bytes and report.receipt.moved > 1e-3
            assert report.metrics()["refit/num_adapters"] == 2.0
        train(native.group, seed=version)
    assert all(engine.kinds == ["weights", *["adapter"] * 4] for engine in engines)
    assert all(torch.equal(weight, frozen[name]) for name, weight in native.weights().items())
    for engine in engines:
        held = dict(named_weights(engine._loaded_model()))
        assert all(torch.equal(held[name], weight) for name, weight in frozen.items())
        engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_in_place_of_a_lost_one_gets_both(native, kind):
    made: list[Counting] = []

    def start(number: int) -> WorkerGroup:
        made.append(Counting.from_config(native.config))
        engine = made[-1]
        return LocalWorkerGroup(lambda: engine)

    fleet = WorkerFleet([start(number) for number in range(ENGINES[kind])], start=start)
    sync: WeightSync = KINDS[kind](replace(native.parties([]), engines=fleet))
    sync.sync(0)
    sync.sync(1)
    fleet.lose(0, WorkerLost("gone", rank=0, stage="test"))
    sync.sync(2)
    first = ["weights", "adapter", "adapter"]
    assert made[-1].kinds == first[:2] and made[-1].weight_version == 2
    # The other one keeps its frozen weights.
    assert all(engine.kinds == [*first, "adapter"] for engine in made[1:-1])
    assert sync.report.receipt.gap < 2e-5
    fleet.shutdown()


def test_a_policy_whose_frozen_weights_have_changed_is_told_when_they_are_sent_again(folder):
    side = Side(tiny_policy(folder, lora=LORA))
    fleet = WorkerFleet(
        [LocalWorkerGroup(lambda: EngineWorker.from_config(side.config))],
        start=lambda _: LocalWorkerGroup(lambda: EngineWorker.from_config(side.config)),
    )
    sync = PayloadWeightSync(replace(side.parties([]), engines=fleet))
    sync.sync(0)
    name, weight = next(iter(named_weights(side.worker.engine.model.hf)))
    with torch.no_grad():
        local_shard(weight).add_(1e-3)
    fleet.lose(0, WorkerLost("gone", rank=0, stage="test"))
    with pytest.raises(RefitMismatch, match=f"frozen weights of the policy have changed .*: {name}"):
        sync.sync(1)
    fleet.shutdown()
    side.group.shutdown()


def test_an_adapter_of_other_names_or_shapes_is_refused_before_it_is_sent(native, folder):
    for lora, said in (
        (LORA.model_copy(update={"rank": 2}), "expected shape"),
        (LORA.model_copy(update={"targets": ["q_proj"]}), "unknown"),
    ):
        engine = Counting.from_config(tiny_policy(folder, lora=lora))
        with pytest.raises(ValueError, match=f"the policy's adapter does not fit this engine: .*{said}"):
            PayloadWeightSync(native.parties([engine])).sync(0)
        assert engine.kinds == ["weights"]
        engine.shutdown()


def test_an_engine_in_bfloat16_is_as_near_to_the_policy_as_its_precision(native, folder):
    generation = native.config.generation.model_copy(update={"precision": "bfloat16"})
    config = native.config.model_copy(update={"generation": generation})
    engine = EngineWorker.from_config(config)
    parties = parties_of(config, [engine], native.group)
    sync = PayloadWeightSync(replace(parties, sends_adapters=True))
    for version in range(3):
        sync.sync(version)
        train(native.group, seed=version)
        assert sync.report.receipt.gap < 0.1
    assert {slot.dtype for slot in engine.adapter_slots.known.values()} == {"bfloat16"}
    engine.shutdown()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_merged_adapter_changes_no_weight_of_the_policy_and_its_loss_is_told(folder, precision, caplog):
    config = tiny_policy(folder, lora=MERGED)
    side = Side(config)
    generation = config.generation.model_copy(update={"precision": precision})
    served = config.model_copy(update={"generation": generation})
    engine = Counting.from_config(served)
    sync = PayloadWeightSync(replace(parties_of(served, [engine], side.group), sends_adapters=False))
    frozen = side.weights()
    losses = []
    with caplog.at_level(logging.WARNING):
        for version in range(4):
            sync.sync(version)
            losses.append(sync.report.metrics().get("refit/lora_merge_loss"))
            train(side.group, seed=version)
    assert engine.kinds == ["weights"] * 4 and sync.report.num_adapters is None
    assert all(torch.equal(weight, frozen[name]) for name, weight in side.weights().items())
    # Version 0 changes nothing.
    assert losses[0] is None
    told = [record for record in caplog.records if "policy.lora.serve=merged" in record.message]
    if precision == "float32":
        assert max(losses[1:]) < 1e-3 and not told
    else:
        assert 0.1 < min(losses[1:]) < 1.0 and len(told) == 1
    engine.shutdown()
    side.group.shutdown()


def test_rows_run_on_while_an_adapter_comes_where_they_finish_under_theirs(native):
    generation = native.config.generation.model_copy(update={"in_flight": "finish"})
    config = native.config.model_copy(update={"generation": generation})
    engine = build_engine_worker(EngineSpec(policy=config, continuous=True, adapter_slots=3))
    stood_still: list[int] = []
    freeze = engine.finish_generation

    def counted() -> None:
        stood_still.append(engine.weight_version)
        freeze()

    engine.finish_generation = counted  # type: ignore[method-assign]
    parties = parties_of(config, [engine], native.group)
    sync = PayloadWeightSync(replace(parties, sends_adapters=True, rows_finish=True, one_by_one=True))
    for version in range(4):
        sync.sync(version)
        train(native.group, seed=version)
        assert sync.report.receipt.gap < 2e-5
    # For the frozen weights alone.
    assert stood_still == [-1] and engine.adapter_versions() == (1, 2, 3)
    engine.shutdown()


def test_engines_without_adapters_say_so(native):
    class Plain(RefitTarget):
        """An engine that keeps to what is abstract."""

    Plain.__abstractmethods__ = frozenset()
    with pytest.raises(NotImplementedError, match="Plain receives no adapters .* policy.lora.serve=merged"):
        Plain().match_adapter({})  # type: ignore[abstract]
    assert Plain().adapter_versions() == ()  # type: ignore[abstract]


def test_adapters_of_experts_are_served_beside_those_of_linear_layers(tmp_path):
    lora = LORA.model_copy(update={"targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]})
    side = Side(tiny_policy(write_receipt_model(tmp_path / "model"), lora=lora))
    engine = EngineWorker.from_config(side.config)
    sync = PayloadWeightSync(side.parties([engine]))
    for version in range(4):
        # Rows of three versions in a batch are among those that the receipt scores.
        sync.sync(version)
        train(side.group, seed=version)
        assert sync.report.receipt.gap < 2e-5
    assert sync.report.receipt.moved > 1e-4 and sync.report.receipt.num_tensors == 12
    engine.shutdown()
    side.group.shutdown()


@pytest.mark.slow
@pytest.mark.full
def test_no_false_alarm_in_1000_refits(native):
    engines = [EngineWorker.from_config(native.config)]
    sync = PayloadWeightSync(native.parties(engines))
    generator, gaps = torch.Generator().manual_seed(0), []
    native.group.run(Call(request=ask(PolicyWorker.prepare_for_lp_inference), stage="test", timeout_s=60))
    for version in range(1000):
        sync.sync(version)
        gaps.append(sync.report.receipt.gap)
        native.group.run(Call(request=ask(PolicyWorker.prepare_for_lp_inference), stage="test", timeout_s=60))
        native.move(generator, 1e-3)
    assert len(gaps) == 1000 and sync.report.num_adapters == 2
    for engine in engines:
        engine.shutdown()
