"""`write_page`: any comparison as one HTML file that needs nothing else: no script, no font, no picture.

Recordings have plots as SVG: differences over the layers, and histograms of units in the last place. Other sites are
the table of the report in text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from nemo_rl.records.sites import SiteKind
from nemo_rl.utils.files import write_text
from nemo_rl_tools.compare.comparison import RecordingComparison
from nemo_rl_tools.compare.measurement import ULP_BUCKETS, Metric
from nemo_rl_tools.compare.site_result import SiteResult, WorstToken
from nemo_rl_tools.markup import Markup, tag, whole_page
from nemo_rl_tools.verdict import Comparison

__all__ = ["page_text", "write_page"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 340, 60, 190, 16, 34
"""Sizes of a plot in pixels, with the legend to the right."""
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf", "#c49c94")
LOWEST, HIGHEST = -9, 1
"""Powers of ten of the axis at most: what is smaller is drawn at its foot, what is larger or infinite at its head."""
BAR_WIDTH, BAR_HEIGHT = 9, 22


def layer_plot(results: Sequence[SiteResult]) -> Markup | None:
    """`token_rel` of the sites of one pass over the layers, logarithmic; None where there is none to draw."""
    drawn = [result for result in results if _value(result) is not None and result.site.kind is not SiteKind.GRAD]
    if not drawn:
        return None
    last = max((result.site.layer for result in drawn if result.site.layer is not None), default=0)
    low, high = _powers(drawn)
    kinds = [kind for kind in SiteKind if any(result.site.kind is kind for result in drawn)]
    parts = [_axes(last, low, high)]
    for index, kind in enumerate(kinds):
        colour = COLOURS[index % len(COLOURS)]
        # As many again are drawn with dashes.
        dash = {"stroke-dasharray": "4 3"} if index >= len(COLOURS) else {}
        line = sorted(
            (result for result in drawn if result.site.kind is kind), key=lambda result: result.site.layer or 0
        )
        places = [(_x(result, last), _y(_value(result) or 0.0, low, high), result) for result in line]
        if len(places) > 1:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
            parts.append(tag("polyline", {"points": points, "fill": "none", "stroke": colour, **dash}))
        parts += [_dot(x, y, result, colour) for x, y, result in places]
        y = TOP + 14 * index + 10
        x = WIDTH - RIGHT + 16
        parts.append(tag("line", {"x1": x, "x2": x + 20, "y1": y - 4, "y2": y - 4, "stroke": colour, **dash}))
        parts.append(tag("text", {"x": x + 26, "y": y}, kind.value))
    return tag("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "class": "plot", "role": "img"}, *parts)


def ulp_bars(counts: Sequence[int]) -> Markup:
    """Return a bar for each of `ULP_BUCKETS`; heights are logarithmic, so that a single value can be seen."""
    most = math.log1p(max(counts, default=0)) or 1.0
    bars = []
    for index, (bucket, count) in enumerate(zip(ULP_BUCKETS, counts, strict=True)):
        height = max(1.0, BAR_HEIGHT * math.log1p(count) / most) if count else 0.0
        place = {"x": index * BAR_WIDTH, "y": f"{BAR_HEIGHT - height:.1f}", "width": BAR_WIDTH - 1}
        bars.append(tag("rect", {**place, "height": f"{height:.1f}"}, tag("title", f"{bucket} ulp: {count}")))
    width = BAR_WIDTH * len(ULP_BUCKETS)
    return tag("svg", {"width": width, "height": BAR_HEIGHT, "class": "ulps", "role": "img"}, *bars)


def _value(result: SiteResult) -> float | None:
    if result.measurement is None:
        return None
    # Experts have no distance; their share of differing rows is between 0 and 1 as well.
    metric = Metric.DIFFERING_FRACTION if result.measurement.is_integer else Metric.TOKEN_REL
    return result.measurement.metrics[metric]


def _powers(drawn: Sequence[SiteResult]) -> tuple[int, int]:
    values = [value for result in drawn if (value := _value(result)) and math.isfinite(value)]
    exponents = [min(HIGHEST, max(LOWEST, math.floor(math.log10(value)))) for value in values] or [LOWEST]
    return min(exponents), max(exponents) + 1


def _x(result: SiteResult, last: int) -> float:
    """Return layers, with what comes before and after them to their sides."""
    layer = result.site.layer
    place = layer if layer is not None else -1 if result.site.kind is SiteKind.EMBED else last + 1
    return LEFT + (place + 1) * (WIDTH - LEFT - RIGHT) / (last + 2)


def _y(value: float, low: int, high: int) -> float:
    exponent = high if math.isinf(value) else math.log10(value) if value > 0 else low
    share = (min(high, max(low, exponent)) - low) / (high - low)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _dot(x: float, y: float, result: SiteResult, colour: str) -> Markup:
    ring = {"stroke": "#d00000", "stroke-width": 2} if result.failures else {}
    title = tag("title", f"{result.site.label}: {_value(result):.3g}")
    return tag(
        "circle",
        {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": 4 if result.failures else 2.5},
        {"fill": colour, **ring},
        title,
    )


def _axes(last: int, low: int, high: int) -> Markup:
    parts = []
    for power in range(low, high + 1):
        y = f"{_y(10.0**power, low, high):.1f}"
        parts.append(tag("line", {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": y, "y2": y}))
        parts.append(tag("text", {"x": LEFT - 8, "y": y, "text-anchor": "end"}, f"1e{power}"))
    step = max(1, (last + 1) // 16)
    for layer in range(0, last + 1, step):
        x = LEFT + (layer + 1) * (WIDTH - LEFT - RIGHT) / (last + 2)
        parts.append(tag("text", {"x": f"{x:.1f}", "y": HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, layer))
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = tag("text", {"x": middle, "y": HEIGHT - 4, "text-anchor": "middle"}, "layer")
    return tag("g", *parts, label)


STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
_METRICS = (Metric.TOKEN_REL, Metric.MAX_ABS, Metric.MAX_REL, Metric.RMS_REL, Metric.COSINE_DISTANCE)
_HEADS = ("site", "rows", *_METRICS, "differing", "NaN a/b", "inf a/b", "ulps", "limits", "result", "worst tokens")


def write_page(path: Path, comparison: Comparison) -> Path:
    """`path` holds the page, or what it held before."""
    return write_text(path, page_text(comparison))


def page_text(comparison: Comparison) -> str:
    return whole_page(f"{comparison.verdict.name}: {comparison.title}", *_body(comparison), style=STYLE)


def _body(comparison: Comparison) -> Iterator[Markup]:
    shade = {"class": f"verdict {comparison.verdict.label}"}
    yield tag("h1", tag("span", shade, comparison.verdict.name), " ", comparison.outcome.text)
    yield tag("p", comparison.title)
    yield from _summary(comparison)
    if isinstance(comparison, RecordingComparison):
        yield tag("h2", "Recordings")
        yield _manifests(comparison)
        yield from _plots(comparison)
        yield from _sites(comparison)
    elif comparison.sites:
        yield _table(comparison)
    if comparison.recorded is not None:
        yield from _body(comparison.recorded)


def _summary(comparison: Comparison) -> list[Markup]:
    lines = [f"not to the last bit: {text}" for text in comparison.inexact]
    lines += [f"what if: {text}" for text in comparison.what_if]
    lines += comparison.details()
    lines += [f"{finding.verdict.label}: {finding.text}" for finding in comparison.findings]
    lines += [f"note: {note}" for note in comparison.notes]
    return [tag("ul", *(tag("li", line) for line in lines))] if lines else []


def _table(comparison: Comparison) -> Markup:
    rows = [tag("tr", *(tag("th", head) for head in comparison.head()))]
    for site in comparison.sites:
        shade = {"class": "fail"} if site.agrees is False else {}
        rows.append(tag("tr", shade, *(tag("td", cell) for cell in site.cells)))
    return tag("table", *rows)


def _manifests(comparison: RecordingComparison) -> Markup:
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


def _plots(comparison: RecordingComparison) -> list[Markup]:
    parts = []
    for in_pass, results in groupby(comparison.sites, key=lambda result: result.site.in_pass):
        phase, update, is_recomputed, direction = in_pass
        plot = layer_plot(list(results))
        if plot is not None:
            again = ", recomputed" if is_recomputed else ""
            parts += [tag("h2", f"token_rel, {phase}, update {update}, {direction.value}{again}"), plot]
    return parts


def _sites(comparison: RecordingComparison) -> list[Markup]:
    if not comparison.sites:
        return []
    rows = [tag("tr", *(tag("th", head) for head in _HEADS))]
    for _, results in groupby(comparison.sites, key=lambda result: (result.site.in_pass, result.site.layer)):
        rows += _layer(list(results), comparison)
    return [tag("h2", "Sites"), tag("table", *rows)]


def _layer(results: Sequence[SiteResult], comparison: RecordingComparison) -> Iterable[Markup]:
    site = results[0].site
    where = "outside the layers" if site.layer is None else f"layer {site.layer}"
    name = f"{site.phase}, {site.direction.value}: {where}"
    yield tag("tr", {"class": "layer"}, tag("td", {"colspan": len(_HEADS)}, name))
    for result in results:
        yield tag("tr", {"class": "fail"} if result.failures else {}, *_cells(result, comparison))


def _cells(result: SiteResult, comparison: RecordingComparison) -> list[Markup]:
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


def _worst(worst: Sequence[WorstToken], comparison: RecordingComparison) -> Markup:
    if not worst:
        return tag("span", "none")
    items = []
    for token in worst:
        text = f"{token.row.text}{comparison.token_text(token.row.token)}"
        items.append(tag("li", f"{text}: {token.a:.6g} against {token.b:.6g}, token_rel {token.token_rel:.3g}"))
    return tag("details", tag("summary", f"{len(worst)} worst"), tag("ul", *items))
