"""The receipt of a refit finds every planted fault in both engines, names it, and passes what is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet, WorkerGroup
from nemo_rl.errors import RefitMismatch, WorkerLost
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
from tests.helpers.faulty_engines import (
    EXPERTS,
    HEAD,
    LAYER_1,
    NORM,
    SQUARE,
    FaultyVllm,
    FaultyWorker,
    Q,
    write_receipt_model,
)
from tests.helpers.tiny_model import tiny_policy

pytestmark = pytest.mark.slow

DELTAS = 1000
"""Refits of which one would be whole, so that all but the first of a test are deltas."""
APART = "its log-probabilities are .* from the policy's, more than"
NAMED = {
    "not delivered": f"{SQUARE} is that of the version before",
    "previous version": f"{NORM} is that of the version before",
    "experts swapped": f"weights are not what was sent: {EXPERTS}.",
    "q and k swapped": f"{Q} has the values of {Q.replace('q_proj', 'k_proj')}",
    "transposed": f"{SQUARE} has other values",
    "norm scaled": f"{NORM} has other values",
    "tied head left behind": f"{HEAD} is that of the version before",
    "layers off by one": f"{Q} has the values of {LAYER_1}self_attn.q_proj.weight",
    "version without weights": "weights are not what was sent",
}
"""What the receipt says of the embedded engine."""
IN_VLLM = {
    **NAMED,
    "not delivered": f"{SQUARE} has other values .* got nothing",
    "experts swapped": f"{EXPERTS}.* in vLLM as {EXPERTS}.0",
    "tied head left behind": "embed_tokens.weight has other values .* in the packed copy of vLLM's lm_head",
    "stale prefix cache": "its prefix cache has kept [0-9]+ tokens of prompts",
    "one stale block": "its prefix cache has kept 32 tokens of prompts",
    "experts not packed": APART,
}
"""And of vLLM, in which the faults are planted between what it was handed and what its loaders are given."""
SOME = ("not delivered", "experts swapped", "tied head left behind")
"""Of `make test` where each fault is found in another way already: one per kind of weight."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_receipt_model(tmp_path_factory.mktemp("receipt") / "model")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[WorkerGroup]:
    with policy_of(tiny_policy(folder)) as group:
        yield group


@pytest.fixture(scope="module")
def embedded(folder: Path, policy: WorkerGroup) -> Iterator[RefitPair]:
    engine = FaultyWorker.from_config(tiny_policy(folder))
    parties = parties_of(tiny_policy(folder), [engine], policy)
    bench = RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=engine.plant)
    bench.sync.sync(0)
    yield bench
    engine.shutdown()


@pytest.fixture(scope="module")
def deltas(embedded: RefitPair) -> RefitPair:
    """The same engine, to which only what has changed is sent."""
    parties = replace(embedded.parties, delta_full_every=DELTAS)
    bench = RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=embedded.plant, version=DELTAS)
    bench.sync.sync(DELTAS)
    return bench


@pytest.fixture(scope="module")
def vllm(folder: Path, policy: WorkerGroup) -> Iterator[tuple[RefitPair, EngineProxy]]:
    if not has_vllm():
        pytest.skip(NO_VLLM)
    config = vllm_policy(folder)
    with vllm_process(config, build=FaultyVllm) as child:
        proxy = EngineProxy(child)
        parties = parties_of(config, [proxy], policy)
        bench = RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=proxy.plant)
        bench.sync.sync(0)
        yield bench, proxy


@pytest.fixture(scope="module")
def vllm_deltas(vllm: tuple[RefitPair, EngineProxy]) -> RefitPair:
    parties = replace(vllm[0].parties, delta_full_every=DELTAS)
    bench = RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=vllm[0].plant, version=DELTAS)
    bench.sync.sync(DELTAS)
    return bench


def check_found(bench: RefitPair, fault: str, said: str) -> None:
    """A refit with the fault fails, and the next one, without it, succeeds."""
    if bench.version >= DELTAS:
        # The refit after a failed one is whole, and this one a delta again.
        bench.step()
    bench.plant(fault=fault)
    try:
        with pytest.raises(RefitMismatch, match=said) as caught:
            bench.step()
    finally:
        bench.plant(fault=None)
    assert f"weight version {bench.version}: engine 0 of 1: " in str(caught.value) and bench.sync.version == -1
    bench.step()
    assert bench.sync.version == bench.version
    report = bench.sync.report
    assert (report.bytes_sent == report.bytes_dense) == (bench.version < DELTAS)


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_in_the_embedded_engine_is_named(embedded, fault):
    check_found(embedded, fault, NAMED[fault])


@pytest.mark.parametrize("fault", params(NAMED, SOME))
def test_a_fault_in_the_embedded_engine_shows_in_what_it_computes(embedded, fault, monkeypatch):
    monkeypatch.setattr("nemo_rl.models.weight_sync.receipt.check.content_problems", lambda *_: None)
    check_found(embedded, fault, APART)


@pytest.mark.parametrize("fault", params(NAMED, SOME))
def test_a_fault_of_a_delta_in_the_embedded_engine_is_named(deltas, fault):
    check_found(deltas, fault, NAMED[fault])


@pytest.mark.parametrize("fault", params(IN_VLLM, SOME))
def test_a_fault_of_a_delta_in_vllm_is_found(vllm_deltas, fault):
    check_found(vllm_deltas, fault, IN_VLLM[fault])


@pytest.mark.parametrize("fault", IN_VLLM)
def test_a_fault_in_vllm_is_found(vllm, fault):
    check_found(vllm[0], fault, IN_VLLM[fault])


@pytest.mark.parametrize("fault", params([fault for fault in IN_VLLM if "stale" not in fault], SOME))
def test_a_fault_in_vllm_shows_in_what_it_computes(vllm, fault, monkeypatch):
    monkeypatch.setattr("nemo_rl.models.weight_sync.receipt.check.content_problems", lambda *_: None)
    check_found(vllm[0], fault, APART)


def test_old_prompts_in_a_cache_show_in_what_vllm_computes(vllm, monkeypatch):
    monkeypatch.setattr("nemo_rl.models.weight_sync.receipt.check.scoring_problems", lambda *_: {})
    check_found(vllm[0], "stale prefix cache", APART)


def test_rows_that_find_cached_prompts_are_among_those_of_vllm(vllm):
    bench, _ = vllm
    bench.step()
    assert bench.sync.report.receipt.cached_tokens >= 64


def test_one_replica_that_was_not_updated_is_told_from_the_other(folder, policy):
    config = tiny_policy(folder)
    engines = [FaultyWorker.from_config(config) for _ in range(2)]
    parties = parties_of(config, engines, policy)
    sync = PayloadWeightSync(parties)
    sync.sync(0)
    assert sync.report.receipt.replica_gap == 0.0
    train(policy)
    engines[1].plant("version without weights")
    with pytest.raises(RefitMismatch, match="weight version 1: engine 1 of 2: .* not what was sent") as caught:
        sync.sync(1)
    assert "engine 0 of 2" not in str(caught.value)
    parties.engines.shutdown()


def test_a_vllm_replica_that_was_not_updated_is_told_from_the_other(folder, policy, vllm):
    _, proxy = vllm
    good = FaultyWorker.from_config(tiny_policy(folder))
    sync = PayloadWeightSync(parties_of(tiny_policy(folder), [good, proxy], policy))
    sync.sync(0)
    train(policy)
    proxy.plant(fault="version without weights")
    with pytest.raises(RefitMismatch, match="weight version 1: engine 1 of 2: .* not what was sent"):
        sync.sync(1)
    proxy.plant(fault=None)
    good.shutdown()


def test_rows_are_scored_each_nth_time_and_weights_always(folder, policy, embedded):
    spec = replace(embedded.parties.receipt, every=2)
    sync = PayloadWeightSync(replace(embedded.parties, receipt=spec))
    gaps = []
    for version in range(4):
        sync.sync(version)
        gaps.append(sync.report.receipt.gap)
        assert sync.report.receipt.num_tensors > 10
    assert [gap is None for gap in gaps] == [False, True, False, True]


def test_a_new_engine_is_scored_out_of_turn(folder, embedded):
    def start(number: int) -> WorkerGroup:
        return LocalWorkerGroup(lambda: FaultyWorker.from_config(tiny_policy(folder)))

    fleet = WorkerFleet([start(0), start(1)], start=start)
    spec = replace(embedded.parties.receipt, every=5)
    sync = PayloadWeightSync(replace(embedded.parties, engines=fleet, receipt=spec))
    sync.sync(0)
    sync.sync(1)
    assert sync.report.receipt.gap is None
    fleet.lose(0, WorkerLost("gone", rank=0, stage="test"))
    sync.sync(2)
    assert sync.report.receipt.gap is not None
    fleet.shutdown()


def test_without_a_receipt_a_fault_passes(embedded):
    sync = PayloadWeightSync(replace(embedded.parties, receipt=None))
    sync.sync(0)
    train(embedded.parties.policy)
    embedded.plant(fault="norm scaled")
    sync.sync(1)
    assert sync.report.receipt is None and sync.report.bytes_dense > 0
    embedded.plant(fault=None)


def test_a_tolerance_that_is_set_is_kept(embedded):
    # Below any difference: after some steps engine and policy may agree to the last bit.
    spec = replace(embedded.parties.receipt, tolerance=-1.0)
    with pytest.raises(RefitMismatch, match="more than -1"):
        PayloadWeightSync(replace(embedded.parties, receipt=spec)).sync(0)
