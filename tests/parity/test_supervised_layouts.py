"""Supervised training in layouts of both workers against a plain transformers loop in float64.

The loop adds up cross-entropies of whole rows and divides once by the trained tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.backends import LoraConfig
from nemo_rl.models.adapters.lora import adapted_layers, adapter_infos, named_adapters
from nemo_rl.models.dtensor.parallelize import full_weight
from nemo_rl.models.dtensor.weights import fill_adapters
from nemo_rl.models.hf.loading import build_meta_model, load_causal_lm, named_weights
from tests.helpers.gloo import JOB_S, run_ranks
from tests.helpers.lora_reference import peft_model, peft_parameters, random_adapter
from tests.helpers.megatron_layouts import forget_models, kept_gradients
from tests.helpers.model_families import write_family
from tests.helpers.parallel_layouts import (
    ADAM,
    MAX_GRAD_NORM,
    STEPS,
    Arrays,
    Case,
    Outcome,
    layout_batch,
    relative_gap,
    run_job,
    start,
)

pytestmark = [pytest.mark.timeout(JOB_S + 100)]

RELATIVE, GRADIENTS, WEIGHTS = 1e-5, 1e-5, 2e-5
"""Bounds: relative of loss and norm, of each gradient relative to its largest element, absolute of weights."""
OF_ADAPTERS = 5e-5
"""Bound of gradients of adapters, as that of GRPO's."""
DTENSOR = [
    Case(family="qwen3", capacity=48),
    Case(family="qwen3", batching="fixed", capacity=2),
    Case(family="qwen3", tp=2, batching="padded", capacity=100),
    Case(family="qwen3", cp=2),
]
ADAPTER = {"rank": 4, "alpha": 8.0}
LORA = [
    Case(family="qwen3", lora=ADAPTER, capacity=48),
    Case(family="qwen3", lora=ADAPTER, tp=2, batching="padded", capacity=100),
]
MEGATRON = [
    Case(family="qwen3", engine="megatron", tp=2, sp=True),
    Case(family="qwen3", engine="megatron", pp=2, capacity=40),
    Case(family="qwen3", engine="megatron", cp=2, batching="padded", capacity=100),
]


def run_case(rank: int, case: Case, folder: Path) -> tuple[Outcome, Arrays | None]:
    job = start(rank, 2, case, folder)
    if case.engine != "megatron":
        outcome: Outcome = run_job(job, rank, NLLLoss())
        job.worker.shutdown()
        return outcome, None
    with kept_gradients(job.worker) as gradients:
        outcome = run_job(job, rank, NLLLoss())
    job.worker.shutdown()
    forget_models()
    return outcome, gradients if rank == 0 else None


def ranks(rank: int, cases: list[Case], folder: Path) -> dict[str, tuple[Outcome, Arrays | None]]:
    return {str(case): run_case(rank, case, folder) for case in cases}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("supervised") / "model"
    write_family(found, "qwen3")
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[float], list[float], Arrays, Arrays]:
    """Losses, norms, gradients of the first step and weights after the steps."""
    model = load_causal_lm(folder, dtype=torch.float64)
    losses, norms, gradients = plain_loop(model, dict(model.named_parameters()))
    return losses, norms, gradients, {name: weight.detach().numpy() for name, weight in named_weights(model)}


def plain_loop(
    model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[list[float], list[float], Arrays]:
    """Train these parameters of a model in float64; return losses, norms and the gradients of the first step."""
    batch, trained = layout_batch(), list(parameters.values())
    ids, lengths = batch.tensor("input_ids").long(), batch.tensor("input_lengths").tolist()
    mask, weights = batch.tensor("token_mask").bool(), batch.tensor("sample_mask").double()
    adam, losses, norms, gradients = torch.optim.AdamW(trained, **ADAM), [], [], {}
    total = float((mask.sum(1) * weights).sum())
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        for row, length in enumerate(lengths):
            labels = torch.where(mask[row, 1:length], ids[row, 1:length], -100)
            logits = model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0, :-1]
            loss = loss + weights[row] * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        (loss / total).backward()
        if step == 0:
            gradients = {name: weight.grad.numpy().copy() for name, weight in parameters.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM).item())
        adam.step()
        adam.zero_grad()
        losses.append(loss.item() / total)
    return losses, norms, gradients


def check(
    found: list[dict[str, tuple[Outcome, Arrays | None]]], case: Case, expected: tuple, *, most: float = GRADIENTS
) -> None:
    losses, norms, gradients, weights = expected
    for of_rank in found:
        outcome, kept = of_rank[str(case)]
        assert outcome.losses == pytest.approx(losses, rel=RELATIVE)
        assert outcome.norms == pytest.approx(norms, rel=RELATIVE)
        for name, gradient in (kept or {}).items():
            assert relative_gap(gradient, gradients[name]) <= most, name
    trained = found[0][str(case)][0].weights
    assert trained is not None and sorted(trained) == sorted(weights)
    for name, weight in weights.items():
        assert np.abs(trained[name] - weight).max() <= WEIGHTS, name


@pytest.fixture(scope="module")
def dtensor(folder: Path) -> list[dict[str, tuple[Outcome, Arrays | None]]]:
    return run_ranks(2, ranks, DTENSOR, folder, timeout_s=JOB_S)


@pytest.mark.parametrize("case", DTENSOR, ids=str)
def test_dtensor_layouts_train_as_a_plain_loop(case: Case, dtensor: list, expected: tuple) -> None:
    check(dtensor, case, expected)


def lora_ranks(rank: int, cases: list[Case], folder: Path) -> dict[str, tuple[Outcome, Arrays | None]]:
    """Train adapters; weights and gradients are those of A and B."""
    return {str(case): run_lora(rank, case, folder) for case in cases}


def run_lora(rank: int, case: Case, folder: Path) -> tuple[Outcome, Arrays | None]:
    job = start(rank, 2, case, folder)
    engine, gradients = job.worker.engine, Arrays()
    fill_adapters(engine.model.hf, random_adapter(engine.adapter_infos()))

    def keep(*_: object) -> None:
        for name, weight in named_adapters(engine.model.hf):
            gradients.setdefault(name, full_weight(weight.grad).numpy().copy())

    engine.optimizer.register_step_pre_hook(keep)
    outcome = run_job(job, rank, NLLLoss())
    outcome.weights = {name: weight.numpy().copy() for name, weight in engine.full_adapter()}
    job.worker.shutdown()
    return outcome, gradients


@pytest.fixture(scope="module")
def lora(folder: Path) -> list[dict[str, tuple[Outcome, Arrays | None]]]:
    return run_ranks(2, lora_ranks, LORA, folder, timeout_s=JOB_S)


@pytest.fixture(scope="module")
def expected_of_peft(folder: Path) -> tuple[list[float], list[float], Arrays, Arrays]:
    """What `expected` is, of peft on the same model: weights are A and B."""
    config = LoraConfig(enabled=True, **ADAPTER)
    model = peft_model(folder, config, dtype=torch.float64)
    parameters = peft_parameters(model)
    start_values = random_adapter(adapter_infos(adapted_layers(build_meta_model(folder), config), config))
    assert sorted(parameters) == sorted(start_values), "peft adapts other layers"
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(start_values[name])
    losses, norms, gradients = plain_loop(model, parameters)
    # Those of the worker are read when its optimizer steps, as they are clipped.
    clipped = min(1.0, MAX_GRAD_NORM / (norms[0] + 1e-6))
    gradients = {name: gradient * clipped for name, gradient in gradients.items()}
    return losses, norms, gradients, {name: weight.detach().numpy() for name, weight in parameters.items()}


@pytest.mark.parametrize("case", LORA, ids=str)
def test_adapters_train_as_a_plain_loop_of_peft(case: Case, lora: list, expected_of_peft: tuple) -> None:
    assert all(len(kept or ()) == len(expected_of_peft[2]) for rank in lora for kept in [rank[str(case)][1]])
    check(lora, case, expected_of_peft, most=OF_ADAPTERS)


@pytest.fixture(scope="module")
def megatron(folder: Path) -> list[dict[str, tuple[Outcome, Arrays | None]]]:
    return run_ranks(2, ranks, MEGATRON, folder, timeout_s=JOB_S)


@pytest.mark.slow
@pytest.mark.parametrize("case", MEGATRON, ids=str)
def test_megatron_layouts_train_as_a_plain_loop(case: Case, megatron: list, expected: tuple) -> None:
    check(megatron, case, expected)
