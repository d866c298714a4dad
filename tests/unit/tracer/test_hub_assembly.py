"""Parts of any split of rows, features, microbatches and ranks give what the whole gives."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.frame import BadFrame, Frame, FramePart, FrameSite, FrameTable, Where
from nemo_rl.tracer.protocol import HubLimits
from nemo_rl.tracer.reducer import Counts, Digest, Histogram, Norm, PerToken, Span, Stats, parse_reducer, token_hashes
from nemo_rl_tools.tracer.hub.assembly import Assembly

FOUR = Span(0, 4, 4)
RUN, STEP, PHASE = "run", 7, "train"
SITE = FrameSite(SiteKind.LAYER_OUT, 3)
KEYS = ("row-b", "row-a", "row-c")
REDUCERS = (
    *("stats", "histogram(-3, 3, 4)", "counts", "norm", "digest", "full", "sample(5)", "project(v)", "topk(3)"),
    *(f"tiles({n}, {how})" for n, how in ((1, "mean"), (4, "mean"), (3, "max"), (5, "absmax"), (4, "rms"), (9, "rms"))),
)


def vector(num_features):
    return np.arange(num_features) - 2.0


def reduce_part(reducer, values_RF, span, codes_R):
    """What a rank makes of its tokens and features, slowly."""
    flat = values_RF.reshape(-1)
    if isinstance(reducer, Stats):
        ends = (flat.min(initial=np.inf), flat.max(initial=-np.inf), np.abs(flat).max(initial=-np.inf))
        return np.array([flat.size, flat.sum(), np.square(flat).sum(), *ends, (flat == 0).sum(), 0, 0, 0])
    if isinstance(reducer, Histogram):
        edges = np.linspace(reducer.low, reducer.high, reducer.bins + 1)
        inside = np.histogram(flat[(flat >= reducer.low) & (flat < reducer.high)], edges)[0]
        return np.array([(flat < reducer.low).sum(), *inside, (flat >= reducer.high).sum()], dtype=np.int64)
    if isinstance(reducer, Counts):
        return np.bincount(np.abs(flat).astype(np.int64), minlength=1)
    if isinstance(reducer, Norm):
        return np.array([np.square(flat).sum()])
    if isinstance(reducer, Digest):
        places = codes_R[:, None] * 1009 + np.arange(span.start, span.stop)
        return np.array([(values_RF.astype(np.int64) * places).sum()], dtype=np.int64)
    if reducer.name in ("full", "sample"):
        return values_RF.astype(np.float32)
    if reducer.name == "project":
        return (values_RF @ vector(span.whole)[span.start : span.stop])[:, None]
    if reducer.name == "topk":
        order = np.argsort(-values_RF, axis=1, kind="stable")[:, : reducer.k]
        return np.stack((np.take_along_axis(values_RF, order, axis=1), order + span.start), axis=-1)
    bounds = reducer.bounds(span.whole).clip(span.start, span.stop) - span.start
    how = {
        "mean": lambda part: part.sum(1),
        "rms": lambda part: np.square(part).sum(1),
        "max": lambda part: part.max(1, initial=-np.inf),
        "absmax": lambda part: np.abs(part).max(1, initial=-np.inf),
    }[reducer.how]
    return np.stack([how(values_RF[:, a:b]) for a, b in pairwise(bounds)], axis=1)


def expected(reducer, values_RF, codes_R):
    """Of the whole, straight from the values."""
    num_features = values_RF.shape[1]
    if reducer.name in ("full", "sample"):
        return values_RF.astype(np.float32)
    if reducer.name == "project":
        return (values_RF @ vector(num_features))[:, None].astype(np.float32)
    if reducer.name == "topk":
        return reduce_part(reducer, values_RF, Span(0, num_features, num_features), codes_R)
    if reducer.name == "tiles":
        bounds = [t * num_features // reducer.n for t in range(reducer.n + 1)]
        tiles = []
        for a, b in pairwise(bounds):
            part = values_RF[:, a:b]
            if a == b:
                tiles.append(np.full(len(values_RF), np.nan))
            elif reducer.how == "mean":
                tiles.append(part.sum(1) / (b - a))
            elif reducer.how == "rms":
                tiles.append(np.sqrt(np.square(part).sum(1) / (b - a)))
            else:
                tiles.append((np.abs(part) if reducer.how == "absmax" else part).max(1))
        return np.stack(tiles, axis=1).astype(np.float32)
    whole = reduce_part(reducer, values_RF, Span(0, num_features, num_features), codes_R)
    return np.sqrt(whole) if reducer.name == "norm" else whole


class Sender:
    """Ranks of one phase, in this process."""

    def __init__(self, world, *, step=STEP, **limits):
        self.assembly = Assembly(RUN, limits=HubLimits(**limits), clock=lambda: self.now)
        self.world, self.step, self.now = world, step, 0.0
        for rank in range(world):
            self.assembly.connect(rank, world)

    def begin(self, *ranks):
        for rank in ranks or range(self.world):
            self.assembly.begin(rank, self.step, PHASE)

    def end(self, *ranks, dropped=0):
        for rank in ranks or range(self.world):
            self.assembly.end(rank, self.step, PHASE, dropped)

    def table(self, rank, name, tokens_3R, keys=KEYS):
        table = FrameTable(run=RUN, name=name, step=self.step, keys=keys, tokens=np.asarray(tokens_3R, dtype=np.int32))
        self.assembly.add_table(rank, table)

    def part(self, rank, text, payload, *, span=FOUR, table=None, rows=None, microbatch=0, **more):
        part = FramePart(
            where=Where(RUN, self.step, PHASE, SITE, parse_reducer(text)),
            payload=payload,
            span=span,
            table=table,
            rows=rows,
            microbatch=microbatch,
            rank=rank,
            **more,
        )
        self.assembly.add_part(rank, part)

    def made(self, *, limit=1 << 30):
        made = []
        for phase in self.assembly.take_closed():
            made += phase.frames(limit)
            self.assembly.release(phase)
        return made

    def frame(self):
        (frame,) = [each for each in self.made() if isinstance(each, Frame)]
        return frame


def draw_tokens(rng):
    """`[3, R]` row, position and id of every token, in any order, each once."""
    tokens = [(row, position, int(rng.integers(100))) for row in range(3) for position in range(rng.integers(0, 7))]
    tokens = tokens or [(0, 0, 5)]
    return np.array(tokens, dtype=np.int32)[rng.permutation(len(tokens))].T


def send_split(sender, reducer, tokens_3R, values_RF, rng):
    """Tokens over data ranks and microbatches, features of each over tensor ranks, unevenly."""
    num_features, num_groups = values_RF.shape[1], sender.world // 2
    group_R, microbatch_R = rng.integers(num_groups, size=tokens_3R.shape[1]), rng.integers(2, size=tokens_3R.shape[1])
    work = [(group, microbatch, side) for group in range(num_groups) for microbatch in range(2) for side in range(2)]
    cut = {group: int(rng.integers(num_features + 1)) for group in range(num_groups)}
    for group, microbatch, side in [work[at] for at in rng.permutation(len(work))]:
        rank = 2 * group + side
        mine = (group_R == group) & (microbatch_R == microbatch)
        tokens, values = tokens_3R[:, mine], values_RF[mine]
        start, stop = (0, cut[group]) if side == 0 else (cut[group], num_features)
        span = Span(start, stop, num_features)
        codes = tokens[0].astype(np.int64) * 1000 + tokens[1]
        payload = reduce_part(reducer, values[:, start:stop], span, codes)
        name = f"t{microbatch}"
        if not isinstance(reducer, PerToken):
            sender.part(rank, str(reducer), payload, span=span, microbatch=microbatch)
            continue
        sender.table(rank, name, tokens)
        # In two pieces by rows, so that row numbers of a part count, too.
        half = rng.integers(len(values) + 1)
        for rows in (np.arange(half, dtype=np.int32), np.arange(half, len(values), dtype=np.int32)):
            sender.part(rank, str(reducer), payload[rows], span=span, table=name, rows=rows, microbatch=microbatch)


@pytest.mark.parametrize("text", REDUCERS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_split_gives_what_the_whole_gives(text, seed):
    rng, reducer = np.random.default_rng(seed), parse_reducer(text)
    tokens = draw_tokens(rng)
    values = rng.permuted(np.arange(tokens.shape[1] * 7.0).reshape(-1, 7) - 9, axis=1)
    sender = Sender(2 * int(rng.integers(1, 4)))
    sender.assembly.set_keys(STEP, ["row-a", "row-b"])
    sender.begin()
    send_split(sender, reducer, tokens, values, rng)
    sender.end()
    made = sender.made()
    frame = made[-1]
    order = np.lexsort((tokens[1], np.array([1, 0, 2])[tokens[0]]))
    if isinstance(reducer, PerToken):
        shown = order
        if reducer.name == "sample":
            hashes = token_hashes(KEYS, tokens[0], tokens[1])
            shown = order[np.isin(order, np.argsort(hashes)[: reducer.n])]
        table = made[0]
        assert isinstance(table, FrameTable) and frame.table == table.name and len(made) == 2
        assert list(table.keys) == [key for key in ("row-a", "row-b", "row-c") if key in _keys_of(tokens[:, shown])]
        assert [table.keys[row] for row in table.tokens[0]] == [KEYS[row] for row in tokens[0][shown]]
        np.testing.assert_array_equal(table.tokens[1:], tokens[1:, shown])
        np.testing.assert_array_equal(frame.payload, expected(reducer, values, None)[shown])
    else:
        codes = tokens[0].astype(np.int64) * 1000 + tokens[1]
        np.testing.assert_array_equal(frame.payload, expected(reducer, values, codes))
        assert frame.table is None
    assert frame.missing == () and frame.dropped == 0 and frame.num_features == 7
    assert sender.assembly.num_bytes == _table_bytes(sender)


def _keys_of(tokens):
    return {KEYS[row] for row in tokens[0]}


def _table_bytes(sender):
    return sum(tokens.num_bytes for held in sender.assembly._tables.values() for _, tokens in held.values())


def test_tokens_and_features_that_come_twice_count_once():
    sender = Sender(3)
    sender.begin()
    for rank, span in ((0, Span(0, 4, 4)), (1, Span(0, 4, 4)), (2, Span(2, 4, 4))):
        sender.table(rank, "t", [[0, 0], [0, 1], [5, 6]])
        sender.part(rank, "project(v)", np.full((2, 1), 2.5), span=span, table="t")
    sender.end()
    np.testing.assert_array_equal(sender.frame().payload, [[2.5], [2.5]])


def test_frames_with_the_same_tokens_share_one_table_and_come_in_the_order_of_a_pass():
    sender = Sender(1)
    sender.begin()
    sender.table(0, "t", [[0, 0], [0, 1], [5, 6]])
    where = [
        Where(RUN, STEP, PHASE, FrameSite(kind, 0), parse_reducer("full"))
        for kind in (SiteKind.MLP_OUT, SiteKind.ATTN_Q)
    ]
    for at in where:
        payload = np.ones((2, 4), dtype=np.float32)
        sender.assembly.add_part(0, FramePart(where=at, payload=payload, span=Span(0, 4, 4), table="t"))
    sender.end()
    table, first, second = sender.made()
    assert first.table == second.table == table.name
    assert [first.where.site.kind, second.where.site.kind] == [SiteKind.ATTN_Q, SiteKind.MLP_OUT]


def test_a_table_sent_again_under_its_name_counts_from_then_on():
    sender = Sender(1)
    sender.begin()
    for position in (0, 1):
        sender.table(0, "t", [[0], [position], [5]])
        sender.part(0, "full", np.full((1, 4), position, dtype=np.float32), table="t")
    sender.end()
    np.testing.assert_array_equal(sender.frame().payload[:, 0], [0, 1])


def test_phase_waits_for_every_rank_until_its_deadline_and_names_who_is_missing():
    sender = Sender(3, assembly_s=30.0)
    sender.begin(0, 1)
    sender.part(0, "norm", np.array([4.0]))
    sender.end(0)
    assert sender.made() == []
    assert sender.assembly.seconds_left() == 30.0
    sender.now = 30.0
    frame = sender.frame()
    assert frame.missing == (1, 2) and frame.payload == [2.0]


def test_rank_that_is_gone_is_not_waited_for():
    sender = Sender(2)
    sender.begin()
    sender.part(0, "norm", np.array([4.0]))
    sender.part(1, "norm", np.array([5.0]))
    sender.end(0)
    assert sender.made() == []
    sender.assembly.disconnect(1)
    frame = sender.frame()
    assert frame.missing == (1,) and frame.payload == [3.0]


def test_late_parts_change_no_picture_that_was_made():
    sender = Sender(2, assembly_s=1.0)
    sender.begin(0)
    sender.part(0, "norm", np.array([4.0]))
    sender.end(0)
    sender.now = 2.0
    assert sender.frame().missing == (1,)
    sender.begin(1)
    sender.part(1, "norm", np.array([5.0]))
    sender.end(1)
    assert sender.made() == [] and sender.assembly.num_late == 1


def test_ranks_may_be_a_round_apart():
    sender = Sender(2)
    sender.begin(0)
    sender.part(0, "norm", np.array([9.0]))
    sender.end(0)
    sender.begin(0)
    sender.part(0, "norm", np.array([1.0]))
    sender.end(0)
    sender.begin(1)
    sender.part(1, "norm", np.array([16.0]))
    sender.end(1)
    assert sender.frame().payload == [5.0]
    sender.begin(1)
    sender.end(1)
    assert sender.frame().payload == [1.0]


def test_dropped_counts_what_ranks_dropped_within_the_phase():
    sender = Sender(2)
    for so_far, within in ((3, 3), (3, 0), (8, 5)):
        sender.begin()
        sender.part(0, "norm", np.array([9.0]))
        sender.end(0, dropped=so_far)
        sender.end(1, dropped=0)
        assert sender.frame().dropped == within


def test_memory_is_bounded_and_what_is_left_out_is_counted():
    sender = Sender(1, assembly_bytes=10_000)
    sender.begin()
    sender.table(0, "t", [[0] * 8, range(8), [5] * 8])
    for microbatch in range(100):
        sender.part(
            0, "full", np.ones((8, 32), dtype=np.float32), span=Span(0, 32, 32), table="t", microbatch=microbatch
        )
    assert sender.assembly.num_bytes <= 10_000
    sender.end()
    assert sender.frame().dropped > 80
    assert sender.assembly.num_bytes == _table_bytes(sender)


@pytest.mark.parametrize(
    ("text", "payload", "more"),
    [
        ("stats", np.zeros(9), {}),
        ("stats", np.zeros(10, dtype=np.int64), {}),
        ("digest", np.zeros(1), {}),
        ("histogram", np.zeros(5, dtype=np.int64), {}),
        ("counts", np.zeros((2, 2), dtype=np.int64), {}),
        ("tiles(2, mean)", np.zeros((2, 3)), {"table": "t"}),
        ("tiles(2, mean)", np.zeros((3, 2)), {"table": "t"}),
        ("tiles(2, mean)", np.zeros((2, 2)), {"table": "unknown"}),
        ("tiles(2, mean)", np.zeros((2, 2)), {}),
        ("full", np.zeros((2, 3), dtype=np.float32), {"table": "t"}),
        ("full", np.zeros((2, 4), dtype=np.float32), {"table": "t", "span": Span(0, 4, 1 << 50)}),
        ("project(v)", np.zeros((1, 1)), {"table": "t", "rows": np.array([2], dtype=np.int32)}),
        ("project(v)", np.zeros((1, 1)), {"table": "t", "rows": np.array([-1], dtype=np.int32)}),
        ("topk(2)", np.zeros((2, 2)), {"table": "t"}),
    ],
)
def test_parts_that_do_not_fit_their_reducer_are_refused_and_counted(text, payload, more):
    sender = Sender(1)
    sender.begin()
    sender.table(0, "t", [[0, 0], [0, 1], [5, 6]])
    with pytest.raises(BadFrame):
        sender.part(0, text, payload, **more)
    sender.part(0, "norm", np.array([1.0]))
    sender.end()
    assert sender.frame().dropped == 1


def test_picture_that_would_need_more_than_the_limit_is_left_out():
    sender = Sender(1)
    sender.begin()
    sender.table(0, "t", [[0, 0], [0, 1], [5, 6]])
    sender.part(0, "full", np.zeros((2, 1), dtype=np.float32), span=Span(0, 1, 1 << 39), table="t")
    sender.end()
    assert sender.made(limit=1 << 30) == []


def test_other_runs_ranks_and_negative_positions_are_refused():
    sender = Sender(2)
    sender.begin()
    where = Where("other", STEP, PHASE, SITE, parse_reducer("norm"))
    with pytest.raises(BadFrame, match="run"):
        sender.assembly.add_part(0, FramePart(where=where, payload=np.ones(1), span=Span(0, 4, 4)))
    where = Where(RUN, STEP, PHASE, SITE, parse_reducer("norm"))
    with pytest.raises(BadFrame, match="rank 1"):
        sender.assembly.add_part(0, FramePart(where=where, payload=np.ones(1), span=Span(0, 4, 4), rank=1))
    with pytest.raises(BadFrame, match="negative"):
        sender.table(0, "t", [[0], [-1], [5]])


def test_steps_that_ranks_have_left_are_forgotten():
    sender = Sender(1)
    for step in range(100):
        sender.step = step
        sender.begin()
        sender.table(0, f"t{step}", [[0], [0], [5]])
        sender.part(0, "full", np.ones((1, 4), dtype=np.float32), table=f"t{step}")
        sender.end()
        assert sender.frame().where.step == step
    assert len(sender.assembly._steps) <= 8 and sender.assembly.num_bytes == 12
