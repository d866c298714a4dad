"""Who sends what to whom in a refit by shards: parts of weights as loaders take them, and as ranks hold them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from nemo_rl.errors import WorkerError
from nemo_rl.models.hf.files import Box
from nemo_rl.models.megatron.architecture import Architecture
from nemo_rl.models.megatron.convert_table import Weight, weights_of
from nemo_rl.models.weight_sync.buckets import WeightSlot
from nemo_rl.models.weight_sync.placeholder import (
    PlaceholderView,
    WeightSource,
    merged_boxes,
    placeholder_of,
)
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints, hash_part, summed
from nemo_rl.models.weight_sync.shard_loader import ShardLoader, joined_prints
from nemo_rl.models.weight_sync.shard_plan import Boxes, ShardPlan, plan_shards

SHAPE = (8, 4)
Load = Callable[[torch.Tensor], torch.Tensor]
"""A loader, which returns what it has filled."""


def _placeholder(copy: Callable[[torch.Tensor, PlaceholderView], None]) -> torch.Tensor:
    source = WeightSource(name="w", shape=SHAPE, dtype=torch.float32, device=torch.device("cpu"), copy=copy)
    return placeholder_of(source)


def _rows_of_a_table(weight: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(6, 4)
    table[1:3] = weight[4:6]
    return table


TAKEN: dict[str, tuple[Load, Box]] = {
    "rows": (lambda w: torch.zeros(4, 4).copy_(w.narrow(0, 4, 4)), Box(start=(4, 0), size=(4, 4))),
    "columns": (lambda w: torch.zeros(8, 2).copy_(w[:, 2:]), Box(start=(0, 2), size=(8, 2))),
    "one row": (lambda w: torch.nn.Parameter(torch.zeros(4)).data.copy_(w[3]), Box(start=(3, 0), size=(1, 4))),
    "transposed": (lambda w: torch.zeros(4, 2).copy_(w.t()[:, 2:4]), Box(start=(2, 0), size=(2, 4))),
    "half of a head": (
        lambda w: torch.zeros(4, 2).copy_(w.unflatten(0, (2, 4))[1][:, 1:3]),
        Box(start=(4, 1), size=(4, 2)),
    ),
    "a chunk": (lambda w: torch.zeros(4, 4).copy_(w.chunk(2)[1].contiguous()), Box(start=(4, 0), size=(4, 4))),
    "a column": (lambda w: torch.zeros(8).copy_(w.unbind(1)[1]), Box(start=(0, 1), size=(8, 1))),
    "flat": (lambda w: torch.zeros(32).copy_(w.reshape(-1)), Box(start=(0, 0), size=(8, 4))),
    "by index": (_rows_of_a_table, Box(start=(4, 0), size=(2, 4))),
    "to where it is": (lambda w: torch.zeros(8, 4).copy_(w.to("cpu").to(w.dtype)), Box(start=(0, 0), size=(8, 4))),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_copy_tells_the_part_that_it_takes_and_gets_its_values(name: str) -> None:
    load, box = TAKEN[name]
    whole, seen = torch.arange(32.0).view(SHAPE) + 1, list[Box]()

    def fill(target: torch.Tensor, view: PlaceholderView) -> None:
        seen.append(view.box)
        # A rank holds a little more than it takes.
        start = tuple(max(0, first - 1) for first in box.start)
        held = Box(start=start, size=tuple(a + n - b for a, n, b in zip(box.start, box.size, start, strict=True)))
        target.copy_(view.of(held.of(whole, held=Box.whole(SHAPE)).clone(), held=held))

    assert torch.equal(load(_placeholder(fill)), load(whole))
    assert seen == [box]


REFUSED: dict[str, tuple[Load, str]] = {
    "a sum": (lambda w: torch.zeros(8, 4).copy_(w + 1), "add"),
    "a change": (lambda w: w.mul_(2), "changes it"),
    "a cast": (lambda w: torch.zeros(8, 4).copy_(w.to(torch.bfloat16)), "casts it"),
    "several": (lambda w: torch.cat([w, w]), "cat on several"),
    "values": (lambda w: w[0, 0].item(), "item"),
    "every second row": (lambda w: torch.zeros(4, 4).copy_(w[::2]), "no box"),
    "part of two rows": (lambda w: torch.zeros(6).copy_(w.view(-1)[:6]), "no box"),
    "one for all": (lambda w: torch.zeros(8, 4).copy_(w[0]), r"copies \(4,\) into \(8, 4\)"),
    "a mask": (lambda w: w[w > 0], "gt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_that_needs_values_is_refused(name: str) -> None:
    load, said = REFUSED[name]
    with pytest.raises(WorkerError, match=f"(?s)needs more of .* than a part of it.*{said}"):
        load(_placeholder(lambda _, view: Box.whole(SHAPE).meet(view.box)))


@pytest.mark.parametrize("name", ["values", "several", "every second row"])
def test_a_weight_that_a_loader_computes_with_comes_whole(name: str) -> None:
    loaded = dict[str, torch.Tensor]()

    def load(weight_name: str, weight: torch.Tensor) -> None:
        if weight_name == "computed":
            REFUSED[name][0](weight)
            loaded[weight_name] = weight * 2
        else:
            loaded[weight_name] = torch.zeros(4, 4).copy_(weight[2:6])

    loader = ShardLoader(torch.device("cpu"), load)
    slots = tuple(WeightSlot(name=each, dtype="float32", shape=SHAPE) for each in ("computed", "copied"))
    whole, part = Box.whole(SHAPE), Box(start=(2, 0), size=(4, 4))
    assert loader.record(slots) == [(whole,), (part,)]
    loader.begin()
    values = torch.randn(SHAPE)
    for box in (whole.along(0, 0, 3), whole.along(0, 3, 5)):
        loader.place(slots[0], box, box.of(values, held=whole))
    loader.place(slots[1], part, part.of(values, held=whole))
    assert torch.equal(loaded["computed"], values * 2) and torch.equal(loaded["copied"], values[2:6])
    prints = loader.prints()
    assert joined_prints([{"computed": prints["computed"]}], slots[:1]) == fingerprints([("computed", values)])
    assert set(prints["copied"]) == {part}


def test_boxes_of_neighbouring_experts_are_merged() -> None:
    gates = [Box(start=(expert, 0, 0), size=(1, 4, 8)) for expert in (0, 1, 2, 5)]
    ups = [Box(start=(expert, 8, 0), size=(1, 4, 8)) for expert in (0, 1, 2, 5)]
    assert set(merged_boxes([*gates, *ups, gates[1].along(1, 1, 2)])) == {
        Box(start=(0, 0, 0), size=(3, 4, 8)),
        Box(start=(0, 8, 0), size=(3, 4, 8)),
        gates[3],
        ups[3],
    }


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (321, 33), (3, 50, 70), (5,), (), (17, 4099), (2, 3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hashes_of_parts_add_up_to_the_fingerprint_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rng, weight = random.Random(str(shape)), torch.randn(shape).to(dtype)
    boxes, whole = [Box.whole(shape)], Box.whole(shape)
    for _ in range(4 if shape else 0):
        cut = list[Box]()
        for box in boxes:
            dim = rng.randrange(len(shape))
            at = rng.randrange(box.size[dim])
            cut += [box.along(dim, 0, at), box.along(dim, at, box.size[dim] - at)] if at else [box]
        boxes = cut
    hashes = [int(hash_part(box.of(weight, held=whole), box, shape)) for box in boxes]
    name = str(dtype).removeprefix("torch.")
    assert summed(hashes, dtype=name, shape=shape) == fingerprints([("w", weight)])["w"]
    if len(boxes) > 1:
        swapped = [int(hash_part(boxes[0].of(weight + 1, held=whole), boxes[0], shape)), *hashes[1:]]
        assert summed(swapped, dtype=name, shape=shape) != fingerprints([("w", weight)])["w"]


SLOTS = (
    WeightSlot(name="embedding", dtype="bfloat16", shape=(330, 32)),
    WeightSlot(name="norm", dtype="float32", shape=(33,)),
    WeightSlot(name="square", dtype="bfloat16", shape=(64, 32)),
    WeightSlot(name="experts", dtype="bfloat16", shape=(8, 64, 16)),
    WeightSlot(name="nothing", dtype="bfloat16", shape=(0, 4)),
)
BUCKET = 3000


def _policy() -> list[Boxes]:
    """Two rows of two ranks: the second row has copies; experts are those of one rank of a row alone."""
    embedding, norm, square, experts = (Box.whole(slot.shape) for slot in SLOTS[:4])

    def held(tensor_rank: int) -> Boxes:
        return [
            [embedding.along(0, 165 * tensor_rank, 165)],
            [norm],
            [square.along(1, 16 * tensor_rank, 16)],
            [experts.along(0, 4 * tensor_rank + expert, 1) for expert in range(4)],
            [],
        ]

    return [held(rank % 2) for rank in range(4)]


def _engines(count: int) -> dict[int, Boxes]:
    """Engines of two ranks; the vocabulary is padded to 384 rows."""
    embedding, norm, square, experts = (Box.whole(slot.shape) for slot in SLOTS[:4])

    def taken(rank: int) -> Boxes:
        halves = [experts.along(1, start + 16 * rank, 16) for start in (0, 32)]
        vocabulary = embedding.along(0, 192 * rank, 138 if rank else 192)
        return [[vocabulary], [norm], [square.along(0, 32 * rank, 32)], halves, []]

    return {4 + place: taken(place % 2) for place in range(2 * count)}


def _walked(plan: ShardPlan, taken: dict[int, Boxes]) -> dict[int, list[torch.Tensor]]:
    """Return how often each element has come to each engine rank, going by the parts that ranks are told."""
    seen = {rank: [torch.zeros(slot.shape, dtype=torch.int32) for slot in plan.slots] for rank in taken}
    parts = {rank: plan.of(rank) for rank in range(4 + len(taken))}
    for rank in taken:
        for segments in parts[rank].rounds:
            for segment in segments:
                assert any(segment in each for each in parts[segment.sender].rounds)
                for piece in segment.pieces:
                    whole = Box.whole(plan.slots[piece.slot].shape)
                    piece.box.of(seen[rank][piece.slot], held=whole).add_(1)
    return seen


@pytest.mark.parametrize("engines", [1, 2])
def test_each_element_comes_once_to_those_who_take_it_and_all_send_alike(engines: int) -> None:
    held, taken = _policy(), _engines(engines)
    plan = plan_shards(SLOTS, held, taken, bucket_bytes=BUCKET)
    for rank, seen in _walked(plan, taken).items():
        for place, (slot, found) in enumerate(zip(SLOTS, seen, strict=True)):
            expected = torch.zeros(slot.shape, dtype=torch.int32)
            for box in taken[rank][place]:
                box.of(expected, held=Box.whole(slot.shape)).add_(1)
            assert torch.equal(found, expected), (rank, slot.name)
        shard = sum(box.count * slot.element_bytes for slot, own in zip(SLOTS, taken[rank], strict=True) for box in own)
        assert plan.received[rank] == shard
    share = sum(plan.received.values()) / len(held)
    assert max(plan.sent.values()) <= 1.05 * share, plan.sent
    for rank, num_bytes in plan.sent.items():
        segments = [one for each in plan.of(rank).rounds for one in each]
        pieces = sum(
            piece.box.count * SLOTS[piece.slot].element_bytes * len(one.receivers)
            for one in segments
            for piece in one.pieces
        )
        assert pieces == num_bytes
    for rank in range(4 + len(taken)):
        assert plan.of(rank).most_bytes <= BUCKET + 8 * 4


def test_a_piece_is_so_small_that_its_cast_is_no_third_buffer() -> None:
    """The peak of a refit is 1.1 of two buckets: the buffers, and a piece that is cast and hashed."""
    bucket = 40_000
    plan = plan_shards(SLOTS, _policy(), _engines(2), bucket_bytes=bucket)
    pieces = [piece for segments in plan.rounds for segment in segments for piece in segment.pieces]
    largest = max(piece.box.count * plan.slots[piece.slot].element_bytes for piece in pieces)
    for rank in range(4):
        assert 2 * plan.of(rank).most_bytes + 3 * largest <= 1.1 * 2 * bucket


def test_a_rank_sends_what_it_holds_alone() -> None:
    plan = plan_shards(SLOTS, _policy(), _engines(1), bucket_bytes=BUCKET)
    for segments in plan.rounds:
        for segment in segments:
            for piece in segment.pieces:
                own = _policy()[segment.sender][piece.slot]
                assert any(box.meet(piece.box) == piece.box for box in own)


def test_an_element_that_nobody_holds_or_two_hold_by_other_boxes_is_refused() -> None:
    held, taken = _policy(), _engines(1)
    missing = [[*boxes[:2], [], *boxes[3:]] if place % 2 else boxes for place, boxes in enumerate(held)]
    with pytest.raises(WorkerError, match=r"the policy's ranks hold 1024 of 2048 elements of square"):
        plan_shards(SLOTS, missing, taken, bucket_bytes=BUCKET)
    crossing = {**taken, 5: [[Box(start=(191, 0), size=(139, 32))], *taken[5][1:]]}
    with pytest.raises(WorkerError, match=r"ranks of the engines take overlapping parts of embedding"):
        plan_shards(SLOTS, held, crossing, bucket_bytes=BUCKET)


SIZES = {
    "vocab_size": 24,
    "hidden_size": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "tie_word_embeddings": False,
}


class Stage:
    """One of two ranks of an engine: its loaders fuse halves of rows, and one weight is on the other stage."""

    def __init__(self, rank: int) -> None:
        self.rank, self.square, self.norm = rank, torch.zeros(64, 32), torch.zeros(33)

    def load(self, name: str, weight: torch.Tensor) -> None:
        if name == "square":
            for half in range(2):
                self.square[32 * half : 32 * half + 16].copy_(weight.chunk(2)[half].narrow(0, 16 * self.rank, 16))
        elif name == "norm" and self.rank == 0:
            self.norm.data.copy_(weight)


def test_a_loader_is_given_what_it_took_and_a_part_that_never_comes_is_told() -> None:
    slots = tuple(replace(slot, dtype="float32") for slot in SLOTS[1:3])
    weights = {slot.name: torch.randn(slot.shape) for slot in slots}
    prints = list[dict[str, dict[Box, int]]]()
    for rank in range(2):
        stage, whole = Stage(rank), Stage(rank)
        loader = ShardLoader(torch.device("cpu"), stage.load)
        boxes = dict(zip(weights, loader.record(slots), strict=True))
        assert loader.left_out == ({"norm"} if rank else set())
        assert not stage.square.any(), "to record changes nothing"
        loader.begin()
        for slot in slots:
            for box in boxes[slot.name]:
                for piece in (box.along(0, 0, 7), box.along(0, 7, box.size[0] - 7)):
                    loader.place(slot, piece, piece.of(weights[slot.name], held=Box.whole(slot.shape)))
            whole.load(slot.name, weights[slot.name])
        assert torch.equal(stage.square, whole.square) and torch.equal(stage.norm, whole.norm)
        prints.append(loader.prints())
    assert joined_prints(prints, slots) == fingerprints(weights.items())
    assert joined_prints(prints[:1], slots)["square"] == "1024 of 2048 elements"
    [(box, number)] = prints[0]["norm"].items()
    other = {**prints[1], "norm": {box: number + 1}}
    assert joined_prints([prints[0], other], slots)["norm"] == "other values in rank 1 than in a rank before it"


CONFIGS = (
    Qwen2Config(**SIZES),
    Qwen3MoeConfig(**SIZES, head_dim=4, num_experts=4, moe_intermediate_size=8, mlp_only_layers=[0]),
)


def _weights() -> list[Weight]:
    return [weight for config in CONFIGS for weight in weights_of(Architecture.of(config)) if not weight.is_copy]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_a_megatron_shard_are_what_the_table_puts_there(size: int) -> None:
    for weight, rank in product(_weights(), range(size)):
        parts = [torch.arange(torch.Size(part.shape).numel()).view(part.shape) + 10_000 for part in weight.parts]
        wholes = [part[0] if weight.num_experts else part for part in parts]
        shard = weight.split.shard(weight.pack(wholes), rank=rank, size=size)
        found, names = torch.zeros_like(shard), [part.name for part in weight.parts]
        for held in weight.held(rank=rank, size=size):
            whole = wholes[names.index(held.part.name)]
            values = held.box.of(whole, held=Box.whole(tuple(whole.shape)))
            held.local.of(found, held=Box.whole(tuple(shard.shape))).copy_(values)
        assert torch.equal(found, shard), weight.local
