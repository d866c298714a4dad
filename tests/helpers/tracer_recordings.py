"""Frames, tables and recordings of the tracer: made up for tests, and read back to compare two recordings."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from websockets.sync.client import connect

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.frame import Frame, FramePart, FrameSite, FrameTable, Where
from nemo_rl.tracer.protocol import LIVE_PATH, PROTOCOL_VERSION
from nemo_rl.tracer.reducer import STATS, Span, Stats, TopK, parse_reducer
from nemo_rl_tools.tracer.entry import EntryKind
from nemo_rl_tools.tracer.store import StreamWriter
from nemo_rl_tools.tracer.stream_reader import StreamReader

RUN = "run-1"
RUN_MESSAGE = {
    "type": "run",
    "run": RUN,
    "name": "exp_001",
    "model": {"name": "Qwen3", "num_layers": 4},
    "layout": {"dp": 2, "tp": 1},
    "unobserved": {"moe.logits": "the model has no router"},
    "state": "running",
    "text": "",
    "step": 1,
    "world": 2,
    "first_non_finite": None,
}
PLAN_MESSAGE = {"type": "plan", "watches": ["layer.out | stats"], "digest": "0" * 16, "effective_step": 1}


def stats_of(values):
    """Return the payload of `stats`."""
    values = np.asarray(values, dtype=np.float64)
    finite = values[np.isfinite(values)]
    some = finite.size > 0
    return np.array(
        [
            values.size,
            finite.sum(),
            (finite**2).sum(),
            finite.min() if some else np.inf,
            finite.max() if some else -np.inf,
            np.abs(finite).max() if some else 0.0,
            (values == 0).sum(),
            np.isnan(values).sum(),
            np.isposinf(values).sum(),
            np.isneginf(values).sum(),
        ]
    )


def where_of(step, *, kind=SiteKind.LAYER_OUT, layer=0, phase="train", reducer="stats", run=RUN, **more):
    return Where(run, step, phase, FrameSite(kind, layer=layer), parse_reducer(reducer), **more)


def stats_frame(step, values=(1.0, 2.0, 3.0), *, wall_s=0.0, missing=(), dropped=0, **place):
    payload = stats_of(values)
    return Frame(
        where=where_of(step, **place),
        payload=payload,
        num_features=len(values),
        num_not_finite=int(payload[7:].sum()),
        missing=missing,
        dropped=dropped,
        wall_s=wall_s,
    )


def token_frame(step, *, table="t", num_tokens=3, **place):
    payload = np.full((num_tokens, 8), float(step), dtype=np.float32)
    return Frame(where=where_of(step, reducer="tiles(8, mean)", **place), payload=payload, table=table, num_features=8)


def token_table(step, *, name="t", num_tokens=3, run=RUN):
    tokens = np.stack([np.zeros(num_tokens), np.arange(num_tokens), np.arange(num_tokens) + 65]).astype(np.int32)
    texts = {str(65 + place): chr(65 + place) for place in range(num_tokens)}
    return FrameTable(run=run, name=name, step=step, keys=("row-0",), tokens=tokens, texts=texts)


def small_recording(folder, *, num_steps=3, num_layers=2, bad=None, state="ended", max_bytes=1 << 20, step_s=1.0):
    """Write steps 1, 2, ... of stats, with NaN in `mlp.out` from layer `bad[0]` and step `bad[1]` on."""
    with StreamWriter(folder, max_bytes) as writer:
        writer.message(RUN_MESSAGE)
        writer.message(PLAN_MESSAGE)
        for step in range(1, num_steps + 1):
            writer.frame(token_table(step, name=f"t{step}").encode())
            for layer in range(num_layers):
                is_bad = bad is not None and step >= bad[1] and layer >= bad[0]
                values = (float("nan"), 1.0, float("inf")) if is_bad else (1.0, 2.0, 3.0 * step)
                for kind in (SiteKind.MLP_OUT, SiteKind.LAYER_OUT):
                    writer.frame(
                        stats_frame(step, values, kind=kind, layer=layer, wall_s=100.0 + step * step_s).encode()
                    )
            writer.frame(token_frame(step, table=f"t{step}").encode())
            writer.message(
                {"type": "metrics", "run": RUN, "step": step, "metrics": {"reward": 0.5, "kl": float("nan")}}
            )
        writer.message({"type": "mark", "label": "look here", "step": num_steps})
        if state != "running":
            writer.message({**RUN_MESSAGE, "state": state, "step": num_steps, "text": "completed"})
    return folder


class FakePeer:
    """A rank or the driver of a job, as the hub knows them."""

    def __init__(self, address, token, role, **hello):
        self.opened = ExitStack()
        connecting = connect(f"ws://{address}{LIVE_PATH}", compression=None, proxy=None, close_timeout=1)
        self.connection = self.opened.enter_context(connecting)
        self.send(type="hello", v=PROTOCOL_VERSION, role=role, token=token, **hello)
        assert self.receive()["type"] == "welcome"

    def send(self, **message):
        self.connection.send(json.dumps(message))

    def receive(self):
        return json.loads(self.connection.recv(timeout=10))

    def close(self):
        self.opened.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class FakeJob:
    """A driver and one rank, which send the steps that they are told to."""

    def __init__(self, address, token):
        self.driver = FakePeer(address, token, "driver")
        facts = {name: RUN_MESSAGE[name] for name in ("run", "name", "model", "layout", "unobserved")}
        self.driver.send(type="run", tokenizer="", **facts)
        self.rank = FakePeer(address, token, "rank", run=RUN, rank=0, world=1)

    def step(self, step, values=(1.0, 2.0, 3.0), *, layers=2):
        self.driver.send(type="step", step=step, keys=["row-0"])
        self.rank.send(type="begin", step=step, phase="train")
        table = token_table(step, name=f"t{step}")
        self.rank.connection.send(table.encode())
        for layer in range(layers):
            stats = stats_of(values)
            bad = int(stats[7:].sum())
            self.rank.connection.send(
                FramePart(
                    where=where_of(step, layer=layer), payload=stats, span=Span(0, 3, 3), num_not_finite=bad
                ).encode()
            )
        where = where_of(step, reducer="tiles(8, mean)")
        payload = np.full((3, 8), float(step))
        self.rank.connection.send(
            FramePart(where=where, payload=payload, span=Span(0, 8, 8), table=table.name).encode()
        )
        self.rank.send(type="end", step=step, phase="train", sent=layers + 1, dropped=0)
        self.driver.send(type="metrics", step=step, metrics={"reward": 0.5})

    def finish(self):
        self.driver.send(type="finish", reason="completed", text="")
        self.close()

    def close(self):
        self.rank.close()
        self.driver.close()


Frames = dict[tuple[str, str, str], Frame]
"""Frames by phase, site and reducer."""


def num_frames(folder: Path) -> int:
    """Count the frames of a recording, also those that came too late for a rank on a busy machine."""
    return sum(entry.kind is EntryKind.FRAME for entry in StreamReader(folder).entries())


def frames_of(folder: Path) -> tuple[Frames, dict[str, FrameTable]]:
    """Read the frames and tables of a recording of one step."""
    frames, tables = {}, {}
    for entry in StreamReader(folder).entries():
        if entry.kind not in (EntryKind.FRAME, EntryKind.TABLE):
            continue
        message = entry.frame()
        if isinstance(message, FrameTable):
            tables[message.name] = message
        else:
            where = message.where
            assert not message.missing and not message.dropped, message
            frames[where.phase, where.site.text, str(where.reducer)] = message
    return frames, tables


def tokens_of(frame: Frame, tables: dict[str, FrameTable]) -> list[tuple[str, int, int]]:
    """Return row, position and id of each token of a frame."""
    assert frame.table is not None
    table = tables[frame.table]
    rows, positions, ids = table.tokens
    return [(table.keys[row], int(at), int(token)) for row, at, token in zip(rows, positions, ids, strict=True)]


def differences(one: Frames, other: Frames) -> dict[tuple[str, str, str], float]:
    """Return the distance of the frames of the same name, relative to the largest value of the site."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    return {name: _apart(one[name], other[name]) for name in one}


def _apart(one: Frame, other: Frame) -> float:
    a, b = one.payload.astype(np.float64), other.payload.astype(np.float64)
    assert a.shape == b.shape, (one, other)
    if isinstance(one.where.reducer, Stats):
        found, wanted = (dict(zip(STATS, payload, strict=True)) for payload in (a, b))
        if one.where.site.kind is SiteKind.LOSS:
            # Each microbatch has its share: the sum alone does not depend on how many there are.
            return abs(found["sum"] / wanted["sum"] - 1.0)
        exact = ("count", "nan", "posinf", "neginf")
        assert [found[name] for name in exact] == [wanted[name] for name in exact], one.where
        count, largest = max(found["count"], 1), max(wanted["absmax"], 1e-30)
        scales = {
            "sum": largest * count,
            "sumsq": largest**2 * count,
            "min": largest,
            "max": largest,
            "absmax": largest,
        }
        return max(abs(found[name] - wanted[name]) / scale for name, scale in scales.items())
    if isinstance(one.where.reducer, TopK):
        a, b = a[..., 0], b[..., 0]
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
