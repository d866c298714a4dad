"""Random histories of a ledger against its specification, and the smallest history that shows a difference.

    python -m tests.helpers.ledger_random FILE     (runs a history that `make stress-data-plane` has printed again)

Operations are drawn for the state that they meet: most name rows, puts and claims that exist, some name old ones. When
a history shows a difference, operations are removed from it while one stays.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.data_plane.keys import group_uid
from tests.helpers.checked_ledger import (
    FIELDS,
    LEASE_S,
    WRITES,
    CheckedLedger,
    FoundDifference,
    Operation,
    Recover,
    few_cleared_keys_remembered,
    problem_of,
)

KEYS = tuple(f"u{group}_g{i}" for group in range(4) for i in range(3))
PARTITIONS = ("p", "q")
HISTORY_OPERATIONS = 2000
"""Operations until a new ledger is taken: claims and versions are then small again, and a fault is near its cause."""
NUM_REMEMBERED = 12
"""Labels of puts and claims that operations still name."""
CHANCES = {
    "put": 20,
    "store": 8,
    "commit": 9,
    "abandon": 1,
    "crash": 1,
    "claim": 14,
    "release": 9,
    "write": 8,
    "heartbeat": 6,
    "consumption": 3,
    "clear": 7,
    "clear_all": 1,
    "read": 9,
    "read_meta": 7,
    "pass_time": 8,
    "register": 1,
    "forget": 1,
    "recover": 2,
    "look": 2,
}
"""Operations, and how often each is drawn."""


@dataclass
class RandomHistory:
    """Draws operations for one ledger, and runs each."""

    checked: CheckedLedger
    chance: random.Random
    history: list[Operation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, num_operations: int) -> None:
        """Run so many operations; after a difference the last one of `history` is the one that showed it."""
        self._do("register", partition="p", group_size=self.chance.choice([None, 2, 3]), num_samples=len(KEYS))
        names, weights = list(CHANCES), list(CHANCES.values())
        for name in self.chance.choices(names, weights, k=num_operations):
            getattr(self, f"_{name}")(str(len(self.history)))

    def _do(self, name: str, **arguments: Any) -> None:
        self.history.append((name, arguments))
        self.counts[name] += 1
        self.checked.do(self.history[-1])

    # ---- writing

    def _put(self, label: str) -> None:
        self._do("put", put=label, **self._drawn_put())

    def _store(self, label: str) -> None:
        self._do("store", put=label, **self._drawn_put())

    def _drawn_put(self) -> dict[str, Any]:
        chance = self.chance
        keys = self._some(KEYS, most=6)
        drawn: dict[str, Any] = {"partition": self._partition(), "keys": keys, "fields": self._some(FIELDS, most=4)}
        if chance.random() < 0.7:
            drawn["fields"] = [chance.choice(FIELDS)]
        drawn |= {"size": chance.choice([1, 1, 7, 20, 90]), "is_ragged": chance.random() < 0.5}
        drawn["rows_per_chunk"] = chance.choice([1, 2, 3, 100])
        if chance.random() < 0.3:
            drawn["lengths"] = [len(key) + (chance.random() < 0.02) for key in keys]
        if chance.random() < 0.3:
            drawn["tags"] = [{f"n{chance.randrange(2)}": chance.randrange(9)} for _ in keys]
        if chance.random() < 0.3:
            drawn["dtype"] = "float32" if chance.random() < 0.98 else "int32"
        return drawn

    def _commit(self, label: str) -> None:
        self._of_a_put("commit")

    def _abandon(self, label: str) -> None:
        self._of_a_put("abandon")

    def _of_a_put(self, name: str) -> None:
        if self.checked.puts:
            self._do(name, put=self.chance.choice(list(self.checked.puts)))

    def _crash(self, label: str) -> None:
        if self.checked.puts:
            self._do("crash", who=self.chance.choice(list(self.checked.puts)))

    def _write(self, label: str) -> None:
        claim = self._label(is_claim=True)
        if claim is not None:
            fields = [self.chance.choice(["prev_logprobs", "prev_logprobs", "sample_mask"])]
            self._do("put", put=label, partition=self._partition(), keys=[], fields=fields, under=claim)

    # ---- claims

    def _claim(self, label: str) -> None:
        chance = self.chance
        groups = [group_uid(key) for key in self._some(KEYS, most=3)] if chance.random() < 0.3 else []
        asked = {"task": chance.choice(list(WRITES)), "fields": self._some(FIELDS[:3], most=2), "groups": groups}
        if chance.random() < 0.5:
            asked["fields"] = ["input_ids"]
        self._do("claim", claim=label, partition=self._partition(), count=chance.choice([1, 3, 4, 6, 9]), **asked)

    def _release(self, label: str) -> None:
        claim = self._label(is_claim=True)
        if claim is not None:
            part = self.chance.choice([(None, None), (None, None), (None, 1), (1, None)])
            others = self._some(KEYS, most=1) if self.chance.random() < 0.1 else []
            self._do("release", claim=claim, partition=self._partition(), part=list(part), others=others)

    def _heartbeat(self, label: str) -> None:
        claims = {claim for _ in range(2) if (claim := self._label(is_claim=True)) is not None}
        self._do("heartbeat", claims=sorted(claims))

    def _consumption(self, label: str) -> None:
        self._do("consumption", partition=self._partition(), tasks=self._some(tuple(WRITES), most=2))

    # ---- life cycle and reads

    def _clear(self, label: str) -> None:
        keys = self._some(KEYS, most=4)
        self._do("clear", partition=self._partition(), keys=keys + keys[: self.chance.random() < 0.1])

    def _clear_all(self, label: str) -> None:
        self._do("clear", partition=self._partition(), keys=None)

    def _read(self, label: str) -> None:
        partition, fields = self._partition(), self._some(FIELDS, most=2)
        known = self.checked.specification.partitions.get(partition)
        rows = known.rules.rows if known is not None else {}
        written = [key for key, row in rows.items() if row.cells.keys() >= set(fields)]
        self._do("read", partition=partition, fields=fields, keys=self._some(tuple(written) or KEYS, most=6))

    def _read_meta(self, label: str) -> None:
        meta = self._label(is_claim=False)
        if meta is not None:
            self._do("read", partition=self._partition(), fields=self._some(FIELDS, most=2), meta=meta)

    def _pass_time(self, label: str) -> None:
        self._do("pass_time", seconds=self.chance.choice([1.0, 4.0, 4.0, LEASE_S, LEASE_S + 1.0]))

    def _register(self, label: str) -> None:
        fields = list(FIELDS) if self.chance.random() < 0.9 else list(FIELDS[:2])
        size = self.chance.choice([None, 3])
        self._do("register", partition=self.chance.choice(PARTITIONS), group_size=size, num_samples=9, fields=fields)

    def _forget(self, label: str) -> None:
        # The first partition is rarely dropped: a history is about its rows.
        self._do("forget", partition=self.chance.choice(["q", "q", "q", "p"]))
        self._do("register", partition="p", group_size=self.chance.choice([None, 2, 3]), num_samples=len(KEYS))

    def _recover(self, label: str) -> None:
        if self.checked.recover is not None:
            self._do("recover")

    def _look(self, label: str) -> None:
        self._do("look")

    # ---- choices

    def _partition(self) -> str:
        return PARTITIONS[self.chance.random() < 0.05]

    def _some(self, of: Sequence[str], *, most: int) -> list[str]:
        return self.chance.sample(of, self.chance.randint(1, min(most, len(of))))

    def _label(self, *, is_claim: bool) -> str | None:
        """Return the label of a claim, or of any meta, that is among the last ones."""
        labels = list(self.checked.claims)[-NUM_REMEMBERED:]
        if not is_claim:
            labels += list(self.checked.metas)[-NUM_REMEMBERED:]
        return self.chance.choice(labels) if labels else None


def limits_of(chance: random.Random) -> dict[str, Any]:
    """Draw the limits of a ledger: what does not fit has to wait, or nothing has."""
    return {"max_rows": chance.choice([10, 24]), "max_bytes": chance.choice([None, 300, 600, 2000])}


def search(
    num_operations: int,
    *,
    seed: int,
    validate: bool = False,
    recover: Recover | None = None,
    tell: Callable[[str], None] | None = None,
) -> FoundDifference | None:
    """Run random histories; return the first difference, shrunk, or None when there is none."""
    done, number, counts = 0, 0, Counter[str]()
    with few_cleared_keys_remembered():
        while done < num_operations:
            chance = random.Random(f"{seed}/{number}")
            limits = limits_of(chance)
            drawn = RandomHistory(CheckedLedger(**limits, validate=validate, recover=recover), chance)
            try:
                drawn.run(min(HISTORY_OPERATIONS, num_operations - done))
            except Exception as error:  # noqa: BLE001 - whatever else the ledger raises is a difference too
                shows = partial(problem_of, limits=limits, validate=validate, recover=recover)
                history = shrink(drawn.history, lambda some: shows(some) is not None)  # noqa: B023 - used here
                return FoundDifference(
                    limits=limits,
                    history=history,
                    problem=shows(history) or f"only together with what came before: {error!r}",
                    found_after=f"{done + len(drawn.history)} random operations, seed {seed}",
                )
            done, number, counts = done + len(drawn.history), number + 1, counts + drawn.counts
    if tell is not None:
        tell(", ".join(f"{name} {count}" for name, count in counts.most_common()))
    return None


def shrink(history: Sequence[Operation], shows_it: Callable[[Sequence[Operation]], bool]) -> list[Operation]:
    """Remove operations while the history shows a difference: halves first, then smaller parts, then single ones."""
    kept, size = list(history), max(len(history) // 2, 1)
    while True:
        before, start = len(kept), 0
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if shows_it(rest):
                kept = rest
            else:
                start += size
        if size == 1 and len(kept) == before:
            return kept
        size = max(size // 2, 1)


def replay(path: Path) -> str | None:
    """Run a printed history; return the difference that it shows."""
    first, *rest = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    with few_cleared_keys_remembered():
        return problem_of([(name, arguments) for name, arguments in rest], first["limits"], validate=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("history", type=Path, help="a file with one JSON line per operation")
    problem = replay(parser.parse_args(arguments).history)
    print(problem or "no difference")
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
