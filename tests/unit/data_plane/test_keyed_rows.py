"""The ledger's rules for rows under their own keys: what is written in place, and when a row is freed."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_rl.data_plane.ledger.claims import FREE_AGAIN_S
from nemo_rl.data_plane.ledger.ledger import Ledger
from nemo_rl.data_plane.schema import resolve_fields, spec_to_record
from nemo_rl.errors import DataPlaneTimeout, FieldNotProduced, SchemaMismatch, from_record

FIELDS = ("input_ids", "sample_mask", "advantages")
KEYS = ["a", "b"]


class Ask:
    """A ledger with one partition, asked at a time that the test sets."""

    def __init__(self) -> None:
        self.ledger = Ledger(run_id="r", capacity_rows=100, capacity_bytes=None, lease_s=30.0, validate=True)
        self.now = 0.0
        fields = [spec_to_record(spec) for spec in resolve_fields(FIELDS)]
        self("register", fields=fields, num_samples=10, tasks=["train"], task_writes={"train": []}, group_size=None)

    def __call__(self, op: str, **args: Any) -> dict[str, Any]:
        reply = self.ledger.handle({"run": "r", "op": op, "args": {"partition": "p", **args}}, now=self.now)
        if "error" in reply:
            raise from_record(reply["error"])
        return reply["ok"]

    def begin(self, field: str, keys: list[str] = KEYS, dtype: str = "float32") -> dict[str, Any]:
        types = {field: [dtype, []]}
        rules = {"lengths": None, "claims": {}, "may_create": True, "column_types": types}
        return self("begin", keys=keys, families={field: [field]}, lasts_s=10.0, **rules)

    def commit(
        self, field: str, put: int, keys: list[str] = KEYS, *, is_keyed: bool = True, **more: Any
    ) -> dict[str, Any]:
        chunk = {"id": f"{field}{put}{self.now}", "family": field, "fields": [field], "first": 0, "rows": len(keys)}
        chunk |= {"nbytes": 40, "sizes": [4 * len(keys)], "row_sizes": {}, "column_types": {field: ["float32", []]}}
        rules = {"lengths": None, "tags": None, "claims": {}, "may_create": True}
        return self(
            "commit_keyed",
            keys=keys,
            chunks=[chunk],
            put=put,
            is_last=True,
            in_place=[field] if is_keyed else [],
            reservation=0,
            **rules,
            **more,
        )

    def put(self, field: str, keys: list[str] = KEYS) -> dict[str, Any]:
        begun = self.begin(field, keys)
        return self.commit(field, begun["put"], keys, is_keyed=field in begun["in_place"])


@pytest.fixture
def ask() -> Ask:
    return Ask()


def test_a_field_is_written_in_place_once(ask: Ask) -> None:
    assert ask.begin("sample_mask")["in_place"] == ["sample_mask"]
    assert ask.begin("sample_mask", ["b", "c"])["in_place"] == []  # the first has not ended
    assert ask.begin("advantages")["in_place"] == ["advantages"]


def test_a_rewrite_moves_the_rows_to_a_chunk_that_readers_are_told_apart(ask: Ask) -> None:
    ask.put("sample_mask")
    where = {"keys": KEYS, "fields": ["sample_mask"], "versions": {}}
    reply = ask("locate", **where)
    assert reply["keyed"] == [0] and reply["placements"][0]["sizes"] == {"sample_mask": [4, 4]}
    assert ask.put("sample_mask", ["b"])["drop"] == []  # a row under its key is no chunk of its own
    reply = ask("locate", **where)
    assert (
        reply["keyed"] == [0] and len(reply["chunks"]) == 2 and reply["placements"][0]["sizes"] == {"sample_mask": [4]}
    )
    assert ask.put("sample_mask", ["b"])["drop"] != []


def test_a_row_is_freed_when_no_put_is_under_way_and_not_written_before(ask: Ask) -> None:
    ask.put("sample_mask")
    late = ask.begin("advantages", ["a"])["put"]
    assert ask("clear", keys=None)["free"] == ["b"]
    assert "2 rows are still being freed" in ask.begin("sample_mask")["blocked"]
    ask("freed", keys=["a", "b"])  # nobody has handed out "a"
    assert "1 rows are still being freed" in ask.begin("sample_mask")["blocked"]
    assert ask("end", put=late)["free"] == ["a"]
    ask("freed", keys=["a"])
    assert ask.begin("sample_mask")["in_place"] == ["sample_mask"]


def test_a_row_that_is_not_confirmed_is_handed_out_again(ask: Ask) -> None:
    ask.put("sample_mask")
    assert ask("clear", keys=["a"])["free"] == ["a"]
    assert ask("clear", keys=[])["free"] == []
    ask.now += FREE_AGAIN_S
    assert ask("clear", keys=[])["free"] == ["a"]


def test_a_put_that_never_ends_is_given_up_and_cannot_commit_any_more(ask: Ask) -> None:
    dead = ask.begin("sample_mask")["put"]
    ask.now = 10.0
    assert ask("clear", keys=[])["free"] == KEYS and ask("clear", keys=[])["free"] == []
    with pytest.raises(DataPlaneTimeout, match="longer than it had announced"):
        ask.commit("sample_mask", dead)


def test_what_a_refused_put_has_left_is_nobodys_column(ask: Ask) -> None:
    ask.put("sample_mask")
    lost = ask.begin("advantages", ["a"])["put"]
    ask("end", put=lost)
    lacking = ask("lacking", fields=["advantages"], keys=None)["fields"]
    assert lacking == {"advantages": ["b"]}
    assert ask.begin("advantages")["in_place"] == []
    assert ask("strangers", keys=["a", "x"])["keys"] == ["x"]


def test_columns_of_others_are_taken_once(ask: Ask) -> None:
    ask.put("sample_mask")
    taken = ask.commit("advantages", 0, is_keyed=False, if_absent=True)
    assert "versions" in taken and ask("lacking", fields=["advantages"], keys=None)["fields"] == {}
    again = ask.commit("advantages", 0, is_keyed=False, if_absent=True)
    assert again["versions"] == {} and len(again["drop"]) == 1


def test_a_put_that_cannot_be_committed_is_refused_before_its_bytes_are_sent(ask: Ask) -> None:
    ask.put("sample_mask")
    with pytest.raises(SchemaMismatch, match="holds float32 rows"):
        ask.begin("sample_mask", dtype="int64")


def test_dropping_a_partition_does_not_forget_what_is_still_to_be_freed(ask: Ask) -> None:
    ask.put("sample_mask")
    late = ask.begin("advantages", ["a"])["put"]
    assert ask("forget", reason="")["free"] == ["b"]
    fields = [spec_to_record(spec) for spec in resolve_fields(FIELDS)]
    ask("register", fields=fields, num_samples=10, tasks=[], task_writes={}, group_size=None)
    assert "2 rows are still being freed" in ask.begin("sample_mask")["blocked"]
    assert ask("end", put=late)["free"] == ["a"]


def test_further_columns_are_declared_and_the_first_declaration_stays(ask: Ask) -> None:
    record = spec_to_record(resolve_fields(["staleness"])[0])
    ask("add_fields", fields=[record])
    ask("add_fields", fields=[record])
    assert [field["name"] for field in ask("describe")["fields"]] == [*FIELDS, "staleness"]
    fields = [spec_to_record(spec) for spec in resolve_fields(FIELDS)]
    ask("register", fields=fields, num_samples=10, tasks=["train"], task_writes={"train": []}, group_size=None)
    ask.put("sample_mask")
    with pytest.raises(FieldNotProduced, match="staleness"):
        ask("locate", keys=KEYS, fields=["staleness"], versions={})
    with pytest.raises(SchemaMismatch, match="staleness are declared in another way"):
        ask("add_fields", fields=[{**record, "family": "extras", "dtypes": ["int64"]}])
