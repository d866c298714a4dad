"""Adapters in every layout of the Megatron worker against peft on one Hugging Face model in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
from peft.utils import transformers_weight_conversion
from torch.distributed.checkpoint import FileSystemReader

from nemo_rl.config.backends import LoraConfig
from nemo_rl.models.adapters.lora import adapted_layers, adapter_infos
from nemo_rl.models.hf.folder import open_weights
from nemo_rl.models.hf.loading import build_meta_model, load_causal_lm, load_model_config
from nemo_rl.models.megatron import adapters
from nemo_rl.models.megatron.convert import export_gradients, fill_adapters
from nemo_rl.models.megatron.convert_table import AdaptedLinear, Weight
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.case_selection import cases_of_this_run, pairwise, params
from tests.helpers.gloo import JOB_S, run_ranks
from tests.helpers.hf_reference import hf_logprobs
from tests.helpers.lora_reference import peft_parameters, peft_reference, random_adapter
from tests.helpers.megatron_layouts import forget_models
from tests.helpers.megatron_models import hf_model
from tests.helpers.model_families import FAMILY_SIZES, write_with_tokenizer
from tests.helpers.parallel_layouts import (
    AXES,
    LOSS,
    MAX_GRAD_NORM,
    Arrays,
    Case,
    Folders,
    Job,
    Outcome,
    compare_arrays,
    layout_batch,
    relative_gap,
    run_job,
    start,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(JOB_S + 100)]

LOGPROBS, RELATIVE, WEIGHTS, GRADIENTS = 2e-6, 1e-5, 2e-5, 5e-5
"""Bounds: absolute of log-probabilities, relative of loss and norm, absolute of A and B after the steps, relative to
the largest element of gradients."""
TINY = {name: FAMILY_SIZES[name] for name in ("vocab_size", "pad_token_id")}
TINY |= {"num_hidden_layers": 2, "initializer_range": 0.08}
ALL = {"rank": 4, "alpha": 8.0}
FEW = {**ALL, "targets": ("q_proj", "v_proj", "up_proj"), "rslora": True}
HEAD = {**ALL, "targets": ("o_proj", "down_proj", "lm_head")}
Dense = partial(Case, engine="megatron", family="qwen3", lora=ALL)
Experts = partial(Case, engine="megatron", family="qwen3_moe", lora=ALL)
SEQUENCE = {"tp": 2, "sp": True}
PIPELINE = {"pp": 2, "capacity": 40}
PADDED, FIXED = {"batching": "padded", "capacity": 100}, {"batching": "fixed", "capacity": 2}
FULL, SELECTIVE = {"recompute": True}, {"recompute": "selective"}
ONE_GROUP = "one_group"
"""A llama whose only key and value heads both tensor ranks share."""
ONE = [Dense(), Dense(**PADDED, **FULL), Dense(lora=FEW, **SELECTIVE), Experts(**FULL)]
TWO = [
    Dense(),
    Dense(batching="uneven"),
    Dense(tp=2),
    Dense(tp=2, **PADDED, **FULL),
    Dense(lora=FEW, tp=2, **FIXED),
    Dense(**SEQUENCE, **FULL),
    Dense(lora=FEW, **SEQUENCE, **PADDED, **SELECTIVE),
    Dense(**PIPELINE),
    Dense(**PIPELINE, **FULL),
    Dense(cp=2, **FULL),
    Dense(cp=2, **PADDED),
    Dense(family="qwen2", tp=2),
    Dense(family="llama", lora=HEAD, **SEQUENCE, **FIXED),
    Dense(family="llama", lora=HEAD, **PIPELINE),
    Dense(family=ONE_GROUP, tp=2, **FULL),
    Dense(family=ONE_GROUP, lora=FEW, **SEQUENCE),
    Experts(ep=2),
    Experts(ep=2, **PADDED, **FULL),
    Experts(**SEQUENCE),
    Experts(ep=2, etp=1, **SEQUENCE),
    Experts(family="mixtral", **SEQUENCE, **PADDED),
    Experts(family="glm4_moe", ep=2),
    Experts(family="glm4_moe", **SEQUENCE, **FULL),
    Experts(family="glm4_moe", **PIPELINE),
]
FOUR = [Dense(tp=2, **PIPELINE, **FULL), Dense(cp=2, **SEQUENCE), Experts(pp=2, ep=2, etp=1, capacity=40, **SEQUENCE)]
SOME = pairwise(
    TWO,
    {name: AXES[name] for name in ("tp", "cp", "pp", "ep", "etp", "sp", "batching", "recompute")},
    kept=[
        Dense(family="llama", lora=HEAD, **SEQUENCE, **FIXED),
        Dense(family=ONE_GROUP, lora=FEW, **SEQUENCE),
        Experts(family="mixtral", **SEQUENCE, **PADDED),
        Experts(family="glm4_moe", **PIPELINE),
    ],
)
"""Of `make test`."""
HALF = {"precision": "bfloat16"}
SAVED = {"tp2": Dense(**SEQUENCE), "shared": Dense(family=ONE_GROUP, tp=2), "ep2": Experts(ep=2, **HALF)}
"""Name -> layout of a checkpoint."""
LOADED = [
    ("tp2", SAVED["tp2"]),
    ("tp2", Dense(**PIPELINE)),
    ("ep2", SAVED["ep2"]),
    ("ep2", Experts(**PIPELINE, **HALF)),
]
"""Name of a checkpoint, and a layout that continues it."""
LOADED_BY_ONE = [("tp2", Dense()), ("shared", Dense(family=ONE_GROUP))]
FAULTS = [
    # Each tensor rank keeps the gradient of its own tokens, and the norm counts one rank.
    Dense(**SEQUENCE, fault="unmarked"),
    # Each tensor rank keeps the gradient of its own rows of B.
    Dense(tp=2, fault="uncopied"),
]
FROZEN = Dense(**SEQUENCE, **FULL)
FROZEN_STEPS = 6


def nothing(*_: object, **__: object) -> None:
    """Stands for a step that is left out."""


def ungrouped(linear: AdaptedLinear, size: int) -> Weight:
    """Query, key and value one after the other, and not by groups."""
    return replace(linear.weight, groups=1)


def alone(narrow: torch.Tensor, *, group: object) -> torch.Tensor:
    return narrow


PLANTED = {
    "unmarked": partial(patch.object, adapters, "_mark", nothing),
    "uncopied": partial(patch.object, adapters, "copy_to_tensor_model_parallel_region", alone),
    "ungrouped": partial(patch.object, AdaptedLinear, "on_rank", ungrouped),
    "blocked": partial(patch.object, adapters, "_begin_gradients", nothing),
}
"""What must not be left out, left out."""


def config_of(lora: Mapping[str, object]) -> LoraConfig:
    return LoraConfig(enabled=True, **_plain(lora))


def _plain(lora: Mapping[str, object]) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in lora.items()}


def start_with(rank: int, world_size: int, case: Case, folder: Path) -> Job:
    """(collective) A rank whose adapter has no zeros."""
    job = start(rank, world_size, replace(case, lora=_plain(case.lora)), folder)
    engine = job.worker.engine
    fill_adapters(engine.model, random_adapter(engine.adapter_infos()))
    engine.optimizer.take_weights()
    return job


def adapter_of(worker: PolicyWorker) -> Arrays:
    return {name: weight.numpy().copy() for name, weight in worker.engine.full_adapter()}


def run_case(rank: int, world_size: int, case: Case, folder: Path) -> Outcome:
    """(collective) Log-probabilities and steps of one rank; weights and gradients of the outcome are A and B."""
    with PLANTED.get(case.fault or "", nullcontext)():
        return run_worker(start_with(rank, world_size, case, folder), rank)


def run_worker(job: Job, rank: int) -> Outcome:
    engine, gradients = job.worker.engine, Arrays()
    finish = engine.optimizer.finish

    def keep_and_finish() -> float | None:
        if not gradients:
            gradients.update({name: value.numpy().copy() for name, value in export_gradients(engine.model)})
        return finish()

    with patch.object(engine.optimizer, "finish", keep_and_finish):
        outcome = run_job(job, rank, LOSS)
    clipped = min(1.0, MAX_GRAD_NORM / (outcome.norms[0] + 1e-6))
    gradients = {name: value * clipped for name, value in gradients.items()}
    weights = adapter_of(job.worker)
    outcome.weights, outcome.gradients = (weights, gradients) if rank == 0 else (None, None)
    job.worker.shutdown()
    forget_models()
    return outcome


def frozen_weights(rank: int, case: Case, folder: Path) -> Arrays:
    """(collective) The exported weights of the model after many steps."""
    job = start_with(rank, 2, case, folder)
    for _ in range(FROZEN_STEPS):
        job.worker.train(job.shard, LOSS, plan=job.plan)
    found = {name: weight.numpy().copy() for name, weight in job.worker.export_weights()}
    job.worker.shutdown()
    return found


def state_of(worker: PolicyWorker) -> dict[str, Arrays]:
    """(collective) The adapter and AdamW's moments, whole."""
    engine, found = worker.engine, {"adapter": adapter_of(worker)}
    parameters = dict(engine.model.module.named_parameters())
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = engine.optimizer.moments(kind)
        kept = {name: parameters[name].detach().clone() for name in moments}
        with torch.no_grad():
            for name, value in moments.items():
                parameters[name].copy_(value)
            found[kind] = adapter_of(worker)
            for name, value in kept.items():
                parameters[name].copy_(value)
    return found


def step_of(job: Job) -> dict[str, object]:
    """(collective) State, loss of the next step, and the adapter after it."""
    state = state_of(job.worker)
    loss = job.worker.train(job.shard, LOSS, plan=job.plan).loss[0]
    return {"state": state, "loss": loss, "after": adapter_of(job.worker)}


def save_after_a_step(rank: int, case: Case, folder: Path, target: Path) -> dict[str, object]:
    job = start_with(rank, 2, case, folder)
    job.worker.train(job.shard, LOSS, plan=job.plan)
    job.worker.save_checkpoint(weights=target / "weights", optimizer=target / "optimizer", tokenizer=None)
    found = step_of(job)
    job.worker.shutdown()
    forget_models()
    return found


def load_and_step(rank: int, world_size: int, case: Case, folder: Path, target: Path) -> dict[str, object]:
    """(collective) Continue from a checkpoint; the adapter is another one before."""
    job = start_with(rank, world_size, case, folder)
    job.worker.load_checkpoint(weights=target / "weights", optimizer=target / "optimizer")
    found = step_of(job)
    job.worker.shutdown()
    forget_models()
    return found


def two_ranks(rank: int, cases: Sequence[Case], folders: Folders) -> dict[str, object]:
    found: dict[str, object] = {str(case): run_case(rank, 2, case, folders.model(case.family)) for case in cases}
    for name, case in SAVED.items():
        found[f"saved {name}"] = save_after_a_step(rank, case, folders.model(case.family), folders.checkpoint(name))
    for name, case in LOADED:
        target = folders.checkpoint(name)
        found[f"loaded {name} {case}"] = load_and_step(rank, 2, case, folders.model(case.family), target)
    found["frozen"] = frozen_weights(rank, FROZEN, folders.model(FROZEN.family))
    return found


def four_ranks(rank: int, folders: Folders) -> dict[str, object]:
    return {str(case): run_case(rank, 4, case, folders.model(case.family)) for case in FOUR}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = Folders(tmp_path_factory.mktemp("lora"))
    for family in ("qwen3", "qwen2", "llama", "qwen3_moe", "mixtral", "glm4_moe"):
        write_with_tokenizer(found.model(family), hf_model(family, **TINY))
    write_with_tokenizer(found.model(ONE_GROUP), hf_model("llama", **TINY, num_key_value_heads=1))
    for name in SAVED:
        found.checkpoint(name).mkdir(parents=True)
    return found


Expected = Callable[[Case], Outcome]


@pytest.fixture(scope="module")
def expected(folders: Folders) -> Expected:
    @functools.cache
    def of(family: str, lora: tuple[tuple[str, object], ...]) -> Outcome:
        folder, config = folders.model(family), config_of(dict(lora))
        layers = adapted_layers(build_meta_model(folder), config)
        infos = adapter_infos(layers, config)
        config = config.model_copy(update={"targets": [layer.name for layer in layers]})
        # peft takes projections of dense layers and shared experts for parts of the experts' fused weights.
        with patch.object(transformers_weight_conversion, "convert_peft_config_for_transformers"):
            return peft_reference(folder, config, random_adapter(infos), dtype=torch.float64)

    return lambda case: of(case.family, tuple(case.lora.items()))


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folders: Folders) -> list[dict[str, object]]:
    cases = cases_of_this_run(request, TWO, SOME)
    return run_ranks(2, two_ranks, [*cases, *FAULTS], folders, timeout_s=JOB_S)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def four(folders: Folders, two: object) -> list[dict[str, object]]:
    return run_ranks(4, four_ranks, folders, timeout_s=JOB_S)  # type: ignore[return-value]


def compare(outcomes: list[Outcome], exact: Outcome) -> None:
    for outcome in outcomes:
        if outcome.is_last_stage:
            error = np.abs(outcome.logprobs - exact.logprobs[list(outcome.rows)]).max()
            assert error <= LOGPROBS, f"log-probabilities differ by {error:.1e}"
        assert outcome.losses == pytest.approx(exact.losses, rel=RELATIVE)
        assert outcome.norms == pytest.approx(exact.norms, rel=RELATIVE)
    compare_arrays(outcomes[0].gradients, exact.gradients, relative_gap, GRADIENTS)
    compare_arrays(outcomes[0].weights, exact.weights, lambda a, b: float(np.abs(a - b).max()), WEIGHTS)


@pytest.mark.parametrize("case", ONE, ids=str)
def test_one_rank_equals_peft(case: Case, folders: Folders, expected: Expected) -> None:
    compare([run_case(0, 1, case, folders.model(case.family))], expected(case))


@pytest.mark.parametrize("case", params(TWO, SOME), ids=str)
def test_two_ranks_equal_peft(case: Case, two: list[dict[str, object]], expected: Expected) -> None:
    compare([rank[str(case)] for rank in two], expected(case))  # type: ignore[misc]


@pytest.mark.full
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_equal_peft(case: Case, four: list[dict[str, object]], expected: Expected) -> None:
    compare([rank[str(case)] for rank in four], expected(case))  # type: ignore[misc]


def test_both_workers_have_the_same_numbers_with_forced_routes(folders: Folders, two: object) -> None:
    """They start from the adapter of a checkpoint."""
    lora = {**ALL, "adapter": str(folders.checkpoint("ep2") / "weights")}
    found = []
    for engine in ("megatron", "dtensor"):
        job = start(0, 1, Experts(engine=engine, lora=lora, replay=True), folders.model("qwen3_moe"))
        found.append(run_job(job, 0, LOSS))
        job.worker.shutdown()
    megatron, dtensor = found
    np.testing.assert_allclose(megatron.logprobs, dtensor.logprobs, rtol=0, atol=LOGPROBS)
    assert megatron.losses == pytest.approx(dtensor.losses, rel=RELATIVE)
    assert megatron.norms == pytest.approx(dtensor.norms, rel=RELATIVE)


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_planted_fault_fails_the_comparison(case: Case, two: list[dict[str, object]], expected: Expected) -> None:
    with pytest.raises(AssertionError):
        compare([rank[str(case)] for rank in two], expected(case))  # type: ignore[misc]


def test_rows_of_a_fused_layer_in_another_order_fail_the_comparison(folders: Folders, expected: Expected) -> None:
    case = Dense(fault="ungrouped")
    with pytest.raises(AssertionError, match="log-probabilities"):
        compare([run_case(0, 1, case, folders.model(case.family))], expected(case))


def test_recomputed_layers_have_no_gradient_without_one_of_their_input(folders: Folders) -> None:
    """megatron-core says nothing: a result without a gradient is passed over."""
    for fault in (None, "blocked"):
        outcome = run_case(0, 1, Dense(**FIXED, **FULL, fault=fault), folders.model("qwen3"))
        assert (outcome.norms == (0.0, 0.0)) == (fault == "blocked")


def test_training_leaves_every_bit_of_the_frozen_weights(two: list[dict[str, object]], folders: Folders) -> None:
    folder = folders.model(FROZEN.family)
    source = open_weights(folder, load_model_config(folder))
    for rank in two:
        weights: Arrays = rank["frozen"]  # type: ignore[assignment]
        assert sorted(weights) == sorted(source.names())
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, source.get(name).numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("name", "case", "ranks"),
    [*((*loaded, 2) for loaded in LOADED), *((*loaded, 1) for loaded in LOADED_BY_ONE)],
    ids=str,
)
def test_a_checkpoint_continues_in_this_layout(name, case, ranks, two, folders):
    saved: dict = two[0][f"saved {name}"]  # type: ignore[assignment]
    if ranks == 2:
        loaded: dict = two[0][f"loaded {name} {case}"]  # type: ignore[assignment]
    else:
        loaded = load_and_step(0, 1, case, folders.model(case.family), folders.checkpoint(name))
    for part, values in saved["state"].items():
        assert list(loaded["state"][part]) == list(values)
        for key, value in values.items():
            np.testing.assert_array_equal(loaded["state"][part][key], value, err_msg=f"{part} {key}")
            assert value.any(), f"{part} {key} is 0"
    is_same = case == SAVED[name]
    relative = 0.0 if is_same else 0.05 if case.precision == "bfloat16" else RELATIVE
    absolute = 0.0 if is_same else 2e-3 if case.precision == "bfloat16" else WEIGHTS
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=relative, abs=0)
    for key, value in saved["after"].items():
        np.testing.assert_allclose(loaded["after"][key], value, rtol=0, atol=absolute, err_msg=key)


@pytest.mark.parametrize("name", ["tp2", "shared"])
def test_peft_loads_a_checkpoint(name: str, two: list[dict[str, object]], folders: Folders) -> None:
    case, folder = SAVED[name], folders.checkpoint(name)
    saved: dict = two[0][f"saved {name}"]  # type: ignore[assignment]
    base = load_causal_lm(folders.model(case.family))
    model = peft.PeftModel.from_pretrained(base, str(folder / "weights"))
    for key, value in peft_parameters(model).items():
        np.testing.assert_array_equal(value.detach().numpy(), saved["state"]["adapter"][key], err_msg=key)
    expected_logprobs = hf_logprobs(model, layout_batch()).detach().numpy()
    job = start(
        0,
        1,
        replace(case, tp=1, sp=False, lora={**case.lora, "adapter": str(folder / "weights")}),
        folders.model(case.family),
    )
    found = job.worker.get_logprobs(job.all_tokens, plan=job.plan).numpy()
    job.worker.shutdown()
    assert np.abs(found - expected_logprobs[list(job.rows)]).max() < 2 * LOGPROBS


def test_a_checkpoint_holds_nothing_of_the_base(two: list[dict[str, object]], folders: Folders) -> None:
    folder = folders.checkpoint("tp2")
    adapter = sum(value.nbytes for value in two[0]["saved tp2"]["state"]["adapter"].values())  # type: ignore[index]
    assert (folder / "weights" / "adapter_model.safetensors").stat().st_size < 1.5 * adapter
    tensors = FileSystemReader(folder / "optimizer").read_metadata().state_dict_metadata.values()
    # The adapter and two moments of it.
    assert sum(4 * tensor.size.numel() for tensor in tensors) == 3 * adapter
