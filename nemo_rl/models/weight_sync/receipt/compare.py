"""Comparisons of a receipt: fingerprints with fingerprints, log-probabilities with log-probabilities. Pure.

Called by `Receipts`. Rows of one prompt are a family, and the worst one counts. A router that chooses otherwise for one
token, where two experts are nearly equal, changes all tokens after it: so of a model with experts the median of all
tokens counts, which no family decides alone, while those whose prompts may be cached are more than half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from nemo_rl.errors import name_some
from nemo_rl.models.weight_sync.receipt.probe import Probe
from nemo_rl.models.weight_sync.receipt.records import Answer, Tolerance

__all__ = ["behaviour_problems", "content_problems", "gap", "measured", "scoring_problems"]

FLOORS: Mapping[str, float] = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""No measured tolerance is below: what the order of sums makes of one precision."""
REPLICA_FLOORS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
CEILINGS: Mapping[str, float] = {"float32": 1e-2, "bfloat16": 0.4, "float16": 0.1}
"""More than this at the first sync is no matter of precision."""
FACTOR = 8.0
"""Of the first difference: it grows as a policy becomes more certain."""
SHOWN = 3
"""Weights that a message explains."""


def gap(
    ours: Sequence[float], theirs: Sequence[float], families: Iterable[Sequence[int]], *, has_experts: bool
) -> float:
    """Mean difference of the worst family; of a model with experts the median of all tokens.

    Example:
        >>> gap([0.0, 0.0, 0.0], [1.0, 0.5, 0.1], [(0,), (1, 2)], has_experts=False)
        1.0
        >>> gap([0.0, 0.0, 0.0], [1.0, 0.5, 0.1], [(0,), (1, 2)], has_experts=True)
        0.5
    """
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    # NaN is never below a tolerance.
    if any(math.isnan(value) for value in apart):
        return math.nan
    if has_experts:
        return median(apart)
    return max(math.fsum(apart[place] for place in family) / len(family) for family in families)


def measured(apart: Tolerance, *, precision: str) -> Tolerance:
    """The tolerance that the differences of a first sync give: no more than precision explains.

    Example:
        >>> measured(Tolerance(of_policy=0.02, of_replicas=0.0), precision="bfloat16")
        Tolerance(of_policy=0.16, of_replicas=0.01)
    """
    ceiling = CEILINGS[precision]

    def limit(value: float, floor: float) -> float:
        return max(floor, min(FACTOR * value, ceiling)) if math.isfinite(value) else ceiling

    return Tolerance(
        of_policy=limit(apart.of_policy, FLOORS[precision]),
        of_replicas=limit(apart.of_replicas, REPLICA_FLOORS[precision]),
    )


def scoring_problems(answers: Mapping[int, Answer], version: int, probe: Probe) -> dict[int, str]:
    """Engine -> why what it says of the probe counts for nothing."""
    problems = {}
    for engine, answer in answers.items():
        firsts = zip(answer.cached_tokens, probe.is_first, strict=True) if answer.cached_tokens else ()
        stale = sum(count for count, is_first in firsts if is_first)
        if answer.version != version:
            problems[engine] = f"it scored fixed rows with weights of version {answer.version}"
        elif answer.token_ids != probe.token_ids:
            problems[engine] = "it draws tokens where GenerationRequest.forced gives them"
        elif stale:
            problems[engine] = f"its prefix cache has kept {stale} tokens of prompts that other weights have computed"
    return problems


def behaviour_problems(
    from_policy: Mapping[int, float], from_first: Mapping[int, float], limits: Tolerance, *, first: int
) -> dict[int, str]:
    """Engine -> how far it is from the policy, or from engine `first`, where that is too far."""
    problems = {
        engine: f"its log-probabilities are {value:.3g} from the policy's, more than "
        f"{limits.of_policy:.3g}; the weights have come, so what it makes of them, or keeps of old ones, is wrong"
        for engine, value in from_policy.items()
        if not value <= limits.of_policy
    }
    return problems | {
        engine: f"its log-probabilities are {value:.3g} from those of engine {first}, more than "
        f"{limits.of_replicas:.3g}"
        for engine, value in from_first.items()
        if engine not in problems and not value <= limits.of_replicas
    }


def content_problems(sent: Mapping[str, str], before: Mapping[str, str], answer: Answer) -> str | None:
    """What an engine holds otherwise than it was sent, first weight first; None: nothing.

    Args:
        before: fingerprints of the version before.
    """
    expected, before = ({**prints, **_under_aliases(prints, answer)} for prints in (sent, before))
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


def _under_aliases(prints: Mapping[str, str], answer: Answer) -> dict[str, str]:
    """What tied weights must hold that are not sent themselves."""
    return {alias: prints[name] for alias, name in answer.aliases.items() if name in prints}


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
