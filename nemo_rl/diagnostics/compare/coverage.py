"""What both recordings should hold and one does not: sites, passes, rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl.diagnostics.compare.side import Side
from nemo_rl.diagnostics.compare.site import Site
from nemo_rl.diagnostics.compare.site_result import SiteResult
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import UserError, name_some
from nemo_rl.records.selector import Selector
from nemo_rl.records.sites import Direction, SiteKind

__all__ = ["Coverage", "common_sites"]


@dataclass(kw_only=True, slots=True)
class Coverage:
    """Sites of both sides, and why others are of one side only."""

    common: list[Site] = field(default_factory=list)
    """In the order in which a step meets them."""
    notes: list[str] = field(default_factory=list)


def common_sites(a: Side, b: Side) -> Coverage:
    """Notes what one side was not asked for or cannot give; what is missing otherwise is a finding of that side."""
    coverage = Coverage(common=sorted(set(a.sites) & set(b.sites), key=lambda site: site.order))
    for side, other in ((a, b), (b, a)):
        _check_promised(side)
        manifest = side.folder.manifest
        for asked, why in manifest.unobserved.items():
            coverage.notes.append(f"{side.name} cannot give {asked}: {why}")
        reasons: dict[str, list[str]] = {}
        for site in sorted(set(other.sites) - set(side.sites), key=lambda site: site.order):
            reason = _excuse(site, side)
            if reason is None:
                side.found(Verdict.INCOMPLETE, f"{site.label} is missing, {other.name} has it")
            else:
                reasons.setdefault(reason, []).append(site.label)
        for reason, labels in reasons.items():
            coverage.notes.append(f"in {other.name} only, {reason}: {name_some(labels)}")
    return coverage


def check_rows(a: Side, b: Side, results: Sequence[SiteResult]) -> None:
    """Rows of one side only, as one finding of the side that lacks them."""
    for side, other in ((a, b), (b, a)):
        lacking = [(result, result.num_only_b if side is a else result.num_only_a) for result in results]
        lacking = [(result, count) for result, count in lacking if count]
        if lacking:
            text = f"{sum(count for _, count in lacking)} rows of {other.name} are missing, at {len(lacking)} sites"
            side.found(Verdict.INCOMPLETE, f"{text}, first {lacking[0][1]} rows at {lacking[0][0].site.label}")


def _check_promised(side: Side) -> None:
    """What a complete folder holds by its own manifest."""
    manifest = side.folder.manifest
    held = {(site.kind, site.layer, site.direction) for site in side.sites}
    held |= {(site.kind, None, site.direction) for site in side.sites if site.kind is SiteKind.GRAD}
    missing = []
    for entry in manifest.sites:
        try:
            promised = (
                SiteKind(str(entry["kind"])),
                entry.get("layer"),
                Direction(str(entry.get("direction", "forward"))),
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            side.found(Verdict.CORRUPT, f"manifest: no site: {entry!r}: {error}")
            continue
        if promised not in held:
            kind, layer, direction = promised
            missing.append(f"{kind.value}{'' if layer is None else f'[{layer}]'} {direction.value}")
    if missing:
        side.found(Verdict.INCOMPLETE, f"{len(missing)} sites of its manifest are missing: {name_some(missing)}")
    silent = [phase for phase in manifest.phases if all(site.phase != phase for site in side.sites)]
    if silent:
        side.found(Verdict.INCOMPLETE, f"nothing was recorded in {name_some(silent)}")


def _excuse(site: Site, side: Side) -> str | None:
    """Why a side may lack a site that the other has; None where it may not."""
    manifest = side.folder.manifest
    if site.is_recomputed:
        return f"where {side.name} recomputed nothing"
    if manifest.phases and site.phase not in manifest.phases:
        return f"where {side.name} has no such pass"
    if not _takes(str(manifest.selector), site):
        return f"where {side.name} was not asked for it"
    if any(_is_named(asked, site) for asked in _texts(manifest.unobserved)):
        return f"where {side.name} cannot give it"
    return None


def _takes(selector: str, site: Site) -> bool:
    """A selector that cannot be parsed asks for everything."""
    try:
        return site.is_taken_by(Selector.parse(selector))
    except UserError:
        return True


def _is_named(asked: str, site: Site) -> bool:
    """Whether a site that was asked for, written as a selector or beginning with its kind, is this one."""
    try:
        return site.is_taken_by(Selector.parse(asked))
    except UserError:
        return re.split(r"[\s&\[]", asked)[0] == site.kind.value


def _texts(names: Mapping[str, str]) -> Sequence[str]:
    return [str(name) for name in names]
