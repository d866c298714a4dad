"""`LiveClient`: one connection to a hub, as viewer or controller; without threads of its own to the caller.

Called by `nemo-rl trace watch` and by tests. Invariant: no call waits longer than it was told to.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from nemo_rl.errors import NemoRLError, UserError, shorten
from nemo_rl.tracer.protocol import LIVE_PATH, PROTOCOL_VERSION, Role
from nemo_rl.tracer.watch import WatchPlan
from nemo_rl.utils.console import printable

__all__ = ["HubGone", "LiveClient", "Refused"]

ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")
MAX_MESSAGE_BYTES = 256 << 20
"""Largest message that a hub may send."""
MAX_WAITING = 16
"""Messages that are read ahead of the caller."""
PING_S = 10.0
"""A hub that answers no ping for so long is gone."""
CLOSE_S = 2.0
ANSWER_S = 10.0
"""Seconds to wait for an answer of the hub."""


class Refused(UserError):
    """The hub refused something; `code` is one of `ErrorCode`."""

    def __init__(self, code: str, text: str) -> None:
        self.code, self.text = code, text
        super().__init__(f"the hub refused this ({printable(code, limit=40)}): {printable(text, limit=500)}")

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str]]:
        return type(self), (self.code, self.text)


class HubGone(NemoRLError):
    """No hub answers at the address, or the connection is lost."""


class LiveClient:
    """A viewer's connection to a hub.

    Example:
        with LiveClient.connect("127.0.0.1:41234", token) as client:
            while (received := client.receive(timeout_s=5.0)) is not None:
                ...  # bytes: a frame or a table; a dict: a message
    """

    def __init__(self, connection: ClientConnection, address: str, opened: ExitStack) -> None:
        self.welcome: Mapping[str, Any] = {}
        self._connection, self._address, self._opened = connection, address, opened
        self._waiting: deque[bytes | dict[str, Any]] = deque()

    @classmethod
    def connect(
        cls, address: str, token: str, *, role: Role = Role.VIEWER, takeover: bool = False, timeout_s: float = ANSWER_S
    ) -> LiveClient:
        """Say hello and wait for the welcome.

        Args:
            address: `HOST:PORT`.
            takeover: as controller in place of another one.

        Raises:
            UserError: this is no address.
            HubGone: nobody answers there.
            Refused: the token is not good for this role, or another controller is there.
        """
        if ADDRESS.fullmatch(address) is None:
            raise UserError(f"expected the address of a hub as HOST:PORT, got {shorten(address)!r}")
        until, opened = time.monotonic() + timeout_s, ExitStack()
        try:
            connection = opened.enter_context(
                connect(
                    f"ws://{address}{LIVE_PATH}",
                    open_timeout=timeout_s,
                    close_timeout=CLOSE_S,
                    ping_interval=PING_S,
                    ping_timeout=PING_S,
                    max_size=MAX_MESSAGE_BYTES,
                    max_queue=MAX_WAITING,
                    compression=None,
                    # A hub is on this machine or behind a tunnel that ends here.
                    proxy=None,
                )
            )
        except (OSError, InvalidHandshake) as error:
            said = printable(str(error), limit=200) or type(error).__name__
            raise HubGone(f"no hub answers at {address} ({said}); has the job ended?") from error
        client = cls(connection, address, opened)
        try:
            hello = {"type": "hello", "v": PROTOCOL_VERSION, "role": role.value, "token": token}
            client.send(hello | ({"takeover": True} if takeover else {}))
            client.welcome = client.wait_for("welcome", timeout_s=max(0.1, until - time.monotonic()))
        except BaseException:
            client.close()
            raise
        return client

    def send(self, record: Mapping[str, object]) -> None:
        """
        Raises:
            HubGone: the connection is lost.
            Refused: the hub closed it and said why.
        """
        try:
            self._connection.send(json.dumps(record, allow_nan=False))
        except ConnectionClosed as error:
            raise self._why_closed() from error

    def receive(self, timeout_s: float) -> bytes | dict[str, Any] | None:
        """Return a frame or table as it came, or a message; None: nothing came within `timeout_s`.

        Raises:
            HubGone: the connection is lost.
            Refused: the hub says so.
        """
        return _unless_refused(self._waiting.popleft() if self._waiting else self._next(timeout_s))

    def wait_for(self, kind: str, *, timeout_s: float = ANSWER_S, **said: object) -> dict[str, Any]:
        """Return the next message of this type with these fields; what comes before it stays for `receive`.

        Raises:
            HubGone: it did not come in time, or the connection is lost.
            Refused: the hub refuses something instead.
        """
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            found = _unless_refused(self._next(left))
            wanted = {"type": kind, **said}
            if isinstance(found, dict) and all(found.get(name) == value for name, value in wanted.items()):
                return found
            if found is not None:
                self._waiting.append(found)
        raise HubGone(f"the hub at {self._address} did not answer with {kind!r} within {timeout_s:g} s")

    def watch(self, texts: Sequence[str], *, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Change what is watched, as controller; the `plan` that the hub answers with.

        Raises:
            UserError: a watch that cannot be read, here or there.
            HubGone: no answer.
        """
        plan = WatchPlan.parse(texts)
        self.send({"type": "watch", "watches": list(plan.texts)})
        return self.wait_for("plan", timeout_s=timeout_s, digest=plan.digest)

    def close(self) -> None:
        """End the connection, within a deadline."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _next(self, timeout_s: float) -> bytes | dict[str, Any] | None:
        try:
            found = self._connection.recv(timeout=timeout_s)
        except TimeoutError:
            return None
        except ConnectionClosed as error:
            why = "the connection was lost"
            if (said := error.rcvd) is not None:
                why = f"it closed the connection ({f'{said.code} {printable(said.reason, limit=200)}'.strip()})"
            raise HubGone(f"the hub at {self._address} is gone: {why}") from error
        return found if isinstance(found, bytes) else _message(found)

    def _why_closed(self) -> NemoRLError:
        try:
            while _unless_refused(self._next(0.0)) is not None:
                pass
        except (HubGone, Refused) as error:
            return error
        return HubGone(f"the hub at {self._address} is gone")


def _unless_refused(found: bytes | dict[str, Any] | None) -> bytes | dict[str, Any] | None:
    if isinstance(found, dict) and found.get("type") == "error":
        raise Refused(str(found.get("code")), str(found.get("text")))
    return found


def _message(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HubGone(f"the hub sent an invalid message: {error}") from error
    if not isinstance(found, dict):
        raise HubGone("the hub sent an invalid message: expected a JSON object")
    return found
