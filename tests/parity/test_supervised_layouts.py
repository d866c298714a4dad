"""Supervised training in layouts of both workers against a plain transformers loop in float64.

The loop adds up cross-entropies of whole rows and divides once by the trained tokens of the batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.models.hf.loading import load_causal_lm, named_weights
from tests.helpers.gloo import JOB_S, run_ranks
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
DTENSOR = [
    Case(family="qwen3", capacity=48),
    Case(family="qwen3", batching="fixed", capacity=2),
    Case(family="qwen3", tp=2, batching="padded", capacity=100),
    Case(family="qwen3", cp=2),
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
    batch, model = layout_batch(), load_causal_lm(folder, dtype=torch.float64)
    ids, lengths = batch.tensor("input_ids").long(), batch.tensor("input_lengths").tolist()
    mask, weights = batch.tensor("token_mask").bool(), batch.tensor("sample_mask").double()
    adam, losses, norms, gradients = torch.optim.AdamW(model.parameters(), **ADAM), [], [], {}
    total = float((mask.sum(1) * weights).sum())
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        for row, length in enumerate(lengths):
            labels = torch.where(mask[row, 1:length], ids[row, 1:length], -100)
            logits = model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0, :-1]
            loss = loss + weights[row] * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        (loss / total).backward()
        if step == 0:
            gradients = {name: weight.grad.numpy().copy() for name, weight in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        adam.step()
        adam.zero_grad()
        losses.append(loss.item() / total)
    return losses, norms, gradients, {name: weight.detach().numpy() for name, weight in named_weights(model)}


def check(found: list[dict[str, tuple[Outcome, Arrays | None]]], case: Case, expected: tuple) -> None:
    losses, norms, gradients, weights = expected
    for of_rank in found:
        outcome, kept = of_rank[str(case)]
        assert outcome.losses == pytest.approx(losses, rel=RELATIVE)
        assert outcome.norms == pytest.approx(norms, rel=RELATIVE)
        for name, gradient in (kept or {}).items():
            assert relative_gap(gradient, gradients[name]) <= GRADIENTS, name
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


@pytest.fixture(scope="module")
def megatron(folder: Path) -> list[dict[str, tuple[Outcome, Arrays | None]]]:
    return run_ranks(2, ranks, MEGATRON, folder, timeout_s=JOB_S)


@pytest.mark.slow
@pytest.mark.parametrize("case", MEGATRON, ids=str)
def test_megatron_layouts_train_as_a_plain_loop(case: Case, megatron: list, expected: tuple) -> None:
    check(megatron, case, expected)
