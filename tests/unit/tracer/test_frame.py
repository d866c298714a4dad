"""Frames, parts and tables come back as they were sent; what is none is refused without harm."""

import json
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.frame import (
    MAGIC,
    MAX_HEADER_BYTES,
    BadFrame,
    Frame,
    FramePart,
    FrameSite,
    FrameTable,
    Where,
    decode,
)
from nemo_rl.tracer.reducer import Span, parse_reducer

SITES = (
    FrameSite(SiteKind.MLP_OUT, 3),
    FrameSite(SiteKind.LOSS),
    FrameSite(SiteKind.GRAD, name="lm_head.weight"),
    FrameSite(SiteKind.LAYER_OUT, 0, direction=Direction.BACKWARD, is_recomputed=True),
)
REDUCERS = ("stats", "tiles(8, rms)", "histogram(-1.5, 2.0, 7)", "project(truth)", "sample(3)")
DTYPES = ("float32", "float64", "int32", "int64")


def where(site=SITES[0], reducer="stats", **more):
    return Where("run", 5, "train", site, parse_reducer(reducer), **more)


def part(**more):
    return FramePart(where=where(), payload=np.zeros(10), span=Span(0, 4, 4), **more)


@settings(max_examples=30, deadline=None)
@given(
    site=st.sampled_from(SITES),
    reducer=st.sampled_from(REDUCERS),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3),
    rows=st.none() | st.lists(st.integers(0, 100), max_size=5),
    table=st.none() | st.text(st.characters(codec="utf-8"), max_size=5),
)
def test_what_is_sent_comes_back(site, reducer, dtype, shape, rows, table):
    payload = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    rows = None if rows is None else np.array(rows, dtype=np.int32)
    at = where(site, reducer, update=2)
    sent = FramePart(
        where=at, payload=payload, span=Span(1, 3, 9), table=table, rows=rows, microbatch=4, rank=2, axes={"tp": 1},
        num_not_finite=6, dropped_before=7,
    )  # fmt: skip
    shown = Frame(
        where=at, payload=payload, table=table, num_features=9, num_parts=3, num_not_finite=6, missing=(1, 4),
        dropped=5, wall_s=1.5,
    )  # fmt: skip
    for each in (sent, shown):
        found = decode(each.encode())
        assert type(found) is type(each)
        for name in type(each).__slots__:
            expected, got = getattr(each, name), getattr(found, name)
            if isinstance(expected, np.ndarray):
                assert got.dtype == expected.dtype and got.shape == expected.shape
                np.testing.assert_array_equal(got, expected)
            else:
                assert got == expected, name


def test_not_a_number_travels():
    found = decode(Frame(where=where(), payload=np.array([np.nan, np.inf])).encode())
    np.testing.assert_array_equal(found.payload, [np.nan, np.inf])


def test_tables_come_back_with_their_texts():
    tokens = np.zeros((3, 2), dtype=np.int32)
    sent = FrameTable(run="r", name="t", step=1, keys=("a",), tokens=tokens, texts={"0": "\u00e9"})
    found = decode(sent.encode())
    assert (found.run, found.name, found.step, found.keys, found.texts) == ("r", "t", 1, ("a",), {"0": "\u00e9"})
    np.testing.assert_array_equal(found.tokens, sent.tokens)


def test_payloads_start_where_numbers_of_eight_bytes_may():
    message = part().encode()
    assert struct.unpack_from("<I", message, 4)[0] % 8 == 0


def message_of(sent, payload=None, **changes):
    """A message with other header fields."""
    message = sent.encode()
    length = struct.unpack_from("<I", message, 4)[0]
    header = {**json.loads(message[8 : 8 + length]), **changes}
    text = json.dumps({name: value for name, value in header.items() if value is not ...}).encode()
    return MAGIC + struct.pack("<I", len(text)) + text + (message[8 + length :] if payload is None else payload)


TABLE = FrameTable(run="r", name="t", step=1, keys=("a",), tokens=np.zeros((3, 2), dtype=np.int32))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"NRT1",
        b"NRT2" + bytes(100),
        MAGIC + struct.pack("<I", 1 << 31),
        MAGIC + struct.pack("<I", 2) + b"[]",
        MAGIC + struct.pack("<I", 60_000) + b"[" * 60_000,
        MAGIC + struct.pack("<I", 4) + b"\xff\xff\xff\xff",
        message_of(part(), what="picture"),
        message_of(part(), what=["part"]),
        message_of(part(), dtype="object"),
        message_of(part(), dtype="float16"),
        message_of(part(), shape=[11]),
        message_of(part(), shape=[9]),
        message_of(part(), shape=[-1, -10]),
        message_of(part(), shape=[1 << 40, 1 << 40]),
        message_of(part(), shape=[10.0]),
        message_of(part(), shape=[1] * 9),
        message_of(part(), shape=10),
        message_of(part(), span=[0, 5, 4]),
        message_of(part(), span=[-1, 1, 4]),
        message_of(part(), span=[0, 4]),
        message_of(part(), num_rows=3),
        message_of(part(), num_rows=-1),
        message_of(part(rows=np.zeros(3, dtype=np.int32)), num_rows=2),
        message_of(part(), rank=-1),
        message_of(part(), step=True),
        message_of(part(), step=...),
        message_of(part(), reducer="__import__('os')"),
        message_of(part(), site={"kind": "nowhere", "layer": 0, "direction": "forward"}),
        message_of(part(), site={"kind": "mlp.out", "layer": -1, "direction": "forward"}),
        message_of(part(), site=[]),
        message_of(part(), run=5),
        message_of(part(), axes=[1]),
        message_of(Frame(where=where(), payload=np.zeros(10)), missing=["x"]),
        message_of(Frame(where=where(), payload=np.zeros(10)), payload=bytes(88)),
        message_of(TABLE, keys=[]),
        message_of(TABLE, dtype="float32"),
        message_of(TABLE, shape=[2, 3]),
        message_of(TABLE, texts=[]),
    ],
)
def test_what_is_no_frame_is_refused(message):
    with pytest.raises(BadFrame):
        decode(message)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_messages_are_frames_or_refused(data):
    message = bytearray(part(rows=np.arange(3, dtype=np.int32)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    with suppress(BadFrame):
        decode(bytes(message[:cut]))


def test_texts_of_sites_are_for_people():
    assert [site.text for site in SITES] == [
        "mlp.out[3]",
        "loss",
        "grad[lm_head.weight]",
        "layer.out[0] backward recomputed",
    ]


def test_a_header_beyond_its_bound_is_refused_whatever_it_says():
    table = FrameTable(run="r", name="t", step=1, keys=("a",), tokens=np.zeros((3, 1), dtype=np.int32)).encode()
    length = int.from_bytes(table[4:8], "little")
    padded = table[8 : 8 + length] + b" " * MAX_HEADER_BYTES
    message = table[:4] + len(padded).to_bytes(4, "little") + padded + table[8 + length :]
    with pytest.raises(BadFrame, match="at most 1048576 bytes"):
        decode(message)
