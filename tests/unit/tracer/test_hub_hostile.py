"""Those who must not get in, and viewers that misbehave: each harms nobody but itself."""

import asyncio
import json
import os
import socket
import urllib.error
import urllib.request
from functools import partial

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.frame import FrameSite
from tests.helpers import tracer_hub
from tests.helpers.tracer_hub import RUN, WAIT_S, frame, open_hub, send_phase

SLOW_VIEWER_S = float(os.environ.get("NEMO_RL_TEST_SLOW_VIEWER_S", "1"))
"""For how long a viewer reads nothing; a longer check may raise it to a minute."""


async def serves(hub):
    async with hub.driver(), hub.rank() as rank, hub.peer("viewer") as viewer:
        await send_phase(rank, step=1000)
        while (await viewer.frame()).where.step != 1000:
            pass


in_hub = partial(tracer_hub.in_hub, limit_s=4 * WAIT_S + SLOW_VIEWER_S, at_end=serves)
"""At its end the hub still serves."""


async def is_refused(hub, role, code, **hello):
    async with hub.peer(role, **hello) as peer:
        assert (peer.first["type"], peer.first["code"]) == ("error", code)
        assert await peer.closed() == 1008


@in_hub()
async def test_nobody_gets_in_without_the_token_of_the_role(hub):
    tokens = hub.tokens
    wrong = ("", "x", tokens.viewer[:-1], tokens.viewer + "x", "\u00e4" * 43)
    for role in ("rank", "driver", "viewer", "controller"):
        for token in wrong:
            await is_refused(hub, role, "unauthorized", token=token)
    for role, token in (("rank", tokens.controller), ("driver", tokens.viewer), ("viewer", tokens.job)):
        await is_refused(hub, role, "unauthorized", token=token)
    await is_refused(hub, "controller", "unauthorized", token=tokens.viewer)
    async with hub.peer("viewer", token=tokens.controller) as viewer:
        assert viewer.first["role"] == "viewer"


@in_hub()
async def test_hello_of_another_version_or_role_or_no_hello_is_refused(hub):
    await is_refused(hub, "viewer", "version", v=2)
    await is_refused(hub, "viewer", "version", v="1")
    await is_refused(hub, "king", "bad_message")
    await is_refused(hub, "viewer", "bad_message", token="x" * 5000)
    for words in ("", "hello", "[]", "{}", "[" * 60_000, "1" * 60_000, '{"type": "hello", "v": 1, "role": ["viewer"]}'):
        async with hub.socket() as peer:
            await peer.socket.send(words)
            assert (await peer.receive())["code"] == "bad_message"
            assert await peer.closed() == 1008
    async with hub.socket() as peer:
        await peer.socket.send(b"hello")
        assert (await peer.receive())["code"] == "bad_message"


@in_hub()
async def test_numbers_of_ranks_are_checked(hub):
    for rank, world in ((-1, 2), (2, 2), (0, 0), (0, 10**9), ("0", 1), (True, 2)):
        await is_refused(hub, "rank", "bad_message", run=RUN, rank=rank, world=world)


@in_hub(server={"origins": ("https://watch.example.org",)})
async def test_pages_of_other_origins_may_not_connect(hub):
    port = hub.server.port
    good = [f"http://{host}:{port}" for host in ("127.0.0.1", "localhost")] + ["https://watch.example.org"]
    for origin in (*good, None):
        own = {} if origin is None or "example" in origin else {"uri": f"ws://{origin[7:]}/live"}
        async with hub.peer("viewer", options={"origin": origin, **own}) as viewer:
            assert viewer.first["type"] == "welcome"
    bad = ("http://evil.example", f"http://127.0.0.1:{port + 1}", f"https://127.0.0.1:{port}", "null", "file://")
    for origin in bad:
        with pytest.raises(InvalidStatus) as refused:
            async with hub.socket(origin=origin):
                pass
        assert refused.value.response.status_code == 403
    # A name that somebody else's name server points at this machine.
    rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    assert (await upgrade(port, rebound)).startswith(b"HTTP/1.1 403")
    assert (await upgrade(port, {"Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}"})).startswith(
        b"HTTP/1.1 101"
    )


async def upgrade(port, headers):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = ["GET /live HTTP/1.1", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join((*lines, "", "")).encode())
    async with asyncio.timeout(WAIT_S):
        answer = await reader.readline()
    writer.close()
    return answer


@in_hub(max_text_bytes=1000)
async def test_large_messages_end_their_connection_and_no_other(hub):
    async with hub.peer("viewer") as bystander:
        async with hub.socket() as stranger, hub.peer("controller") as controller:
            for peer in (stranger, controller):
                await peer.socket.send(json.dumps({"type": "watch", "watches": ["x" * 2000]}))
                assert await peer.closed() == 1009
        hub.hub.publish_frame(frame())
        assert (await bystander.frame()).where.step == 1


@in_hub()
async def test_ranks_may_send_what_viewers_may_not(hub):
    async with hub.driver(), hub.rank() as rank, hub.peer("viewer") as viewer:
        await rank.socket.send(b"x" * (1 << 20))
        await send_phase(rank)
        assert (await viewer.frame()).payload == [3.0]


@in_hub(max_waiting=8)
async def test_a_thousand_connections_leave_room_for_those_who_are_known(hub):
    async with hub.driver(), hub.rank() as rank, hub.peer("viewer") as viewer:
        streams = [await asyncio.open_connection("127.0.0.1", hub.server.port) for _ in range(1000)]
        ended = [asyncio.create_task(at_end(reader)) for reader, _ in streams]
        async with asyncio.timeout(WAIT_S):
            while sum(task.done() for task in ended) < 992:
                await asyncio.sleep(0.01)
        assert len(hub.server._waiting) <= 8
        await send_phase(rank)
        assert (await viewer.frame()).payload == [3.0]
        for _, writer in streams:
            writer.close()
        await asyncio.wait(ended, timeout=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while hub.server._waiting:
                await asyncio.sleep(0.01)


async def at_end(reader):
    try:
        return await reader.read()
    except OSError:
        return b""


@in_hub(max_waiting=3, server={"handshake_s": 0.5})
async def test_half_open_peers_make_room_again(hub):
    """Three connect: one says nothing, one half of a request, one no hello."""
    half = [await asyncio.open_connection("127.0.0.1", hub.server.port) for _ in range(2)]
    half[1][1].write(b"GET /live HTT")
    async with hub.socket() as third:
        assert await refused_at_once(hub)
        assert (await third.receive())["code"] == "unauthorized"
    async with asyncio.timeout(WAIT_S):
        assert [await at_end(reader) for reader, _ in half] == [b"", b""]
    for _, writer in half:
        writer.close()


async def refused_at_once(hub):
    try:
        async with hub.peer("viewer"):
            return False
    except (OSError, ConnectionClosed, InvalidHandshake, EOFError):
        return True


@in_hub(max_viewers=2)
async def test_viewers_are_counted(hub):
    async with hub.peer("viewer"), hub.peer("viewer"):
        await is_refused(hub, "viewer", "too_many")
        await is_refused(hub, "controller", "too_many")


@in_hub()
async def test_viewers_may_not_speak_for_others(hub):
    async with hub.driver() as driver, hub.peer("viewer") as viewer:
        await driver.wait_for("plan")
        plan = hub.hub.plan
        words = [{"type": "watch", "watches": []}, {"type": "mark", "label": "x"}, {"type": "hello"}]
        words += [{"type": kind, "step": 1} for kind in ("begin", "end", "run", "step", "metrics", "finish", "applied")]
        for said in words:
            await viewer.socket.send(json.dumps(said))
            assert (await viewer.wait_for("error"))["code"] == "forbidden"
        await viewer.socket.send(frame().encode())
        assert (await viewer.wait_for("error"))["code"] == "forbidden"
        assert hub.hub.plan is plan and hub.hub.history.num_bytes == 0


@in_hub()
async def test_messages_that_cannot_be_read_are_answered_and_counted(hub):
    async with hub.peer("controller") as controller:
        bad = [*('{"type": "dance"}', '{"type": 1}', "{", "[1]", '{"type": "history"}', '{"type": "watch"}')]
        bad += [
            '{"type": "watch", "watches": [1]}',
            '{"type": "mark", "label": "' + "x" * 300 + '"}',
            '{"type": "\\ud800"}',
        ]
        bad += ['{"type": "history", "id": "a", "run": "r", "first": -1, "last": 1}']
        for text in bad:
            await controller.socket.send(text)
            assert (await controller.wait_for("error"))["code"] == "bad_message", text
        for _ in range(17 - len(bad)):
            await controller.socket.send("junk")
        assert await controller.closed() == 1008


@in_hub()
async def test_watches_that_cannot_be_read_are_refused_with_the_reason(hub):
    async with hub.peer("controller") as controller:
        plan = hub.hub.plan
        for text, reason in (
            ("nonsense.site | stats", "nonsense.site"),
            ("layer.out | evaluate(1)", "evaluate"),
            ("layer.out | __import__('os').system('true')", "reducer"),
            ("layer.out | project(../../etc/passwd)", "../../etc/passwd"),
            ("layer.out | project(/etc/passwd)", "/etc/passwd"),
            ("layer.out | tiles(0, mean)", "tiles"),
            ("layer.out | stats | never", "never"),
            ("layer.out", "SITES | REDUCERS"),
        ):
            await controller.send("watch", watches=[text])
            error = await controller.wait_for("error")
            assert error["code"] == "bad_watch" and reason in error["text"], text
        await controller.send("watch", watches=["layer.out | stats"] * 65)
        assert (await controller.wait_for("error"))["code"] == "bad_watch"
        assert hub.hub.plan is plan


@in_hub()
async def test_one_controller_at_a_time_and_the_first_frees_no_place_but_its_own(hub):
    async with hub.peer("controller") as second:
        pass
    async with hub.peer("controller") as first:
        await is_refused(hub, "controller", "busy")
        async with hub.peer("controller", takeover=True) as second:
            assert second.first["role"] == "controller"
            await first.wait_for("demoted")
            await first.send("mark", label="x")
            assert (await first.wait_for("error"))["code"] == "forbidden"
            await first.socket.close()
            await second.send("mark", label="mine")
            await second.wait_for("mark")
            while len(hub.server.sessions.viewers) > 1:
                await asyncio.sleep(0.01)
            await is_refused(hub, "controller", "busy")
            await second.send("mark", label="still mine")
            await second.wait_for("mark", label="still mine")
        while hub.server.sessions.viewers:
            await asyncio.sleep(0.01)
        async with hub.peer("controller") as third:
            assert third.first["role"] == "controller"


PLACES = [FrameSite(SiteKind.LAYER_OUT, layer) for layer in range(4)]


@in_hub(viewer_bytes=1 << 20, history_bytes=4 << 20, slow_viewer_s=600.0)
async def test_slow_viewer_gets_the_newest_of_each_place_and_a_count_of_what_it_missed(hub):
    async with hub.peer("viewer", options={"max_queue": 1}) as slow, hub.peer("viewer") as fast:
        (held,) = [
            viewer for viewer in hub.server.sessions.viewers if viewer.connection.remote_address[1] == port_of(slow)
        ]
        slow.socket.transport.pause_reading()
        for step in range(1, 151):
            for site in PLACES:
                hub.hub.publish_frame(frame(step, num_bytes=128 << 10, site=site))
            assert held.num_bytes <= 1 << 20 and hub.hub.history.num_bytes <= 4 << 20
            while (await fast.frame()).where.site != PLACES[-1]:
                pass
        slow.socket.transport.resume_reading()
        seen = {}
        while seen.get(PLACES[-1]) != 150 or len(seen) < 4:
            found = await slow.frame()
            assert found.where.step > seen.get(found.where.site, 0), "in order"
            seen[found.where.site] = found.where.step
        assert set(seen.values()) == {150}
        await slow.send("history", id="end", run=RUN, first=0, last=0)
        await slow.wait_for("done")
        assert held.num_dropped > 300 and held.num_sent + held.num_dropped == 600


def port_of(peer):
    return peer.socket.local_address[1]


@in_hub(viewer_bytes=1 << 20, slow_viewer_s=SLOW_VIEWER_S)
async def test_viewer_that_takes_nothing_is_told_and_closed_while_others_go_on(hub):
    async with hub.peer("viewer", options={"max_queue": 1}) as stuck, hub.peer("viewer") as fast:
        stuck.socket.transport.pause_reading()
        before = psutil.Process().memory_info().rss
        step = 0
        async with asyncio.timeout(WAIT_S + 5 * SLOW_VIEWER_S):
            while len(hub.server.sessions.viewers) > 1:
                step += 1
                hub.hub.publish_frame(frame(step, num_bytes=512 << 10))
                while (await fast.frame()).where.step != step:
                    pass
                await asyncio.sleep(0.005)
        grown = psutil.Process().memory_info().rss - before
        # History keeps its own; 100 MB are what the numbers of this process itself take.
        assert grown < hub.hub.limits.history_bytes + (100 << 20)
        stuck.socket.transport.resume_reading()
        with pytest.raises(ConnectionClosed):
            while True:
                await stuck.receive()


@in_hub(viewer_bytes=1000)
async def test_frame_larger_than_the_bound_is_dropped_for_the_viewer(hub):
    async with hub.peer("viewer") as viewer:
        hub.hub.publish_frame(frame(1, num_bytes=8000))
        assert (await viewer.wait_for("stats"))["dropped"] == 1
        hub.hub.publish_frame(frame(2))
        assert (await viewer.frame()).where.step == 2


@in_hub()
async def test_spans_of_history_that_wait_are_bounded(hub):
    for step in range(200):
        hub.hub.publish_frame(frame(step, num_bytes=64 << 10))
    async with hub.peer("viewer", options={"max_queue": 1}) as viewer:
        viewer.socket.transport.pause_reading()
        for number in range(6):
            await viewer.send("history", id=f"{number}", run=RUN, first=0, last=1 << 50)
        while not hub.server.sessions.viewers[0].has_waiting:
            await asyncio.sleep(0.01)
        viewer.socket.transport.resume_reading()
        heard = await viewer.messages_until("done", id="3")
        assert [message["code"] for message in heard if message["type"] == "error"] == ["too_many"] * 2


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A folder of pages, with a secret beside it."""
    folder = tmp_path / "page"
    (folder / "parts").mkdir(parents=True)
    (folder / "index.html").write_text("<p>page</p>")
    (folder / "parts" / "live.js").write_text("1")
    (folder / "notes.txt").write_text("not a page")
    (folder / "linked.js").symlink_to(tmp_path / "secret.js")
    (tmp_path / "secret.js").write_text("secret")
    monkeypatch.setattr("nemo_rl_tools.tracer.hub.server.PAGE_FOLDER", folder)
    return folder


async def get(hub, path):
    """Status, headers and body of a GET of exactly this path."""
    reader, writer = await asyncio.open_connection("127.0.0.1", hub.server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    async with asyncio.timeout(WAIT_S):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body


@in_hub()
async def test_only_files_of_the_page_are_served(hub, page):
    for path, kind in (("/", "text/html"), ("/index.html", "text/html"), ("/parts/live.js", "text/javascript")):
        status, headers, body = await get(hub, path)
        assert status == 200 and headers["Content-Type"].startswith(kind) and body
        assert headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
    (page / "later.js").write_text("written after the start")
    outside = ("/../secret.js", "/parts/../../secret.js", "/%2e%2e/secret.js", "//etc/passwd", "/..%2fsecret.js")
    for path in (*outside, "/linked.js", "/notes.txt", "/later.js", "/parts", "/parts/", "/nothing", "/legacy"):
        status, _, body = await get(hub, path)
        assert status == 404 and b"secret" not in body, path


def test_tokens_are_in_no_page_and_no_log(page, caplog):
    async def go():
        async with open_hub() as hub:
            for token in ("wrong", hub.tokens.viewer):
                async with hub.peer("viewer", token=token):
                    pass
            for secret in (hub.tokens.job, hub.tokens.viewer, hub.tokens.controller):
                assert secret not in caplog.text and secret not in repr(hub.tokens)

    caplog.set_level("DEBUG")
    asyncio.run(go())


def test_port_that_is_taken_is_an_os_error():
    async def go():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            async with open_hub(server={"port": taken.getsockname()[1]}):
                pass

    with pytest.raises(OSError):
        asyncio.run(go())


@in_hub()
async def test_posts_are_refused(hub):
    address = f"http://127.0.0.1:{hub.server.port}/"
    request = urllib.request.Request(address, data=b"x", method="POST")
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        await asyncio.to_thread(urllib.request.urlopen, request, timeout=WAIT_S)
