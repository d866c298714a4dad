"""What ranks, driver and viewers say to a hub, and what it answers, over real sockets."""

import asyncio
import json

import numpy as np
import pytest

from nemo_rl.tracer.frame import Frame, FramePart, FrameTable
from nemo_rl.tracer.reducer import Span
from tests.helpers.tracer_hub import PHASE, RUN, WAIT_S, frame, in_hub, open_hub, send_phase, where


@in_hub(watches=("layer.out | stats", "mlp.out | norm | train; every 3"))
async def test_welcome_says_what_is_there_and_what_can_be_watched(hub):
    async with hub.driver(tokenizer=""), hub.peer("viewer") as viewer:
        welcome = viewer.first
        assert welcome["type"] == "welcome" and welcome["v"] == 1 and welcome["role"] == "viewer"
        assert welcome["watches"] == ["layer.out | stats", "mlp.out | norm | train; every 3"]
        assert welcome["digest"] == hub.hub.plan.digest and welcome["effective_step"] is None
        assert {"layer.out", "loss"} < {site["kind"] for site in welcome["sites"]}
        assert {"stats", "tiles"} < welcome["reducers"].keys()
        assert welcome["limits"]["max_viewers"] == 16


@in_hub()
async def test_parts_of_all_ranks_become_one_frame(hub):
    async with hub.driver(), hub.rank(0, 2) as first, hub.rank(1, 2) as second, hub.peer("viewer") as viewer:
        await send_phase(first, value=9.0)
        await send_phase(second, value=16.0, number=1)
        found = await viewer.frame()
        assert found.payload == [5.0] and found.num_parts == 2 and found.missing == ()


@in_hub()
async def test_tables_come_before_frames_once_and_in_the_order_of_the_driver(hub):
    async with hub.driver() as driver, hub.rank() as rank, hub.peer("viewer") as viewer:
        await driver.send("step", step=1, keys=["b", "a"])
        await viewer.wait_for("run", step=1)
        tokens = np.array([[0, 1, 1], [0, 0, 1], [7, 8, 9]], dtype=np.int32)
        await rank.send("begin", step=1, phase=PHASE)
        await rank.socket.send(FrameTable(run=RUN, name="t", step=1, keys=("a", "b"), tokens=tokens).encode())
        for reducer, payload in (("full", np.eye(3, 2)), ("tiles(1, mean)", np.ones((3, 1)))):
            part = FramePart(where=where(reducer=reducer), payload=payload, span=Span(0, 2, 2), table="t")
            await rank.socket.send(part.encode())
        await rank.send("end", step=1, phase=PHASE, sent=2, dropped=0)
        heard = await viewer.receive_until(
            lambda message: isinstance(message, Frame) and "tiles" in str(message.where.reducer)
        )
        table, full, tiles = [message for message in heard if not isinstance(message, dict)]
        assert table.keys == ("b", "a") and table.tokens[2].tolist() == [8, 9, 7]
        assert full.table == tiles.table == table.name
        np.testing.assert_array_equal(full.payload, np.eye(3, 2)[[1, 2, 0]])


@in_hub()
async def test_rank_that_goes_is_named_and_its_phase_completed_without_it(hub):
    async with hub.driver(), hub.rank(0, 2) as first, hub.peer("viewer") as viewer:
        async with hub.rank(1, 2) as second:
            await send_phase(first)
            await send_phase(second, number=1, ends=False)
            await asyncio.wait_for(second.socket.ping(), WAIT_S)
            second.socket.transport.abort()
        assert (await viewer.frame()).missing == (1,)
        assert "rank 1" in (await viewer.wait_for("problem"))["text"]


@in_hub()
async def test_rank_that_says_goodbye_is_no_problem(hub):
    async with hub.driver() as driver, hub.peer("viewer") as viewer:
        async with hub.rank():
            pass
        await driver.send("metrics", step=1, metrics={})
        heard = await viewer.messages_until("metrics")
        assert [message for message in heard if message["type"] == "problem"] == []


@in_hub()
async def test_ranks_of_two_groups_have_the_same_numbers_and_complete_their_phases_apart(hub):
    async with (
        hub.driver(),
        hub.rank(0, 2) as first,
        hub.rank(1, 2) as second,
        hub.rank(0, 1, group="generation", unobserved={"loss": "none"}) as engine,
        hub.peer("viewer") as viewer,
    ):
        await send_phase(first, value=9.0)
        await send_phase(engine, value=4.0, phase="generation")
        found = await viewer.frame()
        assert (found.where.phase, found.payload, found.missing) == ("generation", [2.0], ())
        await send_phase(second, value=16.0, number=1)
        found = await viewer.frame()
        assert (found.where.phase, found.payload, found.missing) == (PHASE, [5.0], ())
        facts = hub.hub.runs[RUN]
        assert facts.world == 2 and facts.unobserved == {"loss (generation)": "none"}


@in_hub()
async def test_problems_of_an_engine_and_of_the_driver_say_whose_they_are(hub):
    async with hub.driver() as driver, hub.rank(0, 1, group="generation") as engine, hub.peer("viewer") as viewer:
        await engine.send("problem", text="no such vector")
        assert (await viewer.wait_for("problem"))["text"] == "engine 0: no such vector"
        await driver.send("problem", text="this engine shows nothing")
        assert (await viewer.wait_for("problem"))["text"] == "this engine shows nothing"
    async with hub.rank(group="nobody") as refused:
        assert refused.first["type"] == "error" and "group" in refused.first["text"]


@in_hub()
async def test_ranks_may_tell_problems_and_what_is_no_message_is_told_once(hub):
    async with hub.rank() as rank, hub.peer("viewer") as viewer:
        await rank.send("problem", text="no such vector")
        assert (await viewer.wait_for("problem"))["text"] == "rank 0: no such vector"
        for _ in range(3):
            await rank.socket.send(b"NRT1 nonsense")
            await rank.send("nonsense")
        await rank.send("problem", text="last")
        heard = await viewer.messages_until("problem", text="rank 0: last")
        assert len([message for message in heard if message["type"] == "problem"]) == 2


@in_hub()
async def test_plan_of_the_controller_reaches_the_driver_and_counts_when_it_says_so(hub):
    async with hub.driver() as driver, hub.peer("controller") as controller, hub.peer("viewer") as viewer:
        await driver.wait_for("plan")
        await controller.send("watch", watches=["mlp.out | tiles(4, rms)"])
        plan = await driver.wait_for("plan")
        assert plan["watches"] == ["mlp.out | tiles(4, rms)"]
        assert (await viewer.wait_for("plan"))["effective_step"] is None
        await driver.send("applied", step=3, digest="another")
        for step in (4, 5):
            await driver.send("applied", step=step, digest=plan["digest"])
        await driver.send("metrics", step=5, metrics={})
        heard = await viewer.messages_until("metrics")
        assert [message["effective_step"] for message in heard if message["type"] == "plan"] == [4]


@in_hub()
async def test_marks_and_metrics_reach_all_and_later_viewers_get_metrics_again(hub):
    async with hub.driver() as driver, hub.peer("controller") as controller:
        await driver.socket.send(
            '{"type": "metrics", "step": 6, "metrics": {"loss": 1e999, "grad": NaN, "reward": 0.5}}'
        )
        metrics = {"loss": None, "grad": None, "reward": 0.5}
        assert (await controller.wait_for("metrics"))["metrics"] == metrics
        await controller.send("mark", label="here")
        assert await controller.wait_for("mark") == {"type": "mark", "label": "here", "step": 6}
        async with hub.peer("viewer") as viewer:
            assert await viewer.wait_for("metrics") == {"type": "metrics", "run": RUN, "step": 6, "metrics": metrics}


@in_hub()
async def test_run_that_finishes_is_ended_and_one_whose_driver_goes_is_lost_until_it_is_back(hub):
    async with hub.peer("viewer") as viewer:
        async with hub.driver() as driver, hub.rank(0, 2) as rank:
            await send_phase(rank)
            await asyncio.wait_for(await rank.socket.ping(), WAIT_S)
            driver.socket.transport.abort()
            assert (await viewer.frame()).missing == (1,)
            assert (await viewer.wait_for("run", state="lost"))["text"]
            await viewer.wait_for("problem")
        async with hub.driver() as driver:
            await viewer.wait_for("run", state="running")
            await driver.send("finish", reason="failed", text="out of memory")
            assert (await viewer.wait_for("run", state="ended"))["text"] == "failed: out of memory"
        async with hub.peer("viewer") as later:
            assert later.first["runs"][0]["state"] == "ended"
            hub.hub.problem("last")
            heard = await later.messages_until("problem", text="last")
            assert len([message for message in heard if message["type"] == "problem"]) == 2


@in_hub()
async def test_words_of_a_driver_whose_connection_came_back_count_without_a_new_run(hub):
    async with hub.peer("viewer") as viewer:
        async with hub.driver():
            await viewer.wait_for("run", state="running")
        await viewer.wait_for("run", state="lost")
        async with hub.peer("driver") as driver:
            await driver.send("step", step=4, keys=[])
            await viewer.wait_for("run", state="running")
            await viewer.wait_for("run", step=4)


@in_hub()
async def test_first_value_that_is_not_finite_is_named(hub):
    async with hub.driver(), hub.rank() as rank, hub.peer("viewer") as viewer:
        await send_phase(rank, step=3, value=float("nan"), num_not_finite=2)
        await send_phase(rank, step=4, value=float("nan"), num_not_finite=2)
        found = await viewer.wait_for("run", step=3)
        assert "layer.out[0]" in found["first_non_finite"]["text"] and found["first_non_finite"]["step"] == 3
        assert (await viewer.wait_for("run", step=4))["first_non_finite"]["step"] == 3


@in_hub()
async def test_late_viewer_gets_the_last_frame_of_each_place_and_history_any_step(hub):
    for step in range(1, 6):
        hub.hub.publish_frame(frame(step))
    async with hub.peer("viewer") as viewer:
        assert (await viewer.frame()).where.step == 5
        await viewer.send("history", id="h", run=RUN, first=2, last=3)
        heard = await viewer.receive_until(lambda message: isinstance(message, dict) and message["type"] == "done")
        assert [message.where.step for message in heard[:-1]] == [2, 3] and heard[-1]["id"] == "h"


@in_hub()
async def test_paused_viewer_gets_no_frames_and_the_newest_when_it_resumes(hub):
    async with hub.peer("viewer") as viewer:
        await viewer.send("pause")
        await viewer.send("history", id="sync", run=RUN, first=0, last=0)
        await viewer.wait_for("done")
        hub.hub.publish_frame(frame(1))
        hub.hub.publish_frame(frame(2))
        await viewer.send("resume")
        assert (await viewer.frame()).where.step == 2


@in_hub(watches=())
async def test_rank_that_connects_again_takes_its_place(hub):
    async with hub.driver(), hub.rank() as old, hub.rank() as new, hub.peer("viewer") as viewer:
        assert await old.closed() == 1012
        await send_phase(new)
        assert (await viewer.frame()).missing == ()


def test_vectors_that_are_not_there_are_refused_with_those_that_are(tmp_path):
    (tmp_path / "truth.safetensors").touch()

    async def go():
        async with open_hub(artifacts=tmp_path) as hub, hub.peer("controller") as controller:
            await controller.send("watch", watches=["layer.out | project(lies)"])
            error = await controller.wait_for("error")
            assert error["code"] == "bad_watch" and "truth" in error["text"] and "'lies'" in error["text"]
            await controller.send("watch", watches=["layer.out | project(truth)"])
            assert (await controller.wait_for("plan"))["watches"] == ["layer.out | project(truth)"]

    asyncio.run(go())


def test_texts_of_tokens_come_from_the_vocabulary(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"zero": 0, "one": 1}, unk_token="zero"))
    words.save(str(tmp_path / "tokenizer.json"))

    async def go():
        async with open_hub(tokenizer=tmp_path) as hub, hub.rank() as rank, hub.peer("viewer") as viewer:
            await rank.send("begin", step=1, phase=PHASE)
            tokens = np.array([[0, 0], [0, 1], [1, 99]], dtype=np.int32)
            await rank.socket.send(FrameTable(run=RUN, name="t", step=1, keys=("a",), tokens=tokens).encode())
            part = FramePart(where=where(reducer="full"), payload=np.ones((2, 2)), span=Span(0, 2, 2), table="t")
            await rank.socket.send(part.encode())
            await rank.send("end", step=1, phase=PHASE, sent=1, dropped=0)
            table = (await viewer.receive_until(lambda message: isinstance(message, FrameTable)))[-1]
            assert table.texts == {"1": "one", "99": ""}

    asyncio.run(go())


@in_hub()
async def test_what_is_sent_is_strict_json(hub):
    async with hub.driver() as driver, hub.peer("viewer") as viewer:
        hub.hub.publish_message({"type": "metrics", "run": RUN, "step": 1, "metrics": {"a": float("nan")}})
        await driver.send("metrics", step=2, metrics={"a": 1})
        text = await viewer.socket.recv()
        while json.loads(text)["type"] != "metrics":
            text = await viewer.socket.recv()
        assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {"a": None}
