"""Corrupts what a store gives back, byte by byte, and counts what the readers find.

    python -m tests.helpers.corrupt_payloads [--trials 10000] [--stores shm,transfer_queue,mooncake] [--seed 0]

Each trial reads all columns of all rows through a client whose store flips a bit, cuts or exchanges payloads, or gives
an earlier one of the same place. Every read must end with `PayloadCorrupt` that names the column and a row in it, and
the next read must be right. Exit code 1 when one does not.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_rl.data_plane.adapters.noop import NoopStore
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.interfaces import KVBatchMeta, Parts
from nemo_rl.errors import PayloadCorrupt
from nemo_rl.jagged import nest
from tests.helpers.data_planes import open_plane, ray_cluster

FIELDS = ("input_ids", "token_mask", "generation_logprobs", "sample_mask")
FAULTS = ("flip", "flip", "flip", "flip", "cut", "exchange", "stale")
"""Kinds of corruption, and how often each is drawn."""
ROWS = 24


class CorruptingStore:
    """A store of which one answer is corrupted, once or each time."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.corrupt: Callable[[list[Parts]], list[Parts]] | None = None
        self.seen: list[Parts] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, chunk_ids: Sequence[str], **how: Any) -> list[Parts]:
        found = self._store.get(chunk_ids, **how)
        self.seen = found
        return found if self.corrupt is None else self.corrupt(found)


class BlockStore(NoopStore):
    """The store of this process, with chunks cut into blocks as TransferQueue has them."""

    block_bytes = 96


@dataclass
class Trials:
    """One batch in one store, read again and again."""

    client: LedgerClient
    partition: str
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = CorruptingStore(self.client._link.store)
        self.client._link.store = self.store  # type: ignore[assignment]
        self._earlier = self._put(seed=1)
        self.client.get_data(self._earlier, FIELDS)
        self._stale = [[bytes(part) for part in parts] for parts in self.store.seen]
        self.client.kv_clear(None, self.partition)
        self.meta = self._put(seed=2)
        self.expected = self._sums()

    def run(self, count: int) -> None:
        for number in range(count):
            kind = self.chance.choice(FAULTS)
            self.store.corrupt = self._planted(kind, is_transient=bool(self.chance.randrange(2)))
            try:
                self.client.get_data(self.meta, FIELDS)
            except PayloadCorrupt as error:
                text = str(error)
                if not any(key in text for key in self.meta.keys) or "field" not in text or "changed" not in text:
                    self.problems.append(f"trial {number}, {kind}: no row, field or hop in {text}")
            except Exception as error:  # noqa: BLE001 - whatever else comes is a finding
                self.problems.append(f"trial {number}, {kind}: {type(error).__name__}: {error}")
            else:
                self.problems.append(f"trial {number}, {kind}: not found")
            self.counts[kind] += 1
            self.store.corrupt = None
            if number % 100 == 0 and self._sums() != self.expected:
                self.problems.append(f"trial {number}, {kind}: a later read is wrong")

    def _put(self, *, seed: int) -> KVBatchMeta:
        draws = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 40, (ROWS,), generator=draws)
        total = int(lengths.sum())
        columns = {
            "input_ids": nest(torch.randint(0, 999, (total,), generator=draws, dtype=torch.int32), lengths),
            "token_mask": nest(torch.randint(0, 2, (total,), generator=draws).bool(), lengths),
            "generation_logprobs": nest(torch.randn(total, generator=draws), lengths),
            "sample_mask": torch.rand(ROWS, generator=draws),
        }
        return self.client.kv_batch_put([f"u{i}_g0" for i in range(ROWS)], self.partition, columns)

    def _sums(self) -> list[float]:
        rows = self.client.get_data(self.meta, FIELDS)
        return [float((c.values() if c.is_nested else c).double().sum()) for c in map(rows.get, FIELDS)]

    def _planted(self, kind: str, *, is_transient: bool) -> Callable[[list[Parts]], list[Parts]]:
        """Return the corruption of the next answer, or of every one."""
        draw, left = random.Random(self.chance.random()), [1 if is_transient else 1 << 30]

        def corrupt(found: list[Parts]) -> list[Parts]:
            if not left[0]:
                return found
            left[0] -= 1
            answers = [[bytearray(part) for part in parts] for parts in found]
            if kind == "exchange" and len(answers) > 1:
                # Payloads of one length may be the same: every one gets another's place.
                answers = answers[1:] + answers[:1]
            elif kind == "stale":
                answers = [[bytearray(part) for part in parts] for parts in self._stale[: len(answers)]]
            else:
                parts = draw.choice([parts for parts in answers if any(parts)])
                part = draw.choice([part for part in parts if part])
                at = draw.randrange(len(part))
                if kind == "cut":
                    del part[at:]
                else:
                    part[at] ^= 1 << draw.randrange(8)
            return [[memoryview(bytes(part)) for part in parts] for parts in answers]

        return corrupt


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, help="over all stores together")
    parser.add_argument("--stores", default="shm,transfer_queue,mooncake")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = options.stores.split(",")
    problems: list[str] = []
    needs_ray = any(name.startswith(("ray", "transfer_queue")) for name in names)
    with ray_cluster() if needs_ray else nullcontext():
        for name in names:
            with open_plane(name, checksums=True, validate=False) as plane:
                assert isinstance(plane.owner, LedgerClient)
                trials = Trials(plane.owner, plane.partition(FIELDS), random.Random(options.seed))
                trials.run(options.trials // len(names))
                print(
                    f"{name}: {sum(trials.counts.values())} corruptions {dict(trials.counts)}, "
                    f"{len(trials.problems)} not found as they must be"
                )
                problems += trials.problems
    for problem in problems[:20]:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
