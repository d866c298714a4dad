"""A run that traces its routes, with real layouts and no model: rollout, fetch, zigzag shards, sequence and pipeline
parallel cuts, routers, recomputation. A test overrides the step that goes wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch

from nemo_rl.models.attention.varlen import Segments
from nemo_rl.routes.digest import route_digests
from nemo_rl.utils import r3_trace

__all__ = ["RouteRun"]

MISSING = -1


class RouteRun:
    """4 samples in 2 microbatches on context x tensor x pipeline ranks; layers 0 and 3 are dense."""

    keys = ["a_g0", "a_g1", "b_g0", "b_g1"]
    lengths = [13, 13, 9, 16]
    batches = [[0, 1], [2, 3]]
    stages = ["prev_logprobs", "train"]
    layers = [1, 2, 4, 5]
    num_experts, top_k = 16, 2
    cp_size, tp_size, pp_size = 2, 2, 2
    missing = [(0, 4)]
    """(sample, token) without a route."""
    dead_ranks: Sequence[int] = ()
    """Ranks that leave no trace."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        self.folder = folder
        rng = np.random.default_rng(seed)
        self.tokens = [rng.integers(0, 1000, length, dtype=np.int32) for length in self.lengths]
        self.routes = [self._draw(rng, length) for length in self.lengths]
        for sample, token in self.missing:
            self.routes[sample][token] = MISSING

    def write(self) -> Path:
        """Write all files, one per process."""
        if "NRL_R3_TRACE" not in os.environ:
            os.environ.update(NRL_R3_TRACE="1", NRL_R3_TRACE_VERIFY_FORWARD="1")
        self._as_process(100, None, self.write_driver)
        for rank, (pp, cp, tp) in enumerate(self.places()):
            if rank not in self.dead_ranks:
                self._as_process(200 + rank, rank, lambda c=(cp, tp, pp): self.write_rank(*c))
        return self.folder

    # What each process does; overridden where something goes wrong.

    def write_driver(self) -> None:
        r3_trace.trace_plan(stages=self.stages)
        r3_trace.trace_rollout_payload(keys=self.keys, data=self.columns(self.tokens, self.routes), layers=self.layers)

    def write_rank(self, cp: int, tp: int, pp: int) -> None:
        share = len(self.layers) // self.pp_size
        held = self.layers[pp * share : (pp + 1) * share]
        for stage in self.stages:
            fetched = self.fetch(stage)
            if (cp, tp, pp) == (0, 0, 0):
                data = self.columns([self.tokens[i] for i in fetched], list(fetched.values()))
                keys = [self.keys[i] for i in fetched]
                r3_trace.trace_tq_fetch_payload(stage=stage, keys=keys, data=data, layers=self.layers)
            coords, sizes = {"dp": 0, "cp": cp, "tp": tp, "pp": pp}, self.sizes
            with r3_trace.r3_trace_stage(stage, coords=coords, sizes=sizes, layers=held) as traced:
                for number, batch in enumerate(self.batches):
                    self.write_batch(traced, number, [i for i in batch if i in fetched], fetched, held)

    def write_batch(self, traced, number: int, batch: list[int], fetched, held: list[int]) -> None:
        c = traced.coords if traced is not None else {"cp": 0, "tp": 0, "pp": 0}
        runs, positions = self.slots(batch, c["cp"])
        own = self.gather(batch, self.shard_positions(batch, c["cp"]), fetched)[:, [self.layers.index(x) for x in held]]
        tokens = np.array([0 if i is None else self.tokens[i][p] for i, p in positions], dtype=np.int32)
        r3_trace.trace_cp_routed_experts(
            traced,
            microbatch=number,
            slots=r3_trace.TracedSlots(runs=runs, input_ids=tokens),
            routes=torch.from_numpy(own),
            layers=held,
        )
        half = len(positions) // self.tp_size
        mine = slice(c["tp"] * half, (c["tp"] + 1) * half)
        honest = self.gather(batch, positions, dict(enumerate(self.routes)))
        actions = ["replay_forward", "replay_backward"] if traced is not None and traced.stage == "train" else None
        for layer, column in self.layer_map(held):
            ids = own[mine, column]
            router = r3_trace.TracedRouter(microbatch=number, layer_number=layer, first_slot=mine.start)
            r3_trace.trace_router_replay_assignment(traced, router, payload_idx=column, ids=ids)
            for action in actions or ["replay_forward"]:
                self.write_use(traced, router, action, ids, honest[mine, self.layers.index(layer)])

    def write_use(self, traced, router: r3_trace.TracedRouter, action: str, ids, honest) -> None:
        r3_trace.trace_router_replay_action(traced, router, action=action, ids=ids, pending=1)
        used = self.use(action, np.where(ids == MISSING, np.arange(self.top_k), ids))
        is_missing = torch.from_numpy((honest == MISSING).all(-1))
        r3_trace.trace_router_replay_forward_verify(
            traced,
            router,
            r3_trace.UsedRoutes(
                actual=torch.from_numpy(used),
                expected=route_digests(torch.from_numpy(honest)[:, None], [router.layer_number])[:, 0],
                missing=is_missing,
                num_experts=self.num_experts,
            ),
            action=action,
        )

    def fetch(self, stage: str) -> dict[int, np.ndarray]:
        """Return the routes of the samples that a worker gets."""
        return dict(enumerate(self.routes))

    def shard_positions(self, batch: list[int], cp: int) -> list[tuple[int | None, int]]:
        """Return the (sample, position) that the routes of each slot are taken from."""
        return self.slots(batch, cp)[1]

    def layer_map(self, held: list[int]) -> list[tuple[int, int]]:
        """Return the layers of the model with their columns in the payload of the rank."""
        return [(layer, column) for column, layer in enumerate(held)]

    def use(self, action: str, ids: np.ndarray) -> np.ndarray:
        """Return the experts that the forward pass really uses."""
        return ids

    # Layouts.

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the parallel axes."""
        return {"dp": 1, "cp": self.cp_size, "tp": self.tp_size, "pp": self.pp_size}

    def places(self) -> list[tuple[int, int, int]]:
        """Return the (pipeline, context, tensor) place of each rank."""
        return list(product(range(self.pp_size), range(self.cp_size), range(self.tp_size)))

    def padded(self, sample: int) -> int:
        """Return a sample's share of a packed row."""
        unit = 2 * self.cp_size * self.tp_size
        return -(-self.lengths[sample] // unit) * unit

    def slots(self, batch: list[int], cp: int):
        """Return the slots of a context rank as runs, and as (sample or None, position)."""
        row = [(i, p) if p < self.lengths[i] else (None, p) for i in batch for p in range(self.padded(i))]
        segments = Segments(lengths=tuple(self.padded(i) for i in batch), cp_size=self.cp_size, cp_rank=cp)
        positions = [row[p] for p in segments.local_positions().tolist()]
        rows = [-1 if i is None else i for i, _ in positions]
        return slot_runs(self.keys, rows, [p for _, p in positions]), positions

    def gather(self, batch: list[int], positions, routes) -> np.ndarray:
        """Return the `[S, L, K]` int64 routes of places; padding gets 0 to K - 1."""
        dummy = np.tile(np.arange(self.top_k), (len(self.layers), 1))
        rows = [dummy if i is None or p >= len(routes[i]) else routes[i][p] for i, p in positions]
        return np.stack(rows).astype(np.int64)

    def columns(self, tokens: Sequence[np.ndarray], routes: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Return padded columns as workers have them."""
        width = max(map(len, tokens))
        ids = np.zeros((len(tokens), width), dtype=np.int32)
        dense = np.zeros((len(tokens), width, len(self.layers), self.top_k), dtype=np.int16)
        for i, (token, route) in enumerate(zip(tokens, routes, strict=True)):
            ids[i, : len(token)], dense[i, : len(route)] = token, route
        lengths = torch.tensor([len(token) for token in tokens], dtype=torch.int32)
        return {"input_ids": torch.from_numpy(ids), "input_lengths": lengths, "routed_experts": torch.from_numpy(dense)}

    def _draw(self, rng: np.random.Generator, length: int) -> np.ndarray:
        scores = rng.random((length, len(self.layers), self.num_experts))
        return scores.argsort(-1)[..., : self.top_k].astype(np.int64)

    def _as_process(self, pid: int, rank: int | None, body) -> None:
        """Runs it with counters and its own file, then gives the file the number of another process."""
        apart = self.folder.parent / f"{self.folder.name}.{pid}"
        os.environ["NRL_R3_TRACE_DIR"] = str(apart)
        r3_trace.reset_r3_trace()
        body()
        r3_trace.reset_r3_trace()
        self.folder.mkdir(exist_ok=True, parents=True)
        place: dict[str, object] = {"host": "host", "pid": pid}
        place |= {} if rank is None else {"rank": rank, "world_size": len(self.places())}
        for path in apart.glob("*.jsonl"):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            lines = [json.dumps({**record, **place}, sort_keys=True) for record in records]
            (self.folder / f"r3_trace_host_pid{pid}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def slot_runs(keys: Sequence[str], rows: Sequence[int], positions: Sequence[int]) -> list[tuple[str | None, int, int]]:
    """Return the runs of S slots.

    Args:
        keys: of the rows of the pass.
        rows: S row numbers; below 0 for padding.
        positions: S places of the tokens in their samples; any for padding.

    Example:
        >>> slot_runs(["a_g0", "b_g0"], [0, 0, 0, -1, 1], [0, 1, 6, 7, 0])
        [('a_g0', 0, 2), ('a_g0', 6, 1), (None, 0, 1), ('b_g0', 0, 1)]
    """
    runs: list[tuple[str | None, int, int]] = []
    for row, position in zip(rows, positions, strict=True):
        key, place = (keys[row], position) if row >= 0 else (None, 0)
        last, start, length = runs[-1] if runs else ("", 0, 0)
        if runs and key == last and (key is None or place == start + length):
            runs[-1] = (key, start, length + 1)
        else:
            runs.append((key, place, 1))
    return runs
