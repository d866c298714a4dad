"""`compare_folders`: two folders of records, merged, matched, measured and judged.

    _open -> Side     match_samples      common_sites       merge + compare_site        gravest
    read both sides -> whose sample is -> sites of both -> one site after another -> verdict and first divergence
                       whose

`propose_limits` makes limits out of folders that were recorded alike, in place of limits that somebody chose. Called by
`nemo-rl probe` and by what records two sides itself. Invariant: it passes only if something was
compared, everything that should have been was, and nothing differs by more than its limits. One site of each side is in
memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from nemo_rl.errors import UnsupportedFormat, UserError, name_some
from nemo_rl.records.reader import CorruptRecord, RecordFolder, read_folder
from nemo_rl.records.sites import Direction, Selector, SiteKind
from nemo_rl.tracer.watch import GENERATION
from nemo_rl_tools.compare.comparison import RecordingComparison, SideFacts
from nemo_rl_tools.compare.limits import DEFAULT, ToleranceRules, limits_text
from nemo_rl_tools.compare.measurement import Metric
from nemo_rl_tools.compare.merge import SampleMap, match_samples, merge
from nemo_rl_tools.compare.side import PHASES, ComparedSite, Side, token_texts
from nemo_rl_tools.compare.site_result import SiteResult, compare_site
from nemo_rl_tools.verdict import Finding, Verdict

__all__ = ["compare_folders", "propose_limits"]


def common_sites(a: Side, b: Side, notes: list[str]) -> list[ComparedSite]:
    """Return the sites of both sides, in the order in which a step meets them.

    What one side was not asked for or cannot give is noted; what is missing otherwise is a finding of that side.
    """
    for side, other in ((a, b), (b, a)):
        _check_promised(side)
        notes += [f"{side.name} cannot give {asked}: {why}" for asked, why in side.folder.manifest.unobserved.items()]
        reasons: dict[str, list[str]] = {}
        for site in sorted(set(other.sites) - set(side.sites), key=lambda site: site.order):
            reason = _excuse(site, side)
            if reason is None:
                side.found(Verdict.INCOMPLETE, f"{site.label} is missing, {other.name} has it")
            else:
                reasons.setdefault(reason, []).append(site.label)
        notes += [f"in {other.name} only, {reason}: {name_some(labels)}" for reason, labels in reasons.items()]
    return sorted(set(a.sites) & set(b.sites), key=lambda site: site.order)


def check_rows(a: Side, b: Side, results: Sequence[SiteResult], notes: list[str]) -> None:
    """Note rows of one side only, as one finding of the side that lacks them; what an engine never feeds or scores is
    a remark."""
    for side, other in ((a, b), (b, a)):
        lacking = [(result, result.num_only_b if side is a else result.num_only_a) for result in results]
        lacking = [(result, count) for result, count in lacking if count]
        if lacking and side.is_engine and not other.is_engine:
            # It feeds no last token, reads a prompt once for all its rows, and has logits of what it samples alone.
            most = max(count for _, count in lacking)
            notes.append(f"{side.name} decoded: it has no rows for up to {most} tokens of a site that {other.name} has")
        elif lacking and other.is_engine and not side.is_engine:
            notes.append(
                f"{other.name} decoded: {side.name} has no rows for {lacking[0][1]} tokens, which it did not score"
            )
        elif lacking:
            text = f"{sum(count for _, count in lacking)} rows of {other.name} are missing, at {len(lacking)} sites"
            side.found(Verdict.INCOMPLETE, f"{text}, first {lacking[0][1]} rows at {lacking[0][0].site.label}")


def _check_promised(side: Side) -> None:
    """Check that a complete folder holds what its own manifest promises."""
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
    silent = [
        phase
        for phase in manifest.phases
        if all(phase not in (site.phase, side.renamed.get(site.phase)) for site in side.sites)
    ]
    if silent:
        side.found(Verdict.INCOMPLETE, f"nothing was recorded in {name_some(silent)}")


def _excuse(site: ComparedSite, side: Side) -> str | None:
    """Return the reason for which a side may lack a site that the other has; None where it may not."""
    manifest = side.folder.manifest
    if site.is_recomputed:
        return f"where {side.name} recomputed nothing"
    if manifest.phases and side.renamed.get(site.phase, site.phase) not in manifest.phases:
        return f"where {side.name} has no such pass"
    if not _takes(str(manifest.selector), site):
        return f"where {side.name} was not asked for it"
    if any(_is_named(asked, site) for asked in map(str, manifest.unobserved)):
        return f"where {side.name} cannot give it"
    return None


def _takes(selector: str, site: ComparedSite) -> bool:
    """Return whether a selector asks for the site; one that cannot be parsed asks for every site."""
    try:
        return site.is_taken_by(Selector.parse(selector))
    except UserError:
        return True


def _is_named(asked: str, site: ComparedSite) -> bool:
    """Return whether a site that was asked for, written as a selector or beginning with its kind, is this one."""
    try:
        return site.is_taken_by(Selector.parse(asked))
    except UserError:
        return re.split(r"[\s&\[]", asked)[0] == site.kind.value


def compare_folders(a: Path, b: Path, *, limits: ToleranceRules = DEFAULT) -> RecordingComparison:
    """Compare the recordings in two folders, `a` being what is relied on.

    Raises:
        UserError: a path is no folder of records.
    """
    of_a, of_b = _open(a, "A"), _open(b, "B")
    if isinstance(of_a, Finding) or isinstance(of_b, Finding):
        failed = [found for found in (of_a, of_b) if isinstance(found, Finding)]
        facts = [SideFacts(path=str(path), manifest={}) for path in (a, b)]
        return RecordingComparison(title=f"A {a}, B {b}", a=facts[0], b=facts[1], findings=failed)
    sides = (Side(of_a, name="A"), Side(of_b, name="B"))
    for side in sides:
        side.read_samples()
    _pair_passes(*sides)
    refused = _refusals(*sides)
    if refused:
        return _judge(sides, [], refused, [])
    return _compare(*sides, limits)


def _pair_passes(a: Side, b: Side) -> None:
    """Let an engine's decoding be compared with the first pass of a worker."""
    for engine, worker in ((a, b), (b, a)):
        if engine.is_engine and not worker.is_engine:
            passes = [phase for phase in PHASES if phase in worker.folder.manifest.phases]
            if passes:
                worker.rename_phase(passes[0], to=GENERATION)


def _open(path: Path, name: str) -> RecordFolder | Finding:
    try:
        return read_folder(path)
    except CorruptRecord as error:
        return Finding(verdict=Verdict.CORRUPT, text=f"{name}: {error}")
    except UnsupportedFormat as error:
        return Finding(verdict=Verdict.UNSUPPORTED, text=f"{name}: {error}")


def _refusals(a: Side, b: Side) -> list[Finding]:
    if a.folder.manifest.run_id == b.folder.manifest.run_id:
        text = f"both folders hold the recording {a.folder.manifest.run_id!r}: it was compared with itself"
        return [Finding(verdict=Verdict.VACUOUS, text=text)]
    empty = [side.name for side in (a, b) if not side.sites]
    if empty:
        return [Finding(verdict=Verdict.VACUOUS, text=f"{' and '.join(empty)} recorded nothing")]
    models = (a.folder.manifest.model, b.folder.manifest.model)
    differing = [name for name in sorted({*models[0], *models[1]}) if models[0].get(name) != models[1].get(name)]
    if differing:
        texts = [f"{name} is {models[0].get(name)!r} in A, {models[1].get(name)!r} in B" for name in differing]
        return [Finding(verdict=Verdict.UNSUPPORTED, text=f"the models differ: {'; '.join(texts)}")]
    return []


def _compare(a: Side, b: Side, limits: ToleranceRules) -> RecordingComparison:
    samples = match_samples(a, b)
    notes: list[str] = []
    common = common_sites(a, b, notes)
    refused: list[Finding] = []
    if a.samples and b.samples and not samples.num_common:
        text = "A and B have no sample in common, neither by key nor by its tokens"
        refused.append(Finding(verdict=Verdict.VACUOUS, text=text))
        return _judge((a, b), [], refused, notes)
    if samples.is_by_tokens:
        unmatched = f"{len(b.samples) - samples.num_common} of {len(b.samples)} samples of B have no partner"
        notes.append(f"no key is on both sides: samples were matched by their tokens; {unmatched}")
    results = [result for site in common if (result := _one_site(site, (a, b), samples, limits)) is not None]
    for side in (a, b):
        # Damage counts wherever it is.
        for record in (record for site in set(side.sites) - set(common) for record in side.sites[site]):
            side.load(record)
    check_rows(a, b, results, notes)
    if not any(result.num_rows or result.failures for result in results):
        refused.append(Finding(verdict=Verdict.VACUOUS, text="A and B have no row of any site in common"))
    return _judge((a, b), results, refused, notes)


def _one_site(
    site: ComparedSite, sides: tuple[Side, Side], samples: SampleMap, limits: ToleranceRules
) -> SiteResult | None:
    a, b = (merge(site, side) for side in sides)
    if a is None or b is None:
        return None
    return compare_site(site, sides, (a, b), samples=samples, limits=limits)


def _judge(
    sides: tuple[Side, Side], results: list[SiteResult], own: list[Finding], notes: list[str]
) -> RecordingComparison:
    findings = [*own, *sides[0].findings, *sides[1].findings]
    tokens = {worst.row.token for result in results for worst in result.worst if worst.row.token is not None}
    tokenizer = sides[0].folder.manifest.tokenizer or sides[1].folder.manifest.tokenizer
    texts, why = token_texts(str(tokenizer), tokens)
    a, b = map(_facts, sides)
    return RecordingComparison(
        title=f"A {a.path}, B {b.path}",
        a=a,
        b=b,
        sites=results,
        findings=findings,
        notes=notes if why is None else [*notes, why],
        texts=texts,
    )


def _facts(side: Side) -> SideFacts:
    return SideFacts(
        path=str(side.folder.path),
        manifest=side.folder.manifest.as_record(),
        num_records=len(side.folder.records),
        num_samples=len(side.samples),
    )


FACTOR = 3.0
"""Limit over floor: the largest of a few differences is below that of many."""
TINY: Mapping[Metric, float] = {Metric.DIFFERING_FRACTION: 0.0}
"""Limit of what did not differ at all, where it is another than `EPSILON`."""
EPSILON = 1e-7
"""Half a unit in the last place of a float32."""
MAX_RULES = 600
"""A file of limits holds 5000 values, and a rule up to seven."""


def propose_limits(folders: Sequence[Path]) -> str:
    """Return a file of limits for comparisons with recordings like these, which must have been made with the same
    settings.

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
            raise UserError(f"noise: {a} and {b} are not recordings of the same run: {comparison.outcome.text}")
        for result in comparison.sites:
            found = {} if result.measurement is None else result.measurement.metrics
            for metric in result.limits:
                key = (result.site, metric)
                floors[key] = max(floors.get(key, 0.0), found.get(metric, 0.0))
    floors = dict(sorted(floors.items(), key=lambda item: item[0][0].order))
    # One rule for each site; for each kind of sites where these would be too many.
    by_layer = _rules(floors, with_layers=True)
    rules = by_layer if len(by_layer) <= MAX_RULES else _rules(floors, with_layers=False)
    text = f"{len(pairs)} pair{'' if len(pairs) == 1 else 's'} of recordings"
    return f"# {FACTOR:g} times the largest difference of {text}.\n{limits_text(rules)}"


def _rules(floors: Mapping[tuple[ComparedSite, Metric], float], *, with_layers: bool) -> list[Mapping[str, object]]:
    """Return rules over all passes: the file does not tell them apart.

    Args:
        floors: largest differences over all pairs, in the order of a step.
    """
    largest: dict[tuple[SiteKind, int | None, Direction, Metric], float] = {}
    for (site, metric), value in floors.items():
        key = (site.kind, site.layer if with_layers else None, site.direction, metric)
        largest[key] = max(largest.get(key, 0.0), value)
    rules: list[Mapping[str, object]] = []
    for (kind, layer, direction, metric), value in largest.items():
        where = {"sites": kind.value} | ({} if layer is None else {"layers": str(layer)})
        limit = max(_rounded_up(FACTOR * value), TINY.get(metric, EPSILON))
        rules.append({**where, "direction": direction.value, "metric": metric.value, "max": limit})
    return rules


def _rounded_up(value: float) -> float:
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
