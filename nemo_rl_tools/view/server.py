"""`ViewServer`: the page of `nemo-rl view` over HTTP on loopback, for a browser that has its token.

The first request brings the token in the address and gets a cookie in exchange. Requests whose host is not this machine
are refused, so that no page of another site can reach the server by its own name.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.errors import NemoRLError, ResourceError
from nemo_rl_tools.view.pages import INDEX, ViewPages
from nemo_rl_tools.view.tracers import OpenTracers

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["ViewServer"]

TRACER = re.compile("tracer-([0-9a-f]{12})")
"""Path that leads to the tracer's page of a run."""
LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
CONTENT_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".LICENSE": "text/plain"}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
)
"""Policy of the page itself; the page of rollouts brings a stricter one."""
CLOSE_S = 2
"""Seconds that open requests have at the end."""


class ViewServer:
    """A server whose port is taken when it is made.

    Args:
        pages: the files of the page.
        port: 0 takes a free one.

    Raises:
        ResourceError: the port is taken.
    """

    def __init__(self, pages: ViewPages, *, port: int = 0) -> None:
        self._pages, self._tracers, self._token = pages, OpenTracers(), secrets.token_urlsafe(32)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ResourceError(
                f"--port {port}: {LOOPBACK}:{port} cannot be used ({error.strerror}); name another port, or 0"
            ) from error

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/?token={self._token}"

    def serve(self) -> None:
        import uvicorn  # noqa: PLC0415 - only where a page is served
        from starlette.applications import Starlette  # noqa: PLC0415
        from starlette.middleware.trustedhost import TrustedHostMiddleware  # noqa: PLC0415
        from starlette.routing import Route  # noqa: PLC0415

        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET"])])
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
        settings = uvicorn.Config(
            app, log_level="critical", server_header=False, timeout_graceful_shutdown=CLOSE_S, lifespan="off"
        )
        try:
            with suppress(KeyboardInterrupt):  # uvicorn raises it once more when it has closed
                uvicorn.Server(settings).run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._tracers.close()

    def _answer(self, request: Request) -> Response:
        """Answer one request; starlette runs it in a thread."""
        from starlette.responses import PlainTextResponse, RedirectResponse, Response  # noqa: PLC0415

        cookie = f"nemo-rl-view-{self._socket.getsockname()[1]}"
        if self._is_known(request.query_params.get("token", "")):
            response: Response = RedirectResponse("/", headers=HEADERS)
            response.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            return response
        if not self._is_known(request.cookies.get(cookie, "")):
            return PlainTextResponse("open the address that nemo-rl view has printed\n", 401, headers=HEADERS)
        path = request.path_params["path"] or INDEX
        try:
            traced = TRACER.fullmatch(path)
            run = None if traced is None else self._pages.run(traced[1])
            if run is not None:
                return RedirectResponse(self._tracers.address(run.folder), headers=HEADERS)
            content = self._pages.read(path, key=request.query_params.get("key", ""))
        except (NemoRLError, OSError) as error:
            return PlainTextResponse(f"{error}\n", 404, headers=HEADERS)
        if content is None:
            return PlainTextResponse("no such page\n", 404, headers=HEADERS)
        policy = {"Content-Security-Policy": POLICY} if path == INDEX else {}
        return Response(content, media_type=CONTENT_TYPES[Path(path).suffix], headers={**HEADERS, **policy})

    def _is_known(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="surrogatepass"), self._token.encode())
