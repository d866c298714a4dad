"""Random histories of a ledger that dies again and again: it comes back the same, and no call counts twice."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
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
from tests.helpers.checked_ledger import LEASE_S
from tests.property.test_ledger import LedgerHistory

SNAPSHOT_BYTES = 2500
"""A few requests: most histories have several snapshots."""
MOMENTS = ("before the frame", "in the frame", "behind the frame", "behind the reply")
"""When the process dies during a call, or after it."""


def open_ledger(path: Path, *, events: EventLog | None = None, snapshot_bytes: int = SNAPSHOT_BYTES):
    return RecoverableLedger(
        lambda on_event: Ledger(
            run_id="r",
            capacity_rows=24,
            capacity_bytes=600,
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
    """A ledger on a file, and one client of it that asks again when the ledger has died.

    Args:
        recovered: called after each death with the moment of the latest change before it, and the time.
    """

    _validate = True

    def __init__(self, folder: Path, recovered: Callable[[float, float], None]) -> None:
        self.path = folder / JOURNAL_FILE
        create_journal(self.path, run_id="r")
        self.ledger = open_ledger(self.path)
        self.moment: str | None = None
        """When the ledger dies during the next call that changes something."""
        self._recovered = recovered
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
            if "blocked" in reply.get("ok", {"blocked": ""}):
                # Refused, or told to wait: not in the journal, so it would report the seconds of its wait once more.
                self.moment = moment
                return reply
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
        """Return whether a lease or a reservation is over that no change has noticed.

        A death gives it back for as long as a new one, and the calls behind it go otherwise.
        """
        changed = self.ledger.last_change
        dumped = self.ledger.dump(now=changed)
        claims = [expires for *_, expires, has_expired in dumped["claims"] if not has_expired]
        reservations = [expires for *_, expires in dumped["capacity"]["reserved"]]
        return any(changed < expires <= now for expires in claims + reservations)

    def die(self, now: float) -> None:
        """End the process, and start another one, as `host.build_service` does."""
        self.ledger.close()
        self.ledger = open_ledger(self.path)
        lost_at = self.ledger.last_change
        self.ledger.resume(now=now)
        self._recovered(lost_at, now)


def plain(dumped: dict) -> bytes:
    """Everything but the ends of leases and reservations, which a recovery moves."""
    claims, capacity = [claim[:5] + claim[6:] for claim in dumped["claims"]], dumped["capacity"]
    reserved = [kept[:4] for kept in capacity["reserved"]]
    return msgpack.packb({**dumped, "claims": claims, "capacity": {**capacity, "reserved": reserved}})


class MortalHistory(LedgerHistory):
    """The same history, against the same specification, with deaths at every moment of a call and between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nemo_rl-test-"))
        self.mortal = MortalLedger(self.folder, self.renew)
        self.checked.ledger = self.mortal  # type: ignore[assignment]

    def teardown(self) -> None:
        self.mortal.ledger.close()
        shutil.rmtree(self.folder)

    @rule(moment=st.sampled_from(MOMENTS))
    def die_in_the_next_call(self, moment: str) -> None:
        self.mortal.moment = moment

    @rule()
    def die_now(self) -> None:
        self.mortal.die(self.checked.now)

    @invariant()
    def a_reader_of_the_journal_is_the_same(self) -> None:
        """To the last byte, and in every order."""
        copy, now = self.folder / "copy" / JOURNAL_FILE, self.checked.now
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(self.mortal.path, copy)
        again = open_ledger(copy)
        assert msgpack.packb(again.dump(now=now)) == msgpack.packb(self.mortal.ledger.dump(now=now))
        again.close()

    def renew(self, lost_at: float, now: float) -> None:
        """A recovery gives a full lease to claims and reservations that were good at the latest change."""
        specification = self.checked.specification
        for partition in specification.partitions.values():
            leases = partition.rules.leases
            for at, (claim, ends) in list(leases.items()):
                if ends > lost_at:
                    leases[at] = claim, max(ends, now + LEASE_S)
        for number, kept in list(specification.reservations.items()):
            if kept[3] > lost_at:
                specification.reservations[number] = (*kept[:3], max(kept[3], now + LEASE_S))


MortalHistory.TestCase.settings = settings(max_examples=num_examples(150), stateful_step_count=30, deadline=None)
test_a_ledger_that_dies_follows_the_model = MortalHistory.TestCase
