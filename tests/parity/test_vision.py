"""Rows with images in every layout of the DTensor worker, against one Hugging Face model in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.config.policy import VisionConfig
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan, plan_fixed, plan_packs, plan_padded
from nemo_rl.models.attention.varlen import ATTENTION_NAME
from nemo_rl.models.dtensor.parallelize import PolicyModel, full_weight
from nemo_rl.models.dtensor.train_step import place_images
from nemo_rl.models.hf.loading import load_causal_lm, load_model_config, named_weights
from nemo_rl.models.policy.microbatch import PassShape, build_microbatch
from nemo_rl.models.vision import family_of, freeze_tower, is_in_tower
from tests.helpers.gloo import JOB_S, run_ranks
from tests.helpers.hf_reference import global_scale
from tests.helpers.parallel_layouts import LOSS, Arrays, Case, compare_arrays, exported, policy_of
from tests.helpers.tiny_model import tiny_worker
from tests.helpers.vision_models import FAMILIES, hf_logits, vision_batch, write_vision_folder

LOGPROBS, RELATIVE, GRADIENTS = 2e-6, 1e-5, 5e-5
"""Bounds: absolute of log-probabilities, relative of the loss, relative to the largest element of gradients."""
SMALLEST = 1e-3
"""Share of the largest gradient of all below which a gradient is compared with that."""
ROUNDING = 3.0
"""As many times what Hugging Face itself is off in float32 may log-probabilities be off: 2.3 on some processors."""
FAMILY_BY_DTYPE = [(family, is_packed) for family in FAMILIES for is_packed in (False, True)]
LONG = pytest.mark.timeout(JOB_S + 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionCase:
    layout: Case
    frozen: bool = False
    with_images: bool = True

    def __str__(self) -> str:
        return f"{self.layout}{'-frozen' if self.frozen else ''}{'' if self.with_images else '-text'}"


TWO = [
    # Ranks of which some have no image in a microbatch.
    VisionCase(layout=Case(family="qwen2_5_vl", batching="fixed", capacity=1)),
    VisionCase(layout=Case(family="qwen2_5_vl", tp=2, recompute=True)),
    VisionCase(layout=Case(family="qwen2_5_vl", tp=2, batching="padded", capacity=100), frozen=True),
    VisionCase(layout=Case(family="qwen2_5_vl", cp=2)),
    VisionCase(layout=Case(family="qwen2_5_vl", cp=2, batching="padded", capacity=120)),
    VisionCase(layout=Case(family="qwen2_5_vl", capacity=60), with_images=False),
    VisionCase(layout=Case(family="smolvlm", capacity=60)),
    VisionCase(layout=Case(family="smolvlm", batching="fixed", capacity=1), frozen=True),
    VisionCase(layout=Case(family="smolvlm", tp=2)),
    VisionCase(layout=Case(family="smolvlm", cp=2, recompute=True)),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    rows: tuple[int, ...]
    logprobs: np.ndarray
    loss: float
    gradients: Arrays
    """By name; frozen weights have none."""
    moved: tuple[str, ...] = ()
    """Weights that a step of the optimizer has changed."""


def plan_of(case: Case, layout: ParallelLayout, lengths: list[int]) -> PackPlan:
    common = {"dp_world": layout.dp, "pad_multiple": layout.length_multiple}
    if case.batching == "fixed":
        return plan_fixed(lengths, rows_per_microbatch=case.capacity, **common)
    return (plan_packs if case.batching == "packed" else plan_padded)(lengths, capacity=case.capacity, **common)


def two_ranks(rank: int, root: Path) -> dict[str, Numbers]:
    return {str(case): run_case(rank, case, root / case.layout.family) for case in TWO}


def run_case(rank: int, case: VisionCase, folder: Path) -> Numbers:
    policy = policy_of(case.layout, folder).model_copy(
        update={"vision": VisionConfig(freeze_tower=case.frozen), "max_grad_norm": None}
    )
    layout = ParallelLayout.of_policy(policy, world_size=2)
    worker = tiny_worker(policy, rank=rank, world_size=2)
    batch = vision_batch(load_model_config(folder), with_images=case.with_images)
    plan, dp = plan_of(case.layout, layout, batch.tensor("input_lengths").tolist()), layout.coordinates(rank).dp
    rows, plan = plan.rows_of_rank(dp), plan.for_rank(dp)
    shard = batch.select_indices(rows)
    gradients, before = Arrays(), exported(worker)

    def keep(*_: object) -> None:
        for name, weight in named_weights(worker.engine.model.hf):
            if weight.grad is not None:
                gradients[name] = full_weight(weight.grad).numpy().copy()

    worker.engine.optimizer.register_step_pre_hook(keep)
    logprobs = worker.get_logprobs(shard, plan=plan).numpy()
    loss = worker.train(shard, LOSS, plan=plan).loss[0]
    after = exported(worker)
    worker.shutdown()
    moved = tuple(name for name in before if not np.array_equal(before[name], after[name]))
    return Numbers(rows=rows, logprobs=logprobs, loss=loss, gradients=gradients, moved=moved)


def reference(folder: Path, *, dtype: torch.dtype, frozen: bool = False, with_images: bool = True) -> Numbers:
    """Return what Hugging Face gives, one row at a time, with its own positions."""
    model = load_causal_lm(folder, dtype=dtype)
    if frozen:
        freeze_tower(model)
    batch, rows = vision_batch(model.config, with_images=with_images), []
    ids, width = batch.tensor("input_ids").long(), batch.tensor("input_ids").shape[1]
    for row, length in enumerate(batch.tensor("input_lengths").tolist()):
        logprobs = hf_logits(model, batch, row)[:-1].log_softmax(-1).gather(-1, ids[row, 1:length, None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (1, width - length)))
    found = torch.stack(rows)
    loss = LOSS(found, batch, scale=global_scale(batch)).loss
    loss.backward()
    return Numbers(
        rows=tuple(range(len(rows))),
        logprobs=found.detach().numpy(),
        loss=loss.item(),
        gradients={name: each.grad.numpy() for name, each in model.named_parameters() if each.grad is not None},
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    for family in FAMILIES:
        write_vision_folder(found / family, family)
    return found


@pytest.fixture(scope="module")
def two(root: Path) -> list[dict[str, Numbers]]:
    return run_ranks(2, two_ranks, root, timeout_s=JOB_S)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def expected(root: Path) -> object:
    @functools.cache
    def of(family: str, frozen: bool, with_images: bool) -> tuple[Numbers, float]:
        exact, single = (
            reference(root / family, dtype=dtype, frozen=frozen, with_images=with_images)
            for dtype in (torch.float64, torch.float32)
        )
        return exact, max(LOGPROBS, ROUNDING * float(np.abs(exact.logprobs - single.logprobs).max()))

    return of


@pytest.mark.parametrize(("family", "is_packed"), FAMILY_BY_DTYPE)
def test_logits_and_gradients_equal_hugging_face_in_float64(family: str, is_packed: bool, root: Path) -> None:
    plain, own = (load_causal_lm(root / family, dtype=torch.float64) for _ in range(2))
    own.set_attn_implementation({"text_config": ATTENTION_NAME})
    model, batch = PolicyModel(own), vision_batch(plain.config)
    lengths = batch.tensor("input_lengths").tolist()
    rows = range(len(lengths))
    select_NT = torch.ones_like(batch.tensor("input_ids"), dtype=torch.bool)
    micro = build_microbatch(batch, rows, select_NT=select_NT, fields=(), is_packed=is_packed, shape=PassShape())
    inputs = place_images(micro, batch, model.vision, names=[str(row) for row in rows]).inputs
    found = own(
        **model._tokens(inputs), position_ids=inputs.position_ids, segments=inputs.segments, use_cache=False
    ).logits
    weigh = torch.Generator().manual_seed(1)
    total, own_total = torch.zeros(()).double(), torch.zeros(()).double()
    for row in rows:
        theirs = hf_logits(plain, batch, row)
        ours = found[inputs.row_ns == row]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        weights = torch.randn(theirs.shape, generator=weigh, dtype=torch.float64)
        total, own_total = total + (theirs * weights).sum(), own_total + (ours * weights).sum()
    total.backward()
    own_total.backward()
    for (name, weight), (_, other) in zip(plain.named_parameters(), own.named_parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None, name
        torch.testing.assert_close(other.grad, weight.grad, rtol=1e-9, atol=1e-9, msg=name)


@LONG
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_equal_hugging_face(case: VisionCase, two: list[dict[str, Numbers]], expected) -> None:
    exact, bound = expected(case.layout.family, case.frozen, case.with_images)
    outcomes = [rank[str(case)] for rank in two]
    for outcome in outcomes:
        mask = outcome.logprobs != 0
        error = np.abs(outcome.logprobs - exact.logprobs[list(outcome.rows)])[mask].max()
        assert error <= bound, f"log-probabilities differ by {error:.1e}"
        assert outcome.loss == pytest.approx(exact.loss, rel=RELATIVE)
    # Some are zero but for rounding: a softmax does not see the bias of its keys.
    floor = SMALLEST * max(float(np.abs(each).max()) for each in exact.gradients.values())

    def gap(found: np.ndarray, expected: np.ndarray) -> float:
        return float(np.abs(found - expected).max()) / max(floor, float(np.abs(expected).max()))

    compare_arrays(outcomes[0].gradients, exact.gradients, gap, GRADIENTS)


@LONG
def test_a_frozen_tower_keeps_every_bit(two: list[dict[str, Numbers]], root: Path) -> None:
    for case in TWO:
        moved = two[0][str(case)].moved
        family = family_of(load_model_config(root / case.layout.family))
        assert family is not None
        in_tower = [name for name in moved if is_in_tower(name, family)]
        assert bool(in_tower) == (case.with_images and not case.frozen), (str(case), in_tower)
        assert len(moved) > len(in_tower)
