"""Every order of up to twelve operations of three clients on four rows of a ledger, against its specification.

    python -m tests.helpers.ledger_exhaustive [--depth 12] [--only NAME ...]      (make check-ledger)

Breadth first: from each state, every operation of an alphabet. Each step is checked (the replies, the ledger's own
invariants, the chunks in the store), and in each new state all that can be read is read. A state that was met before is
not gone on from: `ledger_states` says when two are the same.

A client stores the chunks of a put, which reserves capacity where bytes are limited, and commits them later, as an
operation of its own; it claims, writes under its claim, renews it and releases it, and it crashes, at any point. A
crashed client does nothing more: the put that it had stored is torn, its reservation and its lease run out. Anybody
clears rows, asks whether all is consumed, and waits for half a lease. A client has one put and one claim at a time.

Abstracted: contents and sizes of rows (a field of a row has ten bytes); lengths, tags and dtypes, which random
histories have; names of clients; and how long ago something ended. Of clients that have nothing under way one acts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.helpers.checked_ledger import (
    LEASE_S,
    CheckedLedger,
    FoundDifference,
    Operation,
    Recover,
    few_cleared_keys_remembered,
)
from tests.helpers.ledger_states import check_attributes, digest

CLIENTS = ("a", "b", "c")
KEYS = ("u0_g0", "u0_g1", "u0_g2", "u1_g0")
"""Rows: a group of three, and the first of another one."""
PARTITION = "p"
TASK = "prev_lp"
"""A task that ends with its column `prev_logprobs`, or with a release."""
DEPTH = 12


@dataclass(frozen=True, kw_only=True)
class Alphabet:
    """Operations whose every order is tried."""

    name: str
    puts: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    """Keys and fields."""
    clears: tuple[tuple[str, ...] | None, ...] = ()
    group_size: int | None = None
    claim_rows: int = 0
    """Most rows of a claim; 0 leaves out claims and what needs them."""
    max_rows: int = 10
    max_bytes: int | None = None
    has_declarations: bool = False
    """Whether the partition is dropped and declared again."""

    @property
    def limits(self) -> dict[str, Any]:
        return {"max_rows": self.max_rows, "max_bytes": self.max_bytes}

    @property
    def declare(self) -> Operation:
        return "register", {"partition": PARTITION, "group_size": self.group_size, "num_samples": len(KEYS)}

    def operations(self, checked: CheckedLedger) -> Iterator[Operation]:
        """Yield what can happen next."""
        is_first_idle = True
        for who in CLIENTS:
            is_idle = who not in checked.puts and who not in checked.claims
            if who not in checked.crashed and (not is_idle or is_first_idle):
                yield from self._of_client(checked, who)
                is_first_idle = is_first_idle and not is_idle
        for keys in self.clears:
            yield "clear", {"partition": PARTITION, "keys": None if keys is None else list(keys)}
        if self.has_declarations:
            yield ("forget", {"partition": PARTITION}) if checked.specification.partitions else self.declare
        if self.claim_rows:
            yield "consumption", {"partition": PARTITION, "tasks": [TASK]}
        if self.claim_rows or self.max_bytes is not None:
            yield "pass_time", {"seconds": LEASE_S / 2}
        if checked.recover is not None:
            yield "recover", {}

    def _of_client(self, checked: CheckedLedger, who: str) -> Iterator[Operation]:
        if who in checked.puts:
            yield "commit", {"put": who, "is_last": True}
        else:
            for keys, fields in self.puts:
                yield "store", {"put": who, "partition": PARTITION, "keys": list(keys), "fields": list(fields)}
        if who in checked.claims:
            if who not in checked.puts:
                write = {"put": who, "partition": PARTITION, "keys": [], "fields": ["prev_logprobs"], "under": who}
                yield "store", write
            yield "release", {"claim": who, "partition": PARTITION, "is_last": True}
            yield "heartbeat", {"claims": [who]}
        elif self.claim_rows and who not in checked.puts:
            claim = {"task": TASK, "fields": ["input_ids"], "count": self.claim_rows}
            yield "claim", {"claim": who, "partition": PARTITION, **claim}
        yield "crash", {"who": who}


FIRST, MIDDLE, LAST = KEYS[:2], KEYS[1:3], KEYS[2:]
"""Rows of puts."""
IDS, MASK, WHOLE = ("input_ids",), ("token_mask",), ("input_ids", "token_mask")
"""Fields of puts: both parts of a family, and all of it."""
ONE = KEYS[1:2]
ALPHABETS = (
    Alphabet(name="rows", puts=((FIRST, IDS), (LAST, IDS)), clears=(ONE,), claim_rows=2),
    Alphabet(
        name="groups", puts=((FIRST, IDS), (MIDDLE, MASK), (LAST, WHOLE)), clears=(ONE,), claim_rows=3, group_size=3
    ),
    Alphabet(
        name="versions", puts=((FIRST, WHOLE), (MIDDLE, MASK), (LAST, IDS)), clears=(ONE, None), has_declarations=True
    ),
    Alphabet(name="capacity", puts=((FIRST, IDS), (MIDDLE, MASK)), clears=(None,), claim_rows=4, max_bytes=60),
)


@dataclass
class Exploration:
    """What was explored of an alphabet."""

    alphabet: Alphabet
    num_states: int = 1
    num_transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    difference: FoundDifference | None = None

    def __str__(self) -> str:
        return (
            f"{self.alphabet.name}: all histories of up to {self.depth} operations, {self.num_states} states, "
            f"{self.num_transitions} transitions, {self.seconds:.0f} s"
        )


def explore(
    alphabet: Alphabet, depth: int, *, validate: bool = True, recover: Recover | None = None
) -> Iterator[Exploration]:
    """Explore one level after the other; yields the same record after each level, or with the first difference.

    Args:
        recover: crashes and recovers the ledger, as one more operation.
    """
    with few_cleared_keys_remembered():
        yield from _Explorer(alphabet, validate=validate, recover=recover).levels(depth)


class _Explorer:
    def __init__(self, alphabet: Alphabet, *, validate: bool, recover: Recover | None) -> None:
        self._alphabet, self._done = alphabet, Exploration(alphabet)
        self._checked = CheckedLedger(**alphabet.limits, validate=validate, recover=recover)
        check_attributes(self._checked.ledger)
        self._came_from: dict[bytes, tuple[bytes, Operation] | None] = {}
        """State -> the state and the operation that led to it first."""

    def levels(self, depth: int) -> Iterator[Exploration]:
        started = time.monotonic()
        checked = self._checked
        checked.do(self._alphabet.declare)
        level = [(digest(checked, CLIENTS), checked.save())]
        self._came_from[level[0][0]] = None
        while self._done.depth < depth and level and self._done.difference is None:
            following: list[tuple[bytes, bytes]] = []
            for here, saved in level:
                checked.load(saved)
                for operation in list(self._alphabet.operations(checked)):
                    checked.load(saved)
                    self._done.difference = self._step(here, operation, following)
                    if self._done.difference is not None:
                        break
                if self._done.difference is not None:
                    break
            level = following
            self._done.depth += 1
            self._done.num_states, self._done.seconds = len(self._came_from), time.monotonic() - started
            yield self._done

    def _step(self, here: bytes, operation: Operation, following: list[tuple[bytes, bytes]]) -> FoundDifference | None:
        """Take one step; a state that is new is read, and added to the following level."""
        checked, steps = self._checked, [operation]
        self._done.num_transitions += 1
        try:
            checked.do(operation)
            there = digest(checked, CLIENTS)
            if there not in self._came_from:
                self._came_from[there] = here, operation
                following.append((there, checked.save()))
                steps.append(("look", {}))
                checked.do(steps[-1])
        except Exception as error:  # noqa: BLE001 - whatever else the ledger raises is a difference too
            history = [self._alphabet.declare, *self._path_to(here), *steps]
            found_after = f"{self._done.num_transitions} transitions of {self._alphabet.name}"
            problem = f"{type(error).__name__}: {error}"
            return FoundDifference(
                limits=self._alphabet.limits, history=history, problem=problem, found_after=found_after
            )
        return None

    def _path_to(self, there: bytes) -> list[Operation]:
        path: list[Operation] = []
        while (step := self._came_from[there]) is not None:
            there, operation = step
            path.append(operation)
        return path[::-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=DEPTH, help="most operations of a history")
    parser.add_argument("--only", nargs="+", help=f"some of {', '.join(a.name for a in ALPHABETS)}")
    given = parser.parse_args()
    done = []
    for alphabet in ALPHABETS:
        if given.only and alphabet.name not in given.only:
            continue
        for exploration in explore(alphabet, given.depth):
            print(exploration, flush=True)
        done.append(exploration)
        if exploration.difference is not None:
            print(exploration.difference)
            return 1
    states, transitions = sum(e.num_states for e in done), sum(e.num_transitions for e in done)
    print(f"no difference: {states} states, {transitions} transitions, up to {given.depth} operations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
