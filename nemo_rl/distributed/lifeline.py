"""`Lifeline`: ends a worker process whose cluster can no longer be reached.

A machine that is cut off from the others keeps its processes: Ray there goes on looking for its head, and nobody comes
to end a worker that waits for its next call. The actor behind `RayWorkerGroup` holds one where a cluster has several
machines.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

__all__ = ["LOST_S", "Lifeline"]

logger = logging.getLogger(__name__)

LOST_S = 60.0
"""Longer than a switch takes to come back; what a driver waits for was given up long before."""
LOOK_S = 5.0
LOST_EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


class Lifeline:
    """Looks from a thread whether `address` still takes connections, and ends this process when it has not for long.

    Args:
        address: `host:port` of Ray's metadata server.
    """

    def __init__(self, address: str, *, lost_s: float = LOST_S, look_s: float = LOOK_S) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._lost_s, self._look_s = lost_s, look_s
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self._look_s)
            if self._is_there():
                last = time.monotonic()
            elif time.monotonic() - last > self._lost_s:
                logger.error("the cluster's head at %s:%d cannot be reached for %.0f s", *self._place, self._lost_s)
                # Other threads may be blocked in a collective for as long as its deadline, and nobody hears of it.
                os._exit(LOST_EXIT_CODE)

    def _is_there(self) -> bool:
        try:
            socket.create_connection(self._place, timeout=self._look_s).close()
        except OSError:
            return False
        return True
