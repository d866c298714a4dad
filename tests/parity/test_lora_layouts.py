"""Adapters in every layout of the DTensor worker against peft on one Hugging Face model in float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.config.backends import LoraConfig
from nemo_rl.models.adapters.lora import adapted_layers, adapter_infos, named_adapters
from nemo_rl.models.dtensor.parallelize import full_weight
from nemo_rl.models.dtensor.weights import fill_adapters
from nemo_rl.models.hf.folder import open_weights
from nemo_rl.models.hf.loading import build_meta_model, load_causal_lm, load_model_config
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.case_selection import cases_of_this_run, pairwise, params
from tests.helpers.gloo import JOB_S, run_ranks
from tests.helpers.lora_reference import peft_reference, random_adapter
from tests.helpers.model_families import config_of, write_family, write_with_tokenizer
from tests.helpers.parallel_layouts import (
    AXES,
    LOSS,
    Arrays,
    Case,
    Folders,
    Job,
    Outcome,
    compare_arrays,
    exported,
    force_routes,
    forced_routes,
    load_and_step,
    run_job,
    save_after_a_step,
    start,
)

LOGPROBS, RELATIVE, WEIGHTS, GRADIENTS = 2e-6, 1e-5, 2e-5, 5e-5
"""Bounds: absolute of log-probabilities, relative of loss and norm, absolute of A and B after the steps, relative to
the largest element of gradients."""
ROUNDING = 2.0
"""As many times what peft itself is off in float32 may log-probabilities be off."""
ALL = {"rank": 4, "alpha": 8.0}
SOME = {**ALL, "targets": ["q_proj", "down_proj"], "rslora": True}
HEAD = {**ALL, "targets": ["v_proj", "o_proj", "lm_head"]}
EXPERTS = {"rank": 3, "alpha": 6.0, "targets": ["experts.gate_up_proj", "experts.down_proj", "o_proj"]}
LONG = pytest.mark.timeout(JOB_S + 100)

TWO = [
    Case(family="qwen3", lora=ALL),
    Case(family="qwen3", lora=SOME, batching="fixed", capacity=2),
    Case(family="qwen3", lora=ALL, tp=2, batching="padded", capacity=100),
    Case(family="qwen3", lora=ALL, tp=2, sp=True, capacity=40, recompute=True),
    Case(family="qwen3", lora=SOME, tp=2),
    Case(family="qwen3", lora=ALL, cp=2, batching="padded", capacity=60, recompute=True),
    Case(family="qwen2", lora=ALL, cp=2),
    Case(family="qwen2", lora=ALL, tp=2, sp=True),
    Case(family="llama", lora=ALL, tp=2),
    Case(family="llama", lora=HEAD, tp=2, sp=True, batching="fixed", capacity=4),
    Case(family="qwen3", lora=HEAD, tp=2, sp=True, capacity=40),
    Case(family="mistral", lora=ALL, tp=2, recompute=True),
    Case(family="qwen3_moe", lora=ALL, tp=2, sp=True),
    *[
        Case(family=family, lora=EXPERTS, **layout)
        for family in ("qwen3_moe", "eager_moe")
        for layout in (
            {"recompute": True, "capacity": 40},
            {"tp": 2, "sp": True, "capacity": 40, "recompute": True},
            {"cp": 2, "batching": "padded", "capacity": 60},
        )
    ],
    Case(family="qwen3_moe", lora=EXPERTS, tp=2),
    Case(family="qwen3_moe", lora=EXPERTS, tp=2, sp=True, replay=True),
]
LAYOUTS = {name: AXES[name] for name in ("tp", "cp", "sp", "recompute", "batching")}
SOME_OF_TWO = pairwise(
    TWO,
    {**LAYOUTS, "lora": lambda case: str(case.lora)},
    kept=[case for case in TWO if case.replay or (case.family == "eager_moe" and case.sp)],
)
"""Of `make test`: every kind of adapter in every layout, and experts without grouped kernels once."""
HALF = [
    Case(family="qwen3", lora=ALL, precision="bfloat16"),
    Case(family="qwen3", lora=ALL, precision="bfloat16", tp=2, sp=True, recompute=True),
]
STORED = {"half": torch.bfloat16, "single": torch.float32}
"""Folders with the same values."""
FOUR = [
    Case(family="qwen3", lora=ALL, tp=2, sp=True, capacity=40),
    Case(family="qwen3_moe", lora=EXPERTS, tp=2, cp=2, sp=True, recompute=True),
]
FROZEN = Case(family="qwen3", lora=ALL, tp=2, sp=True, recompute=True)
FROZEN_STEPS = 6
SAVED = {"sharded": Case(family="qwen3", lora=ALL), "split": Case(family="qwen3_moe", lora=EXPERTS, tp=2, sp=True)}
LOADED_BY_TWO = {
    "sharded again": SAVED["sharded"],
    "sharded": Case(family="qwen3", lora=ALL, tp=2),
    "split again": SAVED["split"],
    "split": Case(family="qwen3_moe", lora=EXPERTS),
}
LOADED_BY_FOUR = {
    "sharded": Case(family="qwen3", lora=ALL, tp=2, sp=True),
    "split": Case(family="qwen3_moe", lora=EXPERTS, tp=2, cp=2),
}


def start_with(rank: int, world_size: int, case: Case, folder: Path) -> Job:
    job = start(rank, world_size, case, folder)
    engine = job.worker.engine
    fill_adapters(engine.model.hf, random_adapter(engine.adapter_infos()))
    return job


def adapter_of(worker: PolicyWorker) -> Arrays:
    return {name: weight.numpy().copy() for name, weight in worker.engine.full_adapter()}


def run_case(rank: int, world_size: int, case: Case, folder: Path) -> Outcome:
    """Run log-probabilities and steps of one rank; weights and gradients of the outcome are A and B."""
    job = start_with(rank, world_size, case, folder)
    engine, gradients = job.worker.engine, Arrays()

    def keep(*_: object) -> None:
        for name, weight in named_adapters(engine.model.hf):
            gradients.setdefault(name, full_weight(weight.grad).numpy().copy())

    engine.optimizer.register_step_pre_hook(keep)
    trained = {id(weight) for group in engine.optimizer.param_groups for weight in group["params"]}
    assert trained == {id(weight) for _, weight in named_adapters(engine.model.hf)}, "the optimizer has other weights"
    outcome = run_job(job, rank, LOSS)
    weights = adapter_of(job.worker)
    outcome.weights, outcome.gradients = (weights, gradients) if rank == 0 else (None, None)
    job.worker.shutdown()
    return outcome


def frozen_weights(rank: int, case: Case, folder: Path) -> Arrays:
    """Return the exported weights of the model after many steps."""
    job = start_with(rank, 2, case, folder)
    for _ in range(FROZEN_STEPS):
        job.worker.train(job.shard, LOSS, plan=job.plan)
    found = exported(job.worker)
    job.worker.shutdown()
    return found


def two_ranks(rank: int, cases: list[Case], half: list[Case], folders: Folders) -> dict[str, object]:
    found: dict[str, object] = {str(case): run_case(rank, 2, case, folders.model(case.family)) for case in cases}
    for case in half:
        found |= {f"{name} {case}": run_case(rank, 2, case, folders.model(name)) for name in STORED}
    found["frozen"] = frozen_weights(rank, FROZEN, folders.model(FROZEN.family))
    for name, case in SAVED.items():
        found[f"saved {name}"] = save_after_a_step(rank, 2, case, folders.model(case.family), folders.checkpoint(name))
    return found | loaded(rank, 2, LOADED_BY_TWO, folders)


def four_ranks(rank: int, folders: Folders) -> dict[str, object]:
    found: dict[str, object] = {str(case): run_case(rank, 4, case, folders.model(case.family)) for case in FOUR}
    return found | loaded(rank, 4, LOADED_BY_FOUR, folders)


def loaded(rank: int, world_size: int, cases: dict[str, Case], folders: Folders) -> dict[str, object]:
    """Return what ranks make of the checkpoints that are named in the cases."""
    return {
        f"loaded {name}": load_and_step(
            rank, world_size, case, folders.model(case.family), folders.checkpoint(name.partition(" ")[0])
        )
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = Folders(tmp_path_factory.mktemp("lora"))
    for family in ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe"):
        write_family(found.model(family), family)
    for name in SAVED:
        found.checkpoint(name).mkdir(parents=True)
    half = load_causal_lm(found.model("qwen3")).bfloat16()
    for name, dtype in STORED.items():
        write_with_tokenizer(found.model(name), half.to(dtype))
    config = config_of("qwen3_moe")
    # Rows of 72 bytes, which grouped kernels do not take.
    config.moe_intermediate_size = 18
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "experts" in name or "gate.weight" in name:
                weight.normal_(0, 0.2)
    write_with_tokenizer(found.model("eager_moe"), model)
    return found


@pytest.fixture(scope="module")
def expected(folders: Folders) -> object:
    @functools.cache
    def of(family: str, lora: tuple[tuple[str, object], ...], replay: bool) -> tuple[Outcome, float]:
        config = LoraConfig(enabled=True, **{name: list(v) if isinstance(v, tuple) else v for name, v in lora})
        return reference(folders.model(family), config, replay=replay)

    return of


def reference(folder: Path, config: LoraConfig, *, replay: bool) -> tuple[Outcome, float]:
    def prepare(model: PreTrainedModel) -> None:
        if replay:
            force_routes(model, forced_routes(model.config))

    start = random_adapter(adapter_infos(adapted_layers(build_meta_model(folder), config), config))
    exact, single = (
        peft_reference(folder, config, start, dtype=dtype, prepare=prepare) for dtype in (torch.float64, torch.float32)
    )
    rounding = float(np.abs(exact.logprobs - single.logprobs).max())
    return exact, max(LOGPROBS, ROUNDING * rounding)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folders: Folders) -> list[dict[str, object]]:
    cases, half = cases_of_this_run(request, TWO, SOME_OF_TWO), cases_of_this_run(request, HALF, HALF[1:])
    return run_ranks(2, two_ranks, cases, half, folders, timeout_s=JOB_S)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def four(folders: Folders, two: object) -> list[dict[str, object]]:
    return run_ranks(4, four_ranks, folders, timeout_s=JOB_S)  # type: ignore[return-value]


def compare(outcomes: list[Outcome], expected: tuple[Outcome, float]) -> None:
    exact, bound = expected
    for outcome in outcomes:
        error = np.abs(outcome.logprobs - exact.logprobs[list(outcome.rows)]).max()
        assert error <= bound, f"log-probabilities differ by {error:.1e}"
        assert outcome.losses == pytest.approx(exact.losses, rel=RELATIVE)
        assert outcome.norms == pytest.approx(exact.norms, rel=RELATIVE)
    compare_arrays(outcomes[0].gradients, exact.gradients, relative, GRADIENTS)
    compare_arrays(outcomes[0].weights, exact.weights, absolute, WEIGHTS)


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def absolute(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(found - exact).max())


def key(case: Case) -> tuple[tuple[str, object], ...]:
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in case.lora.items())


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("case", params(TWO, SOME_OF_TWO), ids=str)
def test_two_ranks_equal_peft(case: Case, two: list[dict[str, object]], expected) -> None:
    compare([rank[str(case)] for rank in two], expected(case.family, key(case), case.replay))


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_equal_peft(case: Case, four: list[dict[str, object]], expected) -> None:
    compare([rank[str(case)] for rank in four], expected(case.family, key(case), case.replay))


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("case", params(HALF, HALF[1:]), ids=str)
def test_frozen_weights_held_in_half_precision_change_no_bit(case: Case, two: list[dict[str, object]]) -> None:
    for rank in two:
        half, single = (rank[f"{name} {case}"] for name in STORED)
        np.testing.assert_array_equal(half.logprobs, single.logprobs)
        assert half.losses == single.losses and half.norms == single.norms
    compare_arrays(two[0][f"half {case}"].weights, two[0][f"single {case}"].weights, absolute, 0.0)


@pytest.mark.slow
@LONG
def test_training_leaves_every_bit_of_the_frozen_weights(two: list[dict[str, object]], folders: Folders) -> None:
    folder = folders.model(FROZEN.family)
    source = open_weights(folder, load_model_config(folder))
    for rank in two:
        weights = rank["frozen"]
        weights = {name: weight for name, weight in weights.items() if ".lora_" not in name}
        assert sorted(weights) == sorted(source.names())
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, source.get(name).numpy(), err_msg=name)


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("name", list(SAVED))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_adapter_continues_in_another_layout(name, ranks, two, four, folders):
    saved = two[0][f"saved {name}"]
    if ranks == 1:
        case = replace(SAVED[name], tp=1, sp=False)
        found = load_and_step(0, 1, case, folders.model(case.family), folders.checkpoint(name))
    else:
        found = {2: two, 4: four}[ranks][0][f"loaded {name}"]
    for part in ("weights", "moments"):
        assert saved[part].keys() == found[part].keys()
        for key_, value in saved[part].items():
            np.testing.assert_array_equal(found[part][key_], value, err_msg=f"{part} {key_}")
    assert found["loss"] == pytest.approx(saved["loss"], rel=RELATIVE)
    compare_arrays(found["after"], saved["after"], absolute, WEIGHTS)


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("name", list(SAVED))
def test_an_adapter_continues_to_the_bit_in_its_own_layout(name: str, two: list[dict[str, object]]) -> None:
    saved, found = two[0][f"saved {name}"], two[0][f"loaded {name} again"]
    assert found["loss"] == saved["loss"]
    compare_arrays(found["after"], saved["after"], absolute, 0.0)
