"""`write_page`: a comparison as one HTML file that needs nothing else: no script, no font, no picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from nemo_rl.diagnostics.compare.comparison import Comparison
from nemo_rl.diagnostics.compare.markup import Markup, tag
from nemo_rl.diagnostics.compare.measurement import Metric
from nemo_rl.diagnostics.compare.plots import layer_plot, ulp_bars
from nemo_rl.diagnostics.compare.site_result import SiteResult, WorstToken
from nemo_rl.utils.files import write_text

__all__ = ["page_text", "write_page"]

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.verdict { padding: .15em .5em; border-radius: 4px; color: #fff; background: #b00020; }
.verdict.pass { background: #1b7f3b; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .2em .5em; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid #e4e4e4; } th { border-bottom: 2px solid #999; } td.n { text-align: right; }
td { overflow-wrap: anywhere; } td, code { font-variant-numeric: tabular-nums; }
tr.fail td { background: #fdecec; } tr.differs td { background: #fff6d8; }
tr.layer td { background: #f1f1f1; font-weight: 600; }
svg text { font: 11px sans-serif; fill: #444; } svg.plot { width: 100%; } svg.ulps rect { fill: #1f77b4; }
"""
_METRICS = (Metric.TOKEN_REL, Metric.MAX_ABS, Metric.MAX_REL, Metric.RMS_REL, Metric.COSINE_DISTANCE)
_HEADS = ("site", "rows", *_METRICS, "differing", "NaN a/b", "inf a/b", "ulps", "limits", "result", "worst tokens")


def write_page(path: Path, comparison: Comparison) -> Path:
    """`path` holds the page, or what it held before."""
    return write_text(path, page_text(comparison))


def page_text(comparison: Comparison) -> str:
    """The page."""
    title = f"{comparison.verdict.name}: {comparison.a.path} against {comparison.b.path}"
    head = tag("head", tag("meta", {"charset": "utf-8"}), tag("title", title), tag("style", Markup(STYLE)))
    shade = {"class": f"verdict {comparison.verdict.label}"}
    body = tag(
        "body",
        tag("h1", tag("span", shade, comparison.verdict.name), " ", comparison.reason),
        *_summary(comparison),
        tag("h2", "Recordings"),
        _manifests(comparison),
        *_plots(comparison),
        *_sites(comparison),
    )
    return f"<!DOCTYPE html>\n{tag('html', {'lang': 'en'}, head, body)}\n"


def _summary(comparison: Comparison) -> list[Markup]:
    lines: list[object] = []
    if comparison.first is not None:
        first = comparison.first
        lines.append(f"First divergence: {first.result.site.label}: {'; '.join(first.result.failures)}")
        after = "nothing" if first.after is None else first.after.label
        lines.append(f"Agrees before it: {after}")
    if comparison.contribution is not None:
        lines.append(f"Largest contribution: {comparison.contribution.text}")
    lines += [f"First values that are not finite, {found.text}" for found in comparison.non_finite]
    lines += [f"{finding.verdict.label}: {finding.text}" for finding in comparison.findings]
    lines += [f"Note: {note}" for note in comparison.notes]
    return [tag("ul", *(tag("li", line) for line in lines))] if lines else []


def _manifests(comparison: Comparison) -> Markup:
    """Both sides, a row for each field; what differs has a colour."""
    a, b = comparison.a, comparison.b
    rows = [tag("tr", tag("th", "field"), tag("th", "A"), tag("th", "B"))]
    rows.append(tag("tr", tag("td", "folder"), tag("td", a.path), tag("td", b.path)))
    # The list of sites is long, and the table of sites says the same.
    for name in sorted({*a.manifest, *b.manifest} - {"sites"}):
        values = [json.dumps(side.manifest.get(name), sort_keys=True, default=str) for side in (a, b)]
        shade = {"class": "differs"} if values[0] != values[1] else {}
        rows.append(tag("tr", shade, tag("td", name), *(tag("td", value) for value in values)))
    return tag("table", *rows)


def _plots(comparison: Comparison) -> list[Markup]:
    parts = []
    for in_pass, results in groupby(comparison.sites, key=lambda result: result.site.in_pass):
        phase, update, is_recomputed, direction = in_pass
        plot = layer_plot(list(results))
        if plot is not None:
            again = ", recomputed" if is_recomputed else ""
            parts += [tag("h2", f"token_rel, {phase}, update {update}, {direction.value}{again}"), plot]
    return parts


def _sites(comparison: Comparison) -> list[Markup]:
    if not comparison.sites:
        return []
    rows = [tag("tr", *(tag("th", head) for head in _HEADS))]
    for _, results in groupby(comparison.sites, key=lambda result: (result.site.in_pass, result.site.layer)):
        rows += _layer(list(results), comparison)
    return [tag("h2", "Sites"), tag("table", *rows)]


def _layer(results: Sequence[SiteResult], comparison: Comparison) -> Iterable[Markup]:
    site = results[0].site
    where = "outside the layers" if site.layer is None else f"layer {site.layer}"
    name = f"{site.phase}, {site.direction.value}: {where}"
    yield tag("tr", {"class": "layer"}, tag("td", {"colspan": len(_HEADS)}, name))
    for result in results:
        yield tag("tr", {"class": "fail"} if result.failures else {}, *_cells(result, comparison))


def _cells(result: SiteResult, comparison: Comparison) -> list[Markup]:
    number = {"class": "n"}
    verdict = tag("td", "; ".join(result.failures) or "ok")
    found = result.measurement
    if found is None:
        blank = tag("td", {"colspan": len(_HEADS) - 4}, "nothing to measure")
        return [tag("td", result.site.label), tag("td", number, result.num_rows), blank, verdict, tag("td")]
    limits = ", ".join(f"{metric.value} <= {limit:g}" for metric, limit in result.limits.items())
    return [
        tag("td", result.site.label),
        tag("td", number, result.num_rows),
        *(tag("td", number, f"{found.metrics[metric]:.2e}") for metric in _METRICS),
        tag("td", number, f"{found.metrics[Metric.DIFFERING_FRACTION]:.2%}"),
        tag("td", number, f"{found.nan_a}/{found.nan_b}"),
        tag("td", number, f"{found.inf_a}/{found.inf_b}"),
        tag("td", "-" if found.ulps is None else ulp_bars(found.ulps)),
        tag("td", limits),
        verdict,
        tag("td", _worst(result.worst, comparison)),
    ]


def _worst(worst: Sequence[WorstToken], comparison: Comparison) -> Markup:
    if not worst:
        return tag("span", "none")
    items = []
    for token in worst:
        text = f"{token.row.text}{comparison.token_text(token.row.token)}"
        items.append(tag("li", f"{text}: {token.a:.6g} against {token.b:.6g}, token_rel {token.token_rel:.3g}"))
    return tag("details", tag("summary", f"{len(worst)} worst"), tag("ul", *items))
