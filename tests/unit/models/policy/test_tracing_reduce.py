"""Parts of any split merge to what the whole gives, and the whole gives what plain float64 arithmetic says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.models.policy.trace_parts import ReducedValues, _stats_on_device, part_of
from nemo_rl.tracer.reducer import STATS, PerToken, Span, WholeTensor, parse_reducer, token_hashes

WHOLE = ["stats", "histogram", "histogram(-1, 1, 7)", "norm", "digest"]
TOKENS = ["tiles(1, mean)", "tiles(3, mean)", "tiles(5, rms)", "tiles(4, max)", "tiles(7, absmax)", "tiles(40, rms)"]
TOKENS += ["topk(3)", "topk(50)", "full", "project(v)"]
VECTOR = (-1.0, 1.3)
"""First and last component; none is zero, of whose product with infinity libraries make different things."""


def values_of(tensor: torch.Tensor, tokens: slice, features: slice) -> ReducedValues:
    keys = [f"row {n}" for n in range(len(tensor))]
    hashes = token_hashes(keys, np.arange(len(tensor)), np.zeros(len(tensor), dtype=np.int64))[tokens]
    vector = torch.linspace(*VECTOR, tensor.shape[1])
    span = Span(features.start, features.stop, tensor.shape[1])
    return ReducedValues(tensor[tokens, features], span, {"v": vector}, lambda: hashes)


def cuts(draw: st.DrawFn, size: int) -> list[slice]:
    """Uneven stretches, some of them empty."""
    inner = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
    return [slice(a, b) for a, b in zip([0, *inner], [*inner, size], strict=True)]


@st.composite
def splits(draw: st.DrawFn) -> tuple[torch.Tensor, list[slice], list[slice]]:
    num_tokens, num_features = draw(st.integers(1, 9)), draw(st.integers(1, 23))
    tensor = torch.randn(num_tokens, num_features, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    for bad in draw(st.lists(st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e30]), max_size=3)):
        tensor[draw(st.integers(0, num_tokens - 1)), draw(st.integers(0, num_features - 1))] = bad
    return tensor, cuts(draw, num_tokens), cuts(draw, num_features)


@pytest.mark.parametrize("text", WHOLE)
@settings(max_examples=60, deadline=None)
@given(split=splits())
def test_parts_of_whole_tensors_merge(text: str, split: tuple[torch.Tensor, list[slice], list[slice]]) -> None:
    tensor, tokens, features = split
    reducer = parse_reducer(text)
    assert isinstance(reducer, WholeTensor)
    everything = slice(0, len(tensor)), slice(0, tensor.shape[1])
    whole = part_of(reducer, values_of(tensor, *everything))
    merged = None
    for a in tokens:
        for b in features:
            part = part_of(reducer, values_of(tensor, a, b))
            merged = part if merged is None else reducer.merge(merged, part)
    assert merged is not None
    np.testing.assert_allclose(merged, whole, rtol=1e-6, atol=1e-5)
    if whole.dtype == np.int64:
        assert np.array_equal(merged, whole)


@pytest.mark.parametrize("text", TOKENS)
@settings(max_examples=60, deadline=None)
@given(split=splits())
def test_parts_of_tokens_merge(text: str, split: tuple[torch.Tensor, list[slice], list[slice]]) -> None:
    tensor, tokens, features = split
    reducer = parse_reducer(text)
    assert isinstance(reducer, PerToken)

    def merged(parts: Sequence[slice], over: slice) -> np.ndarray:
        so_far = reducer.empty(over.stop - over.start, tensor.shape[1])
        for part in parts:
            values = values_of(tensor, over, part)
            if values.given.numel():
                so_far = reducer.merge(so_far, part_of(reducer, values), values.span)
        return reducer.finish(so_far, tensor.shape[1])

    whole = merged([slice(0, tensor.shape[1])], slice(0, len(tensor)))
    parted = np.concatenate([merged(features, a) for a in tokens])
    if text.startswith("topk"):
        # Of equal values any may be taken, but the feature must have the value.
        for row, found in enumerate(parted):
            kept = found[found[:, 1] >= 0]
            np.testing.assert_array_equal(tensor[row, kept[:, 1].astype(int)].numpy(), kept[:, 0])
        parted, whole, expected = parted[..., 0], whole[..., 0], reference(text, tensor.double().numpy())[..., 0]
        parted, whole, expected = (np.nan_to_num(each, nan=np.inf, posinf=np.inf) for each in (parted, whole, expected))
    else:
        expected = reference(text, tensor.double().numpy())
    # Sums of large values of both signs lose what they cancel.
    largest = float(tensor[tensor.isfinite()].abs().max()) if bool(tensor.isfinite().any()) else 1.0
    np.testing.assert_allclose(parted, whole, rtol=2e-6, atol=2e-6 * largest)
    np.testing.assert_allclose(whole, expected, rtol=2e-6, atol=1e-5 * largest)


def reference(text: str, array: np.ndarray) -> np.ndarray:
    """Plain float64."""
    name, _, parameters = text.rstrip(")").partition("(")
    if name == "full":
        return array
    if name == "project":
        with np.errstate(invalid="ignore"):
            return (array.astype(np.float32) @ np.linspace(*VECTOR, array.shape[1]).astype(np.float32))[:, None]
    if name == "topk":
        k = int(parameters)
        found = np.tile(np.array([-np.inf, -1.0]), (len(array), k, 1))
        for row, values in enumerate(array):
            order = sorted(range(len(values)), key=lambda i: (-np.nan_to_num(values[i], nan=np.inf, posinf=np.inf), i))
            found[row, : len(order)] = [(values[i], i) for i in order[:k]]
        return found
    n, how = int(parameters.split(",")[0]), parameters.split(",")[1].strip()
    size = array.shape[1]
    tiles = [array[:, t * size // n : (t + 1) * size // n] for t in range(n)]
    how_to = {
        "mean": lambda tile: tile.mean(-1),
        "rms": lambda tile: np.sqrt(np.square(tile).mean(-1)),
        "max": lambda tile: tile.max(-1),
        "absmax": lambda tile: np.abs(tile).max(-1),
    }
    nothing = np.full(len(array), np.nan)
    with np.errstate(invalid="ignore"):
        return np.stack([how_to[how](tile) if tile.shape[1] else nothing for tile in tiles], axis=1)


def test_stats_are_those_of_the_finite_values() -> None:
    tensor = torch.tensor([[1.0, -3.0, 0.0], [torch.nan, torch.inf, -torch.inf]])
    found = dict(zip(STATS, part_of(parse_reducer("stats"), values_of(tensor, slice(0, 2), slice(0, 3))), strict=True))
    assert found == dict(count=6, sum=-2, sumsq=10, min=-3, max=1, absmax=3, zeros=1, nan=1, posinf=1, neginf=1)


@settings(max_examples=60, deadline=None)
@given(split=splits())
def test_a_device_gives_the_stats_of_the_cpu(split: tuple[torch.Tensor, list[slice], list[slice]]) -> None:
    tensor, tokens, _ = split
    for part in tokens:
        values = values_of(tensor, part, slice(0, tensor.shape[1]))
        of_cpu = part_of(parse_reducer("stats"), values)
        np.testing.assert_allclose(_stats_on_device(values.floats), of_cpu, rtol=1e-6, atol=1e-5)


def test_the_squares_of_large_values_do_not_overflow() -> None:
    values = values_of(torch.full((2, 4), 1e30), slice(0, 2), slice(0, 4))
    assert values.num_not_finite == 0
    assert part_of(parse_reducer("stats"), values)[2] == pytest.approx(8e60)


def test_histogram_by_powers_of_two_has_each_value_at_its_place() -> None:
    tensor = torch.tensor([[0.0, 1.0, 1.5, 2.0, -1.0, -4.0, 2.0**-33, 1e30, -torch.inf, torch.nan]])
    counts = part_of(parse_reducer("histogram"), values_of(tensor, slice(0, 1), slice(0, 10)))
    places = {64: 2, 97: 2, 98: 1, 31: 1, 29: 1, 128: 1, 0: 1}
    assert {int(place): int(counts[place]) for place in np.flatnonzero(counts)} == places


def test_linear_histogram_counts_what_lies_outside() -> None:
    tensor = torch.tensor([[-2.0, -1.0, -0.9, 0.0, 0.999, 1.0, 5.0]])
    counts = part_of(parse_reducer("histogram(-1, 1, 2)"), values_of(tensor, slice(0, 1), slice(0, 7)))
    assert counts.tolist() == [1, 2, 2, 2]


def test_counts_are_of_whole_numbers() -> None:
    values = values_of(torch.tensor([[0, 3], [3, 1]]), slice(0, 2), slice(0, 2))
    assert part_of(parse_reducer("counts"), values).tolist() == [1, 1, 0, 2]


def test_a_digest_depends_on_every_value_and_its_place() -> None:
    reducer = parse_reducer("digest")
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    digests = {
        int(part_of(reducer, values_of(given, slice(0, 4), slice(0, 6)))[0])
        for given in (tensor, tensor.flip(0), tensor.flip(1), tensor + torch.finfo(torch.float32).eps * 4)
    }
    assert len(digests) == 4
