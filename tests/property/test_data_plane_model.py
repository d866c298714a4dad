"""Two clients of one data plane against a plain dict, over random histories, with a clock that the test moves.

What the model knows: rows with values, versions and lengths; who holds which claim; what is done. Every answer and
every refusal of the client must be the model's, and the ledger checks its invariants after each request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore, SharedNoopStore
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.client import LedgerClient
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.ledger_host import InProcessHost, LedgerService, build_ledger
from nemo_rl.data_plane.ledger_host_socket import LedgerServer, SocketLedgerHost
from nemo_rl.data_plane.ragged import nest
from nemo_rl.data_plane.schema import extra_field
from nemo_rl.errors import (
    DataPlaneError,
    FieldNotProduced,
    KeysNotFound,
    LeaseExpired,
    SchemaMismatch,
    VersionMismatch,
)
from tests.helpers.planes import rows_of

LEASE_S = 3000.0
"""On the test's clock; the real heartbeat, every third of it, never comes."""
CONFIG = DataPlaneConfig(impl="noop", timeout_s=20.0, lease_s=LEASE_S, chunk_bytes=48)
PARTITION = "p"
KEYS = [f"u{group}_g{i}" for group in range(3) for i in range(2)]
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

some_keys = st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=5)
some_fields = st.lists(st.sampled_from(FIELDS), unique=True, min_size=1, max_size=4)
client_index = st.sampled_from([0, 1])


@dataclass
class ModelRow:
    values: dict[str, object] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    length: int | None = None


class DataPlaneHistory(RuleBasedStateMachine):
    """Puts, partial puts, rewrites, reads, claims, releases, writes under claims, clears and time."""

    host_kind = "in_process"
    metas = Bundle("metas")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.rows: dict[str, ModelRow] = {}
        self.leases: dict[tuple[str, str], tuple[int, float]] = {}  # (task, key) -> claim, time it ends
        self.done: dict[tuple[str, str], int] = {}  # (task, key) -> claim it was done under, 0 for none
        self.highest: dict[tuple[str, str], int] = {}  # (key, family) -> highest version it ever had
        self.held: list[dict[tuple[str, str], int]] = [{}, {}]  # client -> (task, key) -> claim
        self.clients = self.connect()

    def connect(self) -> list[LedgerClient]:
        service = LedgerService(build_ledger(CONFIG, run_id="r", validate=True), clock=lambda: self.now)
        if self.host_kind == "socket":
            server = LedgerServer(service)
            hosts = [SocketLedgerHost(server.address, server=server), SocketLedgerHost(server.address)]
        else:
            hosts = [InProcessHost(service, is_owner=True), InProcessHost(service, is_owner=False)]
        owned = NoopStore()
        address = DataPlaneAddress(run_id="r", config=CONFIG, ledger=hosts[0].address, process_id=1)
        stores = (owned, SharedNoopStore(owned))
        return [LedgerClient(host=h, store=s, address=address) for h, s in zip(hosts, stores, strict=True)]

    def teardown(self) -> None:
        for client in reversed(self.clients):
            client.close()

    @initialize(group_size=st.sampled_from([None, None, 2]))
    def register(self, group_size: int | None) -> None:
        self.group_size = group_size
        fields = [name for name in FIELDS if name != "note"] + [extra_field("note", is_object=True)]
        for client in self.clients:
            client.register_partition(PARTITION, fields, len(KEYS), list(WRITES), group_size)
        # Claims need rows: a history starts with some.
        self.put(0, KEYS[:4], ["input_ids", "sample_mask"], 2, is_wrong=False, with_tags=True)

    # ---- writing

    @rule(
        target=metas,
        who=client_index,
        keys=some_keys,
        names=st.lists(st.sampled_from(FIELDS), unique=True, max_size=4),
        length=st.integers(0, 4),
        is_wrong=st.integers(0, 9).map(lambda n: n == 0),
        with_tags=st.booleans(),
    )
    def put(self, who: int, keys: list[str], names: list[str], length: int, is_wrong: bool, with_tags: bool) -> object:
        known = [self.rows[key].length if key in self.rows else None for key in keys]
        lengths = [(length + i) % 5 if old is None else old for i, old in enumerate(known)]
        is_ragged = any(name in RAGGED for name in names)
        if is_wrong:
            lengths[0] += 1
        refusal = self.refusal_of_put(who, keys, names, is_wrong_length=is_wrong and is_ragged and known[0] is not None)
        columns = {name: self.column(name, lengths) for name in names}
        tags = [{f"n{i % 2}": next(self.numbers)} for i in range(length, length + len(keys))] if with_tags else None
        if refusal is not None:
            with pytest.raises(refusal):
                self.clients[who].kv_batch_put(keys, PARTITION, columns, tags)
            return multiple()
        meta = self.clients[who].kv_batch_put(keys, PARTITION, columns, tags)
        self.check_versions(keys, names, dict(meta.versions))
        self.apply_put(keys, columns, lengths if is_ragged else None, tags, versions=dict(meta.versions))
        assert meta.keys == tuple(keys)
        self.finish_writers(who, keys, set(names))
        return meta

    def refusal_of_put(
        self, who: int, keys: list[str], names: list[str], *, is_wrong_length: bool
    ) -> type[DataPlaneError] | None:
        if is_wrong_length:
            return SchemaMismatch
        if any(self.has_lost(claim, at) for at, claim in self.held[who].items() if at[1] in keys):
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
        """A version names one content of a row's family for ever, and stays when a put adds a field to it."""
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

    @rule(who=client_index, keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=6), names=some_fields)
    def read(self, who: int, keys: list[str], names: list[str]) -> None:
        refusal = self.refusal_of_read(keys, names, versions={})
        if refusal is not None:
            with pytest.raises(refusal):
                self.clients[who].kv_batch_get(keys, PARTITION, names)
        else:
            self.check_rows(self.clients[who].kv_batch_get(keys, PARTITION, names), keys, names)

    @rule(who=client_index, meta=metas | claims.map(lambda claim: claim[2]), names=some_fields)
    def read_meta(self, who: int, meta: KVBatchMeta, names: list[str]) -> None:
        refusal = self.refusal_of_read(list(meta.keys), names, versions=dict(meta.versions))
        if refusal is not None:
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
        named = {FAMILY[name] for name in names} & versions.keys()
        is_other = any(self.rows[key].versions[family] != versions[family] for key in keys for family in named)
        return VersionMismatch if is_other else None

    def check_rows(self, rows: object, keys: list[str], names: list[str]) -> None:
        assert rows.batch_size[0] == len(keys) and list(rows.keys()) == names
        for name in names:
            column = rows.get(name)
            found = rows_of(column) if name in RAGGED else column.tolist()
            assert found == [self.rows[key].values[name] for key in keys]

    # ---- claims

    @rule(
        target=claims,
        who=client_index,
        task=st.sampled_from(list(WRITES)),
        names=st.lists(st.sampled_from(["input_ids", "sample_mask"]), unique=True, min_size=1),
        count=st.integers(2, 5),
    )
    def claim(self, who: int, task: str, names: list[str], count: int) -> object:
        meta = self.clients[who].get_meta(PARTITION, task, names, count, consumer_id="c", blocking=False)
        free = [key for key in self.rows if self.is_free(task, key, names)]
        assert set(meta.keys) <= set(free) and len(meta) <= count
        families = {FAMILY[name] for name in names}
        versions = {key: tuple(self.rows[key].versions[family] for family in sorted(families)) for key in free}
        if self.group_size is None:
            first = versions[free[0]] if free else ()
            assert list(meta.keys) == [key for key in free if versions[key] == first][:count]
        else:
            for key in meta.keys:
                uid = key[:2]
                group = {other for other in self.rows if other[:2] == uid and (task, other) not in self.done}
                assert group <= set(meta.keys), "a group was split"
        if not meta:
            return multiple()
        assert len({versions[key] for key in meta.keys}) == 1
        assert dict(meta.versions) == {family: self.rows[meta.keys[0]].versions[family] for family in families}
        assert [dict(tags) for tags in meta.tags] == [self.rows[key].tags for key in meta.keys]
        number = next(self.numbers)
        for key in meta.keys:
            self.leases[task, key] = (number, self.now + LEASE_S)
            self.held[who][task, key] = number
        return who, task, meta

    def is_free(self, task: str, key: str, names: list[str]) -> bool:
        is_held = (task, key) in self.leases and self.leases[task, key][1] > self.now
        return not is_held and (task, key) not in self.done and all(name in self.rows[key].values for name in names)

    def has_lost(self, claim: int, at: tuple[str, str]) -> bool:
        if at in self.leases:
            return self.leases[at][0] != claim or self.leases[at][1] <= self.now
        return at not in self.done or self.done[at] not in (claim, 0)

    @rule(claim=claims)
    def release(self, claim: tuple[int, str, KVBatchMeta]) -> None:
        who, task, meta = claim
        live = [(task, key) for key in meta.keys if key in self.rows]
        held = self.held[who]
        lost = [at for at in live if at in held and self.has_lost(held[at], at)]
        unclaimed = [at for at in live if at not in self.done and self.leases.get(at, (0, 0.0))[1] <= self.now]
        if lost or unclaimed:
            with pytest.raises(LeaseExpired):
                self.clients[who].release(meta)
        else:
            self.clients[who].release(meta)
            for at in live:
                if at not in self.done:
                    self.done[at] = self.leases.pop(at)[0]
        for key in meta.keys:
            held.pop((task, key), None)

    @rule(claim=claims, name=st.sampled_from(["prev_logprobs", "sample_mask"]), seconds=st.sampled_from([0.0, 3100.0]))
    def write_under_claim(self, claim: tuple[int, str, KVBatchMeta], name: str, seconds: float) -> None:
        who, _, meta = claim
        self.now += seconds
        self.put(who, list(meta.keys), [name], 1, is_wrong=False, with_tags=False)

    @rule(who=client_index, task=st.sampled_from(list(WRITES)))
    def ask_whether_all_is_consumed(self, who: int, task: str) -> None:
        is_done = all((task, key) in self.done or not self.is_free(task, key, []) for key in self.rows)
        assert self.clients[who].check_consumption_status(PARTITION, [task]) == is_done

    # ---- life cycle

    @rule(who=client_index, keys=st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    def clear_some(self, who: int, keys: list[str]) -> None:
        self.clear(who, keys)

    @rule(who=client_index, is_time=st.integers(0, 4).map(lambda n: n == 0))
    def clear_all(self, who: int, is_time: bool) -> None:
        if is_time:
            self.clear(who, None)

    def clear(self, who: int, keys: list[str] | None) -> None:
        self.clients[who].kv_clear(keys, PARTITION)
        for key in KEYS if keys is None else keys:
            self.rows.pop(key, None)
            for task in WRITES:
                self.leases.pop((task, key), None)
                self.done.pop((task, key), None)
                self.held[who].pop((task, key), None)

    @rule(seconds=st.sampled_from([100.0, 2000.0, 3100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_list_and_the_counts_agree(self) -> None:
        if not hasattr(self, "group_size"):
            return
        assert self.clients[1].kv_list(PARTITION) == {key: row.tags for key, row in self.rows.items()}
        stats = self.clients[0].stats()
        assert stats["live_rows"] == len(self.rows)
        assert (stats["live_bytes"] > 0) == (stats["live_chunks"] > 0) == any(r.values for r in self.rows.values())


class SocketHistory(DataPlaneHistory):
    """The same over the loopback socket."""

    host_kind = "socket"


DataPlaneHistory.TestCase.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
SocketHistory.TestCase.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
test_two_clients_follow_the_model = DataPlaneHistory.TestCase
test_two_clients_over_a_socket_follow_the_model = SocketHistory.TestCase
