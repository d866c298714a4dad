"""`propose_limits`: limits out of recordings that were made alike, instead of limits that somebody chose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from nemo_rl.diagnostics.compare.folders import compare_folders
from nemo_rl.diagnostics.compare.limits import limits_text
from nemo_rl.diagnostics.compare.measurement import Metric
from nemo_rl.diagnostics.compare.site import ComparedSite
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import UserError
from nemo_rl.records.sites import Direction, SiteKind

__all__ = ["Floor", "Proposal", "propose_limits"]

FACTOR = 3.0
"""Limit over floor: the largest of a few differences is below that of many."""
TINY: Mapping[Metric, float] = {Metric.DIFFERING_FRACTION: 0.0}
"""Limit of what did not differ at all, where it is another than `EPSILON`."""
EPSILON = 1e-7
"""Half a unit in the last place of a float32."""
MAX_RULES = 600
"""A file of limits holds 5000 values, and a rule up to seven."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The largest difference of a site over all pairs."""

    site: ComparedSite
    metric: Metric
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Floors, and the limits that follow."""

    num_pairs: int
    floors: Sequence[Floor]
    """Floors in the order of a step."""
    text: str
    """A file of limits."""


def propose_limits(folders: Sequence[Path]) -> Proposal:
    """Return limits for comparisons with recordings like these, which must have been made with the same settings.

    Raises:
        UserError: fewer than two folders, or two that differ by more than noise.
    """
    if len(folders) < 2:
        raise UserError(f"noise: expected two recordings or more with the same settings, got {len(folders)}")
    floors: dict[tuple[ComparedSite, Metric], float] = {}
    pairs = list(combinations(folders, 2))
    for a, b in pairs:
        comparison = compare_folders(a, b)
        only_limits = not comparison.findings and all(
            result.is_noise or not result.failures for result in comparison.sites
        )
        if comparison.verdict is not Verdict.PASS and not only_limits:
            raise UserError(f"noise: {a} and {b} are not recordings of the same run: {comparison.reason}")
        for result in comparison.sites:
            found = {} if result.measurement is None else result.measurement.metrics
            for metric in result.limits:
                key = (result.site, metric)
                floors[key] = max(floors.get(key, 0.0), found.get(metric, 0.0))
    ordered = [
        Floor(site=site, metric=metric, value=value)
        for (site, metric), value in sorted(floors.items(), key=lambda item: item[0][0].order)
    ]
    return Proposal(num_pairs=len(pairs), floors=ordered, text=_text(ordered, len(pairs)))


def _text(floors: Sequence[Floor], num_pairs: int) -> str:
    """Return one rule for each site; for each kind of sites where these would be too many."""
    by_layer = _rules(floors, with_layers=True)
    rules = by_layer if len(by_layer) <= MAX_RULES else _rules(floors, with_layers=False)
    pairs = f"{num_pairs} pair{'' if num_pairs == 1 else 's'} of recordings"
    return f"# {FACTOR:g} times the largest difference of {pairs}.\n{limits_text(rules)}"


def _rules(floors: Sequence[Floor], *, with_layers: bool) -> list[Mapping[str, object]]:
    """Over all passes: the file does not tell them apart."""
    largest: dict[tuple[SiteKind, int | None, Direction, Metric], float] = {}
    for floor in floors:
        site = floor.site
        key = (site.kind, site.layer if with_layers else None, site.direction, floor.metric)
        largest[key] = max(largest.get(key, 0.0), floor.value)
    rules: list[Mapping[str, object]] = []
    for (kind, layer, direction, metric), value in largest.items():
        where = {"sites": kind.value} | ({} if layer is None else {"layers": str(layer)})
        limit = max(_rounded_up(FACTOR * value), TINY.get(metric, EPSILON))
        rules.append({**where, "direction": direction.value, "metric": metric.value, "max": limit})
    return rules


def _rounded_up(value: float) -> float:
    """Round up to two digits."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
