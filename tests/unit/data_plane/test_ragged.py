"""Padded, jagged and stacked columns: what is cut, what is padded, what is refused; round trips over random shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from nemo_rl.data_plane.chunks.ragged import (
    materialize,
    object_rows,
    pack_per_token_field,
    pad_nested,
    response_from_nested,
    to_nested_by_length,
    unwrap_wire_stripped_payload,
)
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import lengths_of, nest, stack_or_nest, values_of
from nemo_rl.torch_private import jagged_parts
from tests.helpers.data_planes import rows_of

DTYPES = [torch.int32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int16]
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=9)
TRAILING = st.sampled_from([(), (1,), (3,), (2, 3), (0,)])


def padded_of(lengths: list[int], width: int, trailing: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`[N, width, *trailing]` whose entries are all different where the dtype allows it."""
    count = len(lengths) * width * int(np.prod(trailing, dtype=np.int64))
    return (torch.arange(count) % 251 + 1).to(dtype).reshape(len(lengths), width, *trailing)


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 3), TRAILING, st.sampled_from(DTYPES))
def test_cutting_and_padding_are_inverse(lengths: list[int], extra: int, trailing: tuple, dtype: torch.dtype) -> None:
    width = max(lengths) + extra
    padded = padded_of(lengths, width, trailing, dtype)
    nested = to_nested_by_length(padded, torch.tensor(lengths))
    assert nested.dtype == dtype and lengths_of(nested).tolist() == lengths
    for row, length, source in zip(nested.unbind(), lengths, padded, strict=True):
        assert torch.equal(row, source[:length])
    again = pad_nested(nested, pad=0, width=width)
    expected = padded.clone()
    for i, length in enumerate(lengths):
        expected[i, length:] = 0
    assert again.dtype == dtype and torch.equal(again, expected)
    assert torch.equal(values_of(to_nested_by_length(again, torch.tensor(lengths))), values_of(nested))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 16), TRAILING)
def test_a_per_token_column_wider_than_the_longest_row_loses_its_junk(lengths, multiple, trailing):
    """Sequence parallelism rounds the width up to a multiple of its size."""
    width = -(-max(lengths) // multiple) * multiple
    padded = padded_of(lengths, width, trailing, torch.float32)
    for i, length in enumerate(lengths):
        padded[i, length:] = float("nan")
    packed = pack_per_token_field(padded, torch.tensor(lengths))
    assert lengths_of(packed).tolist() == lengths and not values_of(packed).isnan().any()
    if max(lengths) > 0:
        with pytest.raises(SchemaMismatch, match="do not fit a padded column"):
            pack_per_token_field(padded[:, : max(lengths) - 1], torch.tensor(lengths))


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=6), st.sampled_from([(), (2,)]))
def test_a_response_slice_is_what_each_response_token_was_predicted_from(masks: list, trailing: tuple) -> None:
    masks = [[False, *mask[1:]] for mask in masks]  # nothing predicts position 0
    masks = [mask if mask[1:] else [] for mask in masks]
    lengths = torch.tensor([len(mask) for mask in masks])
    total = int(lengths.sum())
    full = nest(torch.arange(total * int(np.prod(trailing, dtype=np.int64))).reshape(total, *trailing), lengths)
    mask = nest(torch.tensor([bit for row in masks for bit in row], dtype=torch.bool), lengths)
    expected = [
        [row[i - 1] for i, bit in enumerate(bits) if bit] for row, bits in zip(rows_of(full), masks, strict=True)
    ]
    assert rows_of(response_from_nested(full, mask)) == expected


def test_a_response_slice_of_rows_with_holes_between_them_is_the_same() -> None:
    source = torch.arange(24).reshape(2, 12)
    starts, lengths = torch.tensor([1, 4]), torch.tensor([3, 5])
    holes = torch.nested.narrow(source, 1, starts, lengths, layout=torch.jagged)
    assert jagged_parts(holes) is None
    mask = nest(torch.tensor([0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool), lengths)
    assert rows_of(response_from_nested(holes, mask)) == [[1, 2], [19]]
    with pytest.raises(SchemaMismatch, match="row lengths of the full column"):
        response_from_nested(holes, nest(mask.values(), torch.tensor([4, 4])))


@settings(deadline=None)
@given(LENGTHS, TRAILING)
def test_stack_or_nest_keeps_every_row(lengths: list[int], trailing: tuple) -> None:
    rows = [torch.full((n, *trailing), float(i)) for i, n in enumerate(lengths)]
    column = stack_or_nest(rows)
    assert column.is_nested == (len(set(lengths)) > 1)
    assert all(torch.equal(a, b) for a, b in zip(column.unbind(), rows, strict=True)) and len(column) == len(rows)


@pytest.mark.parametrize(
    "rows",
    [[torch.ones(1, 4), torch.ones(2, 3)], [torch.ones(1), torch.tensor(3.0)], [torch.ones(2), torch.ones(2, 2)]],
)
def test_rows_that_differ_in_more_than_their_first_dim_are_refused(rows: list[torch.Tensor]) -> None:
    with pytest.raises(SchemaMismatch, match="first dim only"):
        stack_or_nest(rows)


def test_two_ragged_dims_and_transposed_rows_are_refused_and_not_scrambled() -> None:
    two = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 3)])
    turned = nest(torch.arange(24.0).reshape(6, 4), torch.tensor([2, 4])).transpose(1, 2)
    for column in (two, turned):
        with pytest.raises(SchemaMismatch, match="first dim only"):
            values_of(column)
    same = nest(torch.arange(16.0).reshape(4, 4), torch.tensor([2, 2])).transpose(1, 2)
    assert lengths_of(same).tolist() == [4, 4]
    assert torch.equal(values_of(same), torch.cat([row.T for row in torch.arange(16.0).reshape(2, 2, 4)]))


def test_each_field_has_its_own_padding_and_only_token_aligned_ones_reach_the_target() -> None:
    lengths = torch.tensor([1, 3])
    rows = TensorDict(
        {
            "input_ids": nest(torch.tensor([5, 6, 7, 8], dtype=torch.int32), lengths),
            "prev_logprobs": nest(torch.ones(4), lengths),
            "routes": nest(torch.ones(4, 2, 3, dtype=torch.int16), lengths),
            "turn_lengths": nest(torch.tensor([7, 8, 9]), torch.tensor([2, 1])),
            "image": torch.ones(2, 2, 2),
            "score": torch.ones(2, 1),
        },
        batch_size=[2],
    )
    pads = {"input_ids": 99, "prev_logprobs": -0.5, "routes": 255, "turn_lengths": -1}
    aligned = ("input_ids", "prev_logprobs", "routes")
    dense = materialize(rows, pad_values=pads, pad_to=5, token_aligned=aligned)
    assert dense["input_ids"].tolist() == [[5, 99, 99, 99, 99], [6, 7, 8, 99, 99]]
    assert dense["prev_logprobs"][0].tolist() == [1.0, -0.5, -0.5, -0.5, -0.5]
    assert dense["routes"].shape == (2, 5, 2, 3) and (dense["routes"][1, 3:] == 255).all()
    # Neither turns nor the width of an image are tokens: the pad target is not theirs.
    assert dense["turn_lengths"].tolist() == [[7, 8], [9, -1]]
    assert dense["image"].shape == (2, 2, 2) and dense["score"].shape == (2, 1)


def test_exactly_an_empty_scalar_tensordict_is_a_payload_that_lost_its_value() -> None:
    assert unwrap_wire_stripped_payload(TensorDict({}, batch_size=[])) is None
    kept = [
        TensorDict({}, batch_size=[1]),
        TensorDict({"x": torch.ones(())}, batch_size=[]),
        NonTensorData("text"),
        NonTensorData(None),
        torch.ones(0),
        {},
        [],
        "",
        None,
    ]
    for payload in kept:
        assert unwrap_wire_stripped_payload(payload) is payload


def test_object_rows_are_a_list_whatever_held_them() -> None:
    values = ["a", {"k": [1]}, None]
    array = np.array(values, dtype=object)
    for column in (values, tuple(values), array, NonTensorStack(*[NonTensorData(value) for value in values])):
        assert object_rows(column) == values
    assert object_rows(["a", TensorDict({}, batch_size=[])]) == ["a", None]
