"""`SiteResult`: one site of both sides, measured and held against its limits; made by `compare_site`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from nemo_rl_tools.compare.limits import ToleranceRules, coarsest
from nemo_rl_tools.compare.measurement import Measurement, Metric, measure, take_rows
from nemo_rl_tools.compare.merge import MatchedRows, Merged, SampleMap, match_rows
from nemo_rl_tools.compare.side import POSITIONS, ComparedSite, Side

__all__ = ["COLUMNS", "RowName", "SiteResult", "WorstToken", "compare_site"]


COLUMNS = (Metric.TOKEN_REL, Metric.MAX_ABS, Metric.RMS_REL, Metric.COSINE_DISTANCE, Metric.DIFFERING_FRACTION)
"""Numbers of the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowName:
    """The name of one row of a site."""

    key: str | None
    """Key of the sample; None for a row of a tensor without tokens."""
    position: int
    token: int | None

    @property
    def text(self) -> str:
        """The text shown in reports."""
        if self.key is None:
            return f"row {self.position}"
        return f"sample {self.key!r}, position {self.position}, token {self.token}"

    def as_record(self) -> dict[str, object]:
        return {"key": self.key, "position": self.position, "token": self.token}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken:
    """A row that differs, and its element that differs most."""

    row: RowName
    token_rel: float
    max_abs: float
    element: int
    a: float
    b: float

    def as_record(self) -> dict[str, object]:
        numbers = {"token_rel": self.token_rel, "max_abs": self.max_abs, "a": self.a, "b": self.b}
        shown = {name: finite_or_text(value) for name, value in numbers.items()}
        return {**self.row.as_record(), "element": self.element, **shown}


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteResult:
    """A site that both sides have."""

    site: ComparedSite
    num_rows: int = 0
    num_only_a: int
    num_only_b: int
    num_other_tokens: int
    """Matched rows whose token ids differ."""
    failures: tuple[str, ...] = ()
    """Empty where it passes."""
    limits: Mapping[Metric, float] = field(default_factory=dict)
    measurement: Measurement | None = None
    """The measurement, or None where there was nothing to measure: no row, no value, or other shapes."""
    max_abs_at: RowName | None = None
    worst: tuple[WorstToken, ...] = ()
    bad_a: RowName | None = None
    """First row that is not all finite."""
    bad_b: RowName | None = None

    @property
    def label(self) -> str:
        return self.site.label

    @property
    def agrees(self) -> bool:
        """True where nothing fails."""
        return not self.failures

    @property
    def difference(self) -> str:
        """The first failure; empty where there is none."""
        return self.failures[0] if self.failures else ""

    @property
    def is_bit_equal(self) -> bool:
        return self.measurement is not None and self.measurement.is_bit_equal

    @property
    def severity(self) -> float:
        """The distance from the limits; 1 is at the limit."""
        metrics = {} if self.measurement is None else self.measurement.metrics
        return max((metrics[metric] / limit for metric, limit in self.limits.items() if limit), default=0.0)

    @property
    def cells(self) -> Sequence[str]:
        metrics = {} if self.measurement is None else self.measurement.metrics
        numbers = (f"{metrics[metric]:.2e}" if metric in metrics else "-" for metric in COLUMNS)
        return [self.label, str(self.num_rows), *numbers, "; ".join(self.failures) or "ok"]

    @property
    def is_noise(self) -> bool:
        """True where the site fails by nothing but its limits."""
        return self.num_other_tokens == 0 and self.measurement is not None and not _broken(self.measurement)

    def as_record(self) -> dict[str, object]:
        """Return JSON form; what is not finite is a text."""
        site = self.site
        record: dict[str, object] = {
            "site": site.label,
            "kind": site.kind.value,
            "layer": site.layer,
            "name": site.name,
            "direction": site.direction.value,
            "phase": site.phase,
            "update": site.update,
            "is_recomputed": site.is_recomputed,
            "passes": not self.failures,
            "failures": list(self.failures),
            "num_rows": self.num_rows,
            "num_only_a": self.num_only_a,
            "num_only_b": self.num_only_b,
            "num_other_tokens": self.num_other_tokens,
            "limits": {metric.value: limit for metric, limit in self.limits.items()},
        }
        found = self.measurement
        if found is None:
            return record
        counts = {"nan_a": found.nan_a, "nan_b": found.nan_b, "inf_a": found.inf_a, "inf_b": found.inf_b}
        return (
            record
            | counts
            | {
                "dtypes": [found.dtype_a, found.dtype_b],
                "is_bit_equal": found.is_bit_equal,
                "nan_both": found.num_nan_both,
                "metrics": {metric.value: finite_or_text(value) for metric, value in found.metrics.items()},
                "cosine": found.cosine,
                "max_abs_at": None if self.max_abs_at is None else self.max_abs_at.as_record(),
                "worst": [token.as_record() for token in self.worst],
                "ulps": found.ulps,
            }
        )


def compare_site(
    site: ComparedSite,
    sides: tuple[Side, Side],
    merged: tuple[Merged, Merged],
    *,
    samples: SampleMap,
    limits: ToleranceRules,
) -> SiteResult:
    a, b = merged
    rows = match_rows(a, b, samples)
    result = SiteResult(
        site=site,
        num_only_a=len(rows.only_a),
        num_only_b=len(rows.only_b),
        num_other_tokens=len(rows.differing_tokens),
    )
    shapes = [list(side.values.shape[1 if side.code_N is not None else 0 :]) for side in merged]
    if shapes[0] != shapes[1] or (a.code_N is None) != (b.code_N is None):
        return replace(result, failures=(f"shapes differ: {shapes[0]} against {shapes[1]}",))
    pair_a, pair_b = take_rows(a.values, rows.rows_a), take_rows(b.values, rows.rows_b)
    if not pair_a.numel():
        return replace(result, num_rows=len(pair_a))
    found = measure(pair_a, pair_b)
    precisions = (str(side.folder.manifest.precision) for side in sides)
    precision = coarsest(found.dtype_a, found.dtype_b, *precisions)
    chosen = limits.of(site, precision=precision, is_integer=found.is_integer)
    names = _Names(sides[0], rows)
    worst = ({part.name: getattr(bad, part.name) for part in fields(bad)} for bad in found.worst)
    texts = _broken(found)
    for metric, limit in chosen.items():
        # So written that NaN fails.
        if not found.metrics[metric] <= limit:
            texts.append(f"{metric.value} {found.metrics[metric]:.6g} > {limit:.6g}")
    return replace(
        result,
        num_rows=found.num_rows,
        failures=(*names.other_tokens(), *texts),
        limits=chosen,
        measurement=found,
        max_abs_at=names.of(found.max_abs_row),
        worst=tuple(WorstToken(**bad | {"row": names.of(bad["row"])}) for bad in worst),
        bad_a=None if found.first_bad_a is None else names.of(found.first_bad_a),
        bad_b=None if found.first_bad_b is None else names.of(found.first_bad_b),
    )


def finite_or_text(value: float) -> float | str:
    """Return a value that JSON has: it knows neither NaN nor infinity."""
    return value if math.isfinite(value) else str(value)


class _Names:
    def __init__(self, side: Side, rows: MatchedRows) -> None:
        self._side, self._rows = side, rows

    def of(self, row: int) -> RowName:
        code_M, token_M = self._rows.code_M, self._rows.token_M
        if code_M is None or token_M is None:
            return RowName(key=None, position=row, token=None)
        code = int(code_M[row])
        return RowName(key=self._side.key_of(code), position=code % POSITIONS, token=int(token_M[row]))

    def other_tokens(self) -> list[str]:
        """Return the places where the sides have different tokens, if any."""
        bad = self._rows.differing_tokens
        if not len(bad) or self._rows.token_b_M is None:
            return []
        first, token = self.of(int(bad[0])), int(self._rows.token_b_M[bad[0]])
        return [f"token ids differ at {len(bad)} positions, first {first.text} in A, {token} in B"]


def _broken(found: Measurement) -> list[str]:
    texts = []
    if found.num_nan_both:
        texts.append(f"NaN on both sides ({found.num_nan_both} values)")
    if found.num_broken:
        texts.append(f"{found.num_broken} values that are not finite on one side and other on the other")
    return texts
