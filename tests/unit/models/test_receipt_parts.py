"""Fingerprints, the probe and the comparisons of a receipt, without a model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.models.weight_sync.receipt import Answer, ProbeTurns, Receipt, Tolerance, make_probe
from nemo_rl.models.weight_sync.receipt.check import behaviour_problems, content_problems, gap, measured
from nemo_rl.models.weight_sync.receipt.fingerprint import BLOCK, ROWS_AT_ONCE, fingerprints

LARGE = BLOCK * (ROWS_AT_ONCE + 2) * 2 + 3
"""Float32 numbers: more than one round of rows, a rest, and bytes that fill no word."""


def of(weight: torch.Tensor) -> str:
    return fingerprints([("w", weight)])["w"]


def _bit(weight: torch.Tensor, place: int) -> None:
    weight.view(-1).view(torch.uint8)[place // 8] ^= 1 << place % 8


def _transposed(weight: torch.Tensor) -> None:
    side = int(len(weight) ** 0.5)
    weight[: side * side] = weight[: side * side].view(side, side).T.reshape(-1)


def _exchanged(one: slice, other: slice) -> Callable[[torch.Tensor], None]:
    def exchange(weight: torch.Tensor) -> None:
        weight[one], weight[other] = weight[other].clone(), weight[one].clone()

    return exchange


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "one bit": lambda weight: _bit(weight, 8 * weight.nbytes - 1),
    "swapped": _exchanged(slice(0, 1), slice(-1, None)),
    # The highest bits of two words of 64 bits, alone and with the one that a fold by 33 bits would move there.
    "two signs": lambda weight: [_bit(weight, place) for place in (63, 127)],
    "two signs and exponents": lambda weight: [_bit(weight, place) for place in (63, 30, 127, 94)],
    "all signs": torch.Tensor.neg_,
    "complement": lambda weight: weight.view(torch.uint8).bitwise_not_(),
    "complement of one word": lambda weight: weight.view(torch.uint8)[8:16].bitwise_not_(),
    "transposed": _transposed,
    "reversed": lambda weight: weight.copy_(weight.flip(0)),
    "one element on": lambda weight: weight.copy_(weight.roll(1)),
    "rows of the table exchanged": _exchanged(slice(0, 2 * BLOCK), slice(2 * BLOCK, 4 * BLOCK)),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("size", [16, 1001, LARGE])
def test_any_change_changes_the_fingerprint(kind, size):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    changed = weight.clone()
    if "rows" not in kind or size == LARGE:
        CHANGES[kind](changed)
        assert of(weight) == of(weight.clone()) != of(changed)


@pytest.mark.parametrize(
    ("one", "other"), [(0x00, 0xFF), (0x00, 0x80), (0x7F, 0x80), (0x00, 0x01), (0x0F, 0xF0), (0x55, 0xAA)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_weights_of_one_repeated_byte_are_told_apart(one, other, dtype):
    weights = [torch.full((64 * 64 * 8,), byte, dtype=torch.uint8).view(dtype) for byte in (one, other)]
    assert of(weights[0]) != of(weights[1])


@given(
    content=st.binary(min_size=8, max_size=96),
    flips=st.sets(st.integers(0, 2**20), min_size=1, max_size=6),
    dtypes=st.tuples(*[st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64])] * 2),
    order=st.randoms(use_true_random=False),
)
def test_fingerprints_differ_where_a_cryptographic_hash_does(content, flips, dtypes, order):
    content = content[: len(content) // 8 * 8]
    other = bytearray(content)
    for place in flips:
        other[place // 8 % len(other)] ^= 1 << place % 8
    # Elements of four bytes in another order.
    pieces = [content[place : place + 4] for place in range(0, len(content), 4)]
    order.shuffle(pieces)
    complement = bytes(byte ^ 0xFF for byte in content)
    texts = [content, bytes(other), b"".join(pieces), complement, bytes(len(content)), content * 2]
    by_hash, by_print = {}, {}
    for text in texts:
        for dtype in dtypes:
            weight = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(dtype)
            head = f"{dtype} {tuple(weight.shape)}".encode()
            name = hashlib.sha256(head + text).hexdigest()
            by_hash[name] = of(weight)
            by_print[by_hash[name]] = name
    assert len(by_hash) == len(by_print), "two different weights have one fingerprint"


def test_the_two_zeros_are_told_apart():
    zero = torch.zeros(3, 5)
    assert len({of(zero), of(-zero), of(torch.full((3, 5), math.nan)), of(zero.double())}) == 4


def test_shape_dtype_and_order_are_part_of_it():
    square = torch.arange(16.0).view(4, 4)
    assert len({of(square), of(square.T), of(square.view(2, 8)), of(square.bfloat16()), of(square.view(-1))}) == 5
    assert of(square.T) == of(square.T.contiguous()), "strides are not"


def test_a_part_of_a_larger_tensor_has_the_fingerprint_of_its_copy():
    whole = torch.randn(100).bfloat16()
    assert of(whole[3:60]) == of(whole[3:60].clone())


def test_the_probe_has_rows_that_share_a_long_prompt_and_fits_the_longest_row():
    probe = make_probe(vocab_size=50, max_length=48, num_tokens=24, left_out={7, 8})
    assert probe.prompts[0] == probe.prompts[1] and len(probe.prompts[0]) > 32 and len(probe.families) == 4
    assert len(probe.token_ids) == 24 and not {7, 8} & set(probe.token_ids)
    assert probe.is_first == (True, False, True, False, True, True)
    small = make_probe(vocab_size=50, max_length=4, num_tokens=100)
    assert all(len(p) + len(r) <= 4 for p, r in zip(small.prompts, small.responses, strict=True))
    assert probe == make_probe(vocab_size=50, max_length=48, num_tokens=24, left_out={7, 8})


def test_the_batch_marks_the_responses():
    probe = make_probe(vocab_size=50, max_length=20, num_tokens=12)
    batch = probe.batch()
    marked = batch.tensor("input_ids")[batch.tensor("token_mask")].tolist()
    assert len(batch.tensor("input_ids")) == 4, "every prompt once"
    assert probe.spread(marked) == probe.token_ids


def test_a_nan_is_never_within_a_tolerance():
    apart = gap([0.0, math.nan], [0.0, 0.0], [(0,), (1,)], has_experts=False)
    limits = measured(Tolerance(of_policy=apart, of_replicas=apart), precision="float32")
    assert list(behaviour_problems({3: apart}, {3: 0.0}, limits, first=3)) == [3]


def test_a_first_difference_above_what_precision_explains_is_refused():
    limits = measured(Tolerance(of_policy=0.5, of_replicas=0.0), precision="float32")
    assert limits.of_policy < 0.5 and behaviour_problems({0: 0.5}, {0: 0.0}, limits, first=0)


def test_a_replica_that_is_apart_from_the_others_is_named():
    limits = Tolerance(of_policy=1.0, of_replicas=0.1)
    problems = behaviour_problems({0: 0.0, 1: 0.2}, {0: 0.0, 1: 0.2}, limits, first=0)
    assert list(problems) == [1] and "from those of engine 0, more than 0.1" in problems[1]


def test_a_weight_that_is_missing_or_left_untied_is_named():
    answer = Answer(fingerprints={"a": "1", "head": "2"}, aliases={"head": "a"}, version=0)
    assert content_problems({"a": "1"}, {}, answer) == (
        "1 of 2 weights are not what was sent: head has other values (expected 1, got 2)"
    )
    assert content_problems({"a": "1", "b": "3"}, {"a": "2"}, answer) == (
        "2 of 3 weights are not what was sent: b is missing, head is that of the version before"
    )


@pytest.mark.parametrize(
    ("step_s", "turns"), [(60.0, list(range(15))), (1.2, [0, 1, 2, 3, 5, 7, 9, 11, 13]), (0.0, [0, 1, 2, 3, 13])]
)
def test_rows_are_scored_as_often_as_their_share_of_the_time_allows(step_s, turns):
    now = 0.0
    plan, found = ProbeTurns(None, clock=lambda: now), []
    for number in range(15):
        now += step_s
        has_probe = plan.is_due()
        if has_probe:
            found.append(number)
        plan.done(0.03 if has_probe else 0.005, has_probe=has_probe)
    assert found == turns


@pytest.mark.parametrize(("moved", "tells"), [(None, True), (0.001, False), (0.12, False), (0.2, True)])
def test_a_receipt_says_whether_a_stale_version_would_have_shown(moved, tells):
    limits = Tolerance(of_policy=0.12, of_replicas=0.01)
    receipt = Receipt(
        version=1, num_engines=1, num_tensors=1, seconds=0.0, gap=0.02, replica_gap=0.0, moved=moved, tolerance=limits
    )
    assert receipt.tells_versions is tells and ("fingerprint alone" in receipt.text()) is not tells
    assert ("receipt_moved" in receipt.metrics()) is (moved is not None)
