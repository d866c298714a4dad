"""The first NaN or infinity of a recording, in the order in which passes meet sites."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl.records.reader import Record, read_folder
from nemo_rl.records.sites import SiteKind, execution_order

__all__ = ["NonFiniteValue", "first_non_finite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFiniteValue:
    """Where it is."""

    phase: str
    site: str
    """With layer and direction, such as `mlp.out[1] backward`."""
    microbatch: int
    rank: int
    key: str | None = None
    """Row; None at a site without tokens."""
    position: int | None = None
    num_values: int
    """That are not finite, in this record."""

    @property
    def text(self) -> str:
        """For people."""
        where = f", sample {self.key!r}, position {self.position}" if self.key is not None else ""
        return (
            f"{self.phase}/{self.site}, microbatch {self.microbatch}, rank {self.rank}{where} "
            f"({self.num_values} values that are not finite)"
        )


def first_non_finite(folder: Path) -> NonFiniteValue | None:
    """None where all is finite. Recordings that ended early are read as far as they go.

    Raises:
        UserError: no folder of records.
        CorruptRecord: a record is not what was written.
    """
    found = read_folder(folder)
    order = {phase: place for place, phase in enumerate(found.manifest.phases)}
    for record in sorted(found.records, key=lambda record: _order(record, order)):
        value = record.load()
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return _named(record, value)
    return None


def _order(record: Record, phases: dict[str, int]) -> tuple[int, ...]:
    place = record.place
    at = execution_order(place.kind, place.layer, place.direction)
    return (phases.get(place.phase, len(phases)), place.update, place.microbatch, *at, record.rank, record.seq)


def _named(record: Record, value: torch.Tensor) -> NonFiniteValue:
    place = record.place
    is_bad = ~value.isfinite()
    at = place.layer if place.kind is not SiteKind.GRAD else place.name
    site = f"{place.kind.value}{'' if at is None else f'[{at}]'}"
    found = {
        "phase": place.phase,
        "site": site if place.direction == "forward" else f"{site} {place.direction.value}",
        "microbatch": place.microbatch,
        "rank": record.rank,
        "num_values": int(is_bad.sum()),
    }
    tokens = record.tokens()
    if tokens is None or not len(tokens):
        return NonFiniteValue(**found)  # type: ignore[arg-type]
    row = int(is_bad.flatten(1).any(1).nonzero()[0]) if is_bad.dim() > 1 else int(is_bad.nonzero()[0])
    return NonFiniteValue(
        **found,  # type: ignore[arg-type]
        key=tokens.keys[int(tokens.row_R[row])],
        position=int(tokens.position_R[row]),
    )
