"""The reading half of a client: locate, fetch, build. Used by `ledger_client`.

The one invariant: what is returned was live, whole and of one version at one moment; a read that meets a rewrite or a
clear asks the ledger again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from nemo_rl.data_plane.client.assembly import Located
from nemo_rl.data_plane.client.backpressure import FIRST_POLL_S, LONGEST_POLL_S
from nemo_rl.data_plane.client.link import Call, ClientLink, names_of
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import KeysNotFound, PayloadLost

__all__ = ["RowReader"]

_T = TypeVar("_T")

LOST_AFTER_S = 1.0
"""A chunk that the ledger names and the store lacks for so long is lost: its producer died before it was reachable."""


class RowReader:
    """Reads of one client."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link

    def read(self, call: Call, args: Args, specs: Sequence[FieldSpec], build: Callable[[Located], _T]) -> _T:
        """What `build` makes of the rows that `args` (of `locate`) names."""
        before: list[str] = []
        lost_after, poll_s = 0.0, FIRST_POLL_S
        while True:
            reply = self._link.ask(call, "locate", args)
            chunk_ids = names_of(reply["chunks"])
            try:
                with self._link.clock.measure("store_get"):
                    payloads = self._fetch(call, chunk_ids, reply)
                self._check_live(call, chunk_ids)
                located, rows = self._build(specs, reply, payloads, len(names_of(args["keys"])), build)
                self._link.store.confirm(chunk_ids)
            except KeysNotFound as error:
                # Rewritten or cleared since the ledger's answer: its next one says which, or names other chunks. When
                # it names the same ones, what reaches them may still be on its way from their producer.
                if chunk_ids != before:
                    before, lost_after = chunk_ids, time.monotonic() + min(LOST_AFTER_S, call.left() / 2)
                elif time.monotonic() > lost_after:
                    raise PayloadLost(
                        f"{call.what}: the ledger names chunks that the store lacks: {error}; age {call.age():.1f} s"
                    ) from error
                else:
                    time.sleep(poll_s)
                    poll_s = min(poll_s * 2, LONGEST_POLL_S)
            else:
                self._link.count("get_bytes", located.num_bytes)
                self._link.count("over_read_bytes", located.num_bytes - located.num_bytes_used)
                return rows

    def _fetch(self, call: Call, chunk_ids: list[str], reply: Reply) -> list[Parts]:
        if not chunk_ids:
            return []
        handles = reply.get("handles", {})
        assert isinstance(handles, dict), f"malformed reply: {reply}"
        return self._link.timed(call, lambda: self._link.store.get(chunk_ids, timeout_s=call.left(), handles=handles))

    def _build(
        self,
        specs: Sequence[FieldSpec],
        reply: Reply,
        payloads: list[Parts],
        num_rows: int,
        build: Callable[[Located], _T],
    ) -> tuple[Located, _T]:
        """Where a chunk was freed and its memory overwritten since `_fetch`, anything can be wrong with its bytes:
        whether they still are the chunk's is asked before an error is believed.
        """
        try:
            with self._link.clock.measure("build"):
                located = Located(specs=specs, reply=reply, payloads=payloads, num_rows=num_rows)
                return located, build(located)
        except Exception:
            self._link.store.confirm(names_of(reply["chunks"]))
            raise

    def _check_live(self, call: Call, chunk_ids: list[str]) -> None:
        """Where a store reuses memory, a chunk that is live after it was fetched was not overwritten meanwhile."""
        if not chunk_ids or not self._link.store.reuses_memory:
            return
        gone = names_of(self._link.ask(call, "gone", {"chunks": chunk_ids})["chunks"])
        if gone:
            raise KeysNotFound(f"{len(gone)} of {len(chunk_ids)} chunks were freed while they were read")
