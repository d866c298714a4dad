"""A small object store: a server over HTTP that keeps objects in a folder, and the filesystem that fsspec opens on it.

    python -m tests.helpers.object_server FOLDER [--slow SECONDS]     prints its port

Objects have no folders, cannot be renamed, and appear whole or not at all, as in S3. A bucket is a folder in FOLDER; a
request to another one is refused, and so is one without the right key. `objects://127.0.0.1:PORT/BUCKET/NAME` is the
URL of an object; `entry_point` lets the processes of a run find the protocol, as that of an installed package.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fsspec.spec import AbstractFileSystem

from tests.helpers.runs import ROOT

PROTOCOL = "objects"
KEY, KEY_VARIABLE = "rightkey-7f31", "OBJECTS_SECRET_KEY"
TIMEOUT_S = 60.0
BLOCK_BYTES = 1 << 20
BUCKET = "bucket"


class ObjectFileSystem(AbstractFileSystem):
    """The client; the key is that of the environment."""

    protocol = PROTOCOL

    def _request(self, method: str, path: str, body: Any = None) -> bytes:
        host, _, rest = self._strip_protocol(path).partition("/")
        key = os.environ.get(KEY_VARIABLE, "")
        connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S, blocksize=BLOCK_BYTES)
        headers = {"Authorization": key}
        if hasattr(body, "fileno"):
            headers["Content-Length"] = str(os.fstat(body.fileno()).st_size)
        try:
            connection.request(method, "/" + quote(rest), body, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status == 404:
            raise FileNotFoundError(path)
        if response.status == 403:
            raise PermissionError(f"the key {key} is refused, signature={key}")
        if response.status >= 400:
            raise OSError(f"{method} {path}: {response.status}")
        return content

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **_: Any):
        path = self._strip_protocol(path).rstrip("/")
        host, _, rest = path.partition("/")
        listed = json.loads(self._request("REPORT", f"{host}/{rest}/"))
        found = {
            f"{host}/{name}": {"name": f"{host}/{name}", "size": size, "type": "file", "ETag": f'"{md5}"'}
            for name, size, md5 in listed
        }
        return found if detail else sorted(found)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        entries: dict[str, dict[str, Any]] = {}
        for name, info in self.find(path, detail=True).items():
            first, _, below = name.removeprefix(f"{path}/").partition("/")
            own = f"{path}/{first}"
            entries[own] = {"name": own, "size": 0, "type": "directory"} if below else info
        return list(entries.values()) if detail else list(entries)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._request("GET", path)[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._request("PUT", path, value)

    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **_: Any) -> None:
        with open(lpath, "rb") as file:
            self._request("PUT", rpath, file)

    def get_file(self, rpath: str, lpath: str, callback: Any = None, outfile: Any = None, **_: Any) -> None:
        Path(lpath).write_bytes(self._request("GET", rpath))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in [*self.find(path), self._strip_protocol(path)]:
            self._request("DELETE", name)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, *, slow_s: float = 0.0, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder, self.slow_s = folder, slow_s
        self.md5s: dict[Path, str] = {}
        self.failures = 0
        """Requests that are refused with 503 from here on."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def _run(self) -> None:
        name = unquote(self.path).strip("/")
        length = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(length)
        if len(content) < length:
            return  # the client was killed
        if self.headers.get("Authorization") != KEY:
            self._answer(403)
        elif self.server.failures > 0:
            self.server.failures -= 1
            self._answer(503)
        elif ".." in name.split("/") or not (self.server.folder / name.split("/")[0]).is_dir():
            self._answer(404)
        else:
            time.sleep(self.server.slow_s if self.command == "PUT" else 0.0)
            self._answer(*self._do(name, content))

    do_GET = do_PUT = do_DELETE = do_REPORT = _run

    def _do(self, name: str, content: bytes) -> tuple[int, bytes]:
        # One flat file for each object: names have no folders.
        bucket, _, key = name.partition("/")
        folder = self.server.folder / bucket
        file = folder / quote(key, safe="")
        if self.command == "PUT":
            partial = self.server.folder / f"put-{uuid.uuid4().hex}"
            partial.write_bytes(content)
            partial.rename(file)
            self.server.md5s[file] = hashlib.md5(content).hexdigest()
            return 200, b""
        if self.command == "REPORT":
            inside = f"{key}/" if key else ""
            objects = {unquote(path.name): path for path in sorted(folder.iterdir())}
            rows = [
                [f"{bucket}/{each}", path.stat().st_size, self.server.md5s.get(path, "")]
                for each, path in objects.items()
                if each.startswith(inside)
            ]
            return 200, json.dumps(rows).encode()
        if not file.is_file():
            return (204 if self.command == "DELETE" else 404), b""
        if self.command == "DELETE":
            file.unlink()
            return 200, b""
        return 200, file.read_bytes()

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def entry_point(folder: Path) -> Path:
    """Make what an installed package of the protocol would have; `folder` belongs on PYTHONPATH."""
    metadata = folder / "objectsfs-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: objectsfs\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[fsspec.specs]\n{PROTOCOL} = {__name__}:ObjectFileSystem\n")
    return folder


@contextmanager
def object_server(folder: Path, *, slow_s: float = 0.0) -> Iterator[str]:
    """Serve a bucket from a process of its own; yield the URL of the bucket."""
    (folder / BUCKET).mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder), "--slow", str(slow_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield f"{PROTOCOL}://127.0.0.1:{port}/{BUCKET}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slow", type=float, default=0.0)
    given = parser.parse_args()
    server = Server(given.folder, slow_s=given.slow)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _main()
