"""A chat endpoint on loopback that judges by a rule of the test, and whose faults are planted by the test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["FAULTS", "JudgeServer", "judge_server", "length_score"]

FAULTS = ("500", "hang", "html", "garbage", "half", "language", "429", "cut", "nan", "outside", "closed")
"""`fault` of an answer; `hang` sleeps until the server is closed."""
_CONTENT = {
    "garbage": "I like it. 7 of 10, or 9?",
    "half": '{"score": ',
    "language": "\u5206\u6570\uff1a5",
    "nan": '{"score": NaN}',
    "outside": '{"score": 11}',
}
_LIMIT_S = 60.0


def length_score(body: dict[str, Any]) -> float:
    """Return a score that follows from the request alone: from 0 to 9, by the length of its last message."""
    return float(len(body["messages"][-1]["content"]) % 10)


class JudgeServer(ThreadingHTTPServer):
    """Answers in the order of `fault(number of the request, body)`: a name of FAULTS, or None for a verdict."""

    daemon_threads = True

    def __init__(self, *, seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seconds = seconds
        self.fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None
        self.verdict: Callable[[dict[str, Any]], str] = lambda body: json.dumps({"score": length_score(body)})
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._at_once = 0
        self.lock, self.closing = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[int]:
        with self.lock:
            self.bodies.append(body)
            number = len(self.bodies) - 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield number
        finally:
            with self.lock:
                self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.counted(body) as number:
            self.server.keys.append(self.headers.get("authorization"))
            time.sleep(self.server.seconds)
            fault = self.server.fault(number, body)
            if fault == "hang":
                self.server.closing.wait(_LIMIT_S)
            if fault in ("hang", "closed"):
                self.close_connection = True
                return
            if fault == "500":
                self._send(500, b"broken")
            elif fault == "429":
                self._send(429, b"slower", retry_after="0.05")
            elif fault == "html":
                self._send(200, b"<html>gateway</html>")
            else:
                content = _CONTENT.get(fault or "") or self.server.verdict(body)
                reason = "length" if fault == "cut" else "stop"
                choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
                usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
                self._send(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def _send(self, status: int, body: bytes, *, retry_after: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if retry_after is not None:
            self.send_header("retry-after", retry_after)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def judge_server(*, seconds: float = 0.0) -> Iterator[JudgeServer]:
    """Serve until the block ends.

    Args:
        seconds: time of each answer.
    """
    server = JudgeServer(seconds=seconds)
    thread = threading.Thread(target=server.serve_forever, name="judge server")
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(_LIMIT_S)
