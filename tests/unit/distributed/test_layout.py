"""Ranks and their places: every axis is a partition of the ranks."""

from __future__ import annotations

from itertools import product

import pytest

from nemo_rl.distributed.layout import Coordinates, ParallelLayout
from nemo_rl.errors import ConfigError

LAYOUTS = [ParallelLayout(dp=dp, cp=cp, tp=tp) for dp, cp, tp in product((1, 2, 3), (1, 2), (1, 2, 4))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_places_and_groups_partition_the_ranks(layout: ParallelLayout) -> None:
    ranks = list(range(layout.world_size))
    places = [layout.coordinates(rank) for rank in ranks]
    assert len(set(places)) == layout.world_size
    for groups in (layout.replicas(), layout.context_groups(), layout.data_groups()):
        assert sorted(rank for group in groups for rank in group) == ranks
    for group in layout.context_groups():
        assert len({(places[rank].dp, places[rank].tp) for rank in group}) == 1
    for group in layout.data_groups():
        assert len({(places[rank].cp, places[rank].tp) for rank in group}) == 1
    assert sum(place.is_leader for place in places) == layout.dp


def test_tensor_parallel_peers_are_neighbours() -> None:
    layout = ParallelLayout.of(8, tp=2, cp=2)
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 4)] == [
        Coordinates(0, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
        Coordinates(1, 0, 0),
    ]


def test_values_are_spread_and_taken_from_leaders() -> None:
    layout = ParallelLayout.of(4, tp=2)
    assert layout.spread(["a", "b"]) == ["a", "a", "b", "b"]
    assert layout.leaders([0, 1, 2, 3]) == [0, 2]


def test_sequences_divide_into_chunks_and_splits() -> None:
    assert ParallelLayout(cp=1, tp=4).length_multiple == 1
    assert ParallelLayout(cp=1, tp=4, sequence_parallel=True).length_multiple == 4
    both = ParallelLayout(cp=2, tp=2, sequence_parallel=True)
    assert both.length_multiple == 8 and both.round_up_multiple(6) == 24


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 ranks do not divide by tensor_parallel_size 4"):
        ParallelLayout.of(6, tp=4)
