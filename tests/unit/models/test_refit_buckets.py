"""Buckets of a refit: every byte once, in order, never over the bound; wrong models and wrong streams are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.models.weight_sync.buckets import (
    BucketFiller,
    BucketSink,
    RefitPlan,
    WeightJoiner,
    WeightSlot,
    bucket_bytes,
    match_slots,
    most_bucket_bytes,
)
from nemo_rl.models.weight_sync.factory import group_ranks
from tests.helpers.tiny_model import tiny_model


def slots_of(weights: dict[str, torch.Tensor]) -> tuple[WeightSlot, ...]:
    return tuple(
        WeightSlot(name=name, dtype=str(weight.dtype).removeprefix("torch."), shape=tuple(weight.shape))
        for name, weight in weights.items()
    )


def move(plan: RefitPlan, weights: dict[str, torch.Tensor], targets: list[torch.Tensor]) -> int:
    """All buckets from a filler to a sink; returns their number."""
    filler, sink = BucketFiller(plan, iter(weights.items())), BucketSink(plan, targets)
    buffer = torch.empty(plan.bucket_bytes, dtype=torch.uint8)
    count = 0
    while sink.num_missing:
        # Whatever a bucket leaves untouched must not be read.
        buffer.fill_(255)
        sink.load(buffer[: filler.fill(buffer)].clone())
        count += 1
    with pytest.raises(StopIteration):
        filler.fill(buffer)
    return count


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), bound=st.integers(1, 40))
def test_every_byte_arrives_in_buckets_of_bounded_size(sizes: list[int], bound: int) -> None:
    weights = {f"w{i}": torch.randn(size, 2) for i, size in enumerate(sizes)}
    plan = RefitPlan(slots=slots_of(weights), bucket_bytes=bound)
    targets = [torch.zeros_like(weight) for weight in weights.values()]
    count = move(plan, weights, targets)
    total = sum(weight.numel() * 4 for weight in weights.values())
    assert count == -(-total // bound)
    assert all(sum(piece.size for piece in bucket) <= bound for bucket in plan.buckets())
    assert all(torch.equal(target, weight) for target, weight in zip(targets, weights.values(), strict=True))


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), bound=st.integers(1, 40))
def test_weights_are_joined_and_handed_over_once_each(sizes: list[int], bound: int) -> None:
    weights = {f"w{i}": torch.randn(size, 2) for i, size in enumerate(sizes)}
    plan = RefitPlan(slots=slots_of(weights), bucket_bytes=bound)
    taken: list[tuple[str, torch.Tensor]] = []
    filler = BucketFiller(plan, iter(weights.items()))
    joiner = WeightJoiner(plan, lambda name, weight: taken.append((name, weight)), device="cpu")
    buffer = torch.empty(plan.bucket_bytes, dtype=torch.uint8)
    while joiner.num_missing:
        joiner.load(buffer[: filler.fill(buffer)])
        buffer.fill_(255)
    assert sorted(name for name, _ in taken) == sorted(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_the_policy_casts_to_the_dtype_of_the_engine(dtype: torch.dtype) -> None:
    weights = {"scalar": torch.tensor(3.0), "matrix": torch.randn(4, 3).mT}
    targets = [torch.zeros((), dtype=dtype), torch.zeros(3, 4, dtype=dtype)]
    plan = RefitPlan(slots=slots_of(dict(zip(weights, targets, strict=True))), bucket_bytes=5)
    move(plan, weights, targets)
    assert torch.equal(targets[0], weights["scalar"].to(dtype)) and torch.equal(targets[1], weights["matrix"].to(dtype))


def test_a_rank_without_a_buffer_follows_the_stream() -> None:
    weights = {"a": torch.randn(5), "b": torch.randn(5)}
    seen = []

    def stream():
        for name, weight in weights.items():
            seen.append(name)
            yield name, weight

    filler = BucketFiller(RefitPlan(slots=slots_of(weights), bucket_bytes=16), stream())
    assert [filler.fill(None) for _ in range(3)] == [16, 16, 8]
    assert seen == ["a", "b"]


def test_a_stream_in_another_order_is_refused() -> None:
    weights = {"a": torch.randn(5), "b": torch.randn(5)}
    filler = BucketFiller(RefitPlan(slots=slots_of(weights), bucket_bytes=100), iter(reversed(weights.items())))
    with pytest.raises(RuntimeError, match=r"expected a of shape \(5,\), got b"):
        filler.fill(torch.empty(100, dtype=torch.uint8))


def test_tied_weights_may_come_under_either_name() -> None:
    model = tiny_model().state_dict(keep_vars=True)
    names = [name for name in model if name != "lm_head.weight"]
    shapes = {name: tuple(model[name].shape) for name in names}
    slots, targets = match_slots(shapes, model)
    assert [slot.name for slot in slots] == names and slots[0].dtype == "float32"
    assert targets[0].data_ptr() == model["lm_head.weight"].data_ptr()
    other = {("lm_head.weight" if name == "model.embed_tokens.weight" else name): size for name, size in shapes.items()}
    assert len(match_slots(other, model)[0]) == len(names)


def test_every_difference_between_policy_and_engine_is_named() -> None:
    model = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"c: unknown, a: expected shape \(2,\), got \(4,\), b: missing"):
        match_slots({"a": (4,), "c": (1,)}, model)


def test_a_bucket_takes_its_part_of_the_free_memory_and_never_more_than_all_weights() -> None:
    slots = [WeightSlot(name="w", dtype="bfloat16", shape=(1 << 20, 50))]
    assert bucket_bytes(slots, free=50 << 20, ratio=0.3) == 15 << 20
    assert bucket_bytes(slots, free=1 << 40, ratio=0.3, most=most_bucket_bytes(on_device=True)) == 100 << 20
    # Policy and engine map two buckets beside all else that they hold.
    assert bucket_bytes(slots, free=1 << 40, ratio=0.3) == most_bucket_bytes(on_device=False) == 16 << 20
    assert bucket_bytes(slots, free=1 << 40, ratio=0.3, most=7) == 7
    assert bucket_bytes(slots, free=0, ratio=0.3) == 1 << 20


def test_ranks_of_engines_follow_each_other_in_the_group_of_a_refit() -> None:
    assert group_ranks({0: ("a", "b"), 2: ("c",), 3: ("d", "e")}) == {0: 1, 2: 3, 3: 4}
