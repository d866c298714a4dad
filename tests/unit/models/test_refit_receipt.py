"""The receipt of a refit finds every planted fault in both engines, names it, and passes what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from nemo_rl.algorithms.loss_functions import ClippedPGLoss
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import LossConfig
from nemo_rl.distributed.calls import Call, ask
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.worker_fleet import WorkerFleet
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerGroup
from nemo_rl.errors import RefitMismatch
from nemo_rl.models.loading import load_model_config
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.colocated import PayloadWeightSync
from nemo_rl.models.weight_sync.factory import receipt_spec
from tests.helpers.engine_child import NO_VLLM, EngineChild, has_vllm, vllm_child, vllm_policy
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
from tests.helpers.tiny_model import tiny_batch, tiny_policy

pytestmark = pytest.mark.slow

APART = "its log-probabilities are .* from the policy's on average"
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
BEHAVIOUR = {name: APART for name in NAMED if name != "version without weights"}
IN_VLLM = {
    **BEHAVIOUR,
    "version without weights": NAMED["version without weights"],
    "stale prefix cache": APART,
    "experts not packed": APART,
}
"""And of vLLM, behind whose fingerprints the faults are planted."""


class Proxy:
    """A worker whose methods are called elsewhere."""

    def __init__(self, child: EngineChild) -> None:
        self._child = child

    def __getattr__(self, name: str) -> Callable[..., object]:
        return partial(self._child, name)


@dataclass(kw_only=True)
class Bench:
    """A policy and one engine with faults."""

    parties: RefitParties
    sync: WeightSync
    plant: Callable[[str | None], object]
    version: int = 0

    def step(self) -> None:
        """One optimizer step, and a refit."""
        train(self.parties.policy)
        self.version += 1
        self.sync.sync(self.version)


def train(policy: WorkerGroup) -> None:
    def run(request: object) -> None:
        policy.run(Call(request=request, stage="train", timeout_s=60))

    run(ask(PolicyWorker.prepare_for_training))
    run(ask(PolicyWorker.train, batch=tiny_batch(8), loss_fn=ClippedPGLoss(config=LossConfig())))


def parties_of(config: PolicyConfig, engines: list[object], policy: WorkerGroup) -> RefitParties:
    fleet = WorkerFleet([LocalWorkerGroup(lambda engine=engine: engine) for engine in engines])
    spec = receipt_spec(config, load_model_config(config.model_name).to_dict())
    return RefitParties(policy=policy, engines=fleet, timeout_s=60, max_bucket_bytes=50_000, receipt=spec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_receipt_model(tmp_path_factory.mktemp("receipt") / "model")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[WorkerGroup]:
    spec = WorkerSpec(
        policy=tiny_policy(folder), rank=RankSpec(rank=0, world_size=1), num_steps=40, keep_reference=False, seed=0
    )
    group = LocalWorkerGroup(lambda: build_policy_worker(spec))
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def embedded(folder: Path, policy: WorkerGroup) -> Iterator[Bench]:
    engine = FaultyWorker.from_config(tiny_policy(folder))
    parties = parties_of(tiny_policy(folder), [engine], policy)
    bench = Bench(parties=parties, sync=PayloadWeightSync(parties), plant=engine.plant)
    bench.sync.sync(0)
    yield bench
    engine.shutdown()


@pytest.fixture(scope="module")
def vllm(folder: Path, policy: WorkerGroup) -> Iterator[tuple[Bench, Proxy]]:
    if not has_vllm():
        pytest.skip(NO_VLLM)
    config = vllm_policy(folder)
    with vllm_child(config, build=FaultyVllm) as child:
        proxy = Proxy(child)
        parties = parties_of(config, [proxy], policy)
        bench = Bench(parties=parties, sync=PayloadWeightSync(parties), plant=proxy.plant)
        bench.sync.sync(0)
        yield bench, proxy


def check_found(bench: Bench, fault: str, said: str) -> None:
    bench.step()
    bench.plant(fault)
    try:
        with pytest.raises(RefitMismatch, match=said) as caught:
            bench.step()
    finally:
        bench.plant(None)
    assert f"weight version {bench.version}: engine 0 of 1: " in str(caught.value) and bench.sync.version == -1
    bench.step()
    assert bench.sync.version == bench.version


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_in_the_embedded_engine_is_named(embedded, fault):
    check_found(embedded, fault, NAMED[fault])


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_in_the_embedded_engine_shows_in_what_it_computes(embedded, fault, monkeypatch):
    monkeypatch.setattr("nemo_rl.models.weight_sync.receipt.receipts.content_problems", lambda *_: None)
    check_found(embedded, fault, APART)


@pytest.mark.parametrize("fault", IN_VLLM)
def test_a_fault_in_vllm_is_found(vllm, fault):
    check_found(vllm[0], fault, IN_VLLM[fault])


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
    proxy.plant("version without weights")
    with pytest.raises(RefitMismatch, match="weight version 1: engine 1 of 2: .* not what was sent"):
        sync.sync(1)
    proxy.plant(None)
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


def test_without_a_receipt_a_fault_passes(embedded):
    sync = PayloadWeightSync(replace(embedded.parties, receipt=None))
    sync.sync(0)
    train(embedded.parties.policy)
    embedded.plant("norm scaled")
    sync.sync(1)
    assert sync.report.receipt is None and sync.report.num_bytes > 0
    embedded.plant(None)


def test_a_tolerance_that_is_set_is_kept(embedded):
    spec = replace(embedded.parties.receipt, tolerance=1e-12)
    with pytest.raises(RefitMismatch, match="more than 1e-12"):
        PayloadWeightSync(replace(embedded.parties, receipt=spec)).sync(0)
