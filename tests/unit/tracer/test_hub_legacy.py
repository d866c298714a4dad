"""The public text protocol of older tensor tracers, at /legacy."""

import asyncio
import json
from functools import partial

import numpy as np
import pytest
from websockets.exceptions import InvalidStatus

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.frame import Frame, FrameSite, FrameTable, Where
from nemo_rl.tracer.reducer import parse_reducer
from nemo_rl.tracer.watch import CLASSICAL
from tests.helpers import tracer_hub
from tests.helpers.tracer_hub import PHASE, RUN

TABLE = FrameTable(
    run=RUN, name="t", step=1, keys=("a", "b"), tokens=np.array([[0, 1, 1], [4, 0, 1], [7, 8, 9]], dtype=np.int32)
)
in_hub = partial(tracer_hub.in_hub, server={"has_legacy": True})
FLAGS = tuple(each.flag for each in CLASSICAL)


def legacy(hub, token=None, **more):
    token = hub.tokens.controller if token is None else token
    return hub.socket(uri=hub.uri.replace("/live", f"/legacy?token={token}"), **more)


def request(flag="HiddenStates", kind="Tile", **configs):
    compressor = {"compressor_type": kind, "compressor_configs": configs}
    flags = {name: name == flag for name in FLAGS}
    return {"visualization_flags": flags, "compressor_config": {flag: compressor}}


def publish(hub, kind, reducer, payload, layer=2, **more):
    where = Where(RUN, 1, more.get("phase", PHASE), FrameSite(SiteKind(kind), layer), parse_reducer(reducer))
    hub.hub.publish_table(TABLE)
    hub.hub.publish_frame(Frame(where=where, payload=np.asarray(payload, dtype=np.float32), table="t"))


@in_hub()
async def test_request_sets_the_watches_and_frames_come_as_updates(hub):
    hub.hub.set_run({"run": RUN, "model": {"num_hidden_layers": 5}})
    async with legacy(hub) as page:
        flags = {"HiddenStates": "true", "MLP2_mat_mul": True, "MLP1_mat_mul": "false", "QKV_mat_mul": False}
        tile = {"compressor_type": "Tile", "compressor_configs": {"tiles": 2, "method": "data.max(dim=-1)"}}
        config = {"HiddenStates": tile, "MLP2_mat_mul": {"compressor_type": "Empty"}}
        await page.send("run_training_step", visualization_flags=flags, compressor_config=config)
        start = {"type": "start", "micro_batch_size": 0, "seq_length": 0, "num_layers": 5}
        assert await page.receive() == start
        assert hub.hub.plan.texts == ("layer.out & forward | tiles(2, max) | train",)
        publish(hub, "layer.out", "tiles(2, mean)", np.zeros((3, 2)))
        publish(hub, "layer.out", "tiles(2, max)", np.zeros((3, 2)), phase="prev_logprobs")
        publish(hub, "layer.out", "tiles(2, max)", [[1, 2], [3, np.nan], [np.inf, 6]])
        assert await page.receive() == {**start, "micro_batch_size": 2, "seq_length": 2}
        assert await page.receive() == {
            "type": "update",
            "update_type": 7,
            "layer_id": 3,
            "args": [2, 2, 2],
            "result": [1.0, 2.0, None, None, 3.0, None, None, 6.0],
        }


@in_hub()
async def test_sites_of_one_flag_come_together(hub):
    async with legacy(hub) as page:
        await page.send("run_training_step", **request("QKV_mat_mul", "NoOp"))
        await page.wait_for("start")
        for number, kind in enumerate(("attn.q", "attn.k", "attn.v")):
            publish(hub, kind, "full", np.full((3, 1), number))
        update = await page.wait_for("update")
        assert (update["update_type"], update["args"]) == (1, [2, 2, 3])
        assert update["result"] == [0.0, 1.0, 2.0, None, None, None, 0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
        # A model whose MLP has no gate shows what it has.
        await page.send("run_training_step", **request("MLP1_mat_mul", "NoOp"))
        await page.wait_for("start")
        publish(hub, "mlp.up", "full", np.ones((3, 2)))
        assert (await page.wait_for("update"))["args"] == [2, 2, 2]


@pytest.mark.parametrize(
    ("kind", "configs", "watch"),
    [
        ("Tile", {}, "tiles(96, mean)"),
        ("Tile", {"tiles": 8, "method": "data.abs().amax(dim=-1)", "tiles_one_rank": 4}, "tiles(8, absmax)"),
        ("Projection", {"vector_path": "truth"}, "project(truth)"),
        ("NoOp", {}, "full"),
    ],
)
@in_hub()
async def test_compressors_are_reducers(hub, kind, configs, watch):
    async with legacy(hub) as page:
        await page.send("run_training_step", **request(kind=kind, **configs))
        await page.wait_for("start")
        assert hub.hub.plan.texts == (f"layer.out & forward | {watch} | train",)


def page_message(**compressors):
    """What the public page sends: class names of compressors, flags as texts, methods of both sides."""
    tile = {"tiles": 96, "method": "data.mean(dim=-1)", "tiles_one_rank": 96, "method_one_rank": "data.mean(dim=-1)"}
    options = {"TileCompressor": tile, "ProjectionCompressor": {"vector_path": "truth"}}
    return {
        "type": "run_training_step",
        "visualization_flags": {flag: "true" for flag in compressors},
        "compressor_config": {
            flag: {"compressor_type": name, "compressor_configs": options.get(name, {})}
            for flag, name in compressors.items()
        },
    }


@in_hub()
async def test_messages_as_the_public_page_sends_them_are_understood(hub):
    message = page_message(
        QKV_mat_mul="TileCompressor",
        MLP2_mat_mul="NoOpCompressor",
        MLP1_mat_mul="EmptyCompressor",
        HiddenStates="ProjectionCompressor",
        InputTokens="NoOpCompressor",
    )
    async with legacy(hub) as page:
        await page.socket.send(json.dumps(message))
        await page.wait_for("start")
        assert hub.hub.plan.texts == (
            "attn.q, attn.k, attn.v & forward | tiles(96, mean) | train",
            "mlp.out & forward | full | train",
            "layer.out & forward | project(truth) | train",
            "tokens & forward | full | train",
        )
        publish(hub, "tokens", "full", [[7], [8], [9]], layer=None)
        update = await page.wait_for("update")
        assert (update["update_type"], update["layer_id"], update["args"]) == (8, 0, [2, 2, 2])
        rows, positions, ids = TABLE.tokens.tolist()
        assert (rows, positions, ids) == ([0, 1, 1], [4, 0, 1], [7, 8, 9])
        assert update["result"] == [7.0, 4.0, None, None, 8.0, 0.0, 9.0, 1.0], "ids beside positions, row by row"


@in_hub()
async def test_tokens_are_never_compressed(hub):
    async with legacy(hub) as page:
        await page.socket.send(json.dumps(page_message(InputTokens="TileCompressor")))
        await page.wait_for("start")
        assert hub.hub.plan.texts == ("tokens & forward | full | train",)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (request(method="__import__('os').system('true')"), "expected one of these texts"),
        (request(method="data.abs().mean(dim=-1)"), "expected one of these texts"),
        (request(method_one_rank="data.min(dim=-1)"), "expected one of these texts"),
        (request(method=["data.mean(dim=-1)"]), "expected one of these texts"),
        (request(tiles=0), "tiles"),
        (request(tiles="96"), "tiles"),
        (request(tiles=10**9), "tiles"),
        (request(kind="Projection", vector_path="/etc/passwd"), "name of a vector"),
        (request(kind="Projection", vector_path="../secret"), "name of a vector"),
        (request(kind="Projection"), "name of a vector"),
        (request(kind="Pickle"), "Tile, NoOp, Empty or Projection"),
        (request(kind="PickleCompressor"), "Tile, NoOp, Empty or Projection"),
        (request(kind=["TileCompressor"]), "Tile, NoOp, Empty or Projection"),
        (request(flag="HiddenStates") | {"compressor_config": {"Nonsense": {}}}, "Nonsense"),
        ({"visualization_flags": {"Nonsense": True}}, "Nonsense"),
        ({"visualization_flags": []}, "visualization_flags"),
        (
            {"visualization_flags": {"HiddenStates": True}, "compressor_config": {"HiddenStates": "Tile"}},
            "compressor_type",
        ),
    ],
)
@in_hub()
async def test_what_is_not_known_is_refused_and_nothing_is_evaluated(hub, message, reason):
    plan = hub.hub.plan
    async with legacy(hub) as page:
        await page.send("run_training_step", **message)
        assert reason in (await page.wait_for("error"))["text"]
        await page.send("ping")
        await page.wait_for("pong")
        assert hub.hub.plan is plan


@in_hub()
async def test_endpoint_takes_the_token_of_the_controller_from_its_own_pages_alone(hub):
    for token, more, status in (
        ("", {}, 401),
        (hub.tokens.viewer, {}, 401),
        (hub.tokens.job, {}, 401),
        (None, {"origin": "http://evil.example"}, 403),
    ):
        with pytest.raises(InvalidStatus) as refused:
            async with legacy(hub, token, **more):
                pass
        assert refused.value.response.status_code == status


@tracer_hub.in_hub()
async def test_there_is_no_endpoint_unless_it_is_asked_for(hub):
    with pytest.raises(InvalidStatus) as refused:
        async with legacy(hub):
            pass
    assert refused.value.response.status_code == 404


@in_hub()
async def test_it_is_one_controller_among_others(hub):
    async with hub.peer("controller"), legacy(hub) as page:
        assert (await page.receive())["code"] == "busy"
        assert await page.closed() == 1008
    while hub.server.sessions.viewers:
        await asyncio.sleep(0.01)
    async with legacy(hub) as page, hub.peer("controller", takeover=True):
        await page.send("run_training_step", **request())
        assert "taken over" in (await page.wait_for("error"))["text"]


@in_hub()
async def test_junk_ends_the_connection(hub):
    async with legacy(hub) as page:
        for _ in range(17):
            await page.socket.send(json.dumps({"type": "worker_forward", "data": {}}))
        assert await page.closed() == 1008


@in_hub()
async def test_updates_that_would_be_huge_are_named_instead(hub):
    async with legacy(hub) as page:
        await page.send("run_training_step", **request(kind="NoOp"))
        await page.wait_for("start")
        publish(hub, "layer.out", "full", np.zeros((3, 300_000)))
        assert "smaller compressor" in (await page.wait_for("error"))["text"]
