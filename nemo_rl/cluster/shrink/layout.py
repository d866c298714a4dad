"""`SmallLayout`: the parallel axes of a recipe at 2 each, as far as so many processes are bearable here.

Invariant: an axis that is above 1 in the recipe is above 1 here unless `reduced` says why not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nemo_rl.config.policy import ParallelSizes

__all__ = ["SmallLayout", "small_layout"]

KEPT = 2
"""Ranks along an axis that has several: the fewest that exchange anything."""
GIVEN_UP_IN_TURN = ("expert_tensor", "pipeline", "context", "tensor", "expert")
"""Which axis goes first where all of them at 2 are too many processes; the data axis goes before them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallLayout:
    """Sizes of the axes here."""

    sizes: ParallelSizes
    workers: int
    """Policy workers in all."""
    real: ParallelSizes
    real_workers: int
    reduced: tuple[str, ...]
    """Axes of the recipe that are 1 here, each with the reason."""

    @property
    def data(self) -> int:
        """Data-parallel shards."""
        return self.workers // self.sizes.replica_size

    @property
    def text(self) -> str:
        """For people.

        Example:
            >>> small_layout(ParallelSizes(tensor=4, sequence_parallel=True), 16, max_workers=8).text
            '16 workers (tp 4, dp 4, sp) -> 4 workers (tp 2, dp 2, sp)'
        """
        return f"{_said(self.real, self.real_workers)} -> {_said(self.sizes, self.workers)}"


def small_layout(real: ParallelSizes, workers: int, *, max_workers: int) -> SmallLayout:
    """The layout here of a recipe with so many workers."""
    sizes = ParallelSizes(
        tensor=min(real.tensor, KEPT),
        pipeline=min(real.pipeline, KEPT),
        context=min(real.context, KEPT),
        expert=min(real.expert, KEPT),
        expert_tensor=min(real.expert_tensor, KEPT),
        sequence_parallel=real.sequence_parallel,
    )
    kept, given_up = sizes, list[str]()
    for name in GIVEN_UP_IN_TURN:
        if _fewest(sizes) > max_workers:
            sizes = _without(sizes, name)
            given_up.append(name)
    # One that was given up before a larger one may fit after all.
    for name in list(given_up):
        others = [other for other in given_up if other != name]
        if _fewest(_without(kept, *others)) <= max_workers:
            sizes, given_up = _without(kept, *others), others
    reduced = [
        f"{name.replace('_', ' ')} parallel: {_fewest(kept)} processes are more than {max_workers}" for name in given_up
    ]
    fewest = _fewest(sizes)
    real_data, data = workers // real.replica_size, fewest // sizes.replica_size
    if real_data > 1 and data == 1:
        if fewest * KEPT <= max_workers:
            fewest *= KEPT
        else:
            reduced.append(f"data parallel: {fewest * KEPT} processes are more than {max_workers}")
    return SmallLayout(sizes=sizes, workers=fewest, real=real, real_workers=workers, reduced=tuple(reduced))


def _fewest(sizes: ParallelSizes) -> int:
    """Workers that both the dense weights and the experts divide."""
    return math.lcm(sizes.replica_size, sizes.expert_tensor * sizes.expert * sizes.pipeline)


def _without(sizes: ParallelSizes, *names: str) -> ParallelSizes:
    changes: dict[str, int] = dict.fromkeys(names, 1)
    is_split = sizes.sequence_parallel and "tensor" not in names
    return replace(sizes, **changes, sequence_parallel=is_split)  # type: ignore[arg-type]


def _said(sizes: ParallelSizes, workers: int) -> str:
    axes = {
        "tp": sizes.tensor,
        "pp": sizes.pipeline,
        "cp": sizes.context,
        "ep": sizes.expert,
        "etp": sizes.expert_tensor if sizes.expert > 1 else 1,
        "dp": workers // sizes.replica_size,
    }
    shown = [f"{name} {size}" for name, size in axes.items() if size > 1]
    shown += ["sp"] if sizes.sequence_parallel else []
    return f"{workers} worker{'s' if workers > 1 else ''}" + (f" ({', '.join(shown)})" if shown else "")
