"""`HubServer`: the one port of a hub: the page over HTTP, viewers and ranks over WebSockets.

Invariant: who has not proved who it is costs little: at most `max_waiting` such connections, each for a few seconds,
with small messages; further ones are refused before a byte of them is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, cast
from urllib.parse import parse_qs

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from nemo_rl.tracer.protocol import HANDSHAKE_S, LIVE_PATH, HubTokens, Role
from nemo_rl_tools.tracer import PAGE_FOLDER
from nemo_rl_tools.tracer.hub.hub import Hub
from nemo_rl_tools.tracer.hub.legacy import LEGACY_PATH, serve_legacy
from nemo_rl_tools.tracer.hub.ranks import Ranks
from nemo_rl_tools.tracer.hub.sessions import Sessions

__all__ = ["HubEndpoint", "HubServer", "Pages", "refuse"]

CONTENT_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}
"""Files with other suffixes are not served."""
INDEX = "index.html"
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; worker-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


class Pages:
    """The files of a folder, below it too."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or PAGE_FOLDER
        found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
        files = [path for path in found if path.suffix in CONTENT_TYPES]
        self._files = {f"/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files}
        if f"/{INDEX}" in self._files:
            self._files["/"] = self._files[f"/{INDEX}"]

    def answer(self, path: str) -> Response:
        content = self._files.get(path)
        if content is None:
            return refuse(HTTPStatus.NOT_FOUND, "no such page")
        kind = CONTENT_TYPES[Path(INDEX if path == "/" else path).suffix]
        return _response(HTTPStatus.OK, kind, content)


def refuse(status: HTTPStatus, text: str) -> Response:
    return _response(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def _response(status: HTTPStatus, kind: str, content: bytes) -> Response:
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS})
    return Response(status.value, status.phrase, headers, content)


logger = logging.getLogger(__name__)

PING_S = 20.0
PONG_S = 60.0
"""A peer that answers no ping for so long is gone; a rank that compiles a kernel may take a while."""
CLOSE_S = 2.0
"""Seconds to wait for the peer's answer to a close."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SILENT = logging.getLogger(f"{__name__}.wire")
"""Logger of the library, switched off: anybody who can connect could fill the disk with its lines."""
SILENT.setLevel(logging.CRITICAL + 1)


class CountedConnection(ServerConnection):
    """A connection that counts as waiting from its first moment on, before it sends anything, until it is known."""

    def __init__(self, waiting: set[ServerConnection], limit: int, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._waiting, self._limit = waiting, limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._waiting) >= self._limit:
            self.transport.abort()
        else:
            self._waiting.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.discard(self)
        super().connection_lost(exc)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubEndpoint:
    """The address of a hub, and who may connect there."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    origins: tuple[str, ...] = ()
    """Origins of pages, beside the hub's own, from which a browser may connect, such as `http://host:8080`."""
    has_legacy: bool = False
    """True where the compatibility endpoint is served."""
    handshake_s: float = HANDSHAKE_S
    """Seconds for the request of a new connection, and then for its hello."""


ANY_PORT = HubEndpoint()
"""A free port of this machine, for its own pages alone."""


class HubServer:
    """A hub that listens.

    Example:
        async with HubServer(hub, tokens=tokens) as server:
            address = f"http://{server.host}:{server.port}/"
    """

    def __init__(
        self,
        hub: Hub,
        *,
        tokens: HubTokens,
        endpoint: HubEndpoint = ANY_PORT,
        tokenizer: Path | None = None,
    ) -> None:
        """Args:
        tokenizer: folder with `tokenizer.json`.
        """
        self.hub, self.host, self.port = hub, endpoint.host, endpoint.port
        self.ranks = Ranks(hub, tokenizer=tokenizer)
        self.sessions = Sessions(hub, self.ranks, tokens)
        self._tokens, self._endpoint, self._pages = tokens, endpoint, Pages()
        self._waiting: set[ServerConnection] = set()
        """Connections that have not said hello yet."""
        self._server: Server | None = None
        self._publishing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HubServer:
        """Raises:
        OSError: the port is taken.
        """
        limits = self.hub.limits
        self._server = await serve(
            self._serve,
            self.host,
            self.port,
            process_request=self._answer,
            # A class by its type, but any factory by its meaning.
            create_connection=cast(
                type[ServerConnection], partial(CountedConnection, self._waiting, limits.max_waiting)
            ),
            open_timeout=self._endpoint.handshake_s,
            ping_interval=PING_S,
            ping_timeout=max(PONG_S, limits.slow_viewer_s),
            close_timeout=CLOSE_S,
            # Compressed messages could be far larger than what travels.
            compression=None,
            max_size=limits.max_text_bytes,
            max_queue=4,
            server_header=None,
            logger=SILENT,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        self._publishing = asyncio.create_task(self.ranks.publish())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        path, _, query = request.path.partition("?")
        is_legacy = self._endpoint.has_legacy and path == LEGACY_PATH
        if path != LIVE_PATH and not is_legacy:
            return self._pages.answer(path)
        if not self._is_allowed(request):
            return refuse(HTTPStatus.FORBIDDEN, "pages of this origin may not connect; name it in the hub's origins")
        if is_legacy and not self._tokens.allow(Role.CONTROLLER, parse_qs(query).get("token", [""])[0]):
            return refuse(HTTPStatus.UNAUTHORIZED, f"expected {LEGACY_PATH}?token=TOKEN with the controller's token")
        return None

    def _is_allowed(self, request: Request) -> bool:
        """Refuse pages of other origins: browsers say from which page they come; others need a token all the same."""
        origins = request.headers.get_all("Origin")
        if not origins:
            return True
        host = request.headers.get("Host", "")
        # The host as the browser reached it: behind a forwarded port it is not the port here.
        is_own = host.rpartition(":")[0] in (*LOOPBACK, self.host) and origins[0] == f"http://{host}"
        return len(origins) == 1 and (is_own or origins[0] in self._endpoint.origins)

    async def _serve(self, connection: ServerConnection) -> None:
        try:
            if connection.request is not None and connection.request.path.startswith(LEGACY_PATH):
                self._waiting.discard(connection)
                await serve_legacy(connection, self.hub, self.sessions)
                return
            frame_bytes = self.hub.limits.max_frame_bytes
            known = await self.sessions.welcome(
                connection, frame_bytes=frame_bytes, handshake_s=self._endpoint.handshake_s
            )
            if known is not None:
                self._waiting.discard(connection)
                await self.sessions.serve(connection, *known)
        except ConnectionClosed:
            pass
        except Exception:
            # An internal error ends one connection, not the hub.
            logger.exception("a connection ended")
            self.hub.problem("internal error in one connection; see hub.log")
