"""`ToleranceRules`: how far two recordings may be apart, by site and metric, and the files that say so.

    - {sites: "layer.*, mlp.out", layers: "0..3", direction: forward, metric: token_rel, max: 1e-4}

A file is a list of such rules; `sites` is what a selector takes, `layers` and `direction` may be left out. Of the rules
for a site and metric the first counts; a site that no rule takes has the default of its precision. The stages of a
replayed step are sites without a layer, each with the one metric that `STAGES` gives it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.config.schema_walk import suggest
from nemo_rl.config.yaml_text import YamlProblem, parse_yaml
from nemo_rl.errors import ConfigError, UserError
from nemo_rl.records.sites import Direction, Selector, SiteKind
from nemo_rl.utils.files import MOST_BYTES, read_plain
from nemo_rl_tools.compare.measurement import Metric
from nemo_rl_tools.compare.side import ComparedSite

__all__ = ["DEFAULT", "STAGES", "Precision", "Rule", "ToleranceRules", "coarsest", "limits_text", "read_limits"]

KEYS = ("sites", "layers", "direction", "metric", "max")
Precision = str
"""One of `PRECISIONS`."""
PRECISIONS = ("bfloat16", "float16", "float32", "float64")
"""The coarsest first."""

_FORWARD: Mapping[Precision, float] = {
    # A sum of 4096 products in another order is off by about 4e-6 of its size, and layers carry that on and add theirs;
    # a wrong mask, scale or weight is off by 1e-2 and more.
    "float32": 1e-4,
    "float64": 1e-9,
    # A value is rounded by up to 4e-3 at every site; some dozens of layers add up to ten times that in the worst token.
    "bfloat16": 5e-2,
    # Rounds eight times finer.
    "float16": 1e-2,
}
# Logarithms, whose size says nothing of their error: compared as they are. A logit of size 16 to 32 is off by up to
# 0.06 in bfloat16 by its last rounding alone, and the layers before add to that; in float16 by 0.008.
_LOGPROB: Mapping[Precision, float] = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 0.25, "float16": 5e-2}
# The loss of a batch is nearly zero where advantages cancel each other, so it has no size to be compared with.
_LOSS: Mapping[Precision, float] = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 2e-2, "float16": 5e-3}
# Advantages of both signs cancel each other in a gradient, but not their rounding.
_BACKWARD: Mapping[Precision, float] = {"float32": 1e-3, "float64": 1e-8, "bfloat16": 0.2, "float16": 5e-2}


STAGES: Mapping[SiteKind, tuple[Metric, float]] = {
    # Of one token.
    SiteKind.LOGPROB: (Metric.MAX_ABS, 1e-4),
    # Of a microbatch or a step; relative to a loss above 1.
    SiteKind.LOSS: (Metric.MAX_ABS, 1e-6),
    # Of the gradient's norm.
    SiteKind.GRAD: (Metric.MAX_REL, 1e-5),
    # The distance of all weights relative to their norm, by their projections.
    SiteKind.PARAM: (Metric.RMS_REL, 2e-5),
}
"""Stages of a replayed step that need not be equal to the last bit in another layout: metric and limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A limit of some sites."""

    selector: Selector
    metric: Metric
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ToleranceRules:
    """Rules in the order of their precedence, then the defaults.

    Example:
        >>> DEFAULT.of(ComparedSite(phase="train", kind=SiteKind.LOGPROB), precision="float32", is_integer=False)
        {<Metric.MAX_ABS: 'max_abs'>: 0.0001}
    """

    rules: tuple[Rule, ...] = ()

    def of(self, site: ComparedSite, *, precision: Precision, is_integer: bool) -> Mapping[Metric, float]:
        """Metric -> the largest value that passes."""
        limits: dict[Metric, float] = {}
        for rule in self.rules:
            # Numbers of experts have no size: other metrics say nothing of them.
            is_meant = not is_integer or rule.metric is Metric.DIFFERING_FRACTION
            if is_meant and site.is_taken_by(rule.selector):
                limits.setdefault(rule.metric, rule.limit)
        return limits or _default(site, precision, is_integer=is_integer)

    def of_stage(self, kind: SiteKind, *, phase: str) -> float:
        """Return the largest difference of a stage of a replayed step that passes, in float32.

        Args:
            kind: one of `STAGES`, in whose metric the rules are asked.

        Example:
            >>> DEFAULT.of_stage(SiteKind.LOGPROB, phase="prev_logprobs")
            0.0001
        """
        metric, limit = STAGES[kind]
        site = ComparedSite(phase=phase, kind=kind)
        return next((r.limit for r in self.rules if r.metric is metric and site.is_taken_by(r.selector)), limit)


DEFAULT = ToleranceRules()


def coarsest(*names: str) -> Precision:
    """Return the coarsest of the given dtypes and precisions: float32 values of a bfloat16 model are no more exact than
    it.
    """
    known = [name for text in names for name in PRECISIONS if name in text.replace("bf16", "bfloat16").split(" ")]
    return min(known, key=PRECISIONS.index, default="float32")


def read_limits(path: Path) -> ToleranceRules:
    """Raises:
    ConfigError: all that is wrong with the file.
    """
    try:
        rules = parse_yaml(read_plain(path, most_bytes=MOST_BYTES).decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (YamlProblem, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(rules, list) or not rules:
        raise ConfigError(f"{path}: expected a list of rules such as {{sites: logprob, metric: max_abs, max: 1e-4}}")
    problems: list[str] = []
    read = [_read_rule(rule, f"{path}: rule {number}", problems) for number, rule in enumerate(rules, start=1)]
    if problems:
        raise ConfigError(problems)
    return ToleranceRules(rules=tuple(rule for rule in read if rule is not None))


def limits_text(rules: Sequence[Mapping[str, object]]) -> str:
    """Return the text of a file that `read_limits` reads; JSON values are YAML."""
    lines = [", ".join(f"{key}: {json.dumps(value)}" for key, value in rule.items()) for rule in rules]
    return "".join(f"- {{{line}}}\n" for line in lines)


def _default(site: ComparedSite, precision: Precision, *, is_integer: bool) -> Mapping[Metric, float]:
    if is_integer:
        return {Metric.DIFFERING_FRACTION: 0.0}
    if site.direction is Direction.BACKWARD or site.kind is SiteKind.GRAD:
        return {Metric.TOKEN_REL: _BACKWARD[precision]}
    if site.kind is SiteKind.LOGPROB:
        return {Metric.MAX_ABS: _LOGPROB[precision]}
    if site.kind is SiteKind.LOSS:
        return {Metric.MAX_ABS: _LOSS[precision]}
    return {Metric.TOKEN_REL: _FORWARD[precision]}


def _read_rule(rule: object, where: str, problems: list[str]) -> Rule | None:
    """Read one rule; return None after a problem."""
    if not isinstance(rule, dict):
        problems.append(f"{where}: expected {{sites: ..., metric: ..., max: ...}}, got {rule!r}")
        return None
    before = len(problems)
    for key in rule.keys() - set(KEYS):
        problems.append(f"{where}: unknown key {key!r}{suggest(key, KEYS)}; known are {', '.join(KEYS)}")
    for key in ("sites", "metric", "max"):
        if key not in rule:
            problems.append(f"{where}: {key} is missing")
    if len(problems) > before:
        return None
    metric, limit = rule["metric"], rule["max"]
    if metric not in tuple(Metric):
        known = [each.value for each in Metric]
        near = suggest(str(metric), known)
        problems.append(f"{where}: metric: unknown {metric!r}{near}; known are {', '.join(known)}")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit < math.inf:
        problems.append(f"{where}: max: expected a number that is not negative, got {limit!r}")
    if ";" in str(rule["sites"]):
        problems.append(f"{where}: sites: expected one selection, got {rule['sites']!r}; write a rule for each")
    terms = [str(rule["sites"]), *(f"layer in {rule[key]}" for key in ("layers",) if key in rule)]
    terms += [str(rule[key]) for key in ("direction",) if key in rule]
    try:
        selector = Selector.parse(" & ".join(terms))
    except UserError as error:
        problems.append(f"{where}: {error}")
        return None
    return None if len(problems) > before else Rule(selector=selector, metric=Metric(metric), limit=float(limit))
