"""Comparisons of a receipt: fingerprints with fingerprints, log-probabilities with log-probabilities. Pure.

Called by `Receipts`. Rows of one prompt are a family: a router that chooses otherwise for one token changes all tokens
after it, so of a model with experts the second worst family counts, and of others the worst.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from nemo_rl.errors import name_some
from nemo_rl.models.weight_sync.receipt.records import Answer, Tolerance

__all__ = ["CEILINGS", "content_problems", "gap", "measured"]

FLOORS: Mapping[str, float] = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""No measured tolerance is below: what the order of sums makes of one precision."""
REPLICA_FLOORS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
CEILINGS: Mapping[str, float] = {"float32": 1e-2, "bfloat16": 0.4, "float16": 0.1}
"""More than this at the first sync is no matter of precision."""
FACTOR = 6.0
"""Of the first difference: it grows as a policy becomes more certain."""
SHOWN = 3
"""Weights that a message explains."""


def gap(
    ours: Sequence[float], theirs: Sequence[float], families: Iterable[Sequence[int]], *, spares_one: bool
) -> float:
    """Mean difference of the worst family, or of the second worst.

    Example:
        >>> gap([0.0, 0.0, 0.0], [1.0, 0.5, 0.1], [(0,), (1, 2)], spares_one=False)
        1.0
        >>> gap([0.0, 0.0, 0.0], [1.0, 0.5, 0.1], [(0,), (1, 2)], spares_one=True)
        0.3
    """
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    means = sorted(math.fsum(apart[place] for place in family) / len(family) for family in families)
    # NaN is never below a tolerance.
    if any(math.isnan(mean) for mean in means):
        return math.nan
    return means[-2] if spares_one and len(means) > 1 else means[-1]


def measured(of_policy: float, of_replicas: float, *, precision: str) -> Tolerance:
    """The tolerance that the differences of a first sync give.

    Example:
        >>> measured(0.02, 0.0, precision="bfloat16").of_policy
        0.12
    """
    return Tolerance(
        of_policy=max(FLOORS[precision], FACTOR * of_policy),
        of_replicas=max(REPLICA_FLOORS[precision], FACTOR * of_replicas),
        is_measured=True,
    )


def content_problems(sent: Mapping[str, str], before: Mapping[str, str], answer: Answer) -> str | None:
    """What an engine holds otherwise than it was sent, first weight first; None: nothing.

    Args:
        before: fingerprints of the version before.
    """
    expected = {**sent, **{alias: sent.get(name, "nothing") for alias, name in answer.aliases.items()}}
    wrong = [name for name, print_ in expected.items() if answer.fingerprints.get(name) != print_]
    if not wrong:
        return None
    by_print: dict[str, list[str]] = {}
    for name, print_ in sent.items():
        by_print.setdefault(print_, []).append(name)
    lines = [_explain(name, answer.fingerprints.get(name), expected[name], before, by_print) for name in wrong[:SHOWN]]
    return f"{len(wrong)} of {len(expected)} weights are not what was sent: {name_some(lines, limit=SHOWN)}" + (
        f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    )


def _explain(
    name: str, found: str | None, expected: str, before: Mapping[str, str], sent: Mapping[str, Sequence[str]]
) -> str:
    if found is None:
        return f"{name} is missing"
    if found == before.get(name):
        return f"{name} is that of the version before"
    others = [other for other in sent.get(found, ()) if other != name]
    if others:
        return f"{name} has the values of {others[0]}"
    return f"{name} has other values (expected {expected}, got {found})"
