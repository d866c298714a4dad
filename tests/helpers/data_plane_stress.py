"""Very many random operations on a ledger and on whole data planes, against the ledger's rules.

    python -m tests.helpers.data_plane_stress [--ops 100000] [--stores noop,transfer_queue,mooncake] [--seed 0]

First ten times as many operations on a ledger alone, against its specification; the smallest history that shows a
difference is printed, and ends the program. Then every store. The first half of its operations are puts, partial puts,
rewrites, reads, claims, releases, writes under claims and clears by three clients, one of them in another process;
`PlaneModel` says of each what the answer or the refusal must be. The second half is the workload of the stress test, by
eight workers at once. An operation that hangs ends the program with the stacks of its threads. Exit code 1 also when a
store is left with a row or a chunk.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from nemo_rl.data_plane.interfaces import KVBatchMeta
from tests.helpers import ledger_random, mooncake
from tests.helpers.data_plane_model import FIELDS, WRITES, Claim, PlaneModel, keys_in_groups
from tests.helpers.data_plane_workload import WORKERS, stress
from tests.helpers.data_planes import PLANES, Plane, open_plane, ray_cluster

CHANCES = {
    "put": 5,
    "partial put": 5,
    "rewrite": 4,
    "get": 6,
    "get by meta": 5,
    "claim": 6,
    "release": 4,
    "write under claim": 3,
    "ask for completion": 1,
    "clear": 3,
    "list and count": 2,
}
"""Operations, and how often each is drawn."""
KEYS = keys_in_groups(40)
GROUP_SIZES = (None, 3)
CALL_S = 30.0
"""Deadline of a call, on a machine that does much else."""
HANG_S = 4 * CALL_S
"""An operation is two calls or three."""
LEASE_S = 1e5
"""Longer than the whole run: whether a claim has ended must not depend on how busy the machine is."""
NUM_REMEMBERED = 60
"""Metas and claims that are used again, by any client."""
LEDGER_SHARE = 10
"""Operations on a ledger alone for each one on a store; there they take a hundred microseconds."""
TURN_OPERATIONS = 6
"""Operations of a turn of the workload; every fifth turn has one more."""


@dataclass
class History:
    """One partition from its registration to its clearing."""

    model: PlaneModel
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    _metas: deque[KVBatchMeta] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    _claims: deque[Claim] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            (kind,) = self.chance.choices(list(CHANCES), list(CHANCES.values()))
            if not self._metas:
                kind = "put"
            elif not self._claims and kind in ("release", "write under claim"):
                kind = "claim"
            started = time.monotonic()
            with ending_when_it_hangs(HANG_S):
                self._do(kind, self.chance.randrange(len(self.model.clients)))
            self.counts[kind] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        with ending_when_it_hangs(HANG_S):
            self.model.check_list_and_counts()
            self.model.clear(0, None)
            self.model.check_list_and_counts()

    def _do(self, kind: str, who: int) -> None:
        model, chance, keys = self.model, self.chance, self._some(KEYS)
        task = chance.choice(list(WRITES))
        if kind == "put":
            self._put(who, keys, FIELDS)
        elif kind == "partial put":
            self._put(who, keys, self._some(FIELDS))
        elif kind == "rewrite":
            self._put(who, self._some(list(model.rows) or KEYS), self._some(FIELDS[:3]))
        elif kind == "get":
            model.read(who, self._some(list(model.rows) or KEYS), self._some(FIELDS))
        elif kind == "get by meta":
            model.read_meta(who, chance.choice([*self._metas, *(meta for _, meta in self._claims)]), self._some(FIELDS))
        elif kind == "claim":
            claim = model.claim(who, task, self._some(["input_ids", "sample_mask"]), chance.randint(3, 9))
            self._claims += [claim] if claim is not None else []
        elif kind == "release":
            model.release(who, chance.choice(self._claims), chance.choice([slice(None), slice(1), slice(1, None)]))
        elif kind == "write under claim":
            model.write_under_claim(who, chance.choice(self._claims), chance.choice(["prev_logprobs", "sample_mask"]))
        elif kind == "ask for completion":
            model.ask_whether_all_is_consumed(who, task)
        elif kind == "clear":
            model.clear(who, keys)
        elif kind == "list and count":
            model.check_list_and_counts()

    def _put(self, who: int, keys: list[str], names: list[str]) -> None:
        is_wrong, with_tags = self.chance.random() < 0.1, self.chance.random() < 0.5
        meta = self.model.put(who, keys, names, self.chance.randrange(5), is_wrong=is_wrong, with_tags=with_tags)
        self._metas += [meta] if meta is not None else []

    def _some(self, of: list[str]) -> list[str]:
        return self.chance.sample(of, self.chance.randint(1, min(6, len(of))))


@contextmanager
def ending_when_it_hangs(seconds: float) -> Iterator[None]:
    """End the program with the stacks of all threads when the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(plane: Plane, num_operations: int, chance: random.Random) -> Iterator[str]:
    """Half of the operations each way; says what was done, when it is done."""
    started, alone = time.monotonic(), num_operations // 2
    clients = [plane.owner, plane.peer, plane.attach()]
    for i, group_size in enumerate(GROUP_SIZES):
        model = PlaneModel(clients, partition=f"model{i}", keys=KEYS, group_size=group_size, lease_s=LEASE_S)
        plane.partitions.append(model.partition)
        history = History(model, chance)
        history.run(alone // len(GROUP_SIZES))
        counts = ", ".join(f"{kind} {count}" for kind, count in history.counts.items())
        yield f"groups of {group_size}: {counts}; {model.num_refused} refused; slowest {history.slowest_s:.2f} s"
    seconds = time.monotonic() - started
    yield f"{alone} operations as the model says, {alone / seconds:.0f} a second"
    started, turns = time.monotonic(), max(num_operations // 2 // (WORKERS * TURN_OPERATIONS), 1)
    with ending_when_it_hangs(HANG_S + turns * CALL_S):
        num_done = stress(plane, turns)
    seconds = time.monotonic() - started
    yield f"{num_done} operations by {WORKERS} workers at once, {num_done / seconds:.0f} a second"
    with ending_when_it_hangs(HANG_S):
        plane.settle()
    yield "0 rows, 0 bytes and 0 chunks left"


def stress_ledger(num_operations: int, seed: int) -> int:
    """Random operations on a ledger alone; returns the exit code."""
    started = time.monotonic()
    difference = ledger_random.search(num_operations, seed=seed, tell=lambda line: print(f"ledger: {line}"))
    if difference is not None:
        print(f"ledger: the smallest history, for `python -m tests.helpers.ledger_random FILE`:\n{difference}")
        return 1
    seconds = time.monotonic() - started
    print(f"ledger: {num_operations} operations as specified, {num_operations / seconds:.0f} a second", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=100_000, help="operations on each store")
    parser.add_argument("--stores", default="noop,transfer_queue,mooncake", help=f"some of {', '.join(PLANES)}")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if stress_ledger(given.ops * LEDGER_SHARE, given.seed):
        return 1
    for store in given.stores.split(","):
        if "mooncake" in store and mooncake.why_not():
            print(f"{store}: left out, {mooncake.why_not()}")
            continue
        kind = PLANES[store]
        with (
            ray_cluster() if kind.needs_ray else nullcontext(),
            # Checks of all invariants after each request would be most of the time.
            open_plane(store, mode=kind.modes[-1], lease_s=LEASE_S, validate=False, timeout_s=CALL_S) as plane,
        ):
            for line in run(plane, given.ops, random.Random(given.seed)):
                print(f"{store}: {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
