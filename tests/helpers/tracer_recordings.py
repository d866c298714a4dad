"""Frames, tables and recordings of the tracer, made up for tests."""

from __future__ import annotations

import json
from contextlib import ExitStack

import numpy as np
from websockets.sync.client import connect

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.frame import Frame, FramePart, FrameSite, FrameTable, Where
from nemo_rl.tracer.protocol import LIVE_PATH, PROTOCOL_VERSION
from nemo_rl.tracer.reducer import Span, parse_reducer
from nemo_rl.tracer.store import StreamWriter

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
    """Payload of `stats`."""
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
    """Steps 1, 2, ... of stats, with NaN in `mlp.out` of the layer and from the step on that `bad` names."""
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
        self.say(type="hello", v=PROTOCOL_VERSION, role=role, token=token, **hello)
        assert self.hear()["type"] == "welcome"

    def say(self, **message):
        self.connection.send(json.dumps(message))

    def hear(self):
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
        self.driver.say(type="run", tokenizer="", **facts)
        self.rank = FakePeer(address, token, "rank", run=RUN, rank=0, world=1)

    def step(self, step, values=(1.0, 2.0, 3.0), *, layers=2):
        self.driver.say(type="step", step=step, keys=["row-0"])
        self.rank.say(type="begin", step=step, phase="train")
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
        self.rank.say(type="end", step=step, phase="train", sent=layers + 1, dropped=0)
        self.driver.say(type="metrics", step=step, metrics={"reward": 0.5})

    def finish(self):
        self.driver.say(type="finish", reason="completed", text="")
        self.close()

    def close(self):
        self.rank.close()
        self.driver.close()
