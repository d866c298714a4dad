"""Contract of every data plane: writing, reading, versions, clearing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.data_plane.factory import open_step
from nemo_rl.data_plane.schema import extra_field
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneError,
    FieldNotProduced,
    KeysNotFound,
    PartitionNotFound,
    SchemaMismatch,
    VersionMismatch,
)
from nemo_rl.jagged import nest
from nemo_rl.routes.columns import decode_routes, encode_routes
from nemo_rl.routes.digest import route_digests
from nemo_rl.routes.shape import MISSING, RouteShape
from tests.helpers.data_planes import Plane, ids_column, keys_of, rows_of

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16"]
DTYPES += ["bfloat16", "float32", "float64", "complex64", "float8_e4m3fn"]

TEXT = extra_field("prompt_text", is_object=True)


def put_ids(plane: Plane, partition: str, keys: list[str], *, start: int = 0) -> None:
    lengths = [1 + i % 5 for i in range(len(keys))]
    plane.owner.kv_batch_put(keys, partition, {"input_ids": ids_column(lengths, start=start)})


def test_rows_come_back_in_the_order_of_the_keys(plane: Plane) -> None:
    partition, keys = plane.partition(), keys_of(40)
    columns = {"input_ids": ids_column([i % 7 for i in range(160)]), "sample_mask": torch.arange(160.0)}
    meta = plane.owner.kv_batch_put(keys, partition, columns)
    assert meta.keys == tuple(keys) and meta.sequence_lengths == tuple(i % 7 for i in range(160))
    assert dict(meta.versions) == {"tokens": 1, "sample_mask": 1}
    order = [159, 3, 77, 0, 78, 4]
    rows = plane.peer.kv_batch_get([keys[i] for i in order], partition, ["sample_mask", "input_ids"])
    assert list(rows.keys()) == ["sample_mask", "input_ids"] and rows.batch_size == torch.Size([6])
    assert rows["sample_mask"].tolist() == [float(i) for i in order]
    expected = rows_of(columns["input_ids"])
    assert rows_of(rows["input_ids"]) == [expected[i] for i in order]
    assert rows["input_ids"].dtype == torch.int32


def test_every_dtype_survives_bit_for_bit(plane: Plane) -> None:
    specs, columns, sent = [], {}, {}
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        raw = torch.arange(kind.itemsize * 18, dtype=torch.uint8)
        sent[dtype] = (raw % 2 if kind is torch.bool else raw * 37).view(kind)[:18].reshape(6, 3)
        specs += [extra_field(f"x_{dtype}", dtypes=[dtype], dims=("P", 3)), extra_field(f"y_{dtype}", dtypes=[dtype])]
        columns[f"x_{dtype}"] = torch.nested.nested_tensor_from_jagged(sent[dtype], torch.tensor([0, 4, 4, 6]))
        columns[f"y_{dtype}"] = sent[dtype][:3, 0].clone()
    partition = plane.partition(specs)
    plane.owner.kv_batch_put(["a", "b", "c"], partition, columns)
    rows = plane.peer.kv_batch_get(["a", "b", "c"], partition, list(columns))
    for dtype, values in sent.items():
        x, y = rows[f"x_{dtype}"], rows[f"y_{dtype}"]
        assert x.dtype == y.dtype == getattr(torch, dtype)
        assert x.offsets().tolist() == [0, 4, 4, 6]
        assert torch.equal(x.values().contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)), dtype
        assert torch.equal(y.view(torch.uint8), values[:3, 0].clone().view(torch.uint8)), dtype


def test_rows_without_tokens_and_rows_larger_than_a_chunk_are_fine(plane: Plane) -> None:
    partition = plane.partition()
    lengths = [0, 5000, 0, 1, 3000, 0]
    keys = keys_of(1, 6)
    column = ids_column(lengths)
    plane.owner.kv_batch_put(keys, partition, {"input_ids": column})
    assert rows_of(plane.peer.kv_batch_get(keys, partition, ["input_ids"])["input_ids"]) == rows_of(column)
    assert plane.owner.stats()["live_chunks"] >= 3


def test_object_columns_keep_json_values_and_refuse_others(plane: Plane) -> None:
    partition = plane.partition([TEXT, extra_field("info", is_object=True)])
    values = ["", "text \u00e9", None, {"a": [1, 2.5, None, True], "b": {"c": "d"}}, [[], {}], 2**62, float("inf")]
    keys = keys_of(1, len(values))
    plane.owner.kv_batch_put(keys, partition, {"info": values})
    assert plane.peer.kv_batch_get(keys[::-1], partition, ["info"]).get("info").tolist() == values[::-1]
    for bad in ((1, 2), {1: 2}, b"pickle", object(), 2**70, {"a": {3}}):
        with pytest.raises(SchemaMismatch, match="JSON-like"):
            plane.owner.kv_batch_put(["x_g0"], partition, {"info": [bad]})


def test_a_read_never_gives_fewer_rows(plane: Plane) -> None:
    partition = plane.partition()
    put_ids(plane, partition, ["a_g0", "a_g1"])
    for keys in (["a_g0", "missing_g0"], ["missing_g0"], ["missing_g0", "missing_g1", "a_g1"]):
        with pytest.raises(KeysNotFound, match="missing_g0"):
            plane.peer.kv_batch_get(keys, partition, ["input_ids"])


def test_a_read_never_gives_fewer_fields(plane: Plane) -> None:
    partition = plane.partition()
    put_ids(plane, partition, ["a_g0", "a_g1"])
    for fields in (["sample_mask"], ["input_ids", "sample_mask"]):
        with pytest.raises(FieldNotProduced, match="sample_mask"):
            plane.peer.kv_batch_get(["a_g0"], partition, fields)
    plane.owner.kv_batch_put(["a_g0"], partition, {"sample_mask": torch.ones(1)})
    with pytest.raises(FieldNotProduced, match="1 of 2 rows: a_g1"):
        plane.peer.kv_batch_get(["a_g0", "a_g1"], partition, ["input_ids", "sample_mask"])
    with pytest.raises(SchemaMismatch, match="advantages"):
        plane.peer.kv_batch_get(["a_g0"], partition, ["input_ids", "advantages"])
    with pytest.raises(SchemaMismatch, match="distinct fields"):
        plane.peer.kv_batch_get(["a_g0"], partition, [])


@pytest.mark.few_planes
def test_duplicate_keys_are_refused_and_nothing_is_written(plane: Plane) -> None:
    partition = plane.partition()
    with pytest.raises(SchemaMismatch, match="duplicate keys: a_g0"):
        plane.owner.kv_batch_put(["a_g0", "b_g0", "a_g0"], partition, {"sample_mask": torch.ones(3)})
    assert plane.owner.kv_list(partition) == {}
    put_ids(plane, partition, ["a_g0"])
    with pytest.raises(SchemaMismatch, match="duplicate keys"):
        plane.peer.kv_batch_get(["a_g0", "a_g0"], partition, ["input_ids"])


@pytest.mark.few_planes
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sample_mask": torch.tensor([0.5, 0.1], dtype=torch.float64)}, "got float64, and 1 values change .* is 0.1"),
        ({"token_mask": torch.tensor([[1, 2], [0, 3]])}, "expected dtype bool, got int64, and 2 values .* first is 2"),
        ({"input_ids": torch.tensor([[1], [2**31]])}, "expected dtype int32, got int64, and 1 values .* 2147483648"),
        ({"input_ids": torch.ones(2, 1)}, "expected dtype int32, got float32$"),
        ({"sample_mask": torch.ones(2, 1)}, r"expected rows with dims \[\]"),
        ({"sample_mask": torch.ones(3)}, "expected 2 rows, one per key, got 3"),
        ({"sample_mask": [1.0, 1.0]}, "expected a tensor, got list"),
        ({"input_ids": torch.ones(2, dtype=torch.int32)}, r"expected rows with dims \['T'\]"),
        ({"input_ids": ids_column([1, 2, 3])}, "expected 2 rows, one per key, got 3"),
        ({"image": torch.zeros(2, 3, 4)}, "expected rows with dims"),
        ({"turns": torch.zeros(2, 3)}, "turns"),
        ({"input_ids": ids_column([1, 2]), "token_mask": torch.ones(2, 2, dtype=torch.bool)}, "has 2 tokens"),
        ({"input_ids": ids_column([1, 2]), "input_lengths": torch.tensor([1, 3], dtype=torch.int32)}, "says 3"),
        ({"prompt_text": "ab"}, "expected a list of JSON-like values, got str"),
        ({"prompt_text": ["a"]}, "expected 2 rows, one per key, got 1"),
    ],
)
def test_a_bad_column_is_refused_before_anything_is_sent(plane: Plane, columns: dict, message: str) -> None:
    image = extra_field("image", dtypes=["float32"], dims=(3, 5))
    partition = plane.partition(["input_ids", "token_mask", "input_lengths", "sample_mask", TEXT, image])
    good = {} if "sample_mask" in columns else {"sample_mask": torch.ones(2)}
    with pytest.raises(SchemaMismatch, match=message):
        plane.owner.kv_batch_put(["a_g0", "a_g1"], partition, {**good, **columns})
    assert plane.owner.kv_list(partition) == {} and plane.owner.stats()["live_chunks"] == 0


def test_another_dtype_is_cast_where_no_value_changes(plane: Plane) -> None:
    fields = ["input_ids", "token_mask", "sample_mask", "generation_logprobs"]
    partition, keys = plane.partition(fields), keys_of(1, 2)
    logprobs = torch.tensor([-0.5, float("nan"), -1.5]).to(torch.bfloat16)
    columns = {
        "input_ids": ids_column([1, 2], start=7).to(torch.int64),
        "token_mask": nest(torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([1, 2])),
        "sample_mask": torch.tensor([1, 0]),
        "generation_logprobs": nest(logprobs, torch.tensor([1, 2])),
    }
    plane.owner.kv_batch_put(keys, partition, columns)
    rows = plane.peer.kv_batch_get(keys, partition, fields)
    assert [rows[name].dtype for name in fields] == [torch.int32, torch.bool, torch.float32, torch.float32]
    assert rows_of(rows["input_ids"]) == [[7], [8, 9]] and rows_of(rows["token_mask"]) == [[True], [False, True]]
    assert rows["sample_mask"].tolist() == [1.0, 0.0]
    assert torch.equal(rows["generation_logprobs"].values().isnan(), logprobs.isnan())
    assert rows_of(rows["generation_logprobs"])[0] == [-0.5]


@pytest.mark.few_planes
def test_bad_keys_and_tags_are_refused(plane: Plane) -> None:
    partition = plane.partition()
    for keys, tags in (
        ([7], None),
        ("a", None),
        ([""], None),
        (["a"], []),
        (["a"], [{"x": torch.ones(1)}]),
        (["a"], [{1: 2}]),
    ):
        with pytest.raises(SchemaMismatch):
            plane.owner.kv_batch_put(keys, partition, {"sample_mask": torch.ones(1)}, tags)
    assert plane.owner.kv_list(partition) == {}


@pytest.mark.few_planes
def test_dtype_and_dims_cannot_drift_between_puts(plane: Plane) -> None:
    extra = extra_field("x", dtypes=["float32", "bfloat16"], dims=("W",))
    wide = extra_field("y", dtypes=["int16"], dims=("P", "L"))
    partition = plane.partition([extra, wide])
    chunks = plane.owner.stats()["live_chunks"]
    first = {"x": torch.zeros(1, 4), "y": torch.zeros(1, 2, 3, dtype=torch.int16)}
    plane.owner.kv_batch_put(["a"], partition, first)
    with pytest.raises(SchemaMismatch, match="holds float32"):
        plane.owner.kv_batch_put(["b"], partition, {"x": torch.zeros(1, 4, dtype=torch.bfloat16)})
    with pytest.raises(SchemaMismatch, match=r"trailing dims \[3\]"):
        plane.owner.kv_batch_put(["b"], partition, {"y": torch.zeros(1, 2, 5, dtype=torch.int16)})
    assert list(plane.owner.kv_list(partition)) == ["a"]
    plane.owner.kv_clear(None, partition)
    assert plane.owner.stats()["live_chunks"] == chunks


@pytest.mark.few_planes
def test_a_row_keeps_its_number_of_tokens(plane: Plane) -> None:
    partition = plane.partition(["input_ids", "prev_logprobs"])
    plane.owner.kv_batch_put(["a", "b"], partition, {"input_ids": ids_column([2, 3])})
    with pytest.raises(SchemaMismatch, match="row 'b' has 3 tokens"):
        plane.owner.kv_batch_put(["a", "b"], partition, {"prev_logprobs": torch.zeros(2, 2)})


@pytest.mark.few_planes
def test_a_put_over_the_declared_rows_leaves_nothing(plane: Plane) -> None:
    partition = plane.partition(num_samples=3)
    put_ids(plane, partition, ["a", "b"])
    chunks = plane.owner.stats()["live_chunks"]
    with pytest.raises(CapacityExceeded, match="can never fit: 4 rows in one put are more than the num_samples = 3"):
        put_ids(plane, partition, ["c", "d", "e", "f"])
    assert list(plane.owner.kv_list(partition)) == ["a", "b"] and plane.owner.stats()["live_chunks"] == chunks
    put_ids(plane, partition, ["c"])


def test_a_rewrite_gives_a_new_version_and_old_metas_fail(plane: Plane) -> None:
    partition, keys = plane.partition(), keys_of(2)
    columns = {"input_ids": ids_column([2] * 8), "sample_mask": torch.ones(8)}
    old = plane.owner.kv_batch_put(keys, partition, columns)
    new = plane.owner.kv_batch_put(keys[2:5], partition, {"sample_mask": torch.full((3,), 7.0)})
    assert dict(new.versions) == {"sample_mask": 2}
    with pytest.raises(VersionMismatch, match="'sample_mask' was rewritten"):
        plane.peer.get_data(old, ["sample_mask"])
    assert len(plane.peer.get_data(old, ["input_ids"])) == 8
    assert plane.peer.get_data(new)["sample_mask"].tolist() == [7.0] * 3
    masks = plane.peer.kv_batch_get(keys, partition, ["sample_mask"])["sample_mask"]
    assert masks.tolist() == [1, 1, 7, 7, 7, 1, 1, 1]


def test_a_column_added_to_a_family_does_not_change_its_version(plane: Plane) -> None:
    a, b = extra_field("a", dtypes=["int64"]), extra_field("b", dtypes=["int64"])
    partition, keys = plane.partition([a, b]), keys_of(1)
    first = plane.owner.kv_batch_put(keys, partition, {"a": torch.arange(4)})
    second = plane.owner.kv_batch_put(keys[:2], partition, {"b": torch.arange(2)})
    assert dict(first.versions) == dict(second.versions) == {"extras": 1}
    assert plane.peer.get_data(first)["a"].tolist() == [0, 1, 2, 3]
    both = plane.peer.kv_batch_get(keys[:2], partition, ["b", "a"])
    assert both["a"].tolist() == both["b"].tolist() == [0, 1]
    assert dict(plane.owner.kv_batch_put(keys[:1], partition, {"a": torch.tensor([9])}).versions) == {"extras": 2}
    assert plane.peer.kv_batch_get(keys[:2], partition, ["a"])["a"].tolist() == [9, 1]


def test_chunks_are_freed_with_their_last_row(plane: Plane) -> None:
    partition, keys = plane.partition(), keys_of(2)
    put_ids(plane, partition, keys)
    for i, key in enumerate(keys):
        assert plane.owner.stats()["live_chunks"] == 1 and plane.owner.stats()["live_rows"] == 8 - i
        plane.owner.kv_clear([key], partition)
    stats = plane.owner.stats()
    assert (stats["live_chunks"], stats["live_rows"], stats["live_bytes"]) == (0, 0, 0)
    assert stats["peak_rows"] >= 8 and stats["peak_bytes"] > 0


def test_clear_removes_only_named_rows_and_is_idempotent(plane: Plane) -> None:
    partition = plane.partition()
    put_ids(plane, partition, ["a", "b", "c"])
    for _ in range(2):
        plane.owner.kv_clear(["b", "never"], partition)
    assert list(plane.owner.kv_list(partition)) == ["a", "c"]
    for _ in range(2):
        plane.owner.kv_clear(None, partition)
    assert plane.owner.kv_list(partition) == {}
    put_ids(plane, partition, ["b"])
    assert list(plane.owner.kv_list(partition)) == ["b"]


@pytest.mark.few_planes
def test_late_results_do_not_bring_cleared_rows_back(plane: Plane) -> None:
    partition = plane.partition(["input_ids", "prev_logprobs"])
    put_ids(plane, partition, ["a", "b"])
    plane.owner.kv_clear(["a"], partition)
    with pytest.raises(KeysNotFound, match="a"):
        plane.owner.kv_batch_put(["a", "b"], partition, {"prev_logprobs": torch.zeros(2, 2)})
    assert list(plane.owner.kv_list(partition)) == ["b"]


@pytest.mark.few_planes
def test_unknown_partitions_are_errors_everywhere(plane: Plane) -> None:
    client = plane.owner
    for call in (
        lambda: client.kv_batch_put(["a"], "nowhere", {"sample_mask": torch.ones(1)}),
        lambda: client.kv_batch_get(["a"], "nowhere", ["sample_mask"]),
        lambda: client.kv_list("nowhere"),
        lambda: client.kv_clear(None, "nowhere"),
        lambda: client.get_meta("nowhere", "train", ["sample_mask"], 1, consumer_id="c"),
        lambda: client.check_consumption_status("nowhere", ["train"]),
        lambda: client.partition_fields("nowhere"),
    ):
        with pytest.raises(PartitionNotFound, match="nowhere"):
            call()


@pytest.mark.few_planes
def test_a_partition_is_registered_once(plane: Plane) -> None:
    partition = plane.partition(["input_ids"], tasks=["train"])
    plane.attach().register_partition(partition, ["input_ids"], 4096, ["train"])
    for fields, rows, tasks in (
        (["sample_mask"], 4096, ["train"]),
        (["input_ids"], 5, ["train"]),
        (["input_ids"], 4096, []),
    ):
        with pytest.raises(SchemaMismatch, match="another declaration"):
            plane.owner.register_partition(partition, fields, rows, tasks)
    with pytest.raises(SchemaMismatch, match="unknown field 'inputs'"):
        plane.owner.register_partition("other", ["inputs"], 1, [])


@pytest.mark.few_planes
def test_a_partition_can_be_dropped_and_declared_anew(plane: Plane) -> None:
    note = extra_field("note", is_object=True)
    partition, other = plane.partition(["sample_mask"], tasks=["train"]), plane.attach()
    old = other.kv_batch_put(["a", "b"], partition, {"sample_mask": torch.ones(2)})
    claim = other.get_meta(partition, "train", ["sample_mask"], 2, consumer_id="c")
    assert plane.owner.drop_partition(partition, reason="another run") == 2
    for call in (lambda: other.kv_list(partition), lambda: other.get_data(old), lambda: other.release(claim)):
        with pytest.raises(PartitionNotFound, match="dropped"):
            call()
    plane.owner.register_partition(partition, ["sample_mask", "input_ids", note], 9, ["log"], 2)
    # The other client knows the old declaration: it learns the new one by itself.
    new = other.kv_batch_put(["a"], partition, {"sample_mask": torch.zeros(1), "note": ["x"]})
    assert new.versions["sample_mask"] > old.versions["sample_mask"]
    with pytest.raises(VersionMismatch):
        other.get_data(old.subset([0]))
    assert other.get_data(new)["sample_mask"].tolist() == [0.0]
    with pytest.raises(SchemaMismatch, match="unknown task 'train'"):
        other.get_meta(partition, "train", ["sample_mask"], 2, consumer_id="c", blocking=False)


@pytest.mark.few_planes
def test_tags_are_merged_and_listed_in_the_order_of_the_first_put(plane: Plane) -> None:
    partition = plane.partition()
    plane.owner.kv_batch_put(["b", "a"], partition, {"sample_mask": torch.ones(2)}, [{"x": 1, "y": None}, {"x": 2.5}])
    plane.owner.kv_batch_put(["a"], partition, {}, [{"x": "s", "z": True}])
    listed = plane.owner.kv_list(partition)
    assert list(listed.items()) == [("b", {"x": 1, "y": None}), ("a", {"x": "s", "z": True})]
    with pytest.raises(KeysNotFound):
        plane.owner.kv_batch_put(["new"], partition, {}, [{"x": 1}])


def test_rows_are_copies_on_both_sides(plane: Plane) -> None:
    partition, source = plane.partition(), torch.arange(4.0)
    plane.owner.kv_batch_put(keys_of(1), partition, {"sample_mask": source})
    source.zero_()
    first = plane.peer.kv_batch_get(keys_of(1), partition, ["sample_mask"])["sample_mask"]
    assert first.tolist() == [0, 1, 2, 3]
    first.zero_()
    assert plane.peer.kv_batch_get(keys_of(1), partition, ["sample_mask"])["sample_mask"].tolist() == [0, 1, 2, 3]


def test_no_rows_are_a_batch_too(plane: Plane) -> None:
    partition = plane.partition(["input_ids", "sample_mask", TEXT])
    meta = plane.owner.kv_batch_put([], partition, {"sample_mask": torch.zeros(0), "prompt_text": []})
    assert len(meta) == 0
    rows = plane.peer.kv_batch_get([], partition, ["input_ids", "sample_mask", "prompt_text"])
    assert rows.batch_size == torch.Size([0]) and set(rows.keys()) == {"input_ids", "sample_mask", "prompt_text"}
    assert rows["input_ids"].dtype == torch.int32 and rows["sample_mask"].dtype == torch.float32
    plane.owner.kv_batch_put(["a", "b"], partition, {"input_ids": ids_column([0, 0])})
    assert rows_of(plane.peer.kv_batch_get(["b", "a"], partition, ["input_ids"])["input_ids"]) == [[], []]


def test_a_tensordict_of_columns_strided_rows_and_gradients_are_accepted(plane: Plane) -> None:
    partition = plane.partition(["input_ids", "sample_mask", TEXT])
    mask = torch.arange(8.0, requires_grad=True)[::2]
    strided = torch.nested.nested_tensor([torch.arange(3, dtype=torch.int32), torch.arange(1, dtype=torch.int32)] * 2)
    columns = TensorDict({"sample_mask": mask, "prompt_text": ["a", "b", "c", "d"]}, batch_size=[4])
    plane.owner.kv_batch_put(keys_of(1), partition, columns)
    plane.owner.kv_batch_put(keys_of(1), partition, {"input_ids": strided})
    rows = plane.peer.kv_batch_get(keys_of(1), partition, ["sample_mask", "prompt_text", "input_ids"])
    assert rows["sample_mask"].tolist() == [0, 2, 4, 6] and not rows["sample_mask"].requires_grad
    assert rows.get("prompt_text").tolist() == ["a", "b", "c", "d"]
    assert rows_of(rows["input_ids"]) == [[0, 1, 2], [0], [0, 1, 2], [0]]


def test_background_puts_deliver_metas_and_errors(plane: Plane) -> None:
    partition = plane.partition()
    futures = [
        plane.owner.put_async([f"k{i}"], partition, {"sample_mask": torch.full((1,), float(i))}) for i in range(8)
    ]
    assert [future.result(timeout=60).keys for future in futures] == [(f"k{i}",) for i in range(8)]
    rows = plane.peer.kv_batch_get([f"k{i}" for i in range(8)], partition, ["sample_mask"])
    assert rows["sample_mask"].tolist() == [float(i) for i in range(8)]
    with pytest.raises(SchemaMismatch):
        plane.owner.put_async(["x"], partition, {"sample_mask": torch.ones(2)}).result(timeout=60)


def test_another_client_reads_what_one_wrote_and_its_close_ends_only_itself(plane: Plane) -> None:
    partition = plane.partition()
    other = plane.attach()
    put_ids(plane, partition, ["a"])
    assert rows_of(other.kv_batch_get(["a"], partition, ["input_ids"])["input_ids"]) == [[0]]
    other.kv_batch_put(["b"], partition, {"input_ids": ids_column([2])})
    other.close()
    other.close()
    with pytest.raises(DataPlaneError, match="closed"):
        other.kv_list(partition)
    assert rows_of(plane.peer.kv_batch_get(["b"], partition, ["input_ids"])["input_ids"]) == [[0, 1]]
    put_ids(plane, partition, ["c"])


def test_a_step_leaves_no_rows_even_when_it_fails_and_those_of_other_steps_alone(plane: Plane) -> None:
    partition = plane.partition()
    others, mine = ["other_g0", "other_g1"], keys_of(3)
    put_ids(plane, partition, others)
    with open_step(plane.owner, partition, mine):
        put_ids(plane, partition, mine)
    assert list(plane.owner.kv_list(partition)) == others
    with pytest.raises(RuntimeError, match="boom"), open_step(plane.owner, partition, mine):
        put_ids(plane, partition, mine)
        raise RuntimeError("boom")
    assert list(plane.owner.kv_list(partition)) == others
    assert plane.owner.kv_batch_get(others, partition, ["input_ids"])["input_ids"].size(0) == 2
    plane.owner.kv_clear(others, partition)
    assert plane.owner.stats()["live_rows"] == 0


def test_threads_share_a_client(plane: Plane) -> None:
    partition = plane.partition()

    def work(worker: int) -> None:
        for turn in range(6):
            keys = [f"w{worker}t{turn}_g{i}" for i in range(5)]
            start = worker * 1000 + turn
            plane.owner.kv_batch_put(keys, partition, {"input_ids": ids_column([2] * 5, start=start)})
            rows = plane.peer.kv_batch_get(keys, partition, ["input_ids"])
            assert rows["input_ids"].values().tolist() == list(range(start, start + 10))
            plane.owner.kv_clear(keys, partition)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert plane.owner.kv_list(partition) == {}


def test_reads_that_meet_a_rewrite_or_a_clear_are_whole(plane: Plane) -> None:
    partition, keys = plane.partition(), keys_of(1)

    def rewrite() -> None:
        for value in range(15):
            plane.owner.kv_batch_put(keys, partition, {"sample_mask": torch.full((4,), float(value))})
        plane.owner.kv_clear(None, partition)

    plane.owner.kv_batch_put(keys, partition, {"sample_mask": torch.zeros(4)})
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(rewrite)
        while not done.done():
            try:
                rows = plane.peer.kv_batch_get(keys, partition, ["sample_mask"])
            except KeysNotFound:
                break
            assert len(set(rows["sample_mask"].tolist())) == 1
        done.result()


@pytest.mark.parametrize(("num_experts", "bit_packed"), [(128, False), (512, False), (512, True)])
def test_routes_survive_bit_for_bit_in_any_order(plane: Plane, num_experts: int, bit_packed: bool) -> None:
    shape = RouteShape(layers=(0, 2, 3), top_k=4, num_experts=num_experts)
    lengths = torch.tensor([7, 1, 40, 8])
    scores = torch.rand(56, 3, num_experts, generator=torch.Generator().manual_seed(5))
    ids = scores.topk(4, dim=-1).indices.to(torch.int16)
    ids[[0, 6, 7, 20, 55]] = MISSING
    columns = encode_routes(nest(ids, lengths), shape, bit_packed=bit_packed, with_digests=True)
    partition, keys = plane.partition(list(columns)), keys_of(1)
    plane.owner.kv_batch_put(keys, partition, columns)
    order = [2, 0, 3, 1]
    fetched = plane.peer.kv_batch_get([keys[i] for i in order], partition, list(columns))
    found = {name: fetched.get(name) for name in columns}
    rows, digests = decode_routes(found, shape).unbind(), found["routed_experts_digests"].unbind()
    for row, digest, i in zip(rows, digests, order, strict=True):
        expected = ids.split(lengths.tolist())[i]
        assert torch.equal(row, expected)
        assert torch.equal(digest, route_digests(expected.long(), shape.layers))
