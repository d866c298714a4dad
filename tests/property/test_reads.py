"""Any rows through chunks of any size and back, jagged and padded, in any order of keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data_plane.chunks.ragged import materialize
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.schema import extra_field
from nemo_rl.jagged import nest
from tests.helpers.case_selection import num_examples
from tests.helpers.data_planes import open_plane, rows_of

DTYPES = ["bool", "uint8", "int16", "int32", "int64", "bfloat16", "float32", "float64"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
LONG = 1_500
"""Rows above this many bytes are copied one by one, smaller ones all at once."""


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[int, DataPlaneClient]]:
    """By chunk size: a chunk per row, a few rows in each, all rows in one."""
    sizes = (1, 200, 1 << 20)
    with ExitStack() as stack:
        yield {size: stack.enter_context(open_plane("noop", chunk_bytes=size)).owner for size in sizes}


@st.composite
def batches(draw: st.DrawFn) -> dict:
    num_rows = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(0, 6) | st.just(LONG), min_size=num_rows, max_size=num_rows))
    dtype, trailing = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(), (1,), (2, 3), (0,)]))
    return {
        "lengths": torch.tensor(lengths),
        "dtype": dtype,
        "trailing": trailing,
        "notes": draw(st.lists(JSON, min_size=num_rows, max_size=num_rows)),
        "order": draw(st.permutations(range(num_rows)).map(lambda p: p[: max(1, num_rows - 1)])),
        "pad": draw(st.sampled_from([0, 1, 7])),
        "extra": draw(st.sampled_from([None, 0, 3])),
    }


@settings(deadline=None, max_examples=num_examples())
@given(batch=batches(), chunk_bytes=st.sampled_from([1, 200, 1 << 20]))
def test_what_was_put_is_read_jagged_and_padded(
    clients: dict[int, DataPlaneClient], batch: dict, chunk_bytes: int
) -> None:
    client, lengths = clients[chunk_bytes], batch["lengths"]
    trailing, num_rows, total = batch["trailing"], len(batch["lengths"]), int(batch["lengths"].sum())
    values = (torch.arange(total * prod(trailing)) % 127).to(getattr(torch, batch["dtype"])).reshape(total, *trailing)
    x, s = nest(values, lengths), torch.arange(num_rows, dtype=torch.int64)
    counts = lengths % 3  # ragged, and not by tokens: never padded to the width of a sequence
    marks = nest(torch.arange(int(counts.sum()), dtype=torch.int16), counts)
    dims = tuple(f"D{i}" for i in range(len(trailing)))
    specs = [
        extra_field("x", dtypes=[batch["dtype"]], dims=("T", *dims), pad=batch["pad"]),
        extra_field("s", dtypes=["int64"]),
        extra_field("marks", dtypes=["int16"], dims=("M",)),
        extra_field("note", is_object=True),
    ]
    partition = f"{batch['dtype']}-{len(dims)}-{batch['pad']}-{trailing}"
    client.register_partition(partition, specs, 99, [])
    keys = [f"k{i}" for i in range(num_rows)]
    meta = client.kv_batch_put(keys, partition, {"x": x, "s": s, "marks": marks, "note": batch["notes"]})
    try:
        order = batch["order"]
        picked = meta.subset(order)
        rows = client.get_data(picked, ["note", "x", "s", "marks"])
        assert rows["x"].dtype == x.dtype and rows_of(rows["x"]) == [rows_of(x)[i] for i in order]
        assert rows["s"].tolist() == order and rows.get("note").tolist() == [batch["notes"][i] for i in order]
        width = None if batch["extra"] is None else int(lengths[order].max()) + batch["extra"]
        pads = {"x": batch["pad"]}
        padded = client.get_padded(picked, ["x", "s", "marks", "note"], pad_values=pads, pad_to=width)
        expected = materialize(rows, pad_values=pads, pad_to=width, token_aligned=["x"])
        assert padded["x"].dtype == x.dtype and torch.equal(padded["x"], expected["x"])
        assert torch.equal(padded["marks"], expected["marks"])
        assert padded["s"].tolist() == order and padded["note"] == expected["note"]
        padded["x"].fill_(1)  # memory that the next read may get: it must not show there
    finally:
        client.kv_clear(None, partition)
