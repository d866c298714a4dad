"""Megatron ranks against one Hugging Face model in float64: every axis, one spawn per world size."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.megatron import train_step
from nemo_rl.models.megatron.setup import PolicyGPT
from tests.helpers import parallel_layouts
from tests.helpers.case_selection import cases_of_this_run, pairwise, params
from tests.helpers.gloo import JOB_S, run_ranks
from tests.helpers.megatron_layouts import BUFFER, forget_models, harmful, moments, run_case
from tests.helpers.megatron_models import FAMILIES, hf_model
from tests.helpers.model_families import FAMILY_SIZES, write_with_tokenizer
from tests.helpers.parallel_layouts import (
    AUX_COEFFICIENT,
    AXES,
    SPLITS,
    Arrays,
    Case,
    Folders,
    Outcome,
    compare_arrays,
    exported_from,
    layout_batch,
    load_and_step,
    plan_of,
    policy_of,
    reference,
    relative_gap,
    save_after_a_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(JOB_S + 100)]

LOGITS, GRADIENTS, RELATIVE, WEIGHTS = 2e-6, 1e-5, 1e-5, 2e-5
"""Bounds: absolute of logits and log-probabilities, of each gradient relative to its largest element, relative of loss
and gradient norm, absolute of weights after the steps. float32 alone is off by half of the first in Hugging Face."""
TINY = {name: FAMILY_SIZES[name] for name in ("vocab_size", "pad_token_id")}
TINY |= {"num_hidden_layers": 2, "initializer_range": 0.08}
BIAS_RATE = 0.05
MOVING = {"moe_router_bias_update_rate": BIAS_RATE}
Megatron = partial(Case, engine="megatron")
Dense, Experts = partial(Megatron, family="qwen3"), partial(Megatron, family="qwen3_moe")
Biased = partial(Megatron, family="glm4_moe")
PADDED, FIXED = {"batching": "padded", "capacity": 100}, {"batching": "fixed", "capacity": 2}
FULL, SELECTIVE = {"recompute": True}, {"recompute": "selective"}
NORMS = {**SELECTIVE, "settings": {"recompute_modules": ("layernorm",)}}
SEQUENCE = {"tp": 2, "sp": True}
WHOLE_EXPERTS = {**SEQUENCE, "etp": 1}
# Four microbatches of two stages.
PIPELINE = {"pp": 2, "capacity": 40}
FOUR_PADDED = {"pp": 2, **FIXED}
ALL_ROWS = {"batching": "fixed", "capacity": parallel_layouts.ROWS}
"""One microbatch, a third of it padding."""


def cases_of_one() -> list[Case]:
    cases = [Megatron(family=family) for family in FAMILIES]
    cases += [Megatron(family=family, **PADDED, **FULL) for family in FAMILIES]
    cases += [Dense(**SELECTIVE), Experts(**SELECTIVE), Dense(**FIXED), Biased(settings=MOVING, **SELECTIVE)]
    return [*cases, Dense(**NORMS), Experts(**NORMS)]


def cases_of_two() -> list[Case]:
    dense = [
        Dense(),
        Dense(**FIXED, **FULL),
        Dense(tp=2),
        Dense(tp=2, **PADDED, **FULL),
        Dense(**SEQUENCE, **SELECTIVE),
        Dense(**SEQUENCE, **PADDED),
        Dense(**PIPELINE),
        Dense(**FOUR_PADDED, **FULL),
        Dense(cp=2, **FULL),
        Dense(cp=2, **PADDED),
    ]
    experts = [
        Experts(**PADDED),
        Experts(**SEQUENCE, **FULL),
        Experts(**SEQUENCE, **PADDED),
        Experts(**WHOLE_EXPERTS),
        Experts(ep=2),
        Experts(ep=2, **PADDED, **FULL),
        Experts(ep=2, **WHOLE_EXPERTS, **PADDED),
        Experts(**PIPELINE, **SELECTIVE),
        Experts(**FOUR_PADDED, **FULL),
        Experts(cp=2),
        Experts(cp=2, **PADDED, **FULL),
        Experts(cp=2, ep=2),
        Experts(ep=2, **WHOLE_EXPERTS, settings={"moe_token_dispatcher_type": "allgather"}),
    ]
    families = [Megatron(family=family, **layout) for family, layout in FAMILY_LAYOUTS]
    families += [Dense(batching="uneven"), Experts(ep=2, batching="uneven")]
    return [*dense, *experts, *families, FROZEN, *MOVED, *DISTILLED]


FAMILY_LAYOUTS = [
    ("llama", SEQUENCE),
    ("llama", {**PIPELINE, "loss": "entropy"}),
    ("llama", {"cp": 2, "loss": "gspo"}),
    ("qwen2", {"tp": 2, "loss": "entropy"}),
    ("qwen2", FOUR_PADDED),
    ("mistral", {"cp": 2}),
    ("mistral", {**SEQUENCE, **PADDED}),
    ("mixtral", {"ep": 2}),
    ("mixtral", PIPELINE),
    ("glm4_moe", SEQUENCE),
    ("glm4_moe", PIPELINE),
    ("glm4_moe", {"cp": 2, **FULL}),
    ("glm4_moe", {"ep": 2, **PADDED}),
]
DISTILLED = [Dense(**layout, loss="distillation") for layout in (PIPELINE, {**SEQUENCE, **PADDED}, {"cp": 2})]
FROZEN = Experts(ep=2, settings={"freeze_moe_router": True})
MOVED = [
    Biased(settings=MOVING, **layout)
    for layout in (SEQUENCE, PIPELINE, {"cp": 2, **PADDED}, {"ep": 2, "batching": "uneven", **FULL})
]
BALANCED = [Experts(aux=True, **layout) for layout in (SEQUENCE, {"cp": 2, **PADDED}, {}, {"ep": 2, **FIXED}, PIPELINE)]
HALF = [
    case(precision="bfloat16", **layout)
    for case, layout in ((Dense, SEQUENCE), (Dense, PIPELINE), (Dense, {"cp": 2}), (Experts, {"ep": 2}))
]
FAULTS = [
    Dense(tp=2, fault="uninitialized"),  # Of the tensor parallel ranks all but the first count as copies in the norm.
    Experts(**WHOLE_EXPERTS, fault="unmarked"),  # Gradients of experts that tensor ranks have whole are not added up.
    Dense(cp=2, **FULL, fault="doubled"),
    Dense(**PIPELINE, fault="swap"),
]


def cases_of_four() -> list[Case]:
    both = {"pp": 2, "ep": 2, **WHOLE_EXPERTS}
    return [
        Dense(tp=2, **PIPELINE),
        Dense(tp=2, **FOUR_PADDED, **FULL),
        Dense(cp=2, **SEQUENCE),
        Dense(cp=2, **SEQUENCE, **PADDED, **FULL),
        # Experts split over both their axes: every rank of a tensor group has another number of tokens for its own.
        Experts(cp=2, ep=2, **SEQUENCE),
        Experts(ep=2, **SEQUENCE, batching="uneven", **FULL),
        Experts(cp=2, ep=4, **WHOLE_EXPERTS, **PADDED, **FULL),
        Experts(**{**both, "capacity": 40}),
        Experts(**both, **FIXED, **FULL),
        Dense(**PIPELINE),
        Experts(**SEQUENCE),
    ]


def cases_of_eight() -> list[Case]:
    """Experts over both their axes besides a pipeline, and twice over the data: eight ranks are the fewest."""
    return [Experts(ep=2, cp=2, **SEQUENCE, **PIPELINE), Experts(ep=2, **SEQUENCE, **PADDED)]


SAME_SHARDS = [
    Dense(tp=2),
    Experts(cp=2),
    # The DTensor worker splits no sequences between the blocks of a model with experts; fixed rows make the same plan.
    Experts(**SEQUENCE, **FIXED),
    Dense(cp=2),
    Dense(),
    Experts(**FIXED),
]
"""For both workers."""
SOME_SHARDS = SAME_SHARDS[:3]
"""Of `make test`."""


def for_dtensor(case: Case) -> Case:
    return replace(case, engine="dtensor", sp=False)


ONE, FOUR = pairwise(cases_of_one(), AXES, kept=[Dense(**NORMS)]), pairwise(cases_of_four(), SPLITS)
TWO = pairwise(
    cases_of_two(),
    AXES,
    kept=[
        *(replace(case, fault=None) for case in FAULTS),
        *(Dense(), Dense(**FOUR_PADDED, **FULL), FROZEN, *DISTILLED),
        *(Biased(settings=settings, **SEQUENCE) for settings in ({}, MOVING)),
    ],
)
SOME_BALANCED, SOME_HALF = BALANCED[:2], HALF[::3]
"""Of `make test`."""


SAVED = {"tp2": Dense(tp=2), "pp2": Dense(**PIPELINE), "ep2": Experts(ep=2)}
LOADED = {"tp2": Dense(**PIPELINE), "pp2": Dense(tp=2), "ep2": Experts(**SEQUENCE)}
"""By other two ranks; one rank loads `tp2` and `ep2`."""
LOADED_BY_ONE = {"tp2": Dense(), "ep2": Experts()}


def run_all(rank: int, world_size: int, cases: Sequence[Case], folders: Folders) -> dict[str, object]:
    found: dict[str, object] = {}
    threads = []
    for name, case in {str(case): case for case in cases}.items():
        found[name] = run_case(rank, world_size, case, folders.model(case.family))
        forget_models()
        threads.append(num_threads())
    return {**found, "threads": threads}


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def two_ranks(rank: int, cases: Sequence[Case], shards: Sequence[Case], folders: Folders) -> dict[str, object]:
    found = run_all(rank, 2, [*cases, *shards], folders)
    for case in map(for_dtensor, shards):
        found[f"dtensor {case}"] = parallel_layouts.run_case(rank, 2, case, folders.model(case.family))
        forget_models()
    for prefix, cases, run in (("saved", SAVED, save_after_a_step), ("loaded", LOADED, load_and_step)):
        for name, case in cases.items():
            model, target = folders.model(case.family), folders.checkpoint(name)
            found[f"{prefix} {name}"] = run(rank, 2, case, model, target, moments_of=moments)
            forget_models()
    dtensor = Case(family="qwen3", tp=2)
    save_after_a_step(rank, 2, dtensor, folders.model("qwen3"), folders.checkpoint("dtensor"))
    for name, case in (("dtensor", Dense(tp=2)), ("tp2", dtensor)):
        weights = folders.checkpoint(name) / "weights"
        found[f"weights of {name}"] = exported_from(rank, 2, case, folders.model("qwen3"), weights)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = Folders(tmp_path_factory.mktemp("layouts"))
    for family in FAMILIES:
        write_with_tokenizer(found.model(family), hf_model(family, **TINY))
    for name in (*SAVED, "dtensor"):
        found.checkpoint(name).mkdir(parents=True)
    return found


Expected = Callable[[Case], Outcome]


@pytest.fixture(scope="module")
def expected(folders: Folders) -> Expected:
    @functools.cache
    def of_family(family: str, *, moves_bias: bool, loss: str) -> Outcome:
        more = moving_bias if moves_bias else None
        return reference(folders.model(family), dtype=torch.float64, more_loss=more, loss=loss)

    return lambda case: of_family(case.family, moves_bias=MOVING.items() <= case.settings.items(), loss=case.loss)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folders: Folders) -> list[dict[str, object]]:
    everything = [*cases_of_two(), *BALANCED, *HALF, *FAULTS]
    cases = cases_of_this_run(request, everything, [*TWO, *SOME_BALANCED, *SOME_HALF, *FAULTS])
    shards = cases_of_this_run(request, SAME_SHARDS, SOME_SHARDS)
    return run_ranks(2, two_ranks, cases, shards, folders, timeout_s=JOB_S)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, folders: Folders, two: object) -> list[dict[str, object]]:
    cases = cases_of_this_run(request, cases_of_four(), FOUR)
    return run_ranks(4, run_all, 4, cases, folders, timeout_s=JOB_S)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def eight(folders: Folders, four: object) -> list[dict[str, object]]:
    return run_ranks(8, run_all, 8, cases_of_eight(), folders, timeout_s=JOB_S)  # type: ignore[return-value]


def outcomes_of(ranks: Sequence[dict[str, object]], case: Case) -> list[Outcome]:
    return [rank[str(case)] for rank in ranks]  # type: ignore[misc]


def compare(outcomes: Sequence[Outcome], expected: Outcome) -> None:
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=RELATIVE)
        assert outcome.norms == pytest.approx(expected.norms, rel=RELATIVE)
        for name in ("logits", "logprobs", *outcome.more):
            found, wanted = getattr(outcome, name), getattr(expected, name)[list(outcome.rows)]
            error = np.abs(found - wanted).max() if outcome.is_last_stage else np.abs(found).max()
            assert error <= LOGITS, f"{name} differ by {error:.1e}"
    compare_arrays(outcomes[0].gradients, expected.gradients, relative_gap, GRADIENTS)
    compare_arrays(outcomes[0].weights, expected.weights, lambda a, b: float(np.abs(a - b).max()), WEIGHTS)


# The table.


@pytest.mark.parametrize("case", params(cases_of_one(), ONE), ids=str)
def test_one_rank_equals_hugging_face(case: Case, folders: Folders, expected: Expected) -> None:
    compare([run_case(0, 1, case, folders.model(case.family))], expected(case))


@pytest.mark.parametrize("case", params([case for case in cases_of_two() if case is not FROZEN], TWO), ids=str)
def test_two_ranks_equal_hugging_face(case: Case, two: list[dict[str, object]], expected: Expected) -> None:
    compare(outcomes_of(two, case), expected(case))


@pytest.mark.parametrize("case", params(cases_of_four(), FOUR), ids=str)
def test_four_ranks_equal_hugging_face(case: Case, four: list[dict[str, object]], expected: Expected) -> None:
    compare(outcomes_of(four, case), expected(case))


@pytest.mark.full
@pytest.mark.parametrize("case", cases_of_eight(), ids=str)
def test_eight_ranks_equal_hugging_face(case: Case, eight: list[dict[str, object]], expected: Expected) -> None:
    compare(outcomes_of(eight, case), expected(case))


def test_pipelines_have_four_microbatches_and_ranks_rows_of_their_own(two: list[dict[str, object]]) -> None:
    for case in (Dense(**PIPELINE), Dense(**FOUR_PADDED, **FULL)):
        assert outcomes_of(two, case)[0].num_microbatches == 4
    first, second = outcomes_of(two, Dense())
    assert not set(first.rows) & set(second.rows)
    lengths = layout_batch().tensor("input_lengths").tolist()
    assert len({lengths[row] for row in first.rows}) > 2


def test_float32_alone_keeps_the_bounds_in_hugging_face(folders: Folders, expected: Expected) -> None:
    """So that a bound speaks of the layout; the scale of the weights was chosen for it."""
    for family in FAMILIES:
        compare([reference(folders.model(family))], expected(Megatron(family=family)))


@pytest.mark.parametrize("case", [pytest.param(case, marks=harmful(case.fault)) for case in FAULTS], ids=str)
def test_a_planted_fault_fails_the_comparison(case: Case, two: list[dict[str, object]], expected: Expected) -> None:
    with pytest.raises(AssertionError):
        compare(outcomes_of(two, case), expected(case))
    compare(outcomes_of(two, replace(case, fault=None)), expected(case))


@harmful("uninitialized")
def test_without_its_marks_the_norm_counts_one_tensor_rank_only(two, expected):
    honest, faulty = (outcomes_of(two, Dense(tp=2, fault=fault))[0] for fault in (None, "uninitialized"))
    assert faulty.norms[0] < 0.9 * honest.norms[0]
    # Only the norm and what is clipped by it: the gradients themselves are right.
    compare_arrays(faulty.gradients, expected(Dense()).gradients, relative_gap, GRADIENTS)


@harmful("unmarked")
def test_unmarked_experts_have_the_gradients_of_some_tokens_only(two, expected):
    faulty = outcomes_of(two, Experts(**WHOLE_EXPERTS, fault="unmarked"))[0]
    wanted = expected(Experts()).gradients
    assert faulty.gradients is not None and wanted is not None
    gaps = {name: relative_gap(faulty.gradients[name], wanted[name]) for name in wanted}
    assert all((gap > 0.05) == (".experts." in name) for name, gap in gaps.items())


@pytest.mark.parametrize("case", params(HALF, SOME_HALF), ids=str)
def test_half_precision_stays_near_float32(case: Case, two: list[dict[str, object]], expected: Expected) -> None:
    exact = expected(case)
    for outcome in outcomes_of(two, case):
        if outcome.is_last_stage:
            error = np.abs(outcome.logprobs - exact.logprobs[list(outcome.rows)])
            # Eight bits: log-probabilities of about -6 are off by a few hundredths.
            assert error.mean() < 0.05 and error.max() < 0.5, (error.mean(), error.max())
        assert outcome.norms == pytest.approx(exact.norms, rel=0.1)


# Experts: frozen routers, their bias, their balance.


def test_a_frozen_router_stays_and_everything_else_learns(two, expected, folders):
    outcome, wanted = outcomes_of(two, FROZEN)[0], expected(FROZEN).gradients
    before = {name: weight.detach().numpy() for name, weight in hf_model("qwen3_moe", **TINY).named_parameters()}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert routers and outcome.weights is not None and outcome.gradients is not None and wanted is not None
    for name, weight in before.items():
        assert np.array_equal(outcome.weights[name], weight) == (name in routers), name
    compare_arrays(
        {name: value for name, value in outcome.gradients.items() if name not in routers},
        {name: value for name, value in wanted.items() if name not in routers},
        relative_gap,
        GRADIENTS,
    )
    squares = [float(np.square(value).sum()) for name, value in wanted.items() if name not in routers]
    assert outcome.norms[0] == pytest.approx(sum(squares) ** 0.5, rel=RELATIVE)


def routers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}


def moving_bias(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    """After each step the bias of every expert moves by the rate towards an even load of the step's tokens."""
    counts = {name: torch.zeros_like(router.e_score_correction_bias) for name, router in routers_of(model).items()}

    def count(_: torch.nn.Module, __: object, output: tuple[torch.Tensor, ...], *, name: str) -> None:
        counts[name] += torch.bincount(output[2].flatten(), minlength=len(counts[name]))

    for name, router in routers_of(model).items():
        router.register_forward_hook(partial(count, name=name))

    def move() -> torch.Tensor:
        for name, router in routers_of(model).items():
            router.e_score_correction_bias += BIAS_RATE * torch.sign(counts[name].mean() - counts[name])
            counts[name].zero_()
        return torch.zeros(())

    return move


def test_the_bias_of_experts_moves_with_its_rate_only(two: list[dict[str, object]], folders: Folders) -> None:
    before = dict(hf_model("glm4_moe", **TINY).named_buffers())
    name = next(name for name in before if name.endswith(BUFFER))
    still, moved = (outcomes_of(two, Biased(settings=settings, **SEQUENCE))[0] for settings in ({}, MOVING))
    assert still.weights is not None and moved.weights is not None
    assert np.array_equal(still.weights[name], before[name].numpy())
    steps = np.abs(moved.weights[name] - before[name].numpy()) / BIAS_RATE
    # Three steps, each one up, down or none.
    assert np.allclose(steps, steps.round(), atol=1e-5) and steps.max() > 0.5 and steps.max() < 3.5


Microbatches = Sequence[Sequence[int]]


def balancing(microbatches: Microbatches) -> parallel_layouts.MoreLoss:
    """The loss of a switch transformer: experts x sum over experts of (share of tokens x mean probability).

    Of every layer's router within a microbatch, its padding left out, as a mean over the microbatches.
    """

    def watch(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
        seen: dict[str, list[torch.Tensor]] = {}
        top_k, num_experts = model.config.num_experts_per_tok, model.config.num_experts
        for name, router in routers_of(model).items():
            router.register_forward_hook(
                lambda _, __, output, name=name: seen.setdefault(name, []).append(output[0])  # type: ignore[misc]
            )

        def total() -> torch.Tensor:
            losses = []
            for rows in microbatches:
                for logits in seen.values():
                    prob_TE = torch.cat([logits[row] for row in rows]).softmax(-1)
                    chosen = prob_TE.topk(top_k, dim=-1).indices
                    share_E = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()
                    losses.append(num_experts * (share_E * prob_TE.mean(0)).sum())
            seen.clear()
            return AUX_COEFFICIENT * torch.stack(losses).sum() / len(microbatches)

        return total

    return watch


def balanced_reference(case: Case, folders: Folders, *, ranks: int) -> Outcome:
    folder = folders.model(case.family)
    plan = plan_of(case, ParallelLayout.of_policy(policy_of(case, folder), world_size=ranks))
    microbatches = [rows for mine in plan.microbatches for rows in mine]
    found = reference(folder, dtype=torch.float64, more_loss=balancing(microbatches))
    return found


@pytest.mark.parametrize("case", [Experts(aux=True), Experts(aux=True, **PADDED, **FULL)], ids=str)
def test_the_balance_of_one_rank_is_that_of_the_formula(case: Case, folders: Folders) -> None:
    compare([run_case(0, 1, case, folders.model(case.family))], balanced_reference(case, folders, ranks=1))


@pytest.mark.parametrize("case", params(BALANCED, SOME_BALANCED), ids=str)
def test_the_balance_does_not_depend_on_the_layout(case, two, folders, expected):
    compare(outcomes_of(two, case), balanced_reference(case, folders, ranks=2))
    with pytest.raises(AssertionError):
        compare(outcomes_of(two, case), expected(case))


def test_padding_does_not_count_in_the_balance(folders: Folders) -> None:
    case = Experts(aux=True, **ALL_ROWS)
    wanted = balanced_reference(case, folders, ranks=1)
    compare([run_case(0, 1, case, folders.model(case.family))], wanted)
    with pytest.raises(AssertionError):
        compare([run_case(0, 1, replace(case, fault="unmasked"), folders.model(case.family))], wanted)


@pytest.mark.parametrize("fault", [None, "unmasked"])
def test_padding_does_not_count_for_the_bias(fault: str | None, folders: Folders) -> None:
    counts: list[float] = []
    finalize = train_step.finalize_model_grads

    def count(modules: list[torch.nn.Module], *args: object, **kwargs: object) -> None:
        buffers = modules[0].named_buffers()
        counts.extend(float(count.sum()) for name, count in buffers if name.endswith("local_tokens_per_expert"))
        finalize(modules, *args, **kwargs)

    with patch.object(train_step, "finalize_model_grads", count):
        run_case(0, 1, Biased(settings=MOVING, fault=fault, **ALL_ROWS), folders.model("glm4_moe"))
    num_tokens = int(layout_batch().tensor("input_lengths").sum())
    choices = num_tokens * hf_model("glm4_moe", **TINY).config.num_experts_per_tok
    # Once per step, of the only layer with experts.
    assert (counts == [choices] * parallel_layouts.STEPS) == (fault is None), (counts, choices)


def test_a_balance_weighed_by_the_tokens_of_a_rank_is_another(folders: Folders) -> None:
    """megatron-core's own weight, together with gradients that are not divided by tokens."""
    case = Experts(aux=True, fault="unaveraged")
    with pytest.raises(AssertionError):
        compare([run_case(0, 1, case, folders.model(case.family))], balanced_reference(case, folders, ranks=1))


# Both workers, checkpoints, the end of a worker.


@pytest.mark.parametrize("case", params(SAME_SHARDS, SOME_SHARDS), ids=str)
def test_both_workers_have_the_same_numbers(case: Case, two: list[dict[str, object]]) -> None:
    pairs = zip(outcomes_of(two, case), [rank[f"dtensor {for_dtensor(case)}"] for rank in two], strict=True)
    for place, (megatron, dtensor) in enumerate(pairs):
        assert isinstance(dtensor, Outcome)
        assert megatron.rows == dtensor.rows and megatron.num_microbatches == dtensor.num_microbatches
        np.testing.assert_allclose(megatron.logprobs, dtensor.logprobs, rtol=RELATIVE, atol=0)
        assert megatron.losses == pytest.approx(dtensor.losses, rel=RELATIVE)
        assert megatron.norms == pytest.approx(dtensor.norms, rel=RELATIVE)
        if place == 0:
            compare_arrays(megatron.weights, dtensor.weights, relative_gap, RELATIVE)


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in LOADED), *((name, 1) for name in LOADED_BY_ONE)], ids=str
)
def test_a_checkpoint_continues_in_another_layout(name, ranks, two, folders):
    saved: dict = two[0][f"saved {name}"]  # type: ignore[assignment]
    if ranks == 2:
        loaded: dict = two[0][f"loaded {name}"]  # type: ignore[assignment]
    else:
        case = LOADED_BY_ONE[name]
        target = folders.checkpoint(name)
        loaded = load_and_step(0, 1, case, folders.model(case.family), target, moments_of=moments)
    for part in ("weights", "moments"):
        assert sorted(loaded[part]) == sorted(saved[part])
        for key, value in saved[part].items():
            np.testing.assert_array_equal(loaded[part][key], value, err_msg=f"{part} {key}")
    assert any(value.any() for value in saved["moments"].values())
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=RELATIVE)
    for key, value in saved["after"].items():
        np.testing.assert_allclose(loaded["after"][key], value, rtol=0, atol=WEIGHTS, err_msg=key)


@pytest.mark.parametrize("name", list(SAVED))
def test_a_checkpoint_is_a_folder_that_hugging_face_generates_from(name, two, folders):
    folder = str(folders.checkpoint(name) / "weights")
    model = AutoModelForCausalLM.from_pretrained(folder)
    answer = model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert answer.shape == (1, 7)
    saved: dict = two[0][f"saved {name}"]  # type: ignore[assignment]
    for key, weight in model.named_parameters():
        np.testing.assert_array_equal(weight.detach().numpy(), saved["weights"][key], err_msg=key)


@pytest.mark.parametrize("name", ["tp2", "dtensor"])
def test_the_weights_of_one_worker_load_into_the_other(name, two, folders):
    model = load_causal_lm(folders.checkpoint(name) / "weights")
    for rank in two:
        found: Arrays = rank[f"weights of {name}"]  # type: ignore[assignment]
        assert sorted(found) == sorted(key for key, _ in model.named_parameters())
        for key, weight in model.named_parameters():
            np.testing.assert_array_equal(found[key], weight.detach().numpy(), err_msg=key)


def test_workers_that_were_shut_down_leave_neither_models_nor_threads(two, folders):
    for rank in two:
        threads: list[int] = rank["threads"]  # type: ignore[assignment]
        # The groups of one worker have about fifty.
        assert max(threads) - min(threads) < 25, threads
    run_case(0, 1, Experts(), folders.model("qwen3_moe"))
    gc.collect()
    assert not any(type(left) is PolicyGPT for left in gc.get_objects())
