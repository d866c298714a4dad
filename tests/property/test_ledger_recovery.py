"""Random histories of a ledger that dies again and again: it comes back the same, and no call counts twice."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from nemo_rl.data_plane.ledger.events import EventLog
from nemo_rl.data_plane.ledger.journal import JOURNAL_FILE, Journal, create_journal
from nemo_rl.data_plane.ledger.ledger import Ledger
from nemo_rl.data_plane.ledger.recovery import READS, CallNumbers, RecoverableLedger
from tests.helpers.case_selection import num_examples
from tests.property.test_ledger import CAPACITY, CAPACITY_BYTES, LEASE_S, LedgerHistory

SNAPSHOT_BYTES = 2500
"""A few requests: most histories have several snapshots."""
MOMENTS = ("before the frame", "in the frame", "behind the frame", "behind the reply")
"""When the process dies during a call, or after it."""


def open_ledger(path: Path, *, events: EventLog | None = None, snapshot_bytes: int = SNAPSHOT_BYTES):
    return RecoverableLedger(
        lambda on_event: Ledger(
            run_id="r",
            capacity_rows=CAPACITY,
            capacity_bytes=CAPACITY_BYTES,
            lease_s=LEASE_S,
            on_event=on_event,
            validate=True,
        ),
        Journal(path, run_id="r"),
        keep_s=60.0,
        snapshot_bytes=snapshot_bytes,
        events=events,
    )


class MortalLedger:
    """A ledger on a file, and one client of it that asks again when the ledger has died."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_FILE
        create_journal(self.path, run_id="r")
        self.ledger = open_ledger(self.path)
        self.moment: str | None = None
        """When the ledger dies during the next call that changes something."""
        self.lost_at: float | None = None
        """Latest change before a death that the history has not noticed yet."""
        self._numbers = CallNumbers("c")

    def handle(self, request: dict, *, now: float) -> dict:
        with self._numbers.next() as numbered:
            request = {**request, **numbered, "handles": None}
            if self.moment is None or request["op"] in READS:
                return self.ledger.handle(request, now=now)
            moment, self.moment = self.moment, None
            is_even = not self.lapses(now)
            before = self.path.read_bytes()
            reply = msgpack.unpackb(msgpack.packb(self.ledger.handle(request, now=now)))
            after, dumped = self.path.read_bytes(), self.ledger.dump(now=now)
            if after.startswith(before) and moment != MOMENTS[2]:
                kept = len(before) + (len(after) - len(before)) // 2 * (moment == MOMENTS[1])
                self.path.write_bytes(after[:kept])
            self.die(now)
            again = self.ledger.handle(request, now=now)
            if is_even:
                assert again == reply, "a call that was made again has another reply"
                assert plain(self.ledger.dump(now=now)) == plain(dumped), "a call counts twice, or not at all"
            return again

    def lapses(self, now: float) -> bool:
        """Return whether a lease is over that no change has noticed: a death gives it back, and calls go otherwise."""
        changed = self.ledger.last_change
        return any(changed < expires <= now for *_, expires, has_expired in self.claims(now) if not has_expired)

    def claims(self, now: float) -> list:
        return self.ledger.dump(now=now)["claims"]

    def die(self, now: float) -> None:
        """End the process, and start another one, as `host.build_service` does."""
        self.ledger.close()
        self.ledger = open_ledger(self.path)
        self.lost_at = self.ledger.last_change
        self.ledger.resume(now=now)


def plain(dumped: dict) -> bytes:
    """Everything but the ends of leases, which a recovery moves."""
    claims = [claim[:5] + claim[6:] for claim in dumped["claims"]]
    return msgpack.packb({**dumped, "claims": claims})


class MortalHistory(LedgerHistory):
    """The same history, against the same model, with deaths at every moment of a call and between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nemo_rl-test-"))
        self.ledger = MortalLedger(self.folder)

    def teardown(self) -> None:
        self.ledger.ledger.close()
        shutil.rmtree(self.folder)

    @rule(moment=st.sampled_from(MOMENTS))
    def die_in_the_next_call(self, moment: str) -> None:
        self.ledger.moment = moment

    @rule()
    def die_now(self) -> None:
        self.ledger.die(self.now)
        self.renew_holders()

    @invariant()
    def a_reader_of_the_journal_is_the_same(self) -> None:
        """To the last byte, and in every order."""
        copy = self.folder / "copy" / JOURNAL_FILE
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(self.ledger.path, copy)
        again = open_ledger(copy)
        assert msgpack.packb(again.dump(now=self.now)) == msgpack.packb(self.ledger.ledger.dump(now=self.now))
        again.close()

    @rule(nbytes=st.sampled_from([10, 400]), waited_s=st.sampled_from([0.0, 1.5]))
    def reserve(self, nbytes: int, waited_s: float) -> None:
        """It is given back at once: the model of capacity knows no reservations."""
        reply = self.ask("reserve", keys=["u0_g0"], nbytes=nbytes, waited_s=waited_s)["ok"]
        if "reservation" in reply:
            self.ask("unreserve", reservation=reply["reservation"], waited_s=waited_s)

    @rule()
    def look_whether_all_is_claimed(self) -> None:
        self.ask("consumption", tasks=["t"])

    def ask(self, op: str, **args: object) -> dict:
        reply = super().ask(op, **args)
        self.renew_holders()
        return reply

    def renew_holders(self) -> None:
        """A recovery gives a full lease to the claims that were good at the latest change."""
        lost_at, self.ledger.lost_at = self.ledger.lost_at, None
        for key, (claim, expires) in list(self.holders.items()) if lost_at is not None else ():
            if expires > lost_at:
                self.holders[key] = (claim, max(expires, self.now + LEASE_S))


MortalHistory.TestCase.settings = settings(max_examples=num_examples(100), stateful_step_count=40, deadline=None)
test_a_ledger_that_dies_follows_the_model = MortalHistory.TestCase
