"""No receipt fails that should not: 200 refits of a policy that trains, in each precision, with both engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.weight_sync.factory import PayloadWeightSync
from tests.helpers.engine_process import (
    NO_VLLM,
    EngineProxy,
    RefitPair,
    has_vllm,
    parties_of,
    policy_of,
    vllm_policy,
    vllm_process,
)
from tests.helpers.faulty_engines import FaultyVllm, FaultyWorker, write_receipt_model
from tests.helpers.model_families import write_dense
from tests.helpers.tiny_model import tiny_policy
from tests.unit.models.test_refit_receipt import IN_VLLM, NAMED, check_found

pytestmark = [pytest.mark.slow, pytest.mark.full]

SYNCS = 200
MODELS = {"dense": write_dense, "experts": write_receipt_model}


@contextmanager
def bench_of(folder: Path, *, engine: str, precision: str) -> Iterator[RefitPair]:
    """Two replicas of the embedded engine, or one vLLM."""
    make = vllm_policy if engine == "vllm" else tiny_policy
    config = make(folder, precision=precision)
    with policy_of(config) as policy:
        if engine == "vllm":
            with vllm_process(config) as child:
                parties = parties_of(config, [EngineProxy(child)], policy)
                yield RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=lambda **_: None)
            return
        parties = parties_of(config, [EngineWorker.from_config(config) for _ in range(2)], policy)
        yield RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=lambda **_: None)
        parties.engines.shutdown()


def gaps_of(bench: RefitPair, count: int) -> list[float]:
    """Of each sync, while the policy trains; one that fails raises."""
    bench.sync.sync(0)
    found = []
    for _ in range(count):
        bench.step()
        found.append(bench.sync.report.receipt.gap)
    return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_no_false_alarm_in_200_refits(tmp_path, engine, kind, precision):
    if engine == "vllm" and not has_vllm():
        pytest.skip(NO_VLLM)
    with bench_of(MODELS[kind](tmp_path / "model"), engine=engine, precision=precision) as bench:
        gaps = gaps_of(bench, SYNCS)
        limits = bench.sync.report.receipt.tolerance
    sys.stdout.write(
        f"{engine} {kind} {precision}: {len(gaps)} refits, first gap {gaps[0]:.2g}, largest {max(gaps):.2g}, "
        f"tolerance {limits.of_policy:.2g}\n"
    )
    assert len(gaps) == SYNCS and max(gaps) > 0


def test_every_fault_is_found_in_bfloat16(tmp_path):
    """Where rounding hides what a fault changes, it shows in fingerprints, or is large."""
    folder = write_receipt_model(tmp_path / "model")
    config = tiny_policy(folder, precision="bfloat16")
    with policy_of(config) as policy:
        engine = FaultyWorker.from_config(config)
        parties = parties_of(config, [engine], policy)
        check_all(RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=engine.plant), NAMED)
        engine.shutdown()
        if not has_vllm():
            pytest.skip(NO_VLLM)
        config = vllm_policy(folder, precision="bfloat16")
        with vllm_process(config, build=FaultyVllm) as child:
            proxy = EngineProxy(child)
            parties = parties_of(config, [proxy], policy)
            check_all(RefitPair(parties=parties, sync=PayloadWeightSync(parties), plant=proxy.plant), IN_VLLM)


def check_all(bench: RefitPair, faults: Mapping[str, str]) -> None:
    bench.sync.sync(0)
    for fault, said in faults.items():
        check_found(bench, fault, said)
