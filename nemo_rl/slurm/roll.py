"""The roll call of a job: every node keeps one connection to the head, which says when to join and when to leave.

The head holds a `Roll`, every other node an `Attendance`. A node that ends closes its connection at once; one that
hangs, or whose machine is gone, is silent. Lines of JSON, and a peer that connects proves that it knows the job's
token. Invariant: no wait is without a deadline.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl.errors import NemoRLError

__all__ = ["Attendance", "NodesMissing", "Roll"]

logger = logging.getLogger(__name__)

BEAT_S = 2.0
SILENCE_S = 20.0
"""Ten beats: a node whose cores are all taken misses some."""
LINE_BYTES = 65536


class NodesMissing(NemoRLError):
    """Nodes of the job that have not joined, or do no longer answer."""


class NodeProgress(StrEnum):
    """The progress of a node."""

    ABSENT = "has not reported"
    HERE = "has reported, but its Ray has not joined"
    JOINED = "has joined"
    LOST = "is lost"
    LEFT = "has left"


@dataclass(slots=True)
class _Member:
    name: str
    host: str = "host unknown"
    place: NodeProgress = NodeProgress.ABSENT
    why: str = ""
    writer: asyncio.StreamWriter | None = None


class Roll:
    """The head's side of the roll call.

    Args:
        names: the other nodes.
        token: that all nodes of the job know.
        silence_s: of a node that counts as lost.
    """

    def __init__(self, names: Sequence[str], *, token: str, silence_s: float = SILENCE_S) -> None:
        self._members = {name: _Member(name) for name in names}
        self._token, self._silence_s = token, silence_s
        self._changed = asyncio.Event()
        self._ray: str | None = None
        self._server: asyncio.Server | None = None
        self._talks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self, address: str) -> int:
        """Listen on a free port of `address`, which it returns."""
        self._server = await asyncio.start_server(self._meet, address, 0, limit=LINE_BYTES)
        return self._server.sockets[0].getsockname()[1]

    def call(self, ray: str) -> None:
        """Tell all nodes that Ray's head is there and they may join it, also those that report later."""
        self._ray = ray
        for member in self._members.values():
            _say(member.writer, ray=ray)

    async def all_joined(self, *, timeout_s: float, note: Callable[[], str | None] = lambda: None) -> None:
        """
        Args:
            note: looked at while waiting: why it is in vain, if it is.

        Raises:
            NodesMissing: a node has failed, or they are not all there in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while any(member.place is not NodeProgress.JOINED for member in self._members.values()):
                    reason = self.problem() or note()
                    if reason is not None:
                        raise NodesMissing(reason)
                    await self._change()
        except TimeoutError:
            missing = [member for member in self._members.values() if member.place is not NodeProgress.JOINED]
            listed = "; ".join(f"{member.name} ({member.host}) {member.place}" for member in missing)
            raise NodesMissing(
                f"{len(missing)} of {len(self._members) + 1} nodes are missing after {timeout_s:g} s: {listed}. Look "
                "for their lines above, exclude them (sbatch --exclude), or raise NODE_TIMEOUT"
            ) from None

    def problem(self) -> str | None:
        """Return the first node that is lost, and why."""
        return next(iter(self._lost()), None)

    async def lost(self, *, spare: int = 0) -> str:
        """Wait until more nodes are lost than there are spare ones, and name the one too many.

        Args:
            spare: nodes that may be lost; each is named in the log.
        """
        told: list[str] = []
        while True:
            for reason in self._lost():
                if reason in told:
                    continue
                if len(told) == spare:
                    return reason
                told.append(reason)
                logger.warning("%s; %d of %d spare nodes are lost, and the command goes on", reason, len(told), spare)
            await self._change()

    def _lost(self) -> list[str]:
        return [
            f"node {member.name} ({member.host}) is lost: {member.why}"
            for member in self._members.values()
            if member.place is NodeProgress.LOST
        ]

    async def dismiss(self, *, timeout_s: float) -> list[str]:
        """Tell all nodes to leave; those that have not said so in time are returned."""
        for member in self._members.values():
            _say(member.writer, leave=True)
        over = (NodeProgress.LEFT, NodeProgress.LOST, NodeProgress.ABSENT)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(member.place not in over for member in self._members.values()):
                    await self._change()
        return [member.name for member in self._members.values() if member.place not in over]

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        # Ends them in order: each reads the end of its connection.
        for writer in self._talks.values():
            writer.close()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _change(self) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._changed.wait()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.current_task()
        assert talk is not None
        self._talks[talk] = writer
        try:
            async with asyncio.timeout(self._silence_s):
                member = await self._greet(reader, writer)
            if member is not None:
                await self._listen(member, reader)
        except (OSError, TimeoutError, ValueError) as error:
            logger.debug("an unknown connection was refused: %s", error)
        finally:
            await _close(writer)
            self._talks.pop(talk, None)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Member | None:
        nonce = secrets.token_hex(16)
        _say(writer, nonce=nonce)
        said = _words(await reader.readline())
        member = self._members.get(str(said.get("node")))
        proof = str(said.get("proof")).encode(errors="replace")
        if member is None or not hmac.compare_digest(proof, _proof(self._token, nonce).encode()):
            return None
        member.host, member.place, member.writer = str(said.get("host")), NodeProgress.HERE, writer
        if self._ray is not None:
            _say(writer, ray=self._ray)
        self._changed.set()
        return member

    async def _listen(self, member: _Member, reader: asyncio.StreamReader) -> None:
        beats = asyncio.create_task(_beat(member.writer))
        why = "its connection was closed"
        try:
            while member.place is not NodeProgress.LEFT:
                async with asyncio.timeout(self._silence_s):
                    line = await reader.readline()
                if not line:
                    break
                said = _words(line)
                if "failed" in said:
                    why = str(said["failed"])
                    break
                if "place" in said:
                    member.place = NodeProgress[str(said["place"])]
                    self._changed.set()
        except TimeoutError:
            why = f"no sign of life for {self._silence_s:g} s"
        except (OSError, ValueError, KeyError) as error:
            why = str(error) or type(error).__name__
        finally:
            beats.cancel()
            if member.place is not NodeProgress.LEFT:
                member.place, member.why = NodeProgress.LOST, why
            member.writer = None
            self._changed.set()


class Attendance:
    """The side of every other node; `connect` makes one.

    Args:
        reader, writer: the connection to the head.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._beats = asyncio.create_task(_beat(writer))

    @classmethod
    async def connect(cls, address: str, port: int, *, name: str, token: str) -> Attendance:
        """
        Raises:
            OSError, TimeoutError, ValueError: the head does not answer as expected; it may later.
        """
        async with asyncio.timeout(SILENCE_S):
            reader, writer = await asyncio.open_connection(address, port, limit=LINE_BYTES)
            nonce = str(_words(await reader.readline()).get("nonce", ""))
            _say(writer, node=name, host=socket.gethostname(), proof=_proof(token, nonce))
        return cls(reader, writer)

    async def ray(self) -> str | None:
        """Return the address of Ray's head, once it is there; None: the head wants this node to leave."""
        while True:
            said = await self._hear()
            if "ray" in said or "leave" in said:
                found = said.get("ray")
                return None if found is None else str(found)

    async def dismissed(self) -> None:
        """Wait until the head wants this node to leave.

        Raises:
            NodesMissing: the head is lost.
        """
        while "leave" not in await self._hear():
            continue

    def joined(self) -> None:
        _say(self._writer, place=NodeProgress.JOINED.name)

    def failed(self, why: str) -> None:
        _say(self._writer, failed=why)

    async def leave(self) -> None:
        """Send the last message. Idempotent."""
        self._beats.cancel()
        _say(self._writer, place=NodeProgress.LEFT.name)
        await _close(self._writer)

    async def _hear(self) -> dict[str, object]:
        try:
            async with asyncio.timeout(SILENCE_S):
                line = await self._reader.readline()
            if not line:
                raise NodesMissing("the head is lost: it has closed the connection")
            return _words(line)
        except TimeoutError:
            raise NodesMissing(f"the head is lost: no sign of life for {SILENCE_S:g} s") from None
        except OSError as error:
            raise NodesMissing(f"the head is lost: {error}") from error
        except ValueError as error:
            raise NodesMissing(f"the head is lost: its message cannot be read: {error}") from error


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(BEAT_S):
            await writer.wait_closed()


async def _beat(writer: asyncio.StreamWriter | None) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        _say(writer)


def _say(writer: asyncio.StreamWriter | None, **words: object) -> None:
    if writer is not None and not writer.is_closing():
        writer.write(json.dumps(words).encode() + b"\n")


def _words(line: bytes) -> dict[str, object]:
    """Read the message of one line; an empty line has none.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        said = json.loads(line or b"{}")
    except RecursionError as error:
        raise ValueError("lists nested too deeply") from error
    if not isinstance(said, dict):
        raise ValueError(f"expected an object, got {type(said).__name__}")
    return said


def _proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), "sha256").hexdigest()
