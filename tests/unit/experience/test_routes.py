"""Routes of one or several turns find their tokens, and what is missing is counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config.policy import RouterReplayConfig
from nemo_rl.errors import SchemaMismatch, WorkerError
from nemo_rl.experience.routes import RouteWriter
from nemo_rl.jagged import nest, values_of
from nemo_rl.models.generation.interfaces import RecordedRoutes
from nemo_rl.routes.columns import decode_routes
from nemo_rl.routes.shape import MISSING, RouteShape, count_routes, place_routes
from nemo_rl.utils.metrics import values as reduced

SHAPE = RouteShape(layers=(1,), top_k=2, num_experts=16)
KEYS = ["a", "b"]
DUMMY = [0, 1]


def turn(*rows: list[int], starts: tuple[int, ...] = (0, 0)) -> RecordedRoutes:
    """Each number n stands for the route (n, n + 1)."""
    flat = [[[n, n + 1]] for row in rows for n in row]
    return RecordedRoutes(
        ids=torch.tensor(flat, dtype=torch.uint8).reshape(-1, 1, 2),
        starts=torch.tensor(starts),
        lengths=torch.tensor([len(row) for row in rows]),
        shape=SHAPE,
    )


def firsts(routes: torch.Tensor) -> list[list[int]]:
    """The first id of each token, row by row."""
    return [row[:, 0, 0].tolist() for row in routes.unbind()]


def place(*turns: RecordedRoutes, lengths: tuple[int, ...] = (5, 3)) -> list[list[int]]:
    return firsts(place_routes(turns, lengths=torch.tensor(lengths, dtype=torch.int32), keys=KEYS))


def test_a_single_turn_leaves_the_last_token_with_a_dummy_route():
    routes = place_routes([turn([2, 3, 4, 5], [6, 7])], lengths=torch.tensor([5, 3]), keys=KEYS)
    assert routes.dtype == torch.int16
    assert values_of(routes)[:, 0].tolist() == [[2, 3], [3, 4], [4, 5], [5, 6], DUMMY, [6, 7], [7, 8], DUMMY]


def test_fewer_routes_are_missing_and_one_too_many_is_left_out():
    assert place(turn([2, 3], [])) == [[2, 3, MISSING, MISSING, 0], [MISSING, MISSING, 0]]
    assert place(turn([2, 3, 4, 5, 9], [6, 7, 9])) == [[2, 3, 4, 5, 0], [6, 7, 0]]
    with pytest.raises(WorkerError, match=r"routes of 'b': expected them within its 3 tokens, got positions 0 to 3"):
        place(turn([2, 3], [6, 7, 8, 9]))


def test_later_turns_add_what_earlier_ones_could_not_have():
    # Row a: 3 tokens after the first turn, 8 after the second; row b ended with the first.
    first = turn([2, 3], [6, 7])
    with_prefix = turn([10, 11, 4, 5, 6, 7, 8], [])
    assert place(first, with_prefix, lengths=(8, 3)) == [[2, 3, 4, 5, 6, 7, 8, 0], [6, 7, 0]]
    without_prefix = turn([4, 5, 6, 7, 8], [], starts=(2, 0))
    assert place(first, without_prefix, lengths=(8, 3)) == [[2, 3, 4, 5, 6, 7, 8, 0], [6, 7, 0]]
    with_gap = turn([6, 7, 8], [], starts=(4, 0))
    assert place(first, with_gap, lengths=(8, 3))[0] == [2, 3, MISSING, MISSING, 6, 7, 8, 0]


def test_turns_of_different_models_do_not_mix():
    other = RouteShape(layers=(2,), top_k=2, num_experts=16)
    changed = RecordedRoutes(ids=torch.zeros(0, 1, 2), starts=torch.zeros(2), lengths=torch.zeros(2), shape=other)
    with pytest.raises(WorkerError, match="expected the routes of one model"):
        place(turn([2], [3]), changed)
    with pytest.raises(WorkerError, match="got none"):
        place()


def test_a_trained_token_is_blind_when_the_token_before_it_has_no_route():
    m = MISSING
    ids = torch.tensor([3, m, 3, 3, 0, m, 3, 0], dtype=torch.int16)[:, None, None].expand(-1, 1, 2)
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
    counts = count_routes(nest(ids.contiguous(), torch.tensor([5, 3])), mask)
    # Row a: token 2 is predicted from token 1; row b: token 1 from token 0.
    assert (counts.tokens, counts.missing, counts.trained, counts.trained_missing) == (6, 2, 5, 2)


def write(writer: RouteWriter, recorded: RecordedRoutes, **changes: object):
    given = {
        "lengths": torch.tensor([5, 3]),
        "token_mask": torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.bool),
        "keys": KEYS,
        "with_digests": False,
    }
    return writer.write([recorded], **{**given, **changes})


def test_columns_come_with_the_numbers_of_the_rollout():
    written = write(RouteWriter(RouterReplayConfig(enabled=True)), turn([2, 3, 4], [6, 7]), with_digests=True)
    assert set(written.columns) == {"routed_experts", "routed_experts_missing", "routed_experts_digests"}
    assert firsts(decode_routes(written.columns, SHAPE)) == firsts(written.routes) == [[2, 3, 4, MISSING, 0], [6, 7, 0]]
    metrics = reduced(written.metrics)
    # 8 tokens of 2 bytes, and a byte of bitmap for each row; the bound is 8 bits per token.
    assert metrics == {
        "routes_missing_share": pytest.approx(1 / 6),
        "routes_missing_trained_tokens": 1.0,
        "routes_bytes_per_token": pytest.approx(18 / 8),
        "routes_bytes_vs_bound": pytest.approx(18 / 8),
    }
    packed = write(RouteWriter(RouterReplayConfig(enabled=True, bit_packed=True)), turn([2, 3, 4], [6, 7]))
    assert set(packed.columns) == {"routed_experts_bits", "routed_experts_missing"}


def test_too_many_trained_tokens_without_a_route_end_the_step():
    half = turn([2, 3, 4], [])
    write(RouteWriter(RouterReplayConfig(enabled=True, max_missing_share=0.75)), half)
    with pytest.raises(WorkerError, match=r"3 of 4 tokens to train \(75.0%\).*max_missing_share=0.7"):
        write(RouteWriter(RouterReplayConfig(enabled=True, max_missing_share=0.7)), half)


def test_contents_are_checked_once_and_always_when_asked_for(monkeypatch):
    def bad() -> RecordedRoutes:
        recorded = turn([2, 3, 4, 5], [6, 7])
        recorded.ids[4, 0] = 9
        return recorded

    monkeypatch.delenv("NRL_ROUTER_REPLAY_VALIDATE", raising=False)
    with pytest.raises(SchemaMismatch, match=r"routed_experts of 'b', token 0, layer 1"):
        write(RouteWriter(RouterReplayConfig(enabled=True)), bad())
    writer = RouteWriter(RouterReplayConfig(enabled=True))
    write(writer, turn([2, 3, 4, 5], [6, 7]))
    write(writer, bad())
    monkeypatch.setenv("NRL_ROUTER_REPLAY_VALIDATE", "1")
    with pytest.raises(SchemaMismatch, match="'b', token 0"):
        write(writer, bad())


def slowly(turns: list[RecordedRoutes], lengths: list[int]) -> list[list[int]]:
    """As `place_routes`, token by token."""
    rows = [[MISSING] * length for length in lengths]
    for recorded in turns:
        ids = iter(recorded.ids[:, 0, 0].tolist())
        for row, start, count in zip(rows, recorded.starts.tolist(), recorded.lengths.tolist(), strict=True):
            for at in range(start, start + count):
                route = next(ids)
                row[at] = route if row[at] == MISSING else row[at]
    return [[*row[:-1], 0] if row else [] for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(1, 3))
def test_places_are_those_of_a_loop_over_tokens(data: st.DataObject, lengths: list[int], num_turns: int):
    turns, number = [], 0
    for _ in range(num_turns):
        rows, starts = [], []
        for length in lengths:
            start = data.draw(st.integers(0, length))
            count = data.draw(st.integers(0, length - start))
            rows.append([(number + i) % 15 for i in range(count)])
            starts.append(start)
            number += count
        turns.append(turn(*rows, starts=tuple(starts)))
    keys = [f"k{i}" for i in range(len(lengths))]
    assert firsts(place_routes(turns, lengths=torch.tensor(lengths), keys=keys)) == slowly(turns, lengths)
