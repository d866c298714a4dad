"""The ledger against a plain model, over random histories; its invariants are checked after every transition."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from nemo_rl.data_plane.ledger.ledger import Ledger
from nemo_rl.data_plane.schema import FIELDS as FieldTable
from nemo_rl.data_plane.schema import resolve_fields, spec_to_record
from tests.helpers.case_selection import num_examples

LEASE_S = 10.0
CAPACITY = 24
CAPACITY_BYTES = 600
HEADER_BYTES = 5
KEYS = [f"u{group}_g{i}" for group in range(5) for i in range(3)]
FIELDS = ["input_ids", "token_mask", "sample_mask", "prev_logprobs"]
FAMILIES = {name: FieldTable[name].family for name in FIELDS}
"""The first two travel in one family, the others in families of their own."""


class LedgerHistory(RuleBasedStateMachine):
    """Puts, rewrites, claims by two consumers, releases, clears and time."""

    claims = Bundle("claims")
    validate = True

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(
            run_id="r",
            capacity_rows=CAPACITY,
            capacity_bytes=CAPACITY_BYTES,
            lease_s=LEASE_S,
            validate=self.validate,
        )
        self.now = 0.0
        self.ids = itertools.count()
        self.rows: dict[str, dict[str, int]] = {}  # key -> field -> value of its latest put
        self.chunks: dict[str, list[tuple[str, str, int]]] = {}  # chunk -> rows (key, field, value)
        self.sizes: dict[int, int] = {}  # value -> bytes of its row
        self.versions: dict[tuple[str, str], int] = {}  # key, family -> highest version ever seen
        self.spent: dict[tuple[str, str], int] = {}  # key, family -> highest version when it was last cleared
        self.done: dict[str, int] = {}  # key -> claim it was released under
        self.holders: dict[str, tuple[int, float]] = {}  # key -> claim, time it expires

    def ask(self, op: str, **args: object) -> dict:
        return self.ledger.handle({"run": "r", "op": op, "args": {"partition": "p", **args}}, now=self.now)

    @initialize(group_size=st.none() | st.just(3))
    def register(self, group_size: int | None) -> None:
        self.group_size = group_size
        fields = [spec_to_record(spec) for spec in resolve_fields(FIELDS)]
        reply = self.ask(
            "register", fields=fields, num_samples=CAPACITY, tasks=["t"], task_writes={"t": []}, group_size=group_size
        )
        assert "ok" in reply

    @rule(
        keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=6),
        field=st.sampled_from(FIELDS),
        size=st.sampled_from([1, 1, 20, 90]),
        is_ragged=st.booleans(),
    )
    def put(self, keys: list[str], field: str, size: int, is_ragged: bool) -> None:
        family = FAMILIES[field]
        half = (len(keys) + 1) // 2
        spans = [(0, half), (half, len(keys) - half)] if len(keys) > 1 else [(0, 1)]
        values = {key: next(self.ids) for key in keys}
        chunks = []
        for first, count in spans:
            chunk_id = f"c{next(self.ids)}"
            sizes = [size + i * is_ragged for i in range(first, first + count)]
            table = {field: np.array(sizes, dtype=np.uint64).tobytes()} if is_ragged else {}
            chunks.append(
                {"id": chunk_id, "family": family, "fields": [field], "first": first, "rows": count, "column_types": {}}
                | {"nbytes": HEADER_BYTES + sum(sizes), "sizes": [sum(sizes)], "row_sizes": table}
            )
        nbytes, before = sum(chunk["nbytes"] for chunk in chunks), self.live_bytes()
        reply = self.ask(
            "commit", keys=keys, lengths=None, tags=None, chunks=chunks, claims={}, may_create=field != "prev_logprobs"
        )
        if field == "prev_logprobs" and any(key not in self.rows for key in keys):
            assert reply["error"]["kind"] == "KeysNotFound"
            return
        if nbytes > CAPACITY_BYTES:
            assert reply["error"]["kind"] == "CapacityExceeded"
            return
        assert ("blocked" in reply["ok"]) == (before + nbytes > CAPACITY_BYTES), (
            "a put waits for nothing, or not at all"
        )
        if "blocked" in reply["ok"]:
            return
        for chunk in chunks:
            span = keys[chunk["first"] : chunk["first"] + chunk["rows"]]
            self.chunks[chunk["id"]] = [(key, field, values[key]) for key in span]
        for i, key in enumerate(keys):
            self.sizes[values[key]] = size + i * is_ragged
        version = reply["ok"]["versions"][family]
        for key in keys:
            is_fresh = field not in self.rows.setdefault(key, {})
            self.rows[key][field] = values[key]
            before = self.versions.get((key, family), 0)
            assert version > self.spent.get((key, family), 0), "an old meta could match a row that came back"
            assert version > before or (version == before and is_fresh), "an old meta could match a new row"
            self.versions[key, family] = version
        self.forget_dropped(reply["ok"]["drop"])

    @rule(target=claims, who=st.sampled_from("ab"), count=st.integers(3, 7))
    def claim(self, who: str, count: int) -> object:
        reply = self.ask("claim", task="t", fields=["input_ids"], batch_size=count, consumer=who)["ok"]
        for key in reply["keys"]:
            assert key not in self.done, "a row that is done was handed out"
            assert key not in self.holders or self.holders[key][1] <= self.now, "a row has two holders"
            assert "input_ids" in self.rows[key]
            self.holders[key] = (reply["claim"], self.now + LEASE_S)
        if self.group_size is not None and reply["keys"]:
            uids = {key.rpartition("_g")[0] for key in reply["keys"]}
            live = {k for k in self.rows if k.rpartition("_g")[0] in uids and k not in self.done}
            assert live == set(reply["keys"]), "a group was split"
        return (reply["claim"], reply["keys"]) if reply["keys"] else multiple()

    @rule(claim=consumes(claims))
    def release(self, claim: tuple[int, list[str]]) -> None:
        claim_id, keys = claim
        reply = self.ask("release", task="t", keys=keys, claims={"t": dict.fromkeys(keys, claim_id)})
        live = [key for key in keys if key in self.rows]
        held = {key for key in live if self.holders.get(key, (0, 0.0)) > (claim_id, self.now)}
        held &= {key for key in live if self.holders.get(key, (0, 0.0))[0] == claim_id}
        lost = [key for key in live if self.done.get(key) != claim_id and key not in held]
        if lost:
            assert reply["error"]["kind"] == "LeaseExpired"
            return
        assert "ok" in reply
        for key in live:
            self.done[key] = claim_id
            self.holders.pop(key, None)

    @rule(claim=claims)
    def heartbeat(self, claim: tuple[int, list[str]]) -> None:
        self.ask("heartbeat", claims=[claim[0]])
        for key, (holder, _) in list(self.holders.items()):
            if holder == claim[0]:
                self.holders[key] = (holder, self.now + LEASE_S)

    @rule(keys=st.none() | st.lists(st.sampled_from(KEYS), max_size=4))
    def clear(self, keys: list[str] | None) -> None:
        reply = self.ask("clear", keys=keys)["ok"]
        gone = [key for key in (self.rows if keys is None else set(keys)) if key in self.rows]
        assert reply["rows"] == len(gone)
        self.spent |= {where: version for where, version in self.versions.items() if where[0] in gone}
        for key in gone:
            for held in (self.rows, self.done, self.holders):
                held.pop(key, None)
        self.forget_dropped(reply["drop"])

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=6), field=st.sampled_from(FIELDS))
    def read(self, keys: list[str], field: str) -> None:
        reply = self.ask("locate", keys=keys, fields=[field], versions={})
        if any(key not in self.rows for key in keys):
            assert reply["error"]["kind"] == "KeysNotFound"
        elif any(field not in self.rows[key] for key in keys):
            assert reply["error"]["kind"] == "FieldNotProduced"
        else:
            located = reply["ok"]
            runs = located["placements"][0]["runs"]
            found = [
                self.chunks[located["chunks"][chunk]][i] for chunk, first, n in runs for i in range(first, first + n)
            ]
            assert found == [(key, field, self.rows[key][field]) for key in keys]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), field=st.sampled_from(FIELDS))
    def read_written_rows(self, data: st.DataObject, field: str) -> None:
        written = [key for key in self.rows if field in self.rows[key]]
        if written:
            self.read(data.draw(st.lists(st.sampled_from(written), unique=True, min_size=1)), field)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear_live_rows(self, data: st.DataObject) -> None:
        self.clear(data.draw(st.lists(st.sampled_from(list(self.rows)), unique=True, max_size=3)))

    def live_bytes(self) -> int:
        """Of rows that can be read, and of the headers of chunks that hold any."""
        return sum(self.sizes[value] for row in self.rows.values() for value in row.values()) + HEADER_BYTES * len(
            self.chunks
        )

    def forget_dropped(self, chunk_ids: list[str]) -> None:
        for chunk_id in chunk_ids:
            gone = self.chunks.pop(chunk_id)
            assert all(self.rows.get(key, {}).get(field) != value for key, field, value in gone), "a live chunk dropped"

    @invariant()
    def counts_agree(self) -> None:
        stats = self.ask("stats")["ok"]
        partition = stats["partitions"]["p"]
        headers = HEADER_BYTES * len(self.chunks)
        assert partition["rows"] == len(self.rows)
        assert sum(partition["fields"].values()) + headers == stats["live_bytes"] == self.live_bytes()
        assert stats["live_rows"] == len(self.rows) and stats["live_chunks"] == len(self.chunks)
        assert list(self.ask("list").get("ok", {"keys": []})["keys"]) == list(self.rows)


LedgerHistory.TestCase.settings = settings(max_examples=num_examples(150), stateful_step_count=40, deadline=None)
test_ledger_follows_the_model = LedgerHistory.TestCase
