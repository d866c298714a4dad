"""A plain dict besides a data plane: says what every answer and every refusal must be, and compares.

What it knows: rows with values, versions and lengths; which keys of a group were put; who holds which claim; what is
done. The property test calls it with a clock of its own, the stress run with clients of real stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
import torch

from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.schema import extra_field
from nemo_rl.errors import (
    DataPlaneError,
    FieldNotProduced,
    KeysNotFound,
    LeaseExpired,
    SchemaMismatch,
    VersionMismatch,
)
from nemo_rl.jagged import nest
from tests.helpers.data_plane_peers import Peer
from tests.helpers.data_planes import rows_of

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


def group_of(key: str) -> str:
    return key.partition("_")[0]


@dataclass
class ModelRow:
    values: dict[str, object] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    length: int | None = None


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
        self._lease_s, self._clock = lease_s, clock
        self.numbers = itertools.count(1)
        self.num_refused = 0
        self.last_claim = 0
        self.rows: dict[str, ModelRow] = {}
        self.leases: dict[tuple[str, str], tuple[int, float]] = {}  # (task, key) -> claim, time it ends
        self.done: dict[tuple[str, str], int] = {}  # (task, key) -> claim it was done under, 0 for none
        self.highest: dict[tuple[str, str], int] = {}  # (key, family) -> highest version it ever had
        self.put_keys: dict[str, set[str]] = {}  # group -> keys put since it has live rows
        self.held: list[dict[tuple[str, str], int]] = [{} for _ in clients]  # client -> (task, key) -> claim
        fields = [name for name in FIELDS if name != "note"] + [extra_field("note", is_object=True)]
        for client in clients:
            client.register_partition(partition, fields, len(keys), list(WRITES), group_size)

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
        is_ragged = any(name in RAGGED for name in names)
        if is_wrong:
            lengths[0] += 1
        claims = {at: claim for at, claim in self.held[who].items() if at[1] in keys}
        if claimed is not None:
            claims |= {(claimed.task_name, key): claim for key, claim in claimed.claims_by_key().items()}
        is_wrong = is_wrong and is_ragged and known[0] is not None
        refusal = self.refusal_of_put(keys, names, claims, is_wrong_length=is_wrong)
        columns = {name: self.column(name, lengths) for name in names}
        tags = [{f"n{i % 2}": next(self.numbers)} for i in range(length, length + len(keys))] if with_tags else None
        if refusal is not None:
            with pytest.raises(refusal):
                self.clients[who].kv_batch_put(keys, self.partition, columns, tags, claimed=claimed)
            self.num_refused += 1
            return None
        meta = self.clients[who].kv_batch_put(keys, self.partition, columns, tags, claimed=claimed)
        self.check_versions(keys, names, dict(meta.versions))
        self.apply_put(keys, columns, lengths if is_ragged else None, tags, versions=dict(meta.versions))
        assert meta.keys == tuple(keys)
        self.finish_writers(who, keys, set(names))
        return meta

    def refusal_of_put(
        self, keys: list[str], names: list[str], claims: dict[tuple[str, str], int], *, is_wrong_length: bool
    ) -> type[DataPlaneError] | None:
        if is_wrong_length:
            return SchemaMismatch
        if any(self.has_lost(claim, at) for at, claim in claims.items()):
            return LeaseExpired
        may_create = any(name != "prev_logprobs" for name in names)
        return KeysNotFound if not may_create and any(key not in self.rows for key in keys) else None

    def column(self, name: str, lengths: list[int]) -> object:
        if name == "sample_mask":
            return torch.tensor([float(next(self.numbers)) for _ in lengths])
        if name == "note":
            return [{"n": next(self.numbers)} for _ in lengths]
        values = [float(next(self.numbers)) for _ in range(sum(lengths))]
        if name == "token_mask":
            values = [value % 2 for value in values]
        return nest(torch.tensor(values).to(DTYPES[name]), torch.tensor(lengths))

    def check_versions(self, keys: list[str], names: list[str], versions: dict[str, int]) -> None:
        """Check that a version names one content of a row's family for ever, and stays when a put adds a field."""
        assert versions.keys() == {FAMILY[name] for name in names}
        for family, version in versions.items():
            added = {name for name in names if FAMILY[name] == family}
            rows = [self.rows.get(key, ModelRow()) for key in keys]
            before = {row.versions.get(family, 0) for row in rows}
            is_addition = not any(added & row.values.keys() for row in rows)
            if is_addition and len(before) == 1 and before != {0}:
                assert {version} == before
            for key, row in zip(keys, rows, strict=True):
                is_same = not added & row.values.keys() and version == row.versions.get(family)
                assert is_same or version > self.highest.get((key, family), 0), "an old meta could match new rows"
                self.highest[key, family] = version

    def apply_put(
        self,
        keys: list[str],
        columns: dict,
        lengths: list[int] | None,
        tags: list[dict] | None,
        *,
        versions: dict[str, int],
    ) -> None:
        for key in keys:
            self.put_keys.setdefault(group_of(key), set()).add(key)
        rows = [self.rows.setdefault(key, ModelRow()) for key in keys]
        for i, row in enumerate(rows):
            row.versions.update(versions)
            row.length = row.length if lengths is None else lengths[i]
            row.tags.update({} if tags is None else tags[i])
            for name, column in columns.items():
                row.values[name] = (
                    rows_of(column)[i]
                    if isinstance(column, torch.Tensor) and name in RAGGED
                    else (column[i].item() if isinstance(column, torch.Tensor) else column[i])
                )

    def finish_writers(self, who: int, keys: list[str], names: set[str]) -> None:
        for task, writes in WRITES.items():
            if writes and writes <= names:
                for key in keys:
                    self.held[who].pop((task, key), None)
                    if (task, key) not in self.done:
                        self.done[task, key] = self.leases.pop((task, key), (0, 0.0))[0]

    # ---- reading

    def read(self, who: int, keys: list[str], names: list[str]) -> None:
        refusal = self.refusal_of_read(keys, names, versions={})
        if refusal is not None:
            self.num_refused += 1
            with pytest.raises(refusal):
                self.clients[who].kv_batch_get(keys, self.partition, names)
        else:
            self.check_rows(self.clients[who].kv_batch_get(keys, self.partition, names), keys, names)

    def read_meta(self, who: int, meta: KVBatchMeta, names: list[str]) -> None:
        refusal = self.refusal_of_read(list(meta.keys), names, versions=dict(meta.versions))
        if refusal is not None:
            self.num_refused += 1
            with pytest.raises(refusal):
                self.clients[who].get_data(meta, names)
        else:
            self.check_rows(self.clients[who].get_data(meta, names), list(meta.keys), names)

    def refusal_of_read(
        self, keys: list[str], names: list[str], *, versions: dict[str, int]
    ) -> type[DataPlaneError] | None:
        if any(key not in self.rows for key in keys):
            return KeysNotFound
        if any(name not in self.rows[key].values for key in keys for name in names):
            return FieldNotProduced
        for family in {FAMILY[name] for name in names} & versions.keys():
            wanted = versions[family]
            each = [wanted] * len(keys) if isinstance(wanted, int) else wanted
            if [self.rows[key].versions[family] for key in keys] != list(each):
                return VersionMismatch
        return None

    def check_rows(self, rows: object, keys: list[str], names: list[str]) -> None:
        assert rows.batch_size[0] == len(keys) and list(rows.keys()) == names
        for name in names:
            column = rows.get(name)
            found = rows_of(column) if name in RAGGED else column.tolist()
            assert found == [self.rows[key].values[name] for key in keys]

    # ---- claims

    def claim(self, who: int, task: str, names: list[str], count: int) -> Claim | None:
        meta = self.clients[who].get_meta(self.partition, task, names, count, consumer_id="c", blocking=False)
        assert list(meta.keys) == self.claimable(task, names, count)
        if not meta:
            return None
        for family in {FAMILY[name] for name in names}:
            wanted = meta.versions[family]
            each = [wanted] * len(meta) if isinstance(wanted, int) else list(wanted)
            assert each == [self.rows[key].versions[family] for key in meta.keys]
        assert [dict(tags) for tags in meta.tags] == [self.rows[key].tags for key in meta.keys]
        (number,) = set(meta.claims)
        assert number > self.last_claim, "a claim id was used twice"
        self.last_claim = number
        for key in meta.keys:
            self.leases[task, key] = (number, self._clock() + self._lease_s)
            self.held[who][task, key] = number
        return task, meta

    def claimable(self, task: str, names: list[str], count: int) -> list[str]:
        """Return the claimable rows: single rows, or groups of which all keys were put, in order of their first put."""
        if self.group_size is None:
            return [key for key in self.rows if self.is_free(task, key, names)][:count]
        picked: list[str] = []
        for uid in dict.fromkeys(group_of(key) for key in self.rows if self.is_free(task, key, [])):
            left = [key for key in self.rows if group_of(key) == uid and (task, key) not in self.done]
            is_complete = len(self.put_keys[uid]) >= self.group_size
            if not is_complete or not all(self.is_free(task, key, names) for key in left):
                continue
            if len(picked) + len(left) > count:
                break
            picked += left
        return picked

    def is_free(self, task: str, key: str, names: list[str]) -> bool:
        is_held = (task, key) in self.leases and self.leases[task, key][1] > self._clock()
        return not is_held and (task, key) not in self.done and all(name in self.rows[key].values for name in names)

    def has_lost(self, claim: int, at: tuple[str, str]) -> bool:
        if at in self.leases:
            return self.leases[at][0] != claim or self.leases[at][1] <= self._clock()
        return at not in self.done or self.done[at] not in (claim, 0)

    def release(self, who: int, claim: Claim, part: slice) -> None:
        """Release a part of a claim from any client that has the meta."""
        task, whole = claim
        meta = whole.subset(range(len(whole))[part])
        live = {(task, key): number for key, number in meta.claims_by_key().items() if key in self.rows}
        if any(self.has_lost(number, at) for at, number in live.items()):
            self.num_refused += 1
            with pytest.raises(LeaseExpired):
                self.clients[who].release(meta)
        else:
            self.clients[who].release(meta)
            for at in live:
                if at not in self.done:
                    self.done[at] = self.leases.pop(at)[0]
        for key, number in meta.claims_by_key().items():
            if self.held[who].get((task, key)) == number:
                del self.held[who][task, key]

    def write_under_claim(self, who: int, claim: Claim, name: str) -> KVBatchMeta | None:
        """Write a column under a claim from any client that has the meta."""
        keys = list(claim[1].keys)
        return self.put(who, keys, [name], 1, is_wrong=False, with_tags=False, claimed=claim[1])

    def ask_whether_all_is_consumed(self, who: int, task: str) -> None:
        is_done = all((task, key) in self.done or not self.is_free(task, key, []) for key in self.rows)
        assert self.clients[who].check_consumption_status(self.partition, [task]) == is_done

    # ---- life cycle

    def clear(self, who: int, keys: list[str] | None) -> None:
        self.clients[who].kv_clear(keys, self.partition)
        for key in self.keys if keys is None else keys:
            self.rows.pop(key, None)
            if not any(group_of(other) == group_of(key) for other in self.rows):
                self.put_keys.pop(group_of(key), None)
            for task in WRITES:
                self.leases.pop((task, key), None)
                self.done.pop((task, key), None)
                self.held[who].pop((task, key), None)

    def check_list_and_counts(self) -> None:
        """No other partition may have rows."""
        assert self.clients[1].kv_list(self.partition) == {key: row.tags for key, row in self.rows.items()}
        stats = self.clients[0].stats()
        assert stats["live_rows"] == len(self.rows)
        assert (stats["live_bytes"] > 0) == (stats["live_chunks"] > 0) == any(r.values for r in self.rows.values())
