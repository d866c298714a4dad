"""A hub with runs that were made up: for tests of the tracer's page, and for its pictures in the documentation.

python -m tests.helpers.tracer_demo                 serves one that goes on, and says its address
python -m tests.helpers.tracer_demo --shots DIR     makes three screenshots, 1280x800
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.frame import Frame, FrameSite, FrameTable, Where
from nemo_rl.tracer.protocol import HubTokens
from nemo_rl.tracer.reducer import Histogram, parse_reducer
from nemo_rl.tracer.watch import WatchPlan
from nemo_rl_tools.tracer.hub.hub import Hub
from nemo_rl_tools.tracer.hub.server import HubEndpoint, HubServer
from tests.helpers.browser import Browser, chromium_path
from tests.helpers.tracer_recordings import stats_of

WATCHES = (
    "layer.out | stats; tiles(1, rms); histogram | train",
    "mlp.out | stats; tiles(1, mean); tiles(8, absmax) | train",
    "layer.out | project(truth) | train",
    "moe.topk_ids | counts | train",
    "logits | topk(5) | train",
)
NUM_LAYERS, HIDDEN, NUM_EXPERTS, TOP_K = 6, 64, 8, 5
PROMPT = "Sort these numbers from small to large :\n 42 , 7 , 19 , 3 , 28 .\n"
ANSWERS = (
    "First compare 42 and 7 : 7 is smaller . The order is\n 3 , 7 , 19 , 28 , 42 .",
    "Let me think . The smallest number is 3 , so the answer is\n 3 , 7 , 19 , 28 , 42 .",
    "I put 42 first , because it is large , then 28 , 19 , 7 and 3 .",
)


@dataclass
class DemoRun:
    """Numbers of a run that learns; the same ones each time."""

    name: str = "sort-moe-6l"
    run: str = "run-a"
    seed: int = 0
    bad_step: int | None = None
    """First step whose values of `mlp.out[3]` and of later sites are not finite, or None."""
    rows: tuple[str, ...] = tuple(PROMPT + answer for answer in ANSWERS)
    vocabulary: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pieces = [list(pieces_of(row)) for row in self.rows]
        for pieces in self.pieces:
            for piece in pieces:
                self.vocabulary.setdefault(piece, 100 + len(self.vocabulary))

    @property
    def record(self) -> dict[str, object]:
        """The `run` message."""
        return {
            "run": self.run,
            "name": self.name,
            "model": {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN},
            "layout": {"dp": 2},
            "unobserved": {"attn.q": "queries and keys are one fused product in this model"},
            "state": "running",
            "text": "",
            "world": 2,
        }

    def table(self, step: int) -> FrameTable:
        keys = tuple(f"prompt-{step % 5}/sample-{at}" for at in range(len(self.pieces)))
        rows = [
            (at, place, self.vocabulary[piece])
            for at, pieces in enumerate(self.pieces)
            for place, piece in enumerate(pieces)
        ]
        tokens = np.array(rows, dtype=np.int32).T.copy()
        texts = {str(number): piece for piece, number in self.vocabulary.items()}
        return FrameTable(run=self.run, name=f"{self.run}-{step}", step=step, keys=keys, tokens=tokens, texts=texts)

    def frames(self, step: int) -> Iterator[Frame]:
        """Yield all frames of a step, in no particular order."""
        table = self.table(step)
        for layer in range(NUM_LAYERS):
            yield from self._layer(step, layer, table)
        yield self._next_tokens(step, table)
        random = np.random.default_rng([self.seed, step, 99])
        norm = np.array([2.5 * np.exp(-step / 25) + 0.3 * random.random()])
        grad = FrameSite(SiteKind.GRAD, name="model.embed_tokens.weight")
        yield self._frame(step, grad, "norm", norm)
        digest = np.array([-(2**62) - step * 12345678901], dtype=np.int64)
        yield self._frame(step, grad, "digest", digest)

    def _layer(self, step: int, layer: int, table: FrameTable) -> Iterator[Frame]:
        random = np.random.default_rng([self.seed, step, layer])
        residual_RF = self._residual(step, layer, table, random)
        mlp_RF = 0.4 * residual_RF * random.normal(1.0, 0.5, residual_RF.shape).astype(np.float32) + 0.02 * layer
        if self.bad_step is not None and step >= self.bad_step and layer >= 3:
            mlp_RF[5:9, 4] = np.nan
            mlp_RF[11, 7], mlp_RF[12, 8] = np.inf, -np.inf
            if layer > 3:
                residual_RF[5:13] = np.nan
        layer_out, mlp_out = FrameSite(SiteKind.LAYER_OUT, layer=layer), FrameSite(SiteKind.MLP_OUT, layer=layer)
        yield self._frame(step, layer_out, "stats", stats_of(residual_RF), residual_RF)
        yield self._frame(step, layer_out, "histogram", histogram_of(residual_RF), residual_RF)
        yield self._frame(step, layer_out, "tiles(1, rms)", rms(residual_RF), residual_RF, table)
        direction = np.random.default_rng(7).normal(size=HIDDEN).astype(np.float32) / 8
        yield self._frame(step, layer_out, "project(truth)", (residual_RF @ direction)[:, None], residual_RF, table)
        yield self._frame(step, mlp_out, "stats", stats_of(mlp_RF), mlp_RF)
        tiles = mlp_RF.reshape(len(mlp_RF), 8, -1)
        yield self._frame(step, mlp_out, "tiles(8, absmax)", np.abs(tiles).max(axis=2), mlp_RF, table)
        yield self._frame(step, mlp_out, "tiles(1, mean)", mlp_RF.mean(axis=1, keepdims=True), mlp_RF, table)
        if layer == 2:
            yield self._frame(step, mlp_out, "full", mlp_RF, mlp_RF, table)
        backward = FrameSite(SiteKind.LAYER_OUT, layer=layer, direction=Direction.BACKWARD)
        gradient = random.normal(size=2000) * 1e-4 * np.exp(-step / 30) * (NUM_LAYERS - layer)
        yield self._frame(step, backward, "stats", stats_of(gradient))
        load = random.multinomial(TOP_K * 40, self._routing(step, layer, random))
        yield self._frame(step, FrameSite(SiteKind.ROUTER_IDS, layer=layer), "counts", load.astype(np.int64))

    def _residual(self, step: int, layer: int, table: FrameTable, random: np.random.Generator) -> np.ndarray:
        row_R, position_R, id_R = table.tokens
        size = 0.5 * 1.45**layer * (1 + 0.008 * step)
        per_id = np.random.default_rng(3).normal(1.0, 0.28, 400)[id_R].clip(0.35)
        shape = np.where(position_R == 0, 4.5, 1.0) * per_id * (1 + 0.25 * np.sin(position_R / 5 + layer + row_R))
        noise = random.standard_t(5, size=(len(id_R), HIDDEN))
        return (size * shape[:, None] * noise).astype(np.float32)

    def _routing(self, step: int, layer: int, random: np.random.Generator) -> np.ndarray:
        taste = np.random.default_rng([self.seed, layer, 5]).normal(size=NUM_EXPERTS)
        sharpness = 0.25 + 0.02 * step * (layer == 4) + 0.5 * np.exp(-step / 10)
        weights = np.exp(taste * sharpness + 0.05 * random.normal(size=NUM_EXPERTS))
        return weights / weights.sum()

    def _next_tokens(self, step: int, table: FrameTable) -> Frame:
        random = np.random.default_rng([self.seed, step, 77])
        _, position_R, id_R = table.tokens
        known = np.array(sorted(self.vocabulary.values()))
        best = np.empty((len(id_R), TOP_K, 2))
        for at in range(len(id_R)):
            follows = at + 1 < len(id_R) and position_R[at + 1] == position_R[at] + 1
            wrong = random.permutation(known)[:TOP_K]
            found = [id_R[at + 1], *wrong[wrong != id_R[at + 1]]][:TOP_K] if follows else list(wrong)
            if random.random() > 0.55 + step / 90:
                found[0], found[1] = found[1], found[0]
            best[at, :, 0] = np.sort(random.normal(12 + step / 12, 3, TOP_K))[::-1]
            best[at, :, 1] = found
        return self._frame(step, FrameSite(SiteKind.LOGITS), f"topk({TOP_K})", best, None, table)

    def _frame(
        self,
        step: int,
        site: FrameSite,
        reducer: str,
        payload: np.ndarray,
        values: np.ndarray | None = None,
        table: FrameTable | None = None,
    ) -> Frame:
        return Frame(
            where=Where(self.run, step, "train", site, parse_reducer(reducer)),
            payload=np.ascontiguousarray(payload),
            table=table.name if table is not None else None,
            num_features=HIDDEN if values is None else values.shape[1],
            num_not_finite=0 if values is None else int((~np.isfinite(values)).sum()),
            wall_s=1e9 + step,
        )

    def metrics(self, step: int) -> dict[str, float]:
        random = np.random.default_rng([self.seed, step, 55])
        learnt = 1 - np.exp(-step / 14)
        return {
            "reward/mean": float(0.15 + 0.7 * learnt + 0.04 * random.normal()),
            "train/loss": float(0.4 * np.exp(-step / 20) + 0.03 * random.normal()),
            "train/grad_norm": float(1.2 + 0.3 * random.normal() ** 2),
            "train/kl": float(0.002 * step + 0.004 * random.random()),
            "rollout/num_tokens_mean": float(22 + 14 * learnt + random.normal()),
            "train/entropy": float(1.9 - 0.9 * learnt + 0.05 * random.normal()),
        }


def pieces_of(text: str) -> Iterator[str]:
    """Yield words with the space before them; a new line is a piece."""
    for at, line in enumerate(text.split("\n")):
        if at:
            yield "\n"
        for place, word in enumerate(line.split(" ")):
            if word:
                yield f" {word}" if place else word


def rms(values_RF: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.sqrt((values_RF.astype(np.float64) ** 2).mean(axis=1, keepdims=True)).astype(np.float32)


def histogram_of(values: np.ndarray) -> np.ndarray:
    """Count the values by powers of two."""
    edges = 2.0 ** np.arange(-32, 32)
    finite = values[np.isfinite(values)].astype(np.float64)
    counts, _ = np.histogram(finite, bins=np.concatenate(([-np.inf], -edges[::-1], edges, [np.inf])))
    assert len(counts) == Histogram().size
    return counts.astype(np.int64)


class DemoHub:
    """A hub in its own thread."""

    def __init__(self, *, watches: tuple[str, ...] = WATCHES, port: int = 0, tokens: HubTokens | None = None) -> None:
        self.tokens = tokens or HubTokens.draw()
        self._watches, self.port = watches, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="feed")

    def __enter__(self) -> DemoHub:
        self._thread.start()
        self._wait(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self.server.__aexit__(None, None, None))
        self._wait(self._settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self.hub = Hub(plan=WatchPlan.parse(self._watches))
        self.server = HubServer(self.hub, tokens=self.tokens, endpoint=HubEndpoint(port=self.port))
        await self.server.__aenter__()
        self.port = self.server.port

    async def _settle(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _wait(self, work: Any) -> Any:
        found: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return found.result(timeout=30)

    def call(self, act: Callable[[], Any]) -> Any:
        """Runs something in the thread of the hub."""

        async def work() -> Any:
            return act()

        return self._wait(work())

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def url(self, token: str | None = None) -> str:
        """Return the address of the page with the controller's token."""
        return f"{self.address}#token={token or self.tokens.controller}"

    def publish(self, *made: Frame | FrameTable) -> None:
        def act() -> None:
            for one in made:
                if isinstance(one, FrameTable):
                    self.hub.publish_table(one)
                else:
                    self.hub.publish_frame(one)

        self.call(act)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message of the protocol to all viewers."""
        self.call(lambda: self.hub.publish_message(message))

    def begin(self, run: DemoRun) -> None:
        self.call(lambda: self.hub.set_run(run.record))
        self.call(lambda: self.hub.applied(0, self.hub.plan.digest))

    def step(self, run: DemoRun, step: int) -> None:
        self.publish(run.table(step), *run.frames(step))
        self.send({"type": "metrics", "run": run.run, "step": step, "metrics": run.metrics(step)})


def make_shots(folder: Path) -> None:
    """Make the pictures of the documentation."""
    folder.mkdir(parents=True, exist_ok=True)
    run = DemoRun()
    with DemoHub() as feed, Browser(chromium_path()) as browser:
        feed.begin(run)
        for step in range(1, 41):
            feed.step(run, step)
        page = browser.page(width=1280, height=800)
        page.goto(feed.url())
        page.wait_for_function("() => window.tracer?.runs[0]?.steps.length === 40")
        for name, view in (("heat_map", "tokens"), ("bands", "steps"), ("experts", "experts")):
            page.evaluate("view => tracer.show(view)", view)
            browser.settle(page)
            page.screenshot(path=str(folder / f"tracer_{name}.png"))


def serve() -> None:
    """Serve two runs until the process is ended, a step a second."""
    first, second = DemoRun(bad_step=60), DemoRun(name="sort-moe-6l-seed1", run="run-b", seed=1)
    with DemoHub() as feed:
        print(feed.url(), flush=True)
        feed.begin(first)
        feed.begin(second)
        for step in range(1, 1000):
            feed.step(first, step)
            feed.step(second, step)
            time.sleep(0.05 if step < 40 else 1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path)
    chosen = parser.parse_args()
    if chosen.shots is not None:
        make_shots(chosen.shots)
    else:
        serve()
