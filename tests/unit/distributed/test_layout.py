"""Ranks and their places: every axis is a partition of the ranks."""

from __future__ import annotations

from itertools import product

import pytest

from nemo_rl.distributed.layout import Coordinates, ParallelLayout, engine_places
from nemo_rl.errors import ConfigError

LAYOUTS = [
    ParallelLayout(dp=dp, cp=cp, tp=tp, pp=pp) for dp, cp, tp, pp in product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 3))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_places_and_groups_partition_the_ranks(layout: ParallelLayout) -> None:
    ranks = list(range(layout.world_size))
    places = [layout.coordinates(rank) for rank in ranks]
    assert len(set(places)) == layout.world_size
    for groups in (layout.replicas(), layout.context_groups()):
        assert sorted(rank for group in groups for rank in group) == ranks
    for group in layout.context_groups():
        assert len({(places[rank].dp, places[rank].tp, places[rank].pp) for rank in group}) == 1
    assert [layout.rank_of(place) for place in places] == ranks
    writers = [rank for rank in ranks if layout.is_writer(rank)]
    assert [places[rank] for rank in writers] == [
        Coordinates(dp=dp, cp=0, tp=0, pp=layout.pp - 1) for dp in range(layout.dp)
    ]


def test_pipeline_stages_are_the_outermost_axis() -> None:
    """As in megatron-core, whose groups the workers use."""
    layout = ParallelLayout.of(8, tp=2, pp=2)
    assert layout.replicas() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [layout.stage(1, stage) for stage in (0, 1)] == [(2, 3), (6, 7)]
    assert [layout.writer(dp) for dp in (0, 1)] == [4, 6]


def test_tensor_parallel_peers_are_neighbours() -> None:
    layout = ParallelLayout.of(8, tp=2, cp=2)
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 4)] == [
        Coordinates(0, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
        Coordinates(1, 0, 0),
    ]


def test_values_are_spread_and_taken_from_writers() -> None:
    layout = ParallelLayout.of(4, tp=2)
    assert layout.per_rank(["a", "b"]) == ["a", "a", "b", "b"]
    assert layout.one_per_shard([0, 1, 2, 3]) == [0, 2]
    assert ParallelLayout.of(4, pp=2).one_per_shard([0, 1, 2, 3]) == [2, 3]


def test_sequences_divide_into_chunks_and_splits() -> None:
    assert ParallelLayout(cp=1, tp=4).length_multiple == 1
    assert ParallelLayout(cp=1, tp=4, sequence_parallel=True).length_multiple == 4
    both = ParallelLayout(cp=2, tp=2, sequence_parallel=True)
    assert both.length_multiple == 8 and both.round_up_multiple(6) == 24


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 ranks do not divide by tensor 4"):
        ParallelLayout.of(6, tp=4)
    with pytest.raises(
        ConfigError, match=r"3 data x context parallel ranks do not divide into 2 copies .*replicate_size"
    ):
        ParallelLayout.of(6, tp=2, copies=2)


def test_copies_part_the_data_and_context_ranks() -> None:
    assert ParallelLayout.of(16, tp=2, cp=2, copies=2).weight_shards == 4
    assert ParallelLayout.of(16, tp=2, pp=2, cp=2).weight_shards == 4


def test_engines_take_neighbouring_gpus_of_one_node_or_all_of_several() -> None:
    assert engine_places(3, ranks=1, gpus_per_node=2) == [range(0, 1), range(1, 2), range(2, 3)]
    assert engine_places(4, ranks=4, gpus_per_node=8) == [range(0, 4), range(4, 8), range(8, 12), range(12, 16)]
    # GPUs that are left over on a node stay free: no engine stands on parts of two nodes.
    assert engine_places(3, ranks=3, gpus_per_node=8) == [range(0, 3), range(3, 6), range(8, 11)]
    assert engine_places(2, ranks=16, gpus_per_node=8) == [range(0, 16), range(16, 32)]
