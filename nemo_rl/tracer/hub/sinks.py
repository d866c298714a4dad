"""`Sinks`: where everything that viewers get also goes, such as a recording; each in a thread of its own.

Invariant: a sink that is slow, full or dead never holds up the hub: what it cannot take is left out, and that is told
once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["Sink", "SinkThread"]

logger = logging.getLogger(__name__)

CLOSE_S = 20.0
"""For what still waits when the hub ends."""


class Sink(Protocol):
    """Takes what viewers get; what raises is left out of it."""

    def frame(self, message: bytes) -> object:
        """A frame or a table."""

    def message(self, message: dict[str, Any]) -> object:
        """A JSON message."""

    def close(self) -> object:
        """Nothing follows."""


class SinkThread:
    """One sink."""

    def __init__(self, sink: Sink, *, max_bytes: int, problem: Callable[[str], None], name: str = "recording") -> None:
        """Args:
        max_bytes: that may wait for it.
        problem: is told, once, why something is left out; called by any thread.
        """
        self._sink, self._max_bytes, self._problem, self._name = sink, max_bytes, problem, name
        self._queue: queue.SimpleQueue[bytes | dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_bytes, self._has_told = 0, False
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def frame(self, message: bytes) -> None:
        """Takes a frame or a table, unless too much waits."""
        with self._lock:
            is_full = self._num_bytes + len(message) > self._max_bytes
            self._num_bytes += 0 if is_full else len(message)
        if is_full:
            self._tell(f"{self._name}: the disk is too slow: pictures are left out of it")
        else:
            self._queue.put(message)

    def message(self, message: Mapping[str, object]) -> None:
        """Takes a JSON message."""
        self._queue.put(dict(message))

    def close(self) -> None:
        """Writes what waits, within a deadline."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s: not closed within %g s", self._name, CLOSE_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, bytes):
                    with self._lock:
                        self._num_bytes -= len(item)
                    self._sink.frame(item)
                else:
                    self._sink.message(item)
            except Exception as error:  # noqa: BLE001 - whatever a disk does: looking on goes on
                self._tell(f"{self._name}: some is left out of it: {type(error).__name__}: {str(error)[:300]}")
        self._close_sink()

    def _close_sink(self) -> None:
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(f"{self._name}: its end could not be written: {type(error).__name__}: {str(error)[:300]}")

    def _tell(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._problem(text)
