"""History and sinks: bounded, and harmless when a disk is not what it should be."""

import asyncio
import json
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.frame import Frame, FrameSite, FrameTable, Where, decode
from nemo_rl.tracer.protocol import HubLimits, Role
from nemo_rl.tracer.reducer import Norm
from nemo_rl_tools.tracer.hub.history import History
from nemo_rl_tools.tracer.hub.hub import Hub, SinkThread
from nemo_rl_tools.tracer.hub.viewer import Viewer
from tests.helpers.tracer_hub import RUN, WAIT_S, frame, in_hub, send_phase

LIMIT = 20_000


def table(step, name):
    return FrameTable(run=RUN, name=name, step=step, keys=("a",), tokens=np.zeros((3, 20), dtype=np.int32))


def shown(step, layer, name, num_bytes):
    where = Where(RUN, step, "train", FrameSite(SiteKind.LAYER_OUT, layer), Norm())
    return Frame(where=where, payload=np.zeros(num_bytes // 8), table=name)


@settings(max_examples=50, deadline=None)
@given(
    sent=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 3), st.sampled_from([None, "s", "t"]), st.integers(0, 9000)),
        max_size=60,
    )
)
def test_history_is_bounded_and_no_frame_is_without_its_table(sent):
    history = History(LIMIT)
    for step, layer, name, num_bytes in sent:
        if name is not None:
            # A name is of one content, whatever the step.
            history.add_table(table(step, name))
        kept = history.add_frame(shown(step, layer, name, num_bytes))
        assert (kept.table is None) is (name is None)
        assert history.num_bytes <= LIMIT
        held = [*history.of_steps(RUN, 0, 9)]
        tables = {each.table for each in held if each.table is not None}
        assert all(history._tables[RUN, each.name] is each for each in tables)
        messages = [each.message for each in held] + [each.message for each in history._tables.values()]
        assert history.num_bytes == sum(map(len, messages))
        assert {*history.latest()} <= {*held}


def test_latest_is_the_newest_of_each_place_and_a_frame_again_replaces_the_first():
    history = History(1 << 20)
    for step, layer in ((1, 0), (2, 0), (2, 1), (2, 1)):
        history.add_frame(shown(step, layer, None, 80))
    assert [(each.where.step, each.where.site.layer) for each in history.latest()] == [(2, 0), (2, 1)]
    assert [each.where.step for each in history.of_steps(RUN, 1, 2)] == [1, 2, 2]
    assert [*history.of_steps("other", 0, 9)] == []


class Disk:
    """A sink that may fail, or wait."""

    def __init__(self, *, fails=(), waits=None):
        self.got, self.fails, self.waits = [], set(fails), waits

    def frame(self, message):
        if self.waits is not None:
            assert self.waits.wait(WAIT_S)
        if "frame" in self.fails:
            raise OSError(28, "No space left on device")
        self.got.append(decode(message))

    def message(self, message):
        self.got.append(message)

    def close(self):
        if "close" in self.fails:
            raise OSError(5, "Input/output error")
        self.got.append("closed")


@in_hub()
async def test_sinks_get_what_viewers_get_in_its_order(hub):
    disk = Disk()
    hub.hub.add_sink(SinkThread(disk, max_bytes=1 << 20, problem=hub.hub.problem))
    async with hub.driver() as driver, hub.rank() as rank, hub.peer("controller") as viewer:
        await driver.send("metrics", step=1, metrics={"a": 1})
        await viewer.wait_for("metrics")
        await send_phase(rank)
        await viewer.frame()
        await viewer.send("mark", label="here")
        await viewer.wait_for("mark")
    await asyncio.to_thread(hub.hub.close_sinks)
    kinds = [each["type"] if isinstance(each, dict) else type(each).__name__ for each in disk.got[:-1]]
    assert kinds[0] == "plan" and disk.got[-1] == "closed"
    wanted = ("run", "metrics", "Frame", "mark")
    places = [kinds.index(kind) for kind in wanted]
    assert places == sorted(places)
    assert json.dumps([each for each in disk.got if isinstance(each, dict)])


@in_hub()
async def test_disk_that_is_full_is_told_once_and_nothing_else_happens(hub):
    disk = Disk(fails={"frame", "close"})
    async with hub.peer("viewer") as viewer:
        hub.hub.add_sink(SinkThread(disk, max_bytes=1 << 20, problem=hub.hub.problem))
        for step in range(5):
            hub.hub.publish_frame(frame(step))
        told = await viewer.wait_for("problem")
        assert "No space left" in told["text"]
        hub.hub.mark("still here")
        await viewer.wait_for("mark")
        await asyncio.to_thread(hub.hub.close_sinks)
        hub.hub.problem("last")
        assert len(await problems(viewer)) == 1
    assert any(each.get("type") == "mark" for each in disk.got)


async def problems(viewer):
    return [each for each in await viewer.messages_until("problem", text="last") if each["type"] == "problem"]


@in_hub()
async def test_disk_that_is_slow_costs_pictures_of_the_recording_alone(hub):
    opened = threading.Event()
    disk = Disk(waits=opened)
    async with hub.peer("viewer") as viewer:
        sink = SinkThread(disk, max_bytes=3000, problem=hub.hub.problem)
        hub.hub.add_sink(sink)
        for step in range(50):
            hub.hub.publish_frame(frame(step, num_bytes=800))
        while (await viewer.frame()).where.step != 49:
            pass
        assert "too slow" in (await viewer.wait_for("problem"))["text"]
        opened.set()
        await asyncio.to_thread(hub.hub.close_sinks)
    assert 1 <= len([each for each in disk.got if isinstance(each, Frame)]) <= 4


@in_hub()
async def test_recorded_runs_are_shown_without_a_job(hub):
    shows = hub.hub
    assert isinstance(shows, Hub)
    shows.set_run({"run": RUN, "name": "old", "state": "recorded", "model": {"num_hidden_layers": 2}})
    shows.publish_table(table(1, "t"))
    shows.publish_frame(shown(1, 0, "t", 80))
    shows.publish_message({"type": "run", "run": RUN, "text": "played back"})
    async with hub.peer("viewer") as viewer:
        (run,) = viewer.first["runs"]
        assert (run["state"], run["name"], run["text"]) == ("recorded", "old", "played back")
        heard = await viewer.receive_until(lambda message: isinstance(message, FrameTable))
        assert isinstance(heard[-1], FrameTable)
        assert (await viewer.frame()).table == "t"


def test_frames_of_the_same_place_give_way_first_then_those_of_places_with_several_then_the_oldest():
    history = History(1 << 20)
    sent = [history.add_frame(shown(step, layer, None, 4000)) for step, layer in enumerate((0, 1, 1, 2, 0, 3, 4))]
    # Nothing is written: the queue alone.
    viewer = Viewer(None, Role.VIEWER, HubLimits(viewer_bytes=4 * len(sent[0].message)))

    def waiting():
        return [kept.where.step for kept in viewer._queue.values()]

    seen = []
    for kept in sent:
        viewer.frame(kept)
        assert viewer.num_bytes <= 4 * len(sent[0].message)
        seen.append(waiting())
    assert seen[3:] == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert viewer.num_dropped == 3
