"""`Finding`: one thing that is wrong, and which verdict follows from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.diagnostics.verdict import Verdict

__all__ = ["Finding", "gravest"]

_GRAVITY = (Verdict.CORRUPT, Verdict.UNSUPPORTED, Verdict.VACUOUS, Verdict.MISMATCH, Verdict.INCOMPLETE)
"""Of damaged bytes nothing follows. A difference beyond its limit is one, whatever else is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Why two recordings cannot be said to agree."""

    verdict: Verdict
    text: str


def gravest(findings: Sequence[Finding]) -> Finding | None:
    """The first of those of the gravest kind; None where nothing is wrong."""
    return min(findings, key=lambda finding: _GRAVITY.index(finding.verdict), default=None)
