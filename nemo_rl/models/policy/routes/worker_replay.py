"""Router replay of one policy worker: which routes each of its passes replays or records.

A worker has a `WorkerReplay` where its config has `policy.router_replay.enabled`. Invariant: the
reference model and passes that ask for the model's own routes run without; every other pass has routes, or fails before
its first microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import FieldNotProduced, name_some
from nemo_rl.models.policy.microbatch import Microbatch, PassShape, row_names
from nemo_rl.models.policy.routes.replay import (
    MicrobatchRoutes,
    MicrobatchTokens,
    RouteReplayer,
    RouteTrace,
    microbatch_routes,
)
from nemo_rl.models.policy.routes.slices import RouteShard, RouteSlices, ShardRoutes
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.routes.shape import MISSING, RouteShape
from nemo_rl.utils.metrics import Reduction
from nemo_rl.utils.r3_trace import r3_trace_stage

__all__ = ["OWN_ROUTES", "ROUTES", "PassRoutes", "Routers", "WorkerReplay"]


ROUTES = "routed_experts"
"""Column of a batch with whole rows: `[N, T, L, K]`, decoded."""

Routing = Callable[[RouteReplayer], AbstractContextManager[None]]
"""Lets the routers of a model ask a replayer while it is entered."""


OnBackward = Callable[[torch.Tensor], None]
"""Takes the output of a forward pass: layers that its backward pass recomputes get the same routes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routers:
    """The routers of one rank's model, as its engine sees them."""

    replayer: RouteReplayer
    """Replayer of this rank's layers."""
    shape: RouteShape
    """Shape of the whole model's routes."""
    routing: Routing
    positions_first: bool = False
    """True where the routers see positions before rows."""
    chunks_tokens: bool = False
    """True where tensor ranks route different parts of the positions."""


class PassRoutes:
    """The instructions of the routers in the passes of one call; under the base class routers choose for themselves."""

    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> AbstractContextManager[OnBackward]:
        """Surround a forward pass, or a forward and its backward pass where no other microbatch comes between.

        Args:
            backward_follows: the backward pass comes later and recomputes layers; what is yielded instructs them.
        """
        return nullcontext(_nothing_follows)


OWN_ROUTES = PassRoutes()


def _nothing_follows(output: torch.Tensor) -> None:
    """Ignore the output of a forward pass."""


@dataclass(kw_only=True)
class StageReplay(PassRoutes):
    """The routes of one call's passes on one rank."""

    routers: Routers
    shard: RouteShard
    slices: RouteSlices | None
    """Routes to replay, or None to record."""
    numbers: dict[tuple[int, ...], int]
    """Rows of a microbatch -> its number in the plan."""
    trace: RouteTrace | None = None
    _recorded: list[MicrobatchRoutes] = field(default_factory=list)

    @contextmanager
    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> Iterator[OnBackward]:
        routes, replayer = self.routes_of(micro), self.routers.replayer
        with replayer.pass_of(routes, backward_follows=backward_follows):
            yield partial(replayer.on_backward, routes) if backward_follows else _nothing_follows

    def routes_of(self, micro: Microbatch) -> MicrobatchRoutes:
        """Return the routes of the microbatch, in the order of this rank's routers."""
        positions_first = self.routers.positions_first
        routes = microbatch_routes(
            self.slices.of(micro.rows) if self.slices is not None else None,
            MicrobatchTokens(
                rows=micro.rows,
                lengths=micro.lengths,
                row_ns=self.shard.chunk_of(micro.inputs.row_ns),
                column_ns=self.shard.chunk_of(micro.inputs.column_ns),
            ),
            number=self.numbers.get(micro.rows, -1),
            top_k=self.routers.replayer.top_k,
            positions_first=positions_first,
        )
        if self.slices is None:
            self._recorded.append(routes)
        if self.trace is not None:
            ids_ns = self.shard.chunk_of(micro.inputs.input_ids)
            self.trace.placed(routes, (ids_ns.T if positions_first else ids_ns).flatten())
        return routes

    def recorded(self, batch: BatchedDataDict) -> torch.Tensor:
        """Return `[N, T, L, K]` int16, decoded: this rank's layers of its tokens as recorded, -1 elsewhere."""
        shape, layers = self.routers.shape, self.routers.replayer.layers
        size = (*batch.tensor("input_ids").shape, len(shape.layers), shape.top_k)
        found = torch.full(size, MISSING, dtype=torch.int16)
        for routes in self._recorded:
            if not routes.rows:
                continue
            row_R = torch.tensor(routes.rows)[routes.row_T[routes.is_token_T].cpu()]
            column_R = routes.column_T[routes.is_token_T].cpu()
            for layer, column in zip(layers, self.shard.layer_index, strict=True):
                found[row_R, column_R, column] = routes.used[layer][routes.is_token_T].cpu().to(torch.int16)
        return found


class WorkerReplay:
    """(collective over the job: the constructor) Router replay of this rank."""

    def __init__(self, routers: Routers, here: RankInfo) -> None:
        self.routers, self.shape = routers, routers.shape
        self._here = here
        everywhere: list[tuple[int, ...]] = [()] * here.layout.world_size
        dist.all_gather_object(everywhere, routers.replayer.layers)
        self.shards = tuple(
            _shard_of(here.layout, of_rank, routers, layers) for of_rank, layers in enumerate(everywhere)
        )
        """Route shard of every rank of the job."""

    @property
    def shard(self) -> RouteShard:
        return self.shards[self._here.rank]

    def replaying(
        self,
        stage: WorkerPass,
        batch: BatchedDataDict,
        plan: PackPlan,
        shape: PassShape,
        routes: RouteSlices | None,
    ) -> AbstractContextManager[PassRoutes]:
        """Surround the passes of a call.

        Args:
            batch: the shard.
            plan: this rank's part, in indices into `batch`.
            routes: this rank's; None takes them from the column `ROUTES` of the batch.

        Raises:
            FieldNotProduced: there are none; names stage and samples.
            SchemaMismatch: they are not of this model.
        """
        return self._stage(stage, batch, plan, self._slices_of(stage, batch, plan, shape) if routes is None else routes)

    def recording(
        self, stage: WorkerPass, batch: BatchedDataDict, plan: PackPlan
    ) -> AbstractContextManager[StageReplay]:
        """Surround passes whose routers choose for themselves, and are recorded."""
        return self._stage(stage, batch, plan, None)

    @contextmanager
    def _stage(
        self, stage: WorkerPass, batch: BatchedDataDict, plan: PackPlan, slices: RouteSlices | None
    ) -> Iterator[StageReplay]:
        numbers = {tuple(rows): number for number, rows in enumerate(plan.microbatches[0]) if rows}
        replayer, traced = self.routers.replayer, self._traced(stage, batch, replays=slices is not None)
        with traced as trace, replayer.stage(stage.value, trace), self.routers.routing(replayer):
            yield StageReplay(routers=self.routers, shard=self.shard, slices=slices, numbers=numbers, trace=trace)

    @contextmanager
    def _traced(self, stage: WorkerPass, batch: BatchedDataDict, *, replays: bool) -> Iterator[RouteTrace | None]:
        at, layout = self._here.coordinates, self._here.layout
        layers = self.routers.replayer.layers
        with r3_trace_stage(
            stage.value,
            coords={"dp": at.dp, "cp": at.cp, "tp": at.tp, "pp": at.pp},
            sizes=layout.sizes,
            layers=layers,
            replays=replays,
        ) as traced:
            yield (
                None
                if traced is None
                else RouteTrace(
                    stage=traced,
                    keys=row_names(batch, range(batch.size)),
                    source_NT=batch.tensor("input_ids") if at.pp in (0, layout.pp - 1) else None,
                    layers=layers,
                    layer_index=self.shard.layer_index,
                    num_experts=self.shape.num_experts,
                )
            )

    def _slices_of(self, stage: WorkerPass, batch: BatchedDataDict, plan: PackPlan, shape: PassShape) -> RouteSlices:
        """Return this rank's part of the whole rows in a batch."""
        if ROUTES not in batch:
            raise self.missing(stage, batch)
        lengths = [int(length) for length in batch.tensor("input_lengths").tolist()]
        whole = ShardRoutes.of_dense(batch.tensor(ROUTES).cpu(), lengths, self.shape)
        return self.cut(whole, plan, shape, rank=self._here.rank)

    def missing(self, stage: WorkerPass, batch: BatchedDataDict) -> FieldNotProduced:
        """Return the error of a stage without routes."""
        names = name_some(row_names(batch, range(batch.size)))
        return FieldNotProduced(
            f"stage {stage.value!r}, rank {self._here.rank}: router replay needs the column {ROUTES!r} of samples "
            f"{names}, which no earlier stage wrote; let the rollout record routes, or set "
            "policy.router_replay.enabled=false"
        )

    def cut(self, whole: ShardRoutes, plan: PackPlan, shape: PassShape, *, rank: int) -> RouteSlices:
        """Return the routes that a rank of the replica group needs for its passes."""
        return whole.cut(self.shards[rank], plan, shape)

    def metrics(self) -> dict[str, Reduction]:
        return self.routers.replayer.metrics()


def _shard_of(layout: ParallelLayout, rank: int, routers: Routers, layers: tuple[int, ...]) -> RouteShard:
    at = layout.coordinates(rank)
    return RouteShard(
        cp_rank=at.cp,
        chunk=at.tp if routers.chunks_tokens else 0,
        num_chunks=layout.tp if routers.chunks_tokens else 1,
        layer_index=tuple(routers.shape.layers.index(layer) for layer in layers),
    )
