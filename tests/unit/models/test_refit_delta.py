"""Blocks of changed elements: the very bits arrive in every form, the smallest form is taken, nonsense is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.errors import ConfigError, WorkerError
from nemo_rl.models.weight_sync.buckets import DeltaRefit, RefitPlan, WeightSlot, flat_bytes
from nemo_rl.models.weight_sync.delta import (
    HEADER_BYTES,
    DeltaForm,
    apply_block,
    encode_block,
    read_block,
    write_block,
)
from nemo_rl.models.weight_sync.delta_buckets import DeltaFiller, DeltaSchedule, DeltaSink, HeldWeights
from tests.unit.models.test_refit_buckets import slots_of

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.float64)


def sent(base: torch.Tensor | None, weight: torch.Tensor, *, held: torch.Tensor, unit: int) -> tuple[DeltaForm, int]:
    """Brings `weight` to `held` over the wire; its form, and the bytes on the wire."""
    source = flat_bytes(weight)
    block = encode_block(None if base is None else flat_bytes(base), source, unit=unit)
    # An odd start: blocks stand end to end.
    wire = torch.full((block.num_bytes + 8,), 255, dtype=torch.uint8)
    size = write_block(block, wire[1:])
    assert size == block.num_bytes <= HEADER_BYTES + source.numel()
    got = read_block(wire[1:])
    apply_block(got, flat_bytes(held), unit=unit)
    return got.form, size


@settings(deadline=None, max_examples=200)
@given(
    base=st.binary(max_size=96),
    steps=st.lists(st.tuples(st.integers(0, 95), st.integers(0, 255)), max_size=40),
    unit=st.sampled_from([1, 2, 4, 8]),
    gap=st.sampled_from([0, 254, 255, 256, 700]),
)
def test_whatever_changed_arrives_bit_for_bit(base: bytes, steps: list[tuple[int, int]], unit: int, gap: int) -> None:
    """Random bytes are every bit pattern of every dtype, NaN with a payload among them."""
    raw = bytearray(base[: len(base) // unit * unit])
    raw = bytearray(gap * unit) + raw
    before = torch.tensor(list(raw), dtype=torch.uint8)
    after = before.clone()
    for place, value in steps:
        if place + gap * unit < len(after):
            after[place + gap * unit] = value
    held = before.clone()
    sent(before, after, held=held, unit=unit)
    assert torch.equal(held, after)
    assert before.numel() == len(raw)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.003, 0.05, 0.5, 1.0])
def test_each_share_of_changed_elements_arrives_in_the_smallest_form(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    base = torch.randint(1, 100, (20_000,), generator=generator).to(dtype)
    is_new = torch.rand(base.shape, generator=generator) < share
    weight = torch.where(is_new, base + 1, base)
    held, unit = base.clone(), dtype.itemsize
    form, size = sent(base, weight, held=held, unit=unit)
    assert torch.equal(held, weight)
    expected = {
        0.0: DeltaForm.SAME,
        0.003: DeltaForm.INDEX,
        0.05: DeltaForm.INDEX,
        0.5: DeltaForm.MASK,
        1.0: DeltaForm.WHOLE,
    }[share]
    assert form is expected
    # A byte or two say where an element is, or a bit of each.
    count = int(is_new.sum())
    where = {DeltaForm.SAME: 0, DeltaForm.INDEX: 2 * count, DeltaForm.MASK: 2_500, DeltaForm.WHOLE: 0}[form]
    assert size <= HEADER_BYTES + count * unit + where


def test_neighbours_travel_as_runs() -> None:
    base = torch.zeros(20_000, dtype=torch.bfloat16)
    weight = base.clone()
    weight[3_000:4_000], weight[9_000:9_010], weight[19_999] = 1.0, 2.0, 3.0
    held = base.clone()
    form, size = sent(base, weight, held=held, unit=2)
    assert form is DeltaForm.RUNS and torch.equal(held, weight)
    assert size < HEADER_BYTES + 2 * 1_011 + 100


def test_bits_are_compared_and_not_numbers() -> None:
    base = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.float32)
    weight = base.clone()
    weight[0] = -0.0
    weight.view(torch.int32)[1] += 1
    assert bool(weight[0] == base[0]), "numbers do not tell them apart"
    held = base.clone()
    form, _ = sent(base, weight, held=held, unit=4)
    assert form is not DeltaForm.SAME and torch.equal(held.view(torch.int32), weight.view(torch.int32))
    # A NaN that has stayed is no change.
    assert sent(weight, weight.clone(), held=held, unit=4)[0] is DeltaForm.SAME


@pytest.mark.parametrize("count", [0, 1])
def test_a_weight_without_elements_and_one_without_a_base_arrive(count: int) -> None:
    weight = torch.full((count,), 7.0)
    held = torch.zeros(count)
    form, _ = sent(None, weight, held=held, unit=4)
    assert form is DeltaForm.WHOLE and torch.equal(held, weight)


def test_a_block_of_another_weight_or_none_at_all_is_refused() -> None:
    base, weight = torch.zeros(600), torch.zeros(600)
    weight[500] = 1.0
    for held in (torch.zeros(300), torch.zeros(500)):
        with pytest.raises(WorkerError, match="does not fit its weight"):
            sent(base, weight, held=held, unit=4)
    with pytest.raises(WorkerError, match="expected the block of a weight"):
        read_block(torch.full((40,), 255, dtype=torch.uint8))
    with pytest.raises(WorkerError, match="expected the block of a weight"):
        read_block(torch.zeros(4, dtype=torch.uint8))


# ---- buckets


def versions(sizes: list[int], *, seed: int) -> list[dict[str, torch.Tensor]]:
    """Three versions of weights of two dtypes, of which a few elements change."""
    generator = torch.Generator().manual_seed(seed)
    first = {f"w{i}": torch.randn(size, 2, generator=generator) for i, size in enumerate(sizes)}
    found = [{name: w.bfloat16() if i % 2 else w for i, (name, w) in enumerate(first.items())}]
    for _ in range(2):
        found.append(
            {
                name: torch.where(torch.rand(w.shape, generator=generator) < 0.1, w * 2, w)
                for name, w in found[-1].items()
            }
        )
    return found


def move(plan: RefitPlan, weights: dict[str, torch.Tensor], sender: HeldWeights, *sinks: DeltaSink) -> None:
    filler = DeltaFiller(plan, iter(weights.items()), sender)
    while filler.num_missing:
        buffer = torch.full((plan.buffer_bytes,), 255, dtype=torch.uint8)
        size = filler.fill(buffer)
        for sink in sinks:
            sink.load(buffer[:size])
    assert not any(sink.num_missing for sink in sinks)


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), bound=st.integers(1, 40), seed=st.integers(0, 99))
def test_versions_follow_each_other_in_both_kinds_of_engine(sizes: list[int], bound: int, seed: int) -> None:
    """Buckets cut elements anywhere; one engine has its own tensors, the other takes full weights."""
    history = versions(sizes, seed=seed)
    sender, tensors, staging = HeldWeights(), HeldWeights(), HeldWeights()
    targets = [torch.zeros_like(weight) for weight in history[0].values()]
    for version, weights in enumerate(history):
        delta = DeltaRefit(base=version - 1, version=version)
        plan = RefitPlan(slots=slots_of(weights), bucket_bytes=bound, delta=delta)
        taken: dict[str, torch.Tensor] = {}
        tensors.begin(plan, targets)
        staging.begin(plan)
        move(plan, weights, sender, DeltaSink(plan, tensors), DeltaSink(plan, staging, take=taken.__setitem__))
        assert all(torch.equal(target, weight) for target, weight in zip(targets, weights.values(), strict=True))
        assert taken.keys() == weights.keys()
        assert all(torch.equal(taken[name], weight) for name, weight in weights.items())
        assert sender.version == tensors.version == staging.version == version
        # What the next delta builds on; from another base it could still be right by chance.
        assert all(torch.equal(sender.weight(slot, device="cpu"), w) for slot, w in enumerate(weights.values()))


def test_a_base_is_held_only_while_it_is_whole() -> None:
    first, second, _ = versions([8, 8], seed=1)
    whole = RefitPlan(slots=slots_of(first), bucket_bytes=16, delta=DeltaRefit(base=-1, version=4))
    sender, engine = HeldWeights(), HeldWeights()
    engine.begin(whole)
    move(whole, first, sender, DeltaSink(whole, engine))
    plan = RefitPlan(slots=slots_of(first), bucket_bytes=16, delta=DeltaRefit(base=4, version=5))
    filler = DeltaFiller(plan, iter(second.items()), sender)
    filler.fill(torch.empty(plan.buffer_bytes, dtype=torch.uint8))
    assert sender.version == -1, "a refit that broke off leaves nothing to build on"
    with pytest.raises(WorkerError, match="expected a delta from version -1, which is held here, got one from 4"):
        DeltaFiller(plan, iter(second.items()), sender)
    other = RefitPlan(slots=slots_of({"x": torch.zeros(3)}), bucket_bytes=16, delta=plan.delta)
    with pytest.raises(WorkerError, match="or of other weights"):
        engine.begin(other)
    engine.forget()
    assert engine.version == -1 and not engine._bytes


# ---- which refits are deltas

SLOTS = (WeightSlot(name="w", dtype="bfloat16", shape=(4,)),)
TWO = {0: 1, 1: 1}


def base_of(schedule: DeltaSchedule, version: int, **changes: object) -> int:
    """-1: all weights are sent."""
    given: dict[str, object] = {"before": version - 1, "slots": SLOTS, "incarnations": TWO}
    given |= changes
    given.setdefault("held", dict.fromkeys(given["incarnations"], given["before"]))  # type: ignore[call-overload]
    return schedule.next(version, **given).base  # type: ignore[arg-type]


def test_one_of_so_many_refits_is_whole() -> None:
    schedule = DeltaSchedule(full_every=3)
    assert [base_of(schedule, version) for version in range(8)] == [-1, 0, 1, -1, 3, 4, -1, 6]


@pytest.mark.parametrize(
    "doubt",
    [
        {"before": -1},
        {"incarnations": {0: 1, 1: 2}},
        {"incarnations": {0: 1}},
        {"held": {0: 1, 1: -1}},
        {"held": {0: 1, 1: 0}},
        {"slots": (WeightSlot(name="w", dtype="float32", shape=(4,)),)},
    ],
    ids=["a refit failed", "an engine was replaced", "an engine is gone", "one has no base", "one is behind", "plan"],
)
def test_after_any_doubt_all_weights_are_sent_once(doubt: dict[str, object]) -> None:
    schedule = DeltaSchedule(full_every=99)
    assert [base_of(schedule, version) for version in (0, 1)] == [-1, 0]
    assert base_of(schedule, 2, **doubt) == -1
    lasting = {name: value for name, value in doubt.items() if name in ("incarnations", "slots")}
    assert base_of(schedule, 3, **lasting) == 2


def test_an_engine_that_knows_no_deltas_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"refit_delta.enabled: true, but engine 1 supports full weights only"):
        base_of(DeltaSchedule(full_every=9), 0, held={0: -1, 1: None})
