"""A process's line to the hub: bounded, never waited for, and harmless without a hub."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue

import pytest
from websockets.sync.server import ServerConnection, serve

from nemo_rl.tracer.link import HubAddress, HubLink
from nemo_rl.tracer.protocol import Role

WAIT_S = 30.0


@contextmanager
def hub(*, takes: threading.Event) -> Iterator[tuple[HubAddress, Queue[str | bytes]]]:
    """Welcomes everybody, and takes messages once it is told to."""
    heard: Queue[str | bytes] = Queue()

    def handle(connection: ServerConnection) -> None:
        heard.put(connection.recv())
        connection.send(json.dumps({"type": "welcome"}))
        connection.send(json.dumps({"type": "plan", "watches": []}))
        takes.wait(WAIT_S)
        for message in connection:
            heard.put(message)

    with serve(handle, "127.0.0.1", 0, max_size=1 << 24) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield HubAddress(host="127.0.0.1", port=server.socket.getsockname()[1], token="secret"), heard
        finally:
            takes.set()
            server.shutdown()
            thread.join(WAIT_S)


def test_messages_arrive_in_order_after_hello_and_the_hub_is_heard() -> None:
    takes, said = threading.Event(), Queue()
    takes.set()
    with hub(takes=takes) as (address, heard):
        link = HubLink(address, Role.DRIVER, hello={"run": "r"}, memory_bytes=1 << 20, on_message=said.put)
        assert link.say({"type": "run"}) and link.offer(b"frame")
        link.close(timeout_s=WAIT_S)
        hello = json.loads(heard.get(timeout=WAIT_S))
        assert hello["role"] == "driver" and hello["token"] == "secret" and hello["run"] == "r"
        assert [heard.get(timeout=WAIT_S) for _ in range(2)] == ['{"type": "run"}', b"frame"]
        assert [said.get(timeout=WAIT_S)["type"] for _ in range(2)] == ["welcome", "plan"]
    assert (link.sent, link.dropped) == (2, 0)
    assert not link.offer(b"late"), "a closed line takes nothing"


def test_a_hub_that_takes_nothing_costs_frames_and_no_memory() -> None:
    takes = threading.Event()
    with hub(takes=takes) as (address, heard):
        link = HubLink(address, Role.RANK, hello={}, memory_bytes=1 << 20)
        frame = b"x" * (1 << 18)
        taken = [link.offer(frame) for _ in range(400)]
        assert link.dropped == taken.count(False) > 300
        assert link.say({"type": "end"}), "words find room when frames do not"
        takes.set()
        heard.get(timeout=WAIT_S)
        for _ in range(taken.count(True) + 1):
            heard.get(timeout=WAIT_S)
        # Room is made again by what was sent.
        later = [link.offer(b"y" * (1 << 18)) for _ in range(4)]
        assert any(later)
        link.close(timeout_s=WAIT_S)


@pytest.mark.filterwarnings("error")
def test_without_a_hub_everything_is_dropped_and_nothing_happens() -> None:
    link = HubLink(HubAddress(host="127.0.0.1", port=9, token="t"), Role.RANK, hello={}, memory_bytes=1 << 20)
    for _ in range(3):
        link.offer(b"frame")
    link.close(timeout_s=WAIT_S)
    assert not link.offer(b"more")


def test_the_token_is_in_no_text() -> None:
    address = HubAddress(host="::1", port=5, token="very secret")
    assert "secret" not in repr(address) and address.uri == "ws://[::1]:5/live"
