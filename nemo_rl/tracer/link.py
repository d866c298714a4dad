"""`HubLink`: one process's line to the hub: messages go out from a bounded store by their own thread.

Used by the ranks of the policy and by the driver. Invariant: the sender of a message never waits; when the store is
full the newest message is dropped and counted; without a hub everything is dropped, and nothing else happens.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from nemo_rl.tracer.frame import FramePart, FrameTable, Where
from nemo_rl.tracer.protocol import HANDSHAKE_S, LIVE_PATH, PROTOCOL_VERSION, Role
from nemo_rl.tracer.reducer import WholeTensor

__all__ = ["BufferedSender", "DirectSender", "FrameSender", "HubAddress", "HubLink"]

logger = logging.getLogger(__name__)

OnMessage = Callable[[Mapping[str, object]], None]
SEND_S = 10.0
"""After a hub has taken nothing for so long, it counts as gone."""
RETRY_S = 2.0
MAX_MESSAGE_BYTES = 1 << 20
"""Largest message of the hub that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAddress:
    """The address of the hub and the token to enter."""

    host: str
    port: int
    token: str = field(repr=False)

    @property
    def uri(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ws://{host}:{self.port}{LIVE_PATH}"


class HubLink:
    """The connection of one process to the hub. Nothing is sent before the first message is offered.

    Args:
        hello: what the first message says besides version, role and token.
        memory_bytes: most bytes that wait to be sent.
        on_message: called by the link's thread with what the hub says.
    """

    def __init__(
        self,
        address: HubAddress,
        role: Role,
        *,
        hello: Mapping[str, object],
        memory_bytes: int,
        on_message: OnMessage | None = None,
    ) -> None:
        self._address, self._memory_bytes, self._on_message = address, memory_bytes, on_message
        self._hello = {"type": "hello", "v": PROTOCOL_VERSION, "role": role.value, "token": address.token, **hello}
        self._waiting: deque[str | bytes] = deque()
        self._bytes = 0
        self._state = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self.sent, self.sent_bytes, self.dropped = 0, 0, 0
        """Messages that went out or wait to, their bytes, and how many messages were dropped."""

    def open(self) -> None:
        """Connect in the background. Idempotent."""
        with self._state:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(target=self._work, name="tracer link", daemon=True)
                self._thread.start()

    def offer(self, message: bytes) -> bool:
        """Take a frame for sending; False if it was dropped."""
        return self._take(message, len(message), limit=self._memory_bytes)

    def say(self, record: Mapping[str, object]) -> bool:
        """Take a JSON message, which may be late but waits for no frame's space."""
        text = json.dumps(record, allow_nan=False)
        return self._take(text, len(text), limit=self._memory_bytes + MAX_MESSAGE_BYTES)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Send what waits, for so long, and end. Idempotent."""
        with self._state:
            self._is_closing = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _take(self, message: str | bytes, num_bytes: int, *, limit: int) -> bool:
        with self._state:
            if self._is_closing or self._bytes + num_bytes > limit:
                self.dropped += 1
                return False
            self._waiting.append(message)
            self._bytes += num_bytes
            self.sent += 1
            self.sent_bytes += num_bytes
            self._state.notify()
        self.open()
        return True

    # The thread.

    def _work(self) -> None:
        has_warned = False
        while not self._is_closing:
            try:
                with connect(
                    self._address.uri,
                    open_timeout=HANDSHAKE_S,
                    close_timeout=1.0,
                    ping_interval=SEND_S,
                    ping_timeout=SEND_S,
                    compression=None,
                    max_size=MAX_MESSAGE_BYTES,
                    # The proxy of the environment is not used for the hub.
                    proxy=None,
                ) as connection:
                    self._greet(connection)
                    threading.Thread(
                        target=self._listen, args=(connection,), name="tracer link ears", daemon=True
                    ).start()
                    self._send_all(connection)
                return
            except (OSError, WebSocketException, TimeoutError, ValueError) as error:
                if not has_warned:
                    logger.warning("cannot reach the tracer's hub, training continues: %s", error)
                    has_warned = True
                with self._state:
                    # What waits for a hub that is gone is dropped.
                    self.dropped += len(self._waiting)
                    self.sent -= len(self._waiting)
                    self._waiting.clear()
                    self._bytes = 0
                    self._state.wait_for(lambda: self._is_closing, RETRY_S)

    def _greet(self, connection: ClientConnection) -> None:
        connection.send(json.dumps(self._hello))
        answer = json.loads(connection.recv(HANDSHAKE_S))
        if answer.get("type") != "welcome":
            raise ValueError(f"the hub refused: {str(answer)[:300]}")
        self._hear(answer)

    def _listen(self, connection: ClientConnection) -> None:
        try:
            for message in connection:
                self._hear(json.loads(message))
        except (OSError, WebSocketException, ValueError) as error:
            logger.debug("lost the connection to the tracer's hub: %s", error)

    def _hear(self, record: object) -> None:
        if self._on_message is not None and isinstance(record, dict):
            self._on_message(record)

    def _send_all(self, connection: ClientConnection) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                message = self._waiting.popleft()
            connection.send(message)
            with self._state:
                self._bytes -= len(message)


GATHERED_BYTES = 1 << 20
"""Buffered values of single tokens are sent once they reach this size."""


class FrameSender(Protocol):
    """Takes what a sink has made, and never waits."""

    def table(self, table: FrameTable) -> None:
        """Take a table, before the parts that refer to it."""

    def part(self, part: FramePart) -> None:
        """Take a part, whose `dropped_before` is filled in when it is sent."""


class DirectSender:
    """Sends each table and part as its own message."""

    def __init__(self, link: HubLink) -> None:
        self._link = link

    def table(self, table: FrameTable) -> None:
        self._link.offer(table.encode())

    def part(self, part: FramePart) -> None:
        self._link.offer(replace(part, dropped_before=self._link.dropped).encode())


@dataclass(slots=True)
class _JoinedTokens:
    starts: dict[str, int] = field(default_factory=dict)
    """Name of a table -> its first row in the whole."""
    tables: list[FrameTable] = field(default_factory=list)
    count: int = 0

    def add(self, table: FrameTable) -> None:
        self.starts[table.name] = self.count
        self.tables.append(table)
        self.count += table.tokens.shape[1]

    def whole(self, name: str) -> FrameTable:
        keys: dict[str, int] = {}
        parts = []
        for table in self.tables:
            used, row_R = np.unique(table.tokens[0], return_inverse=True)
            number = np.array([keys.setdefault(table.keys[row], len(keys)) for row in used], dtype=np.int32)
            parts.append(np.stack((number[row_R], *table.tokens[1:])))
        first = self.tables[0]
        tokens = np.concatenate(parts, axis=1)
        return FrameTable(run=first.run, name=name, step=first.step, keys=tuple(keys), tokens=tokens)


class BufferedSender:
    """Merges the parts of whole tensors, and joins those of tokens, until `flush`.

    Args:
        link: gets few messages, at the latest with `flush`.
        name: of tables, unique among those of the phase.
    """

    def __init__(self, link: HubLink, *, name: str) -> None:
        self._straight, self._name = DirectSender(link), name
        self._wholes: dict[Where, FramePart] = {}
        self._of_tokens: dict[Where, list[FramePart]] = {}
        self._tokens = _JoinedTokens()
        self._num_bytes = self._num_tables = 0

    def table(self, table: FrameTable) -> None:
        self._tokens.add(table)

    def part(self, part: FramePart) -> None:
        if part.table is not None:
            self._of_tokens.setdefault(part.where, []).append(part)
            self._num_bytes += part.payload.nbytes
            return
        so_far, reducer = self._wholes.get(part.where), part.where.reducer
        assert isinstance(reducer, WholeTensor), part.where
        if so_far is not None:
            payload = reducer.merge(so_far.payload, part.payload)
            part = replace(part, payload=payload, num_not_finite=so_far.num_not_finite + part.num_not_finite)
        self._wholes[part.where] = part

    def between_passes(self) -> None:
        """Send what has been gathered of tokens if it is much; no table is open now."""
        if self._num_bytes > GATHERED_BYTES:
            self._send_tokens()

    def flush(self) -> None:
        """Send all that is left. Idempotent."""
        self._send_tokens()
        for part in self._wholes.values():
            self._straight.part(part)
        self._wholes.clear()

    def _send_tokens(self) -> None:
        if self._of_tokens:
            self._num_tables += 1
            name = f"{self._name}.{self._num_tables}"
            self._straight.table(self._tokens.whole(name))
            for parts in self._of_tokens.values():
                self._straight.part(_joined(parts, self._tokens.starts, name))
        self._of_tokens.clear()
        self._tokens, self._num_bytes = _JoinedTokens(), 0


def _joined(parts: Sequence[FramePart], starts: Mapping[str, int], table: str) -> FramePart:
    rows = [starts[part.table] + np.arange(len(part.payload)) for part in parts if part.table is not None]
    return replace(
        parts[0],
        payload=np.concatenate([part.payload for part in parts]),
        table=table,
        rows=np.concatenate(rows).astype(np.int32),
        num_not_finite=sum(part.num_not_finite for part in parts),
    )
