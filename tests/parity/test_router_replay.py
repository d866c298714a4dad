"""Forced routes in every layout, on both workers, against one Hugging Face model in float64 with the same routes.

One spawn per world size. Some tokens have no route: they take the model's own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from nemo_rl.distributed.packing import PackPlan
from nemo_rl.models.dtensor.parallelize import full_weight
from nemo_rl.models.dtensor.train_step import OptimizerStep
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.policy.microbatch import PassShape
from nemo_rl.models.policy.routes.replay import RouteReplayer
from nemo_rl.models.policy.routes.slices import RouteShard, TokenPlaces
from tests.helpers import megatron_layouts
from tests.helpers.case_selection import cases_of_this_run, pairwise, params
from tests.helpers.gloo import JOB_S, run_ranks
from tests.helpers.megatron_models import write_experts
from tests.helpers.model_families import FAMILY_SIZES
from tests.helpers.parallel_layouts import (
    AXES,
    Arrays,
    Case,
    Job,
    Outcome,
    force_routes,
    forced_routes,
    reference,
    routes_of,
    run_job,
    start,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(JOB_S + 100)]

LOGPROBS, GRADIENTS, RELATIVE, WEIGHTS = 2e-6, 1e-5, 1e-5, 2e-5
"""Bounds: absolute of logits and log-probabilities, of each gradient relative to its largest element, relative of loss
and gradient norm, absolute of weights after the steps."""
Replay = partial(Case, family="qwen3_moe", replay=True)
Megatron, DTensor = partial(Replay, engine="megatron"), partial(Replay, engine="dtensor")
PADDED, FIXED = {"batching": "padded", "capacity": 100}, {"batching": "fixed", "capacity": 2}
FULL, SELECTIVE = {"recompute": True}, {"recompute": "selective", "settings": {"recompute_modules": ("moe",)}}
SEQUENCE = {"tp": 2, "sp": True}
FOUR_MICROBATCHES = {"pp": 2, "capacity": 40}


def cases_of_one() -> list[Case]:
    return [Megatron(), Megatron(**PADDED, **FULL), DTensor(), DTensor(**PADDED, **FULL), Megatron(**SELECTIVE)]


def cases_of_two() -> list[Case]:
    megatron = [
        Megatron(**SEQUENCE),
        Megatron(**SEQUENCE, **PADDED, **FULL),
        Megatron(cp=2),
        Megatron(cp=2, **PADDED, **FULL),
        Megatron(**FOUR_MICROBATCHES),
        Megatron(**FOUR_MICROBATCHES, **FULL),
        Megatron(pp=2, **FIXED, **FULL),
        Megatron(ep=2),
        Megatron(ep=2, **FULL),
    ]
    dtensor = [
        DTensor(),
        DTensor(**FULL),
        DTensor(cp=2),
        DTensor(cp=2, **PADDED, **FULL),
        DTensor(tp=2),
        DTensor(**SEQUENCE, **FULL),
        DTensor(batching="uneven"),
    ]
    return [*megatron, *dtensor]


def cases_of_four() -> list[Case]:
    four = {"tp": 2, "cp": 2, "sp": True}
    return [
        Megatron(**four, ep=4, etp=1),
        Megatron(**four, ep=4, etp=1, **FULL),
        Megatron(**SEQUENCE, pp=2, ep=2, etp=1, **FULL),
        DTensor(**four),
    ]


def run_case(rank: int, world_size: int, case: Case, folder: Path) -> Outcome:
    if case.engine == "megatron":
        outcome = megatron_layouts.run_case(rank, world_size, case, folder)
        megatron_layouts.forget_models()
        return outcome
    job = start(rank, world_size, case, folder)
    logits = dtensor_logits(job)
    with dtensor_gradients() as gradients:
        outcome = run_job(job, rank)
    job.worker.shutdown()
    return replace(outcome, logits=logits, gradients=gradients if rank == 0 else None)


def dtensor_logits(job: Job) -> np.ndarray:
    """(collective) `[n, T, V]` at every token of this rank's rows, 0 in the padding."""
    worker, ids_nT = job.worker, job.shard.tensor("input_ids")
    found_nTV = torch.zeros(*ids_nT.shape, FAMILY_SIZES["vocab_size"])
    select_NT = torch.zeros_like(ids_nT, dtype=torch.bool)
    worker.engine.model.eval()
    with routes_of(worker, job) as replay, torch.no_grad():
        layout = worker.batch_layout(job.plan)
        runner = worker.engine.runner(layout, replay)
        for rows in job.plan.microbatches[0]:
            micro = runner._build(job.shard, rows, select_NT, fields=())
            with runner._routes.pass_of(micro):
                values, tokens = worker.engine.model(
                    micro.inputs, sampling=layout.sampling, top_k=FAMILY_SIZES["vocab_size"]
                )
            whole = torch.empty_like(values).scatter_(2, tokens, values)
            for place, (row, length) in enumerate(zip(micro.rows, micro.lengths, strict=True)):
                line, first = (0, sum(micro.inputs.segments.lengths[:place])) if job.plan.packed else (place, 0)
                found_nTV[row, :length] = whole[line, first : first + length]
    return found_nTV.numpy()


@contextmanager
def dtensor_gradients() -> Iterator[Arrays]:
    """The whole gradients of the first optimizer step, before clipping."""
    kept: Arrays = {}
    finish = OptimizerStep.finish

    def keep_and_finish(step: OptimizerStep) -> float | None:
        if not kept:
            for name, weight in step._model.hf.named_parameters():
                kept[name] = full_weight(weight.grad).float().numpy().copy()
        return finish(step)

    with patch.object(OptimizerStep, "finish", keep_and_finish):
        yield kept


# Faults that the comparison must find.


def left_out() -> object:
    return patch.object(RouteReplayer, "choose", lambda *_: None)


def next_token() -> object:
    """Every token gets the route of its successor."""
    honest = RouteShard.tokens

    def tokens(shard: RouteShard, plan: PackPlan, lengths: Sequence[int], shape: PassShape) -> TokenPlaces:
        found = honest(shard, plan, lengths, shape)
        last_M = torch.tensor(lengths)[found.row_M] - 1
        return replace(found, column_M=torch.minimum(found.column_M + 1, last_M))

    return patch.object(RouteShard, "tokens", tokens)


def recomputed_freely() -> object:
    """Recomputed layers choose for themselves, or as the microbatch that ran last."""
    return patch.object(RouteReplayer, "on_backward", lambda *_: None)


FAULTS: dict[str, tuple[Case, Callable[[], object]]] = {
    "left out, megatron": (Megatron(**SEQUENCE), left_out),
    "left out, dtensor": (DTensor(cp=2), left_out),
    "next token": (Megatron(cp=2), next_token),
    "recomputed freely": (Megatron(**FOUR_MICROBATCHES, **FULL), recomputed_freely),
}


FOUR = [Megatron(**SEQUENCE, cp=2, ep=4, etp=1), Megatron(**SEQUENCE, pp=2, ep=2, etp=1, **FULL)]
TWO = pairwise(cases_of_two(), AXES, kept=[case for case, _ in FAULTS.values()])
"""Of `make test`."""


def one_rank(rank: int, folder: Path) -> dict[str, Outcome]:
    return {str(case): run_case(rank, 1, case, folder) for case in cases_of_one()}


def two_ranks(rank: int, cases: Sequence[Case], folder: Path) -> dict[str, Outcome]:
    found = {str(case): run_case(rank, 2, case, folder) for case in cases}
    for name, (case, fault) in FAULTS.items():
        with fault():
            found[name] = run_case(rank, 2, case, folder)
    return found


def four_ranks(rank: int, cases: Sequence[Case], folder: Path) -> dict[str, Outcome]:
    return {str(case): run_case(rank, 4, case, folder) for case in cases}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Outcome:
    routes = forced_routes(load_model_config(str(folder)))
    return reference(folder, dtype=torch.float64, prepare=lambda model: force_routes(model, routes))


@pytest.fixture(scope="module")
def one(folder: Path) -> list[dict[str, Outcome]]:
    return run_ranks(1, one_rank, folder, timeout_s=JOB_S)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Outcome]]:
    cases = cases_of_this_run(request, cases_of_two(), TWO)
    return run_ranks(2, two_ranks, cases, folder, timeout_s=JOB_S)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, folder: Path, two: object) -> list[dict[str, Outcome]]:
    cases = cases_of_this_run(request, cases_of_four(), FOUR)
    return run_ranks(4, four_ranks, cases, folder, timeout_s=JOB_S)


def problems(outcomes: Sequence[Outcome], expected: Outcome) -> list[str]:
    found: list[str] = []
    for outcome in outcomes:
        for name, got, wanted in (
            ("logits", outcome.logits, expected.logits),
            ("log-probabilities", outcome.logprobs, expected.logprobs),
            ("top-k log-probabilities", outcome.topk, expected.topk),
        ):
            assert got is not None and wanted is not None
            error = np.abs(got - wanted[list(outcome.rows)]).max() if outcome.is_last_stage else np.abs(got).max()
            found += [f"{name} differ by {error:.1e}"] if error > LOGPROBS else []
        for name, got, wanted in (("loss", outcome.losses, expected.losses), ("norm", outcome.norms, expected.norms)):
            found += [f"{name}: {got}, expected {wanted}"] if got != pytest.approx(wanted, rel=RELATIVE) else []
    assert outcomes[0].gradients and expected.gradients and outcomes[0].weights and expected.weights
    for name, wanted in expected.gradients.items():
        gap = np.abs(outcomes[0].gradients[name] - wanted).max() / (np.abs(wanted).max() or 1.0)
        found += [f"gradient of {name} differs by {gap:.1e}"] if gap > GRADIENTS else []
    for name, wanted in expected.weights.items():
        gap = np.abs(outcomes[0].weights[name] - wanted).max()
        found += [f"{name} differs by {gap:.1e} after the steps"] if gap > WEIGHTS else []
    return found


@pytest.mark.parametrize("case", cases_of_one(), ids=str)
def test_one_rank_replays(case: Case, one: list[dict[str, Outcome]], expected: Outcome) -> None:
    assert problems([rank[str(case)] for rank in one], expected) == []


@pytest.mark.parametrize("case", params(cases_of_two(), TWO), ids=str)
def test_two_ranks_replay(case: Case, two: list[dict[str, Outcome]], expected: Outcome) -> None:
    assert problems([rank[str(case)] for rank in two], expected) == []


@pytest.mark.parametrize("case", params(cases_of_four(), FOUR), ids=str)
def test_four_ranks_replay(case: Case, four: list[dict[str, Outcome]], expected: Outcome) -> None:
    assert problems([rank[str(case)] for rank in four], expected) == []


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_finds_a_fault(name: str, two: list[dict[str, Outcome]], expected: Outcome) -> None:
    found = problems([rank[name] for rank in two], expected)
    assert any("gradient of model.layers.0.mlp.gate" in line for line in found), found
    # A forward pass without recomputation was right.
    assert any("logits" in line for line in found) == (name != "recomputed freely")


def test_forced_routes_are_not_the_models_own(folder: Path, expected: Outcome) -> None:
    free = reference(folder, dtype=torch.float64)
    assert free.logits is not None and expected.logits is not None
    assert np.abs(free.logits - expected.logits).max() > 0.1
