"""Router replay of one policy worker: which routes each of its stages replays or records.

Held by a worker whose config has `policy.router_replay.enabled`. Invariant: the reference model and passes that ask for
the model's own routes run without; every other pass of a stage has routes, or the stage fails before its first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nemo_rl.data_plane.route_shape import MISSING, RouteShape
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import FieldNotProduced, name_some
from nemo_rl.models.policy.microbatch import Microbatch, PassShape
from nemo_rl.models.policy.route_replay import MicrobatchRoutes, RouteReplayer, microbatch_routes
from nemo_rl.models.policy.route_trace import RouteTrace
from nemo_rl.models.policy.routes import RouteSlices, RouteView, ShardRoutes
from nemo_rl.models.policy.steps import row_names
from nemo_rl.utils.metrics import Reduction
from nemo_rl.utils.r3_trace import r3_trace_stage

__all__ = ["ROUTES", "StageReplay", "WorkerReplay"]

ROUTES = "routed_experts"
"""Column of a batch with whole rows: `[N, T, L, K]` in install form."""

Routing = Callable[[RouteReplayer], AbstractContextManager[None]]
"""Lets the routers of a model ask a replayer while it is entered."""


@dataclass(kw_only=True, slots=True)
class StageReplay:
    """The passes of one stage on one rank."""

    replayer: RouteReplayer
    view: RouteView
    slices: RouteSlices | None
    """None to record."""
    numbers: dict[tuple[int, ...], int]
    """Rows of a microbatch -> its number in the plan."""
    positions_first: bool
    trace: RouteTrace | None = None
    recorded: list[MicrobatchRoutes] = field(default_factory=list)

    def routes_of(self, micro: Microbatch) -> MicrobatchRoutes:
        """Of the microbatch, in the order of this rank's routers."""
        routes = microbatch_routes(
            self.slices.of(micro.rows) if self.slices is not None else None,
            number=self.numbers.get(micro.rows, -1),
            rows=micro.rows,
            lengths=micro.lengths,
            row_ns=self.view.chunk_of(micro.inputs.row_ns),
            column_ns=self.view.chunk_of(micro.inputs.column_ns),
            top_k=self.replayer.top_k,
            positions_first=self.positions_first,
        )
        if self.slices is None:
            self.recorded.append(routes)
        if self.trace is not None:
            ids_ns = self.view.chunk_of(micro.inputs.input_ids)
            self.trace.placed(routes, (ids_ns.T if self.positions_first else ids_ns).flatten())
        return routes


class WorkerReplay:
    """(collective over the job: the constructor) Router replay of this rank.

    Args:
        routing: of the engine that holds the model.
        positions_first: whether its routers see positions before rows.
        chunks_tokens: whether tensor ranks route different parts of the positions.
    """

    def __init__(
        self,
        replayer: RouteReplayer,
        *,
        shape: RouteShape,
        layout: ParallelLayout,
        rank: int,
        routing: Routing,
        positions_first: bool = False,
        chunks_tokens: bool = False,
    ) -> None:
        self.replayer, self.shape = replayer, shape
        self._layout, self._rank = layout, rank
        self._routing, self._positions_first = routing, positions_first
        everywhere: list[tuple[int, ...]] = [()] * layout.world_size
        dist.all_gather_object(everywhere, replayer.layers)
        self.views = tuple(
            _view(layout, of_rank, shape, layers, chunks_tokens) for of_rank, layers in enumerate(everywhere)
        )
        """What every rank of the job needs."""

    @property
    def view(self) -> RouteView:
        """What this rank needs."""
        return self.views[self._rank]

    @contextmanager
    def stage(
        self, name: str, plan: PackPlan, slices: RouteSlices | None, batch: BatchedDataDict
    ) -> Iterator[StageReplay]:
        """Around the passes of a stage.

        Args:
            plan: this rank's view.
            slices: None to record.
            batch: the shard.
        """
        numbers = {tuple(rows): number for number, rows in enumerate(plan.microbatches[0]) if rows}
        traced = self._traced(name, batch, replays=slices is not None)
        with traced as trace, self.replayer.stage(name, trace), self._routing(self.replayer):
            yield StageReplay(
                replayer=self.replayer,
                view=self.view,
                slices=slices,
                numbers=numbers,
                positions_first=self._positions_first,
                trace=trace,
            )

    @contextmanager
    def _traced(self, name: str, batch: BatchedDataDict, *, replays: bool) -> Iterator[RouteTrace | None]:
        place, layout = self._layout.coordinates(self._rank), self._layout
        with r3_trace_stage(
            name,
            coords={"dp": place.dp, "cp": place.cp, "tp": place.tp, "pp": place.pp},
            sizes={"dp": layout.dp, "cp": layout.cp, "tp": layout.tp, "pp": layout.pp},
            layers=self.replayer.layers,
            replays=replays,
        ) as stage:
            yield (
                None
                if stage is None
                else RouteTrace(
                    stage=stage,
                    keys=row_names(batch, range(batch.size)),
                    source_NT=batch.tensor("input_ids") if place.pp in (0, layout.pp - 1) else None,
                    layers=self.replayer.layers,
                    layer_index=self.view.layer_index,
                    num_experts=self.shape.num_experts,
                )
            )

    def slices_of_batch(self, stage: str, batch: BatchedDataDict, plan: PackPlan, shape: PassShape) -> RouteSlices:
        """This rank's part of the whole rows in a batch.

        Raises:
            FieldNotProduced: the batch has no routes; names stage and samples.
            SchemaMismatch: they are not of this model.
        """
        if ROUTES not in batch:
            raise self.missing(stage, batch)
        lengths = [int(length) for length in batch.tensor("input_lengths").tolist()]
        whole = ShardRoutes.of_dense(batch.tensor(ROUTES).cpu(), lengths, self.shape)
        return self.cut(whole, plan, shape, rank=self._rank)

    def missing(self, stage: str, batch: BatchedDataDict) -> FieldNotProduced:
        """The error of a stage without routes."""
        names = name_some(row_names(batch, range(batch.size)))
        return FieldNotProduced(
            f"stage {stage!r}, rank {self._rank}: router replay needs the column {ROUTES!r} of samples {names}, which "
            "no earlier stage wrote; let the rollout record routes, or set policy.router_replay.enabled=false"
        )

    def cut(self, whole: ShardRoutes, plan: PackPlan, shape: PassShape, *, rank: int) -> RouteSlices:
        """What a rank of the replica group needs for its passes."""
        return whole.cut(self.views[rank], plan, shape)

    def metrics(self) -> dict[str, Reduction]:
        """Counts since the last call."""
        return self.replayer.metrics()

    def recorded(self, stage: StageReplay, batch: BatchedDataDict) -> torch.Tensor:
        """`[N, T, L, K]` int16 in install form: this rank's layers of its tokens as recorded, -1 elsewhere."""
        found = torch.full(
            (*batch.tensor("input_ids").shape, len(self.shape.layers), self.shape.top_k), MISSING, dtype=torch.int16
        )
        for routes in stage.recorded:
            if not routes.rows:
                continue
            row_R = torch.tensor(routes.rows)[routes.row_T[routes.is_token_T].cpu()]
            column_R = routes.column_T[routes.is_token_T].cpu()
            for layer, column in zip(self.replayer.layers, self.view.layer_index, strict=True):
                found[row_R, column_R, column] = routes.used[layer][routes.is_token_T].cpu().to(torch.int16)
        return found


def _view(
    layout: ParallelLayout, rank: int, shape: RouteShape, layers: tuple[int, ...], chunks_tokens: bool
) -> RouteView:
    place = layout.coordinates(rank)
    return RouteView(
        cp_rank=place.cp,
        chunk=place.tp if chunks_tokens else 0,
        num_chunks=layout.tp if chunks_tokens else 1,
        layer_index=tuple(shape.layers.index(layer) for layer in layers),
    )
