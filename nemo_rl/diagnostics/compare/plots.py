"""Plots of a comparison as SVG: differences over the layers, and histograms of units in the last place."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nemo_rl.diagnostics.compare.markup import Markup, tag
from nemo_rl.diagnostics.compare.measurement import Metric
from nemo_rl.diagnostics.compare.site_result import SiteResult
from nemo_rl.diagnostics.compare.ulps import ULP_BUCKETS
from nemo_rl.records.sites import SiteKind

__all__ = ["layer_plot", "ulp_bars"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 340, 60, 190, 16, 34
"""In pixels, the legend to the right."""
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf", "#000000")
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
    """A bar for each of `ULP_BUCKETS`; heights are logarithmic, so that a single value can be seen."""
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
    """Ends of the axis."""
    values = [value for result in drawn if (value := _value(result)) and math.isfinite(value)]
    exponents = [min(HIGHEST, max(LOWEST, math.floor(math.log10(value)))) for value in values] or [LOWEST]
    return min(exponents), max(exponents) + 1


def _x(result: SiteResult, last: int) -> float:
    """Layers, with what comes before and after them to their sides."""
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
        parts.append(tag("line", {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": y, "y2": y, "stroke": "#ddd"}))
        parts.append(tag("text", {"x": LEFT - 8, "y": y, "text-anchor": "end"}, f"1e{power}"))
    step = max(1, (last + 1) // 16)
    for layer in range(0, last + 1, step):
        x = LEFT + (layer + 1) * (WIDTH - LEFT - RIGHT) / (last + 2)
        parts.append(tag("text", {"x": f"{x:.1f}", "y": HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, layer))
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = tag("text", {"x": middle, "y": HEIGHT - 4, "text-anchor": "middle"}, "layer")
    return tag("g", *parts, label)
