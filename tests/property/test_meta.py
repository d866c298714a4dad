"""Algebra of `KVBatchMeta`, on random metas."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.data_plane.chunks.wire import message_bytes, pack_rows, unpack_rows
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import SchemaMismatch
from nemo_rl.experience.payload import SampleStats
from nemo_rl.experience.rollout_records import RolloutResult
from nemo_rl.utils.metrics import Mean

uids = st.text(alphabet="ab_g0", min_size=1, max_size=4)
group_keys = st.tuples(uids, st.integers(0, 300)).map(lambda part: f"{part[0]}_g{part[1]}")
odd_keys = st.sampled_from(["plain", "a_g01", "b_g", "_g3", "c_g-1", "d_g\u0663", "e_g1_g2"])
tag_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
PLAN = PackPlan(microbatches=(((0,),),), steps=(1,), pad_to=8)


@st.composite
def metas(draw: st.DrawFn, *, min_size: int = 0) -> KVBatchMeta:
    keys = draw(st.lists(group_keys | odd_keys, unique=True, min_size=min_size, max_size=12))
    names = draw(st.lists(st.sampled_from(["std", "reward", "version"]), unique=True))
    row = st.fixed_dictionaries({}, optional=dict.fromkeys(names, tag_values))
    aligned = {"min_size": len(keys), "max_size": len(keys)}
    return KVBatchMeta(
        partition_id="train",
        keys=tuple(keys),
        fields=("input_ids",),
        sequence_lengths=draw(st.none() | st.lists(st.integers(0, 2**33), **aligned).map(tuple)),
        tags=draw(st.none() | st.lists(row, **aligned).map(tuple)),
        versions={
            "tokens": draw(st.integers(1, 3)),
            "extras": draw(st.integers(1, 3) | st.lists(st.integers(1, 3), **aligned).map(tuple)),
        },
        claims=draw(st.none() | st.lists(st.integers(1, 3), **aligned).map(tuple)),
        pack=draw(st.none() | st.just(PLAN)),
    )


def exact(meta: KVBatchMeta) -> tuple[object, ...]:
    """Equality that tells 1, 1.0, True and -0.0 apart."""
    tags = None if meta.tags is None else tuple(repr(sorted(row.items())) for row in meta.tags)
    return (
        meta.partition_id,
        meta.keys,
        meta.task_name,
        meta.fields,
        meta.sequence_lengths,
        tags,
        meta.versions,
        meta.claims,
        meta.pack,
    )


@given(metas())
def test_a_meta_survives_pickling_with_types_and_order(meta: KVBatchMeta) -> None:
    assert exact(pickle.loads(pickle.dumps(meta))) == exact(meta)


@given(metas(min_size=1), st.data())
def test_subset_follows_the_indices_and_composes(meta: KVBatchMeta, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(meta))))
    picked = order[: data.draw(st.integers(0, len(order)))]
    part = meta.subset(picked)
    assert part.keys == tuple(meta.keys[i] for i in picked) and part.pack is None
    pairs = [(getattr(part, name), getattr(meta, name)) for name in ("sequence_lengths", "tags", "claims")]
    for mine, theirs in [*pairs, (part._versions_by_row("extras"), meta._versions_by_row("extras"))]:
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert list(mine) == [theirs[i] for i in picked]
    assert part.versions["tokens"] == meta.versions["tokens"] and part.fields == meta.fields
    back = [picked.index(i) for i in sorted(picked)]
    assert exact(part.subset(back)) == exact(meta.subset(sorted(picked)))


@given(metas(), st.integers(-5, 20), st.integers(-5, 20))
def test_slices_are_clamped_and_join_to_the_whole(meta: KVBatchMeta, a: int, b: int) -> None:
    low, high = sorted((a, b))
    parts = meta.slice(-9, low), meta.slice(low, high), meta.slice(high, 99)
    assert sum(part.size for part in parts) == meta.size
    joined = parts[0].concat(*parts[1:])
    assert exact(joined) == exact(meta.with_pack(None))


@given(metas(), st.data())
def test_drop_is_the_complement_of_subset(meta: KVBatchMeta, data: st.DataObject) -> None:
    indices = st.integers(0, len(meta) - 1) if len(meta) else st.nothing()
    gone = data.draw(st.lists(indices, max_size=15 if len(meta) else 0))
    kept = [i for i in range(len(meta)) if i not in gone]
    assert exact(meta.drop(gone)) == exact(meta.subset(kept))
    everything = meta.drop([*range(len(meta)), *range(len(meta))])
    assert everything.size == 0 and everything.partition_id == "train"


@given(metas(min_size=1))
def test_metas_that_do_not_fit_are_refused(meta: KVBatchMeta) -> None:
    with pytest.raises(SchemaMismatch, match="duplicate keys"):
        meta.concat(meta)
    last, rest = meta.subset([len(meta) - 1]), meta.slice(0, len(meta) - 1)
    others = [
        KVBatchMeta(partition_id="val", keys=("z_g0",)),
        KVBatchMeta(partition_id="val", keys=()),
        last.with_fields(["x"]),
        last.with_fields([], versions={"text": 9}),
        replace(last, task_name="train"),
        replace(last, tags=({},) if meta.tags is None else None),
        replace(last, claims=(1,) if meta.claims is None else None),
    ]
    for other in others if rest else others[:2]:
        with pytest.raises(SchemaMismatch, match="concat"):
            rest.concat(other)
    for call in (meta.subset, meta.drop):
        for bad in (-1, len(meta)):
            with pytest.raises(SchemaMismatch, match="outside"):
                call([bad])


@given(metas())
def test_a_meta_without_rows_joins_anything_of_its_partition(meta: KVBatchMeta) -> None:
    nothing = KVBatchMeta(partition_id="train", keys=(), task_name="train", fields=("other",))
    for joined in (meta.concat(nothing, nothing), nothing.concat(meta)):
        assert exact(joined) == exact(meta.with_pack(None)) or not meta


@given(metas(min_size=2), st.data())
def test_versions_of_shards_come_back_to_their_rows(meta: KVBatchMeta, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(meta))))
    written = meta.with_fields(["prev_logprobs"], versions={"prev_logprobs": tuple(range(1, len(meta) + 1))})
    shards = [written.subset(order[:1]), written.subset([]), written.subset(order[1:])]
    back = meta.with_written(shards)
    assert exact(back) == exact(written)
    same = meta.with_fields(["prev_logprobs"], versions={"prev_logprobs": 4, "extras": 1})
    assert meta.with_written([same.subset(order[:1]), same.subset(order[1:])]).versions == same.versions


@pytest.mark.parametrize(
    "column", [torch.tensor([0.5, 2.0]), np.array([0.5, 2.0]), [np.float32(0.5), torch.tensor(2.0)]]
)
def test_tags_are_numbers_of_python_whatever_held_them(column: object) -> None:
    meta = KVBatchMeta(partition_id="p", keys=("a", "b")).with_tags({"std": column, "n": np.arange(2)})
    assert [dict(row) for row in meta.tags or ()] == [{"std": 0.5, "n": 0}, {"std": 2.0, "n": 1}]
    assert {type(value) for row in meta.tags or () for value in row.values()} == {int, float}
    for bad in (torch.ones(2, 2), [np.ones(1), 2.0], [object(), 1], "ab"):
        with pytest.raises(SchemaMismatch, match="tag 'std'"):
            meta.with_tags({"std": bad})
    with pytest.raises(SchemaMismatch, match="got float32"):
        KVBatchMeta(partition_id="p", keys=("a",), tags=({"x": np.float32(1)},))


@pytest.mark.parametrize("row", ["a", None, ["a"], 3])
def test_tags_of_a_row_are_a_mapping(row: object) -> None:
    with pytest.raises(SchemaMismatch, match="row 1: expected a mapping"):
        KVBatchMeta(partition_id="p", keys=("a", "b"), tags=[{"a": 1}, row])  # type: ignore[list-item]


@given(metas(), st.data())
def test_tags_are_copied_and_checked(meta: KVBatchMeta, data: st.DataObject) -> None:
    values = data.draw(st.lists(tag_values, min_size=len(meta), max_size=len(meta)))
    tagged = meta.with_tags({"std": values, "fresh": values})
    assert [row["std"] for row in tagged.tags or ()] == values == [row["fresh"] for row in tagged.tags or ()]
    assert tagged.pack == meta.pack
    if meta.tags is not None:
        assert all("fresh" not in row for row in meta.tags)
    with pytest.raises(SchemaMismatch):
        meta.with_tags({"std": [*values, 1]})
    source = [{"x": 1} for _ in meta.keys]
    copied = KVBatchMeta(partition_id="p", keys=meta.keys, tags=tuple(source))
    for row in source:
        row["x"] = 2
    assert all(row["x"] == 1 for row in copied.tags or ())


@given(metas())
def test_lengths_and_tags_must_align(meta: KVBatchMeta) -> None:
    wider = (*range(len(meta)), 1)
    for extra in (
        {"sequence_lengths": wider},
        {"tags": ({},) * (len(meta) + 1)},
        {"claims": wider},
        {"versions": {"x": wider}},
    ):
        with pytest.raises(SchemaMismatch, match="one per key"):
            KVBatchMeta(partition_id="p", keys=meta.keys, **extra)
    if meta.keys:
        with pytest.raises(SchemaMismatch, match="negative"):
            KVBatchMeta(partition_id="p", keys=meta.keys, sequence_lengths=(-1,) * len(meta))


@given(metas())
def test_fields_are_kept_once_and_in_order(meta: KVBatchMeta) -> None:
    more = meta.with_fields(["b", "input_ids", "a", "b"], versions={"tokens": 7, "text": 1})
    assert more.fields == ("input_ids", "b", "a")
    assert dict(more.versions) == {"tokens": 7, "extras": meta.versions["extras"], "text": 1}
    assert more.pack == meta.pack


@pytest.mark.parametrize("scale", [1.0, 2.0**-24, 1e300, 1e-320])
def test_many_distinct_floats_keep_every_bit(scale: float) -> None:
    values = [(i + 1) * scale for i in range(400)] + [float("inf"), float("nan"), -0.0]
    tags = tuple({"x": value} for value in values)
    unpacked = unpack_rows(pack_rows(tuple(f"k_g{i}" for i in range(len(values))), None, tags))[2]
    assert unpacked is not None and [repr(row["x"]) for row in unpacked] == [repr(value) for value in values]


def test_values_that_compare_equal_stay_apart() -> None:
    values = [0.0, -0.0, 0, False, 1, 1.0, True, None, "1", float("nan")] * 2
    tags = tuple({"x": value} for value in values)
    unpacked = unpack_rows(pack_rows(tuple(f"k_g{i}" for i in range(len(values))), None, tags))[2]
    assert unpacked is not None and [repr(row["x"]) for row in unpacked] == [repr(value) for value in values]


def test_a_meta_of_1024_rows_costs_few_bytes_per_row() -> None:
    keys = [f"{group:032x}_g{i}" for group in range(64) for i in range(16)]
    tags = [{"std": i * 0.37, "weight_version": 3} for i in range(1024)]
    size = message_bytes(pack_rows(keys, [100 + i for i in range(1024)], tags))
    assert (size - 64 * 32) / 1024 <= 12


def test_the_bytes_of_a_message_are_known_without_making_it() -> None:
    """Within a tenth of the pickle for what passes the driver; a meta's compact form is made once."""
    keys = tuple(f"{group:032x}_g{i}" for group in range(64) for i in range(16))
    tags = [{"std": i * 0.37, "weight_version": 3} for i in range(1024)]
    meta = KVBatchMeta(partition_id="train", keys=keys, sequence_lengths=[100 + i for i in range(1024)], tags=tags)
    rewards = np.ones(1024, dtype=np.float32)
    sample_stats = SampleStats(rewards=rewards, truncated=rewards > 0, response_lengths=rewards.astype(np.int32))
    result = RolloutResult(
        meta=meta, sample_stats=sample_stats, metrics={"reward": Mean(0.5, 1024.0)}, printed=("a line",)
    )
    for message in (meta, [meta.slice(i, i + 256) for i in range(0, 1024, 256)], (keys, list(range(1024))), result):
        assert message_bytes(message) == pytest.approx(len(pickle.dumps(message, protocol=5)), rel=0.1)
    assert meta._rows() is meta._rows() and meta == pickle.loads(pickle.dumps(meta))
    with pytest.raises(TypeError, match="got object"):
        message_bytes([object()])


INFO = {"source": "gsm8k", "temperature": 0.7, "of": [1, None, {"ok": True}]}


def test_extra_info_is_a_copy_that_survives_cuts_joins_and_messages() -> None:
    given = {**INFO, "seen": [1], "pair": (1, 2)}
    meta = KVBatchMeta(partition_id="train", keys=("a_g0", "a_g1"), extra_info=given, pack=PLAN)
    given["seen"].append(2)
    expected = {**INFO, "seen": [1], "pair": [1, 2]}
    assert meta.extra_info == expected
    with pytest.raises(TypeError):
        meta.extra_info["more"] = 1  # type: ignore[index]
    for other in (meta.subset([1]), meta.drop([0]), meta.with_pack(None), pickle.loads(pickle.dumps(meta))):
        assert other.extra_info == expected
        assert other.extra_info["seen"] is not meta.extra_info["seen"], "no two metas share a list"
    other = replace(meta, keys=("b_g0", "b_g1"), extra_info={"source": "gsm8k", "late": 1})
    assert meta.concat(other).extra_info == {**expected, "late": 1}
    assert meta.with_written([meta.subset([1]), meta.subset([0])]).extra_info == expected
    with pytest.raises(SchemaMismatch, match=r"extra_info\['source'\] differs: 'gsm8k' and 'math'"):
        meta.concat(replace(other, extra_info={"source": "math"}))
    bare = replace(meta, extra_info={}, pack=None)
    assert meta.num_bytes() - replace(bare, pack=PLAN).num_bytes() == pytest.approx(
        len(pickle.dumps(replace(meta, pack=None))) - len(pickle.dumps(bare)), rel=0.3
    )


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"x": torch.ones(1)}, r"extra_info\['x'\]: expected a JSON-like value .*, got Tensor"),
        ({"x": {"y": [1, np.float64(1.0)]}}, r"extra_info\['x'\]\['y'\]\[1\]: expected a JSON-like value .*, got 1.0"),
        ({"x": float("nan")}, "got nan"),
        ({"x": {1, 2}}, "got set"),
        ({"x": b"ab"}, "got bytes"),
        ({3: 1}, "expected texts as names, got 3"),
        ({"x": {None: 1}}, "expected texts as names, got None"),
        ([1], "expected a mapping, got list"),
        ({"micro_batch_indices": [[0, 1]]}, "is a plan; it belongs in KVBatchMeta.pack"),
        ({"global_forward_pad_seqlen": 64}, "is a plan"),
    ],
)
def test_extra_info_that_is_not_json_like_or_is_a_plan_is_refused(info: object, said: str) -> None:
    with pytest.raises(SchemaMismatch, match=said):
        KVBatchMeta(partition_id="train", keys=("a_g0",), extra_info=info)  # type: ignore[arg-type]


def test_extra_info_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(SchemaMismatch, match="at most 32 containers in one another"):
        KVBatchMeta(partition_id="train", keys=("a_g0",), extra_info={"x": loop})
