"""Reducers as they are written, and merging: in any order, the same."""

import itertools

import numpy as np
import pytest

from nemo_rl.errors import UserError
from nemo_rl.tracer.reducer import (
    REDUCERS,
    STATS,
    Counts,
    Digest,
    Histogram,
    Norm,
    Span,
    Stats,
    Tiles,
    TopK,
    parse_reducer,
)


@pytest.mark.parametrize(
    "text",
    [
        *("stats", "histogram", "histogram(-1.0, 2.5, 10)", "counts", "norm", "digest"),
        *("tiles(8, mean)", "topk(3)", "full", "sample(4)", "project(truth-1_B)"),
    ],
)
def test_text_of_a_reducer_is_read_again_as_the_same(text):
    assert str(parse_reducer(text)) == text
    assert parse_reducer(f"  {text.replace(', ', ' ,  ')} ") == parse_reducer(text)


def test_every_reducer_has_a_text_for_people():
    assert all(kind.name == name and kind.text for name, kind in REDUCERS.items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected one of those below"),
        ("median", "expected one of those below"),
        ("stats.__class__", "expected one of those below"),
        ("tiles", "parameters are missing"),
        ("tiles(2)", "parameters are missing"),
        ("tiles(0, mean)", "N >= 1"),
        ("tiles(2, median)", "mean|max|absmax|rms"),
        ("tiles(x, mean)", "expected a number, got 'x'"),
        ("tiles(99999999, mean)", "N >= 1"),
        ("topk(0)", "K >= 1"),
        ("sample(-1)", "N >= 1"),
        ("stats(1)", "at most 0 parameters"),
        ("histogram(1, 1, 5)", "LOW < HIGH"),
        ("histogram(0, nan, 5)", "LOW < HIGH"),
        ("histogram(0, inf, 5)", "LOW < HIGH"),
        ("histogram(0, 1)", "BINS >= 1"),
        ("project()", "parameters are missing"),
        ("project(../x)", "name of a vector"),
        ("project(/etc/passwd)", "name of a vector"),
        ("project(a.b)", "name of a vector"),
        ("project(" + "a" * 65 + ")", "name of a vector"),
        ("x" * 100_000, "expected one of those below"),
    ],
)
def test_what_is_no_reducer_is_refused_with_what_would_be_one(text, says):
    with pytest.raises(UserError) as error:
        parse_reducer(text)
    assert says in str(error.value) and len(str(error.value)) < 3000


def in_any_order(reducer, parts):
    """The one result of merging in all orders and groupings of three."""
    found = []
    for a, b, c in itertools.permutations(parts):
        found += [reducer.merge(reducer.merge(a, b), c), reducer.merge(a, reducer.merge(b, c))]
    for each in found:
        np.testing.assert_array_equal(each, found[0])
    return reducer.finish(found[0])


def test_whole_tensors_merge_in_any_order():
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 9, size=len(STATS)).astype(float) for _ in range(3)]
    total = in_any_order(Stats(), parts)
    assert total[0] == sum(part[0] for part in parts)
    assert total[3] == min(part[3] for part in parts)
    assert (total[4], total[5]) == (max(part[4] for part in parts), max(part[5] for part in parts))
    assert total[7:].tolist() == sum(part[7:] for part in parts).tolist()
    assert in_any_order(Norm(), [np.array([9.0]), np.array([16.0]), np.array([0.0])]) == [5.0]
    assert in_any_order(Counts(), [np.array([1]), np.array([0, 2, 5]), np.array([3, 1])]).tolist() == [4, 3, 5]
    assert in_any_order(Histogram(0.0, 1.0, 1), [np.array([1, 2, 3])] * 3).tolist() == [3, 6, 9]
    large = np.array([np.iinfo(np.int64).max])
    assert in_any_order(Digest(), [large, large, np.array([2])]) == [0]


def test_tiles_have_no_padding_and_are_empty_where_there_are_more_than_features():
    assert Tiles(3, "mean").bounds(7).tolist() == [0, 2, 4, 7]
    assert (np.diff(Tiles(96, "mean").bounds(1000)) >= 1).all()
    shown = Tiles(4, "max").finish(np.array([[-np.inf, 1.0, -np.inf, 2.0]]), 2)
    np.testing.assert_array_equal(shown, [[np.nan, 1.0, np.nan, 2.0]])
    assert Tiles(2, "rms").finish(np.array([[8.0, 0.0]]), 4).tolist() == [[2.0, 0.0]]


def test_largest_values_name_their_features_and_nan_comes_first():
    top = TopK(2)
    left, right = np.array([[[3.0, 5], [1.0, 0]]]), np.array([[[np.nan, 9], [3.0, 2]]])
    for a, b in ((left, right), (right, left)):
        merged = top.merge(top.merge(top.empty(1, 10), a, Span(0, 10, 10)), b, Span(0, 10, 10))
        np.testing.assert_array_equal(merged, [[[np.nan, 9], [3.0, 2]]])
    assert top.empty(1, 1).tolist() == [[[-np.inf, -1.0]] * 2]
