"""Who is there: nodes report, join and leave over real connections; one that is missing or lost is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine

import pytest

from nemo_rl.slurm.roll import Attendance, NodesMissing, Roll

HOST, TOKEN = "127.0.0.1", "secret"
SHORT_S = 0.2
LONG_S = 20.0


def in_time(talk: Coroutine[object, object, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * LONG_S):
            await talk

    asyncio.run(limited())


def test_nodes_report_join_and_leave():
    async def talk() -> None:
        roll = Roll(["a", "b"], token=TOKEN)
        port = await roll.open(HOST)
        early = await Attendance.connect(HOST, port, name="a", token=TOKEN)
        roll.call("1.2.3.4:5")
        late = await Attendance.connect(HOST, port, name="b", token=TOKEN)
        for node in (early, late):
            assert await node.ray() == "1.2.3.4:5"
            node.joined()
        await roll.all_joined(timeout_s=LONG_S)
        leaving = asyncio.create_task(roll.dismiss(timeout_s=LONG_S))
        for node in (early, late):
            await node.dismissed()
            await node.leave()
        assert await leaving == [] and roll.problem() is None
        await roll.close()

    in_time(talk())


def test_the_missing_are_named_with_how_far_they_came():
    async def talk() -> None:
        roll = Roll(["a", "b", "c"], token=TOKEN)
        port = await roll.open(HOST)
        roll.call("x")
        here = await Attendance.connect(HOST, port, name="b", token=TOKEN)
        joined = await Attendance.connect(HOST, port, name="c", token=TOKEN)
        await here.ray()
        await joined.ray()
        joined.joined()
        with pytest.raises(NodesMissing) as raised:
            await roll.all_joined(timeout_s=SHORT_S)
        text = str(raised.value)
        assert text.startswith("2 of 4 nodes are missing after 0.2 s: a (host unknown) has not reported; b (")
        assert "has reported, but its Ray has not joined. Look for" in text
        with pytest.raises(NodesMissing, match="SETUP_COMMAND"):
            await roll.all_joined(timeout_s=LONG_S, note=lambda: "SETUP_COMMAND ended")
        await roll.close()
        await here.leave()
        await joined.leave()

    in_time(talk())


def test_spare_nodes_may_be_lost_and_the_one_too_many_is_named(caplog):
    async def talk() -> None:
        roll = Roll(["a", "b"], token=TOKEN)
        port = await roll.open(HOST)
        first = await Attendance.connect(HOST, port, name="a", token=TOKEN)
        second = await Attendance.connect(HOST, port, name="b", token=TOKEN)
        lost = asyncio.create_task(roll.lost(spare=1))
        first.failed("Ray has ended")
        while "node a (" not in caplog.text:
            await asyncio.sleep(SHORT_S / 10)
        assert not lost.done() and "1 of 1 spare nodes are lost, and the command goes on" in caplog.text
        second.failed("Ray has ended")
        assert (await lost).startswith("node b (")
        await roll.close()
        await first.leave()
        await second.leave()

    in_time(talk())


@pytest.mark.parametrize("said", [b"no JSON\n", b"[]\n", b"[" * 60_000 + b"\n", b"x" * 100_000, b'{"half'])
def test_a_head_that_says_what_cannot_be_read_is_lost(said):
    async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"nonce": "1"}\n')
        await reader.readline()
        writer.write(said)
        await writer.drain()
        writer.close()

    async def talk() -> None:
        server = await asyncio.start_server(head, HOST, 0)
        node = await Attendance.connect(HOST, server.sockets[0].getsockname()[1], name="a", token=TOKEN)
        with pytest.raises(NodesMissing, match="the head is lost: its message cannot be read"):
            await node.ray()
        await node.leave()
        server.close()

    in_time(talk())


def test_who_does_not_know_the_token_is_sent_away():
    async def talk() -> None:
        roll = Roll(["a"], token=TOKEN)
        port = await roll.open(HOST)
        stranger = await Attendance.connect(HOST, port, name="a", token="guess")
        unknown = await Attendance.connect(HOST, port, name="z", token=TOKEN)
        for node in (stranger, unknown):
            with pytest.raises(NodesMissing, match="the head is lost: it has closed the connection"):
                await node.ray()
            await node.leave()
        for said in (b"no JSON", b"7", b"[" * 60_000, b'{"node": "a", "proof": "\\u00e9"}', b"\xff", b"x" * 100_000):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(said + b"\n")
            assert "nonce" in json.loads(await reader.readline()) and await reader.readline() == b"", said[:20]
            writer.close()
            await writer.wait_closed()
        with pytest.raises(NodesMissing, match=r"a \(host unknown\) has not reported"):
            await roll.all_joined(timeout_s=SHORT_S)
        await roll.close()

    in_time(talk())


@pytest.mark.parametrize("how", ["closes", "fails", "is silent"])
def test_a_lost_node_is_named_with_the_reason(how):
    async def talk() -> None:
        roll = Roll(["a"], token=TOKEN, silence_s=SHORT_S if how == "is silent" else LONG_S)
        port = await roll.open(HOST)
        node = await Attendance.connect(HOST, port, name="a", token=TOKEN)
        node.joined()
        await roll.all_joined(timeout_s=LONG_S)
        if how == "closes":
            node._writer.close()
        elif how == "fails":
            node.failed("Ray has ended")
        why = {
            "closes": "its connection was closed",
            "fails": "Ray has ended",
            "is silent": "no sign of life for 0.2 s",
        }
        text = await roll.lost()
        assert text.startswith("node a (") and text.endswith(f"is lost: {why[how]}")
        assert await roll.dismiss(timeout_s=LONG_S) == []
        await node.leave()
        await roll.close()

    in_time(talk())


def test_a_node_hears_that_the_head_is_lost_and_one_that_does_not_leave_is_named():
    async def talk() -> None:
        roll = Roll(["a"], token=TOKEN)
        port = await roll.open(HOST)
        node = await Attendance.connect(HOST, port, name="a", token=TOKEN)
        node.joined()
        await roll.all_joined(timeout_s=LONG_S)
        assert await roll.dismiss(timeout_s=SHORT_S) == ["a"]
        await node.dismissed()
        await roll.close()
        with pytest.raises(NodesMissing, match="the head is lost"):
            await node.dismissed()
        await node.leave()

    in_time(talk())
