"""Three clients of one data plane against a plain dict, over random histories, with a clock that the test moves.

What the model knows: rows with values, versions and lengths; which keys of a group were put; who holds which claim;
what is done. Metas go from client to client. Every answer and every refusal must be the model's, and the ledger checks
its invariants after each request. `test_planted_faults` plants faults and sees that they are found.
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
from nemo_rl.data_plane import ledger_state
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
KEYS = [f"u{group}_g{i}" for group in range(3) for i in range(3)]
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
client_index = st.sampled_from([0, 1, 2])


@dataclass
class ModelRow:
    values: dict[str, object] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    length: int | None = None


class DataPlaneHistory(RuleBasedStateMachine):
    """Puts, partial puts, rewrites, reads, claims, releases, writes under claims, clears and time."""

    host_kind = "in_process"
    validate = True
    metas = Bundle("metas")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.last_claim = 0
        self.rows: dict[str, ModelRow] = {}
        self.leases: dict[tuple[str, str], tuple[int, float]] = {}  # (task, key) -> claim, time it ends
        self.done: dict[tuple[str, str], int] = {}  # (task, key) -> claim it was done under, 0 for none
        self.highest: dict[tuple[str, str], int] = {}  # (key, family) -> highest version it ever had
        self.put_keys: dict[str, set[str]] = {}  # group -> keys put since it has live rows
        self.held: list[dict[tuple[str, str], int]] = [{}, {}, {}]  # client -> (task, key) -> claim
        self.max_remembered, ledger_state.MAX_REMEMBERED_KEYS = ledger_state.MAX_REMEMBERED_KEYS, 2
        self.clients = self.connect()

    def connect(self) -> list[LedgerClient]:
        service = LedgerService(build_ledger(CONFIG, run_id="r", validate=self.validate), clock=lambda: self.now)
        if self.host_kind == "socket":
            server = LedgerServer(service)
            hosts = [SocketLedgerHost(server.address, server=server if i == 0 else None) for i in range(3)]
        else:
            hosts = [InProcessHost(service, is_owner=i == 0) for i in range(3)]
        owned = NoopStore()
        address = DataPlaneAddress(run_id="r", config=CONFIG, ledger=hosts[0].address, process_id=1)
        stores = (owned, SharedNoopStore(owned), SharedNoopStore(owned))
        return [LedgerClient(host=h, store=s, address=address) for h, s in zip(hosts, stores, strict=True)]

    def teardown(self) -> None:
        ledger_state.MAX_REMEMBERED_KEYS = self.max_remembered
        for client in reversed(self.clients):
            client.close()

    @initialize(group_size=st.sampled_from([None, 2, 3]))
    def register(self, group_size: int | None) -> None:
        self.group_size = group_size
        fields = [name for name in FIELDS if name != "note"] + [extra_field("note", is_object=True)]
        for client in self.clients:
            client.register_partition(PARTITION, fields, len(KEYS), list(WRITES), group_size)
        # Claims need rows: a history starts with some.
        self.put(0, KEYS[:5], ["input_ids", "sample_mask"], 2, is_wrong=False, with_tags=True)

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
    def put(
        self,
        who: int,
        keys: list[str],
        names: list[str],
        length: int,
        is_wrong: bool,
        with_tags: bool,
        claimed: KVBatchMeta | None = None,
    ) -> object:
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
                self.clients[who].kv_batch_put(keys, PARTITION, columns, tags, claimed=claimed)
            return multiple()
        meta = self.clients[who].kv_batch_put(keys, PARTITION, columns, tags, claimed=claimed)
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
        for key in keys:
            self.put_keys.setdefault(key[:2], set()).add(key)
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

    @rule(who=client_index, meta=metas | claims.map(lambda claim: claim[1]), names=some_fields)
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

    @rule(
        target=claims,
        who=client_index,
        task=st.sampled_from(list(WRITES)),
        names=st.lists(st.sampled_from(["input_ids", "sample_mask"]), unique=True, min_size=1),
        count=st.integers(3, 6),
    )
    def claim(self, who: int, task: str, names: list[str], count: int) -> object:
        meta = self.clients[who].get_meta(PARTITION, task, names, count, consumer_id="c", blocking=False)
        assert list(meta.keys) == self.claimable(task, names, count)
        if not meta:
            return multiple()
        for family in {FAMILY[name] for name in names}:
            wanted = meta.versions[family]
            each = [wanted] * len(meta) if isinstance(wanted, int) else list(wanted)
            assert each == [self.rows[key].versions[family] for key in meta.keys]
        assert [dict(tags) for tags in meta.tags] == [self.rows[key].tags for key in meta.keys]
        (number,) = set(meta.claims)
        assert number > self.last_claim, "a claim id was used twice"
        self.last_claim = number
        for key in meta.keys:
            self.leases[task, key] = (number, self.now + LEASE_S)
            self.held[who][task, key] = number
        return task, meta

    @rule(target=claims, who=client_index, task=st.sampled_from(list(WRITES)))
    def let_a_claim_lapse_and_claim_again(self, who: int, task: str) -> object:
        first = self.claim(who, task, ["input_ids"], 6)
        self.now += 3100
        again = self.claim(who, task, ["input_ids"], 6)
        return multiple(*[claim for claim in (first, again) if isinstance(claim, tuple)])

    def claimable(self, task: str, names: list[str], count: int) -> list[str]:
        """The slow reference: rows, or groups of which all keys were put, in order of their first put."""
        if self.group_size is None:
            return [key for key in self.rows if self.is_free(task, key, names)][:count]
        picked: list[str] = []
        for uid in dict.fromkeys(key[:2] for key in self.rows if self.is_free(task, key, [])):
            left = [key for key in self.rows if key[:2] == uid and (task, key) not in self.done]
            is_complete = len(self.put_keys[uid]) >= self.group_size
            if not is_complete or not all(self.is_free(task, key, names) for key in left):
                continue
            if len(picked) + len(left) > count:
                break
            picked += left
        return picked

    def is_free(self, task: str, key: str, names: list[str]) -> bool:
        is_held = (task, key) in self.leases and self.leases[task, key][1] > self.now
        return not is_held and (task, key) not in self.done and all(name in self.rows[key].values for name in names)

    def has_lost(self, claim: int, at: tuple[str, str]) -> bool:
        if at in self.leases:
            return self.leases[at][0] != claim or self.leases[at][1] <= self.now
        return at not in self.done or self.done[at] not in (claim, 0)

    @rule(who=client_index, claim=claims, part=st.sampled_from([slice(None), slice(1), slice(1, None)]))
    def release(self, who: int, claim: tuple[str, KVBatchMeta], part: slice) -> None:
        """By whoever has the meta."""
        task, whole = claim
        meta = whole.subset(range(len(whole))[part])
        live = {(task, key): number for key, number in meta.claims_by_key().items() if key in self.rows}
        if any(self.has_lost(number, at) for at, number in live.items()):
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

    @rule(
        who=client_index,
        claim=claims,
        name=st.sampled_from(["prev_logprobs", "sample_mask"]),
        seconds=st.sampled_from([0.0, 3100.0]),
    )
    def write_under_claim(self, who: int, claim: tuple[str, KVBatchMeta], name: str, seconds: float) -> None:
        """By whoever has the meta."""
        self.now += seconds
        meta = claim[1]
        self.put(who, list(meta.keys), [name], 1, is_wrong=False, with_tags=False, claimed=meta)

    @rule(who=client_index, task=st.sampled_from(list(WRITES)))
    def ask_whether_all_is_consumed(self, who: int, task: str) -> None:
        is_done = all((task, key) in self.done or not self.is_free(task, key, []) for key in self.rows)
        assert self.clients[who].check_consumption_status(PARTITION, [task]) == is_done

    # ---- life cycle

    @rule(who=client_index, keys=st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    def clear_some(self, who: int, keys: list[str]) -> None:
        self.clear(who, keys)

    @rule(who=client_index, key=st.sampled_from(KEYS))
    def make_again(self, who: int, key: str) -> None:
        self.clear(who, [key])
        self.put(who, [key], ["input_ids", "sample_mask"], 1, is_wrong=False, with_tags=False)

    @rule(who=client_index, is_time=st.integers(0, 4).map(lambda n: n == 0))
    def clear_all(self, who: int, is_time: bool) -> None:
        if is_time:
            self.clear(who, None)

    def clear(self, who: int, keys: list[str] | None) -> None:
        self.clients[who].kv_clear(keys, PARTITION)
        for key in KEYS if keys is None else keys:
            self.rows.pop(key, None)
            if not any(other[:2] == key[:2] for other in self.rows):
                self.put_keys.pop(key[:2], None)
            for task in WRITES:
                self.leases.pop((task, key), None)
                self.done.pop((task, key), None)
                self.held[who].pop((task, key), None)

    @rule(seconds=st.sampled_from([100.0, 2000.0, 3100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @staticmethod
    def held_by(client: LedgerClient) -> dict[str, dict[str, int]]:
        return client._leases.held(PARTITION, KEYS)

    @invariant()
    def the_list_and_the_counts_agree(self) -> None:
        if not hasattr(self, "group_size"):
            return
        for client, held in zip(self.clients, self.held, strict=True):
            known = {(task, key): number for task, keys in self.held_by(client).items() for key, number in keys.items()}
            assert known == held, "the heartbeat of a claim ended, or goes on in vain"
        assert self.clients[1].kv_list(PARTITION) == {key: row.tags for key, row in self.rows.items()}
        stats = self.clients[0].stats()
        assert stats["live_rows"] == len(self.rows)
        assert (stats["live_bytes"] > 0) == (stats["live_chunks"] > 0) == any(r.values for r in self.rows.values())


class SocketHistory(DataPlaneHistory):
    """The same over the loopback socket."""

    host_kind = "socket"


DataPlaneHistory.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
SocketHistory.TestCase.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
test_clients_follow_the_model = DataPlaneHistory.TestCase
test_clients_over_a_socket_follow_the_model = SocketHistory.TestCase
