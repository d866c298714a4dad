"""Several generation engines behind one `GenerationInterface`.

The rollout worker calls `generate`; new weights come through `WeightSync`, past this class. Prompts are split into
consecutive blocks, one per replica, so a group of samples never crosses replicas. What a row samples does not depend on
the split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from nemo_rl.distributed.calls import Call, Request, ask
from nemo_rl.distributed.worker_groups import WorkerGroup
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    RecordedRoutes,
)

__all__ = ["GenerationReplicas", "join_outputs", "split_request"]

_T = TypeVar("_T")


class GenerationReplicas(GenerationInterface):
    """Engines in a worker group.

    Args:
        engines: each worker is a `GenerationInterface`.
        timeout_s: deadline of one call.
    """

    def __init__(self, engines: WorkerGroup, *, timeout_s: float) -> None:
        self._engines = engines
        self._timeout_s = timeout_s
        self._version = -1

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        parts = split_request(request, self._engines.world_size)
        return join_outputs(self._run([ask(GenerationInterface.generate, request=part) for part in parts]))

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        self._version = self._run(ask(GenerationInterface.update_weights, weights=list(weights), version=version))[0]
        return self._version

    def prepare_for_generation(self) -> None:
        self._run(ask(GenerationInterface.prepare_for_generation))

    def finish_generation(self) -> None:
        self._run(ask(GenerationInterface.finish_generation))

    @property
    def weight_version(self) -> int:
        return self._version

    def shutdown(self) -> None:
        self._engines.shutdown()

    def _run(self, request: Request[_T] | Sequence[Request[_T]]) -> list[_T]:
        return self._engines.run(Call(request=request, stage="generation", timeout_s=self._timeout_s))


def split_request(request: GenerationRequest, num_parts: int) -> list[GenerationRequest]:
    """Consecutive blocks of prompts with their seeds; sizes differ by at most one prompt."""
    num_prompts, group = len(request.prompt_ids), request.group_size
    bounds = [num_prompts * part // num_parts for part in range(num_parts + 1)]
    return [
        GenerationRequest(
            prompt_ids=request.prompt_ids[start:stop],
            seeds=request.seeds[start * group : stop * group],
            sampling=request.sampling,
            with_routes=request.with_routes,
        )
        for start, stop in pairwise(bounds)
    ]


def join_outputs(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """Outputs of the blocks, in order; engines may have sampled from different weight versions."""
    versions = tuple(version for output in outputs for version in output.row_versions)
    return GenerationOutput(
        token_ids=torch.cat([output.token_ids for output in outputs]),
        logprobs=torch.cat([output.logprobs for output in outputs]),
        lengths=torch.cat([output.lengths for output in outputs]),
        truncated=torch.cat([output.truncated for output in outputs]),
        weight_version=versions or outputs[0].weight_version,
        routes=_join_routes([output.routes for output in outputs if output.routes is not None]),
    )


def _join_routes(routes: Sequence[RecordedRoutes]) -> RecordedRoutes | None:
    if not routes:
        return None
    return RecordedRoutes(
        ids=torch.cat([part.ids for part in routes]),
        starts=torch.cat([part.starts for part in routes]),
        lengths=torch.cat([part.lengths for part in routes]),
        shape=routes[0].shape,
    )
