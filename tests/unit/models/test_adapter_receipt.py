"""The receipt of a refit of an adapter finds every planted fault in both engines, and names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl.config.backends import LoraConfig
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet, WorkerGroup
from nemo_rl.errors import RefitMismatch
from nemo_rl.models.weight_sync.base import RefitParties
from nemo_rl.models.weight_sync.factory import PayloadWeightSync
from tests.helpers.case_selection import params
from tests.helpers.engine_process import (
    NO_VLLM,
    EngineProxy,
    RefitPair,
    has_vllm,
    parties_of,
    policy_of,
    train,
    vllm_policy,
    vllm_process,
)
from tests.helpers.faulty_adapters import (
    BASE_CHANGED,
    BEHAVIOUR,
    CONTENT,
    FaultyAdapterVllm,
    FaultyAdapterWorker,
    write_adapter_model,
)
from tests.helpers.tiny_model import tiny_policy

pytestmark = pytest.mark.slow

LORA = LoraConfig(enabled=True, rank=4, alpha=8)
BUCKET_BYTES = 10_000
SOME = (*BEHAVIOUR, "previous version", "scale forgotten")
"""Of `make test`: what an engine computes is compared in one way, whatever is wrong with its adapter."""
APART = "log-probabilities.* from the policy's, more than"


def adapter_parties(config, engines, policy) -> RefitParties:
    parties = parties_of(config, engines, policy)
    return replace(parties, sends_adapters=True, max_bucket_bytes=BUCKET_BYTES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter_model(tmp_path_factory.mktemp("receipt") / "model")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[WorkerGroup]:
    with policy_of(tiny_policy(folder, lora=LORA)) as group:
        yield group


@pytest.fixture(scope="module")
def embedded(folder: Path, policy: WorkerGroup) -> Iterator[RefitPair]:
    config = tiny_policy(folder, lora=LORA)
    engine = FaultyAdapterWorker.from_config(config)
    parties = adapter_parties(config, [engine], policy)
    bench = RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=engine.plant)
    bench.sync.sync(0)
    bench.plant(fault=None)
    # The version before the first that a test spoils.
    bench.step()
    yield bench
    engine.shutdown()


@pytest.fixture(scope="module")
def vllm(folder: Path, policy: WorkerGroup) -> Iterator[RefitPair]:
    if not has_vllm():
        pytest.skip(NO_VLLM)
    config = vllm_policy(folder, lora=LORA)
    with vllm_process(config, build=FaultyAdapterVllm) as child:
        proxy = EngineProxy(child)
        parties = adapter_parties(config, [proxy], policy)
        bench = RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=proxy.plant)
        bench.sync.sync(0)
        bench.step()
        yield bench


def check_found(bench: RefitPair, fault: str, said: str) -> None:
    """A refit with the fault fails, and the next one, without it, succeeds."""
    bench.plant(fault=fault)
    try:
        with pytest.raises(RefitMismatch, match=said) as caught:
            bench.step()
    finally:
        bench.plant(fault=None)
    assert f"weight version {bench.version}: engine 0 of 1: " in str(caught.value) and bench.sync.version == -1
    bench.step()
    assert bench.sync.version == bench.version


@pytest.mark.parametrize("fault", CONTENT)
def test_a_fault_in_the_embedded_engine_is_named_before_the_adapter_is_used(embedded, fault):
    check_found(embedded, fault, CONTENT[fault])


@pytest.mark.parametrize("fault", params([*CONTENT, *BEHAVIOUR], SOME))
def test_a_fault_in_the_embedded_engine_shows_in_what_it_computes(embedded, fault, monkeypatch):
    monkeypatch.setattr("nemo_rl.models.weight_sync.receipt.check.content_problems", lambda *_: None)
    check_found(embedded, fault, APART)


def test_a_frozen_weight_that_has_changed_in_the_embedded_engine_is_named(embedded):
    check_found(embedded, BASE_CHANGED, "frozen weights have changed: .*layernorm.weight has other values")


@pytest.mark.parametrize("fault", CONTENT)
def test_a_fault_in_vllm_is_named_before_the_adapter_is_used(vllm, fault):
    check_found(vllm, fault, CONTENT[fault])


@pytest.mark.parametrize("fault", params([*CONTENT, *BEHAVIOUR, BASE_CHANGED], [*SOME, BASE_CHANGED]))
def test_a_fault_in_vllm_shows_in_what_it_computes(vllm, fault, monkeypatch):
    monkeypatch.setattr("nemo_rl.models.weight_sync.receipt.check.content_problems", lambda *_: None)
    check_found(vllm, fault, APART)


def test_a_failed_refit_leaves_the_adapter_before_in_use(folder, policy):
    config = tiny_policy(folder, lora=LORA)
    engine = FaultyAdapterWorker.from_config(config)
    parties = adapter_parties(config, [engine], policy)
    bench = RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=engine.plant)
    bench.sync.sync(0)
    bench.step()
    before = score(engine, parties)
    engine.plant("scaled twice")
    with pytest.raises(RefitMismatch):
        bench.step()
    assert engine.weight_version == 1 and score(engine, parties) == before
    engine.shutdown()


def score(engine: FaultyAdapterWorker, parties: RefitParties) -> tuple[float, ...]:
    assert parties.receipt is not None
    return engine.answer_receipt(parties.receipt.probe).logprobs


def test_one_replica_that_has_the_adapter_before_is_told_from_the_other(folder, policy):
    config = tiny_policy(folder, lora=LORA)
    engines = [FaultyAdapterWorker.from_config(config) for _ in range(2)]
    sync = PayloadWeightSync(adapter_parties(config, engines, policy))
    sync.sync(0)
    assert sync.report.receipt.replica_gap == 0.0
    train(policy)
    engines[1].plant("previous version")
    with pytest.raises(RefitMismatch, match="weight version 1: engine 1 of 2: .* that of the version before") as caught:
        sync.sync(1)
    assert "engine 0 of 2" not in str(caught.value)
    for engine in engines:
        engine.shutdown()


def test_a_vllm_replica_that_has_the_adapter_before_is_told_from_the_other(folder, policy, vllm):
    config = tiny_policy(folder, lora=LORA)
    good, proxy = FaultyAdapterWorker.from_config(config), vllm.parties.engines
    fleet = WorkerFleet([LocalWorkerGroup(lambda: good), *proxy.members])
    sync = PayloadWeightSync(replace(vllm.parties, engines=fleet))
    sync.sync(0)
    train(policy)
    vllm.plant(fault="previous version")
    with pytest.raises(RefitMismatch, match="weight version 1: engine 1 of 2: .* that of the version before"):
        sync.sync(1)
    vllm.plant(fault=None)
    good.shutdown()
