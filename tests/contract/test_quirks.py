"""What engines underneath do silently, and our client does not: one test for each observed quirk, over every adapter.

Each test names its quirk in its first line. Rows are put by one client and read by the other, so that every payload
passes the engine. `test_engine_quirks` shows that the raw engines still behave that way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from nemo_rl.data_plane.schema import extra_field
from nemo_rl.errors import FieldNotProduced, KeysNotFound, SchemaMismatch
from nemo_rl.jagged import nest
from tests.helpers.data_planes import Plane, ids_column, keys_of, rows_of

X = extra_field("x", dtypes=["int64", "int32", "int16"], dims=("W",))
NOTE = extra_field("note", is_object=True)


def put_and_get(plane: Plane, column: Any, name: str = "x", *, spec: Any = X, keys: list[str] | None = None) -> Any:
    """One column through the store and back, read by the other client."""
    partition = plane.partition([spec])
    keys = keys if keys is not None else keys_of(1, column.size(0) if isinstance(column, torch.Tensor) else len(column))
    plane.owner.kv_batch_put(keys, partition, {name: column})
    return plane.peer.kv_batch_get(keys, partition, [name]).get(name)


@pytest.mark.few_planes
@pytest.mark.parametrize("later", [torch.int32, torch.int16])
def test_a_column_keeps_one_dtype_over_all_puts(plane: Plane, later: torch.dtype) -> None:
    """Quirk: a put with another dtype reports success; mixed reads are cast, a narrower dtype reads as garbage."""
    partition = plane.partition([X])
    plane.owner.kv_batch_put(["a"], partition, {"x": torch.arange(4)[None]})
    for key in ("b", "a"):
        with pytest.raises(SchemaMismatch, match=f"holds int64 rows .* got {str(later).removeprefix('torch.')}"):
            plane.owner.kv_batch_put([key], partition, {"x": torch.arange(4, dtype=later)[None]})
    rows = plane.peer.kv_batch_get(["a"], partition, ["x"])["x"]
    assert rows.dtype == torch.int64 and rows_of(rows) == [[0, 1, 2, 3]]
    assert list(plane.owner.kv_list(partition)) == ["a"]


@pytest.mark.few_planes
def test_duplicate_keys_change_nothing(plane: Plane) -> None:
    """Quirk: a put with duplicates applies both rows and then raises; a get gives garbage in the first copy."""
    partition = plane.partition([X])
    plane.owner.kv_batch_put(["a"], partition, {"x": torch.tensor([[7]])})
    for client in (plane.owner, plane.peer):
        with pytest.raises(SchemaMismatch, match="duplicate keys: a"):
            client.kv_batch_put(["a", "a"], partition, {"x": torch.tensor([[1], [2]])})
        with pytest.raises(SchemaMismatch, match="duplicate keys: a"):
            client.kv_batch_get(["a", "a"], partition, ["x"])
        assert rows_of(client.kv_batch_get(["a"], partition, ["x"])["x"]) == [[7]]


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [0, 3, 0], [2, 0]])
def test_rows_of_length_zero_are_rows(plane: Plane, lengths: list[int]) -> None:
    """Quirk: an empty value is refused after seconds (-600), and its key can never be cleared."""
    found = put_and_get(plane, nest(torch.arange(sum(lengths)), torch.tensor(lengths)))
    assert [len(row) for row in rows_of(found)] == lengths
    partition = plane.partitions[-1]
    plane.owner.kv_clear(None, partition)
    assert plane.owner.kv_list(partition) == {} and plane.owner.stats()["live_chunks"] == 0


def test_columns_without_entries_are_columns(plane: Plane) -> None:
    """Quirk: `(N, 0)` is refused by Mooncake."""
    assert rows_of(put_and_get(plane, torch.empty(3, 0, dtype=torch.int64))) == [[], [], []]
    fixed = extra_field("f", dtypes=["float32"], dims=(0,))
    assert put_and_get(plane, torch.empty(2, 0), "f", spec=fixed).shape == (2, 0)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_scalars_stay_scalars_and_rows_of_one_entry_stay_rows(plane: Plane, num_rows: int) -> None:
    """Quirk: `(N,)` comes back as `(N, 1)`, nested; and uniform rows come back nested."""
    scalar = extra_field("s", dtypes=["float32"])
    one, fixed = extra_field("o", dtypes=["float32"], dims=(1,)), extra_field("d", dtypes=["float32"], dims=(2, 3))
    partition, keys = plane.partition([scalar, one, fixed]), keys_of(1, num_rows)
    s, o = torch.arange(float(num_rows)), torch.arange(float(num_rows))[:, None]
    d = torch.arange(num_rows * 6.0).reshape(num_rows, 2, 3)
    plane.owner.kv_batch_put(keys, partition, {"s": s, "o": o, "d": d})
    rows = plane.peer.kv_batch_get(keys, partition, ["s", "o", "d"])
    for name, sent in (("s", s), ("o", o), ("d", d)):
        assert not rows[name].is_nested and torch.equal(rows[name], sent)


@pytest.mark.few_planes
@pytest.mark.parametrize(
    "column",
    [
        NonTensorData(["a", "b"], batch_size=[2]),
        NonTensorData("one"),
        [("a", 1), "b"],
        [np.float32(1), 2.0],
        [b"bytes", "b"],
        [{1, 2}, "b"],
        [torch.ones(2), "b"],
        [np.ones(2), "b"],
        ["a", {1: "int key"}],
        "ab",
        b"ab",
    ],
    ids=[
        "list of whom",
        "NonTensorData of no row",
        "tuple",
        "numpy",
        "bytes",
        "set",
        "tensor",
        "array",
        "int key",
        "text",
        "raw",
    ],
)
def test_object_rows_that_would_come_back_changed_are_refused(plane: Plane, column: object) -> None:
    """Quirk: tuples become lists, `NonTensorData("same")` is stored as the characters 's', 'a', 'm', 'e'."""
    partition = plane.partition([NOTE])
    with pytest.raises(SchemaMismatch, match="JSON-like|does not say which row"):
        plane.owner.kv_batch_put(["a", "b"], partition, {"note": column})
    assert plane.owner.kv_list(partition) == {} and plane.owner.stats()["live_chunks"] == 0


def test_object_rows_are_exact_in_every_container(plane: Plane) -> None:
    """Quirk: what an object column gives back depends on what held it."""
    values = ["", "\u00e9\U0001f600", None, True, 0, 1.0, -(2**63), [[]], {"a": {"b": [None, 2.5]}}, "x" * 70_000]
    keys = keys_of(1, len(values))
    array = np.empty(len(values), dtype=object)
    array[:] = values
    for column in (values, tuple(values), array, NonTensorStack(*[NonTensorData(value) for value in values])):
        found = put_and_get(plane, column, "note", spec=NOTE, keys=keys).tolist()
        assert found == values and [type(a) for a in found] == [type(b) for b in values]
    one_for_all = NonTensorData({"same": [1]}, batch_size=[2])
    assert put_and_get(plane, one_for_all, "note", spec=NOTE, keys=["a", "b"]).tolist() == [{"same": [1]}] * 2
    held = [values, array, NonTensorStack(*values[:3]), [NonTensorData(value) for value in values[:3]], one_for_all]
    for column in held:
        rows = column if isinstance(column, NonTensorData) else column[:2]
        batch = TensorDict({"x": torch.ones(2, 1, dtype=torch.int64), "note": rows}, batch_size=[2])
        partition = plane.partition([X, NOTE])
        plane.owner.kv_batch_put(["a", "b"], partition, batch)
        found = plane.peer.kv_batch_get(["b"], partition, ["note"]).get("note").tolist()
        assert found == [{"same": [1]} if column is one_for_all else values[1]]


@pytest.mark.few_planes
@pytest.mark.parametrize(
    ("spec", "column"),
    [
        (X, np.arange(8).reshape(2, 4)),
        (X, ["text", "b"]),
        (X, TensorDict({"q": torch.ones(2, 4)}, batch_size=[2])),
        (extra_field("x", dtypes=["float32"], dims=("P", "Q")), "two ragged dims"),
        (extra_field("x", dtypes=["float32"], dims=("P", "Q")), "transposed"),
        (extra_field("x", dtypes=["float32"], dims=("P",)), torch.ones(2, 3, 2)),
    ],
    ids=["numpy", "objects", "nested TensorDict", "two ragged dims", "transposed", "another rank"],
)
def test_columns_that_engines_take_and_change_are_refused(plane: Plane, spec: Any, column: Any) -> None:
    """Quirk: such columns come back as other types, as lists of lists, or fail at the reader."""
    if isinstance(column, str) and column == "two ragged dims":
        column = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 3)])
    elif isinstance(column, str):
        column = nest(torch.arange(24.0).reshape(6, 4), torch.tensor([2, 4])).transpose(1, 2)
    partition = plane.partition([spec])
    with pytest.raises(SchemaMismatch):
        plane.owner.kv_batch_put(["a", "b"], partition, {"x": column})
    assert plane.owner.kv_list(partition) == {} and plane.owner.stats()["live_chunks"] == 0


def test_any_memory_layout_gives_the_same_rows(plane: Plane) -> None:
    """Quirk: expanded rows are registered as overlapping memory, strided nested ones come back in another layout."""
    square = torch.arange(12).reshape(3, 4)
    rows = [torch.arange(i + 1) for i in range(3)]
    layouts = {
        "transposed": square.t(),
        "expanded": torch.arange(4)[None].expand(3, 4),
        "every second row": torch.arange(24).reshape(6, 4)[::2],
        "narrowed": square[:, 1:3],
        "strided nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "jagged with holes": torch.nested.narrow(
            square, 1, torch.tensor([0, 1, 2]), torch.tensor([3, 0, 2]), layout=torch.jagged
        ),
    }
    for what, column in layouts.items():
        expected = [row.tolist() for row in column.unbind()]
        assert rows_of(put_and_get(plane, column)) == expected, what


def test_gradients_stay_at_home(plane: Plane) -> None:
    """Quirk: a tensor that requires gradients travels with its graph, or not at all."""
    spec = extra_field("g", dtypes=["float32"], dims=("W",))
    source = torch.ones(2, 3, requires_grad=True)
    found = put_and_get(plane, source * 2, "g", spec=spec)
    assert not found.requires_grad and rows_of(found) == [[2, 2, 2]] * 2


def test_a_batch_without_rows_is_a_batch(plane: Plane) -> None:
    """Quirk: put, get and clear raise "Received an empty list as keys."."""
    partition = plane.partition([X, NOTE])
    for client in (plane.owner, plane.peer):
        meta = client.kv_batch_put([], partition, {"x": torch.ones(0, 3, dtype=torch.int64), "note": []})
        assert len(meta) == 0 and meta.fields == ("x", "note")
        rows = client.kv_batch_get([], partition, ["x", "note"])
        assert rows.batch_size == torch.Size([0]) and list(rows.keys()) == ["x", "note"]
        client.kv_clear([], partition)


def test_one_unknown_key_among_known_ones_is_an_error(plane: Plane) -> None:
    """Quirk: a get silently returns fewer rows when some keys are unknown."""
    partition, keys = plane.partition([X]), keys_of(2)
    plane.owner.kv_batch_put(keys, partition, {"x": torch.arange(8)[:, None]})
    for client in (plane.owner, plane.peer):
        with pytest.raises(KeysNotFound, match="1 of 9 rows do not exist .*: ghost"):
            client.kv_batch_get([*keys[:3], "ghost", *keys[3:]], partition, ["x"])
    plane.peer.kv_clear(keys[5:6], partition)
    with pytest.raises(KeysNotFound, match=keys[5]):
        plane.owner.kv_batch_get(keys, partition, ["x"])


def test_a_field_that_is_missing_on_some_rows_is_an_error(plane: Plane) -> None:
    """Quirk: fields that are not ready on every row are dropped; a missing one gives an empty TensorDict."""
    partition = plane.partition([X, NOTE])
    plane.owner.kv_batch_put(["a", "b"], partition, {"x": torch.ones(2, 1, dtype=torch.int64)})
    for client in (plane.owner, plane.peer):
        for names in (["note"], ["x", "note"]):
            with pytest.raises(FieldNotProduced, match="fields note are not written yet for 2 of 2 rows: a, b"):
                client.kv_batch_get(["a", "b"], partition, names)
    plane.peer.kv_batch_put(["b"], partition, {"note": ["text"]})
    with pytest.raises(FieldNotProduced, match="fields note are not written yet for 1 of 2 rows: a"):
        plane.owner.kv_batch_get(["a", "b"], partition, ["x", "note"])
    assert plane.owner.kv_batch_get(["b"], partition, ["note"]).get("note").tolist() == ["text"]


@pytest.mark.few_planes
def test_tags_are_primitives_and_rows_without_columns_cannot_be_read(plane: Plane) -> None:
    """Quirk: tags take tensors and turn tuples into lists; a row that has only tags is listed and then not readable."""
    partition = plane.partition([X])
    for bad in (torch.ones(2), np.float32(3), (1, 2), [1], {"x": 1}, b"x"):
        with pytest.raises(SchemaMismatch, match="expected None, str, int, float or bool"):
            plane.owner.kv_batch_put(["a"], partition, {"x": torch.tensor([[1]])}, [{"t": bad}])
    with pytest.raises(KeysNotFound, match="a"):
        plane.owner.kv_batch_put(["a"], partition, {}, [{"t": 1}])
    assert plane.peer.kv_list(partition) == {}


def test_the_same_key_in_two_partitions_is_two_rows(plane: Plane) -> None:
    """Quirk: Mooncake's keys know no partition and no run."""
    first, second = plane.partition([X]), plane.partition([X])
    plane.owner.kv_batch_put(["a"], first, {"x": torch.tensor([[1]])})
    plane.peer.kv_batch_put(["a"], second, {"x": torch.tensor([[2]])})
    for client in (plane.owner, plane.peer):
        assert [rows_of(client.kv_batch_get(["a"], p, ["x"])["x"]) for p in (first, second)] == [[[1]], [[2]]]
    plane.owner.kv_clear(None, first)
    assert rows_of(plane.owner.kv_batch_get(["a"], second, ["x"])["x"]) == [[2]]


def test_stored_rows_and_read_rows_are_private(plane: Plane) -> None:
    """Quirk: a zero-copy store hands out its own memory, read-only or shared with the producer."""
    partition, keys = plane.partition([X]), keys_of(1)
    source = torch.arange(40_000).reshape(4, 10_000)
    plane.owner.kv_batch_put(keys, partition, {"x": source})
    source.zero_()
    first = plane.owner.kv_batch_get(keys, partition, ["x"])["x"].values()
    assert torch.equal(first, torch.arange(40_000))
    first.add_(1)
    for client in (plane.owner, plane.peer):
        assert torch.equal(client.kv_batch_get(keys, partition, ["x"])["x"].values(), torch.arange(40_000))


def test_rows_that_were_read_outlive_their_chunks(plane: Plane) -> None:
    """Quirk: views of shared memory change when the segment is used again."""
    partition, keys = plane.partition([X]), keys_of(1)
    plane.peer.kv_batch_put(keys, partition, {"x": torch.full((4, 9_000), 1)})
    kept = plane.owner.kv_batch_get(keys, partition, ["x"])["x"].values()
    for value in (2, 3):
        plane.peer.kv_clear(keys, partition)
        plane.peer.kv_batch_put(keys, partition, {"x": torch.full((4, 9_000), value)})
    assert (kept == 1).all()


def test_a_row_can_get_another_length_when_it_is_rewritten(plane: Plane) -> None:
    """Quirk: an existing key keeps its old value, or is read with its old size."""
    partition, keys = plane.partition([X]), keys_of(1)
    plane.owner.kv_batch_put(keys, partition, {"x": ids_column([1, 2, 3, 4]).to(torch.int64)})
    for round_, lengths in enumerate(([9, 0], [1, 500], [3, 3])):
        column = ids_column(lengths, start=100 * round_).to(torch.int64)
        plane.peer.kv_batch_put(keys[1:3], partition, {"x": column})
        found = rows_of(plane.owner.kv_batch_get(keys, partition, ["x"])["x"])
        assert found == [[0], *rows_of(column), [6, 7, 8, 9]]
    assert plane.owner.stats()["live_rows"] == 4


def test_clearing_what_is_not_there_is_no_error_and_clears_the_rest(plane: Plane) -> None:
    """Quirk: a clear of unknown keys may leave the known ones, and a clear that fails is only logged."""
    partition, keys = plane.partition([X]), keys_of(1)
    plane.owner.kv_batch_put(keys, partition, {"x": torch.arange(4)[:, None]})
    for client in (plane.peer, plane.owner):
        client.kv_clear(["ghost", keys[0], "ghost"], partition)
        assert list(client.kv_list(partition)) == keys[1:]
    plane.peer.kv_clear(None, partition)
    plane.owner.kv_clear(None, partition)
    assert plane.owner.stats()["live_chunks"] == 0


def test_any_text_is_a_key_or_a_field_name(plane: Plane) -> None:
    """Quirk: engines build their own keys with '@' and '/'; two of ours could become one of theirs."""
    names = ["a@b", "a", "b@a", "x/y", "x y", "\u00e9", "..", "a@b/c d", "%s", "*"]
    specs = [extra_field(name, dtypes=["int64"]) for name in names]
    keys = ["k", "k@0", "k/../k", "k k", "\u00e9", ".", "*", "k@a@b", "x" * 300]
    partition = plane.partition(specs)
    columns = {name: torch.arange(len(keys)) + 100 * i for i, name in enumerate(names)}
    plane.owner.kv_batch_put(keys, partition, columns)
    rows = plane.peer.kv_batch_get(keys[::-1], partition, names[::-1])
    assert list(rows.keys()) == names[::-1] and list(plane.peer.kv_list(partition)) == keys
    for name, column in columns.items():
        assert rows[name].tolist() == column.tolist()[::-1]


def test_a_row_larger_than_32_mib_comes_back_whole(plane: Plane) -> None:
    """Quirk: payloads larger than a transfer buffer come back empty, or are sent again and again."""
    count, keys, partition = (33 << 20) // 8, keys_of(1, 3), plane.partition([X])
    plane.owner.kv_batch_put(keys, partition, {"x": nest(torch.arange(count + 2), torch.tensor([1, count, 1]))})
    found = plane.owner.kv_batch_get(keys, partition, ["x"])["x"]
    assert found.offsets().tolist() == [0, 1, count + 1, count + 2]
    assert torch.equal(found.values(), torch.arange(count + 2))


def test_rows_follow_the_order_of_the_keys(plane: Plane) -> None:
    """Quirk: rows from several units or chunks may come in the order of the units."""
    partition, keys = plane.partition([X]), keys_of(30)
    for start in (80, 0, 40):
        values = torch.arange(start, start + 40)[:, None].expand(40, 20)
        plane.owner.kv_batch_put(keys[start : start + 40], partition, {"x": values})
    order = [(i * 53) % 120 for i in range(120)]
    rows = rows_of(plane.peer.kv_batch_get([keys[i] for i in order], partition, ["x"])["x"])
    assert rows == [[i] * 20 for i in order]
