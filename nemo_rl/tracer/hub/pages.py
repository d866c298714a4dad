"""Files of the page over HTTP: a fixed listing, read when the hub starts; nothing else is ever opened.

Invariant: no path of a request reaches the file system.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from websockets.datastructures import Headers
from websockets.http11 import Response

__all__ = ["Pages", "refuse"]

FOLDER = Path(__file__).parent.parent / "page"
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
        folder = folder or FOLDER
        found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
        files = [path for path in found if path.suffix in CONTENT_TYPES]
        self._files = {f"/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files}
        if f"/{INDEX}" in self._files:
            self._files["/"] = self._files[f"/{INDEX}"]

    def answer(self, path: str) -> Response:
        """What a GET of this path gives."""
        content = self._files.get(path)
        if content is None:
            return refuse(HTTPStatus.NOT_FOUND, "no such page")
        kind = CONTENT_TYPES[Path(INDEX if path == "/" else path).suffix]
        return _response(HTTPStatus.OK, kind, content)


def refuse(status: HTTPStatus, text: str) -> Response:
    """An answer that says why not."""
    return _response(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def _response(status: HTTPStatus, kind: str, content: bytes) -> Response:
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS})
    return Response(status.value, status.phrase, headers, content)
