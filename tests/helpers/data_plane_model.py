"""The rules of a partition besides a data plane: says what every answer and every refusal must be, and compares.

The rules are those of `ledger_rules`; the model adds the values of rows and the claims that each client holds. The
property test calls it with its own clock, the stress run with clients of real stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import pytest
import torch

from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.schema import extra_field
from nemo_rl.errors import DataPlaneError
from nemo_rl.jagged import nest
from tests.helpers.data_plane_peers import Peer
from tests.helpers.data_planes import rows_of
from tests.helpers.ledger_rules import PartitionRules, RowState

FAMILY = {
    "input_ids": "tokens",
    "token_mask": "tokens",
    "sample_mask": "sample_mask",
    "prev_logprobs": "prev_logprobs",
    "note": "extras",
}
FIELDS = list(FAMILY)
RAGGED = ("input_ids", "token_mask", "prev_logprobs")
DTYPES = {"input_ids": torch.int32, "token_mask": torch.bool, "prev_logprobs": torch.float32}
WRITES = {"prev_lp": {"prev_logprobs"}, "train": set()}
Claim: TypeAlias = tuple[str, KVBatchMeta]
"""A task, and what was claimed for it."""


def keys_in_groups(num_groups: int) -> list[str]:
    """Three keys a group."""
    return [f"u{group}_g{i}" for group in range(num_groups) for i in range(3)]


class PlaneModel:
    """One partition of a data plane; every method does something to it through a client, and checks the outcome.

    Args:
        clients: of the same data plane; `who` is the index of one of them.
        partition: its name; every client registers it.
        keys: of all rows that there may be.
        group_size: of the partition.
        lease_s: how long a claim lasts on the clock.
        clock: of the ledger; without it no claim ends by itself.
    """

    def __init__(
        self,
        clients: Sequence[DataPlaneClient | Peer],
        *,
        partition: str,
        keys: Sequence[str],
        group_size: int | None,
        lease_s: float,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.clients, self.partition, self.keys, self.group_size = clients, partition, keys, group_size
        self._clock = clock
        self.numbers = itertools.count(1)
        self.num_refused = 0
        self.last_claim = 0
        self.rules = PartitionRules(families=FAMILY, writes=WRITES, group_size=group_size, lease_s=lease_s)
        self.held: list[dict[tuple[str, str], int]] = [{} for _ in clients]  # client -> (task, key) -> claim
        fields = [name for name in FIELDS if name != "note"] + [extra_field("note", is_object=True)]
        for client in clients:
            client.register_partition(partition, fields, len(keys), list(WRITES), group_size)

    @property
    def rows(self) -> dict[str, RowState]:
        return self.rules.rows

    def refuses(self, check: Callable[[], object], ask: Callable[[], object]) -> bool:
        """Return whether the rules refuse what is asked for; then the client must refuse it with the same error."""
        try:
            check()
        except DataPlaneError as refusal:
            self.num_refused += 1
            with pytest.raises(type(refusal)):
                ask()
            return True
        return False

    # ---- writing

    def put(
        self,
        who: int,
        keys: list[str],
        names: list[str],
        length: int,
        is_wrong: bool,
        with_tags: bool,
        claimed: KVBatchMeta | None = None,
    ) -> KVBatchMeta | None:
        """Rows of `length`, `length` + 1, ... tokens, or of the length that they have; None when it is refused."""
        known = [self.rows[key].length if key in self.rows else None for key in keys]
        lengths = [(length + i) % 5 if old is None else old for i, old in enumerate(known)]
        if is_wrong:
            lengths[0] += 1
        is_ragged = any(name in RAGGED for name in names)
        told = {"lengths": lengths if is_ragged else None, "may_create": any(name != "prev_logprobs" for name in names)}
        columns = {name: self.column(name, lengths) for name in names}
        tags = [{f"n{i % 2}": next(self.numbers)} for i in range(length, length + len(keys))] if with_tags else None
        put = partial(self.clients[who].kv_batch_put, keys, self.partition, columns, tags, claimed=claimed)
        claims = self.claims_of(who, keys, claimed)
        if self.refuses(lambda: self.rules.check_put(keys, **told, claims=claims, now=self._clock()), put):
            return None
        meta = put()
        assert meta.keys == tuple(keys)
        self.rules.check_versions(keys, names, dict(meta.versions))
        cells = {name: self.values_of(name, column) for name, column in columns.items()}
        self.rules.put(keys, cells, dict(meta.versions))
        for i, key in enumerate(keys):
            row = self.rows[key]
            row.length = lengths[i] if is_ragged else row.length
            row.tags.update({} if tags is None else tags[i])
        for task, writes in WRITES.items():
            if writes and writes <= set(names):
                for key in keys:
                    self.held[who].pop((task, key), None)
        return meta

    def claims_of(self, who: int, keys: list[str], claimed: KVBatchMeta | None) -> dict[str, dict[str, int]]:
        """Return task -> key -> claim of a put: those that the client holds, and those of the meta that it names."""
        claims: dict[str, dict[str, int]] = {}
        for (task, key), number in self.held[who].items():
            if key in keys:
                claims.setdefault(task, {})[key] = number
        if claimed is not None:
            claims.setdefault(claimed.task_name or "", {}).update(claimed.claims_by_key())
        return claims

    def column(self, name: str, lengths: list[int]) -> object:
        if name == "sample_mask":
            return torch.tensor([float(next(self.numbers)) for _ in lengths])
        if name == "note":
            return [{"n": next(self.numbers)} for _ in lengths]
        values = [float(next(self.numbers)) for _ in range(sum(lengths))]
        if name == "token_mask":
            values = [value % 2 for value in values]
        return nest(torch.tensor(values).to(DTYPES[name]), torch.tensor(lengths))

    def values_of(self, name: str, column: object) -> list[object]:
        """Return the value of each row of a column."""
        if not isinstance(column, torch.Tensor):
            return list(column)
        return rows_of(column) if name in RAGGED else column.tolist()

    # ---- reading

    def read(self, who: int, keys: list[str], names: list[str]) -> None:
        get = partial(self.clients[who].kv_batch_get, keys, self.partition, names)
        if not self.refuses(lambda: self.rules.check_read(keys, names, {}), get):
            self.check_rows(get(), keys, names)

    def read_meta(self, who: int, meta: KVBatchMeta, names: list[str]) -> None:
        keys, get = list(meta.keys), partial(self.clients[who].get_data, meta, names)
        if not self.refuses(lambda: self.rules.check_read(keys, names, meta.versions), get):
            self.check_rows(get(), keys, names)

    def check_rows(self, rows: object, keys: list[str], names: list[str]) -> None:
        assert rows.batch_size[0] == len(keys) and list(rows.keys()) == names
        for name in names:
            column = rows.get(name)
            found = rows_of(column) if name in RAGGED else column.tolist()
            assert found == [self.rows[key].cells[name] for key in keys]

    # ---- claims

    def claim(self, who: int, task: str, names: list[str], count: int) -> Claim | None:
        meta = self.clients[who].get_meta(self.partition, task, names, count, consumer_id="c", blocking=False)
        assert list(meta.keys) == self.rules.claimable(task, names, count, now=self._clock())
        if not meta:
            return None
        for family in {FAMILY[name] for name in names}:
            wanted = meta.versions[family]
            each = [wanted] * len(meta) if isinstance(wanted, int) else list(wanted)
            assert each == self.rules.versions_of(meta.keys, family)
        assert [dict(tags) for tags in meta.tags] == [self.rows[key].tags for key in meta.keys]
        (number,) = set(meta.claims)
        assert number > self.last_claim, "a claim id was used twice"
        self.last_claim = number
        self.rules.lease(task, meta.keys, number, self._clock())
        self.held[who].update({(task, key): number for key in meta.keys})
        return task, meta

    def release(self, who: int, claim: Claim, part: slice) -> None:
        """Release a part of a claim from any client that has the meta."""
        task, whole = claim
        meta = whole.subset(range(len(whole))[part])
        release, claims = partial(self.clients[who].release, meta), meta.claims_by_key()
        if not self.refuses(lambda: self.rules.release(task, meta.keys, claims, self._clock()), release):
            release()
        for key, number in meta.claims_by_key().items():
            if self.held[who].get((task, key)) == number:
                del self.held[who][task, key]

    def write_under_claim(self, who: int, claim: Claim, name: str) -> KVBatchMeta | None:
        """Write a column under a claim from any client that has the meta."""
        keys = list(claim[1].keys)
        return self.put(who, keys, [name], 1, is_wrong=False, with_tags=False, claimed=claim[1])

    def ask_whether_all_is_consumed(self, who: int, task: str) -> None:
        is_done = self.clients[who].check_consumption_status(self.partition, [task])
        assert is_done == self.rules.is_consumed(task, self._clock())

    # ---- life cycle

    def clear(self, who: int, keys: list[str] | None) -> None:
        self.clients[who].kv_clear(keys, self.partition)
        self.rules.clear(keys)
        for at in [at for at in self.held[who] if keys is None or at[1] in keys]:
            del self.held[who][at]

    def check_list_and_counts(self) -> None:
        """No other partition may have rows."""
        assert self.clients[1].kv_list(self.partition) == {key: row.tags for key, row in self.rows.items()}
        stats = self.clients[0].stats()
        assert stats["live_rows"] == len(self.rows)
        assert (stats["live_bytes"] > 0) == (stats["live_chunks"] > 0) == any(r.cells for r in self.rows.values())
