"""The replayer of one rank: what a router gets, what is counted, and that nothing is left behind."""

from __future__ import annotations

import json

import pytest
import torch

from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import SchemaMismatch, WorkerError
from nemo_rl.models.policy.microbatch import PassShape
from nemo_rl.models.policy.routes.replay import (
    MicrobatchRoutes,
    MicrobatchTokens,
    RouteReplayer,
    RouteTrace,
    microbatch_routes,
)
from nemo_rl.models.policy.routes.slices import RouteShard, RouteSlices, ShardRoutes
from nemo_rl.routes.digest import route_digests
from nemo_rl.routes.shape import RouteShape
from nemo_rl.utils.r3_trace import r3_trace_stage, reset_r3_trace

SHAPE = RouteShape(layers=(1, 3), top_k=2, num_experts=300)
LENGTHS = (3, 2)
PLAN = PackPlan(microbatches=(((1, 0),),), steps=(1,), pad_to=3)
OWN = torch.tensor([[0, 1]]).repeat(6, 1)
TOKENS = MicrobatchTokens(
    rows=(1, 0),
    lengths=(2, 3),
    row_ns=torch.tensor([[0, 0, -1], [1, 1, 1]]),
    column_ns=torch.tensor([[0, 1, 0], [0, 1, 2]]),
)


def routes() -> torch.Tensor:
    """`[N, T, L, K]`: every id tells its row, token and layer; the second token of row 0 has no route."""
    row, token, layer, k = torch.meshgrid(*(torch.arange(n) for n in (2, 3, 2, 2)), indexing="ij")
    found = (row * 100 + token * 10 + layer * 4 + k + 1).to(torch.int16)
    found[0, 1] = -1
    return found


def slices(shard: RouteShard, values: torch.Tensor | None = None) -> RouteSlices:
    whole = ShardRoutes.of_dense(routes() if values is None else values, LENGTHS, SHAPE)
    return whole.cut(shard, PLAN, PassShape())


def microbatch(*, positions_first: bool = False, digests: torch.Tensor | None = None) -> MicrobatchRoutes:
    cut = slices(RouteShard(layer_index=(0, 1)))
    cut = RouteSlices(ids=cut.ids, is_missing=cut.is_missing, digests=digests, ranges=cut.ranges)
    return microbatch_routes(cut.of((1, 0)), TOKENS, number=4, top_k=2, positions_first=positions_first)


def replayer(**options: bool) -> RouteReplayer:
    return RouteReplayer(SHAPE.layers, top_k=2, num_experts=300, **options)


def test_tokens_get_the_ids_of_their_row_and_layer_and_padding_a_dummy() -> None:
    ours = replayer()
    with ours.stage("train"), ours.pass_of(microbatch()):
        found = ours.choose(3, lambda: OWN)
    assert found is not None
    assert found.tolist() == [[105, 106], [115, 116], [0, 1], [5, 6], [0, 1], [25, 26]]
    assert ours.metrics()["train_missing_share"].value == pytest.approx(1 / 3), "of the tokens that a rollout feeds"


def test_routers_that_see_positions_first_get_them_in_that_order() -> None:
    ours = replayer()
    with ours.stage("train"), ours.pass_of(microbatch(positions_first=True)):
        found = ours.choose(1, lambda: OWN)
    assert found is not None
    assert found[:, 0].tolist() == [101, 1, 111, 0, 0, 21]


def test_a_layer_that_is_recomputed_keeps_the_choice_of_the_first_time() -> None:
    ours = replayer()
    with ours.stage("train"):
        kept = microbatch()
        with ours.pass_of(kept):
            first = ours.choose(1, lambda: OWN)
        with ours.pass_of(microbatch()):
            ours.choose(1, lambda: OWN)
        ours.enter(kept)
        again = ours.choose(1, lambda: OWN + 7)
        ours.leave()
    assert first is not None and again is not None and torch.equal(first, again)


class Seen:
    """What routers were told, as (action, layer, pending before, pending after)."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def used(self, routes, *, layer, action, ids_TK, pending) -> None:
        self.told.append((action, layer, *pending))

    def cleared(self, routes, *, layer, pending) -> None:
        self.told.append(("clear", layer, pending))


def test_microbatches_in_flight_are_counted_until_their_backward_pass() -> None:
    ours, seen, first, second = replayer(), Seen(), microbatch(), microbatch()
    with ours.stage("train", seen):
        for routes in (first, second):
            with ours.pass_of(routes, backward_follows=True):
                ours.choose(1, lambda: OWN)
        for routes in (first, second):
            ours.enter(routes)
            ours.choose(1, lambda: OWN)
            ours.leave()
    assert seen.told == [
        *(("replay_forward", 1, 0, 1), ("replay_forward", 1, 1, 2)),
        *(("replay_backward", 1, 2, 1), ("clear", 1, 1), ("replay_backward", 1, 1, 0), ("clear", 1, 0)),
    ]
    seen.told.clear()
    with ours.stage("prev_logprobs", seen), torch.no_grad(), ours.pass_of(microbatch()):
        ours.choose(1, lambda: OWN)
    assert seen.told == [("replay_forward", 1, 0, 0), ("clear", 1, 0)], "no backward pass follows"
    assert ours.is_idle and not ours._waiting


@pytest.mark.parametrize("replays", [True, False])
def test_the_trace_has_the_shape_of_the_scores_what_is_pending_and_every_action(tmp_path, monkeypatch, replays):
    monkeypatch.setenv("NRL_R3_TRACE", "1")
    monkeypatch.setenv("NRL_R3_TRACE_DIR", str(tmp_path))
    monkeypatch.setenv("NRL_R3_TRACE_MICROBATCHES", "5")
    reset_r3_trace()
    digests = route_digests(slices(RouteShard(layer_index=(0, 1))).ids.long(), SHAPE.layers)
    made, ours = microbatch(digests=digests), replayer()
    if not replays:
        made.ids_TlK = made.is_missing_T = made.digests_Tl = None
    with r3_trace_stage("train", coords={"cp": 1}, sizes={"cp": 2}, layers=(1, 3), replays=replays) as stage:
        assert stage is not None
        trace = RouteTrace(
            stage=stage, keys=["a_g0", "a_g1"], source_NT=None, layers=(1, 3), layer_index=(0, 1), num_experts=300
        )
        trace.placed(made, torch.zeros(6))
        with ours.stage("train", trace), ours.pass_of(made):
            ours.choose(1, lambda: OWN)
            ours.choose(1, lambda: OWN)
    reset_r3_trace()
    (file,) = tmp_path.glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    actions = [record for record in records if record["event"] == "router_replay_action"]
    expected = ["replay_forward", "replay_backward", "clear"] if replays else ["record", "record", "clear"]
    assert [record["action"] for record in actions] == expected
    assert [record["replay_backward_list_len"] for record in actions] == [1, 0, 0]
    verified = [record for record in records if record["event"] == "router_replay_forward_verify"]
    if replays:
        assert [record["scores_shape"] for record in verified] == [[6, 300], [6, 300]]
        ends = [(r["replay_backward_list_len_before"], r["replay_backward_list_len_after"]) for r in verified]
        assert ends == [(0, 1), (1, 0)]
        (shard,) = [record for record in records if record["event"] == "cp_routed_experts"]
        assert (shard["cp_rank"], shard["cp_size"]) == (1, 2)
    else:
        assert not verified and "digests" not in actions[0] and actions[0]["tensor"]["shape"] == [6, 2]
        assert not [record for record in records if record["event"].startswith("stage_")]


def test_outside_of_a_pass_and_after_an_error_routers_choose_for_themselves() -> None:
    ours = replayer()
    with pytest.raises(ZeroDivisionError), ours.stage("train"), ours.pass_of(microbatch()):
        assert not ours.is_idle
        raise ZeroDivisionError
    assert ours.is_idle and ours.choose(1, lambda: OWN) is None
    with pytest.raises(ZeroDivisionError), ours.stage("train"):
        ours.enter(microbatch())
        raise ZeroDivisionError
    assert ours.is_idle


def test_ids_that_are_not_those_of_the_rollout_end_the_pass() -> None:
    right = route_digests(slices(RouteShard(layer_index=(0, 1))).ids.long(), SHAPE.layers)
    ours = replayer()
    with ours.stage("prev_logprobs"), ours.pass_of(microbatch(digests=right)):
        assert ours.choose(1, lambda: OWN) is not None
    wrong = right.clone()
    wrong[0, 1] += 1
    with (
        pytest.raises(WorkerError, match=r"prev_logprobs.*replay_forward of microbatch 4, layer 3.*\[6, 2\]"),
        ours.stage("prev_logprobs"),
        ours.pass_of(microbatch(digests=wrong)),
    ):
        ours.choose(1, lambda: OWN)
        ours.choose(3, lambda: OWN)


def test_a_pass_with_other_tokens_is_refused() -> None:
    ours = replayer()
    with (
        pytest.raises(WorkerError, match=r"layer 1.*\[5, 2\].*\[6, 2\]"),
        ours.stage("train"),
        ours.pass_of(microbatch()),
    ):
        ours.choose(1, lambda: OWN[:5])


def test_validation_names_an_id_that_no_router_would_choose() -> None:
    values = routes()
    values[1, 1, 1] = 7
    ours = replayer(validates=True)
    cut = slices(RouteShard(layer_index=(0, 1)), values)
    made = microbatch_routes(cut.of((1, 0)), TOKENS, number=0, top_k=2, positions_first=False)
    with ours.stage("train"), ours.pass_of(made):
        assert ours.choose(1, lambda: OWN) is not None
        with pytest.raises(WorkerError, match=r"layer 3, token 1 .*different ids of 0 to 299, got \[7, 7\]"):
            ours.choose(3, lambda: OWN)


def test_a_route_that_is_missing_in_part_is_refused() -> None:
    values = routes()
    values[1, 0, 1, 0] = -1
    with pytest.raises(SchemaMismatch, match="in every layer"):
        slices(RouteShard(layer_index=(0,)), values)


def test_a_rank_gets_its_layers_positions_and_chunk() -> None:
    plan = PackPlan(microbatches=(((0, 1),),), steps=(1,), pad_to=8, packed=True)
    shape = PassShape(divisible_by=8, sequence_multiple=8, cp_size=2)
    lengths = (8, 5)
    values = torch.arange(2 * 8 * 2 * 2).view(2, 8, 2, 2).to(torch.int16)
    whole = ShardRoutes.of_dense(values, lengths, SHAPE)
    seen = []
    for cp_rank in (0, 1):
        for chunk in (0, 1):
            shard = RouteShard(cp_rank=cp_rank, chunk=chunk, num_chunks=2, layer_index=(1,))
            part = whole.cut(shard, plan, shape)
            assert part.ids.dtype == torch.int16 and part.ids.shape[1:] == (1, 2)
            seen.append((part.ids[:, 0, 0] // 4).tolist())
    # Zigzag: rank 0 has the first and the last quarter of each row; a chunk is half of what a rank has.
    assert seen == [[0, 1, 6, 7], [8, 9], [2, 3, 4, 5], [10, 11, 12]]
